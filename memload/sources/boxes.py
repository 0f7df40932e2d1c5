"""Points and boxes among the values of a table: columns of lists, or patterns for numbers."""

import contextlib
import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from memload.errors import SourceError
from memload.sources.contents import array_of
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
    try:
        if any(isinstance(each, (list, np.ndarray)) for each in table.get(text, ())):
            arrays = [items_of(each, len(parts)) for each in table[text]]
            values, names = filled(arrays, (max(1, *map(len, arrays)), len(parts)), "<f4"), {text}
        else:
            columns = _columns_of(table, parts, text)
            stacked = np.stack([np.array(table[column], np.float32) for column in columns], 1)
            values, names = stacked.reshape(len(stacked), -1, len(parts)), {*columns}
        if kind == "boxes":
            check_order(values)
    except (TypeError, ValueError) as error:
        raise SourceError(f"--{kind} {name!r:.80}: {error}. Correct it.") from error
    return values, names


def _columns_of(table: Table, parts: Sequence[str], text: str) -> list[str]:
    """Return the columns that a pattern names, in the order x, y, x, y, …. Raises ValueError."""
    numeric = [each for each, values in table.items() if _are_numbers(values)]
    groups = [fnmatch.filter(numeric, part.strip()) for part in text.split(",")]
    columns = [column for group in zip(*groups, strict=False) for column in group]
    is_uneven = len({len(group) for group in groups}) > 1 or len(groups) not in (1, len(parts))
    if not columns or len(columns) % len(parts) or is_uneven:
        fits = " and ".join(str(len(group)) for group in groups)
        raise ValueError(
            f"{text!r:.80} fits {fits} columns of numbers, and not {len(parts)} each "
            f"({', '.join(parts)}). There are {listed(numeric) or 'none'}. Name a column of lists, "
            f"or a pattern such as '{','.join(part + '*' for part in parts)}'"
        )
    if {*map(str.lower, columns)} & {"w", "h", "width", "height"}:
        raise ValueError(
            f"the columns {listed(columns)} are sizes, and {', '.join(parts)} are wanted. Add "
            "columns of x + width and y + height"
        )
    return columns


def items_of(value: Any, size: int) -> np.ndarray:
    """Return the points or boxes of a sample, ``(k, size)``. Raises ValueError."""
    form = str(getattr(getattr(value, "format", None), "value", "XYXY"))  # of tv_tensors
    items = array_of(value)
    items = items.reshape(-1, size) if items.shape == (size,) or not items.size else items
    if form != "XYXY" or items.ndim != 2 or items.shape[1] != size:
        raise ValueError(f"it is {form} of the shape {items.shape}, not XYXY of (k, {size})")
    return items


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
