"""Points and boxes among the values of a table: columns of lists, or patterns for numbers."""

import contextlib
import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from memload.errors import SourceError
from memload.wording import listed

#: The values of all samples, by the names of columns. None means missing.
Table = Mapping[str, Sequence[Any] | np.ndarray]

#: What the columns of points and boxes have.
_PARTS = {"points": ("x", "y"), "boxes": ("x1", "y1", "x2", "y2")}


def table_numbers(table: Table, kind: str, name: str, text: str) -> tuple[np.ndarray, set[str]]:
    """Return points ``(n, k, 2)`` or boxes ``(n, k, 4)``, and the columns that they take up.

    They are float32, and filled up with NaN to the most that a sample has.

    Args:
        table: The columns.
        kind: "points" or "boxes".
        name: What they are called.
        text: A column of lists, or a pattern: ``part_*`` for x, y, x, y, …, or ``x*,y*``.

    Raises SourceError.
    """
    parts = _PARTS[kind]
    if any(isinstance(each, (list, np.ndarray)) for each in table.get(text, ())):
        try:
            arrays = [array_of(each) for each in table[text]]
            values = filled(arrays, (max(1, *map(len, arrays)), len(parts)), "<f4")
        except (TypeError, ValueError) as error:
            raise SourceError(
                f"{name!r:.80}: there are not lists of {len(parts)} numbers: {error}. Correct them."
            ) from error
        names = {text}
    else:
        numeric = [each for each, values in table.items() if _are_numbers(values)]
        groups = [fnmatch.filter(numeric, part.strip()) for part in text.split(",")]
        chosen = [column for group in zip(*groups, strict=False) for column in group]
        is_uneven = len({len(group) for group in groups}) > 1 or len(groups) not in (1, len(parts))
        if not chosen or len(chosen) % len(parts) or is_uneven:
            fits = " and ".join(str(len(group)) for group in groups)
            raise SourceError(
                f"--{kind} {name!r:.80}: {text!r:.80} fits {fits} columns of numbers, and not "
                f"{len(parts)} each ({', '.join(parts)}). There are {listed(numeric) or 'none'}. "
                "Name a column of lists, or a pattern such as "
                f"'{','.join(part + '*' for part in parts)}'."
            )
        if kind == "boxes" and {*map(str.lower, chosen)} & {"w", "h", "width", "height"}:
            raise SourceError(
                f"--boxes {name!r:.80}: the columns {listed(chosen)} are sizes, and x1, y1, x2, y2 "
                "are wanted. Add columns of x + width and y + height."
            )
        stacked = np.stack([np.array(table[column], np.float32) for column in chosen], 1)
        values, names = stacked.reshape(len(stacked), -1, len(parts)), {*chosen}
    if kind == "boxes":
        try:
            check_order(values)
        except ValueError as error:
            raise SourceError(f"{name!r:.80}: {error}.") from None
    return values, names


def check_order(boxes: np.ndarray) -> None:
    """Raise ValueError if one of the boxes ``(…, 4)`` ends before it begins."""
    is_wrong = (boxes[..., :2] > boxes[..., 2:]).any(-1)
    if is_wrong.any():
        raise ValueError(
            f"the box {boxes[is_wrong][0].tolist()} is not x1, y1, x2, y2: it ends before it "
            "begins. If it is x, y, width, height, convert it"
        )


def per_box(table: Table, text: str, used: set[str]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield other columns of lists that have an item for each box, filled up like the boxes."""
    counts = [_length(each) for each in table.get(text, ())]
    for name, values in table.items() if any(counts) else ():
        if name not in used and [_length(each) for each in values] == counts:
            with contextlib.suppress(TypeError, ValueError):  # they are no numbers
                arrays = [array_of(each) for each in values]
                some = [each for each in arrays if len(each)]
                is_whole = all(each.dtype.kind in "biu" for each in some)
                shape = (max(counts), *some[0].shape[1:])
                yield name, filled(arrays, shape, "<i8" if is_whole else "<f4")


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (list, np.ndarray)) else 0


def _are_numbers(values: Sequence[Any] | np.ndarray) -> bool:
    if isinstance(values, np.ndarray):
        return values.ndim == 1
    return {*map(type, values)} <= {bool, int, float, type(None)}


def array_of(value: Any) -> np.ndarray:
    """Return numbers as an array. None has no items; in a list, it is NaN. Raises ValueError."""
    array = np.asarray(() if value is None else value)
    is_list = array.dtype.kind == "O" and isinstance(value, (list, tuple))
    return array.astype(np.float64) if is_list else array


def filled(arrays: Sequence[np.ndarray], shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Return items of samples as one array ``(n, *shape)``, filled up with NaN, or -1 in integers.

    Raises ValueError for items that do not fit.

    >>> filled([np.array([3, 4]), np.array([])], (2,), "<i8")
    array([[ 3,  4],
           [-1, -1]])
    """
    is_whole = dtype[1] == "i"
    result = np.full((len(arrays), *shape), -1 if is_whole else np.nan, dtype)
    for row, array in enumerate(arrays):
        if len(array):
            if array.shape[1:] != shape[1:] or array.dtype.kind not in (
                "biu" if is_whole else "biuf"
            ):
                raise ValueError(f"items are {array.dtype} of {array.shape}, not of {shape[1:]}")
            result[row, : len(array)] = array
    return result
