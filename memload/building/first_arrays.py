"""What the rows of masks and other arrays have in common, from the first usable samples."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from memload.building.checks import check_mask_fill
from memload.building.conversion import AnySettings
from memload.building.extra_arrays import (
    ExtraArray,
    MissingArrayError,
    MissingMasks,
    look_at_array,
)
from memload.building.first_samples import first_usable, look_at_first
from memload.building.sources.record import Source, optional
from memload.errors import SourceError

#: If the first mask has more bits than ids may need, these decide on the type: those of so many.
_MASKS_LOOKED_AT = 32


def find_arrays(
    source: Source,
    settings: AnySettings,
    missing_masks: MissingMasks,
    mask_fill: int,
    num_workers: int,
    timeout: float,
) -> tuple[ExtraArray, ...]:
    """Return the masks and other arrays of a source whose images are converted with ``settings``.

    Raises ValueError if ``mask_fill`` does not fit them, and SourceError if none can be used, apart
    from masks that are filled.
    """
    arrays = []
    for name, kind in optional(source).arrays.items():
        array = ExtraArray(name, kind, "|u1", settings.size)
        look = functools.partial(_look, source, settings, array)
        is_filled = (kind, missing_masks) == ("mask", "fill")
        found = find_type(
            look,
            source,
            num_workers,
            timeout,
            what=f"samples with the {kind} {name!r}",
            passed_over=MissingArrayError,
            is_required=not is_filled,
        )
        if found is None and not is_filled:
            remedy = ", or fill them: --missing-masks fill" if kind == "mask" else ""
            raise SourceError(f"No sample has the {kind} {name!r}. Check where these are{remedy}.")
        array = found or array
        if kind == "mask":
            check_mask_fill(mask_fill, array.descr, f"the mask {name!r}")
        arrays.append(replace(array, fill=mask_fill, fills_missing=missing_masks == "fill"))
    return tuple(arrays)


def find_type(
    look: Callable[[int], tuple[Any, bool]],
    source: Source,
    num_workers: int,
    timeout: float,
    **options: Any,
) -> Any:
    """Return what ``look`` returns first for the first usable sample.

    That has an element type, ``descr``. ``look`` also returns whether the type is certain. If not,
    more masks are looked at, and one of them that needs 16 bits is returned. ``options`` are those
    of `first_usable`.
    """
    first = first_usable(look, source.keys, num_workers, timeout, **options)
    if first is None:
        return None
    found, is_certain = first
    if is_certain:
        return found
    passed_over = options.get("passed_over")
    others, _ = look_at_first(
        look, len(source), num_workers, timeout, count=_MASKS_LOOKED_AT, passed_over=passed_over
    )
    return next((other for other, _ in others if other.descr == "<u2"), found)


def _look(
    source: Source, settings: AnySettings, array: ExtraArray, row: int
) -> tuple[ExtraArray, bool]:
    """Return an array as one sample has it. Raises DecodeError if that sample cannot be used."""
    record = source[row]
    found, is_certain = look_at_array(array, record.arrays.get(array.name), settings.max_pixels)
    replace(settings, extra_arrays=(found,)).convert(record, ())
    return found, is_certain
