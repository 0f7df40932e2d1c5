"""Which columns are handed out, and which samples have the values that a user asks for."""

from collections.abc import Collection, Iterable, Sequence
from numbers import Real
from typing import Any

import numpy as np

from memload.storage.index import Index

#: The name of the samples' own numbers, among the columns that a user asks for.
INDEX = "index"
#: How many names or values a message lists.
_MAX_SHOWN = 20


def choose_columns(requested: Any, available: Collection[str]) -> tuple[str, ...]:
    """Return the columns to hand out: all for None and ``"all"``, the label first, or those listed.

    Raises TypeError if ``requested`` is no list of names, and ValueError for an unknown name.
    """
    if requested is None or (isinstance(requested, str) and requested == "all"):
        return tuple(sorted(available, key=lambda name: name != "label"))
    if isinstance(requested, str) or not isinstance(requested, Sequence):
        example = repr(requested) if isinstance(requested, str) else "'label'"
        raise TypeError(
            f"columns is {requested!r} instead of a list. Write [{example}], or 'all' for all of "
            "them."
        )
    for name in requested:
        if name not in available and name != INDEX:
            raise ValueError(
                f"columns names {name!r}, which the data set does not have. It has "
                f"{_listed(available) if available else 'no columns'}."
            )
    if len(set(requested)) < len(requested):
        raise ValueError(f"columns is {list(requested)!r}. Name each column once.")
    return tuple(requested)


def column_values(index: Index, name: str) -> np.ndarray:
    """Return the values of a column, ``(n, …)``. Those of ``"index"`` are 0, 1, 2, …, int64."""
    return np.arange(len(index)) if name not in index.columns else index.columns[name]


def having(index: Index, name: str, wanted: Any) -> np.ndarray:
    """Return which samples have a value, or one of a list of values, in a column: bool ``(n,)``.

    Raises ValueError and TypeError as `MemmapDataset.where` does.
    """
    column = index.columns.get(name)
    if column is None:
        columns = f"columns {_listed(index.columns)}" if index.columns else "no columns"
        raise ValueError(f"where: there is no column {name!r}. The data set has {columns}.")
    if column.ndim != 1:
        raise ValueError(
            f"where: column {name!r} has an array of shape {column.shape[1:]} for each sample, but "
            "only single values can be compared. Give a mask to subset() instead."
        )
    texts = index.categories.get(name)
    if name == "label" and index.classes is not None:
        texts = index.classes
    chosen = np.zeros(len(index), bool)
    for value in wanted if isinstance(wanted, list | tuple | set | frozenset) else [wanted]:
        if texts is None:
            _check_number(value, name, column)
        chosen |= column == (value if texts is None else _number_of(value, name, texts))
    return chosen


def _number_of(value: Any, name: str, texts: Sequence[str]) -> int:
    """Return the number that stands for a text. The number itself may be given as well."""
    if isinstance(value, str) and value in texts:
        return texts.index(value)
    is_number = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if is_number and 0 <= value < len(texts):
        return int(value)
    error = ValueError if isinstance(value, str) or is_number else TypeError
    raise error(f"where: {name!r} has no value {value!r:.80}. It has {_listed(texts)}.")


def _check_number(value: Any, name: str, column: np.ndarray) -> None:
    if not isinstance(value, Real | np.bool_):
        raise TypeError(
            f"where: column {name!r} holds numbers ({column.dtype.name}), not {value!r:.80}. It "
            f"has {_values(column)}."
        )
    if not np.any(column == value):
        raise ValueError(f"where: no sample has {name}={value!r:.80}. There is {_values(column)}.")


def _values(column: np.ndarray) -> str:
    """Describe the different values of a column."""
    values = np.unique(column)
    if not values.size:
        return "no sample"
    if values.size <= _MAX_SHOWN:
        return _listed(map(str, values.tolist()))
    return f"{values.size:,} values from {values[0]} to {values[-1]}"


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = f", … ({len(names):,})" if len(names) > _MAX_SHOWN else ""
    return ", ".join(f"{name:.60}" for name in names[:_MAX_SHOWN]) + more
