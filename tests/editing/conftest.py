"""What the tests of editing share."""

import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import pytest

from memload.storage.index import Index
from memload.storage.shards import Shards


@pytest.fixture
def full_behind() -> Callable[[int], AbstractContextManager[None]]:
    """A context in which a file has room for so many bytes, as if the disk were full then."""

    @contextmanager
    def limit(size: int) -> Iterator[None]:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, handler)

    return limit


@pytest.fixture(scope="session")
def rows_in() -> Callable[..., np.ndarray]:
    """A function that returns the rows of all samples of a data set in an array, ``(n, …)``."""

    def read(index: Index, name: str = "image") -> np.ndarray:
        shards, rows = Shards(index, name), index.rows_of(name)
        return shards.gather(rows, np.empty((len(rows), *shards.array.shape), shards.array.descr))

    return read
