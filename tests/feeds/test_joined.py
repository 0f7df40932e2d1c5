"""Several arrays of the same samples."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from memload import FeedError
from memload.feeds.choice import choose_feed
from memload.feeds.interface import Samples
from memload.feeds.joined import feed_of_all

CPU = torch.device("cpu")


def test_a_feed_that_cannot_serve_an_array_closes_those_of_the_others() -> None:
    closed = []

    def create(array: str) -> Any:
        if array == "mask":
            raise FeedError("no")
        return SimpleNamespace(close=lambda: closed.append(array))

    with pytest.raises(FeedError, match="no"):
        feed_of_all([partial(create, "image"), partial(create, "mask")])
    assert closed == ["image"]


def test_all_arrays_come_through_one_feed(large_and_small: Callable[[], Samples]) -> None:
    samples = large_and_small()
    feed, chosen = choose_feed("auto", samples, CPU, num_threads=1, prefetch_factor=2)
    assert chosen == ("cpu", "the device is cpu", None)
    numbers = np.array([3, 3, 0, 7])
    batch = feed.prepare(numbers)(1, 4)()
    assert batch.pop().dtype == torch.int64  # the labels are behind all arrays
    for array, found in zip(samples.arrays, batch, strict=True):
        expected = array.shards.maps[0][array.row[numbers[1:]]]
        np.testing.assert_array_equal(found.numpy(), expected)
    feed.close()
