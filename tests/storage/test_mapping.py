"""Pages of mapped files. That rows are found in many files, test_shards.py tests."""

import mmap
import os
import sys

import numpy as np
import pytest

from memload.storage.mapping import disk_reads, fault_in, map_side_by_side
from tests.feeds.page_cache import drop_pages, look_for_pages

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs MADV_POPULATE_READ")


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(np.random.default_rng(0).bytes(70_000))
    return path


def map_file(path):
    with path.open("rb") as file:
        return map_side_by_side([file.fileno()], [path.stat().st_size], 1)[0]


def test_pages_are_brought_into_ram_and_the_thread_counts_that(path):
    drop_pages(path)
    if any(look_for_pages(path)):
        pytest.skip("the file system does not drop pages")
    mapped, before = map_file(path), disk_reads()
    fault_in(mapped.ctypes.data, 8 * mmap.PAGESIZE)
    assert all(look_for_pages(path)[:8])
    assert disk_reads() > before
    before = disk_reads()
    fault_in(mapped.ctypes.data, 8 * mmap.PAGESIZE)
    assert disk_reads() == before


def test_pages_that_a_file_has_lost_are_an_error(path):
    mapped = map_file(path)
    fault_in(mapped.ctypes.data, mapped.size)
    os.truncate(path, mmap.PAGESIZE)
    fault_in(mapped.ctypes.data, mmap.PAGESIZE)
    with pytest.raises(OSError, match="Input/output error"):
        fault_in(mapped.ctypes.data, 2 * mmap.PAGESIZE)
