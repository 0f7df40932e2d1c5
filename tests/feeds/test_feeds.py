"""What all feeds promise. The device ``cuda:0`` is ordinary memory here."""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from memload import FormatError, Loader, MemmapDataset, fast_collate
from tests.feeds.fake_cuda import fetch, open_array

#: Feeds, and how many bytes of the files each may hold.
FEEDS = {"cpu": None, "pinned": None, "dma": None, "disk": 50_000, "resident": None}
every_feed = pytest.mark.parametrize("name", FEEDS)


def loader_of(path, batch_size, name, **options):
    """Return a Loader with a feed."""
    if name == "disk":
        options["cache_bytes"] = FEEDS[name]
    return Loader(path, batch_size, feed=name, device="cpu" if name == "cpu" else "cuda", **options)


@every_feed
@pytest.mark.parametrize(
    "row", [range(30), range(29, -1, -1), [3, 3, 25, 0], [7]], ids=["all", "back", "some", "one"]
)
def test_batches_have_the_rows_of_their_samples_and_belong_to_the_caller(
    name, row, index, pixels, cuda, monkeypatch
):
    monkeypatch.setattr("memload.feeds.resident._STAGING_BYTES", 7000)  # two rows and a half
    row, rng = np.array(row), np.random.default_rng(0)
    feed = cuda.feed(open_array(index, row=row), FEEDS[name], name=name)
    assert (feed.name, feed.counts() is None) == (name, name not in ("dma", "disk"))
    for _ in range(2):
        chunk = rng.integers(0, len(row), 40)
        begin, batches = feed.prepare(chunk), []
        for start, stop in ((0, 1), (1, 8), (8, 40)):
            pending = begin(start, stop)
            batches.append((chunk[start:stop], pending.fetch()))
            assert pending.is_ready()
        for samples, (tensor,) in batches:
            np.testing.assert_array_equal(tensor.numpy(), pixels[row[samples]])
            tensor.fill_(0)
    feed.close()


@every_feed
def test_several_threads_fetch_at_once(name, index, pixels, cuda):
    feed = cuda.feed(open_array(index), FEEDS[name], name=name)

    def work(seed):
        rng = np.random.default_rng(seed)
        for _ in range(30):
            rows = rng.integers(0, 30, rng.integers(1, 20))
            np.testing.assert_array_equal(fetch(feed, rows)[0].numpy(), pixels[rows])
        return True

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(4)))
    feed.close()


@pytest.mark.parametrize("name", ["cpu", "pinned", "dma", "disk"])
def test_a_file_truncated_between_batches_is_an_error(name, index, cuda):
    feed = cuda.feed(open_array(index), FEEDS[name] and 0, name=name)
    cuda.wait()
    begun = feed.prepare(np.arange(25))(0, 25)
    while not begun.is_ready():
        pass
    path = feed.array.shards.paths[1]
    cuda.is_slow = name in ("dma", "disk")  # what would be copied is no longer there
    os.truncate(path, 10_000)
    for read in (begun.fetch, lambda: fetch(feed, [29])):  # also what was read before
        with pytest.raises(FormatError, match="was truncated while it was open") as caught:
            read()
        assert caught.value.path == str(path)
    del caught
    cuda.is_slow = False
    fetch(feed, [0, 19])  # of the other file
    feed.close()


@every_feed
def test_a_loader_gives_what_it_gives_on_the_cpu_whatever_torchs_defaults_are(
    name, index, add_array, cuda
):
    masks = np.random.default_rng(0).integers(0, 99, (30, 10, 100), np.uint8)
    path = add_array(index, "mask", masks, "mask").path
    on_cpu = Loader(path, 7, shuffle=True, device="cpu")
    expected = [list(batch) for _ in range(2) for batch in on_cpu]
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    try:
        loader = loader_of(path, 7, name, shuffle=True)
        assert loader.feed.name == name
        found = [list(batch) for _ in range(2) for batch in loader]
        collated = fast_collate([np.ones((4, 6, 3), np.uint8)] * 2)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert collated.device == torch.device("cpu")
    for one, other in zip(found, expected, strict=True):
        for tensor, like in zip(one, other, strict=True):
            assert (tensor.dtype, tensor.device) == (like.dtype, like.device)
            assert torch.equal(tensor, like)
    del loader


class Backwards:
    """An order whose numbers are of some type, and lie in memory from the last to the first."""

    def __init__(self, size, dtype):
        self.size, self.dtype = size, dtype

    def __len__(self):
        return self.size

    def take(self, epoch, positions):
        numbers = (self.size - 1 - positions).astype(self.dtype)[::-1].copy()[::-1]
        numbers.flags.writeable = False
        return numbers


@every_feed
@pytest.mark.parametrize("dtype", ["<i8", "u1", "<u4", ">i8"])
def test_an_order_may_give_integers_of_any_type(name, dtype, index, pixels, cuda):
    loader = loader_of(index.path, 8, name, sampler=Backwards(30, dtype))
    images = torch.cat([images for images, _ in loader]).permute(0, 2, 3, 1)
    np.testing.assert_array_equal(images.numpy(), pixels[::-1])


@every_feed
def test_a_loader_of_no_samples_has_no_batches(name, index, cuda):
    loader = Loader(
        MemmapDataset(index.path).subset([]),
        4,
        feed=name,
        device="cpu" if name == "cpu" else "cuda",
    )
    assert list(loader) == []


def test_an_array_knows_the_rows_and_shards_that_its_samples_use(make_dataset):
    index = make_dataset(rows=(5, 2, 2), shape=(2, 3, 1), descr="<u2")
    array = open_array(index, row=[8, 2, 2, 0])
    assert (array.used_rows.tolist(), array.used_shards) == ([0, 2, 8], [0, 2])
    assert (array.row_bytes, array.dtype) == (12, torch.uint16)
    ascending = open_array(index, row=[1, 4, 8])
    assert ascending.used_rows is ascending.row  # takes no memory
    nothing = open_array(index, row=[])
    assert (nothing.used_rows.size, nothing.used_shards) == (0, [])
