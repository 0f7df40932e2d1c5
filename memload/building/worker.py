"""What a worker does with a chunk of rows: it converts them, and writes pixels and records."""

import os
import sys
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from memload.building.conversion import ArraySettings
from memload.building.extra_arrays import MissingArrayError
from memload.building.files import MISSING, NO_FILE, file_state
from memload.building.inherited import reopen_files
from memload.building.journal import (
    DONE,
    REJECTED,
    columns_crc32,
    crc32_field,
    is_intact,
    names_of_boxes,
    set_boxes,
    set_columns,
)
from memload.building.pool import Chunk, NoteRow
from memload.building.sources.listed import Files, ListedSource
from memload.building.sources.record import FileState, Record, Source, optional
from memload.building.sources.tar import TarShards
from memload.building.sources.wrapped import unwrapped
from memload.building.sources.zip import ZipArchive
from memload.building.target import RowTarget
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


def runs_user_code(source: Source) -> bool:
    """Say whether a source may read files that were opened before the workers were forked.

    memload's own sources open files in the worker.
    """
    source = unwrapped(source)
    is_ours = type(source).__module__.startswith("memload.")
    return not (is_ours and isinstance(source, ListedSource))


def spread(count: int) -> np.ndarray:
    """Return up to eight positions among ``count``, evenly spread, to look for changes there."""
    return np.linspace(0, count - 1, min(8, count)).round().astype(int)


class RowWork:
    """Converts chunks of rows. It is made in the worker."""

    def __init__(self, target: RowTarget, *, in_worker: bool) -> None:
        self.target = target
        self.source, self.schema = target.source, target.source.schema
        self.extra_arrays = target.settings.extra_arrays
        texts = {**optional(self.source).categories, "label": self.source.classes}
        #: how many texts the columns of labels and categories count into
        self.num_texts = {name: len(names) for name, names in texts.items() if names is not None}
        self.writers = [ShardWriter(target.folder, array) for array in target.arrays]
        # A worker ignores Ctrl-C. So a KeyboardInterrupt there was raised by a sample's code, and
        # rejects only that sample.
        self.sample_errors = BaseException if in_worker else Exception
        if in_worker:
            _prepare_process(target)
            if runs_user_code(self.source):
                reopen_files()
        self.points = [name for name, column in self.schema.items() if column.points]
        self.boxes = names_of_boxes(self.schema)

    def __call__(self, chunk: Chunk, note_row: NoteRow) -> ChunkResult:
        """Convert those rows of a chunk that are not done."""
        records = np.zeros(chunk.stop - chunk.start, self.target.journal.dtype)
        finished: set[int] = set()
        if self.target.is_resumed:
            finished = self._keep_finished(chunk, records, note_row)
        rows = [row for row in range(chunk.start, chunk.stop) if row not in finished]
        samples = self._read_together(chunk, rows, note_row)
        rejects: list[tuple[int, str]] = []
        for row in rows:
            note_row(row)
            record = records[row - chunk.start]
            contents: list[bytes] = []
            reason = chunk.lost.get(row, "")
            if not reason:
                contents, reason = self._convert(row, record, samples.pop(row, None))
            if not reason:
                for writer, content in zip(self.writers, contents, strict=True):
                    writer.write(row, content)
                continue
            rejects.append((row, reason))
            record["status"] = REJECTED
            for writer in self.writers:
                record[crc32_field(writer.array.name)] = zlib.crc32(bytes(writer.array.row_bytes))
                writer.blank(row)  # a former build or a killed worker may have written it
        self.target.journal.write(chunk.start, records, rejects)
        return ChunkResult(len(rows), rejects)

    def close(self) -> None:
        """Close the shards."""
        for writer in self.writers:
            writer.close()

    def _keep_finished(self, chunk: Chunk, records: np.ndarray, note_row: NoteRow) -> set[int]:
        """Copy the records of rows that were finished before. Return these rows."""
        before = self.target.journal.read(chunk.start, chunk.stop)
        finished = set()
        for position, row in enumerate(range(chunk.start, chunk.stop)):
            note_row(row)
            if row not in chunk.lost and self._is_finished(row, before[position]):
                records[position] = before[position]
                finished.add(row)
        return finished

    def _read_together(
        self, chunk: Chunk, rows: list[int], note_row: NoteRow
    ) -> dict[int, Record | Exception]:
        """Return samples of a chunk, or nothing if the source gives them one by one.

        If that fails, each is asked for alone. So are those of a chunk that has ended a worker,
        since the row that has done it is to be found.
        """
        if not rows or chunk.is_retried or not hasattr(self.source, "__getitems__"):
            return {}
        note_row(rows[0])
        try:
            return dict(zip(rows, self.source.__getitems__(rows), strict=True))
        except BuildError:  # a server is gone
            raise
        except self.sample_errors:
            return {}

    def _convert(
        self, row: int, record: np.void, sample: Record | Exception | None = None
    ) -> tuple[list[bytes], str]:
        """Convert a sample and fill its record.

        Return its rows, one for each array, or why it cannot be used.
        """
        try:
            if sample is None:
                sample = self.source[row]
            if isinstance(sample, Exception):
                raise sample
            converted = self.target.settings.convert(sample, self.points, self.boxes)
            set_columns(record, self.schema, converted.columns)
            record["given_crc32"] = columns_crc32(self.schema, sample.columns)
            for name, count in self.num_texts.items():
                number = record[f"column/{name}"]
                if not 0 <= number < count:
                    raise DecodeError(f"{name} {number} is not within 0 to {count - 1}")
        except BuildError:  # this process has run out of something
            raise
        except self.sample_errors as error:  # a data set's own code may raise anything
            if isinstance(error, MissingArrayError) and isinstance(sample, Record):
                self._note_missing(sample, record)
            reason = describe_error(error)
            if isinstance(error, DecodeError):
                reason = str(error.reason) or "no reason was given"
            return [], reason if len(reason) <= _MAX_REASON else reason[: _MAX_REASON - 1] + "…"
        record["status"], record["flags"] = DONE, converted.flags
        record["size"], record["crc32"] = converted.source_size, zlib.crc32(converted.pixels)
        record["total"], record["squares"] = converted.total, converted.squares
        record["remarks"], record["value_range"] = converted.remarks, converted.value_range
        record["file_state"] = sample.state or converted.file_state
        for array, row_of_array in zip(self.extra_arrays, converted.extra_arrays, strict=True):
            record[crc32_field(array.name)] = zlib.crc32(row_of_array.data)
            record[f"file_state/{array.name}"] = row_of_array.file_state
            record[f"ids/{array.name}"] = row_of_array.ids
        for name in self.boxes:
            set_boxes(record, name, sample.columns[name])
        return [converted.pixels, *(array.data for array in converted.extra_arrays)], ""

    def _note_missing(self, sample: Record, record: np.void) -> None:
        """Keep for a note which arrays a rejected sample lacks."""
        for array in self.extra_arrays:
            if sample.arrays.get(array.name) is None:
                record[f"file_state/{array.name}"] = MISSING

    def _is_finished(self, row: int, record: np.void) -> bool:
        """Say whether a row was finished before and is still right.

        If its sample is a file, the columns of ``record`` are updated.
        """
        if not (is_intact(record) and record["status"] == DONE):
            return False
        for writer in self.writers:
            if zlib.crc32(writer.read(row)) != int(record[crc32_field(writer.array.name)]):
                return False
        states = [record[f"file_state/{array.name}"] for array in self.extra_arrays]
        image_state = FileState(*record["file_state"].tolist())
        is_file = image_state.size >= 0
        has_file = is_file or any(state[0] >= 0 for state in states)
        if not (has_file or hasattr(self.source, "without_image")):
            return True  # `SampleCheck` has compared some of them
        without_image = getattr(self.source, "without_image", self.source.__getitem__)
        try:
            sample = without_image(row)
            if is_file and (sample.state or _state(sample.image)) != image_state:
                return False
            for array, state in zip(self.extra_arrays, states, strict=True):
                if not _is_unchanged(sample.arrays.get(array.name), FileState(*state.tolist())):
                    return False
            if columns_crc32(self.schema, sample.columns) != record["given_crc32"]:
                return False  # its points or boxes have changed
            schema = {name: column for name, column in self.schema.items() if not column.follows}
            set_columns(record, schema, sample.columns)
        except self.sample_errors:  # it is converted again, which tells what is wrong
            return False
        return True


