"""Converts the rows of a build that are not done yet, with the worker pool."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import numpy as np
from PIL import Image

from memload.building.inherited import check_positions, positions
from memload.building.journal import DONE, is_intact
from memload.building.pillow_warnings import quiet_pillow
from memload.building.pool import Chunk, run
from memload.building.progress import Show
from memload.building.sources.record import Source, optional
from memload.building.target import RowTarget
from memload.building.worker import RowWork, SampleCheck, runs_user_code, spread
from memload.errors import BuildError, DecodeError

OnError = Literal["skip", "raise"]

#: A chunk has at most this many rows, and fewer if some workers would get less than four chunks.
_CHUNK_ROWS = 32
#: A chunk that follows the source's groups has at most so many. A killed build loses its chunks.
_MAX_GROUP_ROWS = 4096


def convert_rows(
    target: RowTarget,
    *,
    num_workers: int,
    timeout: float,
    on_error: OnError,
    show: Show,
    discard: Callable[[], None],
) -> int:
    """Convert all rows that are not done; return how many they were.

    ``show`` is told of each chunk that is done. ``discard`` removes all rows, and is called if
    samples may be mixed up, which no checksum would show. Raises BuildError, and DecodeError if
    ``on_error`` is ``"raise"``.
    """
    _check_finished_samples(target, num_workers, timeout)
    Image.preinit()  # or else each worker would load Pillow's formats, for each shard anew
    results = run(
        functools.partial(RowWork, target, in_worker=num_workers > 0),
        chunks_of(target.source, target.journal.first_row, target.journal.stop_row, num_workers),
        num_workers=num_workers,
        timeout=timeout,
    )
    converted = rejected = 0
    is_checked = num_workers > 0 and runs_user_code(target.source)
    before = positions() if is_checked else {}
    with contextlib.closing(results), quiet_pillow():
        for chunk, outcome in results:
            converted += outcome.converted
            rejected += len(outcome.rejects)
            show(chunk.stop - chunk.start, rejected)
            if outcome.rejects and on_error == "raise":
                _raise_reject(target.source, *outcome.rejects[0])
    try:
        check_positions(before)
    except BuildError:
        discard()
        raise
    return converted


def _check_finished_samples(target: RowTarget, num_workers: int, timeout: float) -> None:
    """Convert up to eight finished samples again. Raises BuildError if one of them has changed.

    This is for samples without a file. The state of a file shows a change.
    """
    if not target.is_resumed:
        return
    records = target.journal.mapped()
    found = np.flatnonzero((records["status"] == DONE) & (records["file_state"][:, 0] < 0))
    found = found[spread(len(found))].tolist()
    rows = [target.journal.first_row + row for row in found if is_intact(records[row])]
    if rows:
        make = functools.partial(SampleCheck, target, in_worker=num_workers > 0)
        chunks = (Chunk(row, row + 1) for row in rows)
        list(run(make, chunks, num_workers=min(num_workers, 1), timeout=timeout))


def chunks_of(source: Source, start: int, stop: int, num_workers: int) -> Iterator[Chunk]:
    """Yield chunks of rows, so many that all workers are done at about the same time.

    Rows that a source reads together, such as a row group of a Parquet file, stay in one chunk if
    they are not too many. Otherwise every worker would read the whole group.
    """
    largest = max(1, (stop - start) // (4 * max(1, num_workers)))
    size = min(_CHUNK_ROWS, largest)
    groups: Sequence[int] = optional(source).group_starts or ()
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


def _raise_reject(source: Source, row: int, reason: str) -> None:
    key, root = source.keys[row], optional(source).root
    what = "that sample" if root is None else f"{root}/{key}"
    raise DecodeError(
        f"{reason}. Mend or remove {what} and build again, or leave such samples out with "
        "--on-error skip (on_error='skip' in Python).",
        key=key,
    )
