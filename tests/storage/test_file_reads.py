import ctypes
import errno
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memload import FormatError
from memload.storage import file_reads
from memload.storage.file_reads import (
    DirectFile,
    bytes_of,
    drop_behind,
    open_direct,
    ranges_of,
    read_ahead,
)

needs_direct = pytest.mark.skipif(sys.platform != "linux", reason="needs O_DIRECT as on Linux")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(np.random.default_rng(0).bytes(100_000))
    return path


def open_file(path: Path) -> DirectFile | None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return open_direct(descriptor)
    finally:
        os.close(descriptor)


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that has ``statx`` report alignments of memory and offsets, or fail."""

    def report(memory: int = 0, offset: int = 0, mask: int = 0x2000, status: int = 0) -> None:
        def statx(descriptor: int, path: bytes, flags: int, wanted: int, buffer: Any) -> int:
            assert (path, flags, wanted) == (b"", 0x1000, 0x2000)
            struct.pack_into("=I", buffer, 0, mask)
            struct.pack_into("=II", buffer, 0x98, memory, offset)
            return status

        monkeypatch.setattr(file_reads._libc, "statx", statx)

    return report


@pytest.fixture
def on_disk(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Let files be opened with O_DIRECT wherever they are; returns the opened paths and flags."""
    opened: list[tuple[str, int]] = []
    real_open = os.open

    def without_direct(path: Any, flags: int, *arguments: Any) -> int:
        if flags & os.O_DIRECT:
            opened.append((str(path), flags))
        return real_open(path, flags & ~os.O_DIRECT, *arguments)

    monkeypatch.setattr(file_reads, "_is_in_ram", lambda descriptor: False)
    monkeypatch.setattr(os, "open", without_direct)
    return opened


@needs_direct
def test_a_file_is_opened_once_more_and_reads_the_same(path: Path) -> None:
    file = open_file(path)
    if file is None:
        pytest.skip("the file system cannot read past the page cache")
    memory = np.zeros(3 * file.alignment, np.uint8)
    aligned = memory[-memory.ctypes.data % file.alignment :][: file.alignment]
    count = os.preadv(file.descriptor, [bytes_of(aligned)], file.alignment)
    assert count > 0
    expected = path.read_bytes()[file.alignment :][:count]
    assert aligned[:count].tobytes() == expected
    os.close(file.descriptor)


@needs_direct
def test_a_file_that_was_replaced_since_is_still_the_one_that_was_opened(
    path: Path, on_disk: Any
) -> None:
    content = path.read_bytes()
    descriptor = os.open(path, os.O_RDONLY)
    path.with_name("other").write_bytes(bytes(100_000))
    path.with_name("other").replace(path)
    file = open_direct(descriptor)
    assert file is not None
    assert os.pread(file.descriptor, 100_000, 0) == content
    os.close(descriptor)
    os.close(file.descriptor)


@needs_direct
@pytest.mark.parametrize(
    ("reported", "alignment"),
    [
        ({"memory": 512, "offset": 512}, 512),
        ({"memory": 4, "offset": 4096}, 4096),
        ({"memory": 4096, "offset": 512}, 4096),
        ({"memory": 1, "offset": 1}, 1),
        ({"memory": 4, "offset": 65536}, 65536),
        ({"mask": 0}, 4096),
        ({"status": -1}, 4096),
    ],
    ids=str,
)
def test_the_alignment_is_the_larger_one_that_the_kernel_reports(
    reported: Any, alignment: int, path: Path, report: Any, on_disk: list[tuple[str, int]]
) -> None:
    report(**reported)
    file = open_file(path)
    assert file is not None
    assert file.alignment == alignment
    ((_, flags),) = on_disk
    assert flags & os.O_DIRECT
    assert not os.get_inheritable(file.descriptor)
    os.close(file.descriptor)


