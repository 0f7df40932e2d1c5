"""Converts a sample as a build would, and measures how long that takes."""

import contextlib
import functools
import itertools
import os
import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from PIL import Image

from memload.building.completion import complete
from memload.building.conversion import AnySettings
from memload.building.pillow_warnings import quiet_pillow
from memload.building.pool import Chunk, NoteRow, run
from memload.building.rejects import RejectLimit, frequent_reasons
from memload.building.sole import SoleWorkspace
from memload.building.target import RowTarget
from memload.building.worker import RowWork
from memload.planning.sampling import Sample

#: A sample that is converted faster is converted again and again for so long: short times vary.
_LEAST_SECONDS: Final = 2.0
#: Of a group, so many rows are timed at once.
_PIECE_ROWS: Final = 10
#: The mean of one in 20 samples is off by more standard errors.
_STANDARD_ERRORS: Final = 2.0
#: With fewer pieces, the standard error itself is hardly known.
_LEAST_PIECES: Final = 4


@dataclass(frozen=True)
class Conversion:
    """What converting a sample took, and what came of it."""

    seconds_per_record: float  #: of all workers together, when they are at work
    num_workers: int  #: how many they were, since there may be too few groups for all of them
    relative_error: float  #: how far the time may be from the mean of all records, as a share of it
    start_seconds: float  #: until a worker begins its first record
    finish_seconds: float  #: for the index, and what else follows the last record
    records: int  #: of the sample
    rejected: int
    reasons: str  #: why they were rejected, the most frequent reasons first


def convert_sample(
    sample: Sample,
    settings: AnySettings,
    folder: Path,
    *,
    name: Path,
    num_workers: int,
    timeout: float,
) -> Conversion:
    """Build a sample in ``folder``, which is the caller's to remove, and say how long it took.

    Messages call the output ``name``. Raises BuildError if no record can be used.
    """
    workspace = SoleWorkspace(
        sample, folder / "sample.bin", settings, name=name, rows_per_shard=None, overwrite=False
    )
    with workspace.opened(lock_timeout=0):
        Image.preinit()  # as in a build
        convert = functools.partial(
            _convert,
            workspace.target(),
            num_workers=num_workers,
            timeout=timeout,
            piece_rows=None if sample.groups is None else _PIECE_ROWS,
        )
        started = time.perf_counter()
        first = convert(sample.first_chunks(num_workers))
        seconds_left = _LEAST_SECONDS - (time.perf_counter() - started)
        again = convert(_repeated(sample.chunks(num_workers), seconds_left))
        finishing = time.perf_counter()
        complete(workspace, RejectLimit("100%"))
        finish_seconds = time.perf_counter() - finishing
    return summary(sample, first, again, num_workers, started, finish_seconds)


class Piece(NamedTuple):
    """When a worker was at some rows, in seconds of a clock that all processes share."""

    worker: int
    rows: int
    begin: float
    end: float
    blocks: int  #: of 512 bytes that were read from a disk or a server meanwhile
    rejects: Sequence[tuple[int, str]]


def summary(
    sample: Sample,
    first: Sequence[Sequence[Piece]],
    again: Sequence[Sequence[Piece]],
    num_workers: int,
    started: float,
    finish_seconds: float,
) -> Conversion:
    """Return what the pieces of all chunks tell, for workers that were started at ``started``."""
    are_groups = sample.groups is not None
    chunks = _chunks_that_count(first, again)
    workers = {piece.worker for piece in itertools.chain.from_iterable(chunks)}
    busy = min(len(workers), max(1, num_workers))  # one that has died was replaced by another
    pieces = list(itertools.chain.from_iterable(first))
    rejects = dict(itertools.chain.from_iterable(piece.rejects for piece in pieces))
    return Conversion(
        seconds_per_record=_mean(_paces(chunks, are_groups=are_groups)) / busy,
        num_workers=busy,
        relative_error=_relative_error(_paces(first, are_groups=are_groups)),
        start_seconds=min(piece.begin for piece in pieces) - started,
        finish_seconds=finish_seconds,
        records=len(sample),
        rejected=len(rejects),
        reasons=frequent_reasons(rejects, sample.keys),
    )


