"""Shards under construction: rows are written in any order, from any number of processes."""

import os
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from memload.storage.format import HEADER_BYTES, npy_header, seal_of
from memload.storage.index import Array, Shard


def plan_shards(
    names: Sequence[str], rows: int, rows_a_shard: int, row_bytes: int
) -> tuple[Shard, ...]:
    """Return the shards that hold ``rows`` rows, all of ``rows_a_shard`` but the last."""
    shards = []
    for number, name in enumerate(names):
        held = min(rows_a_shard, rows - number * rows_a_shard)
        shards.append(Shard(name, held, HEADER_BYTES + held * row_bytes))
    return tuple(shards)


#: Shards that a process holds open at once, of however many there are.
_MOST_OPEN = 16


class ShardWriter:
    """Writes rows into shards under construction, in any order and from any number of processes.

    Files are opened when first used; `close` closes them. One thread at a time may use a writer. Raises OSError
    where the disk is full.
    """

    def __init__(self, folder: Path, array: Array) -> None:
        self.folder, self.array = folder, array
        self._starts: list[int] = [0, *np.cumsum([shard.rows for shard in array.shards]).tolist()]
        self._open: dict[int, int] = {}

    def create(self) -> None:
        """Make the files that are not there yet, at full size; rows not written are zeros and take no room."""
        for shard in self.array.shards:
            path = self.folder / shard.file
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
            try:
                _write(descriptor, npy_header(self.array.descr, (shard.rows, *self.array.shape)), 0)
                os.ftruncate(descriptor, shard.bytes)
            finally:
                os.close(descriptor)

    def seal(self, crc32: np.ndarray) -> None:
        """Write into the headers what tells the shards from others: the checksums of all rows, uint32 ``(rows,)``."""
        for shard, first in zip(self.array.shards, self._starts, strict=False):
            descriptor, _ = self._place(first)
            shape = (shard.rows, *self.array.shape)
            _write(
                descriptor,
                npy_header(self.array.descr, shape, seal_of(crc32[first : first + shard.rows])),
                0,
            )

    def write(self, row: int, pixels: bytes) -> None:
        """Write the bytes of one row."""
        descriptor, offset = self._place(row)
        _write(descriptor, pixels, offset)

    def read(self, row: int) -> bytes:
        """Return the bytes of one row."""
        descriptor, offset = self._place(row)
        return _read(descriptor, self.array.row_bytes, offset)

    def blank(self, row: int) -> None:
        """Make a row all zeros; one that is so already is not written, and stays a hole in the file."""
        if any(self.read(row)):
            self.write(row, bytes(self.array.row_bytes))

    def close(self) -> None:
        """Close the files."""
        while self._open:
            os.close(self._open.popitem()[1])

    def _place(self, row: int) -> tuple[int, int]:
        shard = bisect_right(self._starts, row) - 1
        if shard not in self._open:
            path = self.folder / self.array.shards[shard].file
            if len(self._open) >= _MOST_OPEN:
                os.close(self._open.pop(next(iter(self._open))))
            self._open[shard] = os.open(path, os.O_RDWR | getattr(os, "O_BINARY", 0))
        return self._open[shard], HEADER_BYTES + (row - self._starts[shard]) * self.array.row_bytes


def _pwrite(descriptor: int, data: memoryview, offset: int) -> int:
    if hasattr(os, "pwrite"):
        return os.pwrite(descriptor, data, offset)
    os.lseek(
        descriptor, offset, os.SEEK_SET
    )  # on Windows; a writer's descriptors are its own, so nobody moves them
    return os.write(descriptor, data)


def _pread(descriptor: int, size: int, offset: int) -> bytes:
    if hasattr(os, "pread"):
        return os.pread(descriptor, size, offset)
    os.lseek(descriptor, offset, os.SEEK_SET)
    return os.read(descriptor, size)


def _write(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while (
        view
    ):  # a write may be cut short, by a signal or by a limit whose error the next one then gets
        written = _pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def _read(descriptor: int, size: int, offset: int) -> bytes:
    data = _pread(descriptor, size, offset)
    while len(data) < size:
        more = _pread(descriptor, size - len(data), offset + len(data))
        if not more:
            raise OSError(f"expected {size} bytes at {offset}, found {len(data)}")
        data += more
    return data