@needs_direct
def test_a_library_without_statx_means_the_usual_alignment(
    path: Path, on_disk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Library:
        fstatfs = file_reads._libc.fstatfs

    monkeypatch.setattr(file_reads, "_libc", Library())
    file = open_file(path)
    assert file is not None
    assert file.alignment == 4096
    os.close(file.descriptor)


@needs_direct
def test_a_file_that_says_it_cannot_be_read_directly_is_not_opened(
    path: Path, report: Any, on_disk: list[tuple[str, int]]
) -> None:
    report(memory=0, offset=0)
    assert open_file(path) is None
    assert not on_disk


@needs_direct
def test_a_file_system_that_refuses_to_open_or_to_read_is_not_read_directly(
    path: Path, on_disk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> int:
        raise OSError(22, "Invalid argument")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", refuse)
        assert open_file(path) is None
    # Another fixture finds out whether a descriptor is left.
    descriptor = os.open(path, os.O_RDONLY)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        assert open_direct(descriptor) is None
    os.close(descriptor)


@needs_direct
@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_too_many_open_files_are_an_error_with_advice(
    number: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    descriptor = os.open(path, os.O_RDONLY)

    def refuse(*arguments: Any) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(file_reads, "_is_in_ram", lambda descriptor: False)
        patch.setattr(os, "open", refuse)
        with pytest.raises(FormatError, match="ulimit -n") as caught:
            open_direct(descriptor)
    assert caught.value.path == str(path)
    os.close(descriptor)


@needs_direct
def test_a_disk_that_fails_now_may_still_be_read_directly(
    path: Path, on_disk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    file = open_file(path)
    assert file is not None
    os.close(file.descriptor)


@needs_direct
@pytest.mark.skipif(not Path("/dev/shm").is_mount(), reason="needs a tmpfs")
def test_files_in_ram_are_not_read_directly() -> None:
    descriptor = os.open("/dev/shm", os.O_RDWR | os.O_TMPFILE)
    os.write(descriptor, bytes(8192))
    assert open_direct(descriptor) is None
    os.close(descriptor)


def test_systems_other_than_linux_do_without(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert open_file(path) is None


@pytest.mark.parametrize("row_bytes", [1, 3000, 400_000, 1 << 20, 3 << 20])
def test_ranges_hold_the_rows_in_their_order(row_bytes: int) -> None:
    rng = np.random.default_rng(row_bytes)
    for count in (1, 2, 500):
        jumps = rng.random(count) < 0.2
        row = np.where(jumps, rng.integers(0, 99, count), 1).cumsum()
        file = (rng.random(count) < 0.05).cumsum() % 3
        offset = 100 + row * row_bytes
        follows = (np.diff(offset) == row_bytes) & (np.diff(file) == 0)
        ranges = ranges_of(file, offset, offset + row_bytes, np.diff(offset) == row_bytes)
        rows_in = ranges.last - ranges.first + 1
        np.testing.assert_array_equal(ranges.size, rows_in * row_bytes)
        np.testing.assert_array_equal(ranges.position, ranges.first * row_bytes)
        number = np.repeat(np.arange(len(rows_in)), rows_in)
        within = np.arange(count) - ranges.first[number]
        np.testing.assert_array_equal(ranges.file[number], file)
        np.testing.assert_array_equal(ranges.offset[number] + within * row_bytes, offset)
        same_part = np.diff(offset // (1 << 20)) == 0
        np.testing.assert_array_equal(np.diff(number) == 0, follows & same_part)


def test_ranges_of_no_rows() -> None:
    nothing = np.zeros(0, np.int64)
    ranges = ranges_of(nothing, nothing, nothing, np.zeros(0, bool))
    assert [len(column) for column in ranges] == [0] * 6


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="needs posix_fadvise")
def test_the_kernel_is_asked_in_pieces_and_pages_at_the_edges_are_dropped(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, *arguments: asked.append(arguments))
    read_ahead(3, 5, 300_000)
    assert [kind for _, _, kind in asked] == [os.POSIX_FADV_WILLNEED] * 3
    assert max(size for _, size, _ in asked) == 128 << 10
    assert [(start, start + size) for start, size, _ in asked] == [
        (5, 131_077),
        (131_077, 262_149),
        (262_149, 300_005),
    ]
    asked.clear()
    drop_behind(3, 5000, 10)
    drop_behind(3, 4096, 4097)
    assert asked == [
        (4096, 4096, os.POSIX_FADV_DONTNEED),
        (4096, 8192, os.POSIX_FADV_DONTNEED),
    ]


def test_the_bytes_of_an_array_are_its_memory() -> None:
    array = np.zeros((3, 5), np.int16)
    memory = bytes_of(array)
    assert len(memory) == 30
    memory[2:4] = b"\x01\x02"
    assert array[0, 1] == 0x0201
    assert ctypes.addressof(ctypes.c_char.from_buffer(memory)) == array.ctypes.data
