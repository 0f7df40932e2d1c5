"""The columns of a source that knows all of its samples beforehand: numbers, labels, categories."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from memload.building.sources.record import Column
from memload.errors import SourceError
from memload.wording import counted, listed

#: A column of text becomes a category if it has at most this many values, and at most one for each
#: ten samples. Otherwise it is something like a caption.
MAX_CATEGORIES = 10_000
SAMPLES_PER_CATEGORY = 10

#: Integers up to this one are exact as float64, which a column with missing numbers becomes.
EXACT = 2**53

#: How many columns a note names.
_NAMES_SHOWN = 5


class ColumnCollector:
    """Collects the columns of all samples.

    ``values`` has an array for each column, with one entry for each sample. ``schema`` has their
    types. ``classes`` are the names that ``label`` counts into, and ``categories`` those of other
    columns. ``label_texts`` maps labels that are numbers to the texts in the file: a list of
    classes may have these as names. ``keys`` are the names of the samples, if they are not those of
    their files. ``files`` are the paths of masks and other arrays, one for each sample, or "".
    ``unusable`` has the reasons why samples are rejected, by their positions. ``notes`` says what
    was left out.
    """

    def __init__(self) -> None:
        self.values: dict[str, np.ndarray] = {}
        self.schema: dict[str, Column] = {}
        self.classes: list[str] | None = None
        self.label_texts: dict[int, str] = {}
        self.categories: dict[str, list[str]] = {}
        self.keys: Sequence[str] | None = None
        self.unusable: dict[int, str] = {}
        self.files: dict[str, Sequence[str]] = {}
        self.notes: list[str] = []
        #: columns that were left out, and why
        self.skipped: dict[str, str] = {}

    def add(
        self, name: str, values: np.ndarray, *, points: bool = False, boxes: bool = False
    ) -> None:
        """Add a column of numbers. Single integers and booleans become int64."""
        if name in self.values:
            raise SourceError(f"Two columns would be named {name!r:.80}. Rename one.")
        if values.dtype.kind == "u" and (values > np.iinfo(np.int64).max).any():
            raise SourceError(f"Column {name!r:.80} has numbers above 2⁶³. Save it as int64.")
        if values.ndim == 1:
            values = values.astype("<f8" if values.dtype.kind == "f" else "<i8", copy=False)
        self.values[name] = values
        self.schema[name] = Column(values.dtype.str, values.shape[1:], points, boxes)

    def add_labels(self, labels: Sequence[Any] | np.ndarray, names: Sequence[str] = ()) -> None:
        """Add the labels: integers and floats as they are, texts as numbers of classes.

        The classes are ``names`` if all texts are among them, else the sorted texts.
        """
        if isinstance(labels, np.ndarray) and labels.dtype.kind in "biuf":
            self.add("label", labels)
            return
        texts = [str(label).strip() for label in labels]
        self.classes, numbers = number_texts(texts)
        if set(self.classes) <= set(names):
            self.classes = list(names)
            position = {name: number for number, name in enumerate(names)}
            numbers = np.array([position[text] for text in texts], np.int64)
        self.add("label", numbers)

    def add_text(
        self, name: str, texts: Sequence[str], example: str = "", *, always: bool = False
    ) -> None:
        """Add a column of text as a category, or leave it out if it has too many values.

        With ``always``, it is a category however many values it has.
        """
        if not always and not is_category(len(set(texts)), len(texts)):
            self.skip(name, example or f"{texts[0]!r:.20}")
            return
        self.categories[name], numbers = number_texts(texts)
        self.add(name, numbers)

    def add_values(self, name: str, values: Sequence[Any]) -> None:
        """Add a column of Python values, as JSON has them. None among numbers becomes NaN.

        Lists of numbers become arrays if all have the same shape.
        """
        kinds = {type(value) for value in values} - {type(None)}
        if kinds and kinds <= {bool, int, float}:
            is_whole = float not in kinds and None not in values
            if not is_whole and any(type(value) is int and abs(value) > EXACT for value in values):
                self.skip(name, "integers above 2⁵³ beside missing numbers or fractions")
                return
            try:
                self.add(name, np.array(values, np.int64 if is_whole else np.float64))
            except OverflowError:
                self.skip(name, "its numbers need more than 64 bits")
        elif kinds == {str}:
            self.add_text(name, [value or "" for value in values])
        elif (array := _array_of_lists(values)) is not None:
            self.add(name, array)
        else:
            self.skip(name, "neither numbers nor text")

    def skip(self, name: str, why: str) -> None:
        """Leave a column out. ``why`` is short, such as its first text."""
        self.skipped[name] = why

    def finish(self) -> "ColumnCollector":
        """Report what was left out. Returns this object."""
        if self.skipped:
            shown = (f"{name} ({why})" for name, why in self.skipped.items())
            kind = counted(len(self.skipped), "column")
            self.notes.append(f"skipped {kind}: {listed(shown, _NAMES_SHOWN)}")
        return self


def _array_of_lists(values: Sequence[Any]) -> np.ndarray | None:
    """Return lists of numbers of one shape as an array, or None. In them, None becomes NaN.

    It is int64, or float32 if that holds all numbers exactly, else float64.
    """
    if not all(isinstance(value, list) for value in values):
        return None
    try:
        array = np.array(values)
        if array.dtype.kind not in "biufO":
            return None
        array = array.astype(np.int64 if array.dtype.kind in "bi" else np.float64)
    except (TypeError, ValueError, OverflowError):  # of different lengths, or of texts
        return None
    narrow = array.astype(np.float32)
    is_exact = array.dtype.kind == "f" and np.array_equal(narrow, array, equal_nan=True)
    return (narrow if is_exact else array) if array.size else None


def is_category(values: int, samples: int) -> bool:
    """Return whether a column of text with so many different values is a category."""
    return values <= min(MAX_CATEGORIES, samples // SAMPLES_PER_CATEGORY)


def number_texts(texts: Sequence[str]) -> tuple[list[str], np.ndarray]:
    """Return the sorted distinct texts, and for each text its position among them, int64.

    >>> number_texts(["dog", "cat", "dog"])
    (['cat', 'dog'], array([1, 0, 1]))
    """
    names = sorted(set(texts))
    number = {name: position for position, name in enumerate(names)}
    return names, np.array([number[text] for text in texts], np.int64)
