"""Which samples have the values that a user asks for in columns."""

import contextlib
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np

from memload.storage.index import Index
from memload.wording import listed

#: The values of a column of numbers are listed if there are no more than these.
_MAX_VALUES = 20


def matching(index: Index, conditions: Mapping[str, Any]) -> np.ndarray:
    """Return the positions of the samples for which all conditions hold, int64, in their order.

    Raises ValueError and TypeError as `MemmapDataset.where` does.
    """
    chosen = np.ones(len(index), bool)
    for name, wanted in conditions.items():
        chosen &= _having(index, name, wanted)
    return np.flatnonzero(chosen)


def _having(index: Index, name: str, wanted: Any) -> np.ndarray:
    """Return which samples have a value, or one of a list of values, in a column: bool ``(n,)``."""
    column = index.columns.get(name)
    if column is None:
        columns = f"columns {listed(index.columns)}" if index.columns else "no columns"
        raise ValueError(f"where: there is no column {name!r}. The data set has {columns}.")
    if column.ndim != 1:
        raise ValueError(
            f"where: column {name!r} has an array of shape {column.shape[1:]} for each sample, but "
            "only single values can be compared. Give subset() booleans instead, one for each "
            "sample."
        )
    texts = _texts_of(index, name)
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
    raise error(f"where: {name!r} has no value {value!r:.80}. It has {listed(texts)}.")


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
    if values.size <= _MAX_VALUES:
        return listed(values.tolist())
    return f"{values.size:,} values from {values[0]} to {values[-1]}"


def parsed(index: Index, name: str, text: str) -> list[Any]:
    """Return the values that a text from a command line stands for, for `matching`.

    Values are separated by commas. But a text that is a value itself stands for this one, as names
    of classes may have commas in them. Classes may be given by their numbers unless one is named by
    a number. Raises ValueError for a text in a column of numbers.

    >>> parsed(index, "label", "cat,dog")  # doctest: +SKIP
    ['cat', 'dog']
    """
    texts = _texts_of(index, name)
    if name not in index.columns:
        return [text]  # `matching` says what there is
    if texts is None:
        return [_number(part, name) for part in text.split(",")]
    numbers_are_names = any(known.isdecimal() for known in texts)
    return [
        int(part) if part.isdecimal() and not numbers_are_names else part
        for part in ([text] if text in texts else text.split(","))
    ]


def _number(text: str, name: str) -> int | float:
    with contextlib.suppress(ValueError):
        return int(text)
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"where: {name} is {text!r:.80}, but this column has no texts.") from None


def _texts_of(index: Index, name: str) -> Sequence[str] | None:
    """Return the texts that a column counts into, or None."""
    if name == "label" and index.classes is not None:
        return index.classes
    return index.categories.get(name)
