"""Which samples have the values that a user asks for in columns."""

from collections.abc import Mapping
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
        column = index.columns.get(name)
        if column is None:
            known = f"columns {listed(index.columns)}" if index.columns else "no columns"
            raise ValueError(f"where: there is no column {name!r}. The data set has {known}.")
        if column.ndim != 1:
            raise ValueError(
                f"where: column {name!r} has an array of shape {column.shape[1:]} for each sample, "
                "but only single values can be compared. Give subset() booleans instead."
            )
        are_several = isinstance(values, list | tuple | set | frozenset)
        having = np.zeros(len(index), bool)
        for value in values if are_several else [values]:
            having |= column == _number(value, index, name)  # np.isin finds no 0.1 in float32
        chosen &= having
    return np.flatnonzero(chosen)


def _number(value: Any, index: Index, name: str) -> Any:
    """Return the number by which a column has a value. Of a text, its number may be given, too."""
    column, texts = index.columns[name], index.texts_of(name)
    if texts is None:
        is_comparable = isinstance(value, Real | np.bool_)
        if is_comparable and np.any(column == value):
            return value
        known = listed(np.unique(column).tolist()) or "no sample"
    else:
        if isinstance(value, str) and value in texts:
            return texts.index(value)
        is_number = isinstance(value, int | np.integer) and not isinstance(value, bool)
        if is_number and 0 <= value < len(texts):
            return value
        is_comparable, known = is_number or isinstance(value, str), listed(texts)
    error = ValueError if is_comparable else TypeError
    raise error(f"where: {name!r} has no value {value!r:.80}. It has {known}.")


def values_in(text: str, index: Index, name: str) -> list[Any]:
    """Return the values that a text from a command line stands for, for `matching`.

    Values are separated by commas. But a text that is a value itself stands for this one, as names
    of classes may have commas in them. Classes may be given by their numbers unless one is named by
    a number. Raises ValueError for a text in a column of numbers.

    >>> values_in("cat,dog", index, "label")  # doctest: +SKIP
    ['cat', 'dog']
    """
    texts, parts = index.texts_of(name), text.split(",")
    if name not in index.columns or (texts is not None and text in texts):
        return [text]  # `matching` says which columns there are
    if texts is not None:
        are_names = any(known.isdecimal() for known in texts)
        return [int(part) if part.isdecimal() and not are_names else part for part in parts]
    try:
        return [int(part) if part.lstrip("+-").isdecimal() else float(part) for part in parts]
    except ValueError:
        raise ValueError(f"where: {name} is {text!r:.80}, but this column has no texts.") from None
