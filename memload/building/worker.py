"""What a worker does with a chunk of rows: it converts them, and writes pixels and records."""

import os
import stat
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from memload.building.conversion import Row, Settings
from memload.building.journal import (
    DONE,
    REJECTED,
    columns_crc32,
    is_intact,
    set_columns,
)
from memload.building.pool import Chunk, NoteRow, limit_memory
from memload.building.sources import DatasetSource
from memload.building.workspace import Workspace
from memload.building.writer import ShardWriter
from memload.errors import BuildError, DecodeError, describe_error

#: The largest block, just below 32 MiB, that teaches glibc to reuse freed memory.
_LARGE_BLOCK = (32 << 20) - (64 << 10)

#: What a worker may allocate for one picture. The dearest kinds (transparency, 16 bits) take 20
#: bytes a pixel.
_BYTES_PER_PIXEL, _EXTRA_BYTES = 32, 1 << 30

#: A reason is cut to this many characters, as an exception may quote a whole file.
_MAX_REASON = 1000


class ChunkResult(NamedTuple):
    """What came of a chunk of rows."""

    converted: int  #: rows that were not done before
    rejects: list[tuple[int, str]]  #: row and reason


class RowWork:
    """Converts chunks of rows. It is made in the worker."""

    def __init__(self, workspace: Workspace, *, in_worker: bool) -> None:
        self.source, self.schema = workspace.source, workspace.source.schema
        self.journal, self.resumed = workspace.journal, workspace.resumed
        self.former = workspace.former
        self.num_classes = None if self.source.classes is None else len(self.source.classes)
        self.writer = ShardWriter(workspace.folder, workspace.array)
        # A worker ignores Ctrl-C. So a KeyboardInterrupt there was raised by a sample's code, and
        # rejects only that sample.
        self.costs_a_sample = BaseException if in_worker else Exception
        if in_worker:
            _prepare_process(workspace)
        self.convert = workspace.settings.converter(self.schema)
        if self.former is not None:
            self.former_writer = ShardWriter(self.former.folder, self.former.array)

    def __call__(self, chunk: Chunk, note_row: NoteRow) -> ChunkResult:
        """Convert those rows of a chunk that are not done."""
        records = np.zeros(chunk.stop - chunk.start, self.journal.dtype)
        before = self.journal.read(*chunk) if self.resumed else records
        rejects: list[tuple[int, str]] = []
        converted = 0
        for record, record_before, row in zip(records, before, range(*chunk), strict=True):
            note_row(row)
            if self.resumed and (
                self._reuse_own_row(row, record, record_before)
                or self._reuse_former_row(row, record)
            ):
                continue
            converted += 1
            if reason := self._convert(row, record):
                rejects.append((row, reason))
        self.journal.write(chunk.start, records, rejects)
        return ChunkResult(converted, rejects)

    def close(self) -> None:
        """Close the shards."""
        self.writer.close()
        if self.former is not None:
            self.former_writer.close()

    def give_up(self, row: int, reason: str) -> ChunkResult:
        """Reject a row that no worker has survived."""
        records = np.zeros(1, self.journal.dtype)
        self._reject(row, records[0])
        self.journal.write(row, records, [(row, reason)])
        return ChunkResult(1, [(row, reason)])

    def difference(self, row: int) -> str:
        """Convert a finished row again; say how it differs from its record. Nothing is written."""
        before, record = self.journal.read(row, row + 1)[0], np.zeros(1, self.journal.dtype)[0]
        try:
            pixels = self._row(row, record).pixels
        except DecodeError as error:
            return f"sample {row} could be used, and now cannot: {error.reason:.200}"
        if zlib.crc32(pixels) != int(before["crc32"]):
            return f"sample {row} has other pixels"
        for name in self.schema:
            if record[f"column/{name}"].tobytes() != before[f"column/{name}"].tobytes():
                return f"sample {row} has another {name!r}"
        return ""

    def _convert(self, row: int, record: np.void) -> str:
        """Write one row and fill its record; return why it was rejected, if it was."""
        try:
            converted = self._row(row, record)
        except DecodeError as error:
            self._reject(row, record)
            reason = str(error.reason) or "no reason was given"
            return reason if len(reason) <= _MAX_REASON else reason[: _MAX_REASON - 1] + "…"
        self.writer.write(row, converted.pixels)
        record["status"], record["flags"] = DONE, converted.flags
        record["size"], record["crc32"] = converted.size, zlib.crc32(converted.pixels)
        record["total"], record["squares"] = converted.total, converted.squares
        record["file_size"] = converted.file_size
        record["file_mtime_ns"] = converted.file_mtime_ns
        return ""

    def _row(self, row: int, record: np.void) -> Row:
        """Convert a sample and set its record's columns. Raises DecodeError if it is unusable."""
        try:
            sample = self.source[row]
            converted = self.convert(sample)
            set_columns(record, self.schema, converted.columns)
            record["given_crc32"] = columns_crc32(self.schema, sample.columns)
            if self.num_classes is not None and not 0 <= record["column/label"] < self.num_classes:
                raise DecodeError(
                    f"label {record['column/label']} is not within 0 to {self.num_classes - 1}"
                )
        except (DecodeError, BuildError):  # BuildError: this process has run out of something
            raise
        except self.costs_a_sample as error:  # a data set's own code may raise anything
            raise DecodeError(describe_error(error)) from error
        return converted

    def _reject(self, row: int, record: np.void) -> None:
        record["status"], record["crc32"] = REJECTED, zlib.crc32(bytes(self.writer.array.row_bytes))
        self.writer.blank(row)  # a former build or a killed worker may have written it

    def _reuse_own_row(self, row: int, record: np.void, before: np.void) -> bool:
        """Keep a row that this build has finished before. Return whether it can be kept."""
        return self._is_valid(before, self.writer, row) and self._take_over(row, record, before)

    def _reuse_former_row(self, row: int, record: np.void) -> bool:
        """Copy the row of the same sample from `Former`. Return whether there is one to copy."""
        if self.former is None or (former_row := int(self.former.rows[row])) < 0:
            return False
        former_record = self.former.journal.read(former_row, former_row + 1)[0]
        if not self._is_valid(former_record, self.former_writer, former_row):
            return False
        if not self._take_over(row, record, former_record):
            return False
        self.writer.write(row, self.former_writer.read(former_row))
        return True

    def _is_valid(self, record: np.void, writer: ShardWriter, row: int) -> bool:
        is_done = is_intact(record) and record["status"] == DONE
        return is_done and zlib.crc32(writer.read(row)) == int(record["crc32"])

    def _take_over(self, row: int, record: np.void, before: np.void) -> bool:
        """Copy the earlier record if the sample is unchanged. Return whether it is."""
        _copy(before, record)
        if before["file_size"] < 0:  # no file: `difference` has compared some of them
            return True
        try:
            sample = self.source[row]
            if file_state(sample.image) != (before["file_size"], before["file_mtime_ns"]):
                raise DecodeError("its file has changed")
            if columns_crc32(self.schema, sample.columns) != before["given_crc32"]:
                raise DecodeError("its points have changed")
            names = [name for name, column in self.schema.items() if not column.points]
            set_columns(record, {name: self.schema[name] for name in names}, sample.columns)
        except self.costs_a_sample:  # it is converted again, which tells what is wrong
            _copy(np.zeros(1, record.dtype)[0], record)
            return False
        return True


def _copy(values: np.void, record: np.void) -> None:
    for name in values.dtype.names or ():
        record[name] = values[name]


def file_state(image: object) -> tuple[int, int] | None:
    """Return the size and mtime (ns) of an image given as a path; else None. Raises OSError."""
    if not isinstance(image, Path):
        return None
    status = os.stat(image)  # noqa: PTH116  # for every row
    return (status.st_size, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else None


def _prepare_process(workspace: Workspace) -> None:
    """Set what belongs to a whole process, such as Pillow's limits. A worker is ours to set up."""
    Image.MAX_IMAGE_PIXELS = None  # --max-pixels is the limit
    # glibc maps large blocks anew each time, with page faults, until it has seen one as large
    # freed: 2 % of the time for a picture with Pillow, 10 % with pillow-simd.
    bytes(_LARGE_BLOCK)
    settings = workspace.settings
    if not isinstance(settings, Settings) or isinstance(workspace.source, DatasetSource):
        return  # a data set's own code may print, and hold any memory
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libtiff prints every fault of a file
    limit_memory(_BYTES_PER_PIXEL * settings.max_pixels + _EXTRA_BYTES)
