"""The JSON objects beside the images of a tar, as columns."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from memload.building.sources.columns import ColumnCollector, number_texts
from memload.building.sources.entries import BoxColumns
from memload.building.sources.names import BOX_NAMES
from memload.errors import DecodeError, SourceError
from memload.storage.format import RESERVED


class Sample(Protocol):
    """A sample of a tar."""

    @property
    def name(self) -> str:
        """The name of the image."""

    @property
    def json(self) -> str | None:
        """The text of its JSON file, if there is one."""


def add_json(
    columns: ColumnCollector,
    samples: Sequence[Sample],
    points: Sequence[str],
    boxes: Mapping[str, int],
) -> None:
    """Add the entries of the samples' JSON objects: numbers, texts, and lists of one shape.

    ``points`` are the names of entries with points, and ``boxes`` maps those with boxes to the most
    that a sample has. Raises SourceError.
    """
    found = _entries(samples)
    if all(type(key) is str for key in found.get("key", [None])):
        columns.keys = found.pop("key")
    if lost := [name for name in (*points, *boxes) if name not in found]:
        argument = "points" if lost[0] in points else "boxes"
        raise SourceError(
            f"{argument}: the JSON files have no entry {lost[0]!r:.80}, only {sorted(found)}. Name "
            "one of them."
        )
    for name in points:
        _add_points(columns, name, found.pop(name))
    if boxes:
        _add_boxes(columns, BoxColumns(boxes), found, samples)
    names = found.get("label", [])
    if None not in names and names and _name_classes(columns, names):
        del found["label"]
    for name, values in found.items():
        if name in columns.values or name in RESERVED or "/" in name:
            columns.skip(name, "its name is taken")
            continue
        if name in BOX_NAMES and any(isinstance(value, list) for value in values):
            columns.notes.append(
                f"boxes in {name!r} do not move with their images; --boxes {name}=100 names them, "
                "with the most that a sample has"
            )
        texts = [value or "" for value in values if value is None or isinstance(value, str)]
        if name == "label" and len(texts) == len(values) and any(texts):
            columns.add_labels(texts)
        else:
            columns.add_values(name, values)


def _entries(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """Return the values of all samples by the names of entries. None is missing."""
    found: dict[str, list[Any]] = {}
    for number, sample in enumerate(samples):  # not a list of all objects: it takes 0.4 KB a sample
        for name, value in _parse(sample).items():
            if name not in found:
                found[name] = [None] * len(samples)
            found[name][number] = value
    return found


def _add_points(columns: ColumnCollector, name: str, values: Sequence[Any]) -> None:
    """Add points. All samples have as many as the first one that has any."""
    points = [_points(value) for value in values]
    shape = next((array.shape for array in points if array is not None), None)
    if shape is None:
        raise SourceError(f"points: {name!r:.80} is not a list of x, y in any JSON. Leave it out.")
    filled = np.full((len(values), *shape), np.nan, np.float32)
    for number, array in enumerate(points):
        if array is not None and array.shape == shape:
            filled[number] = array
        else:
            reason = f"its {name!r:.80} is no list of {shape[0]} points x, y"
            columns.unusable.setdefault(number, reason)
    columns.add(name, filled, points=True)


def _points(value: Any) -> np.ndarray | None:
    """Return a list of x, y as float32 ``(k, 2)``, or None for anything else."""
    try:
        array = np.array(value, np.float32)
    except (TypeError, ValueError):
        return None
    return array if array.ndim == 2 and array.shape[1] == 2 else None


def _add_boxes(
    columns: ColumnCollector,
    boxes: BoxColumns,
    found: dict[str, list[Any]],
    samples: Sequence[Sample],
) -> None:
    """Add boxes and what has an item for each of them. These are taken out of ``found``."""
    rows = [dict(zip(found, values, strict=True)) for values in zip(*found.values(), strict=True)]
    counts = [_number_of_boxes(boxes, row) for row in rows]
    known = [number for number, count in enumerate(counts) if count is not None]
    if not known:
        names = ", ".join(boxes.limits)
        raise SourceError(f"boxes: no sample has boxes that can be used in {names}. Check them.")
    by_count = sorted(known, key=lambda number: counts[number] or 0)
    boxes.learn([_lists(rows[by_count[-1]]), _lists(rows[by_count[0]])])
    columns.notes += boxes.notes()
    empty = boxes.padded(dict.fromkeys(found))
    padded = []
    for number, row in enumerate(rows):
        for name in boxes.limits:
            if row[name] is None and name not in _parse(samples[number]):
                columns.unusable.setdefault(number, f"it has no entry {name!r:.80}")
        try:
            padded.append(boxes.padded(row))
        except DecodeError as error:
            columns.unusable.setdefault(number, error.reason)
            padded.append(empty)
    for name in boxes.schema:
        columns.add(name, np.stack([row[name] for row in padded]), boxes=name in boxes.limits)
        del found[name]


def _number_of_boxes(boxes: BoxColumns, row: Mapping[str, Any]) -> int | None:
    try:
        return boxes.most(row)
    except DecodeError:  # then the sample is rejected
        return None


def _lists(row: Mapping[str, Any]) -> dict[str, list[Any] | None]:
    """Return the entries of a sample, and None for those that are no lists."""
    return {name: value if isinstance(value, list) else None for name, value in row.items()}


def _name_classes(columns: ColumnCollector, names: Sequence[Any]) -> bool:
    """Take texts for the names of the classes whose numbers are the labels, if they fit them.

    If some numbers have no sample, their names are unknown: number the sorted names anew.
    """
    labels = columns.values.get("label")
    if labels is None or labels.dtype.kind != "i" or not all(type(name) is str for name in names):
        return False
    name_of = dict(zip(labels.tolist(), names, strict=True))
    if [name_of[label] for label in labels.tolist()] != list(names):
        return False
    if len(set(name_of.values())) < len(name_of):
        return False
    if sorted(name_of) == list(range(len(name_of))):
        columns.classes = [name_of[number] for number in range(len(name_of))]
    else:
        columns.classes, columns.values["label"] = number_texts(names)
    return True


def has_label(sample: Sample) -> bool:
    """Return whether a sample has a label in its JSON."""
    return isinstance(_entry(sample, "label"), (str, int, float))


def has_key(sample: Sample) -> bool:
    """Return whether a sample has a key in its JSON, as `memload.export` writes it."""
    return _entry(sample, "key") is not None


def _entry(sample: Sample, name: str) -> Any:
    """Return an entry of a sample's JSON, or None."""
    if sample.json is None or f'"{name}"' not in sample.json:  # most often it need not be parsed
        return None
    return _parse(sample).get(name)


def _parse(sample: Sample) -> dict[str, Any]:
    """Return the entries of a sample's JSON. Raises SourceError."""
    try:
        entries = json.loads("{}" if sample.json is None else sample.json)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"The JSON beside {sample.name} cannot be read: {error}.") from error
    return entries if isinstance(entries, dict) else {}
