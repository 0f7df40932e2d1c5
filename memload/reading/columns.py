"""Which columns and arrays are handed out, and the values of columns."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from memload.storage.index import Index
from memload.wording import listed

#: The name of the samples' own numbers, among the columns that a user asks for.
INDEX = "index"


def choose_names(requested: Any, available: Collection[str]) -> tuple[str, ...]:
    """Return the names to hand out: all for None and ``"all"``, the label first, or those listed.

    Raises TypeError if ``requested`` is no list of names, and ValueError for an unknown name.
    """
    if requested is None or (isinstance(requested, str) and requested == "all"):
        return tuple(sorted(available, key=lambda name: name != "label"))
    if isinstance(requested, str) or not isinstance(requested, Sequence):
        raise TypeError(
            f"columns is {requested!r} instead of a list of names. Write ['label'], for example, "
            "or 'all'."
        )
    unknown = [name for name in requested if name not in available and name != INDEX]
    if unknown:
        raise ValueError(
            f"columns names {unknown[0]!r}, which the data set does not have. It has "
            f"{listed(available) or 'no columns'}. The image always comes first."
        )
    if len(set(requested)) < len(requested):
        raise ValueError(f"columns is {list(requested)!r}. Name each column once.")
    return tuple(requested)


def split_names(names: Iterable[str], arrays: Collection[str]) -> tuple[list[str], list[str]]:
    """Return the names of arrays, and those of columns, each in their order.

    Feeds return images, the arrays, then the columns.
    """
    names = list(names)
    return (
        [name for name in names if name in arrays],
        [name for name in names if name not in arrays],
    )


def column_values(index: Index, name: str) -> np.ndarray:
    """Return the values of a column, ``(n, …)``. Those of ``"index"`` are 0, 1, 2, …, int64."""
    return np.arange(len(index)) if name not in index.columns else index.columns[name]
