"""Any map-style data set as a source: an object with ``len()`` and ``[index]``.

Its samples decide what it has: the first that can be read, and some others (`DatasetSource`).
"""

import contextlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from memload.errors import DecodeError, SourceError, describe_error
from memload.sources import boxes
from memload.sources.columns import (
    BOX_NAMES,
    IMAGE_NAMES,
    Column,
    Columns,
    label_among,
    notes_on_unnamed,
)
from memload.sources.contents import Contents
from memload.sources.samples import Kind, Reading, Record, Samples, named, translation
from memload.storage.keys import Keys
from memload.wording import listed

#: So many samples decide on the columns: half of them the first ones, the others spread evenly.
_LOOKED_AT = 64
#: An array that is larger than this along two axes has the size of a picture.
_MASK_SIDE = 16
_TO_KEEP_IT = "To store or leave out what there is, name it: DatasetSource(dataset, columns=[…])."


class Fact(NamedTuple):
    """The type and shape of a value. The type may be "none", "text", or what cannot be stored."""

    dtype: str
    shape: tuple[int, ...] = ()


_NONE = Fact("none")
_NUMBER = "<|"  # what the types of numbers begin with


def first_usable_here(look: Callable[[int], Any], keys: Sequence[str]) -> Any:
    """Return what ``look`` returns for the first sample for which it does not fail.

    Raises SourceError if ``look`` does, and if it fails for the first 100 samples.
    """
    reasons = []
    for row in range(min(len(keys), 100)):
        try:
            return look(row)
        except SourceError:
            raise
        except Exception as error:  # noqa: BLE001  # it is code of the user's
            reasons.append(describe_error(error))
    raise SourceError(f"None of the first {len(reasons)} samples can be used: {reasons[0]:.500}")


