"""Looks at the first samples of a source, in a worker: that runs code which may crash or hang.

What all rows have in common is taken from the first usable sample: the columns of a data set, the
shape and type of its arrays, and those of masks and other arrays beside the images.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from PIL import Image

from memload.building.conversion import AnySettings
from memload.building.extra_arrays import ExtraArray, MissingArrayError, look_at_array
from memload.building.open_files import reopen_files
from memload.building.pillow_warnings import quiet_pillow
from memload.building.pool import Chunk, NoteRow, run
from memload.errors import BuildError, SourceError, describe_error
from memload.sources.samples import Source

#: So many samples are tried. Of these, a few may crash or hang.
_MAX_FIRST_SAMPLES, _MAX_LOST_SAMPLES = 100, 3


def first_usable(
    look: Callable[[int], Any],
    keys: Sequence[str] | range,
    num_workers: int,
    timeout: float,
    *,
    what: str = "samples of the data set",
    passed_over: type[Exception] | None = None,
) -> Any:
    """Return what ``look`` returns for the first sample for which it does not fail.

    Args:
        look: Called with the number of a sample; in a worker, unless ``num_workers`` is 0.
        keys: The names of the samples.
        num_workers: The number of workers of the build.
        timeout: Seconds for one sample.
        what: What messages call the samples.
        passed_over: Samples for which ``look`` raises this are no failures. If need be, all others
            are looked at. If it is raised for each sample, None is returned.

    Raises SourceError if ``look`` does, or if it fails for all of the first samples.
    """
    results = run(
        functools.partial(_Look, look, passed_over, in_worker=num_workers > 0),
        iter([Chunk(0, len(keys))]),
        num_workers=min(num_workers, 1),
        timeout=timeout,
    )
    with contextlib.closing(results), quiet_pillow():
        _, (found, failures) = next(results)
    if found:
        return found[0]
    if failures:
        row, reason = failures[0]
        name = f"sample {row}" if str(keys[row]) == str(row) else keys[row]
        raise SourceError(
            f"None of the first {len(failures)} {what} can be used. The first is {name}: {reason}"
        )
    return None


class _Look:
    """The work of `first_usable`. It is made in the worker."""

    def __init__(
        self,
        look: Callable[[int], Any],
        passed_over: type[Exception] | None,
        *,
        in_worker: bool,
    ) -> None:
        self.look, self.passed_over = look, passed_over or ()
        self.failures = BaseException if in_worker else Exception
        if in_worker:
            Image.MAX_IMAGE_PIXELS = None  # --max-pixels is the limit
            reopen_files()

    def __call__(self, chunk: Chunk, note_row: NoteRow) -> tuple[list[Any], list[tuple[int, str]]]:
        failures: list[tuple[int, str]] = []
        for row in range(chunk.start, chunk.stop):
            if len(failures) == _MAX_FIRST_SAMPLES:
                break
            note_row(row)
            if row in chunk.lost:
                failures.append((row, chunk.lost[row]))
                if len(failures) >= _MAX_LOST_SAMPLES == len(chunk.lost):
                    break
                continue
            try:
                return [self.look(row)], failures
            except (SourceError, BuildError):
                raise
            except self.passed_over:
                continue
            except self.failures as error:
                failures.append((row, describe_error(error)[:500]))
        return [], failures

    def close(self) -> None:
        pass


def find_arrays(
    source: Source,
    kinds: Mapping[str, Literal["mask", "array"]],
    settings: AnySettings,
    missing_masks: int | None,
    num_workers: int,
    timeout: float,
) -> tuple[ExtraArray, ...]:
    """Return the masks and other arrays of a source, with the types of its first usable samples.

    Args:
        source: The source.
        kinds: The names and kinds of its arrays.
        settings: How its images are converted.
        missing_masks: The id of masks that are missing. None: such a sample is rejected.
        num_workers: The number of workers of the build.
        timeout: Seconds for one sample.

    Raises SourceError if none can be used, apart from masks that are filled.
    """
    arrays = []
    for name, kind in kinds.items():
        is_filled = kind == "mask" and missing_masks is not None
        array = ExtraArray(name, kind, "|u1", settings.size, missing_masks if is_filled else None)
        found = first_usable(
            functools.partial(_look_at, source, settings, array),
            source.keys,
            num_workers,
            timeout,
            what=f"samples with the {kind} {name!r}",
            passed_over=MissingArrayError,
        )
        if found is None and not is_filled:
            remedy = ", or fill them: --missing-masks 0" if kind == "mask" else ""
            raise SourceError(f"No sample has the {kind} {name!r}. Check where these are{remedy}.")
        if found is not None and is_filled and found.descr == "|u1" and found.missing_id > 255:
            raise ValueError(
                f"missing_masks: {missing_masks:,} does not fit the mask {name!r}, whose ids go up "
                "to 255. Choose one of these, or save the masks with 16 bits (uint16)."
            )
        arrays.append(found or array)
    return tuple(arrays)


def _look_at(source: Source, settings: AnySettings, array: ExtraArray, row: int) -> ExtraArray:
    """Return an array as one sample has it. Raises DecodeError if that sample cannot be used."""
    record = source[row]
    found = look_at_array(array, record.arrays.get(array.name), settings.max_pixels)
    replace(settings, extra_arrays=(found,)).convert(record, ())
    return found
