"""The rows of an array, in its files: open and check them, and copy rows to memory."""

import io
import mmap
import os
import re
import weakref
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from memload.errors import ChecksumError, FormatError, MissingError
from memload.storage.format import read_npy_header, seal_of
from memload.storage.index import Array, Index, Shard
from memload.storage.mapping import disk_reads, map_side_by_side
from memload.wording import counted, shape_text

#: The kernel reads at most this much for one request to read ahead.
_ADVICE_BYTES = 128 << 10
#: After a gather that read from the disk, so many gathers read the files instead of the map.
_COLD_GATHERS = 64


class Shards:
    """All rows of one array, mapped from its shards. ``maps[s]`` is ``(rows, …)`` of shard s.

    ``array`` describes them and says where they lie, ``paths`` are the files, and ``descriptors``
    the open files. The maps are copy-on-write: writing to them changes neither the files nor what
    other processes see. Reading is thread-safe.

    Opening checks that each shard exists, has the size and the header that the index requires, and
    that its first and last row have the checksums in the index. Raises FormatError, and OSError if
    a file cannot be opened or mapped.

    Shards must not change while they are open. Replace them by renaming other files. If a shard has
    been truncated, the next `gather` raises FormatError. If it is truncated while a `gather` copies
    rows from the map, the process ends with SIGBUS. ``memload verify`` finds rows that were
    rewritten.
    """

    def __init__(self, index: Index, name: str = "image") -> None:
        self.array = index.array(name)
        # An absolute path, as in a concatenation in memory, stays as it is.
        self.paths = [index.path.parent / shard.file for shard in self.array.shards]
        self.descriptors: list[int] = []
        weakref.finalize(self, _close, self.descriptors)
        for path, shard in zip(self.paths, self.array.shards, strict=True):
            check_shard(path, shard, self.array)
            self.descriptors.append(_open(path))
        self._map()
        for number, checksums in enumerate(np.split(index.crc32[name], self.array.starts[1:-1])):
            self._check_content(number, checksums, index.path.name)
        #: For so many gathers, rows are read from the files. The first shows if they are in RAM.
        self._cold_gathers_left = int(hasattr(os, "posix_fadvise"))

    def _map(self) -> None:
        """Map all shards one behind another, each a whole number of rows after the first.

        So one array, ``_table``, has the rows of all shards, with gaps of unused rows in between,
        and one call of NumPy gathers rows from any number of shards:

            header │ rows of shard 0 │ gap │ rows of shard 1 │ gap │ rows of shard 2
                     └──────────────────────────── _table ─────────────────────────┘
        """
        row_bytes, shards = self.array.row_bytes, self.array.shards
        sizes = [shard.bytes for shard in shards]
        mapped, offsets = map_side_by_side(self.descriptors, sizes, row_bytes)
        rows = mapped[self.array.header_bytes :]
        rows = rows[: len(rows) // row_bytes * row_bytes]
        self._table = rows.view(self.array.descr).reshape((-1, *self.array.shape))
        first_rows = np.array(offsets) // row_bytes
        self._rows_in_gaps = first_rows - self.array.starts[:-1]
        self._starts: list[int] = self.array.starts.tolist()
        self.maps = [
            self._table[first : first + shard.rows]
            for first, shard in zip(first_rows.tolist(), shards, strict=True)
        ]

    def _check_content(self, number: int, checksums: np.ndarray, index_name: str) -> None:
        """Check a shard's header, and its first and last row. Raises FormatError."""
        path, array, descriptor = self.paths[number], self.array, self.descriptors[number]
        ends = self._starts[number], self._starts[number + 1] - 1
        offsets = array.locate(np.array(ends))[1].tolist()
        try:
            header = os.pread(descriptor, array.header_bytes, 0)
            contents = [os.pread(descriptor, array.row_bytes, offset) for offset in offsets]
        except OSError as error:
            raise _unreadable(path, error) from error
        check_header(path, header, array.shards[number], array, checksums, index_name)
        for row, content, expected in zip(ends, contents, checksums[[0, -1]], strict=True):
            if (found := zlib.crc32(content)) != expected:
                raise ChecksumError(
                    f"{path} is damaged or belongs to another data set: row {row} has checksum "
                    f"{found:08x} instead of {expected:08x}, as {index_name} says. Run "
                    "'memload verify' to see the extent. Then restore the file, or run 'memload "
                    "build' again.",
                    path=path,
                    rows=[row],
                )

    def __len__(self) -> int:
        return self.array.rows

    def row(self, row: int) -> np.ndarray:
        """Return one row, which is in range, as a view of the map.

        Raises FormatError if its shard has been truncated.
        """
        shard = bisect_right(self._starts, row) - 1
        self.check_sizes([shard])
        found: np.ndarray = self.maps[shard][row - self._starts[shard], ...]
        return found

    def gather(self, rows: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Copy rows into ``out`` and return it.

        ``rows`` is int64 ``(n,)``. The caller checks that all are at least 0 and below
        ``len(self)``. ``out`` is ``(n, …)``, such as ``(n, H, W, C)`` for images, contiguous and of
        the array's dtype. Blocks while rows are read from the disk; the GIL is released meanwhile.
        Raises FormatError if a shard has been truncated or cannot be read.

        Rows that are in RAM are copied from the map. If one of the last 64 gathers read from the
        disk, rows are read from the files instead, and what was written to the map does not show.
        The kernel is asked for all of the rows before the first is copied, which keeps the disk
        busy. Page faults would ask for one row after another: they reach 0.02 of the disk's speed.
        """
        shards = self.array.shard_of(rows)
        self.check_sizes(set(shards.tolist()))
        reads_before = disk_reads()
        if self._cold_gathers_left > 0:
            self._cold_gathers_left -= 1
            self._read_rows(rows, out)
        else:
            # mode="clip" copies straight into out. "raise" copies through a buffer, 6 times as
            # slowly.
            table_rows = rows + self._rows_in_gaps[shards]
            np.take(self._table, table_rows, axis=0, out=out, mode="clip")
        if disk_reads() > reads_before:
            self._cold_gathers_left = _COLD_GATHERS
        return out

    def _read_rows(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Read rows from the files: ask the kernel for all of them, then copy one after another."""
        shards, offsets = (part.tolist() for part in self.array.locate(rows))
        row_bytes = self.array.row_bytes
        for shard, offset in zip(shards, offsets, strict=True):
            for start in range(offset, offset + row_bytes, _ADVICE_BYTES):
                size = min(_ADVICE_BYTES, offset + row_bytes - start)
                os.posix_fadvise(self.descriptors[shard], start, size, os.POSIX_FADV_WILLNEED)
        memory = out.reshape(-1).view(np.uint8).reshape(-1, row_bytes)
        for shard, offset, row in zip(shards, offsets, memory, strict=True):
            self.read(shard, offset, row.data)

    def read(self, shard: int, offset: int, memory: memoryview) -> None:
        """Fill ``memory`` with the bytes of a shard from ``offset`` on, through the page cache.

        Blocks; the GIL is released meanwhile. Raises FormatError if the shard has been truncated
        or cannot be read.
        """
        done = 0
        while done < len(memory):
            try:
                count = os.preadv(self.descriptors[shard], [memory[done:]], offset + done)
            except OSError as error:
                raise _unreadable(self.paths[shard], error) from error
            if not count:
                self.check_sizes([shard])
            done += count

    def check_sizes(self, shards: Iterable[int]) -> None:
        """Raise FormatError if one of these shards is shorter than when it was opened."""
        for shard in shards:
            size = os.lseek(self.descriptors[shard], 0, os.SEEK_END)
            if size < self.array.shards[shard].bytes:
                path = self.paths[shard]
                raise FormatError(
                    f"{path} was truncated while it was open: it has {size:,} bytes instead of "
                    f"{self.array.shards[shard].bytes:,}. Restore it, or run 'memload build' "
                    "again. Then open the data set anew.",
                    path=path,
                )


def open_direct(descriptor: int) -> int | None:
    """Open the file of a descriptor once more, with O_DIRECT, to read past the page cache.

    The caller closes it. Offsets, sizes and addresses of memory must be multiples of the page.
    Returns None where that cannot be done, as on some overlays and FUSE file systems.
    """
    try:
        # This path is the same file, also if another one has taken its name since.
        path = f"/proc/self/fd/{descriptor}"
        direct = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except (OSError, AttributeError):  # the attribute is missing where systems lack it
        return None
    try:
        with mmap.mmap(-1, mmap.PAGESIZE) as page:
            os.preadv(direct, [page], 0)
    except OSError:
        os.close(direct)
        return None
    return direct


def _open(path: Path) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    if hasattr(os, "posix_fadvise"):
        # Read what is asked for and no more. By itself, the kernel reads ahead of what it takes for
        # a sequence: 4 to 11 % more than the rows.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    return descriptor


def _unreadable(path: Path, error: OSError) -> FormatError:
    return FormatError(
        f"{path} cannot be read: {error.strerror}. Check the disk, then restore the file or run "
        "'memload build' again.",
        path=path,
    )


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def check_shard(path: Path, shard: Shard, array: Array) -> None:
    """Check that a shard is there and has the right size. Raises FormatError."""
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        raise MissingError(
            f"{path} is missing: a shard of {shard.bytes:,} bytes. Copy it beside its index, or "
            "run 'memload build' again.",
            path=path,
        ) from None
    if found != shard.bytes:
        state = "truncated" if found < shard.bytes else "too long"
        content = describe((shard.rows, *array.shape), array.descr)
        raise FormatError(
            f"{path} is {state}: it has {found:,} bytes instead of {shard.bytes:,} ({content}). "
            "Restore it, or run 'memload build' again.",
            path=path,
        )


def check_header(
    path: Path | str,
    header: bytes,
    shard: Shard,
    array: Array,
    checksums: np.ndarray,
    index_name: str,
) -> None:
    """Check that a shard's header fits its rows, and its seal their checksums.

    Raises FormatError, and ChecksumError if only the seal is another one.
    """
    shape = (shard.rows, *array.shape)
    shapes = [shape, (*shape, 1)] if array.kind == "mask" else [shape]
    try:
        found = read_npy_header(io.BytesIO(header))
        is_right = (
            found[1:] == (False, np.dtype(array.descr), len(header)) and found.shape in shapes
        )
    except ValueError:
        is_right = False
    if not is_right:
        raise FormatError(
            f"{path} is damaged or belongs to another data set: its header is not that of "
            f"{describe(shape, array.descr)}; it starts with {header[:80]!r}. Restore the file, or "
            "run 'memload build' again.",
            path=path,
        )
    seal = re.search(r"# (.*)\n\Z", header.decode("latin-1"))
    if seal and seal[1] != seal_of(checksums):
        raise ChecksumError(
            f"{path} does not belong to {index_name}: its rows have seal {seal[1]!r:.40} instead "
            f"of {seal_of(checksums)!r}. Restore the right file, or run 'memload build' again.",
            path=path,
        )


def check_files(index: Index) -> None:
    """Raise FormatError unless all files of a data set are there, and are those of its index."""
    for array in index.arrays:
        Shards(index, array.name)


def describe(shape: Sequence[int], descr: str) -> str:
    """Return, for example, ``10,000 rows of 224×224×3 uint8``. ``shape`` is (rows, …)."""
    return f"{counted(shape[0], 'row')} of {shape_text(shape[1:])} {np.dtype(descr).name}"
