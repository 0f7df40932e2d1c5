"""Files as arrays: mapped, private to the process, and let go of."""

import mmap
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from memload.storage.mapping import address_of, fault_in, find_map, forget, map_file


def resident(path: Path) -> int:
    """Return how many KiB of a mapped file this process holds."""
    maps = Path("/proc/self/smaps").read_text()
    found = re.findall(rf"{re.escape(str(path))}\n(?:.*\n)*?Rss: +(\d+) kB", maps)
    assert found
    return sum(map(int, found))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(np.arange(1 << 18, dtype=np.uint8).tobytes())
    return path


def test_a_map_is_the_bytes_of_the_file(path: Path) -> None:
    mapped = map_file(path)
    assert mapped.dtype == np.uint8
    assert mapped.tobytes() == path.read_bytes()


def test_a_map_can_be_written_to_and_the_file_and_other_maps_stay(path: Path) -> None:
    before = path.read_bytes()
    mapped, other = map_file(path), map_file(path)
    mapped[:] = 7
    assert path.read_bytes() == before
    assert other.tobytes() == before


def test_a_map_outlives_the_name_of_its_file(path: Path) -> None:
    before = path.read_bytes()
    mapped = map_file(path)
    path.unlink()
    assert mapped[100:].tobytes() == before[100:]


def test_an_empty_or_missing_file_cannot_be_mapped(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match="empty"):
        map_file(tmp_path / "empty")
    with pytest.raises(FileNotFoundError):
        map_file(tmp_path / "none")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps")
def test_a_forgotten_map_holds_no_memory_and_still_reads(path: Path) -> None:
    mapped = map_file(path)
    total = int(mapped.sum())
    assert resident(path) > 0
    forget(mapped)
    assert resident(path) == 0
    assert int(mapped.sum()) == total


def test_an_array_that_is_no_map_is_left_alone() -> None:
    array = np.arange(5, dtype=np.uint8)
    forget(array)
    assert array.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell")
def test_pages_that_their_file_does_not_have_any_more_are_told_and_not_touched(path: Path) -> None:
    mapped = map_file(path)
    fault_in(address_of(mapped), mapped.size)
    os.truncate(path, mmap.PAGESIZE)
    fault_in(address_of(mapped) + 5, mmap.PAGESIZE - 5)  # what is there still is
    with pytest.raises(OSError, match="Input/output error"):
        fault_in(address_of(mapped), mmap.PAGESIZE + 1)


def test_memory_that_is_no_file_is_there(path: Path) -> None:
    array = np.arange(100)
    fault_in(address_of(array), array.nbytes)
    assert find_map(array) is None
    assert find_map(map_file(path)[5:].view("<u1").reshape(-1)) is not None