class DatasetSource(Samples):
    """A map-style data set: an object with ``len()`` and ``[index]``.

    A sample is ``(image, target)``, an image alone, or a dict. An image is a PIL image, an array, a
    tensor ``(C, H, W)``, encoded bytes, or a path. A target is a label, a tuple, or a dict.

    Up to 64 samples decide which columns there are. Numbers are int64, or float64 with NaN for None
    if a fraction or None is among them. Arrays have one shape. Texts are left out, but labels may
    be names of classes. A sample that differs is rejected.

    Args:
        dataset: The data set. If it has ``__getitems__``, several samples are asked for at once.
        image: The entry of the image. By default the first of ``image``, ``img``, ``jpg``, ``png``
            and ``webp``.
        label: The entry of the label. By default the first of ``label``, ``class``, ``labels``,
            ``fine_label``, ``cls`` and ``target`` that there is.
        masks: The entries of masks, or a mapping from the names of masks to them. Of samples
            ``(image, mask)``, ``masks=["mask"]`` names the second part.
        arrays: The same for other arrays.
        points: The entries of points x, y, ``(k, 2)``, as many in all samples.
        boxes: The entries of boxes x1, y1, x2, y2, with the most that a sample has. They are filled
            up with NaN, and so are entries with an item for each box, integers with -1.
        columns: The entries that are stored. By default all. Boxes and masks that nobody names are
            an error then, since they would not move with their images.
        key: The names of the samples. By default they are numbered.
        classes: The names of the classes. By default those of the data set.
        first_usable: Looks at samples, perhaps in another process: see `first_usable_here`.

    Raises SourceError.

    >>> source = memload.DatasetSource(cifar, image="img", label="fine_label")  # doctest: +SKIP
    >>> memload.build(source, "cifar.bin", size=32)  # doctest: +SKIP
    """

    def __init__(
        self,
        dataset: Any,
        *,
        image: str | None = None,
        label: str | None = None,
        masks: Sequence[str] | Mapping[str, str] = (),
        arrays: Sequence[str] | Mapping[str, str] = (),
        points: Sequence[str] = (),
        boxes: Mapping[str, int] | None = None,
        columns: Sequence[str] | None = None,
        key: Sequence[str] | None = None,
        classes: Sequence[str] | None = None,
        first_usable: Callable[[Callable[[int], Any], Sequence[str]], Any] = first_usable_here,
    ) -> None:
        if not len(dataset):
            raise SourceError("The data set has no samples.")
        if key is not None and len(key) != len(dataset):
            raise ValueError(f"key: {len(key):,} names are given for {len(dataset):,} samples.")
        names = [*map(str, range(len(dataset)) if key is None else key)]
        super().__init__(Keys.of(names), _DatasetRows(dataset), Columns(), are_numbered=key is None)
        lists = {"masks": masks, "arrays": arrays, "points": points, "boxes": boxes or {}}
        given: dict[str, Any] = {name: named(name, each) for name, each in lists.items()}
        self._reading = reading = Reading(image=image, label=label, **given)
        if not all(isinstance(most, int) and most > 0 for most in reading.boxes.values()):
            raise ValueError(
                f"boxes: {boxes!r:.80} is not a mapping from entries to the most boxes that a "
                "sample has, such as {'boxes': 100}."
            )
        kept = None if columns is None else [*named("columns", columns)]
        self.options = {"entries": f"{reading}, columns {kept}"}
        self._entries: dict[str, str] = {}  #: the entry of each column
        #: the boxes of each column that has an item for each of them
        self._per_box: dict[str, str] = {}
        self._find_columns(self._facts_of_samples(first_usable), kept, dataset, classes)
        #: what labels of samples mean, if there are classes: their numbers, also by their names
        self._numbers: dict[int | str, int] | None = None
        if self.columns.classes is not None:
            self._numbers = {name: number for number, name in enumerate(self.columns.classes)}
            self._numbers |= {number: number for number in range(len(self._numbers))}
        if kept is None:
            if not (self._entries.get("label") or reading.entries):
                self.columns.notes.append("no labels: name their entry with label=…")
            self.columns.notes += notes_on_unnamed(self.columns)
        self.columns.finish()

    # ------------------------------------------------------------------------------- records

    @property
    def arrays(self) -> Mapping[str, Kind]:
        """The kinds of the masks and other arrays, by name."""
        own = {name: kind for name, (kind, _) in self._reading.entries.items()}
        return {**own, **super().arrays}

    def _record(self, row: int, image: Any) -> Record:
        image, entries = self._split(image)
        columns = {}
        for name, entry in self._entries.items():
            try:
                columns[name] = self._value(name, entries, self.schema[name], entries.get(entry))
            except (TypeError, ValueError) as error:
                raise DecodeError(f"{name!r:.80}: {error}") from error
        arrays = {
            name: plain_mask(entries[entry]) if kind == "mask" else plain(entries[entry])
            for name, (kind, entry) in self._reading.entries.items()
            if entries.get(entry) is not None
        }
        return Record(self.keys[row], plain_image(image), columns, arrays | self._arrays(row))

    def _split(self, sample: Any) -> tuple[Any, dict[str, Any]]:
        """Return the image and the other entries of a sample. Raises SourceError without image."""
        reading = self._reading
        if isinstance(sample, Mapping) or reading.image:
            entries = dict(sample) if isinstance(sample, Mapping) else {}
            names = [reading.image] if reading.image else IMAGE_NAMES
            name = next((name for name in names if name in entries), None)
            if name is None:
                raise SourceError(
                    f"The samples of the data set, of type {type(sample).__name__}, have no entry "
                    f"{' or '.join(names)}, only {listed(entries) or 'images and targets'}. Name "
                    "the image's, if they are dicts: image='…'."
                )
            return entries.pop(name), entries
        if not isinstance(sample, (tuple, list)):
            return sample, {}
        image, *targets = sample
        target = targets[0] if len(targets) == 1 else tuple(targets)
        if isinstance(target, Mapping):
            return image, dict(target)
        if not isinstance(target, tuple):
            only = [*(entry for _, entry in reading.entries.values()), *reading.moving]
            return image, {only[0] if len(only) == 1 else "label": target}
        has_label = bool(target) and fact_of(target[0]) == Fact("<i8")
        names = ["label"] * has_label + [f"target_{n}" for n in range(len(target) - has_label)]
        return image, dict(zip(names, target, strict=True))

    def _value(self, name: str, entries: Mapping[str, Any], column: Column, value: Any) -> Any:
        """Return the value of a column. Raises ValueError for labels and boxes that differ.

        Whether others fit their columns is found out when they are written.
        """
        if name == "label":
            return self._label(value)
        if column.boxes or name in self._per_box:
            items = boxes_of(value) if column.boxes else array_of(value)
            count = len(items if column.boxes else boxes_of(entries.get(self._per_box[name])))
            if len(items) != count:
                raise ValueError(f"it has {len(items)} items for {count} boxes")
            if count > column.shape[0]:
                raise DecodeError(
                    f"it has {count:,} boxes in {name!r:.80}, and there is room for "
                    f"{column.shape[0]:,}. Raise it to the most that any sample has: "
                    f"boxes={{{name!r}: {count}}} or more"
                )
            return boxes.filled([items], column.shape, column.dtype)[0]
        return np.full(column.shape, np.nan) if value is None else array_of(value)

    def _label(self, value: Any) -> Any:
        value = value if isinstance(value, str) else array_of(value).tolist()
        if value in (None, []) or value != value:
            raise ValueError("it is missing")
        if self._numbers is None:
            return value
        if value not in self._numbers:
            raise ValueError(f"{value!r:.40} is none of the {len(self._numbers) // 2} known")
        return self._numbers[value]

    def with_classes(self, classes: Sequence[str]) -> "DatasetSource":
        """Return the same samples with labels that count into these classes."""
        changed = super().with_classes(classes)
        if self.classes is not None and self._numbers is not None:
            new = translation(self.classes, classes).tolist()
            changed._numbers = {label: new[number] for label, number in self._numbers.items()}
        return changed

    # -------------------------------------------------------------- what all samples have

    def _facts_of_samples(self, first_usable: Callable[..., Any]) -> list[dict[str, Fact]]:
        """Return the facts of the first usable sample or, if they matter, of up to 64 samples."""
        first: list[dict[str, Fact]] = [first_usable(self._look, self.keys)]
        if not first[0].keys() - {"label"}:
            return first
        try:
            return first_usable(self._look_at_several, self.keys[:1]) or first
        except SourceError:  # one of these samples ends the process, or hangs
            return first

    def _look(self, row: int) -> dict[str, Fact]:
        """Return what a sample has, by entry, apart from masks and other arrays."""
        _, entries = self._split(self.images[row])
        arrays = [entry for _, entry in self._reading.entries.values()]
        return {name: fact_of(value) for name, value in entries.items() if name not in arrays}

    def _look_at_several(self, row: int) -> list[dict[str, Fact]]:
        count, facts = len(self), []
        spread = np.linspace(0, count - 1, min(count, _LOOKED_AT // 2)).round().astype(int)
        for row in sorted({*range(min(count, _LOOKED_AT // 2)), *spread.tolist()}):
            with contextlib.suppress(Exception):  # it is rejected when its turn comes
                facts.append(self._look(row))
        return facts

    def _find_columns(
        self,
        facts: Sequence[Mapping[str, Fact]],
        kept: Sequence[str] | None,
        dataset: Any,
        classes: Sequence[str] | None,
    ) -> None:
        """Find the columns that these samples have in common. Raises SourceError."""
        reading = self._reading
        found = dict.fromkeys(name for each in facts for name in each)
        wanted = [*reading.moving, *(kept or ()), *filter(None, [reading.label])]
        if lost := [name for name in wanted if name not in found]:
            raise SourceError(
                f"The samples of the data set have no entry {lost[0]!r:.80}, only "
                f"{listed(sorted(found)) or 'images'}. Name one of them."
            )
        label = reading.label or label_among(found, has_boxes=bool(reading.boxes))
        self.columns.classes = _class_names(dataset, label) if classes is None else [*classes]
        for entry in found:
            name = "label" if entry == label else entry
            is_kept = kept is None or entry in wanted
            if is_kept and (entry == label or name != "label"):
                own = [each.get(entry, _NONE) for each in facts]
                if kept is None and entry not in reading.moving:
                    _refuse_unnamed(entry, own)
                column = self._column(name, entry, own, facts)
                if isinstance(column, Column):
                    self.columns.schema[name], self._entries[name] = column, entry
                else:
                    self.columns.skipped[name] = column
        if self.columns.schema.get("label") != Column("<i8"):
            self.columns.classes = None
        if self._per_box:
            self.columns.notes.append(
                f"filled up with -1 or NaN beside {listed(reading.boxes, 3)}: "
                f"{listed(self._per_box, 5)}"
            )

    def _column(
        self, name: str, entry: str, own: Sequence[Fact], facts: Sequence[Mapping[str, Fact]]
    ) -> Column | str:
        """Return the column of an entry, or why it is left out."""
        most, known = self._reading.boxes, [fact for fact in own if fact != _NONE]
        if entry in most:
            return Column("<f4", (most[entry], 4), boxes=True)
        if not known:
            return "missing"
        if any(fact.dtype == "text" for fact in known):
            if name == "label" and self.columns.classes is None:
                raise SourceError(
                    "The labels are texts, and the data set has no list of its classes. Give one: "
                    "classes=[…]."
                )
            return Column("<i8") if name == "label" else "text"
        if other := [fact for fact in known if fact.dtype[0] not in _NUMBER]:
            raise SourceError(
                f"Entry {entry!r:.80} is neither a number nor an array of numbers, but "
                f"{other[0].dtype}. {_TO_KEEP_IT}"
            )
        if entry in self._reading.points:
            return Column("<f4", known[0].shape, points=True)
        for box in most:
            counts = [math.prod(each.get(box, _NONE).shape) // 4 for each in facts]
            if any(counts) and name != "label" and [(*f.shape, -1)[0] for f in own] == counts:
                self._per_box[name] = box
                known = [fact for fact in known if fact.shape[0]]
                return Column(_common_type(known), (most[box], *known[0].shape[1:]))
        if len({fact.shape for fact in known}) > 1:
            return "of different shapes"
        # A number that is missing is NaN.
        is_missing = len(known) < len(own) and name != "label" and not known[0].shape
        dtype = _common_type([*known, *[Fact("<f8")] * is_missing])
        return Column(dtype, known[0].shape)


class _DatasetRows(Contents):
    """The samples of a data set."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.reads_together = hasattr(dataset, "__getitems__")

    def __getitem__(self, row: int) -> Any:
        sample = self._dataset[row]
        if sample is None:
            raise DecodeError("the data set returned None")
        return sample

    def several(self, rows: Sequence[int]) -> list[Any]:
        """Return several samples. Raises whatever the data set raises for one of them."""
        return list(self._dataset.__getitems__(list(rows)))


# ------------------------------------------------------------------------------------- values


def is_tensor(value: Any) -> bool:
    """Return whether a value is a torch tensor. Torch is not imported."""
    return any(kind.__module__.partition(".")[0] == "torch" for kind in type(value).__mro__)


def plain(value: Any) -> Any:
    """Return an array, a picture, bytes or a path in place of tensors, lists and dicts."""
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, (str, os.PathLike)):
        return Path(value)
    return array_of(value) if is_tensor(value) or isinstance(value, (list, tuple)) else value


def plain_image(value: Any) -> Any:
    """Return an image as `Record` has it. Tensors have their channels first."""
    if is_tensor(value) and value.ndim == 3:
        return plain(value).transpose(1, 2, 0)
    return plain(value)


def plain_mask(value: Any) -> Any:
    """Return a mask ``(H, W)``, or a picture."""
    value = plain(value)
    if isinstance(value, np.ndarray) and value.ndim == 3 and 1 in (value.shape[0], value.shape[2]):
        return value[0] if value.shape[0] == 1 else value[:, :, 0]
    return value


def array_of(value: Any) -> np.ndarray:
    """Return an entry as an array. Raises ValueError."""
    return boxes.array_of(value.detach().cpu().numpy() if is_tensor(value) else value)


def fact_of(value: Any) -> Fact:
    """Return what a value is."""
    if value is None:
        return _NONE
    try:
        array = array_of(value)
    except Exception as error:  # noqa: BLE001  # lists of different lengths, a type of the user's
        return Fact(f"{type(value).__name__} {value!r:.80} ({describe_error(error):.200})")
    if array.dtype.kind == "U":
        return Fact("text", array.shape)
    if array.dtype.kind not in "biuf":
        return Fact(f"{type(value).__name__} {value!r:.80}")
    if array.ndim == 0:
        return Fact("<f8" if array.dtype.kind == "f" else "<i8")
    return Fact(array.dtype.newbyteorder("<").str, array.shape)


def _common_type(facts: Sequence[Fact]) -> str:
    dtype = np.result_type(*(fact.dtype for fact in facts)).newbyteorder("<")
    return "<i8" if dtype.kind == "b" else str(dtype.str)


def boxes_of(value: Any) -> np.ndarray:
    """Return the boxes of a sample ``(k, 4)``. Raises ValueError."""
    form = str(getattr(getattr(value, "format", None), "value", "XYXY"))  # of tv_tensors
    found = array_of(value)
    found = found.reshape(-1, 4) if found.shape == (4,) or not found.size else found
    if form != "XYXY" or found.ndim != 2 or found.shape[1] != 4:
        raise ValueError(f"they are {form} of the shape {found.shape}, not XYXY of (k, 4)")
    boxes.check_order(found)
    return found


def _class_names(dataset: Any, label: str | None) -> list[str] | None:
    """Return the names of the classes, if they are where torchvision or Hugging Face have them."""
    names, features = getattr(dataset, "classes", None), getattr(dataset, "features", None)
    if names is None and isinstance(features, Mapping):
        names = getattr(features.get(label), "names", None)
    if isinstance(names, str) or not isinstance(names, (Sequence, np.ndarray)):
        return None
    return [str(name) for name in names]


def _refuse_unnamed(entry: str, facts: Sequence[Fact]) -> None:
    """Raise SourceError for what looks like boxes or a mask, and is not named."""
    shapes = {fact.shape for fact in facts if len(fact.shape) > 1} - {(4, 4)}  # it may be a pose
    name = "mask" if entry == "label" else entry
    if entry in BOX_NAMES or any(len(shape) == 2 and shape[1] == 4 for shape in shapes):
        kind, remedy = "boxes", f"boxes={{{name!r}: 100}}"
    elif any(max(min(shape[:2]), min(shape[-2:])) > _MASK_SIDE for shape in shapes):
        kind, remedy = "a mask", f"masks=[{name!r}]"
    else:
        return
    raise SourceError(
        f"Entry {entry!r:.80} of the samples looks like {kind}, and would not move with its image. "
        f"Name it: {remedy}, or arrays=[{name!r}]. {_TO_KEEP_IT}"
    )
