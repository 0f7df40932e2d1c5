"""Any map-style data set as a source: an object with ``len()`` and ``[index]``.

Its samples decide what it has: the first that can be read, and some others (`DatasetSource`).
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from memload.errors import DecodeError, SourceError, describe_error
from memload.sources.boxes import check_order, filled, items_of
from memload.sources.columns import (
    IMAGE_NAMES,
    Column,
    Columns,
    columns_of,
    label_among,
    looks_like,
)
from memload.sources.contents import Contents, array_of, is_tensor, plain
from memload.sources.reading import Reading
from memload.sources.samples import Extra, Sample, Source
from memload.storage.keys import Keys
from memload.wording import listed

#: So many of the first samples decide on the columns, and as many others, evenly spread.
_LOOKED_AT = 32


def first_usable_here(look: Callable[[int], Any], keys: Sequence[str]) -> Any:
    """Return what ``look`` returns for the first sample for which it does not fail.

    Raises SourceError if ``look`` does, and if it fails for the first 100 samples.
    """
    reason = ""
    for row in range(min(len(keys), 100)):
        try:
            return look(row)
        except SourceError:
            raise
        except Exception as error:  # noqa: BLE001  # it is code of the user's
            reason = reason or describe_error(error)
    raise SourceError(f"None of the first samples can be used: {reason:.500}")


class DatasetSource(Source):
    """A map-style data set: an object with ``len()`` and ``[index]``.

    A sample is ``(image, target)``, an image alone, or a dict. An image is a PIL image, an array, a
    tensor ``(C, H, W)``, encoded bytes, or a path. A target is a label, a tuple, or a dict.

    Up to 64 samples decide which columns there are. Numbers are int64, or float64 with NaN for None
    if a fraction or None is among them. Arrays have one shape. Texts are left out, but labels may
    be names of classes. A sample that differs is rejected.

    Args:
        dataset: The data set.
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
        columns: The entries that are stored. By default all. Boxes, points and masks that nobody
            names are an error then, since they would not move with their images.
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
        points: Sequence[str] | Mapping[str, str] = (),
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
        reading = Reading.of(
            image=image, label=label, masks=masks, arrays=arrays, points=points, boxes=boxes
        )
        if not all(isinstance(most, int) and most > 0 for most in reading.boxes.values()):
            raise ValueError(
                f"boxes: {boxes!r:.80} is not a mapping from entries to the most boxes that a "
                "sample has, such as {'boxes': 100}."
            )
        super().__init__(
            keys=Keys.of([*map(str, range(len(dataset)) if key is None else key)]),
            images=_DatasetRows(dataset),
            extras={name: Extra(kind, None) for name, (kind, _) in reading.entries.items()},
            options={"entries": f"{reading}, columns {columns and [*columns]}"},
            are_numbered=key is None,
        )
        self._reading, self._kept = reading, columns
        table = self._look(first_usable)
        self._label = label or label_among(table, has_boxes=bool(reading.boxes))
        #: the texts that the labels of the samples count into; `classes` may be a longer list
        self._own_classes = _class_names(dataset, self._label) if classes is None else [*classes]
        vars(self).update(vars(self._columns_of(table)))

    # ------------------------------------------------------------------------------- samples

    def __getitem__(self, row: int) -> Sample:
        """Return one sample. An exception rejects this one sample."""
        image, entries = self._split(self.images[row])
        columns = {}
        for name, column in self.schema.items():
            try:
                columns[name] = self._value(name, column, entries)
            except (TypeError, ValueError) as error:
                raise DecodeError(f"{name!r:.80}: {error}") from error
        arrays = {
            name: _image(entries[entry]) if kind == "mask" else plain(entries[entry])
            for name, (kind, entry) in self._reading.entries.items()
            if entries.get(entry) is not None
        }
        return Sample(self.keys[row], _image(image), columns, arrays | self._arrays(row))

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
            only = [entry for _, entry in reading.entries.values()]
            only += [*reading.points, *reading.boxes]
            return image, {only[0] if len(only) == 1 else "label": target}
        has_label = bool(target) and isinstance(_looked(target[0]), int)
        names = ["label"] * has_label + [f"target_{n}" for n in range(len(target) - has_label)]
        return image, dict(zip(names, target, strict=True))

    def _value(self, name: str, column: Column, entries: Mapping[str, Any]) -> Any:
        """Return the value of a column. Raises ValueError for labels and boxes that differ.

        Whether others fit their columns is found out when they are written.
        """
        value = entries.get((name == "label" and self._label) or name)
        if name == "label":
            return self._label_of(value)
        if column.points:
            return items_of(value, 2)
        box = name if column.boxes else self.per_box.get(name)
        if box is None:
            return np.full(column.shape, np.nan) if value is None else array_of(value)
        boxes, items = items_of(entries.get(box), 4), array_of(value)
        if column.boxes:
            check_order(boxes)
            items = boxes
        if len(items) != len(boxes):
            raise ValueError(f"it has {len(items)} items for {len(boxes)} boxes")
        if len(boxes) > column.shape[0]:
            raise DecodeError(
                f"it has {len(boxes):,} boxes in {box!r:.80}, and there is room for "
                f"{column.shape[0]:,}. Raise it to the most that any sample has: "
                f"boxes={{{box!r}: {len(boxes)}}} or more"
            )
        return filled([items], column.shape, column.dtype)[0]

    def _label_of(self, value: Any) -> Any:
        value, own = (
            value if isinstance(value, str) else array_of(value).tolist(),
            self._own_classes,
        )
        if value in (None, []) or value != value:
            raise ValueError("it is missing")
        if self.classes is None or own is None:
            return value
        name = value if isinstance(value, str) or value not in range(len(own)) else own[int(value)]
        if name not in self.classes:
            raise ValueError(f"{value!r:.40} is none of the {len(own)} known")
        return self.classes.index(name)

    # -------------------------------------------------------------- what all samples have

    def _look(self, first_usable: Callable[..., Any]) -> dict[str, list[Any]]:
        """Return the entries of the first usable sample or, if they matter, of up to 64 samples.

        They are numbers, texts, None, arrays, or what cannot be stored. Raises SourceError.
        """
        samples: list[dict[str, Any]] = [first_usable(self._look_at, self.keys)]
        if samples[0].keys() - {"label"}:
            with contextlib.suppress(SourceError):  # one of these ends the process, or hangs
                samples = first_usable(self._look_at_several, self.keys[:1]) or samples
        names = dict.fromkeys(name for sample in samples for name in sample)
        reading = self._reading
        wanted = [*reading.points, *reading.boxes, *(self._kept or ())]
        wanted += [reading.label] if reading.label else []
        if lost := [name for name in wanted if name not in names]:
            raise SourceError(
                f"The samples of the data set have no entry {lost[0]!r:.80}, only "
                f"{listed(sorted(names)) or 'images'}. Name one of them."
            )
        return {
            name: [sample.get(name) for sample in samples]
            for name in names
            if self._kept is None or name in wanted
        }

    def _look_at(self, row: int) -> dict[str, Any]:
        """Return what a sample has, by entry, apart from its masks and other arrays."""
        _, entries = self._split(self.images[row])
        arrays = [entry for _, entry in self._reading.entries.values()]
        return {name: _looked(value) for name, value in entries.items() if name not in arrays}

    def _look_at_several(self, row: int) -> list[dict[str, Any]]:
        found, last = [], len(self) - 1
        rows = np.append(np.arange(_LOOKED_AT), np.linspace(0, last, _LOOKED_AT).round())
        for row in np.unique(rows.clip(max=last).astype(int)).tolist():
            with contextlib.suppress(Exception):  # it is rejected when its turn comes
                found.append(self._look_at(row))
        return found

    def _columns_of(self, table: Mapping[str, Sequence[Any]]) -> Columns:
        """Return the columns that the samples in a table have in common. Raises SourceError."""
        reading, skipped = self._reading, {}
        stored: dict[str, Any] = {}
        for name, values in table.items():
            known = [value for value in values if value is not None]
            if self._kept is None and name not in (*reading.points, *reading.boxes):
                _refuse_unnamed(name, known)
            if not known:
                skipped[name] = "missing"
            elif not any(isinstance(value, str) for value in known):
                stored[name] = known if name == self._label else values
            elif name != self._label:
                skipped[name] = "text"
            elif self._own_classes is None:
                raise SourceError(
                    "The labels are texts, and the data set has no list of its classes. Give one: "
                    "classes=[…]."
                )
            else:
                stored[name] = np.zeros(1, np.int64)
        own = replace(
            reading,
            label=self._label if self._label in stored else None,
            boxes={name: name for name in reading.boxes},
        )
        columns = columns_of(stored, own, skipped=skipped)
        for name, column in columns.schema.items():
            box = name if column.boxes else columns.per_box.get(name)
            if box is not None:
                shape = (reading.boxes[box], *column.shape[1:])
                columns.schema[name] = column._replace(shape=shape)
        columns.values = {}  # those of all samples come from the samples themselves
        has_classes = columns.schema.get("label") == Column("<i8")
        columns.classes = self._own_classes if has_classes else None
        return columns


