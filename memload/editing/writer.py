"""Shards under construction: rows are written in any order, from any number of processes."""

import contextlib
import os
import stat
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from memload.errors import BuildError
from memload.storage.format import HEADER_BYTES, array_path, npy_header, seal_of, shard_names
from memload.storage.index import Array, Shard
from memload.wording import parse_size

#: A process holds at most this many shards open at once.
_MAX_OPEN = 16


def rows_per_shard(arrays: Sequence[Array], shard_size: int | None) -> int | None:
    """Return how many rows a shard has, so that those of all arrays have the same rows.

    They are so many that no file is larger than ``shard_size`` bytes; None if there is no limit.
    Raises ValueError if a shard has no room for one row.
    """
    if shard_size is None:
        return None
    largest = max(arrays, key=lambda array: array.row_bytes)
    rows = (shard_size - HEADER_BYTES) // largest.row_bytes
    if rows < 1:
        raise ValueError(
            f"shard_size: {shard_size:,} bytes are too few, as a shard with one row"
            f"{'' if largest.name == 'image' else f' of {largest.name!r}'} has "
            f"{HEADER_BYTES + largest.row_bytes:,}."
        )
    return rows


def parse_shard_size(shard_size: int | str | None) -> int | None:
    """Return a shard size, such as ``"4GB"``, in bytes; None stays. Raises ValueError."""
    try:
        return None if shard_size is None else parse_size(shard_size)
    except ValueError as error:
        raise ValueError(f"shard_size: {error}") from None


def shard_bytes(arrays: Sequence[Array], rows: int) -> int:
    """Return the size of the largest file of a shard with so many rows."""
    return HEADER_BYTES + rows * max(array.row_bytes for array in arrays)


def with_shards(array: Array, output: Path, rows: int, limit: int | None) -> Array:
    """Return an array of so many rows, in shards of at most ``limit`` rows, of an output."""
    limit = limit or rows
    shards = []
    names = shard_names(array_path(output, array.name), -(-rows // limit))
    for number, name in enumerate(names):
        held = min(limit, rows - number * limit)
        shards.append(Shard(name, held, HEADER_BYTES + held * array.row_bytes))
    return replace(array, shards=tuple(shards))


class ShardWriter:
    """Reads and writes single rows of the shards of ``array`` in ``folder``.

    Any number of processes may write, each with a writer of its own. A writer is not thread-safe.
    Files are opened when they are first used; `close` closes them. Raises OSError, for example if
    the disk is full.
    """

    def __init__(self, folder: Path, array: Array) -> None:
        self.folder, self.array = folder, array
        self._starts: list[int] = [0, *np.cumsum([shard.rows for shard in array.shards]).tolist()]
        self._open: dict[int, int] = {}

    def create(self, crc32: np.ndarray | None = None) -> None:
        """Make the files at full size with their headers. Rows that are there stay.

        The others are zeros and take no space. With ``crc32``, uint32 ``(rows,)``, each header
        holds the seal of its rows' checksums.
        """
        for number, shard in enumerate(self.array.shards):
            start = self._starts[number]
            self.create_shard(number, None if crc32 is None else crc32[start : start + shard.rows])

    def create_shard(self, number: int, crc32: np.ndarray | None = None) -> None:
        """Make one file as `create` does. ``crc32`` are the checksums of its rows."""
        shard = self.array.shards[number]
        seal = "" if crc32 is None else seal_of(crc32)
        header = npy_header(self.array.descr, (shard.rows, *self.array.shape), seal)
        check_regular(self.folder / shard.file)
        descriptor = os.open(self.folder / shard.file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _write(descriptor, header, 0)
            os.ftruncate(descriptor, shard.bytes)
        finally:
            os.close(descriptor)

    def write(self, row: int, pixels: bytes) -> None:
        """Write the bytes of one row."""
        descriptor, offset = self._locate(row)
        _write(descriptor, pixels, offset)

    def read(self, row: int) -> bytes:
        """Return the bytes of one row."""
        descriptor, offset = self._locate(row)
        return os.pread(descriptor, self.array.row_bytes, offset)

    def blank(self, row: int) -> None:
        """Make a row all zeros.

        If it is all zeros already, nothing is written, so that a hole in the file stays one.
        """
        if any(self.read(row)):
            self.write(row, bytes(self.array.row_bytes))

    def close(self) -> None:
        """Close the files."""
        while self._open:
            os.close(self._open.popitem()[1])

    def _locate(self, row: int) -> tuple[int, int]:
        """Return the descriptor of the shard that holds a row, and the row's offset in it."""
        shard = bisect_right(self._starts, row) - 1
        if shard not in self._open:
            if len(self._open) >= _MAX_OPEN:
                os.close(self._open.pop(next(iter(self._open))))
            self._open[shard] = os.open(self.folder / self.array.shards[shard].file, os.O_RDWR)
        return self._open[shard], HEADER_BYTES + (row - self._starts[shard]) * self.array.row_bytes


def check_regular(path: Path) -> None:
    """Raise BuildError if there is a link, or anything else that is no regular file."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(path.lstat().st_mode):
            raise BuildError(
                f"{path} is no regular file, and nothing is written to what it may lead to. Delete "
                "it, and run the same command again.",
                path=path,
            )


def _write(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:  # a full disk or a signal may cut a write short; the next one then tells the error
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written
