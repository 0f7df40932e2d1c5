"""Every feed against the files, by itself."""

import ctypes

import numpy as np
import pytest
import torch

from memload import FeedError, FormatError, Loader, MemmapDataset
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
#: Element types and shapes of rows, from 1 byte to some kilobytes.
ROWS = {
    "a": ("|i1", (1,)),
    "b": ("|b1", (7,)),
    "c": ("<i8", (1,)),
    "d": ("<f8", (5, 3)),
    "e": ("<f2", (3,)),
    "f": ("<u2", (2, 3, 4, 5)),
    "g": ("<i4", (700,)),
    "h": ("<f4", (2,)),
}

every_feed = pytest.mark.parametrize("feed_name", FEEDS)


@pytest.fixture
def make_feed(feed_name):
    """A function that creates the feed for some shards. It is closed at the end."""
    feeds = []

    def make(shards, row=None):
        row = np.arange(len(shards)) if row is None else np.array(row)
        name, cache_bytes = FEEDS[feed_name]
        array = SampleArray(shards, row)
        feed, _ = choose_feed(name, [array], DEVICE, cache_bytes=cache_bytes)
        feeds.append(feed)
        return feed

    with torch.cuda.stream(torch.cuda.Stream()):
        yield make
    while feeds:
        feeds.pop().close()


def fetch(feed, samples):
    """Fetch samples as a chunk of two batches, which are begun before the first is fetched."""
    begin, half = feed.prepare(samples), max(1, len(samples) // 2)
    begun = [begin(0, half)]
    if half < len(samples):
        begun.append(begin(half, len(samples)))
    batches = zip(*(rows.fetch() for rows in begun), strict=True)
    return [torch.cat(tensors) for tensors in batches]


def on_host(tensor):
    assert tensor.is_cuda
    return tensor.cpu().numpy()


def stored(shards):
    return np.concatenate(shards.maps)


@every_feed
@pytest.mark.parametrize(
    ("shape", "descr"),
    [((20, 31, 3), "|u1"), ((3, 5, 1), "<i2"), ((5, 7, 3), "<f4")],
    ids=str,
)
def test_samples_are_as_they_are_stored_and_batches_outlive_the_feed(
    make_feed, make_dataset, shape, descr, wait_until_held, window_bytes, monkeypatch
):
    window_bytes(4096)
    monkeypatch.setattr("memload.feeds.resident._STAGING_BYTES", 5000)
    shards = Shards(make_dataset(rows=(17, 13, 50), shape=shape, descr=descr))
    rng = np.random.default_rng(1)
    for row in (rng.integers(0, 80, 100), np.arange(80)[::-1], np.array([79])):
        feed = make_feed(shards, row)
        for count in (1, 7, 300):
            samples = rng.integers(0, len(row), count)
            (pixels,) = fetch(feed, samples)
            assert pixels.is_contiguous()
            np.testing.assert_array_equal(on_host(pixels), stored(shards)[row[samples]])
            wait_until_held(feed)
        batches = [fetch(feed, np.array([sample]))[0] for sample in range(len(row))]
        feed.close()
        found = np.concatenate([on_host(pixels) for pixels in batches])
        np.testing.assert_array_equal(found, stored(shards)[row])


@every_feed
def test_any_element_type_and_shape(make_feed, make_dataset, add_array, wait_until_held):
    index, values = make_dataset(rows=(61,)), {}
    for number, (name, (descr, shape)) in enumerate(ROWS.items()):
        rng = np.random.default_rng(number)
        values[name] = rng.integers(0, 2 if descr == "|b1" else 120, (61, *shape)).astype(descr)
        index = add_array(index, name, values[name], "npy" if number % 2 else "array")
    samples = np.random.default_rng(0).integers(0, 61, 100)
    for name, expected in values.items():
        feed = make_feed(Shards(index, name))
        for _ in range(2):
            np.testing.assert_array_equal(on_host(fetch(feed, samples)[0]), expected[samples])
            wait_until_held(feed)


every_function = pytest.mark.parametrize("function", copies.FUNCTIONS)


@pytest.fixture
def use(monkeypatch):
    """A function that lets feeds copy rows by a function of the driver, or skips the test."""

    def use_function(function):
        if not hasattr(ctypes.CDLL("libcuda.so.1"), function):
            pytest.skip(f"the driver has no {function}")
        monkeypatch.setattr(copies, "FUNCTIONS", [function])

    return use_function


@every_function
@pytest.mark.parametrize("row_bytes", [1, 4096, 150_528])
def test_rows_are_copied_by_each_function_of_the_driver(function, row_bytes, use):
    use(function)
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
        RowCopies(DEVICE)(source.data_ptr() + order * row_bytes, in_window, out)
        np.testing.assert_array_equal(on_host(out), values[order])


@every_function
@pytest.mark.parametrize("feed_name", ["dma", "some rows held"])
def test_a_feed_copies_by_each_function_of_the_driver(
    make_feed, make_dataset, window_bytes, wait_until_held, function, use
):
    window_bytes(4096)
    use(function)
    shards = Shards(make_dataset(rows=(50, 30), shape=(20, 31, 3)))  # rows in two windows
    feed = make_feed(shards)
    for _ in range(2):
        order = np.random.default_rng(0).permutation(80)
        np.testing.assert_array_equal(on_host(fetch(feed, order)[0]), stored(shards)[order])
        wait_until_held(feed)


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


def test_torch_works_on_after_pages_could_not_be_registered():
    with pytest.raises(FeedError, match="4,096 bytes of page cache cannot be registered"):
        copies.register(4096, 4096)
    assert torch.ones(3, device=DEVICE).sum().item() == 3


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
    with pytest.raises(FormatError, match="truncated") as caught:
        fetch(feed, np.arange(24))
    assert caught.value.path == str(shards.paths[1])
    del caught
