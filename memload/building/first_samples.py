"""Looks at the first samples of a source, where the user's code can do no harm."""

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import Any

from PIL import Image

from memload.building.inherited import check_positions, positions, reopen_files
from memload.building.pool import Chunk, NoteRow, run
from memload.errors import SourceError, describe_error

#: The first samples of a data set may be broken. So many are tried to find out its columns, and the
#: shape and type of arrays. Of these, a few may crash or hang.
_MAX_FIRST_SAMPLES, _MAX_LOST_SAMPLES = 100, 3


def first_usable(
    look: Callable[[int], Any],
    samples: int,
    num_workers: int,
    timeout: float,
    *,
    passed_over: type[Exception] | None = None,
) -> Any:
    """Return what ``look`` returns for the first sample for which it does not fail.

    Samples for which it raises ``passed_over`` do not count as failures: others are looked at
    instead, if need be all. Returns None if it is raised for every sample.

    Unless ``num_workers`` is 0, it is called in a worker, since it runs the user's code. Raises
    SourceError if ``look`` does, or if it fails for all of the first samples. Raises BuildError if
    the worker moved the position in a file of this process.
    """
    before = positions() if num_workers else {}
    results = run(
        functools.partial(_Look, look, passed_over, in_worker=num_workers > 0),
        iter([Chunk(0, samples)]),
        num_workers=min(num_workers, 1),
        timeout=timeout,
    )
    with contextlib.closing(results), warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"PIL\.")  # as errors they would count as failures
        _, (found, reasons) = next(results)
    check_positions(before)
    if found is None and reasons:
        raise SourceError(
            f"None of the first {len(reasons)} samples of the data set can be used. The first is "
            f"sample 0: {reasons[0]}"
        )
    return found


class _Look:
    """The work of `first_usable`: finds what ``look`` returns first, and why it failed before.

    It is made in the worker.
    """

    def __init__(
        self, look: Callable[[int], Any], passed_over: type[Exception] | None, *, in_worker: bool
    ) -> None:
        self.look, self.passed_over = look, passed_over or ()
        self.failures = BaseException if in_worker else Exception
        if in_worker:
            Image.MAX_IMAGE_PIXELS = None  # --max-pixels is the limit
            reopen_files()

    def __call__(self, chunk: Chunk, note_row: NoteRow) -> tuple[Any, list[str]]:
        reasons: list[str] = []
        for row in range(chunk.start, chunk.stop):
            if len(reasons) == _MAX_FIRST_SAMPLES:
                break
            note_row(row)
            if row in chunk.lost:
                reasons.append(chunk.lost[row])
                if len(chunk.lost) == _MAX_LOST_SAMPLES:
                    break
                continue
            try:
                return self.look(row), reasons
            except SourceError:
                raise
            except self.passed_over:
                continue
            except self.failures as error:
                reasons.append(describe_error(error)[:500])
        return None, reasons

    def close(self) -> None:
        pass
