"""What values become: numbers, arrays of one shape, labels or categories.

Nothing else decides it, wherever the values come from: cells of CSV, JSON, Parquet or a folder.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from memload.errors import SourceError
from memload.sources.boxes import Table, per_box, table_numbers
from memload.storage.format import RESERVED
from memload.wording import counted, listed

#: A column of text becomes a category if it has at most this many values, and at most one for each
#: ten samples. Otherwise it is something like a caption.
MAX_CATEGORIES, SAMPLES_PER_CATEGORY = 10_000, 10
#: Integers up to this one are exact as float64, which a column with missing numbers becomes.
EXACT = 2**53

#: What columns are commonly called, in the order of preference.
IMAGE_NAMES = ("image", "img", "jpg", "png", "webp")
LABEL_NAMES = ("label", "class", "labels", "fine_label", "cls", "target")
BOX_NAMES = ("boxes", "bboxes", "bbox")
POINT_NAMES = ("points", "landmarks", "keypoints")
_CORNERS = (("x1", "y1", "x2", "y2"), ("xmin", "ymin", "xmax", "ymax"))
#: An x that is a word, as in ``x0``, ``left_eye_x`` and ``leftX``.
_X = re.compile(r"(?<![A-Za-z])[xX](?![A-Za-z])|(?<=[a-z])X(?![a-z])")

#: The names of the parts of data sets, and what may be added to them, as in ``training_set``.
_SPLITS = {"train", "training", "val", "valid", "validation", "test", "testing"}
_ADDITIONS = {"set", "data", "dataset", "split", "images", "image", "imgs", "img", "jpg"}


class Column(NamedTuple):
    """Type and shape of a column's entries. Points and boxes move with the image.

    Points are pairs x, y of floats, ``(K, 2)``, where (0, 0) is the center of the top left pixel.
    Boxes are ``(K, 4)``: x1, y1, x2, y2 of the edges, float32, so that the whole picture is
    (0, 0, W, H), as in torchvision and COCO. A row of NaN is no box.
    """

    dtype: str
    shape: tuple[int, ...] = ()
    points: bool = False
    boxes: bool = False


@dataclass
class Columns:
    """The columns of all samples.

    Args:
        values: An array for each column, with one entry per sample.
        schema: Their types and shapes.
        classes: The names that ``label`` counts into.
        categories: The texts that other columns count into.
        notes: What the user should know.
        skipped: The columns that are left out, and why.
        are_parts: Whether the classes are parts of a data set, as all have the same subfolders.
    """

    values: dict[str, np.ndarray] = field(default_factory=dict)
    schema: dict[str, Column] = field(default_factory=dict)
    classes: list[str] | None = None
    categories: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    are_parts: bool = False

    def add(self, name: str, values: np.ndarray, **kind: bool) -> None:
        """Add numbers. Single ones become int64 or float64. ``kind`` is points or boxes."""
        if name in self.values or name in RESERVED or "/" in name:
            self.skipped[name] = "its name is taken"
            return
        if values.dtype.kind == "u" and (values > np.iinfo(np.int64).max).any():
            self.skipped[name] = "its numbers need more than 63 bits"
            return
        if values.ndim == 1:
            values = values.astype("<f8" if values.dtype.kind == "f" else "<i8", copy=False)
        self.values[name] = values
        self.schema[name] = Column(values.dtype.str, values.shape[1:], **kind)

    def add_texts(self, name: str, texts: Sequence[str], *, is_kept: bool = False) -> None:
        """Add texts as numbers: labels as those of classes, others as those of categories.

        Too many texts are left out, unless ``is_kept``.
        """
        names, numbers = numbered(texts)
        if name == "label":
            self.classes = names
        elif is_kept or len(names) <= min(MAX_CATEGORIES, len(texts) // SAMPLES_PER_CATEGORY):
            self.categories[name] = names
        else:
            self.skipped[name] = f"text such as {next(filter(None, texts), '')!r:.20}"
            return
        self.add(name, numbers)

    def add_values(
        self, name: str, values: Sequence[Any] | np.ndarray, *, is_kept: bool = False
    ) -> None:
        """Add numbers, texts or lists of one shape. A number that is missing becomes NaN."""
        if isinstance(values, np.ndarray):
            self.add(name, values)
            return
        kinds = {*map(type, values)} - {type(None)}
        if kinds == {str}:
            self.add_texts(name, [value or "" for value in values], is_kept=is_kept)
        elif kinds and kinds <= {bool, int, float}:
            self._add_numbers(name, values, is_whole=float not in kinds and None not in values)
        elif kinds == {list} and (array := _array_of(values)) is not None:
            self.add(name, array)
        else:
            hint = f"; boxes are named: --boxes {name}" if name in BOX_NAMES else ""
            self.skipped[name] = f"neither numbers of one shape nor text{hint}"

    def _add_numbers(self, name: str, values: Sequence[Any], *, is_whole: bool) -> None:
        if not is_whole and any(type(value) is int and abs(value) > EXACT for value in values):
            self.skipped[name] = "integers above 2⁵³ beside missing numbers or fractions"
            return
        try:
            self.add(name, np.array(values, np.int64 if is_whole else np.float64))
        except OverflowError:
            self.skipped[name] = "its numbers need more than 64 bits"

    def finish(self) -> "Columns":
        """Note what was left out. Returns this object."""
        if self.skipped:
            shown = (f"{name} ({why})" for name, why in self.skipped.items())
            self.notes.append(f"skipped {counted(len(self.skipped), 'column')}: {listed(shown, 5)}")
        return self


def columns_of(
    table: Table,
    *,
    label: str | None = None,
    class_names: Mapping[str, Sequence[str]] | None = None,
    points: Mapping[str, str] | None = None,
    boxes: Mapping[str, str] | None = None,
    skipped: Mapping[str, str] | None = None,
    is_exported: bool = False,
) -> Columns:
    """Return the columns of a table.

    Args:
        table: Its values, by the names of columns.
        label: The column of the labels. By default, the first of `LABEL_NAMES` that there is.
        class_names: Texts that columns of numbers count into, by name.
        points: Columns of lists of x, y, or patterns such as ``x*,y*`` for columns of numbers.
        boxes: The same for x1, y1, x2, y2.
        skipped: Columns that could not be read, and why.
        is_exported: Whether ``memload export`` has written the table. Then all texts are kept, and
            only ``label`` is the label.

    Raises SourceError for a column that there is not.

    >>> columns_of({"class": ["cat", "dog"], "age": [3, None]}).values  # doctest: +SKIP
    {'label': array([0, 1]), 'age': array([ 3., nan])}
    """
    columns, class_names = Columns(skipped=dict(skipped or {})), class_names or {}
    if label is not None and label not in table:
        raise SourceError(f"There is no column {label!r:.80}, only {listed(table)}. Name one.")
    if label is None:
        own = [name for name in table if name == "label" or not is_exported]
        label = label_among(own, has_boxes=bool(boxes))
        if label is None:
            columns.notes.append("no labels: name their column with --label")
        elif label != "label":
            columns.notes.append(f"the labels are taken from column {label!r}")
    used: set[str] = set()
    for name, text in (points or {}).items():
        values, names = table_numbers(table, "points", name, text)
        columns.add(name, values, points=True)
        used |= names
    for name, text in (boxes or {}).items():
        values, names = table_numbers(table, "boxes", name, text)
        columns.add(name, values, boxes=True)
        used |= names
        for other, filled in per_box(table, text, used):
            columns.add(other, filled)
            columns.notes.append(f"{other} is filled up with -1 or NaN beside {name}")
            used.add(other)
    for name, given in table.items():
        stored = "label" if name == label else name
        if name in used or (stored == "label" and name != label):
            continue
        columns.add_values(stored, given, is_kept=is_exported)
        if name == label and stored in columns.skipped:
            raise SourceError(f"The labels in {label!r:.80} are {columns.skipped[stored]}.")
        texts = list(class_names.get(name, ()))
        if texts and columns.schema.get(stored) == Column("<i8") and name == label:
            columns.classes = texts
        elif texts and {*np.unique(columns.values.get(name, np.zeros(0)))} <= {*range(len(texts))}:
            columns.categories[name] = texts
    columns.notes += notes_on_unnamed(columns)
    return columns.finish()


def label_among(names: Iterable[str], *, has_boxes: bool = False) -> str | None:
    """Return the first of `LABEL_NAMES` among these. With boxes, ``labels`` are of boxes."""
    usual = [name for name in LABEL_NAMES if not (name == "labels" and has_boxes)]
    return next((name for name in usual if name in names), None)


def numbered(texts: Sequence[str]) -> tuple[list[str], np.ndarray]:
    """Return the sorted distinct texts, and for each text its position among them, int64.

    >>> numbered(["dog", "cat", "dog"])
    (['cat', 'dog'], array([1, 0, 1]))
    """
    names = sorted(set(texts))
    number = {name: position for position, name in enumerate(names)}
    return names, np.fromiter(map(number.__getitem__, texts), np.int64, len(texts))


def _array_of(values: Sequence[Any]) -> np.ndarray | None:
    """Return lists of numbers of one shape as an array, or None. In them, None becomes NaN.

    It is int64, or float32 if that holds all numbers exactly, else float64.
    """
    try:
        array = np.array(values)
        if array.dtype.kind not in "biufO" or array.ndim < 2 or not array.size:
            return None
        is_whole = array.dtype.kind in "bi"
        if array.dtype.kind == "O" and any(
            type(number) is int and abs(number) > EXACT for number in array.flat
        ):
            return None
        array = array.astype(np.int64 if is_whole else np.float64)
    except (TypeError, ValueError, OverflowError):  # of different lengths, or of texts
        return None
    if is_whole:
        return array
    narrow = array.astype(np.float32)
    return narrow if np.array_equal(narrow, array, equal_nan=True) else array


def are_splits(names: Sequence[str]) -> bool:
    """Return whether all of these are names of parts of a data set.

    >>> are_splits(["training_set", "test_set"]), are_splits(["train", "bus"])
    (True, False)
    """
    words = [{*re.findall("[a-z]+", name.lower())} - _ADDITIONS for name in names]
    return bool(words) and all(len(each) == 1 and each <= _SPLITS for each in words)


def notes_on_unnamed(columns: Columns) -> Iterator[str]:
    """Yield notes on numbers that are stored as they are, but may be points or boxes.

    They would stay in pixels of the file, while their images are resized and cropped.
    """
    single = {name.lower(): name for name, column in columns.schema.items() if not column.shape}
    for corners in _CORNERS:
        if single.keys() >= {*corners}:
            text = ",".join(single.pop(corner) for corner in corners)
            yield f"{text} are stored as they are; --boxes 'boxes={text}' lets them move as boxes"
    pairs, pattern = [], ""
    for name in single.values():
        for found in [*_X.finditer(name)][-1:]:
            head, x, tail = name[: found.start()], found[0], name[found.end() :]
            y = chr(ord(x) + 1)
            if f"{head}{y}{tail}" in single.values():
                pairs.append(f"{name},{head}{y}{tail}")
                end = f"*{head[-1]}" if head[-1:] in tuple("_-. ") else "*" * bool(head)
                pattern = pattern or ",".join(f"{end}{each}{'*' * bool(tail)}" for each in (x, y))
    if pairs:
        yield (
            f"{listed(pairs, 2)} are stored as they are; --points 'points={pattern}' lets them "
            "move with their images, as points"
        )
    for name, column in columns.schema.items():
        is_plain = column.shape and not (column.points or column.boxes)
        if is_plain and name in POINT_NAMES and column.shape[-1] in (2, 3):
            yield f"{name} is stored as it is; --points {name} lets points (k, 2) move"
        elif (
            is_plain
            and column.shape[-1] == 4
            and (name in BOX_NAMES or column.shape[1:] == (4,) != column.shape[:1])
        ):
            yield f"{name} is stored as it is; --boxes {name} lets boxes move with their images"
