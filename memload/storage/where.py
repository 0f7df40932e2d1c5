"""Which samples have the values that a user asks for in columns."""

import json
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np

from memload.storage.index import Index
from memload.wording import listed


def matching(index: Index, conditions: Mapping[str, Any]) -> np.ndarray:
    """Return the positions of the samples for which all conditions hold, int64, in their order.

    Raises ValueError and TypeError as `MemmapDataset.where` does.

    >>> matching(index, {"split": "train", "label": ["cat", "dog"]})  # doctest: +SKIP
    array([0, 3, 4])
    """
    chosen = np.ones(len(index), bool)
    for name, values in conditions.items():
        if name not in index.columns:
            known = listed(index.columns) or "no columns"
            raise ValueError(f"where: there is no column {name!r}. The data set has {known}.")
        column = index.columns[name]
        if column.ndim != 1:
            raise ValueError(
                f"where: column {name!r} has an array of shape {column.shape[1:]} for each sample, "
                "but only single values can be compared. Give subset() booleans instead."
            )
        are_several = isinstance(values, list | tuple | set | frozenset)
        having = np.zeros(len(index), bool)
        for value in values if are_several else [values]:
            having |= column == _number(value, name, column, index.texts.get(name))
        chosen &= having
    return np.flatnonzero(chosen)


def _number(value: Any, name: str, column: np.ndarray, texts: Sequence[str] | None) -> Any:
    """Return the number by which a column has a value. Of a text, its number may be given, too."""
    is_number, is_text = isinstance(value, Real | np.bool_), isinstance(value, str)
    if texts is None:
        if is_number and np.any(column == value):  # np.isin finds no 0.1 in float32
            return value
        known = listed(np.unique(column).tolist()) or "no sample"
    else:
        if is_text and value in texts:
            return texts.index(value)
        if is_number and not isinstance(value, bool) and value in range(len(texts)):
            return value
        known = listed(texts)
    error = ValueError if is_number or (is_text and texts is not None) else TypeError
    raise error(f"where: {name!r} has no value {value!r:.80}. It has {known}.")


def values_in(text: str, index: Index, name: str) -> list[Any]:
    """Return the values that a text from a command line stands for, for `matching`.

    Values are separated by commas. But a text that is a value itself stands for this one, as names
    of classes may have commas in them. Raises ValueError for a text in a column of numbers.

    >>> values_in("cat,dog", index, "label")  # doctest: +SKIP
    ['cat', 'dog']
    >>> values_in("0.5,1", index, "age")  # doctest: +SKIP
    [0.5, 1]
    """
    if name not in index.columns:
        return [text]  # `matching` says which columns there are
    texts, parts = index.texts.get(name), text.split(",")
    if texts is not None:
        return [text] if text in texts else parts
    try:
        return [json.loads(part) for part in parts]
    except ValueError:
        raise ValueError(f"where: {name} is {text!r:.80}, but this column has no texts.") from None
