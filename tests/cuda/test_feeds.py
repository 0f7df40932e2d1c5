"""Every feed against the files, by itself."""

import ctypes
import gc

import numpy as np
import pytest
import torch

from memload import FeedError, FormatError, Index, Loader, MemmapDataset
from memload.feeds import copies
from memload.feeds.choice import choose_feed
from memload.feeds.copies import RowCopies
from memload.feeds.feed import SampleArray
from memload.storage.shards import Shards

DEVICE = torch.device("cuda", 0)
#: Feeds, and how many bytes each may hold.
FEEDS = {
    "resident": ("resident", None),
    "dma": ("dma", None),
    "some rows held": ("disk", 20_000),
    "no row held": ("disk", 0),
    "pinned": ("pinned", None),
}

every_feed = pytest.mark.parametrize("feed_name", FEEDS)
resident = pytest.mark.parametrize("feed_name", ["resident"])


@pytest.fixture
def make_feed(feed_name):
    """A function that creates the feed for some shards. It is closed at the end."""
    feeds = []

    def make(shards, row=None, columns=()):
        samples = SampleArray(
            shards, np.arange(len(shards)) if row is None else np.array(row), columns
        )
        name, cache_bytes = FEEDS[feed_name]
        feed, _ = choose_feed(name, [samples], DEVICE, cache_bytes=cache_bytes)
        feeds.append(feed)
        return feed

    with torch.cuda.stream(torch.cuda.Stream()):
        yield make
    while feeds:
        feeds.pop().close()


