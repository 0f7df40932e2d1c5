"""What values become: numbers, arrays of one shape, labels or categories.

Nothing else decides it, wherever the values come from: cells of CSV, JSON, Parquet or a folder.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from memload.errors import SourceError
from memload.sources.boxes import Table, per_box, table_numbers
from memload.sources.reading import Reading
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
_SIZES = (("x", "y", "w", "h"), ("x", "y", "width", "height"))
#: An x that is a word, as in ``x0``, ``left_eye_x`` and ``leftX``.
_X = re.compile(r"(?<![A-Za-z])[xX](?![A-Za-z])|(?<=[a-z])X(?![a-z])")
#: An array that is larger than this along two axes has the size of a picture.
_MASK_SIDE = 16
_NEITHER = (
    "neither numbers of one shape nor text, or integers above 2⁵³ beside missing ones or fractions"
)

#: The name of a part of a data set, such as ``val2017``, ``training_set`` or ``test images``.
_ADDITION = r"(set|data|split|images?|imgs?|jpg|[\W\d_])*"
_SPLIT = re.compile(f"{_ADDITION}(train|val|test)(ing|id|idation)?{_ADDITION}", re.IGNORECASE)


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


@dataclass(kw_only=True)
class Columns:
    """The columns of all samples.

    Args:
        values: An array for each column, with one entry per sample.
        schema: Their types and shapes.
        classes: The names that ``label`` counts into.
        categories: The texts that other columns count into.
        notes: What the user should know.
        skipped: The columns that are left out, and why.
        per_box: The boxes of each column that has an item for each box, and is filled up like them.
    """

    values: dict[str, np.ndarray] = field(default_factory=dict)
    schema: dict[str, Column] = field(default_factory=dict)
    classes: list[str] | None = None
    categories: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    per_box: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, values: np.ndarray, **kind: bool) -> None:
        """Add numbers. Single ones become int64 or float64. ``kind`` is points or boxes."""
        if name in self.values or name in RESERVED or "/" in name:
            self.skipped[name] = "its name is taken"
            return
        if values.dtype.kind == "u" and (values > np.iinfo(np.int64).max).any():
            self.skipped[name] = _NEITHER
            return
        if values.ndim == 1 or values.dtype.kind == "b":
            values = values.astype("<f8" if values.dtype.kind == "f" else "<i8", copy=False)
        self.values[name] = values
        self.schema[name] = Column(values.dtype.str, values.shape[1:], **kind)

    def add_texts(
        self, name: str, texts: Sequence[str], *, known: Sequence[str] | None = None
    ) -> None:
        """Add texts as numbers: labels as those of classes, others as those of categories.

        Too many texts are left out, unless ``known`` is given: texts that keep their numbers if one
        of them occurs. The others follow, sorted.
        """
        found = {*texts}
        first = list(known or ()) if not found.isdisjoint(known or ()) else []
        names = [*first, *sorted(found - {*first})]
        if name == "label":
            self.classes = names
        elif known is not None or len(names) <= min(
            MAX_CATEGORIES, len(texts) // SAMPLES_PER_CATEGORY
        ):
            self.categories[name] = names
        else:
            self.skipped[name] = f"text such as {next(filter(None, texts), '')!r:.20}"
            return
        number = {text: position for position, text in enumerate(names)}
        self.add(name, np.fromiter(map(number.__getitem__, texts), np.int64, len(texts)))

    def add_values(
        self,
        name: str,
        values: Sequence[Any] | np.ndarray,
        *,
        known: Sequence[str] | None = None,
    ) -> None:
        """Add numbers, texts, or lists or arrays of one shape. A missing number becomes NaN."""
        if isinstance(values, np.ndarray):
            self.add(name, values)
        elif {*map(type, values)} - {type(None)} == {str}:
            self.add_texts(name, [value or "" for value in values], known=known)
        else:
            try:
                self.add(name, numbers_of(values))
            except (TypeError, ValueError, OverflowError):
                hint = f"; boxes are named: --boxes {name}" * (name in BOX_NAMES)
                self.skipped[name] = f"{_NEITHER}{hint}"


def columns_of(
    table: Table,
    reading: Reading,
    *,
    class_names: Mapping[str, Sequence[str]] | None = None,
    skipped: Mapping[str, str] | None = None,
    is_exported: bool = False,
) -> Columns:
    """Return the columns of a table.

    Args:
        table: Its values, by the names of columns.
        reading: Which columns are labels, points and boxes. By default, the labels are in the first
            of `LABEL_NAMES` that there is.
        class_names: Texts that columns of numbers count into, by name.
        skipped: Columns that could not be read, and why.
        is_exported: Whether ``memload export`` has written the table. Then all texts are kept, and
            only ``label`` is the label.

    Raises SourceError for a column that there is not.

    >>> columns_of({"class": ["cat", "dog"], "age": [3, None]}, Reading()).values  # doctest: +SKIP
    {'label': array([0, 1]), 'age': array([ 3., nan])}
    """
    columns, label = Columns(skipped=dict(skipped or {})), reading.label
    if label is not None and label not in table:
        raise SourceError(f"There is no column {label!r:.80}, only {listed(table)}. Name one.")
    if label is None:
        own = [name for name in table if name == "label" or not is_exported]
        label = label_among(own, has_boxes=bool(reading.boxes))
        if label is None:
            columns.notes.append("no labels: name their column with --label (label=… in Python)")
        elif label != "label":
            columns.notes.append(f"the labels are taken from column {label!r}")
    used: set[str] = set()
    for kind, patterns in (("points", reading.points), ("boxes", reading.boxes)):
        for name, text in patterns.items():
            values, names = table_numbers(table, kind, name, text)
            columns.add(name, values, **{kind: True})
            used |= names
            for other, items in per_box(table, text, used) if kind == "boxes" else ():
                columns.add(other, items)
                columns.per_box[other] = name
            used |= {*columns.per_box}
    for name, given in table.items():
        stored = "label" if name == label else name
        if name in used or (stored == "label" and name != label):
            continue
        columns.add_values(stored, given, known=() if is_exported else None)
        if name == label and stored in columns.skipped:
            raise SourceError(f"The labels in {label!r:.80} are {columns.skipped[stored]}.")
        texts = list((class_names or {}).get(name, ()))
        if not texts or columns.schema.get(stored) != Column("<i8"):
            continue
        if name == label:
            columns.classes = texts
        elif {*np.unique(columns.values[name])} <= {*range(len(texts))}:
            columns.categories[name] = texts
    columns.notes += notes_on_unnamed(columns)
    if columns.per_box:
        columns.notes.append(f"filled up with -1 or NaN beside boxes: {listed(columns.per_box, 5)}")
    if columns.skipped:
        shown = (f"{name} ({why})" for name, why in columns.skipped.items())
        columns.notes.append(
            f"skipped {counted(len(columns.skipped), 'column')}: {listed(shown, 5)}"
        )
    return columns


def label_among(names: Collection[str], *, has_boxes: bool = False) -> str | None:
    """Return the first of `LABEL_NAMES` among these. With boxes, ``labels`` are of boxes."""
    usual = [name for name in LABEL_NAMES if not (name == "labels" and has_boxes)]
    return next((name for name in usual if name in names), None)


def numbers_of(values: Sequence[Any]) -> np.ndarray:
    """Return numbers, or lists or arrays of one shape, as an array. None becomes NaN.

    Whole numbers are int64, others float64; in lists float32 if that holds all of them exactly.
    Arrays keep their type, and None among them is passed over. Raises ValueError.

    >>> numbers_of([1, None]), numbers_of([[1, 2], [3, 4]])
    (array([ 1., nan]), array([[1, 2],
           [3, 4]]))
    """
    if arrays := [value for value in values if isinstance(value, np.ndarray)]:
        return np.stack(arrays)
    array = np.array(values)
    if array.dtype.kind in "bi":
        return array.astype(np.int64)
    if array.dtype.kind not in "fO" or not array.size or not any(v is not None for v in values):
        raise ValueError(f"{array.dtype} is no type of numbers")
    numbers = np.array(values, object)
    if any(type(number) is int and abs(number) > EXACT for number in numbers.flat):
        raise ValueError("integers above 2**53 would lose digits")
    array = numbers.astype(np.float64)
    with np.errstate(over="ignore"):
        narrow = array.astype(np.float32)
    is_exact = array.ndim > 1 and np.array_equal(narrow, array, equal_nan=True)
    return narrow if is_exact else array


def are_splits(names: Sequence[str]) -> bool:
    """Return whether all of these are names of parts of a data set.

    >>> are_splits(["training_set", "test_set"]), are_splits(["train", "bus"])
    (True, False)
    """
    return all(map(_SPLIT.fullmatch, names))


def looks_like(name: str, shape: tuple[int, ...]) -> str:
    """Return "boxes", "points" or "mask" for an array that should move with its image, or "".

    >>> looks_like("places", (3, 4)), looks_like("pose", (4, 4)), looks_like("seg", (480, 640))
    ('boxes', '', 'mask')
    """
    if name in BOX_NAMES or (len(shape) == 2 and shape[1] == 4 != shape[0]):  # (4, 4) is a pose
        return "boxes"
    if name in POINT_NAMES and shape[-1:] in ((2,), (3,)):
        return "points"
    is_large = len(shape) > 1 and max(min(shape[:2]), min(shape[-2:])) > _MASK_SIDE
    return "mask" if is_large else ""


def notes_on_unnamed(columns: Columns) -> Iterator[str]:
    """Yield notes on numbers that are stored as they are, but may be points or boxes.

    They would stay in pixels of the file, while their images are resized and cropped.
    """
    single = {name.lower(): name for name, column in columns.schema.items() if not column.shape}
    for corners in _CORNERS:
        if single.keys() >= {*corners}:
            text = ",".join(single.pop(corner) for corner in corners)
            yield f"{text} are stored as they are; --boxes 'boxes={text}' lets them move as boxes"
    for sizes in _SIZES:
        if single.keys() >= {*sizes}:
            text = ",".join(single.pop(size) for size in sizes)
            yield f"{text} are stored as they are; boxes have corners: write x2 = x + width, y2 too"
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
        if column.points or column.boxes or name in columns.per_box:
            continue
        kind = looks_like(name, column.shape)
        if kind and column.shape:
            wanted = " (k, 2), without a third number," if column.shape[-1] == 3 else ""
            yield f"{name} is stored as it is; --{kind} {name} lets {kind}{wanted} move with images"
        elif column.shape[-1:] == (2,):
            yield f"{name} is stored as it is; --points {name} lets points move with their images"
