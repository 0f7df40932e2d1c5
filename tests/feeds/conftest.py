"""Samples in several arrays."""

from collections.abc import Callable

import numpy as np
import pytest

from memload import Index
from memload.feeds.interface import Samples
from memload.storage.shards import Shards


@pytest.fixture
def large_and_small(
    make_dataset: Callable[..., Index], add_array: Callable[..., Index]
) -> Callable[[], Samples]:
    """Images of 28 KiB, masks of 28 KiB in another order, and features of 16 bytes."""

    def open_samples() -> Samples:  # a fixture would keep them open for too long
        index = make_dataset(rows=(8,), shape=(28, 1024, 1))
        rng = np.random.default_rng(0)
        index = add_array(index, "mask", rng.integers(0, 99, (8, 28, 1024), np.uint8), "mask")
        index = add_array(
            index, "features", rng.random((5, 2)), "npy", other_rows={"features": np.arange(8) % 5}
        )
        row = np.arange(8)
        others = [
            Samples(Shards(index, "mask"), row[::-1], ()),
            Samples(Shards(index, "features"), np.array([4, 1] * 4), ()),
        ]
        return Samples(Shards(index), row, [np.zeros(8, np.int64)], others)

    return open_samples
