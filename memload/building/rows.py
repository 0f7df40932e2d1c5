"""What a worker does with a chunk of rows: it converts them, and writes pixels and records."""

import functools
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import NamedTuple

import numpy as np
from PIL import Image

from memload.building.conversion import AnySettings, StoredSettings
from memload.building.pool import Chunk, NoteRow, look_at, run
from memload.building.record import (
    DONE,
    REJECTED,
    crc32_field,
    names_of_boxes,
    names_of_points,
    set_columns,
)
from memload.building.shard import Shard, ShardFiles
from memload.errors import BuildError, DecodeError, describe_error
from memload.sources.samples import Record, Source

#: A chunk has at most this many rows, and fewer if some workers would get less than four chunks.
_CHUNK_ROWS = 32
#: A chunk that follows the source's groups has at most so many. A killed build loses its chunks.
_MAX_GROUP_ROWS = 4096

#: A reason is cut to this many characters, as an exception may quote a whole file.
_MAX_REASON = 1000

#: So many finished rows are converted again when a build goes on.
_COMPARED_ROWS = 8


class Conversion:
    """How the samples of a source become rows, and by how many processes (0: by this one).

    ``timeout`` is in seconds for one row. ``prints`` says whether the source runs code of the
    user's, whose output is shown.
    """

    def __init__(
        self,
        source: Source,
        settings: AnySettings,
        num_workers: int,
        timeout: float,
        *,
        prints: bool,
    ) -> None:
        self.source, self.settings = source, settings
        self.num_workers, self.timeout, self.prints = num_workers, timeout, prints
        # A worker ignores SIGINT. So a KeyboardInterrupt there comes from the user's code, and
        # rejects the sample, like any other exception.
        self.sample_errors = BaseException if num_workers else Exception
        self.schema = source.schema
        self.points, self.boxes = names_of_points(self.schema), names_of_boxes(self.schema)
        texts = {**getattr(source, "categories", {}), "label": source.classes}
        #: how many texts the columns of labels and categories count into
        self.num_texts = {name: len(names) for name, names in texts.items() if names is not None}

    def convert(
        self, row: int, record: np.void, sample: Record | Exception | None = None
    ) -> tuple[list[bytes | memoryview], str]:
        """Convert a sample and fill its record.

        Returns its rows, one for each array, or why it cannot be used. Raises BuildError if this
        process or machine lacks something.
        """
        try:
            if sample is None:
                sample = self.source[row]
            if isinstance(sample, Exception):
                raise sample
            for array in self.settings.extra_arrays:
                record[f"is_missing/{array.name}"] = sample.arrays.get(array.name) is None
            converted = self.settings.convert(sample, self.points, self.boxes)
            set_columns(record, self.schema, converted.columns)
            for name, count in self.num_texts.items():
                number = record[f"column/{name}"]
                if not 0 <= number < count:
                    raise DecodeError(f"{name} {number} is not within 0 to {count - 1}")
        except BuildError:
            raise
        except MemoryError as error:
            raise BuildError(
                f"There is not enough memory to convert {self.source.keys[row]}. Free some, or use "
                "fewer workers (--num-workers), then run the same command again: it goes on where "
                "it stopped."
            ) from error
        except self.sample_errors as error:  # a data set's own code may raise anything
            reason = describe_error(error)
            if isinstance(error, DecodeError):
                reason = str(error.reason) or "no reason was given"
            return [], reason if len(reason) <= _MAX_REASON else reason[: _MAX_REASON - 1] + "…"
        record["status"], record["flags"] = DONE, converted.flags
        crc32 = {}
        if isinstance(self.settings, StoredSettings):  # reading has compared the pixels with it
            record["flags"] |= self.settings.flags[row]
            crc32["image"] = self.settings.crc32[row]
        record["size"], record["remarks"] = converted.source_size, converted.remarks
        record["total"], record["squares"] = converted.total, converted.squares
        for array, extra in zip(self.settings.extra_arrays, converted.extra_arrays, strict=True):
            record[f"ids/{array.name}"] = extra.ids
        rows: list[bytes | memoryview] = [
            converted.pixels,
            *(extra.data for extra in converted.extra_arrays),
        ]
        names = ["image", *(array.name for array in self.settings.extra_arrays)]
        for name, content in zip(names, rows, strict=True):
            record[crc32_field(name)] = crc32[name] if name in crc32 else zlib.crc32(content)
        return rows, ""


class ChunkResult(NamedTuple):
    """What came of a chunk of rows."""

    converted: int  #: rows that were not done before
    rejects: Sequence[tuple[int, str]]  #: row and reason


def convert_rows(conversion: Conversion, shard: Shard) -> Iterator[tuple[Chunk, ChunkResult]]:
    """Convert the rows of a shard that are not done. Yields each chunk when it is done."""
    Image.preinit()  # or else each worker would load Pillow's formats, for each shard anew
    results = run(
        functools.partial(ConvertRows, conversion, shard),
        chunks_of(conversion.source, shard.start, shard.stop, conversion.num_workers),
        num_workers=conversion.num_workers,
        timeout=conversion.timeout,
    )
    with closing(results):
        yield from results


