"""What is written beside the images of samples: keys, labels and columns, as text and numbers."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from memload.editing.cells import Kind, cell_names
from memload.sources.tables import KEY, PATH
from memload.storage.index import Index


class Facts:
    """The keys, labels and columns of all samples of an index.

    Labels with classes, and columns with categories, are texts. NaN is None.
    """

    def __init__(self, index: Index) -> None:
        self._index = index
        self._texts: dict[str, Sequence[str]] = dict(index.categories)
        if index.classes is not None:
            self._texts["label"] = index.classes
        #: the names of the columns, the label first
        self.names = sorted(index.columns, key=lambda name: name != "label")

    def entries(self, position: int) -> dict[str, Any]:
        """Return key and columns of a sample by name, as JSON has them."""
        values = {name: self._value(name, position) for name in self.names}
        return {KEY: self._index.keys[position], **values}

    def _value(self, name: str, position: int) -> Any:
        number = self._index.columns[name][position]
        texts = self._texts.get(name)
        return _plain(number.tolist()) if texts is None else texts[int(number)]


class Table:
    """The same as the lines of a table, one cell for each number.

    ``header`` has the names of its columns: ``key``, ``label``, then the others. Arrays have a cell
    for each number, see `memload.editing.cells`.

    Labels are names of classes, or the numbers of the classes where these are not `are_readable`.
    """

    def __init__(self, index: Index) -> None:
        self._facts = Facts(index)
        self._numbers: np.ndarray | None = None
        if index.classes is not None and not are_readable(classes_in_use(index)):
            self._numbers = index.columns["label"]
        self.header = [KEY]
        for name in self._facts.names:
            self.header += _distinct_from(self.header, _cell_names(index, name))

    def cells(self, position: int) -> list[Any]:
        """Return the cells of a sample. A missing number is empty, and a boolean 0 or 1."""
        entries = self._facts.entries(position)
        if self._numbers is not None:
            entries["label"] = int(self._numbers[position])
        cells: list[Any] = []
        for value in entries.values():
            cells += _flat(value) if isinstance(value, list) else [value]
        return [_cell(cell) for cell in cells]


def are_readable(classes: Sequence[str]) -> bool:
    """Return whether a reader of tables takes these names of classes as they are.

    It would take them all for numbers, an empty one for missing, and cut off spaces.
    """
    are_numbers = bool(classes) and all(map(_is_number, classes))
    return not are_numbers and all(name and name == name.strip() for name in classes)


def classes_in_use(index: Index) -> list[str]:
    """Return the names of the classes that samples have, in their order."""
    if index.classes is None:
        return []
    return [index.classes[label] for label in np.unique(index.columns["label"]).tolist()]


def _cell_names(index: Index, name: str) -> list[str]:
    """Return the names of the cells of a column."""
    shape = index.columns[name].shape[1:]
    kind: Kind = "points" if name in index.points else "boxes" if name in index.boxes else "array"
    return cell_names(name, kind, shape) if shape else [name]


def _distinct_from(taken: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return names, with underscores behind all of them while any is taken."""
    while set(names) & {*taken, PATH}:
        names = [f"{name}_" for name in names]
    return list(names)


def _plain(value: Any) -> Any:
    """Return a number or nested lists of numbers with None for NaN."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    return int(value) if isinstance(value, bool) else value


def _flat(values: Any) -> Iterator[Any]:
    if isinstance(values, list):
        return itertools.chain.from_iterable(map(_flat, values))
    return iter([values])


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