class SampleCheck(RowWork):
    """Raises BuildError if a finished sample without a file has changed. Nothing is written."""

    def __call__(self, chunk: Chunk, note_row: NoteRow) -> ChunkResult:
        """Convert the sample of a chunk of one row again."""
        row = chunk.start
        note_row(row)
        before = self.target.journal.read(row, row + 1)[0]
        record = np.zeros(1, before.dtype)[0]
        reason = chunk.lost.get(row, "")
        if not reason:
            _, reason = self._convert(row, record)
        names = ["image"]
        for array in self.extra_arrays:  # one with a file is converted again if that has changed
            if before[f"file_state/{array.name}"][0] == NO_FILE.size:
                names.append(array.name)
        other = [name for name in names if record[crc32_field(name)] != before[crc32_field(name)]]
        if reason:
            difference = f"could be used, and now cannot: {reason:.200}"
        elif other:
            difference = "has other pixels" if "image" in other else f"has another {other[0]!r}"
        else:
            fields = {name: f"column/{name}" for name in self.schema}
            changed = [
                repr(name)
                for name, field in fields.items()
                if record[field].tobytes() != before[field].tobytes()
            ]
            difference = f"has another {', '.join(changed)}" if changed else ""
        if difference:
            raise self.target.other_data_set(f"sample {row} {difference}")
        return ChunkResult(0, [])


def _state(image: object) -> FileState | None:
    """Return the state of an image given as a path; else None. Raises OSError."""
    return file_state(image) if isinstance(image, Path) else None


def _is_unchanged(value: object, before: FileState) -> bool:
    """Say whether the value of an array has the state that its file had before. Raises OSError.

    A source may leave out values that come without a file.
    """
    if isinstance(value, Path):
        return file_state(value) == before
    return before == NO_FILE or (value is None and before == MISSING)


def _prepare_process(target: RowTarget) -> None:
    """Set what belongs to a whole process, such as Pillow's limits. A worker is ours to set up."""
    Image.MAX_IMAGE_PIXELS = None  # --max-pixels is the limit
    # glibc maps large blocks anew each time, with page faults, until it has seen one as large
    # freed: 2 % of the time for a picture with Pillow, 10 % with pillow-simd.
    bytes(_LARGE_BLOCK)
    settings, source = target.settings, unwrapped(target.source)
    is_ours = isinstance(source, (Files, TarShards, ZipArchive))
    if isinstance(settings, ArraySettings) or not is_ours:
        return  # other code may print, and hold any memory
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libtiff prints every fault of a file
    if sys.platform == "linux":  # beyond the limit, an allocation raises MemoryError
        import resource

        try:
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5])
        except OSError:  # /proc is not mounted
            return
        pictures = 1 + bool(settings.extra_arrays)  # a mask is decoded while the image is in memory
        extra_bytes = pictures * _BYTES_PER_PIXEL * settings.max_pixels + _EXTRA_BYTES
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        largest = sys.maxsize if hard == resource.RLIM_INFINITY else hard
        limit = min(pages * resource.getpagesize() + extra_bytes, largest)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
