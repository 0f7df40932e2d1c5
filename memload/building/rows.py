"""What a worker does with a chunk of rows: it converts them, and writes pixels and records."""

import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import NamedTuple

import numpy as np
from PIL import Image

from memload.building.conversion import Conversion
from memload.building.pool import Chunk, NoteRow, look_at, run
from memload.building.record import DONE, REJECTED
from memload.building.shard import Shard, ShardWriter
from memload.sources.samples import Sample, Source

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
    num_workers, work = conversion.num_workers, ConvertRows(conversion, shard)
    chunks = chunks_of(conversion.source, shard.start, shard.stop, num_workers)
    results = run(work, chunks, num_workers=num_workers, timeout=conversion.timeout)
    with closing(work), closing(results):
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
    """The work of `convert_rows`. Each worker opens the files of the shard for itself."""

    def __init__(self, conversion: Conversion, shard: Shard) -> None:
        self.conversion, self.shard = conversion, shard
        self.files: ShardWriter | None = None

    def close(self) -> None:
        """Close the files of the shard."""
        if self.files is not None:
            self.files.close()

    def __call__(self, chunk: Chunk, note_row: NoteRow) -> ChunkResult:
        """Convert those rows of a chunk that are not done."""
        if self.files is None:
            self.files = ShardWriter(self.shard)
            if self.conversion.num_workers and self.conversion.is_of_files:
                # libtiff prints every fault of a file. Code of the user's may print.
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        files = self.files
        records = files.read_records(chunk.start, chunk.stop)
        rows = []
        for row, record in zip(range(chunk.start, chunk.stop), records, strict=True):
            note_row(row)
            if not (record["status"] == DONE and files.has_pixels(row, record)):
                rows.append(row)
        samples = self._read_together(chunk, rows, note_row)
        rejects = []
        for row in rows:
            note_row(row)
            records[row - chunk.start] = 0
            record = records[row - chunk.start]
            contents: Sequence[np.ndarray] = ()
            reason = chunk.lost.get(row, "")
            if not reason:
                contents, reason = self.conversion.convert(row, record, samples.pop(row, None))
            if reason:
                rejects.append((row, reason))
                record["status"] = REJECTED
                files.reject_row(row, record, reason)
            else:
                files.write_row(row, contents)
        if rows:
            files.write_records(chunk.start, records)
        return ChunkResult(len(rows), rejects)

    def _read_together(
        self, chunk: Chunk, rows: list[int], note_row: NoteRow
    ) -> dict[int, Sample | Exception]:
        """Return samples of a chunk, or nothing if the source gives them one by one.

        Those of a chunk that has ended a worker are asked for alone, since the row that has done it
        is to be found.
        """
        if not rows or chunk.is_retried:
            return {}
        note_row(rows[0])
        return dict(zip(rows, self.conversion.source.several(rows), strict=False))


def compare_rows(conversion: Conversion, shards: Sequence[Shard]) -> str:
    """Convert up to eight finished rows again. Returns what is different, or nothing.

    That shows if the source, memload or a library is another one than when the rows were converted.
    """
    before: dict[int, np.void] = {}
    for shard in shards:
        records = shard.records()
        done = np.flatnonzero(records["status"] == DONE)
        before |= {shard.start + row: records[row] for row in _spread(done.tolist())}
    looks = look_at(
        functools.partial(_difference, conversion, before),
        _spread([*before]),
        num_workers=conversion.num_workers,
        timeout=conversion.timeout,
    )
    with closing(looks):
        for chunk, (difference, failure) in looks:
            if difference or failure:
                return f"{conversion.source.keys[chunk.start]} {difference or failure}"
    return ""


def _spread(rows: list[int]) -> list[int]:
    """Return up to eight rows, evenly spread."""
    positions = np.linspace(0, len(rows) - 1, min(_COMPARED_ROWS, len(rows)))
    return [rows[position] for position in positions.round().astype(int).tolist()]


def _difference(conversion: Conversion, before: Mapping[int, np.void], row: int) -> str:
    """Return how a row differs that is converted again. Nothing is written."""
    old = before[row]
    record = np.zeros(1, old.dtype)[0]
    _, reason = conversion.convert(row, record)
    if reason:
        return f"could be used, and now cannot: {reason:.200}"
    if old["crc32"] != record["crc32"]:
        return "has other pixels"
    record["check"] = old["check"]
    return "" if old.tobytes() == record.tobytes() else "has other columns, masks or arrays"
