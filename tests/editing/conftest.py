"""What the tests of editing share."""

import resource
import signal
from contextlib import contextmanager

import numpy as np
import pytest

from memload.storage.index import Index
from memload.storage.shards import Shards


@pytest.fixture
def full_behind():
    """A context in which a file has room for so many bytes, as if the disk were full then."""

    @contextmanager
    def limit(size):
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
def rows_in():
    """A function that returns the rows of all samples of a data set in an array, ``(n, …)``."""

    def read(index, name="image"):
        shards, rows = Shards(index, name), index.rows_of(name)
        return shards.gather(rows, np.empty((len(rows), *shards.array.shape), shards.array.descr))

    return read


@pytest.fixture(scope="session")
def samples_in(rows_in):
    """A function that returns the samples of a data set as a list of dicts, with texts as such."""

    def read(path):
        index = Index.open(path)
        columns = {"key": list(index.keys)}
        for name, values in index.columns.items():
            texts = index.texts.get(name)
            columns[name] = [v if texts is None else texts[v] for v in values.tolist()]
        for array in index.arrays:
            columns[array.name] = [row.tobytes() for row in rows_in(index, array.name)]
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    return read
