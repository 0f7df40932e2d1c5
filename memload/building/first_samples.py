"""Looks at the first samples of a source, in a worker: that runs code which may crash or hang.

What all rows have in common is taken from the first usable sample: the columns of a data set, the
shape and type of its arrays, and those of masks and other arrays beside the images.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from memload.building.extra_arrays import ExtraArray
from memload.building.pool import look_at
from memload.building.settings import Settings
from memload.errors import SourceError
from memload.sources.samples import Source

#: At most so many samples are tried, and fewer if all of them crash or hang: that takes long.
_MAX_FIRST_SAMPLES, _MAX_LOST_SAMPLES = 100, 3


def first_usable(
    look: Callable[[int], Any],
    keys: Sequence[str] | range,
    num_workers: int,
    timeout: float,
    *,
    what: str = "samples of the data set",
) -> Any:
    """Return what ``look`` returns for the first sample for which it does not fail.

    Args:
        look: Called with the number of a sample; in a worker, unless ``num_workers`` is 0. If it
            returns None, the next sample is looked at. If it does so for all, None is returned.
        keys: The names of the samples.
        num_workers: The number of workers of the build.
        timeout: Seconds for one sample.
        what: What messages call the samples.

    Raises SourceError if ``look`` does, or if it fails for all of the first samples.
    """
    failures, lost = [], 0
    looks = look_at(look, range(len(keys)), num_workers=num_workers, timeout=timeout)
    with contextlib.closing(looks):
        for chunk, (found, reason) in looks:
            if found is not None:
                return found
            if reason:
                failures.append((chunk.start, reason))
                lost += bool(chunk.lost)
            if len(failures) == _MAX_FIRST_SAMPLES or lost == len(failures) == _MAX_LOST_SAMPLES:
                break
    if failures:
        row, reason = failures[0]
        name = f"sample {row}" if str(keys[row]) == str(row) else keys[row]
        raise SourceError(
            f"None of the first {len(failures)} {what} can be used. The first is {name}: "
            f"{reason:.500}"
        )
    return None


def find_arrays(
    source: Source,
    settings: Settings,
    missing_masks: int | None,
    num_workers: int,
    timeout: float,
) -> tuple[ExtraArray, ...]:
    """Return the masks and other arrays of a source, with the types of its first usable samples.

    Args:
        source: The source.
        settings: How its images are converted.
        missing_masks: The id of masks that are missing. None: such a sample is rejected.
        num_workers: The number of workers of the build.
        timeout: Seconds for one sample.

    Raises SourceError if none can be used, apart from masks that are filled.
    """
    arrays = []
    for name, kind in source.arrays.items():
        missing_id = missing_masks if kind == "mask" else None
        array = ExtraArray(name, kind, "|u1", settings.size, missing_id)
        look = functools.partial(_look_at, source, settings, array)
        what = f"samples with the {kind} {name!r}"
        found = first_usable(look, source.keys, num_workers, timeout, what=what)
        if found is None and missing_id is None:
            remedy = ", or fill them: --missing-masks 0" if kind == "mask" else ""
            raise SourceError(f"No sample has the {kind} {name!r}. Check where these are{remedy}.")
        if found is not None and missing_id is not None and missing_id > np.iinfo(found.descr).max:
            raise ValueError(f"missing_masks: {missing_id} does not fit the 8 bits of {name!r}.")
        arrays.append(found or array)
    return tuple(arrays)


def _look_at(source: Source, settings: Settings, array: ExtraArray, row: int) -> ExtraArray | None:
    """Return an array as one sample has it, or None if that lacks it. Raises DecodeError."""
    record = source[row]
    value = record.arrays.get(array.name)
    if value is None:
        return None
    found = array.seen_in(value, settings.max_pixels)
    replace(settings, extra_arrays=(found,)).convert(record, ())
    return found