def fetch(feed, samples):
    """Fetch samples as a chunk of two batches, which are begun before the first is fetched."""
    prepared, half = feed.prepare(samples), max(1, len(samples) // 2)
    begun = [prepared.begin(0, half)]
    if half < len(samples):
        begun.append(prepared.begin(half, len(samples)))
    batches = zip(*(rows.fetch() for rows in begun), strict=True)
    return [torch.cat(tensors) for tensors in batches]


def on_host(tensor):
    assert tensor.is_cuda
    return tensor.cpu().numpy()


def stored(shards):
    return np.concatenate(shards.maps)


@every_feed
@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize("rows", [(40,), (17, 13, 10)], ids=["one shard", "three shards"])
@pytest.mark.parametrize(
    ("shape", "descr"),
    [
        ((4, 6, 3), "|u1"),
        ((3, 5, 1), "|u1"),
        ((31, 33, 3), "|u1"),
        ((5, 7, 3), "<f4"),
        ((2, 3, 1), "<u2"),
        ((3, 5, 1), "<i2"),
        ((5, 7, 3), "<i4"),
    ],
    ids=str,
)
def test_samples_are_as_they_are_stored(
    make_feed, make_dataset, rows, shape, descr, wait, wait_until_held
):
    shards = Shards(make_dataset(rows=rows, shape=shape, descr=descr))
    row = np.random.default_rng(1).integers(0, 40, 100)
    columns = (
        np.arange(100) * 3,
        np.random.default_rng(2).random((100, 2, 3)).astype(np.float32),
        np.arange(100, dtype=np.uint16),
        np.arange(100) % 3 == 0,
    )
    feed = make_feed(shards, row, columns)
    if wait:
        wait_until_held(feed)
    rng = np.random.default_rng(3)
    for count in (1, 7, 100, 300, 2):
        samples = rng.integers(0, 100, count)
        pixels, *values = fetch(feed, samples)
        assert pixels.is_contiguous()
        np.testing.assert_array_equal(on_host(pixels), stored(shards)[row[samples]])
        for value, column in zip(values, columns, strict=True):
            np.testing.assert_array_equal(on_host(value), column[samples])


#: Functions of the driver that copy rows, and whether they take a whole batch.
FUNCTIONS = {
    "cuMemcpyBatchAsync_v2": True,
    "cuMemcpyBatchAsync": True,
    "cuMemcpyHtoDAsync_v2": False,
}

every_function = pytest.mark.parametrize("function", FUNCTIONS)


def use(copy_rows, function):
    """Let rows be copied by a function of the driver. Skips the test if it has not got it."""
    driver = ctypes.CDLL("libcuda.so.1")
    if not hasattr(driver, function):
        pytest.skip(f"the driver has no {function}")
    copy_rows.is_batched = FUNCTIONS[function]
    if copy_rows.is_batched:
        copy_rows._copy_all = getattr(driver, function)
        is_newer = function.endswith("_v2")
        copy_rows._failed = () if is_newer else (ctypes.byref(ctypes.c_size_t()),)


@every_function
@pytest.mark.parametrize("row_bytes", [1, 1000, 4096, 150_528])
def test_rows_are_copied_by_each_function_of_the_driver(function, row_bytes):
    copy_rows = RowCopies(DEVICE, row_bytes)
    use(copy_rows, function)
    rng = np.random.default_rng(0)
    values = rng.integers(0, 256, (50, row_bytes)).astype(np.uint8)
    source = torch.from_numpy(values).pin_memory()
    order = rng.integers(0, 50, 80)
    out = torch.zeros(80, row_bytes, dtype=torch.uint8, device=DEVICE)
    torch.cuda.synchronize()
    in_window = np.full(80, 1 << 30)
    in_window[::3] = rng.integers(1, row_bytes + 1, len(in_window[::3]))  # in two parts
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(5_000_000)
        copy_rows(source.data_ptr() + order * row_bytes, in_window, out)
        np.testing.assert_array_equal(on_host(out), values[order])


@every_function
@pytest.mark.parametrize("feed_name", ["dma", "some rows held"])
def test_a_feed_copies_by_each_function_of_the_driver(
    make_feed, make_dataset, window_bytes, wait_until_held, function
):
    window_bytes(4096)
    shards = Shards(make_dataset(rows=(50, 30), shape=(20, 31, 3)))  # rows in two windows
    feed = make_feed(shards)
    use(feed._copy_rows, function)
    for _ in range(2):
        order = np.random.default_rng(0).permutation(80)
        np.testing.assert_array_equal(on_host(fetch(feed, order)[0]), stored(shards)[order])
        wait_until_held(feed)


@pytest.mark.parametrize("feed_name", ["dma"])
def test_page_locked_memory_is_counted_only_until_rows_are_held(
    make_feed, make_dataset, may_hold, wait_until_held, registered_addresses
):
    shards = Shards(make_dataset(rows=(50,), shape=(20, 31, 3)))
    feed = make_feed(shards)
    np.testing.assert_array_equal(on_host(fetch(feed, np.arange(50))[0]), stored(shards))
    assert (feed.counts().hits, len(registered_addresses)) == (0, 0)
    may_hold.set()
    wait_until_held(feed)
    np.testing.assert_array_equal(on_host(fetch(feed, np.arange(50))[0]), stored(shards))
    assert (feed.counts().hits, len(registered_addresses)) == (50, 1)


@every_feed
def test_batches_belong_to_the_caller_and_outlive_the_feed(make_feed, make_dataset):
    shards = Shards(make_dataset(rows=(12,)))
    feed = make_feed(shards)
    batches = [fetch(feed, np.array([row]))[0] for row in range(12)]
    fetch(feed, np.array([3]))[0].fill_(0)
    feed.close()
    np.testing.assert_array_equal(np.concatenate([on_host(one) for one in batches]), stored(shards))


@every_feed
def test_a_subset_of_scattered_and_repeated_rows(
    make_feed, make_dataset, monkeypatch, window_bytes, wait_until_held
):
    window_bytes(4096)
    monkeypatch.setattr("memload.feeds.resident._STAGING_BYTES", 5000)
    shards = Shards(make_dataset(rows=(50, 30), shape=(20, 31, 3)))
    for row in ([77, 3, 3, 51, 4], [79], np.arange(80)[::-1]):
        row = np.array(row, np.int64)
        feed = make_feed(shards, row, [np.arange(len(row)) * 2])
        wait_until_held(feed)
        pixels, values = fetch(feed, np.arange(len(row))[::-1].copy())
        np.testing.assert_array_equal(on_host(pixels), stored(shards)[row[::-1]])
        assert values.tolist() == (np.arange(len(row)) * 2)[::-1].tolist()


def test_only_the_rows_of_a_subset_are_copied_to_the_device(make_dataset):
    index = make_dataset(rows=(60, 60), shape=(128, 128, 3))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(DEVICE)
    loader = Loader(MemmapDataset(index.path).subset(range(0, 120, 40)), 3, feed="resident")
    (batch,) = list(loader)
    expected = torch.from_numpy(stored(Shards(index))[::40])
    assert torch.equal(batch.images.permute(0, 2, 3, 1).cpu(), expected)
    del batch
    torch.cuda.synchronize()
    taken = torch.cuda.memory_allocated(DEVICE) - before
    assert 3 * 128 * 128 * 3 <= taken < 6 * 128 * 128 * 3


@resident
def test_too_little_memory_on_the_device_is_a_reason(make_feed, make_dataset, monkeypatch):
    def full(*arguments, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    shards = Shards(make_dataset(rows=(5, 7)))
    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(FeedError, match="feed='resident' needs 864 bytes of memory on cuda:0"):
        make_feed(shards)


def test_torch_works_on_after_a_refusal():
    with pytest.raises(FeedError, match="CUDA cannot page-lock 4,096 bytes"):
        copies.register(4096, 4096)
    assert torch.ones(3, device=DEVICE).sum().item() == 3


@resident
@pytest.mark.parametrize("row", [range(40), [5, 39, 5]], ids=["all rows", "some rows"])
def test_feeds_of_the_same_rows_hold_them_on_the_device_once(make_dataset, row, feed_name):
    path = make_dataset(rows=(40,), shape=(256, 256, 3)).path

    def make():
        samples = SampleArray(Shards(Index.read(path)), np.array(row))
        return choose_feed(feed_name, [samples], DEVICE)[0]

    one = make()
    before = torch.cuda.memory_allocated(DEVICE)
    other = make()
    assert torch.cuda.memory_allocated(DEVICE) == before
    del one, other
    gc.collect()
    assert torch.cuda.memory_allocated(DEVICE) <= before - len(set(row)) * 256 * 256 * 3


@every_feed
def test_a_file_that_is_replaced_later_is_read_on(make_feed, make_dataset, wait_until_held):
    shards = Shards(make_dataset(rows=(12,)))
    before = shards.maps[0].copy()
    feed = make_feed(shards)
    wait_until_held(feed)
    make_dataset(name="other.bin", rows=(12,), seed=9)
    shards.paths[0].with_name("other.bin").replace(shards.paths[0])
    np.testing.assert_array_equal(on_host(fetch(feed, np.arange(12))[0]), before)


@pytest.mark.parametrize("feed_name", [name for name in FEEDS if name != "resident"])
def test_a_file_that_is_truncated_later_is_an_error(make_feed, make_dataset, wait_until_held):
    shards = Shards(make_dataset(rows=(12, 12), shape=(50, 50, 3)))
    feed = make_feed(shards)
    wait_until_held(feed)
    fetch(feed, np.arange(24))
    with shards.paths[1].open("r+b") as file:
        file.truncate(10_000)
    with pytest.raises(FormatError, match="truncated"):
        fetch(feed, np.arange(24))
