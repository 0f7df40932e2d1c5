"""Rows in the device's memory. The device is the CPU here."""

import gc

import numpy as np
import pytest
import torch

from memload.feeds import resident
from memload.feeds.resident import ResidentFeed
from memload.storage.format import DESCRS_OF_ARRAYS
from tests.feeds.fake_cuda import fetch, open_array

CPU = torch.device("cpu")


@pytest.mark.parametrize("descr", DESCRS_OF_ARRAYS)
@pytest.mark.parametrize("shape", [(1,), (3,), (8,), (2, 3, 4)])
def test_any_element_type_and_shape(descr, shape, make_dataset, add_array, cuda):
    values = np.random.default_rng(1).integers(0, 2, (5, *shape)).astype(descr)
    index = add_array(make_dataset(), "values", values, "npy")
    feed = ResidentFeed(open_array(index, "values"), CPU)
    np.testing.assert_array_equal(fetch(feed, [4, 0, 4])[0].numpy(), values[[4, 0, 4]])
    feed.close()


def test_only_rows_in_use_take_memory_and_an_empty_subset_takes_none(index, cuda):
    feed = ResidentFeed(open_array(index, row=[5, 5, 9]), CPU)
    assert len(feed.rows) == 2
    (nothing,) = fetch(feed, [])
    assert nothing.shape == (0, 10, 100, 3)
    feed.close()
    feed = ResidentFeed(open_array(index, row=[], columns=[np.zeros(0)]), CPU)
    assert feed.rows.nbytes == 0
    feed.close()


def test_closing_waits_for_what_the_device_gathers(index, cuda, monkeypatch):
    """On streams of others, which torch's allocator does not know of."""
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    feed = ResidentFeed(open_array(index), torch.device("cuda", 0))
    waited.clear()
    feed.close()
    assert waited == [torch.device("cuda", 0)]


def test_feeds_of_the_same_rows_share_them(make_dataset, index, pixels, cuda):
    one = ResidentFeed(open_array(index, row=[5, 3, 5]), CPU)
    same = ResidentFeed(open_array(index, row=[3, 5]), CPU)
    fewer = ResidentFeed(open_array(index, row=[3]), CPU)
    other = make_dataset("other.bin", rows=(20, 10), shape=(10, 100, 3), seed=1)
    elsewhere = ResidentFeed(open_array(other, row=[3, 5]), CPU)
    assert one.rows.data_ptr() == same.rows.data_ptr()
    assert len({feed.rows.data_ptr() for feed in (one, fewer, elsewhere)}) == 3
    one.close()
    np.testing.assert_array_equal(fetch(same, [1, 0])[0].numpy(), pixels[[5, 3]])
    for feed in (same, fewer, elsewhere):
        feed.close()
    del one, same, fewer, elsewhere, feed
    gc.collect()
    assert not resident._shared


def test_other_rows_in_a_file_of_the_same_name_are_not_shared(make_dataset, cuda):
    index = make_dataset()
    old = ResidentFeed(open_array(index), CPU)
    path = index.path.with_suffix(".bin")
    before = np.load(path)
    path.rename(path.with_name("old.bin"))
    new = ResidentFeed(open_array(make_dataset(seed=9)), CPU)
    np.testing.assert_array_equal(fetch(new, range(5))[0].numpy(), np.load(path))
    np.testing.assert_array_equal(fetch(old, range(5))[0].numpy(), before)
    new.close()
    old.close()
