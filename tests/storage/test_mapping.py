"""Files mapped side by side: private to the process, and asked for page by page."""

import mmap
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from memload.storage.mapping import address_of, fault_in, forget, map_side_by_side, will_need

linux = pytest.mark.skipif(
    sys.platform != "linux", reason="reads /proc or needs MADV_POPULATE_READ"
)
Map = Callable[..., tuple[np.ndarray, list[int]]]


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"file{number}" for number in range(3)]
    for number, path in enumerate(paths):
        path.write_bytes(np.random.default_rng(number).bytes(70_000 + number))
    return paths


def map_files(paths: Sequence[Path], unit: int = 1) -> tuple[np.ndarray, list[int]]:
    descriptors = [os.open(path, os.O_RDONLY) for path in paths]
    try:
        return map_side_by_side(descriptors, [path.stat().st_size for path in paths], unit)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


@pytest.mark.parametrize("unit", [1, 7, 4096, 5000, 12_288])
def test_each_file_is_found_at_its_offset_a_whole_number_of_units_from_the_first(
    unit: int, paths: list[Path]
) -> None:
    mapped, offsets = map_files(paths, unit)
    for path, offset in zip(paths, offsets, strict=True):
        content = path.read_bytes()
        assert mapped[offset : offset + len(content)].tobytes() == content
        assert offset % unit == 0


def test_a_map_is_private_and_outlives_the_name_of_its_file(paths: list[Path]) -> None:
    before = paths[0].read_bytes()
    (mapped, _), (other, _) = map_files(paths[:1]), map_files(paths[:1])
    mapped[:] = 7
    assert paths[0].read_bytes() == other.tobytes() == before
    paths[0].unlink()
    assert other[100:].tobytes() == before[100:]


def test_what_cannot_be_mapped_raises(paths: list[Path]) -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        map_side_by_side([10**6], [4096], 1)
    with paths[0].open("rb") as file, pytest.raises((OSError, OverflowError)):
        map_side_by_side([file.fileno()] * 2, [1, 1], 2**62 + 1)


@linux
def test_a_forgotten_map_holds_no_memory_and_still_reads(paths: list[Path]) -> None:
    def resident() -> int:
        maps = Path("/proc/self/smaps").read_text()
        return sum(
            map(int, re.findall(rf"{re.escape(str(paths[0]))}\n(?:.*\n)*?Rss: +(\d+) kB", maps))
        )

    mapped, _ = map_files(paths[:1])
    total = int(mapped.sum())
    assert resident() > 0
    forget(mapped)
    assert resident() == 0
    will_need(address_of(mapped), mapped.nbytes)
    assert int(mapped.sum()) == total


@linux
def test_pages_that_a_file_has_lost_are_an_error(paths: list[Path]) -> None:
    mapped, _ = map_files(paths[:1])
    fault_in(address_of(mapped), mapped.size)
    os.truncate(paths[0], mmap.PAGESIZE)
    fault_in(address_of(mapped) + 5, mmap.PAGESIZE - 5)
    with pytest.raises(OSError, match="Input/output error"):
        fault_in(address_of(mapped), mmap.PAGESIZE + 1)
    memory = np.arange(100)  # of which no page can be lost
    fault_in(address_of(memory), memory.nbytes)
