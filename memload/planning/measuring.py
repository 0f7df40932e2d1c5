"""Converts a sample as a build would, and measures how long that takes."""

import contextlib
import functools
import itertools
import os
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
from memload.building.rows import chunks_of
from memload.building.sole import SoleWorkspace
from memload.building.target import RowTarget
from memload.building.worker import RowWork
from memload.planning.sampling import Sample

#: A sample that is converted faster is converted again and again for so long: short times vary.
_LEAST_SECONDS: Final = 2.0
#: The first time, workers get so few rows at once that all of them are busy until the end.
_FIRST_CHUNK_ROWS: Final = 4
#: If the first time took so many times as long as the others, it read files from the disk.
_COLD_RATIO: Final = 1.5
#: Two standard errors: one of 20 samples has a mean that is further away.
_STANDARD_ERRORS: Final = 2.0


@dataclass(frozen=True)
class Conversion:
    """What converting a sample took, and what came of it."""

    seconds_per_record: float  #: of all workers together, when they are at work
    uncertainty: float  #: how far that may be from the mean of all records, as a share of it
    start_seconds: float  #: until the first record is done, apart from its own time
    finish_seconds: float  #: for the index, and what else follows the last record
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
        convert = functools.partial(_convert, workspace.target(), num_workers, timeout)
        started = time.perf_counter()
        first = convert(_first_chunks(sample))
        converted = time.perf_counter()
        again = convert(_repeated(sample, num_workers, _LEAST_SECONDS - (converted - started)))
        finishing = time.perf_counter()
        complete(workspace, RejectLimit("100%"))
        finish_seconds = time.perf_counter() - finishing
    rejects = dict(itertools.chain.from_iterable(timed.rejects for timed in first))
    once, more = _paces(first), _paces(again)
    pace = _mean(once)
    if again and pace < _COLD_RATIO * _mean(more):
        pace = _mean(more)
    return Conversion(
        seconds_per_record=pace / max(1, num_workers),
        uncertainty=_uncertainty(once),
        start_seconds=min(timed.begin for timed in first) - started,
        finish_seconds=finish_seconds,
        rejected=len(rejects),
        reasons=frequent_reasons(rejects, sample.keys),
    )


class _Timed(NamedTuple):
    """When a worker was at some rows, in seconds of a clock that all processes share."""

    worker: int
    rows: int
    begin: float
    end: float
    rejects: Sequence[tuple[int, str]]


class _TimedWork:
    """The work of a build, with a clock. It is made in the worker."""

    def __init__(self, target: RowTarget, *, in_worker: bool) -> None:
        self.work = RowWork(target, in_worker=in_worker)

    def __call__(self, chunk: Chunk, note_row: NoteRow) -> _Timed:
        begin = time.perf_counter()
        outcome = self.work(chunk, note_row)
        rows = chunk.stop - chunk.start
        return _Timed(os.getpid(), rows, begin, time.perf_counter(), outcome.rejects)

    def close(self) -> None:
        self.work.close()


def _convert(
    target: RowTarget, num_workers: int, timeout: float, chunks: Iterator[Chunk]
) -> list[_Timed]:
    """Convert chunks of rows as a build does, and return when each was at work."""
    make = functools.partial(_TimedWork, target, in_worker=num_workers > 0)
    results = run(make, chunks, num_workers=num_workers, timeout=timeout)
    with contextlib.closing(results), quiet_pillow():
        return [timed for _, timed in results]


def _first_chunks(sample: Sample) -> Iterator[Chunk]:
    """Yield all rows of a sample once."""
    if sample.runs is not None:
        yield from sample.runs
        return
    rows = len(sample)
    for start in range(0, rows, _FIRST_CHUNK_ROWS):
        yield Chunk(start, min(start + _FIRST_CHUNK_ROWS, rows))


def _repeated(sample: Sample, num_workers: int, seconds: float) -> Iterator[Chunk]:
    """Yield chunks as large as those of a build until so many seconds have passed."""
    end = time.perf_counter() + seconds
    chunks = sample.runs or list(chunks_of(sample, 0, len(sample), num_workers))
    for chunk in itertools.cycle(chunks):
        if time.perf_counter() > end:
            return
        yield chunk


class _Pace(NamedTuple):
    seconds: float  #: since the same worker had finished what it did before
    rows: int


def _paces(timed: Iterable[_Timed]) -> list[_Pace]:
    """Return how long each chunk took, but the first one of each worker, which takes longer.

    If that leaves nothing, the first ones count.
    """
    of_worker = defaultdict(list)
    for each in timed:
        of_worker[each.worker].append(each)
    paces = [
        _Pace(each.end - before.end, each.rows)
        for done in of_worker.values()
        for before, each in itertools.pairwise(done)
    ]
    first = [_Pace(done[0].end - done[0].begin, done[0].rows) for done in of_worker.values()]
    return paces or first


def _mean(paces: Sequence[_Pace]) -> float:
    """Return the seconds that a worker takes for a row."""
    return sum(pace.seconds for pace in paces) / sum(pace.rows for pace in paces)


def _uncertainty(paces: Sequence[_Pace]) -> float:
    """Return how far the mean of a sample may be from that of all records, as a share of it."""
    per_row = [pace.seconds / pace.rows for pace in paces]
    if len(per_row) < 2:
        return 1.0
    error = statistics.stdev(per_row) / len(per_row) ** 0.5
    return float(_STANDARD_ERRORS * error / statistics.mean(per_row))
