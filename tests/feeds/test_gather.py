"""The feeds that copy rows on threads, and memory that is used again."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from memload import FormatError, Loader, fast_collate
from memload.feeds.gather import BufferPool, GatherFeed

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def open_samples(make_dataset, samples_of):
    """A function that opens some of twelve rows in three shards, in another order, with columns."""
    index = make_dataset(rows=(5, 4, 3))
    columns = [np.arange(5) * 2, np.ones((5, 2), np.float32), np.arange(5, dtype=np.uint16)]
    return lambda: samples_of(index, row=[3, 3, 11, 0, 7], columns=columns)


def test_a_batch_has_the_rows_and_columns_of_its_samples(open_samples):
    samples = open_samples()
    expected = np.concatenate(samples.shards.maps)[samples.row]
    feed = GatherFeed(samples, CPU, keep=1)
    chunk = np.array([2, 0, 3, 2])
    prepared = feed.prepare(chunk)
    for start, stop in ((1, 3), (0, 4), (3, 4), (2, 2)):
        pending = prepared.begin(start, stop)
        assert pending.is_ready()
        pixels, *columns = pending.fetch()
        np.testing.assert_array_equal(pixels.numpy(), expected[chunk[start:stop]])
        for column, stored in zip(columns, samples.columns, strict=True):
            np.testing.assert_array_equal(column.numpy(), stored[chunk[start:stop]])
    assert (feed.name, feed.counts()) == ("cpu", None)
    feed.close()


def test_batches_own_their_memory(open_samples):
    samples = open_samples()
    feed = GatherFeed(samples, CPU, keep=3)
    before = [column.copy() for column in samples.columns]
    prepared = feed.prepare(np.arange(5))
    batches = [prepared.begin(start, start + 2).fetch() for start in (0, 2)]
    other = prepared.begin(0, 2).fetch()
    for tensor in other:
        tensor.fill_(0)
    feed.close()
    for column, stored in zip(samples.columns, before, strict=True):
        np.testing.assert_array_equal(column, stored)
    stored = np.concatenate(samples.shards.maps)[samples.row]
    np.testing.assert_array_equal(batches[0][0].numpy(), stored[:2])
    np.testing.assert_array_equal(batches[1][0].numpy(), stored[2:4])
    # No batch keeps the columns of the whole chunk.
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in batches[0][1:])


def test_the_memory_of_a_batch_is_used_again_once_nothing_refers_to_it(open_samples):
    samples = open_samples()
    feed = GatherFeed(samples, CPU, keep=1)
    prepared = feed.prepare(np.arange(5))
    (pixels, *_) = prepared.begin(0, 5).fetch()
    address = pixels.data_ptr()
    view = pixels[4:]
    del pixels, _
    assert prepared.begin(0, 5).fetch()[0].data_ptr() != address
    del view
    assert prepared.begin(0, 5).fetch()[0].data_ptr() == address


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_several_threads_fetch_at_once(device, open_samples, fetch, cuda):
    samples = open_samples()
    feed = GatherFeed(samples, device, keep=4)
    assert feed.name == ("cpu" if device == CPU else "pinned")
    stored = np.concatenate(samples.shards.maps)[samples.row]

    def work(seed):
        for _ in range(50):
            chosen = np.random.default_rng(seed).integers(0, 5, 3)
            pixels, number, *_ = fetch(feed, chosen)
            np.testing.assert_array_equal(pixels.numpy(), stored[chosen])
            assert number.tolist() == (chosen * 2).tolist()
        return True

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(4)))
    feed.close()


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_a_file_truncated_between_batches_is_an_error(device, open_samples, fetch, cuda):
    samples = open_samples()
    feed = GatherFeed(samples, device, keep=1)
    fetch(feed, range(5))
    os.truncate(samples.shards.paths[2], 4096)
    with pytest.raises(FormatError, match="was truncated while it was open"):
        fetch(feed, range(5))
    fetch(feed, [0, 1, 3])
    feed.close()


# Memory that is used again.


def test_memory_comes_back_when_its_last_reference_dies_and_not_before():
    pool = BufferPool(2)
    first = pool.take(100)
    address = first.data_ptr()
    view = first.view(10, 10)[3:].permute(1, 0)
    del first
    assert pool.take(100).data_ptr() != address
    del view
    assert address in {taken.data_ptr() for taken in [pool.take(100), pool.take(100)]}


def test_an_array_of_a_tensor_keeps_its_memory():
    pool = BufferPool(2)
    array = pool.take(100).numpy()[10:]
    array[:] = 7
    others = [pool.take(100).fill_(1) for _ in range(4)]
    assert (array == 7).all()
    assert len(others) == 4


def test_no_more_unused_buffers_are_kept_than_told():
    pool = BufferPool(3)
    taken = [pool.take(64) for _ in range(10)]
    addresses = {tensor.data_ptr() for tensor in taken}
    others = [torch.empty(64, dtype=torch.uint8) for _ in range(10)]
    del taken
    again = [pool.take(64) for _ in range(3)]
    assert {tensor.data_ptr() for tensor in again} <= addresses
    assert len(pool._free) == 0
    assert len(others) == 10


def test_a_buffer_serves_sizes_down_to_half_of_it():
    pool = BufferPool(2)
    address = pool.take(100).data_ptr()
    for size, same in [(50, True), (49, False), (100, True), (101, False)]:
        tensor = pool.take(size)
        assert (tensor.dtype, tensor.shape) == (torch.uint8, (size,))
        assert (tensor.data_ptr() == address) == same
        del tensor


def test_threads_never_get_the_same_memory():
    pool, wrong = BufferPool(3), []

    def work(value):
        for _ in range(300):
            tensor = pool.take(512).fill_(value)
            if not (tensor == value).all():
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# Settings of torch that change what its functions return.


@pytest.mark.parametrize("feed", ["cpu", "pinned", "dma", "disk", "resident"])
def test_torchs_defaults_change_nothing(feed, make_dataset, cuda):
    columns = {"label": np.arange(9) % 3, "weight": np.linspace(0, 1, 9, dtype=np.float32)}
    path = make_dataset(rows=(5, 4), columns=columns).path
    device, options = ("cpu" if feed == "cpu" else "cuda"), {"cache_bytes": 4096 * (feed == "disk")}
    loader = Loader(path, 4, feed=feed, device=device, **options if feed == "disk" else {})
    before = [[tensor.clone() for tensor in batch] for batch in loader]
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    try:
        loader = Loader(path, 4, feed=feed, device=device, **options if feed == "disk" else {})
        after = [list(batch) for batch in loader]
        collated = fast_collate([np.ones((4, 6, 3), np.uint8)] * 2)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert collated.device == CPU
    for one, other in zip(before, after, strict=True):
        for expected, found in zip(one, other, strict=True):
            assert (found.dtype, found.device) == (expected.dtype, CPU)
            assert torch.equal(found, expected)


def test_samples_know_their_rows_and_what_they_use(make_dataset, samples_of):
    index = make_dataset(rows=(5, 4), shape=(2, 3, 1), descr="<u2")
    samples = samples_of(index, row=[8, 2, 2, 0])
    assert samples.used_rows.tolist() == [0, 2, 8]
    assert (samples.row_bytes, samples.dtype) == (12, torch.uint16)
    ascending = samples_of(index, row=[1, 4, 8])
    assert ascending.used_rows is ascending.row  # takes no memory
    assert samples_of(index, row=[]).used_rows.size == 0
