"""Any map-style data set as a source: an object with ``len()`` and ``[index]``.

Its samples decide what it has: the first that can be read, and some others (`DatasetSource`).
"""

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from memload.errors import DecodeError, SourceError, describe_error
from memload.sources.columns import (
    BOX_NAMES,
    IMAGE_NAMES,
    LABEL_NAMES,
    Column,
    Columns,
    notes_on_unnamed,
)
from memload.sources.contents import Contents
from memload.sources.samples import Kind, Reading, Record, Samples, translation
from memload.storage.keys import Keys
from memload.wording import listed

#: So many samples decide on the columns: half of them the first ones, the others spread evenly.
_LOOKED_AT = 64
#: An array that is larger than this along two axes has the size of a picture.
_MASK_SIDE = 16
_TO_KEEP_IT = "To store or leave out what there is, name it: DatasetSource(dataset, columns=[…])."


class Fact(NamedTuple):
    """What a value is: a type and a shape. Instead of a type, it may be "none" or "text"."""

    dtype: str
    shape: tuple[int, ...] = ()


#: The facts of some samples, by the names of columns.
Facts = list[dict[str, Fact]]


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
        label: The entry of the label. By default the first of `LABEL_NAMES` that there is.
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
        _check_boxes(boxes or {})
        names = [*map(str, range(len(dataset)) if key is None else key)]
        super().__init__(Keys.of(names), _DatasetRows(dataset), Columns(), are_numbered=key is None)
        self._reading = Reading(
            image=image,
            label=label,
            masks=_named("masks", masks),
            arrays=_named("arrays", arrays),
            points=_named("points", points),
            boxes=boxes or {},
        )
        self._kept = None if columns is None else [*_named("columns", columns)]
        self.options = {"entries": f"{self._reading}, columns {self._kept}"}
        #: the boxes that other columns have an item for
        self._per_box: dict[str, str] = {}
        self._find_columns(self._facts_of_samples(first_usable))
        self._find_classes(dataset, classes)
        self._numbers: np.ndarray | None = None  # of labels, if they are translated
        if columns is None:
            self.columns.notes += notes_on_unnamed(self.columns)
        self.columns.finish()

    # ------------------------------------------------------------------------------- records

    @property
    def arrays(self) -> Mapping[str, Kind]:
        """The kinds of the masks and other arrays, by name."""
        own = {name: self._reading.kind_of(name) for name in self._reading.entries}
        return {**own, **super().arrays}

    def _record(self, row: int, image: Any) -> Record:
        image, entries, arrays = self._parts(image)
        columns = {
            name: self._value(name, entries.get(name), column)
            for name, column in self.schema.items()
        }
        for name, boxes in self._per_box.items():
            items, count = len(items_of(entries.get(name))), len(boxes_of(boxes, entries[boxes]))
            if items != count:
                raise DecodeError(f"{name!r:.80} has {items} items for {count} boxes")
        return Record(self.keys[row], image, columns, {**arrays, **self._arrays(row)})

    def _parts(self, sample: Any) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        """Return image, columns and arrays of a sample. Raises SourceError for a missing image."""
        image, entries = self._split(sample)
        found = self._reading.entries
        arrays = {
            name: plain_mask(entries[entry])
            if name in self._reading.masks
            else plain(entries[entry])
            for name, entry in found.items()
            if entries.get(entry) is not None
        }
        following = (*self._reading.points, *self._reading.boxes)
        columns = {
            name: value
            for name, value in entries.items()
            if name not in found.values()
            and (self._kept is None or name in self._kept or name in following)
        }
        label = self._label_entry(entries)
        if label is not None and (label in columns or self._reading.label):
            columns.pop(label, None)
            columns["label"] = entries[label]
        return plain_image(image), columns, arrays

    def _label_entry(self, entries: Mapping[str, Any]) -> str | None:
        """Return the entry of the label. With boxes, ``labels`` are those of the boxes."""
        names = (self._reading.label,) if self._reading.label else LABEL_NAMES
        others = {"labels"} if self._reading.boxes else ()
        return next((name for name in names if name in entries and name not in others), None)

    def _split(self, sample: Any) -> tuple[Any, dict[str, Any]]:
        """Return the image and the other entries of a sample."""
        named = self._reading.image
        if isinstance(sample, Mapping):
            names: Sequence[str] = IMAGE_NAMES if named is None else (named,)
            name = next((name for name in names if name in sample), None)
            if name is None:
                raise SourceError(
                    f"The samples of the data set have no entry {' or '.join(names)}, only "
                    f"{listed(sample)}. Name the image's: image='…'."
                )
            return sample[name], {other: sample[other] for other in sample if other != name}
        if named is not None:
            raise SourceError(
                f"image: {named!r:.80} names an entry of dicts, but samples are of type "
                f"{type(sample).__name__}. Leave it out."
            )
        if not isinstance(sample, (tuple, list)):
            return sample, {}
        image, *targets = sample
        target = targets[0] if len(targets) == 1 else tuple(targets)
        if isinstance(target, Mapping):
            return image, dict(target)
        if not isinstance(target, tuple):
            only = [*self._reading.entries.values(), *self._reading.points, *self._reading.boxes]
            return image, {only[0] if len(only) == 1 else "label": target}
        is_picture = not target or isinstance(target[0], Image.Image)
        has_label = not is_picture and fact_of("label", target[0]) == Fact("<i8")
        numbers = range(len(target) - has_label)
        names = ["label"] * has_label + [f"target_{number}" for number in numbers]
        return image, dict(zip(names, target, strict=True))

    def _value(self, name: str, value: Any, column: Column) -> Any:
        """Return the value of a column. Raises DecodeError if the sample differs."""
        if name == "label":
            return self._label(value, column)
        if column.boxes or name in self._per_box:
            items = boxes_of(name, value) if column.boxes else items_of(value)
            return _filled(name, items, column)
        return _number(name, value, column)

    def _label(self, value: Any, column: Column) -> Any:
        if isinstance(value, str):
            classes = self._classes_of_samples
            if value not in classes:
                raise DecodeError(f"label {value!r:.40} is none of the {len(classes):,} known ones")
            value = classes.index(value)
        if value is None or (np.shape(value) == () and np.isnan(value)):
            raise DecodeError("its label is missing")
        value = _number("label", value, column)
        if self._numbers is None:
            return value
        if not 0 <= value < len(self._numbers):
            raise DecodeError(f"label {value} is not within 0 to {len(self._numbers) - 1}")
        return int(self._numbers[value])

    def with_classes(self, classes: Sequence[str]) -> "DatasetSource":
        """Return the same samples with labels that count into these classes."""
        numbers = None if self.classes is None else translation(self.classes, classes)
        return super().with_classes(classes)._changed(_numbers=numbers)

    def _renumbered(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        return {}  # labels are translated one by one

    # -------------------------------------------------------------- what all samples have

    def _facts_of_samples(self, first_usable: Callable[..., Any]) -> Facts:
        """Return the facts of the first usable sample or, if they matter, of up to 64 samples."""
        facts: Facts = first_usable(self._look, self.keys)
        if not (facts[0].keys() - {"label"} or self._reading.boxes):
            return facts
        try:
            several = first_usable(self._look_at_several, self.keys[:1])
        except SourceError:  # one of these samples ends the process, or hangs
            return facts
        if isinstance(several, SourceError):
            raise several
        return several or facts

    def _look(self, row: int) -> Facts:
        return [self._facts(self.images[row])]

    def _look_at_several(self, row: int) -> Facts | SourceError:
        count, facts = len(self), []
        spread = np.linspace(0, count - 1, min(count, _LOOKED_AT // 2)).round().astype(int)
        for row in sorted({*range(min(count, _LOOKED_AT // 2)), *spread.tolist()}):
            try:
                facts.append(self._facts(self.images[row]))
            except SourceError as error:
                return error
            except Exception:  # noqa: BLE001  # it is rejected when its turn comes
                continue
        return facts

    def _facts(self, sample: Any) -> dict[str, Fact]:
        """Return what a sample has, and refuse what would not move with its image."""
        reading, (_, columns, _), (_, entries) = (
            self._reading,
            self._parts(sample),
            self._split(sample),
        )
        wanted = [*reading.points, *reading.boxes, *(self._kept or ())]
        wanted += [reading.label] if reading.label else []
        if lost := [name for name in wanted if name not in entries]:
            raise SourceError(
                f"The samples of the data set have no entry {lost[0]!r:.80}, only "
                f"{listed(sorted(entries)) or 'images'}. Name one of them."
            )
        if self._kept is None:
            for name in columns.keys() - {*reading.points, *reading.boxes}:
                _refuse_unnamed(name, columns[name])
        return {
            name: Fact("<f4", boxes_of(name, value).shape)
            if name in reading.boxes
            else fact_of(name, value)
            for name, value in columns.items()
        }

    def _find_columns(self, facts: Facts) -> None:
        """Find the columns that these samples have in common."""
        schema, skipped = self.columns.schema, self.columns.skipped
        for name in dict.fromkeys(name for each in facts for name in each):
            found = [each.get(name, Fact("none")) for each in facts]
            known = [fact for fact in found if fact.dtype != "none"]
            boxes = _boxes_beside(name, self._reading, facts)
            if name in self._reading.boxes:
                schema[name] = Column("<f4", (self._reading.boxes[name], 4), boxes=True)
            elif not known or any(fact.dtype == "text" for fact in known):
                skipped[name] = "text" if known else "missing"
            elif boxes is not None:
                items = [fact for fact in known if fact.shape[0]] or known
                self._per_box[name] = boxes
                shape = (self._reading.boxes[boxes], *items[0].shape[1:])
                schema[name] = Column(_common_type(items), shape)
            elif len({fact.shape for fact in known}) > 1:
                skipped[name] = "of different shapes"
            else:
                # A number that is missing is NaN.
                is_missing = len(known) < len(found) and name != "label" and not known[0].shape
                dtype = _common_type([*known, *[Fact("<f8")] * is_missing])
                is_points = name in self._reading.points
                schema[name] = Column("<f4" if is_points else dtype, known[0].shape, is_points)
        if self._per_box:
            self.columns.notes.append(
                f"filled up with -1 or NaN beside {listed(self._reading.boxes, 3)}: "
                f"{listed(self._per_box, 5)}"
            )

    def _find_classes(self, dataset: Any, classes: Sequence[str] | None) -> None:
        """Find the names of the classes, which labels that are texts need."""
        columns = self.columns
        found = _classes_of(dataset, self._reading) if classes is None else [*classes]
        if columns.skipped.pop("label", None):
            columns.schema["label"] = Column("<i8")
            if found is None:
                raise SourceError(
                    "The labels are texts, and the data set has no list of its classes. Give one: "
                    "classes=[…]."
                )
        if columns.schema.get("label") == Column("<i8"):
            columns.classes = found
        elif "label" not in columns.schema and self._kept is None and not self._reading.entries:
            columns.notes.append("no labels: name their entry with label=…")
        self._classes_of_samples = columns.classes or []


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


def _check_boxes(boxes: Mapping[str, int]) -> None:
    is_right = isinstance(boxes, Mapping) and all(
        isinstance(most, int) and most > 0 for most in boxes.values()
    )
    if not is_right:
        raise ValueError(
            f"boxes: {boxes!r:.80} is not a mapping from entries to the most boxes that a sample "
            "has, such as {'boxes': 100}."
        )


def _named(argument: str, names: Any) -> dict[str, str]:
    """Return entries by the names that they get."""
    if isinstance(names, str):
        raise TypeError(f"{argument} must be a list such as [{names!r}], not the text {names!r}.")
    return dict(names) if isinstance(names, Mapping) else {name: name for name in names}


def is_tensor(value: Any) -> bool:
    """Return whether a value is a torch tensor. Torch is not imported."""
    return any(kind.__module__.partition(".")[0] == "torch" for kind in type(value).__mro__)


def plain(value: Any) -> Any:
    """Return an array, a picture, bytes or a path in place of tensors, lists and dicts."""
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, (str, os.PathLike)):
        return Path(value)
    if is_tensor(value):
        return value.detach().cpu().numpy()
    return np.asarray(value) if isinstance(value, (list, tuple)) else value


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


def fact_of(name: str, value: Any) -> Fact:
    """Return what a value is. Raises SourceError for what cannot be stored."""
    if value is None or isinstance(value, str):
        return Fact("none" if value is None else "text")
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], Mapping):
        raise SourceError(
            f"Entry {name!r:.80} is a list of dicts of {listed(value[0], 5)}, as COCO's, which "
            "cannot be stored. Let the data set return lists: {'boxes': [[x, y, x + width, y + "
            "height], …], 'labels': […]}, and name the boxes: boxes={'boxes': 100}."
        )
    try:
        array = items_of(value)
    except Exception as error:
        raise SourceError(
            f"Entry {name!r:.80} is no array of numbers: {describe_error(error):.300}. "
            f"{_TO_KEEP_IT}"
        ) from error
    if array.dtype.kind == "U":
        return Fact("text", array.shape)
    if array.dtype.kind not in "biuf":
        raise SourceError(
            f"Entry {name!r:.80} is neither a number nor an array of numbers, but "
            f"{type(value).__name__} {value!r:.40}. {_TO_KEEP_IT}"
        )
    if array.ndim == 0:
        return Fact("<f8" if array.dtype.kind == "f" else "<i8")
    return Fact(array.dtype.newbyteorder("<").str, array.shape)


def items_of(value: Any) -> np.ndarray:
    """Return an entry as an array. None has no items. In a list, None is NaN."""
    array = np.asarray(() if value is None else plain(value))
    if array.dtype.kind == "O" and isinstance(value, (list, tuple)):
        with contextlib.suppress(TypeError, ValueError):
            return array.astype(np.float64)
    return array


def boxes_of(name: str, value: Any) -> np.ndarray:
    """Return the boxes of a sample, float32 ``(k, 4)``. Raises DecodeError and SourceError."""
    form = str(getattr(getattr(value, "format", None), "value", "XYXY"))  # of tv_tensors
    if form != "XYXY":
        raise SourceError(
            f"The boxes in {name!r:.80} are {form}, and XYXY is stored. Convert them in the data "
            "set: torchvision.transforms.v2.ConvertBoundingBoxFormat('XYXY')."
        )
    if isinstance(value, Mapping):
        raise SourceError(
            f"The boxes in {name!r:.80} are a dict of {listed(value, 5)}, and not a list. Give "
            "them an entry of their own; for Hugging Face, dataset.flatten() does."
        )
    boxes = items_of(value)
    boxes = boxes[None] if boxes.shape == (4,) else boxes if boxes.size else np.zeros((0, 4))
    if boxes.ndim != 2 or boxes.shape[1] != 4 or boxes.dtype.kind not in "iuf":
        raise DecodeError(f"its boxes in {name!r:.80} have the shape {boxes.shape}, not (k, 4)")
    is_wrong = (boxes[:, :2] > boxes[:, 2:]).any(axis=1)
    if is_wrong.any():
        raise DecodeError(
            f"its box {boxes[is_wrong][0].tolist()} in {name!r:.80} is not x1, y1, x2, y2: it ends "
            "before it begins. If it is x, y, width, height, convert it"
        )
    return boxes.astype(np.float32)


def _refuse_unnamed(name: str, value: Any) -> None:
    """Raise SourceError for what looks like boxes or a mask, and is not named."""
    kind = type(value).__name__
    is_picture = isinstance(value, Image.Image) or kind == "Mask"
    shape: tuple[int, ...] = ()
    if not (value is None or isinstance(value, (str, Image.Image))):
        with contextlib.suppress(ValueError):  # lists of different lengths
            shape = np.shape(plain(value))
    are_boxes = kind == "BoundingBoxes" or (name in BOX_NAMES and shape[-1:] in ((4,), (0,)))
    if len(shape) > 1 and not is_picture:
        are_boxes = are_boxes or (shape[-1] == 4 and shape != (4, 4))
        is_picture = min(shape[:2]) > _MASK_SIDE or min(shape[-2:]) > _MASK_SIDE
    if not (are_boxes or is_picture):
        return
    own_name = "mask" if name == "label" else name
    remedy = f"boxes={{{own_name!r}: 100}}" if are_boxes else f"masks=[{own_name!r}]"
    raise SourceError(
        f"Entry {name!r:.80} of the samples looks like {'boxes' if are_boxes else 'a mask'}, and "
        f"would not move with its image. Name it: {remedy}, or arrays=[{own_name!r}]. {_TO_KEEP_IT}"
    )


def _number(name: str, value: Any, column: Column) -> Any:
    """Return a number, or an array of the shape of a column. None is NaN. Raises DecodeError."""
    is_float = column.dtype[1] == "f"
    if value is None and is_float:
        return np.full(column.shape, np.nan, column.dtype)[()]
    array = items_of(value)
    fits = array.dtype.kind in ("biuf" if is_float else "biu") and array.shape == column.shape
    if value is None or not fits:
        raise DecodeError(
            f"column {name!r:.80} is {value!r:.60} of the shape {array.shape}, but the first "
            f"samples have {np.dtype(column.dtype).name} of {column.shape}"
        )
    return array.astype(column.dtype)[()]


def _filled(name: str, items: np.ndarray, column: Column) -> np.ndarray:
    """Return items of boxes, filled up with NaN, or -1 among integers. Raises DecodeError."""
    most, is_float = column.shape[0], column.dtype[1] == "f"
    if len(items) > most:
        raise DecodeError(
            f"it has {len(items):,} boxes in {name!r:.80}, and there is room for {most:,}. Raise "
            f"it to the most that any sample has: boxes={{{name!r}: {len(items)}}} or more"
        )
    kinds = "biuf" if is_float else "biu"
    if len(items) and (items.shape[1:] != column.shape[1:] or items.dtype.kind not in kinds):
        raise DecodeError(f"its items have the shape {items.shape} and type {items.dtype}")
    filled = np.full(column.shape, np.nan if is_float else -1, column.dtype)
    if len(items):
        filled[: len(items)] = items
    return filled


def _common_type(facts: Sequence[Fact]) -> str:
    dtype = np.result_type(*(fact.dtype for fact in facts)).newbyteorder("<")
    return "<i8" if dtype.kind == "b" else str(dtype.str)


def _boxes_beside(name: str, reading: Reading, facts: Facts) -> str | None:
    """Return the boxes that a column has an item for, in all samples. None if there are none."""
    if name == "label" or name in reading.boxes or name in reading.points:
        return None
    for boxes in reading.boxes:
        having = [each for each in facts if boxes in each]
        counts = [each[boxes].shape[0] for each in having]
        shapes = [each.get(name, Fact("none")).shape for each in having]
        if [shape[0] if shape else -1 for shape in shapes] == counts and any(counts):
            return boxes
    return None


def _classes_of(dataset: Any, reading: Reading) -> list[str] | None:
    """Return the names of the classes, if they are where torchvision or Hugging Face have them."""
    names = getattr(dataset, "classes", None)
    features = getattr(dataset, "features", None)
    if names is None and isinstance(features, Mapping):
        candidates = (reading.label,) if reading.label else LABEL_NAMES
        label = next((name for name in candidates if name in features), None)
        names = getattr(features.get(label), "names", None)
    if isinstance(names, str) or not isinstance(names, (Sequence, np.ndarray)):
        return None
    return [str(name) for name in names]
