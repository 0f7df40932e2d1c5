"""What the rows of masks and other arrays have in common, from the first usable sample of each."""

import functools
from dataclasses import replace
from typing import Literal

from memload.building.checks import check_mask_fill
from memload.building.conversion import AnySettings
from memload.building.extra_arrays import ExtraArray, MissingArrayError, MissingMasks, type_of
from memload.building.first_samples import first_usable
from memload.building.sources.record import Source
from memload.errors import SourceError


def find_arrays(
    source: Source,
    settings: AnySettings,
    missing_masks: MissingMasks,
    mask_fill: int,
    num_workers: int,
    timeout: float,
) -> tuple[ExtraArray, ...]:
    """Return the masks and other arrays of a source whose images are converted with ``settings``.

    Raises ValueError if ``mask_fill`` does not fit them, and SourceError if none can be used.
    """
    arrays = []
    for name, kind in getattr(source, "arrays", {}).items():
        find = functools.partial(_find, source, settings, name, kind)
        found = first_usable(find, len(source), num_workers, timeout, passed_over=MissingArrayError)
        if found is None and (kind, missing_masks) != ("mask", "fill"):
            raise SourceError(f"No sample has the {kind} {name!r}. Check where these are.")
        array = found or ExtraArray(name, kind, "|u1", settings.size)
        if kind == "mask":
            check_mask_fill(mask_fill, array.descr, f"the mask {name!r}")
        arrays.append(replace(array, fill=mask_fill, fills_missing=missing_masks == "fill"))
    return tuple(arrays)


def _find(
    source: Source,
    settings: AnySettings,
    name: str,
    kind: Literal["mask", "array"],
    row: int,
) -> ExtraArray:
    """Return an array as one sample has it. Raises DecodeError if that sample cannot be used."""
    record = source[row]
    value = record.arrays.get(name)
    descr, shape = type_of(name, kind, value, settings.max_pixels)
    array = ExtraArray(name, kind, descr, settings.size if kind == "mask" else shape)
    replace(settings, extra_arrays=(array,)).convert(record, ())
    return array
