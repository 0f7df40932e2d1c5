"""What a worker does: it converts ranges of rows, straight into the shards."""

import os
import sys
import warnings
import zlib
from collections.abc import Callable

import numpy as np
from PIL import Image

from memload.building.conversion import Row, Settings
from memload.building.journal import DONE, REJECTED, intact, seal, set_columns
from memload.building.sources import DatasetSource
from memload.building.unfinished import Unfinished
from memload.building.workers import Task, limit_memory
from memload.building.writer import ShardWriter
from memload.errors import BuildError, DecodeError, describe_error

#: Below 32 MiB, the largest block that teaches glibc.
_LARGE = (32 << 20) - (64 << 10)

#: What a worker may take for one picture. The dearest kinds met (transparency, 16 bits) take 20 bytes a pixel, and
#: a file is not read that is larger than 8; a fault of a library may ask for any number.
_BYTES_A_PIXEL, _BYTES_BESIDE = 32, 1 << 30

#: So many letters are kept of a reason: what an exception says may be a whole file.
_LONGEST = 1000

#: What comes of a range of rows: their records, those rejected with reasons, how many were converted.
Batch = tuple[np.ndarray, list[tuple[int, str]], int]


class RowWork:
    """Converts ranges of rows. Made in a worker; of what it makes only the records travel back."""

    def __init__(self, job: Unfinished, own_process: bool) -> None:
        if own_process:
            # Limits and warnings of Pillow's are the process's: here, and only here, they are ours to set.
            # --max-pixels is the limit, and what Pillow warns of goes to the ledger if it matters.
            Image.MAX_IMAGE_PIXELS = None
            warnings.filterwarnings("ignore", module=r"PIL\.")
            pictures = job.settings if isinstance(job.settings, Settings) else None
            # A data set of the user's may say what it likes, and hold whatever it likes.
            own_code = pictures is None or isinstance(job.source, DatasetSource)
            if not own_code:
                os.dup2(
                    os.open(os.devnull, os.O_WRONLY), 2
                )  # where libtiff tells each fault of a file
            # glibc maps large blocks afresh each time, page faults and all, until it has seen one as large
            # freed: 2 % of a picture with Pillow, 10 % with pillow-simd.
            bytes(_LARGE)
            # One process a core is what shares the cores out; and the threads that the parent's torch may have
            # did not come along when it forked, so that the first operation to use them would never end.
            if "torch" in sys.modules:
                sys.modules["torch"].set_num_threads(1)
            if pictures is not None and not own_code:
                limit_memory(_BYTES_A_PIXEL * pictures.max_pixels + _BYTES_BESIDE)
        self.source, self.schema, self.journal, self.resumed = (
            job.source,
            job.source.schema,
            job.journal,
            job.resumed,
        )
        self.classes = None if self.source.classes is None else len(self.source.classes)
        self.converter = job.settings.converter(self.schema)
        self.writer = ShardWriter(job.folder, job.array)
        self.reasons = self.journal.reasons() if self.resumed else {}

    def __call__(self, task: Task, begin: Callable[[int], None]) -> Batch:
        """Convert the rows of a task that are not done."""
        empty = np.zeros(task.stop - task.start, self.journal.dtype)
        records = self.journal.read(*task) if self.resumed else empty
        rejects: list[tuple[int, str]] = []
        converted = 0
        for position, row in enumerate(range(*task)):
            begin(row)
            if self.resumed and self._done(row, records[position]):
                if records["status"][position] == REJECTED:
                    rejects.append((row, self.reasons[row]))
                continue
            converted += 1
            records[position] = empty[position]
            reason = self._convert(row, records[position])
            if reason:
                rejects.append((row, reason))
        seal(records)
        return records, rejects, converted

    def close(self) -> None:
        """Close the shards."""
        self.writer.close()

    def _done(self, row: int, record: np.void) -> bool:
        if not intact(record) or (record["status"] == REJECTED and row not in self.reasons):
            return False
        return zlib.crc32(self.writer.read(row)) == int(record["crc32"])

    def _found(self, row: int, record: np.void) -> Row:
        """Convert one record, and put its columns into that of its row."""
        try:
            found = self.converter(self.source[row])
            set_columns(record, self.schema, found.columns)
        except (DecodeError, BuildError):  # BuildError: this process has run out of something
            raise
        except (
            Exception
        ) as error:  # a data set of the user's may raise anything; it costs this one record
            raise DecodeError(describe_error(error)) from error
        if self.classes is not None and not 0 <= record["column/label"] < self.classes:
            raise DecodeError(
                f"label: expected 0 to {self.classes - 1}, found {record['column/label']}"
            )
        return found

    def _convert(self, row: int, record: np.void) -> str:
        """Fill one row and its record; return why it was rejected, if it was."""
        try:
            found = self._found(row, record)
        except DecodeError as error:
            _reject(row, record, self.writer)
            return shortened(str(error.reason)) or "no reason was given"
        self.writer.write(row, found.pixels)
        record["status"], record["flags"], record["size"] = DONE, found.flags, found.size
        record["crc32"] = zlib.crc32(found.pixels)
        record["total"], record["squares"] = found.total, found.squares
        return ""


def shortened(reason: str) -> str:
    """Return a reason in at most `_LONGEST` letters."""
    return reason if len(reason) <= _LONGEST else reason[: _LONGEST - 1] + "…"


def give_up(job: Unfinished, row: int, reason: str) -> Batch:
    """Reject a row that no worker has lived through."""
    records = np.zeros(1, job.journal.dtype)
    writer = ShardWriter(job.folder, job.array)
    try:
        _reject(row, records[0], writer)
    finally:
        writer.close()
    seal(records)
    return records, [(row, reason)], 1


def _reject(row: int, record: np.void, writer: ShardWriter) -> None:
    record["status"], record["crc32"] = REJECTED, zlib.crc32(bytes(writer.array.row_bytes))
    writer.blank(
        row
    )  # an earlier build, or a worker that was lost meanwhile, may have come further
