"""Rows in the device's memory. The device is the CPU here."""

import gc

import numpy as np
import pytest
import torch

from memload import FeedError, Loader, MemmapDataset
from memload.feeds import resident
from memload.feeds.resident import ResidentFeed
from memload.storage.format import DESCRS_OF_ARRAYS

CPU = torch.device("cpu")


@pytest.fixture
def index(make_dataset):
    return make_dataset(rows=(12, 8), shape=(5, 7, 3))


@pytest.fixture
def pixels(index):
    return np.concatenate([np.load(index.path.parent / s.file) for s in index.image.shards])


@pytest.mark.parametrize(
    "row", [range(20), range(19, -1, -1), [3, 3, 19, 0], [7]], ids=["all", "back", "some", "one"]
)
def test_batches_have_the_rows_and_columns_of_their_samples(
    row, index, pixels, samples_of, fetch, cuda, monkeypatch
):
    monkeypatch.setattr(resident, "_STAGING_BYTES", 300)  # two rows and a half
    row = np.array(row)
    rng = np.random.default_rng(0)
    columns = [
        np.arange(len(row), dtype="<u2"),
        rng.random((len(row), 3, 5)),
        rng.random(len(row)) > 0.5,
        rng.random((len(row), 3)) > 0.5,
        rng.integers(-9, 9, (len(row), 1)),
    ]
    feed = ResidentFeed(samples_of(index, row=row, columns=columns), CPU)
    for count in (1, 7, 40):
        chosen = rng.integers(0, len(row), count)
        found, *values = fetch(feed, chosen)
        np.testing.assert_array_equal(found.numpy(), pixels[row[chosen]])
        for value, column in zip(values, columns, strict=True):
            assert value.numpy().dtype == column.dtype
            np.testing.assert_array_equal(value.numpy(), column[chosen])
    assert (feed.name, feed.counts()) == ("resident", None)
    feed.close()


@pytest.mark.parametrize("descr", DESCRS_OF_ARRAYS)
@pytest.mark.parametrize("shape", [(1,), (3,), (8,), (2, 3, 4)])
def test_any_element_type_and_shape(descr, shape, make_dataset, add_array, samples_of, fetch, cuda):
    values = np.random.default_rng(1).integers(0, 2, (5, *shape)).astype(descr)
    index = add_array(make_dataset(), "values", values, "npy")
    feed = ResidentFeed(samples_of(index, "values"), CPU)
    np.testing.assert_array_equal(fetch(feed, [4, 0, 4])[0].numpy(), values[[4, 0, 4]])
    feed.close()


def test_a_batch_is_a_copy(index, pixels, samples_of, fetch, cuda):
    feed = ResidentFeed(samples_of(index, columns=[np.arange(20)]), CPU)
    for tensor in fetch(feed, range(20)):
        tensor.fill_(0)
    found, column = fetch(feed, range(20))
    np.testing.assert_array_equal(found.numpy(), pixels)
    assert column.tolist() == list(range(20))
    feed.close()


def test_only_rows_in_use_take_memory_and_an_empty_subset_takes_none(
    index, samples_of, fetch, cuda
):
    feed = ResidentFeed(samples_of(index, row=[5, 5, 9]), CPU)
    assert len(feed.rows) == 2
    (nothing,) = fetch(feed, [])
    assert nothing.shape == (0, 5, 7, 3)
    feed.close()
    feed = ResidentFeed(samples_of(index, row=[], columns=[np.zeros(0)]), CPU)
    assert feed.rows.nbytes == 0
    feed.close()


def test_a_loader_of_no_samples_has_no_batches(index, cuda):
    empty = MemmapDataset(index.path).subset([])
    for feed in ("resident", "dma", "pinned"):
        assert list(Loader(empty, 4, feed=feed, device="cuda")) == []


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


@pytest.mark.parametrize("dtype", ["<i8", "u1", "<u4", ">i8"])
@pytest.mark.parametrize("feed", ["cpu", "pinned", "dma", "resident"])
def test_an_order_may_give_integers_of_any_type(feed, dtype, index, pixels, cuda):
    device = "cpu" if feed == "cpu" else "cuda"
    loader = Loader(index.path, 8, sampler=Backwards(20, dtype), feed=feed, device=device)
    images = torch.cat([images for images, _ in loader]).permute(0, 2, 3, 1)
    np.testing.assert_array_equal(images.numpy(), pixels[::-1])


def test_closing_waits_for_what_the_device_gathers(index, samples_of, cuda, monkeypatch):
    """On streams of others, which torch's allocator does not know of."""
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    feed = ResidentFeed(samples_of(index), torch.device("cuda", 0))
    waited.clear()
    feed.close()
    assert waited == [torch.device("cuda", 0)]


def test_feeds_of_the_same_rows_share_them(make_dataset, index, pixels, samples_of, fetch, cuda):
    one = ResidentFeed(samples_of(index, row=[5, 3, 5]), CPU)
    same = ResidentFeed(samples_of(index, row=[3, 5]), CPU)
    fewer = ResidentFeed(samples_of(index, row=[3]), CPU)
    other = make_dataset("other.bin", rows=(12, 8), shape=(5, 7, 3), seed=1)
    elsewhere = ResidentFeed(samples_of(other, row=[3, 5]), CPU)
    assert one.rows.data_ptr() == same.rows.data_ptr()
    assert len({feed.rows.data_ptr() for feed in (one, fewer, elsewhere)}) == 3
    one.close()
    np.testing.assert_array_equal(fetch(same, [1, 0])[0].numpy(), pixels[[5, 3]])
    for feed in (same, fewer, elsewhere):
        feed.close()
    del one, same, fewer, elsewhere, feed
    gc.collect()
    assert not resident._shared


def test_other_rows_in_a_file_of_the_same_name_are_not_shared(
    make_dataset, samples_of, fetch, cuda
):
    index = make_dataset()
    old = ResidentFeed(samples_of(index), CPU)
    path = index.path.with_suffix(".bin")
    before = np.load(path)
    path.rename(path.with_name("old.bin"))
    new = ResidentFeed(samples_of(make_dataset(seed=9)), CPU)
    np.testing.assert_array_equal(fetch(new, range(5))[0].numpy(), np.load(path))
    np.testing.assert_array_equal(fetch(old, range(5))[0].numpy(), before)
    new.close()
    old.close()


def test_too_little_memory_is_an_error(index, samples_of, cuda):
    cuda.device_bytes = 2000
    samples = samples_of(index)
    with pytest.raises(FeedError, match=r"needs 2,100 bytes of memory on cuda:0, which has fewer"):
        ResidentFeed(samples, torch.device("cuda", 0))