def chunks_of(source: Source, start: int, stop: int, num_workers: int) -> Iterator[Chunk]:
    """Yield chunks of rows, so many that all workers are done at about the same time.

    Rows that a source reads together, such as a row group of a Parquet file, stay in one chunk if
    they are not too many. Otherwise every worker would read the whole group.
    """
    largest = max(1, (stop - start) // (4 * max(1, num_workers)))
    size = min(_CHUNK_ROWS, largest)
    groups: Sequence[int] = getattr(source, "group_starts", None) or ()
    ends = [*(group for group in groups if start < group < stop), stop]
    for end in ends:
        if end - start > min(largest, _MAX_GROUP_ROWS):
            for first in range(start, end, size):
                yield Chunk(first, min(first + size, end))
        elif end - start >= size or end == stop:
            yield Chunk(start, end)
        else:  # a small group joins the next one
            continue
        start = end


class ConvertRows:
    """The work of `convert_rows`. It is made in the worker."""

    def __init__(self, conversion: Conversion, shard: Shard) -> None:
        self.conversion, self.shard = conversion, shard
        self.files = ShardFiles(shard)
        if conversion.num_workers and not conversion.prints:  # libtiff prints every fault of a file
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)

    def close(self) -> None:
        """Close the files of the shard."""
        self.files.close()

    def __call__(self, chunk: Chunk, note_row: NoteRow) -> ChunkResult:
        """Convert those rows of a chunk that are not done."""
        records = self.files.read_records(chunk.start, chunk.stop)
        rows = []
        for row in range(chunk.start, chunk.stop):
            note_row(row)
            if not self._is_done(row, records[row - chunk.start]):
                rows.append(row)
        samples = self._read_together(chunk, rows, note_row)
        rejects = []
        for row in rows:
            note_row(row)
            record = np.zeros(1, records.dtype)[0]
            contents: list[bytes | memoryview] = []
            reason = chunk.lost.get(row, "")
            if not reason:
                contents, reason = self.conversion.convert(row, record, samples.pop(row, None))
            if reason:
                rejects.append((row, reason))
                self._reject(row, record, reason)
            else:
                self.files.write_row(row, contents)
            records[row - chunk.start] = record
        if rows:
            self.files.write_records(chunk.start, records)
        return ChunkResult(len(rows), rejects)

    def _is_done(self, row: int, record: np.void) -> bool:
        """Say whether a row was converted, and its pixels are as they were then."""
        return record["status"] == DONE and all(
            zlib.crc32(self.files.read_row(row, number)) == record[crc32_field(array.name)]
            for number, array in enumerate(self.shard.arrays)
        )

    def _read_together(
        self, chunk: Chunk, rows: list[int], note_row: NoteRow
    ) -> dict[int, Record | Exception]:
        """Return samples of a chunk, or nothing if the source gives them one by one.

        If that fails, each is asked for alone. So are those of a chunk that has ended a worker,
        since the row that has done it is to be found.
        """
        source = self.conversion.source
        if not rows or chunk.is_retried or not hasattr(source, "__getitems__"):
            return {}
        note_row(rows[0])
        try:
            return dict(zip(rows, source.__getitems__(rows), strict=True))
        except BuildError:  # a server is gone
            raise
        except self.conversion.sample_errors:
            return {}

    def _reject(self, row: int, record: np.void, reason: str) -> None:
        """Keep the reason, and make the row all zeros: a killed worker may have written it."""
        record["status"] = REJECTED
        for array in self.shard.arrays:
            record[crc32_field(array.name)] = zlib.crc32(bytes(array.row_bytes))
        self.files.blank_row(row)
        self.files.write_reason(row, reason)


def compare_rows(conversion: Conversion, shards: Sequence[Shard]) -> str:
    """Convert up to eight finished rows again. Returns what is different, or nothing.

    That shows if the source, memload or a library is another one than when the rows were converted.
    """
    begun = [shard for shard in shards if shard.is_done or shard.journal.exists()]
    chosen = [begun[number] for number in _spread(len(begun))]
    before: dict[int, np.void] = {}
    for shard in chosen:
        records = shard.records()
        done = np.flatnonzero(records["status"] == DONE)
        for position in done[_spread(len(done))[: -(-_COMPARED_ROWS // len(chosen))]].tolist():
            before[shard.start + position] = records[position]
    looks = look_at(
        functools.partial(_difference, conversion, before),
        before,
        num_workers=conversion.num_workers,
        timeout=conversion.timeout,
    )
    with closing(looks):
        for chunk, (difference, failure) in looks:
            if difference or failure:
                return f"{conversion.source.keys[chunk.start]} {difference or failure}"
    return ""


def _spread(count: int) -> np.ndarray:
    """Return up to eight positions among ``count``, evenly spread."""
    return np.linspace(0, count - 1, min(_COMPARED_ROWS, count)).round().astype(int)


def _difference(conversion: Conversion, before: Mapping[int, np.void], row: int) -> str:
    """Return how a row differs that is converted again. Nothing is written."""
    old = before[row]
    record = np.zeros(1, old.dtype)[0]
    _, reason = conversion.convert(row, record)
    if reason:
        return f"could be used, and now cannot: {reason:.200}"
    record["check"] = old["check"]
    other = [
        name for name in old.dtype.names or () if old[name].tobytes() != record[name].tobytes()
    ]
    if "crc32" in other:
        return "has other pixels"
    return f"has another {other[0].rpartition('/')[2]!r}" if other else ""
