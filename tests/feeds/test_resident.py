"""Rows in the device's memory. The device is the CPU here."""

import numpy as np
import pytest
import torch

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
    feed = ResidentFeed(open_array(index, row=[]), CPU)
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
