import gc
import multiprocessing
import threading
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from memload import CudaPrefetcher


def wait_until(what):
    end = time.monotonic() + 30
    while not what():
        assert time.monotonic() < end
        time.sleep(0.01)


def batches_of(count, pinned=True):
    for number in range(count):
        images = torch.full((8, 3, 64, 64), number, dtype=torch.uint8)
        labels = torch.full((8,), number)
        yield (images.pin_memory(), labels.pin_memory()) if pinned else (images, labels)


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("own_stream", [False, True])
def test_no_batch_is_overwritten_while_the_consumer_is_behind(pinned, own_stream):
    stream = torch.cuda.Stream() if own_stream else torch.cuda.default_stream()
    seen = []
    with torch.cuda.stream(stream):
        for images, labels in CudaPrefetcher(batches_of(60, pinned)):
            assert images.is_cuda
            torch.cuda._sleep(3_000_000)
            seen.append(torch.stack([images.double().mean(), labels.double().mean()]))
    torch.cuda.synchronize()
    assert torch.stack(seen).tolist() == [[number, number] for number in range(60)]


def test_the_transform_runs_on_the_side_stream():
    streams = set()

    def normalise(images):
        streams.add(torch.cuda.current_stream().cuda_stream)
        return (images.float() - 1) / 2

    result = [images.mean() for images, _ in CudaPrefetcher(batches_of(5), transform=normalise)]
    assert torch.stack(result).tolist() == [(number - 1) / 2 for number in range(5)]
    assert len(streams) == 1
    assert torch.cuda.current_stream().cuda_stream not in streams


def test_nested_batches_of_workers_are_moved():
    data = TensorDataset(torch.arange(10), torch.arange(10) * 2)
    loader = DataLoader(data, 4, pin_memory=True, num_workers=1, multiprocessing_context="spawn")
    prefetcher = CudaPrefetcher(loader)
    assert [(one.tolist(), other.is_cuda) for one, other in prefetcher] == [
        ([0, 1, 2, 3], True),
        ([4, 5, 6, 7], True),
        ([8, 9], True),
    ]
    images, _ = prefetcher.next()
    assert images.is_cuda
    del prefetcher, loader
    gc.collect()  # the DataLoader's workers and their threads, which end a little later
    wait_until(lambda: not multiprocessing.active_children())
    wait_until(lambda: not any("QueueFeeder" in thread.name for thread in threading.enumerate()))


class MadeOnTheDevice(Dataset):
    """Samples computed on the device, in the async-dataset idiom."""

    def __len__(self):
        return 30

    def __getitem__(self, number):
        sample = torch.full((3, 256, 256), float(number), device="cuda")
        for _ in range(5):
            sample = sample + 1
        return sample


def test_samples_made_on_the_device_come_whole():
    prefetcher = CudaPrefetcher(MadeOnTheDevice(), shuffle=True, seed=1)
    seen = []
    for sample in prefetcher:
        torch.cuda._sleep(2_000_000)
        seen.append(torch.stack([sample.min(), sample.max()]))
    values = torch.stack(seen).cpu()
    assert torch.equal(values[:, 0], values[:, 1])
    assert sorted(values[:, 0].tolist()) == [number + 5.0 for number in range(30)]


def test_early_exits_leave_no_memory():
    """The fixture `registered_addresses` looks for memory that is left."""
    for _ in range(20):
        next(iter(CudaPrefetcher(batches_of(9))))


def test_an_exception_arrives_behind_the_batches_before_it():
    def failing():
        yield from batches_of(3)
        raise KeyError("the cause")

    iterator = iter(CudaPrefetcher(failing()))
    assert [int(next(iterator)[1][0]) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyError, match="the cause"):
        next(iterator)
