"""The rates of a disk, with a clock that goes on by a second each time that somebody looks."""

import itertools
import os
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from memload.planning import disk

FILE_BYTES = 3 << 20


@pytest.fixture(autouse=True)
def small_and_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_FILE_BYTES", FILE_BYTES)
    clock = itertools.count()
    monkeypatch.setattr(disk, "time", SimpleNamespace(perf_counter=lambda: next(clock)))


def has_free(monkeypatch: pytest.MonkeyPatch, blocks: int) -> None:
    """Let the disk have so many free blocks of 1 MiB."""
    status = SimpleNamespace(f_bavail=256 * blocks, f_frsize=4096)
    monkeypatch.setattr(os, "fstatvfs", lambda file: status)


@pytest.mark.parametrize(("free", "blocks"), [(900, 3), (29, 2), (10, 1)])
def test_what_is_written_and_read_in_a_second_is_the_rate_of_a_tenth_of_the_disk_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, blocks: int
) -> None:
    has_free(monkeypatch, free)
    monkeypatch.setattr(disk, "open_direct", os.dup)
    assert disk.measure_disk(tmp_path, 1 << 20) == (blocks << 20, blocks << 20, True)
    assert list(tmp_path.iterdir()) == []


def test_as_much_is_read_at_a_time_as_a_row_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "open_direct", os.dup)
    reads: list[tuple[int, int]] = []

    def read(descriptor: int, memory: list[memoryview], start: int) -> int:
        reads.append((start, len(memory[0])))
        return len(memory[0])

    monkeypatch.setattr(os, "preadv", read)
    # Rows of 5,000 bytes lie in two blocks of 4,096. A second passes.
    assert disk.measure_disk(tmp_path, 5000).read == FILE_BYTES // 8192 * 5000
    starts, sizes = zip(*sorted(reads), strict=True)
    assert (starts, set(sizes)) == (tuple(range(0, FILE_BYTES, 8192)), {8192})
    monkeypatch.setattr(disk, "_READS", 7)
    assert disk.measure_disk(tmp_path, 5000).read == 7 * 5000


def test_what_is_written_cannot_be_compressed_and_is_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[bytes] = []
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: done.append(data))
    monkeypatch.setattr(os, "fsync", lambda file: done.append(b"flushed"))
    monkeypatch.setattr(disk, "open_direct", lambda file: None)
    disk.measure_disk(tmp_path, 1 << 20)
    *blocks, last = done
    assert len(blocks) == 3
    assert all(len(zlib.compress(block)) >= len(block) for block in blocks)
    assert last == b"flushed"


def test_what_cannot_be_read_past_the_page_cache_has_no_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "open_direct", lambda file: None)
    assert disk.measure_disk(tmp_path, 1 << 20) == (FILE_BYTES, None, False)


def test_on_a_disk_that_is_nearly_full_nothing_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_free(monkeypatch, 9)
    monkeypatch.setattr(disk, "open_direct", os.dup)
    assert disk.measure_disk(tmp_path, 1 << 20) == (None, None, True)
