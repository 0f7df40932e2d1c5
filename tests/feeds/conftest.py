"""CUDA without a device, and a data set."""

import numpy as np
import pytest

from tests.feeds.fake_cuda import FakeCuda


@pytest.fixture
def cuda(request):
    """CUDA without a device, until the end of the test."""
    failed_before = request.session.testsfailed
    fake = FakeCuda().__enter__()
    yield fake
    fake.end(has_failed=request.session.testsfailed > failed_before)


@pytest.fixture
def index(make_dataset):
    """Shards of 20 and 10 rows of 3,000 bytes."""
    return make_dataset(rows=(20, 10), shape=(10, 100, 3))


@pytest.fixture
def pixels(index):
    """The rows of `index`."""
    return np.concatenate([np.load(index.path.parent / s.file) for s in index.image.shards])
