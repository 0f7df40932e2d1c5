"""Columns that follow the images: points, masks and boxes."""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from memload.transforms.arguments import is_finite, wrong


@dataclass(frozen=True)
class Followers:
    """The names of the columns that every crop, resize and flip moves together with the images.

    For their shapes, ``mask_fill`` and ``min_area`` see `Compose`.
    """

    points: tuple[str, ...] = ()
    masks: tuple[str, ...] = ()
    boxes: tuple[str, ...] = ()
    mask_fill: int = 255
    min_area: float = 0.0


def column_names(owner: object, argument: str, value: Any) -> tuple[str, ...] | None:
    """Return the names of columns as a tuple, or None if there is none to return."""
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise wrong(owner, argument, "a list of column names", repr(value))
    return tuple(value)


def check_fill(owner: object, value: Any) -> int:
    """Return ``mask_fill`` as an int."""
    if not isinstance(value, Integral):
        raise wrong(owner, "mask_fill", "an integer", repr(value))
    return int(value)


def check_min_area(owner: object, value: Any) -> float:
    """Return ``min_area`` as a float from 0 to 1."""
    if not is_finite(value) or not 0 <= value <= 1:
        raise wrong(owner, "min_area", "a share of the area, from 0 to 1", repr(value))
    return float(value)
