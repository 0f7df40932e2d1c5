"""Any map-style data set as a source, such as torchvision's or Hugging Face's."""

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from memload.building.first_samples import first_usable
from memload.building.sources.entries import (
    ArrayEntries,
    BoxColumns,
    is_picture,
    is_tensor,
    plain_array,
    unpacked,
)
from memload.building.sources.hugging_face import (
    column_names,
    features_of,
    is_list_of_numbers,
    is_number,
    is_text,
    left_out_reason,
    marked_image,
    named_numbers,
    nullable_counts,
    stored_features,
    text_values,
)
from memload.building.sources.names import IMAGE_NAMES, LABEL_NAMES
from memload.building.sources.record import Column, Record
from memload.building.sources.unnamed import (
    check_no_boxes,
    check_no_dicts,
    check_no_masks,
    notes_on_columns,
)
from memload.errors import DecodeError, SourceError, describe_error
from memload.storage.keys import Keys
from memload.wording import counted, listed

Value = TypeVar("Value")

#: Among so many samples, and as many others, two with unequal numbers of boxes are looked for.
_FIRST_SAMPLES = 20


class DatasetSource:
    """Any map-style data set: an object with ``len()`` and ``[index]``.

    A sample is ``(image, target)``, an image alone, or a dict of entries. An image is a PIL image,
    an array as in `Record`, a tensor ``(C, H, W)`` of such an array, encoded bytes, or a path. A
    target is a label, or a tuple (its first entry is the ``label`` if it is an integer, the others
    are ``target_0``, ``target_1``, …), or a dict of columns. Where the data set has
    ``__getitems__``, as Hugging Face's have, samples are asked for 32 at a time.

    Columns are numbers and arrays of numbers. The first sample that can be read fixes their names,
    types and shapes, with ``boxes`` that with the most boxes among those named below. A sample
    whose columns differ is rejected, but an integer may stand for a float. Texts are left out,
    which ``notes`` reports. Of a Hugging Face data set, columns of text with few values and those
    of type ClassLabel become categories, missing numbers become NaN, and lists of any length are
    left out.

    - ``image`` is the name of the entry with the image. The default is Hugging Face's only column
      of type Image, else ``image``, ``img``, ``jpg``, ``png`` or ``webp``.
    - ``columns`` are the names of the entries that are kept, or a mapping from the names
      of columns to those of entries. By default all are kept, and the first of ``label``,
      ``labels``, ``fine_label``, ``cls`` and ``target`` becomes ``label``.
    - ``key`` is the name of a column of a Hugging Face data set with the samples' names, or a list
      of names. By default a sample's name is its number.
    - ``classes`` are the names of the classes. By default they are taken from the data set. Labels
      may be names of classes instead of numbers.
    - ``masks`` and ``arrays`` are the names of the entries with masks and other arrays (see
      `Record`), or mappings from their names in the data set to those of entries. If samples are
      ``(image, mask)``, its name is chosen here: ``masks=["mask"]``. Masks may be of any integers.
      A sample without such an entry, or with None there, lacks it.
    - ``points`` are the names of columns of x, y, ``(k, 2)``, with the same k in all samples, which
      move with the image (see `Column`).
    - ``boxes`` maps the names of columns of boxes x1, y1, x2, y2, ``(k, 4)``, to the most that a
      sample may have, K. They are stored as ``(K, 4)``, filled up with NaN. Other entries with one
      item for each box are filled up too, integers with -1 and floats with NaN: those that have as
      many items as there are boxes in two samples, which differ in their number. These are among
      the first 20, or 20 others. If all have the same number of boxes, any of them decides.
      An entry ``labels`` keeps its name then. A sample with more boxes is rejected.
    - Boxes and masks that are not named would not move with the images. Unless ``columns`` are
      given, it is an error if samples have entries such as ``boxes`` and ``mask``.
    - ``num_workers`` and ``timeout`` are those of the build, see `first_usable`.

    Raises SourceError if none of the first samples can be read.

    >>> columns = {"label": "fine_label"}
    >>> source = memload.DatasetSource(cifar, image="img", columns=columns)  # doctest: +SKIP
    >>> memload.build(source, "cifar.bin", size=32)  # doctest: +SKIP
    """

    def __init__(
        self,
        dataset: Any,
        *,
        image: str | None = None,
        masks: Sequence[str] | Mapping[str, str] = (),
        arrays: Sequence[str] | Mapping[str, str] = (),
        points: Sequence[str] = (),
        boxes: Mapping[str, int] | None = None,
        columns: Sequence[str] | Mapping[str, str] | None = None,
        key: str | Sequence[str] | None = None,
        classes: Sequence[str] | None = None,
        num_workers: int = 0,
        timeout: float = 60.0,
    ) -> None:
        if not len(dataset):
            raise SourceError("The data set has no samples.")
        self._arrays = ArrayEntries(masks, arrays)
        self._points, self._boxes = _checked_points(points), BoxColumns(boxes or {})
        #: the names and the kinds of the records' arrays
        self.arrays = self._arrays.kinds
        self._columns = _checked_columns(columns)
        marked = marked_image(dataset, self._arrays.entry_of.values())
        self._image_name, self._is_image_named = image or marked, image is not None
        self.identity = self._identity()
        self._dataset: Any = dataset
        self.classes = None if classes is None else list(classes)
        texts, left_out = self._read_stored(dataset)
        self.schema, skipped, self._boxes = first_usable(
            self._read_schema, range(len(dataset)), num_workers, timeout
        )
        self._skipped = frozenset(skipped)
        if lists := [name for name in features_of(self._dataset) if name in skipped]:
            self._dataset = self._dataset.remove_columns(lists)
            left_out |= dict.fromkeys(lists, "lists of any length, not of the boxes")
        self.categories = {name: texts[name] for name in self.schema if name in texts}
        if self.schema.get("label") != Column("<i8"):
            self.classes = None
        self.notes = [*_notes(dict.fromkeys(skipped, "text") | left_out), *self._boxes.notes()]
        if columns is None:
            if "label" not in self.schema and not self._named_entries:
                self.notes.append(_note_without_labels(has_entries=bool(self.schema or skipped)))
            self.notes += notes_on_columns(self.schema)
        self.keys = Keys.of(_names(dataset, key))
        self.has_numbers_as_keys = key is None
        if hasattr(dataset, "__getitems__"):  # as `WrappedSource` does
            self.__getitems__ = self._get_several

    def _read_stored(self, dataset: Any) -> tuple[dict[str, list[str]], dict[str, str]]:
        """Take from a data set of Hugging Face's what it says about its columns.

        Returns the texts of columns that become categories, and why other columns are left out.
        These are removed, so that they are not read.
        """
        column_of_entry = self._column_of_entry(column_names(dataset))
        texts = _renamed(text_values(dataset) | named_numbers(dataset), column_of_entry)
        self._nullable = _renamed(nullable_counts(dataset), column_of_entry)
        self._nullable.pop("label", None)
        left_out: dict[str, str] = {}
        if self._columns is None:
            left_out = self._find_left_out(dataset, column_of_entry, texts)
        unused = list(left_out) or self._unused(dataset)
        if unused:
            self._dataset = dataset.remove_columns(unused)
        entries = [entry for entry, column in column_of_entry.items() if column == "label"]
        label = entries[0] if entries else "label"
        _check_labels(dataset, label)
        label_texts = texts.pop("label", None)
        if self.classes is None:
            self.classes = _class_names(dataset, label) or label_texts
        #: for each column of text, the number of each text
        self._numbers = {name: _numbered(values) for name, values in texts.items()}
        self._numbers["label"] = _numbered(self.classes or ())
        return texts, left_out

    def _identity(self) -> str:
        identity = f"images in {self._image_name!r}, columns {self._columns!r}"
        if not self._named_entries:
            return identity
        named = [self.arrays, self._arrays.entry_of, self._points, dict(self._boxes.limits)]
        return f"{identity}, arrays, points and boxes {named!r}"

    @property
    def _named_entries(self) -> list[str]:
        """The entries that are named as masks, arrays, points and boxes."""
        return [*self._arrays.entry_of.values(), *self._points, *self._boxes.limits]

    @property
    def _image_names(self) -> Sequence[str]:
        """What the image may be called. The first one that is there is the image."""
        return IMAGE_NAMES if self._image_name is None else (self._image_name,)

    def _find_left_out(
        self, dataset: Any, column_of_entry: Mapping[str, str], texts: Mapping[str, Sequence[str]]
    ) -> dict[str, str]:
        """Return the stored columns that cannot be kept, and why."""
        features = stored_features(dataset)
        image = next((name for name in self._image_names if name in features), None)
        reasons = {}
        for name, feature in features.items():
            is_kept = column_of_entry[name] in texts if is_text(feature) else is_number(feature)
            is_named = name in (image, *self._named_entries)
            if not (is_kept or is_named or (self._boxes.limits and is_list_of_numbers(feature))):
                reasons[name] = left_out_reason(name, feature)
        return reasons

    def _unused(self, dataset: Any) -> list[str]:
        """Return the stored columns that are neither the image nor among the named ones."""
        names = list(stored_features(dataset))
        if self._columns is None or not set(self._column_of_entry(names)) <= set(names):
            return []
        used = (*self._image_names, *self._column_of_entry(names), *self._arrays.entry_of.values())
        return [name for name in names if name not in used]

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Record:
        return self._record(index, self._dataset[index])

    def _get_several(self, indices: Sequence[int]) -> list[Record]:
        """Return several records. Raises whatever the data set raises for one of them."""
        samples = self._dataset.__getitems__(list(indices))
        return [self._record(index, sample) for index, sample in zip(indices, samples, strict=True)]

    def _record(self, index: int, sample: Any) -> Record:
        image, entries, others = self._entries(sample)
        kept = {name: entries[name] for name in entries if name not in self._skipped}
        columns = self._boxes.padded(self._columns_from(kept))
        if columns.keys() != self.schema.keys():
            raise DecodeError(
                f"its columns are {sorted(columns)}, but those of the first sample are "
                f"{sorted(self.schema)}"
            )
        for name, value in columns.items():
            first, column = self.schema[name], _column(name, value)
            is_integer_for_float = (first.dtype, column.dtype) == ("<f8", "<i8")
            is_same_type = column.dtype == first.dtype or is_integer_for_float
            if column.shape != first.shape or not is_same_type:
                raise DecodeError(
                    f"column {name!r} has type and shape {column[:2]}, but the first sample has "
                    f"{first[:2]}"
                )
        if self.schema.get("label") == Column("<f8") and np.isnan(columns["label"]):
            raise DecodeError("its label is missing: it is NaN")
        arrays = self._arrays.values(others)
        return Record(self.keys[index], _plain_image(image), columns, arrays=arrays)

    def _columns_from(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Return the columns of a sample. Texts become numbers, or are left out."""
        columns: dict[str, Any] = {}
        for name, value in entries.items():
            if name in self._nullable:
                columns[name] = np.nan if value is None else float(value)
            elif name != "label" and _is_list_of_texts(value):
                continue
            elif not isinstance(value, str) and not (value is None and self._numbers.get(name)):
                columns[name] = value
            elif name in self._numbers:
                columns[name] = self._number(name, value or "")
        for name in self._points:
            if name in columns:
                columns[name] = np.asarray(plain_array(columns[name]), np.float32)
        return columns

    def _number(self, name: str, text: str) -> int:
        numbers = self._numbers[name]
        if not numbers:
            raise SourceError(
                f"The labels are texts such as {text!r:.40}, and the data set has no list of its "
                "classes. Give one: DatasetSource(dataset, classes=[…])."
            )
        if text not in numbers:
            raise DecodeError(f"{name} {text!r:.40} is none of the {len(numbers):,} known ones")
        return numbers[text]

    def _entries(self, sample: Any) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        """Return the image of a sample, its columns by their names, and its arrays by entries."""
        if sample is None:
            raise DecodeError("the data set returned None")
        image, entries = self._split(sample)
        names = self._arrays.entry_of.values()
        columns = self._column_of_entry([name for name in entries if name not in names])
        lost = [entry for entry in columns if entry not in entries]
        if lost:
            raise SourceError(
                f"The samples of the data set have no entry {lost[0]!r:.80}, only "
                f"{sorted(entries)}. Name one of them."
            )
        arrays = {name: entries[name] for name in names if name in entries}
        return image, {column: entries[entry] for entry, column in columns.items()}, arrays

    def _split(self, sample: Any) -> tuple[Any, dict[str, Any]]:
        """Return the image of a sample, and its other entries."""
        if isinstance(sample, Mapping):
            candidates = self._image_names
            name = next((name for name in candidates if name in sample), None)
            if name is None:
                raise SourceError(
                    f"The samples of the data set have no entry {' or '.join(candidates)}, only "
                    f"{sorted(sample)}. Name the image's: DatasetSource(dataset, image='…')."
                )
            return sample[name], {other: sample[other] for other in sample if other != name}
        if self._is_image_named:
            raise SourceError(
                f"image= names an entry of dicts, but the samples of the data set are of type "
                f"{type(sample).__name__}. Leave it out."
            )
        if not isinstance(sample, (tuple, list)):
            return sample, {}
        image, *targets = sample
        return image, self._split_targets(targets)

    def _split_targets(self, targets: Sequence[Any]) -> dict[str, Any]:
        """Return what follows the image in a sample by the names of entries."""
        target = targets[0] if len(targets) == 1 else tuple(targets)
        if isinstance(target, Mapping):
            return dict(target)
        if not isinstance(target, tuple):
            only_name = self._named_entries[0] if len(self._named_entries) == 1 else "label"
            return {only_name: target}
        is_label = bool(target) and not is_picture(target[0])
        has_label = is_label and _column("label", target[0]) == Column("<i8")
        names = ["label"] if has_label else []
        names += [f"target_{number}" for number in range(len(target) - has_label)]
        return dict(zip(names, target, strict=True))

    def _column_of_entry(self, entries: Sequence[str]) -> dict[str, str]:
        """Return the name of the column for each entry that is kept."""
        named = [self._columns] if isinstance(self._columns, str) else self._columns
        always = [
            name for name in (*self._points, *self._boxes.limits) if name not in (named or ())
        ]
        if isinstance(named, Mapping):
            return {name: name for name in always} | {
                entry: column for column, entry in named.items()
            }
        kept = entries if named is None else [*named, *always]
        # With boxes, "labels" are those of the boxes.
        candidates = [name for name in LABEL_NAMES if name != "labels" or not self._boxes.limits]
        label = next((name for name in candidates if name in kept), None)
        return {name: "label" if name == label else name for name in kept}

    def _read_schema(self, index: int) -> tuple[dict[str, Column], list[str], BoxColumns]:
        """Return the columns of a sample, those that are left out, and those of boxes."""
        samples = self._first_entries(index)
        entries, boxes = samples[0], BoxColumns(self._boxes.limits)
        boxes.learn([self._columns_from(sample) for sample in samples], fixed=self._points)
        columns = boxes.padded(self._columns_from(entries))
        schema = {name: _column(name, value) for name, value in columns.items()} | boxes.schema
        schema |= {name: schema[name]._replace(points=True) for name in self._points}
        for name, feature in stored_features(self._dataset).items():
            if name not in boxes.schema and is_list_of_numbers(feature):
                schema.pop(name, None)
        return schema, [name for name in entries if name not in schema], boxes

    def _first_entries(self, index: int) -> list[dict[str, Any]]:
        """Return the columns of a sample or, with boxes, of some with other numbers of boxes.

        The one with the most comes first. Raises SourceError if the sample lacks an entry that is
        named, or has boxes or masks that are not.
        """
        image, entries, arrays = self._entries(self._dataset[index])
        following = (others | other for _, other, others in self._next_samples(index))
        check_no_dicts(itertools.chain([arrays | entries], following))
        if set(self._arrays.entry_of.values()) - set(arrays):  # others may have what this one lacks
            for _, _, others in self._next_samples(index):
                arrays = others | arrays
        self._arrays.check(arrays, entries)
        lost = [name for name in (*self._points, *self._boxes.limits) if name not in entries]
        if lost:
            argument = "points" if lost[0] in self._points else "boxes"
            raise SourceError(
                f"{argument}: the samples of the data set have no entry {lost[0]!r:.80}, only "
                f"{sorted(entries)}. Name one of them."
            )
        if self._columns is None:
            self._check_unnamed(index, image, entries)
        if not self._boxes.limits:
            return [entries]
        by_count: dict[int, dict[str, Any]] = {}
        following = (other for _, other, _ in self._next_samples(index, spread=_FIRST_SAMPLES))
        for candidate in itertools.chain([entries], following):
            with contextlib.suppress(Exception):  # it is rejected when its turn comes
                by_count.setdefault(self._boxes.most(candidate), candidate)
                if len(by_count) > 1 and max(by_count) > 1:
                    break
        return [by_count[count] for count in sorted(by_count, reverse=True)] or [entries]

    def _next_samples(
        self, index: int, spread: int = 0
    ) -> Iterator[tuple[Any, dict[str, Any], dict[str, Any]]]:
        """Yield up to 19 samples after this one, and ``spread`` others, as `_entries` does.

        Those that cannot be read are passed over.
        """
        last = len(self) - 1
        others = range(index + 1, min(index + _FIRST_SAMPLES, len(self)))
        for other in (*others, *np.linspace(index, last, spread, dtype=np.int64).tolist()):
            with contextlib.suppress(Exception):  # it is rejected when its turn comes
                yield self._entries(self._dataset[other])

    def _check_unnamed(self, index: int, image: Any, entries: Mapping[str, Any]) -> None:
        """Raise SourceError for boxes and masks that would be stored as they are."""
        named = {*self._points, *self._boxes.limits}
        check_no_masks(image, {name: entries[name] for name in entries if name not in named})
        others = (other for _, other, _ in self._next_samples(index))
        samples = (
            {name: sample[name] for name in sample if name not in named}
            for sample in itertools.chain([entries], others)
        )
        check_no_boxes(samples, by_name=bool(self._boxes.limits))


def _checked_columns(
    columns: Sequence[str] | Mapping[str, str] | None,
) -> Sequence[str] | Mapping[str, str] | None:
    named = columns if columns is None or isinstance(columns, (str, Mapping)) else list(columns)
    if isinstance(named, Mapping) and len(set(named.values())) < len(named):
        raise ValueError(f"columns: two columns have the same entry: {dict(named)!r:.200}.")
    return named


def _checked_points(points: Sequence[str]) -> list[str]:
    if isinstance(points, (str, Mapping)):
        raise TypeError(
            f"points must be a list of names of entries, such as ['landmarks'], and not "
            f"{points!r:.80}. Patterns are for tables."
        )
    return list(points)


def has_classes(dataset: Any) -> bool:
    """Return whether a data set has names of classes itself, or texts that are all known."""
    label = next((name for name in LABEL_NAMES if name in column_names(dataset)), "label")
    return is_text(stored_features(dataset).get(label)) or _class_names(dataset, label) is not None


def _check_labels(dataset: Any, name: str) -> None:
    """Raise SourceError if labels are missing: None, NaN or an empty text."""
    feature = stored_features(dataset).get(name)
    is_float = str(getattr(feature, "dtype", "")).startswith("float")
    if not (is_text(feature) or is_float or name in nullable_counts(dataset)):
        return
    labels = dataset.select_columns([name]).with_format(None)[name]
    missing = [
        number
        for number, label in enumerate(labels)
        if label in (None, "") or label != label  # NaN
    ]
    if missing:
        count = counted(len(missing), "label is", "labels are")
        raise SourceError(
            f"{count} missing, the first one that of sample {missing[0]}. Fill them in, or leave "
            "these samples out."
        )


def _renamed(values: Mapping[str, Value], columns: Mapping[str, str]) -> dict[str, Value]:
    """Return values by the names of columns instead of entries, of those that are kept."""
    return {columns[entry]: value for entry, value in values.items() if entry in columns}


def _note_without_labels(*, has_entries: bool) -> str:
    if not has_entries:
        return "no labels: the data set has only images"
    return (
        f"no labels: there is no entry {', '.join(LABEL_NAMES[:-1])} or {LABEL_NAMES[-1]}; "
        "name one with DatasetSource(dataset, columns={'label': '…'})"
    )


def _notes(left_out: Mapping[str, str]) -> list[str]:
    if not left_out:
        return []
    shown = (f"{name} ({why})" for name, why in left_out.items())
    return [f"skipped {counted(len(left_out), 'column')}: {listed(shown, 5)}"]


# ------------------------------------------------------------------------------------ any data set


def _names(dataset: Any, key: str | Sequence[str] | None) -> list[str]:
    """Return the names of the samples."""
    if key is None:
        return [str(index) for index in range(len(dataset))]
    if not isinstance(key, str):
        if len(key) != len(dataset):
            raise ValueError(f"key: {len(key):,} names are given for {len(dataset):,} samples.")
        return [str(name) for name in key]
    if key not in column_names(dataset):
        raise ValueError(
            f"key: {key!r} is no column of a Hugging Face data set. Give a list of the names."
        )
    return [str(name) for name in dataset.select_columns([key]).with_format(None)[key]]


def _numbered(names: Sequence[str]) -> dict[str, int]:
    return {name: number for number, name in enumerate(names)}


def _class_names(dataset: Any, label: str) -> list[str] | None:
    """Return the names of the classes, if they are where torchvision or Hugging Face have them."""
    names = getattr(dataset, "classes", None)
    if names is None:
        names = getattr(features_of(dataset).get(label), "names", None)
    if isinstance(names, str) or not isinstance(names, (Sequence, np.ndarray)):
        return None
    return [str(name) for name in names]


def _plain_image(image: Any) -> Any:
    """Return an image of a data set as `Record` has it."""
    image = unpacked(image)
    if is_tensor(image):
        return image.permute(1, 2, 0).numpy() if image.ndim == 3 else image.numpy()
    return image


def _is_list_of_texts(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim > 0 and value.dtype.kind == "U"
    is_list = isinstance(value, (list, tuple)) and len(value) > 0
    return is_list and all(isinstance(each, str) for each in value)


def _column(name: object, value: Any) -> Column:
    """Return type and shape of a value. A single number becomes int64 or float64."""
    if is_picture(value):
        own_name = "mask" if name == "label" else name
        raise SourceError(
            f"Entry {name!r:.80} of the samples is a picture. Store it with masks=[{own_name!r}] "
            f"or arrays=[{own_name!r}], or leave it out: DatasetSource(dataset, columns=[…])."
        )
    try:
        array = np.asarray(value)
    except Exception as error:  # of lists of different lengths, or a tensor on a device
        raise SourceError(
            f"Column {name!r:.80} is not a number or an array of numbers: "
            f"{describe_error(error):.500}"
        ) from error
    if array.dtype.kind not in "biuf":
        raise SourceError(
            f"Column {name!r:.80} is not a number or an array of numbers, but "
            f"{type(value).__name__} {value!r:.40}. Turn it into numbers, or leave it out."
        )
    if array.ndim == 0:
        return Column("<f8" if array.dtype.kind == "f" else "<i8")
    return Column(array.dtype.newbyteorder("<").str, array.shape)
