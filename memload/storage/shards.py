"""Open the shards of an array, check them, and gather rows from them."""

import errno
import io
import os
import re
import threading
import time
import weakref
import zlib
from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np

from memload.errors import ChecksumError, FormatError, MissingError
from memload.storage.file_reads import bytes_of, ranges_of, read_ahead, read_direct
from memload.storage.format import HEADER_BYTES, npy_header, read_npy_header, seal_of
from memload.storage.index import Array, Index, Shard
from memload.storage.mapping import disk_reads, map_side_by_side
from memload.wording import counted, shape_text

#: A gather looks at the sizes of the shards that it touches, which takes up to 0.7 µs a shard, as
#: long as copying 8 KiB. With more shards than this, sizes are looked at once in 10 ms instead.
_SHARDS_CHECKED_EACH_TIME = 16
_SECONDS_BETWEEN_CHECKS = 0.01
#: After a gather that read from the disk, so many gathers read the files instead of the map.
_COLD_GATHERS = 64


class Shards:
    """All rows of one array, mapped from its shards. ``maps[s]`` is ``(rows, …)`` of shard s.

    ``paths`` are the files, and ``descriptors`` the open files. ``starts`` has the first row of
    every shard, then the number of all rows. The maps are copy-on-write: writing to them changes
    neither the files nor what other processes see. Reading is thread-safe.

    Opening checks that every shard exists, has the size and the header that the index requires, and
    that its first and last row have the checksums in the index. Raises FormatError.

    Shards must not change while they are open. Do not truncate or rewrite them in place; replace
    them by renaming other files. If a shard has been truncated, the next `gather` raises
    FormatError. If it is truncated while a `gather` copies rows from the map, the process ends with
    SIGBUS. With more than 16 shards, sizes are looked at once in 10 ms. A truncation within that
    time also ends the process. ``memload verify`` finds rows that were rewritten.
    """

    def __init__(self, index: Index, name: str = "image") -> None:
        self.array = index.array(name)
        # An absolute path, as in a concatenation in memory, stays as it is.
        self.paths = [index.path.parent / shard.file for shard in self.array.shards]
        self._starts = np.cumsum([0, *(shard.rows for shard in self.array.shards)])
        self.starts: list[int] = self._starts.tolist()
        self.descriptors: list[int] = []
        weakref.finalize(self, _close, self.descriptors)
        for path, shard in zip(self.paths, self.array.shards, strict=True):
            check_shard(path, shard, self.array, index.path)
            self.descriptors.append(_open(path))
        self._next_size_check = 0.0
        # One gather after another asks the disk for its rows, so that the first is served first.
        # If all ask at once, the first batches of 8 threads arrive together: 0.76 against 0.95 of
        # O_DIRECT for a quarter of a cold file.
        self._asking = threading.Lock()
        _open_shards.add(self)
        # The first gather shows whether rows are in RAM.
        self._cold_gathers_left = int(hasattr(os, "posix_fadvise"))
        self._map()
        for number in range(len(self.maps)):
            self._check_content(number, index)

    def _map(self) -> None:
        """Map all shards into ``self._table`` and ``self.maps``.

        The shards are mapped one behind another, each a whole number of rows after the first. So
        one array, ``self._table``, has the rows of all shards, with gaps of unused rows in between,
        and one call of NumPy gathers rows from any number of shards:

            header │ rows of shard 0 │ gap │ rows of shard 1 │ gap │ rows of shard 2
                     └────────────────────────── self._table ──────────────────────┘
        """
        row_bytes, shards = self.array.row_bytes, self.array.shards
        try:
            sizes = [shard.bytes for shard in shards]
            mapped, offsets = map_side_by_side(self.descriptors, sizes, row_bytes)
        except (OSError, OverflowError) as error:
            path = self.paths[0]
            raise FormatError(f"{path} cannot be mapped: {error}.", path=path) from error
        pixels = mapped[self.array.header_bytes :]
        pixels = pixels[: len(pixels) // row_bytes * row_bytes]
        self._table = pixels.view(self.array.descr).reshape((-1, *self.array.shape))
        first_rows = np.array(offsets) // row_bytes
        self._rows_in_gaps = first_rows - self._starts[:-1]
        self.maps = [
            self._table[first : first + shard.rows]
            for first, shard in zip(first_rows.tolist(), shards, strict=True)
        ]

    def _check_content(self, number: int, index: Index) -> None:
        """Check a shard's header, and its first and last row. Raises FormatError."""
        path, descriptor = self.paths[number], self.descriptors[number]
        shard = self.array.shards[number]
        first_row, row_bytes = self.starts[number], self.array.row_bytes
        header_bytes = self.array.header_bytes
        checksums = index.crc32[self.array.name][first_row : first_row + shard.rows]
        ends = (0, shard.rows - 1)
        try:
            header = os.pread(descriptor, header_bytes, 0)
            rows = [os.pread(descriptor, row_bytes, header_bytes + row * row_bytes) for row in ends]
        except OSError as error:
            raise FormatError(f"{path} cannot be read: {error.strerror}.", path=path) from error
        check_header(path, header, shard, self.array, checksums, index.path)
        for row, content in zip(ends, rows, strict=True):
            found = zlib.crc32(content)
            if found != checksums[row]:
                row_of_all = first_row + row
                raise ChecksumError(
                    f"{path} is damaged or belongs to another data set: row {row_of_all} has "
                    f"checksum {found:08x} instead of {checksums[row]:08x}, as {index.path.name} "
                    "says. Run 'memload verify' to see the extent. Then restore the file, or run "
                    "'memload build' again.",
                    path=path,
                    rows=[row_of_all],
                )

    def __len__(self) -> int:
        return self.starts[-1]

    def shard_of(self, rows: np.ndarray) -> np.ndarray:
        """Return the shard that holds each row, int64 ``(n,)``."""
        return np.searchsorted(self._starts, rows, side="right") - 1

    def locate(self, row: int) -> tuple[int, int]:
        """Return the shard that holds a row, and the row's number inside it."""
        shard = bisect_right(self.starts, row) - 1
        return shard, row - self.starts[shard]

    def offsets_of(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the shard of each row (int64), and the offset of the row in its file in bytes."""
        shard = self.shard_of(rows)
        row_in_shard = rows - self._starts[shard]
        return shard, self.array.header_bytes + row_in_shard * self.array.row_bytes

    def gather(
        self,
        rows: np.ndarray,
        out: np.ndarray,
        after_read: Callable[[np.ndarray], None] | None = None,
    ) -> np.ndarray:
        """Copy rows into ``out`` and return it.

        ``rows`` is int64 ``(n,)``. The caller checks that all are at least 0 and below
        ``len(self)``. ``out`` is ``(n, …)``, such as ``(n, H, W, C)`` for images, contiguous and of
        the array's dtype. Blocks while rows are read from the disk; the GIL is released meanwhile.
        Raises FormatError if a shard has been truncated or cannot be read.

        Rows that are in RAM are copied from the map. If one of the last 64 gathers read from the
        disk, rows are read from the files instead, and what was written to the map does not show.
        The kernel is asked for all of the rows before the first is copied. That keeps the disk
        busy, and it reads these rows only. On two cores and one disk, a Loader of 2 to 8 threads
        reaches 0.72 to 0.81 of the speed of O_DIRECT this way. Page faults reach 0.02.

        ``after_read(rows)`` is called if rows were read from the files. They are in the page cache
        then, and it may drop some.
        """
        shards = self.shard_of(rows)
        self.check_sizes(set(shards.tolist()))
        reads_before = disk_reads()
        if self.is_cold:
            self._read(rows, out)
            if after_read is not None:
                after_read(rows)
        else:
            # mode="clip" copies straight into out. "raise" copies through a buffer, 6 times as
            # slowly.
            table_rows = rows + self._rows_in_gaps[shards]
            np.take(self._table, table_rows, axis=0, out=out, mode="clip")
        if disk_reads() > reads_before:
            self._cold_gathers_left = _COLD_GATHERS
        elif self.is_cold:
            self._cold_gathers_left -= 1
        return out

    @property
    def is_cold(self) -> bool:
        """Whether the next gather reads the files: one of the last 64 has read from the disk."""
        return self._cold_gathers_left > 0

    def _read(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Read rows from the files into ``out``, through the page cache."""
        shards, start = self.offsets_of(rows)
        stop = start + self.array.row_bytes
        ranges = ranges_of(shards, start, stop, touches=start[1:] == stop[:-1])
        columns = (ranges.file, ranges.offset, ranges.size, ranges.position)
        parts = list(zip(*(column.tolist() for column in columns), strict=True))
        with self._asking:
            for shard, offset, size, _ in parts:
                read_ahead(self.descriptors[shard], offset, size)
        memory = bytes_of(out)
        for shard, offset, size, position in parts:
            self.read(shard, offset, memory[position : position + size], size)

    def read(
        self, shard: int, offset: int, memory: memoryview, needed: int, direct: int | None = None
    ) -> None:
        """Read a part of a shard into ``memory``, at least ``needed`` bytes of it.

        Reads through the page cache, or past it through ``direct``, a descriptor for that (see
        `open_direct`). Blocks; the GIL is released meanwhile. Raises FormatError, which names the
        row and the shard, if it cannot be read or ends too early.
        """
        done = 0
        try:
            if direct is not None:
                done = read_direct(direct, memory, offset)
            while done < needed:
                count = os.preadv(self.descriptors[shard], [memory[done:]], offset + done)
                if not count:
                    self._raise_truncated(shard)
                done += count
        except OSError as error:
            self._raise_unreadable(shard, offset, needed, error)

    def check_sizes(self, shards: Collection[int]) -> None:
        """Raise FormatError if one of these shards is shorter than when it was opened."""
        many = len(shards) > _SHARDS_CHECKED_EACH_TIME
        if many and time.monotonic() < self._next_size_check:
            return
        for shard in range(len(self.maps)) if many else shards:
            if self._size_of(shard) < self.array.shards[shard].bytes:
                self._raise_truncated(shard)
        if many:
            self._next_size_check = time.monotonic() + _SECONDS_BETWEEN_CHECKS

    def _size_of(self, shard: int) -> int:
        return os.lseek(self.descriptors[shard], 0, os.SEEK_END)

    def _raise_truncated(self, shard: int) -> NoReturn:
        path, size = self.paths[shard], self._size_of(shard)
        raise FormatError(
            f"{path} was truncated while it was open: it has {size:,} bytes instead of "
            f"{self.array.shards[shard].bytes:,}, and row {self._row_at(shard, size):,} is the "
            "first one that it lacks. Restore it, or run 'memload build' again. Then open the data "
            "set anew.",
            path=path,
        )

    def _raise_unreadable(self, shard: int, offset: int, size: int, error: OSError) -> NoReturn:
        path, failing = self.paths[shard], self._first_unreadable(shard, offset, size)
        raise FormatError(
            f"{path} cannot be read at byte {failing:,}, where row "
            f"{self._row_at(shard, failing):,} is: {error.strerror}. Check the disk, then restore "
            "the file or run 'memload build' again.",
            path=path,
        ) from error

    def _first_unreadable(self, shard: int, offset: int, size: int) -> int:
        """Return the first byte in the rows of a part of a shard that cannot be read.

        A direct read does not report it, so each row is read once more, through the page cache. If
        that succeeds, it is the last byte of the part. The part may begin inside of a row, which is
        read because of its block only.
        """
        header_bytes, row_bytes = self.array.header_bytes, self.array.row_bytes
        first_row = -(-max(0, offset - header_bytes) // row_bytes)
        memory = bytearray(row_bytes)
        for start in range(header_bytes + first_row * row_bytes, offset + size, row_bytes):
            try:
                count = os.preadv(self.descriptors[shard], [memory], start)
            except OSError:
                return start
            if count < row_bytes:
                return start + count
        return offset + size - 1

    def _row_at(self, shard: int, offset: int) -> int:
        """Return the row that has a byte of a shard. That is its first one for the header."""
        row_in_shard = max(0, offset - self.array.header_bytes) // self.array.row_bytes
        return self.starts[shard] + row_in_shard


#: So that a forked child can renew their locks: the threads that hold one are not in the child.
_open_shards: weakref.WeakSet[Shards] = weakref.WeakSet()


def _renew_locks() -> None:
    for shards in _open_shards:
        shards._asking = threading.Lock()


os.register_at_fork(after_in_child=_renew_locks)


def _open(path: Path) -> int:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        advice = "Check its permissions."
        if error.errno == errno.EMFILE:
            advice = (
                "Every shard needs an open file. Raise the limit (ulimit -n), or build fewer and "
                "larger shards (--shard-size)."
            )
        message = f"{path} cannot be opened: {error.strerror}. {advice}"
        raise FormatError(message, path=path) from error
    if hasattr(os, "posix_fadvise"):
        # Read what is asked for and no more. By itself, the kernel reads ahead of what it takes for
        # a sequence: 4 to 11 % more than the rows, which nobody would then drop.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    return descriptor


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def check_shard(path: Path, shard: Shard, array: Array, index: Path) -> None:
    """Check that a shard is a file of the right size in the folder of its index.

    The shard and the index may be links, as they are in caches. But the shard must be in the folder
    of the index, or of the file that the index is a link to. So no data set reaches into a folder
    that its user did not name. Raises FormatError.
    """
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        raise MissingError(
            f"{path} is missing: a shard of {shard.bytes:,} bytes. Copy it beside its index, or "
            "run 'memload build' again.",
            path=path,
        ) from None
    except OSError as error:
        raise FormatError(f"{path} cannot be read: {error}.", path=path) from error
    if path.is_symlink():
        target, folders = path.resolve(), (path.parent.resolve(), index.resolve().parent)
        if target.parent not in folders:
            raise FormatError(
                f"{path} is a link to {target}, outside the folder of {index.name}. Move the shard "
                f"here, or open the index beside {target.name}.",
                path=path,
            )
    if not path.is_file():
        raise FormatError(f"{path} is not a file. Restore the shard there.", path=path)
    if found != shard.bytes:
        state = "truncated" if found < shard.bytes else "too long"
        content = describe((shard.rows, *array.shape), array.descr)
        raise FormatError(
            f"{path} is {state}: it has {found:,} bytes instead of {shard.bytes:,} ({content}). "
            "Restore it, or run 'memload build' again.",
            path=path,
        )


def check_header(
    path: Path, header: bytes, shard: Shard, array: Array, checksums: np.ndarray, index: Path
) -> None:
    """Check that a shard's header fits its rows, and its seal their checksums.

    Raises FormatError, and ChecksumError if only the seal is another one.
    """
    shape = (shard.rows, *array.shape)
    shapes = [shape, (*shape, 1)] if array.kind == "mask" else [shape]
    if array.header_bytes != HEADER_BYTES:
        _check_foreign_header(path, header, shapes, array.descr)
        return
    found = re.search(rb"# ([0-9a-f]{16})\n\Z", header)
    seal = found[1].decode() if found else ""
    if header not in [npy_header(array.descr, possible, seal) for possible in shapes]:
        raise FormatError(
            f"{path} is damaged or belongs to another data set: its header is not that of "
            f"{describe(shape, array.descr)}; it starts with {header[:80]!r}. Restore the file, or "
            "run 'memload build' again.",
            path=path,
        )
    if seal and seal != seal_of(checksums):
        raise ChecksumError(
            f"{path} does not belong to {index.name}: its rows have seal {seal} instead of "
            f"{seal_of(checksums)}. Restore the right file, or run 'memload build' again.",
            path=path,
        )


def _check_foreign_header(
    path: Path, header: bytes, shapes: Sequence[tuple[int, ...]], descr: str
) -> None:
    """Check the header of an NPY file that another program wrote, which has one of these shapes.

    Raises FormatError.
    """
    try:
        found = read_npy_header(io.BytesIO(header))
        is_right = found[1:] == (False, np.dtype(descr), len(header)) and found.shape in shapes
    except ValueError:
        is_right = False
    if not is_right:
        raise FormatError(
            f"{path} is damaged or was replaced: its header is not that of "
            f"{describe(shapes[0], descr)}; it starts with {header[:80]!r}. Restore the file, or "
            "run 'memload join' again.",
            path=path,
        )


def check_files(index: Index) -> None:
    """Raise FormatError unless all files of a data set are there, and are those of its index."""
    for array in index.arrays:
        Shards(index, array.name)


def describe(shape: Sequence[int], descr: str) -> str:
    """Return, for example, ``10,000 rows of 224×224×3 uint8``. ``shape`` is (rows, …)."""
    return f"{counted(shape[0], 'row')} of {shape_text(shape[1:])} {np.dtype(descr).name}"
