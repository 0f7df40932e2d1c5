"""Pages of mapped files. That rows are found in many files, test_shards.py tests."""

import mmap
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from memload.storage.mapping import address_of, fault_in, forget, map_side_by_side

linux = pytest.mark.skipif(
    sys.platform != "linux", reason="reads /proc or needs MADV_POPULATE_READ"
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(np.random.default_rng(0).bytes(70_000))
    return path


def map_file(path: Path) -> np.ndarray:
    with path.open("rb") as file:
        return map_side_by_side([file.fileno()], [path.stat().st_size], 1)[0]


def test_what_cannot_be_mapped_raises() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        map_side_by_side([10**6], [4096], 1)


@linux
def test_a_forgotten_map_holds_no_memory_and_still_reads(path: Path) -> None:
    def resident() -> int:
        maps = Path("/proc/self/smaps").read_text()
        return sum(map(int, re.findall(rf"{re.escape(str(path))}\n(?:.*\n)*?Rss: +(\d+) kB", maps)))

    mapped = map_file(path)
    total = int(mapped.sum())
    assert resident() > 0
    forget(mapped)
    assert resident() == 0
    assert int(mapped.sum()) == total


@linux
def test_pages_that_a_file_has_lost_are_an_error(path: Path) -> None:
    mapped = map_file(path)
    fault_in(address_of(mapped), mapped.size)
    os.truncate(path, mmap.PAGESIZE)
    fault_in(address_of(mapped) + 5, mmap.PAGESIZE - 5)
    with pytest.raises(OSError, match="Input/output error"):
        fault_in(address_of(mapped), mmap.PAGESIZE + 1)
    memory = np.arange(100)  # of which no page can be lost
    fault_in(address_of(memory), memory.nbytes)
