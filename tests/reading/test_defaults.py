"""Nothing depends on the default device and dtype that a script gives torch."""

import numpy as np
import torch

from memload import (
    CudaPrefetcher,
    Loader,
    MemmapDataset,
    ThreadPrefetcher,
    fast_collate,
    transforms,
)
from memload.reading.streams import tensors_of

COLUMNS = {
    "label": np.arange(23) % 3,
    "age": np.arange(23) + 0.5,
    "eyes": np.random.default_rng(0).uniform(0, 4, (23, 2, 2)).astype(np.float32),
}
TRAIN = transforms.Compose([transforms.RandomCrop(4, 1), transforms.RandomHorizontalFlip()])


class Images:
    """A data set of batches by number."""

    def __len__(self):
        return 4

    def __getitem__(self, number):
        return torch.arange(192, dtype=torch.uint8, device="cpu").view(1, 3, 8, 8)


def everything(path):
    """Return what each of the public classes gives."""
    dataset = MemmapDataset(path)
    samples = [dataset[3], dataset.subset(np.arange(23) == 1)[0], dataset.where(label=2)[-1]]
    found = [samples, fast_collate(samples), dataset.gather([3, 1, 8]), dataset.labels]
    found += [fast_collate([np.ones((2, 3, 3), np.uint8)] * 2), dataset.columns]
    for transform in (None, transforms.evaluate(4), TRAIN):
        for num_threads in (0, 2):
            options = {"transform": transform, "shuffle": True, "num_threads": num_threads}
            options |= {"columns": ["index", *COLUMNS], "device": "cpu"}
            loader = Loader(path, 5, **options)
            found += [list(loader), list(ThreadPrefetcher(loader))]
            found += Loader(path, 5, **options, static_buffers=True, drop_last=True)
        found += CudaPrefetcher(loader, transform=transform, device="cpu")
        found += CudaPrefetcher(Images(), transform=transform, shuffle=True, device="cpu")
    return found


def test_nothing_depends_on_torchs_defaults(make_dataset):
    path = make_dataset(rows=(9, 8, 6), columns=COLUMNS, points=("eyes",)).path
    expected = everything(path)
    torch.set_default_device("meta")  # where tensors have no values
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = everything(path)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    for one, other in zip(tensors_of(found), tensors_of(expected), strict=True):
        assert (one.device.type, one.dtype) == ("cpu", other.dtype)
        assert torch.equal(one, other)
