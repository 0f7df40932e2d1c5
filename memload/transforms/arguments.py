"""Checks of arguments. Their errors name the transform, the argument, and what was given.

``owner`` is the transform, or its name.
"""

import math
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from types import FunctionType
from typing import Any, TypeVar

import numpy as np
import torch

_Name = TypeVar("_Name", bound=str)
#: Pillow's numbers of interpolations.
_PILLOWS_INTERPOLATIONS = {0: "nearest", 2: "bilinear", 3: "bicubic"}


def wrong(
    owner: object, argument: str, expected: str, found: object, advice: str = ""
) -> ValueError:
    """Return the error for an argument that is not what was expected."""
    name = owner if isinstance(owner, str) else type(owner).__name__
    message = f"{name}: {argument} must be {expected}, not {found}."
    return ValueError(f"{message} {advice}" if advice else message)


def describe(value: object) -> str:
    """Return shape and dtype of a tensor, or the type of any other value, for messages."""
    if isinstance(value, torch.Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    return "None" if value is None else f"a value of type {type(value).__name__}"


def shown(value: Any) -> str:
    """Return an argument as text: functions by name, and floats to six digits, 1 - 0.8 as 0.2."""
    if isinstance(value, FunctionType):
        return value.__qualname__
    if isinstance(value, float):
        return repr(float(f"{value:.6g}"))
    if type(value) is tuple:
        return f"({', '.join(map(shown, value))}{',' * (len(value) == 1)})"
    return repr(value)


def one_or_three_channels(owner: object, images: torch.Tensor) -> None:
    """Refuse images that are neither grey nor RGB."""
    if images.shape[1] not in (1, 3):
        raise wrong(owner, "images", "of 1 or 3 channels", f"of {images.shape[1]}")


def is_finite(value: Any) -> bool:
    """Return whether a value is a finite number."""
    return isinstance(value, Real) and math.isfinite(value)


def pair(owner: object, argument: str, value: Any) -> tuple[int, int]:
    """Return (height, width) from one positive integer or two."""
    sides = tuple(value) if isinstance(value, Sequence) else (value,)
    are_integers = all(isinstance(side, int | np.integer) for side in sides)
    if len(sides) not in (1, 2) or not are_integers or min(sides) < 1:
        expected = "an integer of at least 1, or a pair (height, width) of them"
        raise wrong(owner, argument, expected, repr(value))
    return int(sides[0]), int(sides[-1])


def size_of_epoch(
    owner: object, size: tuple[int, int] | Callable[[int], Any], epoch: int
) -> tuple[int, int]:
    """Return (height, width) in an epoch, from these or a function of the epoch."""
    return pair(owner, f"size in epoch {epoch}", size(epoch)) if callable(size) else size


def interval(
    owner: object, argument: str, value: Any, minimum: float, maximum: float = math.inf
) -> tuple[float, float]:
    """Return (low, high) from two numbers in ascending order and within bounds."""
    ends = value if isinstance(value, Sequence) and all(map(is_finite, value)) else ()
    if len(ends) != 2 or not minimum <= ends[0] <= ends[1] <= maximum:
        to = "" if maximum == math.inf else f" and at most {maximum:g}"
        expected = f"a pair (low, high), low <= high, both at least {minimum:g}{to}"
        raise wrong(owner, argument, expected, repr(value))
    return float(ends[0]), float(ends[1])


def integer(
    owner: object, argument: str, value: Any, minimum: int | None = None, expected: str = ""
) -> int:
    """Return an integer as an int."""
    if not isinstance(value, Integral) or (minimum is not None and value < minimum):
        at_least = "" if minimum is None else f" of at least {minimum}"
        raise wrong(owner, argument, expected or f"an integer{at_least}", repr(value))
    return int(value)


def share(owner: object, argument: str, value: Any) -> float:
    """Return a number from 0 to 1, such as a probability, as a float."""
    if not is_finite(value) or not 0 <= value <= 1:
        raise wrong(owner, argument, "a number from 0 to 1", repr(value))
    return float(value)


def interpolation_name(owner: object, value: Any, *names: _Name) -> _Name:
    """Return which of ``names`` was given; torchvision's enumeration or Pillow's number will do."""
    found = getattr(value, "value", value)
    if isinstance(found, int) and not isinstance(found, bool):
        found = _PILLOWS_INTERPOLATIONS.get(found)
    for name in names:
        if found == name:
            return name
    *others, last = map(repr, names)
    resizes_to_nearest = "nearest" not in names and str(found).startswith("nearest")
    advice = "Only masks are resized to the nearest neighbour." if resizes_to_nearest else ""
    raise wrong(owner, "interpolation", f"{', '.join(others)} or {last}", repr(value), advice)


def column_names(owner: object, argument: str, value: Any) -> tuple[str, ...] | None:
    """Return names of columns as a tuple, or None where none were given."""
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise wrong(owner, argument, "a list of column names", repr(value))
    return tuple(value)


def not_inplace(owner: object, value: Any) -> None:
    """Refuse ``inplace=True``, which torchvision has."""
    if value is not False:
        advice = "These transforms never change the images they are given."
        raise wrong(owner, "inplace", "False", repr(value), advice)


def numbers(owner: object, argument: str, value: Any) -> Any:
    """Return one finite number or a sequence of them, unchanged."""
    values = (value,) if isinstance(value, Real) else value
    is_sequence = isinstance(values, Sequence) and not isinstance(values, str)
    if not is_sequence or not values or not all(map(is_finite, values)):
        raise wrong(owner, argument, "a number, or one for each channel", repr(value))
    return value


def per_channel(
    owner: object, argument: str, value: Any, channels: int, dtype: torch.dtype
) -> tuple[float, ...]:
    """Return a pixel value for each channel from one number or several; for uint8, 0 to 255.

    What writes fractions to uint8 images cuts them off or rounds them, as torchvision does there.
    """
    values = (value,) if isinstance(value, Real) else tuple(value)
    if len(values) not in (1, channels):
        expected = f"one number, or one for each of {channels} channels"
        raise wrong(owner, argument, expected, f"{len(values)} numbers")
    # Values above 0 that are all below 1 are those of floats. They would be black.
    are_of_floats = 0 < max(values) < 1
    if dtype == torch.uint8 and (are_of_floats or min(values) < 0 or max(values) > 255):
        advice = "Multiply it by 255." if are_of_floats else ""
        raise wrong(owner, argument, "from 0 to 255 for uint8 images", repr(value), advice)
    return tuple(map(float, values)) * (channels if len(values) == 1 else 1)