class _DatasetRows(Contents):
    """The samples of a data set."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def read(self, row: int) -> Any:
        """Return one sample. Raises whatever the data set raises, and DecodeError."""
        sample = self._dataset[row]
        if sample is None:
            raise DecodeError("the data set returned None")
        return sample


def _image(value: Any) -> Any:
    """Return an image or a mask as `Sample` has it. Tensors have their channels first."""
    if is_tensor(value) and value.ndim == 3:
        return plain(value).transpose(1, 2, 0)
    return plain(value)


def _looked(value: Any) -> Any:
    """Return a number, a text, None, or an array; anything else as it is."""
    try:
        array = None if value is None else array_of(value)
    except Exception:  # noqa: BLE001  # lists of different lengths, a type of the user's
        return value
    is_array = array is not None and array.ndim and array.dtype.kind in "biuf"
    return array if is_array or array is None else array.tolist()


def _class_names(dataset: Any, label: str | None) -> list[str] | None:
    """Return the names of the classes, if they are where torchvision or Hugging Face have them."""
    features = getattr(dataset, "features", None)
    feature = features.get(label) if isinstance(features, Mapping) else None
    names = getattr(dataset, "classes", None) or getattr(feature, "names", None)
    return [*map(str, names)] if isinstance(names, (list, tuple)) else None


def _refuse_unnamed(entry: str, values: Sequence[Any]) -> None:
    """Raise SourceError for what looks like boxes, points or a mask, and is not named."""
    shapes = [value.shape for value in values if isinstance(value, np.ndarray)]
    if kind := max((looks_like(entry, shape) for shape in shapes), default=""):
        name = "mask" if entry == "label" else entry
        raise SourceError(
            f"Entry {entry!r:.80} of the samples looks like {kind}, and would not move with its "
            f"image. Name it: masks=[{name!r}], points=[{name!r}], boxes={{{name!r}: 100}}, or "
            f"arrays=[{name!r}]. To store or leave out what there is, name it: "
            "DatasetSource(dataset, columns=[…])."
        )
