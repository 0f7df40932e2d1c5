"""The table that ``memload export`` writes: its name, its columns, and those of arrays."""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

#: What such a table is called.
TABLE = "metadata.csv"

Kind = Literal["array", "points", "boxes"]
#: What the last size of an array stands for.
_PARTS: Mapping[Kind, Sequence[str]] = {
    "array": (),
    "points": ("x", "y"),
    "boxes": ("x1", "y1", "x2", "y2"),
}


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
