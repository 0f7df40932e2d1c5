"""What the tests of editing share."""

from collections.abc import Callable

import numpy as np
import pytest

from memload.storage.index import Index
from memload.storage.shards import Shards


@pytest.fixture(scope="session")
def rows_in() -> Callable[..., np.ndarray]:
    """A function that returns the rows of all samples of a data set in an array, ``(n, …)``."""

    def read(index: Index, name: str = "image") -> np.ndarray:
        shards, rows = Shards(index, name), index.rows_of(name)
        return shards.gather(rows, np.empty((len(rows), *shards.array.shape), shards.array.descr))

    return read
