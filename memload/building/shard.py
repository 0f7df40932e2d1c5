"""A shard of a build: some rows, with one file per array and one journal.

::

    out.building/out-00007-of-00313.bin    pixels: each row at its own offset
    out.building/00007.rows                the journal: one record per row, at its own offset
    out.building/00007.done                the same file, once the shard is complete
    out.building/00007.reasons             why rows were rejected; sparse, at fixed offsets

One process builds a shard, with its workers, and holds the lock of the journal (``flock``). The new
name of the journal is all that says that a shard is done.
"""

import fcntl
import os
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from memload.building.record import REJECTED, are_intact, crc32_field, sign
from memload.storage.format import HEADER_BYTES, array_path, npy_header, seal_of, shard_names
from memload.storage.index import Array, sync
from memload.storage.index import Shard as ShardFile

#: A build's own file that says what is built. Without it, the rest of the folder does not count.
PLAN = "plan.json"

_REASON_BYTES = 4000


def in_shards(
    arrays: Sequence[Array], output: Path, rows: int, shard_size: int | None
) -> list[Array]:
    """Return arrays of so many rows with the files of an output, of at most ``shard_size`` bytes.

    Without a limit, each has one. All are split at the same rows. Raises ValueError if a file has
    no room for one row.
    """
    limit, largest = rows, max(arrays, key=lambda array: array.row_bytes)
    if shard_size is not None:
        limit = min(rows, (shard_size - HEADER_BYTES) // largest.row_bytes)
    if limit < 1:
        raise ValueError(
            f"shard_size: {shard_size:,} bytes are too few: a shard with one row of "
            f"{largest.name!r} has {HEADER_BYTES + largest.row_bytes:,}."
        )
    held = [min(limit, rows - start) for start in range(0, rows, limit)]
    return [
        replace(
            array,
            shards=tuple(
                ShardFile(name, count, HEADER_BYTES + count * array.row_bytes)
                for name, count in zip(
                    shard_names(array_path(output, array.name), len(held)), held, strict=True
                )
            ),
        )
        for array in arrays
    ]


class Shard:
    """Rows ``start`` to ``stop``, exclusively, of a build in ``folder``.

    ``arrays`` have one file each. ``seed`` is the checksum of the build's plan.
    """

    def __init__(
        self,
        folder: Path,
        number: int,
        start: int,
        arrays: Sequence[Array],
        dtype: np.dtype[Any],
        seed: int,
    ) -> None:
        self.folder, self.number, self.start = folder, number, start
        self.arrays, self.dtype, self.seed = arrays, dtype, seed
        self.rows = arrays[0].rows
        self.stop = start + self.rows
        self.journal, self.done = folder / f"{number:05d}.rows", folder / f"{number:05d}.done"
        self.reasons_path = folder / f"{number:05d}.reasons"

    @property
    def is_done(self) -> bool:
        """Whether all rows are converted or rejected."""
        return self.done.exists()

    @contextmanager
    def locked(self, deadline: float) -> Iterator[bool]:
        """Hold the lock meanwhile. Yields whether this process has it, and the shard is not done.

        Another process is waited for until the deadline, a time of the monotonic clock. Forked
        workers keep the lock until they have ended, too.
        """
        if self.is_done or not (self.folder / PLAN).exists():  # … or it was published
            yield False
            return
        # Write-only: workers open readable files anew, and a new descriptor does not hold the lock.
        descriptor = os.open(self.journal, os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            # Whoever had the lock may have renamed the journal, or removed it.
            is_ours = _lock(descriptor, deadline) and _is_open_file(descriptor, self.journal)
            if self.is_done:  # it became done just before `os.open`, which has made a new journal
                self.journal.unlink(missing_ok=True)
                is_ours = False
            if is_ours:
                self._create()
            yield is_ours
        finally:
            os.close(descriptor)

    def _create(self) -> None:
        """Make all files at their full size. Rows that are there stay, and the rest are holes."""
        self._write_headers({})
        for array in self.arrays:
            os.truncate(self.folder / array.shards[0].file, array.shards[0].bytes)
        os.truncate(self.journal, self.rows * self.dtype.itemsize)

    def _write_headers(self, seals: Mapping[str, str]) -> None:
        for array in self.arrays:
            header = npy_header(array.descr, (self.rows, *array.shape), seals.get(array.name, ""))
            file = self.folder / array.shards[0].file
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                _write(descriptor, header, 0)
            finally:
                os.close(descriptor)

    def records(self) -> np.ndarray:
        """Return the records of all rows. Those that are not intact have the status 0."""
        path = self.done if self.is_done else self.journal
        count = self.rows if path.exists() else 0
        records = np.fromfile(path, self.dtype, count) if count else np.zeros(0, self.dtype)
        if len(records) < self.rows:  # the file was cut short
            records = np.concatenate([records, np.zeros(self.rows - len(records), self.dtype)])
        records["status"][~are_intact(records, self.seed)] = 0
        return records

    def reasons(self) -> dict[int, str]:
        """Return why rows were rejected."""
        rejected = np.flatnonzero(self.records()["status"] == REJECTED)
        reasons = {}
        with self.reasons_path.open("a+b") as file:
            for row in rejected.tolist():
                file.seek(row * _REASON_BYTES)
                text = file.read(_REASON_BYTES).rstrip(b"\0")
                reasons[self.start + row] = text.decode(errors="ignore")
        return reasons

    def finish(self) -> None:
        """Put everything on the disk. Then the journal gets the name that says that it is done."""
        records = self.records()
        self._write_headers(
            {array.name: seal_of(records[crc32_field(array.name)]) for array in self.arrays}
        )
        pixels = [self.folder / array.shards[0].file for array in self.arrays]
        for path in (*pixels, self.journal, self.reasons_path):
            sync(path)
        self.journal.rename(self.done)
        sync(self.folder)

    def reopen_rejected(self) -> None:
        """Let a shard with rejected rows count as not done, so that they are tried again.

        Nobody may publish meanwhile.
        """
        if self.is_done and self.reasons():
            self.done.rename(self.journal)


def shards_of(
    folder: Path, arrays: Sequence[Array], dtype: np.dtype[Any], seed: int
) -> list[Shard]:
    """Return the shards of a build, whose files the arrays name."""
    shards, start = [], 0
    for number, files in enumerate(zip(*(array.shards for array in arrays), strict=True)):
        own = [replace(array, shards=(file,)) for array, file in zip(arrays, files, strict=True)]
        shards.append(Shard(folder, number, start, own, dtype, seed))
        start += files[0].rows
    return shards


def _lock(descriptor: int, deadline: float) -> bool:
    """Lock a file. Returns false if another process has the lock until the deadline."""
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        except OSError:  # this file system has no locks
            return True
        else:
            return True


def _is_open_file(descriptor: int, path: Path) -> bool:
    """Say whether a path still leads to the file that is open."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


class ShardWriter:
    """The open files of a shard, in the process that converts its rows. Not thread-safe.

    Raises OSError, for example if the disk is full.
    """

    def __init__(self, shard: Shard) -> None:
        self._shard, self._size = shard, shard.dtype.itemsize
        pixels = [shard.folder / array.shards[0].file for array in shard.arrays]
        paths = [*pixels, shard.journal, shard.reasons_path]
        self._files = [os.open(path, os.O_RDWR | os.O_CREAT, 0o666) for path in paths]
        *self._pixels, self._journal, self._reasons = self._files

    def close(self) -> None:
        """Close the files."""
        for descriptor in self._files:
            os.close(descriptor)

    def has_pixels(self, row: int, record: np.void) -> bool:
        """Say whether the row of each array has the checksum that a record says."""
        for descriptor, array in zip(self._pixels, self._shard.arrays, strict=True):
            content = os.pread(descriptor, array.row_bytes, self._offset(row, array.row_bytes))
            if zlib.crc32(content) != record[crc32_field(array.name)]:
                return False
        return True

    def write_row(self, row: int, contents: Sequence[np.ndarray]) -> None:
        """Write a row of each array."""
        for descriptor, content in zip(self._pixels, contents, strict=True):
            _write(descriptor, content.data, self._offset(row, content.nbytes))

    def reject_row(self, row: int, record: np.void, reason: str) -> None:
        """Make a row all zeros, which a killed worker may have written, and keep the reason."""
        blanks = [np.zeros(array.row_bytes, np.uint8) for array in self._shard.arrays]
        for array, blank in zip(self._shard.arrays, blanks, strict=True):
            record[crc32_field(array.name)] = zlib.crc32(blank.data)
        if not self.has_pixels(row, record):  # a hole in the file stays one
            self.write_row(row, blanks)
        text = reason.encode("utf-8", "backslashreplace")[:_REASON_BYTES]
        offset = (row - self._shard.start) * _REASON_BYTES
        _write(self._reasons, text.ljust(_REASON_BYTES, b"\0"), offset)

    def read_records(self, start: int, stop: int) -> np.ndarray:
        """Return the records of some rows. Those that are not intact have the status 0."""
        offset = (start - self._shard.start) * self._size
        data = bytearray(os.pread(self._journal, (stop - start) * self._size, offset))
        records = np.frombuffer(data, self._shard.dtype, stop - start)
        records["status"][~are_intact(records, self._shard.seed)] = 0
        return records

    def write_records(self, start: int, records: np.ndarray) -> None:
        """Sign and write the records of some rows."""
        sign(records, self._shard.seed)
        _write(self._journal, records.tobytes(), (start - self._shard.start) * self._size)

    def _offset(self, row: int, size: int) -> int:
        return HEADER_BYTES + (row - self._shard.start) * size


def _write(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data).cast("B")
    while view:  # a full disk or a signal may cut a write short; the next one then tells the error
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written