def _convert(
    target: RowTarget,
    chunks: Iterable[Chunk],
    *,
    num_workers: int,
    timeout: float,
    piece_rows: int | None,
) -> list[list[Piece]]:
    """Convert chunks as a build does. Return the pieces of each of them."""
    make = functools.partial(_TimedWork, target, num_workers > 0, piece_rows)
    results = run(make, iter(chunks), num_workers=num_workers, timeout=timeout)
    with contextlib.closing(results), quiet_pillow():
        return [pieces for _, pieces in results]


class _TimedWork:
    """The work of a build, with a clock. It is made in the worker."""

    def __init__(self, target: RowTarget, in_worker: bool, piece_rows: int | None) -> None:
        self.work, self.piece_rows = RowWork(target, in_worker=in_worker), piece_rows

    def __call__(self, chunk: Chunk, note_row: NoteRow) -> list[Piece]:
        """Do a chunk, in pieces of so many rows, or as a whole."""
        size = self.piece_rows or chunk.stop - chunk.start
        pieces = []
        for start in range(chunk.start, chunk.stop, size):
            stop = min(start + size, chunk.stop)
            before, begin = _blocks_read(), time.perf_counter()
            outcome = self.work(chunk._replace(start=start, stop=stop), note_row)
            end, blocks = time.perf_counter(), _blocks_read() - before
            pieces.append(Piece(os.getpid(), stop - start, begin, end, blocks, outcome.rejects))
        return pieces

    def close(self) -> None:
        self.work.close()


def _blocks_read() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_inblock


def _repeated(chunks: Sequence[Chunk], seconds: float) -> Iterator[Chunk]:
    """Yield chunks again and again until so many seconds have passed."""
    end = time.perf_counter() + seconds
    for chunk in itertools.cycle(chunks):
        if time.perf_counter() > end:
            return
        yield chunk


def _chunks_that_count(
    first: Sequence[Sequence[Piece]], again: Sequence[Sequence[Piece]]
) -> Sequence[Sequence[Piece]]:
    """Return what was done again, as it varies less, or what was done first.

    What was done again does not count if it is less than the sample. Nor does it if the files came
    from a disk the first time, since the second time they came from RAM.
    """
    pieces = list(itertools.chain.from_iterable(first))
    rows = sum(piece.rows for piece in pieces)
    are_from_disk = sum(piece.blocks for piece in pieces) >= rows
    is_less = sum(piece.rows for piece in itertools.chain.from_iterable(again)) < rows
    return first if are_from_disk or is_less else again


class _Pace(NamedTuple):
    seconds: float  #: since the same worker had finished what it did before
    rows: int


def _paces(chunks: Sequence[Sequence[Piece]], *, are_groups: bool) -> list[_Pace]:
    """Return how long each piece took, but the first one of each worker, which takes longer.

    If chunks are groups of which only a part was converted, the first piece of each is left out,
    since it takes what a build needs once for a whole group. If nothing remains, all pieces count.
    """
    sequences = chunks if are_groups else _by_worker(chunks)
    paces = [
        _Pace(piece.end - before.end, piece.rows)
        for sequence in sequences
        for before, piece in itertools.pairwise(sequence)
    ]
    return paces or [
        _Pace(piece.end - piece.begin, piece.rows) for sequence in sequences for piece in sequence
    ]


def _by_worker(chunks: Iterable[Iterable[Piece]]) -> list[list[Piece]]:
    """Return the pieces of each worker, in their order."""
    of_worker = defaultdict(list)
    for piece in itertools.chain.from_iterable(chunks):
        of_worker[piece.worker].append(piece)
    return list(of_worker.values())


def _mean(paces: Sequence[_Pace]) -> float:
    """Return the seconds that a worker takes for a row."""
    return sum(pace.seconds for pace in paces) / sum(pace.rows for pace in paces)


def _relative_error(paces: Sequence[_Pace]) -> float:
    """Return how far the mean of a sample may be from that of all records, as a share of it."""
    per_row = [pace.seconds / pace.rows for pace in paces]
    if len(per_row) < _LEAST_PIECES:
        return 1.0
    error = statistics.stdev(per_row) / len(per_row) ** 0.5
    return float(_STANDARD_ERRORS * error / statistics.mean(per_row))
