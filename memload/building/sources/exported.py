"""Tables that ``memload export`` has written: paths, keys, and arrays of one number a cell."""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from memload.building.sources.columns import ColumnCollector

#: What such a table is called.
TABLE = "metadata.csv"
#: The columns that it has: paths of images, and the names of their samples.
PATH, KEY = "file_name", "key"

#: One number of an array, such as ``pose[0][2]``, of points, ``marks[4].x``, or boxes, ``b[0].y2``.
_CELL = re.compile(r"(?P<name>.+?)(?P<place>(\[\d+\])+)(\.(?P<part>[xy][12]?))?")

Kind = Literal["array", "points", "boxes"]
#: What the last size of an array stands for.
_PARTS: Mapping[Kind, Sequence[str]] = {
    "array": (),
    "points": ("x", "y"),
    "boxes": ("x1", "y1", "x2", "y2"),
}


class ArrayCells(NamedTuple):
    """The cells that form an array: their names, in C order, what they are, and the shape."""

    names: tuple[str, ...]
    kind: Kind
    shape: tuple[int, ...]


def is_exported(header: Collection[str]) -> bool:
    """Return whether a table has the columns of an export.

    Its texts are taken as they are: with spaces around them, and in any encoding, since paths and
    names of classes are. Every column of text is a category, and only ``label`` holds labels.
    """
    return PATH in header and KEY in header


def cell_names(name: str, kind: Kind, shape: Sequence[int]) -> list[str]:
    """Return the names of the cells of an array, in C order. Points and boxes are ``(k, 2 | 4)``.

    >>> cell_names("marks", "points", (2, 2))
    ['marks[0].x', 'marks[0].y', 'marks[1].x', 'marks[1].y']
    """
    parts = _PARTS[kind]
    places = shape[:-1] if parts else shape
    return [
        name + "".join(f"[{number}]" for number in place) + (f".{part}" if part else "")
        for place in np.ndindex(*places)
        for part in parts or ("",)
    ]


def arrays_in_cells(header: Sequence[str]) -> dict[str, ArrayCells]:
    """Return the arrays in the columns of a table, by name, if all of their cells are there."""
    groups: dict[str, list[str]] = {}
    for cell in header:
        if match := _CELL.fullmatch(cell):
            groups.setdefault(match["name"], []).append(cell)
    found = {}
    for name, cells in groups.items():
        last = _CELL.fullmatch(cells[-1])
        assert last is not None  # it is one of those that matched
        sizes = [int(number) + 1 for number in re.findall(r"\d+", last["place"])]
        kind = next(kind for kind, parts in _PARTS.items() if last["part"] in (parts or (None,)))
        shape = (*sizes, len(_PARTS[kind])) if _PARTS[kind] else tuple(sizes)
        if math.prod(shape) == len(cells) and cells == cell_names(name, kind, shape):
            found[name] = ArrayCells(tuple(cells), kind, shape)
    return found


def add_array(
    columns: ColumnCollector, name: str, cells: ArrayCells, values: Sequence[Any]
) -> None:
    """Add an array to columns. ``values`` are those of its cells, int64 or float64 ``(n,)``.

    Boxes are float32, and so are other floats that it holds exactly.
    """
    stacked = np.stack(values, axis=1)
    narrow = stacked.astype(np.float32)
    is_exact = np.array_equal(narrow.astype(np.float64), stacked, equal_nan=True)
    if cells.kind == "boxes" or (stacked.dtype.kind == "f" and is_exact):
        stacked = narrow
    columns.add(
        name,
        stacked.reshape(-1, *cells.shape),
        points=cells.kind == "points",
        boxes=cells.kind == "boxes",
    )
