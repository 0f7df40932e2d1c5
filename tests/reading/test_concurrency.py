"""Many readers at once."""

import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from memload import Loader, MemmapDataset

ROWS = 61


def epoch_of(loader):
    """Return the checksum of the pixels of every sample by its number."""
    read = {}
    for images, index in loader:
        for image, number in zip(images.permute(0, 2, 3, 1), index.tolist(), strict=True):
            assert number not in read
            read[number] = zlib.crc32(image.contiguous().numpy())
    return read


def test_many_readers_of_one_data_set_do_not_disturb_each_other(make_dataset):
    index = make_dataset(rows=(40, 21), shape=(31, 33, 3))
    expected = dict(enumerate(index.crc32["image"].tolist()))
    shared = MemmapDataset(index.path, columns=["index"])
    loader = Loader(shared, 8, shuffle=True, num_threads=1)

    def reader(number):
        dataset = shared if number % 2 else MemmapDataset(index.path, columns=["index"])
        own = Loader(dataset, 7, shuffle=True, seed=number, num_threads=number % 3)
        assert epoch_of(own) == epoch_of(loader) == expected
        for sample in np.random.default_rng(number).integers(0, ROWS, 100).tolist():
            image, found = dataset[sample]
            assert found == sample
            assert torch.equal(dataset.gather([sample, 0])[0], image.permute(1, 2, 0))

    with ThreadPoolExecutor(8) as readers:
        list(readers.map(reader, range(16), timeout=100))
