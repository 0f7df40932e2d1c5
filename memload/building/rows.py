"""What a worker does with a chunk of rows: it converts them, and writes pixels and records."""

import functools
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import NamedTuple

import numpy as np
from PIL import Image

from memload.building.conversion import Conversion
from memload.building.pool import Chunk, NoteRow, look_at, run
from memload.building.record import (
    DONE,
    REJECTED,
    crc32_field,
)
from memload.building.shard import Shard, ShardWriter
from memload.errors import BuildError
from memload.sources.samples import Record, Source

#: A chunk has at most this many rows, and fewer if some workers would get less than four chunks.
_CHUNK_ROWS = 32
#: A chunk that follows the source's groups has at most so many. A killed build loses its chunks.
_MAX_GROUP_ROWS = 4096

#: So many finished rows are converted again when a build goes on.
_COMPARED_ROWS = 8


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
    ends = [*(group for group in source.group_starts if start < group < stop), stop]
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
        self.files = ShardWriter(shard)
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
        if not rows or chunk.is_retried:
            return {}
        note_row(rows[0])
        try:
            return dict(zip(rows, self.conversion.source.several(rows), strict=False))
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
