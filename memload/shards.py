"""Open shards as arrays, gather rows from them, write them row by row."""

import os
import zlib
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from memload.errors import ChecksumError, FormatError, MissingError
from memload.format import HEADER_BYTES, npy_header
from memload.index import Array, Index, Shard
from memload.mapping import identity, map_file, will_need


class Shards:
    """All rows of one array, mapped copy-on-write from its shards; ``maps[s]`` is ``(rows, H, W, C)``.

    Opening checks that every file is there, has its exact size and header, and that the first and the last
    row of each match the index, which tells the shards of another build. Raises FormatError.
    Reading is thread-safe.
    """

    def __init__(self, index: Index, name: str = "image") -> None:
        self.array = next(array for array in index.arrays if array.name == name)
        self.folder = index.path.parent
        self.paths = [self.folder / shard.file for shard in self.array.shards]
        #: what each file was before it was mapped, so that one put in its place later is told from it
        self.identities = [identity(path) for path in self.paths]
        self.maps = [
            open_shard(path, shard, self.array) for path, shard in zip(self.paths, self.array.shards, strict=True)
        ]
        #: the first row of every shard, then the number of all rows
        self.starts: list[int] = [0, *np.cumsum([shard.rows for shard in self.array.shards]).tolist()]
        for number, pixels in enumerate(self.maps):
            for inside in {0, len(pixels) - 1}:
                row = self.starts[number] + inside
                expected, found = int(index.crc32[name][row]), zlib.crc32(pixels[inside])
                if expected != found:
                    path = self.folder / self.array.shards[number].file
                    raise ChecksumError(
                        f"{path}: expected checksum {expected:08x} of row {row}, as {index.path.name} says, found "
                        f"{found:08x}: the file is damaged or belongs to another data set. Run 'memload verify' "
                        "to see the extent, then restore the file or build again",
                        path=path,
                        rows=[row],
                    )

    def __len__(self) -> int:
        return self.starts[-1]

    def ask_for(self, rows: np.ndarray) -> None:
        """Have the pages of rows read from the disk, without waiting for them; about 2 µs a row."""
        for row in rows.tolist():
            shard, inside = self.locate(row)
            size = self.array.row_bytes
            will_need(self.maps[shard], HEADER_BYTES + inside * size, size)

    def locate(self, row: int) -> tuple[int, int]:
        """Return the shard that holds a row, and the row's number inside it."""
        shard = bisect_right(self.starts, row) - 1
        return shard, row - self.starts[shard]

    def gather(self, rows: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Copy rows into ``out`` ``(len(rows), H, W, C)``, contiguous and of the array's type; return ``out``.

        ``rows`` are int64, at least 0 and below ``len(self)``; the caller has checked that. Blocks while pages are
        read from disk, with the GIL released while bytes are copied. Allocates nothing that grows with rows.
        """
        if len(self.maps) == 1:
            # mode="clip" writes straight into out, "raise" goes through a buffer and takes 6 times as long
            np.take(self.maps[0], rows, axis=0, out=out, mode="clip")
            return out
        for position, row in enumerate(rows.tolist()):
            shard, inside = self.locate(row)
            out[position] = self.maps[shard][inside]
        return out


def open_shard(path: Path, shard: Shard, array: Array) -> np.ndarray:
    """Map one shard copy-on-write as ``(rows, H, W, C)``. Raises FormatError, naming what is wrong."""
    shape = (shard.rows, *array.shape)
    check_shard(path, shard, array)
    try:
        mapped = map_file(path)
    except (OSError, ValueError) as error:
        raise FormatError(f"{path}: cannot be mapped: {error}", path=path) from error
    if mapped.size != shard.bytes:
        raise FormatError(f"{path}: expected {shard.bytes:,} bytes, found {mapped.size:,}", path=path)
    header = mapped[:HEADER_BYTES].tobytes()
    if header != npy_header(array.descr, shape):
        raise FormatError(
            f"{path}: expected the NPY header of {describe(shape, array.descr)}, found {header[:80]!r}: "
            "the file is damaged or belongs to another data set. Restore the file or build again",
            path=path,
        )
    return mapped[HEADER_BYTES:].view(array.descr).reshape(shape)


def check_shard(path: Path, shard: Shard, array: Array) -> None:
    """Check that a shard is a file of the right size. Raises FormatError."""
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        raise MissingError(
            f"{path}: expected a shard of {shard.bytes:,} bytes, found no such file. "
            "Copy it beside its index, or build again",
            path=path,
        ) from None
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error}", path=path) from error
    if not path.is_file():
        raise FormatError(f"{path}: expected a file, found something else", path=path)
    if found != shard.bytes:
        what = describe((shard.rows, *array.shape), array.descr)
        state = "truncated" if found < shard.bytes else "too long"
        raise FormatError(
            f"{path}: expected {shard.bytes:,} bytes ({what}), found {found:,}: the shard is {state}. "
            "Restore the file or build again",
            path=path,
        )


def describe(shape: Sequence[int], descr: str) -> str:
    """Return e.g. ``10,000 rows of 224×224×3 uint8``."""
    return f"{shape[0]:,} rows of {'×'.join(map(str, shape[1:]))} {np.dtype(descr).name}"


def plan_shards(names: Sequence[str], rows: int, rows_a_shard: int, row_bytes: int) -> tuple[Shard, ...]:
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
    os.lseek(descriptor, offset, os.SEEK_SET)  # on Windows; a writer's descriptors are its own, so nobody moves them
    return os.write(descriptor, data)


def _pread(descriptor: int, size: int, offset: int) -> bytes:
    if hasattr(os, "pread"):
        return os.pread(descriptor, size, offset)
    os.lseek(descriptor, offset, os.SEEK_SET)
    return os.read(descriptor, size)


def _write(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:  # a write may be cut short, by a signal or by a limit whose error the next one then gets
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
