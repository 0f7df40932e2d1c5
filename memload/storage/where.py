"""Which samples have the values that a user asks for in columns."""

import json
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np

from memload.wording import listed


def matching(
    samples: int,
    columns: Mapping[str, Sequence[Any] | np.ndarray],
    texts: Mapping[str, Sequence[str]],
    conditions: Mapping[str, Any],
) -> np.ndarray:
    """Return the positions of the samples for which all conditions hold, int64, in their order.

    A list means any of its values, and so does a text with commas, unless it is a value itself.

    Args:
        samples: How many samples there are.
        columns: Their values: arrays, or lists of texts and other values, such as cells of CSV.
        texts: The texts that columns count into. Their numbers may be given, too.
        conditions: For each column, a value or several.

    Raises ValueError for a column or a value that there is not.

    >>> matching(3, {"size": np.array([7, 8, 9])}, {}, {"size": "7,9"})
    array([0, 2])
    >>> matching(3, {"label": np.array([0, 1, 0])}, {"label": ["cat", "dog"]}, {"label": "cat"})
    array([0, 2])
    """
    chosen = np.ones(samples, bool)
    for name, given in conditions.items():
        if name not in columns:
            known = listed(columns) or "no columns"
            raise ValueError(f"where: there is no column {name!r:.80}. There are {known}.")
        column, own_texts = columns[name], texts.get(name)
        if isinstance(column, np.ndarray) and column.ndim != 1:
            raise ValueError(
                f"where: column {name!r} has an array of shape {column.shape[1:]} for each sample, "
                "but only single values can be compared. Give subset() booleans instead."
            )
        having = np.zeros(samples, bool)
        for value in _several(given, column, own_texts):
            found = _equal(column, value, own_texts)
            if found is None:
                known = listed(own_texts or _distinct(column)) or "no sample"
                raise ValueError(f"where: {name!r:.80} has no value {value!r:.80}. It has {known}.")
            having |= found
        chosen &= having
    return np.flatnonzero(chosen)


def _several(given: Any, column: Any, texts: Sequence[str] | None) -> Any:
    """Return the values that are given. Names of classes, for one, may have commas in them."""
    if isinstance(given, str) and "," in given and _equal(column, given, texts) is None:
        return given.split(",")
    return given if isinstance(given, list | tuple | set | frozenset) else [given]


def _equal(column: Any, value: Any, texts: Sequence[str] | None) -> np.ndarray | None:
    """Return where a column has a value, booleans ``(n,)``, or None if it never can."""
    if texts:
        if isinstance(value, str):
            value = texts.index(value) if value in texts else -1
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        if not (is_number and value in range(len(texts))):
            return None
        return np.array(np.asarray(column) == value)
    if isinstance(column, np.ndarray):
        number = _number(value)
        found = np.zeros(len(column), bool) if number is None else column == number
    else:
        text = _text(value)
        found = np.array([each == value or _text(each) == text for each in column], bool)
    return found if found.any() else None


def _number(value: Any) -> Any:
    """Return a number, or the one that a text stands for, or None."""
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return None
    return value if isinstance(value, Real | np.bool_) else None


def _text(value: Any) -> str:
    """Return a value as a cell of CSV has it: ``true`` as JSON does, and nothing for None."""
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _distinct(column: Any) -> list[Any]:
    if isinstance(column, np.ndarray):
        return list(np.unique(column).tolist())
    return [*dict.fromkeys(map(_text, column))]
