"""Looks at the first samples of a source, where the user's code can do no harm."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

from PIL import Image

from memload.building.inherited import check_positions, positions, reopen_files
from memload.building.pillow_warnings import quiet_pillow
from memload.building.pool import Chunk, NoteRow, run
from memload.errors import SourceError, describe_error

#: The first samples of a data set may be broken. So many are tried to find out its columns, and the
#: shape and type of arrays. Of these, a few may crash or hang.
_MAX_FIRST_SAMPLES, _MAX_LOST_SAMPLES = 100, 3


def first_usable(
    look: Callable[[int], Any],
    keys: Sequence[str] | range,
    num_workers: int,
    timeout: float,
    *,
    what: str = "samples of the data set",
    passed_over: type[Exception] | None = None,
    is_required: bool = True,
) -> Any:
    """Return what ``look`` returns for the first sample for which it does not fail.

    ``keys`` are the names of the samples. Samples for which it raises ``passed_over`` do not count
    as failures: others are looked at instead, if need be all. Returns None if it is raised for
    every sample.

    Raises SourceError if ``look`` does. If it fails for all of the first samples, which messages
    call ``what``, that is a SourceError, too, or None if none ``is_required``. See `look_at_first`
    for the rest.
    """
    found, failures = look_at_first(look, len(keys), num_workers, timeout, passed_over=passed_over)
    if found:
        return found[0]
    if failures and is_required:
        row, reason = failures[0]
        name = f"sample {row}" if str(keys[row]) == str(row) else keys[row]
        raise SourceError(
            f"None of the first {len(failures)} {what} can be used. The first is {name}: {reason}"
        )
    return None


def look_at_first(
    look: Callable[[int], Any],
    samples: int,
    num_workers: int,
    timeout: float,
    *,
    count: int = 1,
    passed_over: type[Exception] | None = None,
) -> tuple[list[Any], list[tuple[int, str]]]:
    """Return what ``look`` returns for the first ``count`` samples for which it does not fail.

    Also return the numbers of samples for which it has failed, with the reasons. There are fewer
    than ``count`` results if it fails too often.

    Unless ``num_workers`` is 0, it is called in a worker, since it runs the user's code. Raises
    SourceError if ``look`` does. Raises BuildError if the worker moved the position in a file of
    this process.
    """
    before = positions() if num_workers else {}
    results = run(
        functools.partial(_Look, look, count, passed_over, in_worker=num_workers > 0),
        iter([Chunk(0, samples)]),
        num_workers=min(num_workers, 1),
        timeout=timeout,
    )
    with contextlib.closing(results), quiet_pillow():
        _, outcome = next(results)
    check_positions(before)
    found, failures = outcome
    return found, failures


class _Look:
    """The work of `look_at_first`. It is made in the worker."""

    def __init__(
        self,
        look: Callable[[int], Any],
        count: int,
        passed_over: type[Exception] | None,
        *,
        in_worker: bool,
    ) -> None:
        self.look, self.count, self.passed_over = look, count, passed_over or ()
        self.failures = BaseException if in_worker else Exception
        if in_worker:
            Image.MAX_IMAGE_PIXELS = None  # --max-pixels is the limit
            reopen_files()

    def __call__(self, chunk: Chunk, note_row: NoteRow) -> tuple[list[Any], list[tuple[int, str]]]:
        found: list[Any] = []
        failures: list[tuple[int, str]] = []
        for row in range(chunk.start, chunk.stop):
            if len(found) == self.count or len(failures) == _MAX_FIRST_SAMPLES:
                break
            note_row(row)
            if row in chunk.lost:
                failures.append((row, chunk.lost[row]))
                if len(chunk.lost) == _MAX_LOST_SAMPLES:
                    break
                continue
            try:
                found.append(self.look(row))
            except SourceError:
                raise
            except self.passed_over:
                continue
            except self.failures as error:
                failures.append((row, describe_error(error)[:500]))
        return found, failures

    def close(self) -> None:
        pass
