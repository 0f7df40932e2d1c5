"""Points and boxes among the values of a table: columns of lists, or patterns for numbers."""

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from memload.errors import SourceError
from memload.wording import listed

#: The values of all samples, by the names of columns. None is missing.
Table = Mapping[str, Sequence[Any] | np.ndarray]


def table_points(table: Table, name: str, text: str) -> tuple[np.ndarray, set[str]]:
    """Return points, float32 ``(n, k, 2)``, and the columns that they take up.

    ``text`` is a column of lists, or a pattern: ``part_*`` for x, y, x, y, …, or ``x*,y*``.
    """
    return _numbers(table, "points", name, text, ("x", "y"))


def table_boxes(table: Table, name: str, text: str) -> tuple[np.ndarray, set[str]]:
    """Return boxes, float32 ``(n, k, 4)``, and the columns that they take up.

    They are filled up with NaN to the most boxes that a sample has. ``text`` is a column of lists,
    or a pattern such as ``x1*,y1*,x2*,y2*``.
    """
    values, names = _numbers(table, "boxes", name, text, ("x1", "y1", "x2", "y2"))
    check_order(values, name)
    return values, names


def check_order(boxes: np.ndarray, name: str) -> None:
    """Raise SourceError if one of the boxes ``(n, k, 4)`` ends before it begins."""
    is_wrong = (boxes[..., :2] > boxes[..., 2:]).any(-1)
    if is_wrong.any():
        row, number = np.argwhere(is_wrong)[0].tolist()
        raise SourceError(
            f"{name!r:.80}: the box {boxes[row, number].tolist()} of sample {row} is not x1, y1, "
            "x2, y2: it ends before it begins. If it is x, y, width, height, convert it."
        )


def per_box(table: Table, text: str, used: set[str]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield other columns of lists that have an item for each box, filled up like the boxes.

    Integers are filled up with -1, and floats with NaN.
    """
    if text not in table:
        return
    counts = [_length(each) for each in table[text]]
    for name in table.keys() - used:
        values = table[name]
        is_list = any(isinstance(each, (list, np.ndarray)) for each in values[:1000])
        if is_list and [_length(each) for each in values] == counts:
            filled = _filled(values, name, None)
            if filled is not None:
                yield name, filled


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (list, np.ndarray)) else 0


def _numbers(
    table: Table, kind: str, name: str, text: str, parts: Sequence[str]
) -> tuple[np.ndarray, set[str]]:
    """Return float32 ``(n, k, len(parts))`` and the names of the columns. Raises SourceError."""
    if any(isinstance(each, (list, np.ndarray)) for each in table.get(text, ())):
        filled = _filled(table[text], name, len(parts))
        assert filled is not None
        return filled, {text}
    numeric = [each for each, values in table.items() if _are_numbers(values)]
    groups = [fnmatch.filter(numeric, part.strip()) for part in text.split(",")]
    chosen = [column for group in zip(*groups, strict=False) for column in group]
    is_uneven = len({len(group) for group in groups}) > 1 or len(groups) not in (1, len(parts))
    if not chosen or len(chosen) % len(parts) or is_uneven:
        fits = " and ".join(str(len(group)) for group in groups)
        raise SourceError(
            f"--{kind} {name!r:.80}: {text!r:.80} fits {fits} columns of numbers, and not "
            f"{len(parts)} each ({', '.join(parts)}). There are {listed(numeric) or 'none'}. Name "
            f"a column of lists, or a pattern such as '{','.join(part + '*' for part in parts)}'."
        )
    stacked = np.stack([np.array(table[column], np.float32) for column in chosen], 1)
    return stacked.reshape(len(stacked), -1, len(parts)), set(chosen)


def _are_numbers(values: Sequence[Any] | np.ndarray) -> bool:
    if isinstance(values, np.ndarray):
        return values.ndim == 1
    return {*map(type, values)} <= {bool, int, float, type(None)}


def _filled(values: Sequence[Any] | np.ndarray, name: str, size: int | None) -> np.ndarray | None:
    """Return lists of any length as one array, filled up to the longest.

    With ``size``, they are lists of so many floats, float32. Otherwise items may have any shape,
    and None is returned for what are no numbers. Raises SourceError.
    """
    try:
        arrays = [_array(each) for each in values]
        longest = max(1, *map(len, arrays))
        shape = (size,) if size else next((each.shape[1:] for each in arrays if len(each)), ())
        is_whole = size is None and all(each.dtype.kind in "biu" for each in arrays if len(each))
        filler = -1 if is_whole else np.nan
        dtype = np.int64 if is_whole else np.float32
        filled = np.full((len(arrays), longest, *shape), filler, dtype)
        for row, each in enumerate(arrays):
            if len(each):
                if each.shape[1:] != shape:
                    raise ValueError(f"sample {row} has {values[row]!s:.60}")
                filled[row, : len(each)] = each
    except (TypeError, ValueError) as error:
        if size is None:
            return None
        raise SourceError(
            f"{name!r:.80}: there are not lists of {size} numbers: {error}. Correct them."
        ) from error
    return filled


def _array(value: Any) -> np.ndarray:
    array = np.array([] if value is None else value)
    return array if array.dtype.kind in "biuf" else array.astype(np.float64)
