"""Masks, arrays, points and boxes among the entries of a data set's samples."""

import contextlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from PIL import Image

from memload.building.sources.record import Column
from memload.errors import DecodeError, SourceError
from memload.wording import listed

#: What fills up the items of a sample with fewer boxes than there is room for.
_NO_INTEGER, _NO_FLOAT = -1, np.nan


class ArrayEntries:
    """The entries of samples that are masks and other arrays, by the names of the arrays."""

    def __init__(
        self,
        masks: Sequence[str] | Mapping[str, str],
        arrays: Sequence[str] | Mapping[str, str],
    ) -> None:
        masks, arrays = _named(masks, "masks"), _named(arrays, "arrays")
        if twice := sorted({*masks} & {*arrays}):
            raise ValueError(f"arrays: {twice[0]!r} is among the masks, too. Leave one out.")
        self.entry_of = {**masks, **arrays}
        self.kinds: dict[str, Literal["mask", "array"]] = {
            name: "mask" if name in masks else "array" for name in self.entry_of
        }

    def values(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arrays of a sample as `Record` has them. Raises DecodeError."""
        return {
            name: plain_mask(entries[entry])
            if self.kinds[name] == "mask"
            else plain_array(entries[entry])
            for name, entry in self.entry_of.items()
            if entries.get(entry) is not None
        }

    def check(self, found: Mapping[str, Any], others: Iterable[str]) -> None:
        """Raise SourceError if the first sample has no such entry, or a number there.

        ``others`` are the names of its other entries.
        """
        for name, entry in self.entry_of.items():
            argument = f"{self.kinds[name]}s"
            if entry not in found:
                raise SourceError(
                    f"{argument}: the samples of the data set have no entry {entry!r:.80}, only "
                    f"{sorted([*found, *others])}. Name one of them."
                )
            value = found[entry]
            if isinstance(value, (bool, int, float)) or getattr(value, "shape", None) == ():
                raise SourceError(
                    f"{argument}: {entry!r:.80} is the number {value!r:.40} in the first sample, "
                    "and no array. Name another entry."
                )


def _named(names: Sequence[str] | Mapping[str, str], argument: str) -> dict[str, str]:
    """Return the entry of each array by the array's name."""
    if isinstance(names, str):
        raise TypeError(f"{argument} must be a list such as [{names!r}], not the text {names!r}.")
    named = dict(names) if isinstance(names, Mapping) else {name: name for name in names}
    if "label" in named or "image" in named:
        name = "label" if "label" in named else "image"
        raise ValueError(
            f"{argument}: an array cannot be named {name!r}. If samples are (image, target), name "
            f"the target as you like, such as {argument}=['{argument[:-1]}']."
        )
    return named


# ------------------------------------------------------------------------------------------ values


def is_tensor(value: Any) -> bool:
    """Return whether a value is a torch tensor. Torch is not imported."""
    return any(kind.__module__.partition(".")[0] == "torch" for kind in type(value).__mro__)


def is_picture(value: Any) -> bool:
    """Return whether a value is a PIL image, or a mask of torchvision's tv_tensors."""
    return isinstance(value, Image.Image) or type(value).__name__ == "Mask"


def plain_mask(value: Any) -> Any:
    """Return a mask as `Record` has it: an array ``(H, W)``, or a picture."""
    value = plain_array(value)
    if not isinstance(value, np.ndarray):
        return value
    if value.ndim == 3 and 1 in (value.shape[0], value.shape[2]):
        value = value[0] if value.shape[0] == 1 else value[:, :, 0]
    return value


def unpacked(value: Any) -> Any:
    """Return the bytes or the path of an image that Hugging Face has not decoded.

    Paths become `Path`. Everything else stays as it is.
    """
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    return Path(value) if isinstance(value, (str, os.PathLike)) else value


def plain_array(value: Any) -> Any:
    """Return an array, a picture, bytes or a path as `Record` has it."""
    value = unpacked(value)
    if is_tensor(value):
        return value.detach().cpu().numpy()
    return np.asarray(value) if isinstance(value, (list, tuple)) else value


# ------------------------------------------------------------------------------------------- boxes


class _PerBox(NamedTuple):
    """A column with one item for each box of a column of boxes."""

    boxes: str
    column: Column


class BoxColumns:
    """Columns of boxes, ``(K, 4)``, and those with one item for each box, all of them padded.

    ``limits`` maps the names of the columns of boxes to K. A sample has up to K boxes: ``(k, 4)``,
    x1, y1, x2, y2.
    """

    def __init__(self, limits: Mapping[str, int]) -> None:
        if not isinstance(limits, Mapping):
            raise TypeError(
                "boxes must be a mapping from names of entries to the most boxes of a sample, such "
                f"as {{'boxes': 100}}, not {limits!r:.80}."
            )
        for name, limit in limits.items():
            if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
                raise ValueError(
                    f"boxes: {name!r:.80} has {limit!r:.40}, but the most boxes that a sample has "
                    "are meant: a whole number from 1, such as boxes={'boxes': 100}."
                )
        self.limits = limits
        self._per_box: dict[str, _PerBox] = {}

    def most(self, columns: Mapping[str, Any]) -> int:
        """Return how many boxes a sample has in the column with the most."""
        return max((len(_boxes(name, columns[name])) for name in self.limits), default=0)

    def learn(self, samples: Sequence[Mapping[str, Any]], fixed: Collection[str] = ()) -> None:
        """Find the columns that have one item for each box in all of these samples.

        ``fixed`` are none of them, such as points.
        """
        for name, value in samples[0].items():
            try:
                values = _items(value)
            except ValueError:  # lists of different lengths, which are refused later
                continue
            is_fixed = name in self.limits or name in fixed or values.ndim == 0
            if is_fixed or values.dtype.kind not in "biuf":
                continue
            for boxes, limit in self.limits.items():
                counts = [_boxes(boxes, sample[boxes]).shape[:1] for sample in samples]
                if counts == [_items(sample.get(name)).shape[:1] for sample in samples]:
                    dtype = values.dtype.newbyteorder("<")
                    descr = dtype.str if dtype.kind in "if" else "<i8"
                    self._per_box[name] = _PerBox(boxes, Column(descr, (limit, *values.shape[1:])))
                    break

    @property
    def schema(self) -> dict[str, Column]:
        """The columns of boxes, and those with one item for each box."""
        boxes = {name: Column("<f4", (limit, 4), boxes=True) for name, limit in self.limits.items()}
        return boxes | {name: other.column for name, other in self._per_box.items()}

    def notes(self) -> Iterator[str]:
        """Yield a note that names the columns with one item for each box, if there are any."""
        if self._per_box:
            names = listed(self._per_box, 5)
            yield f"filled up with -1 or NaN beside {listed(self.limits, 3)}: {names}"

    def padded(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Return the columns of a sample, with NaN or -1 where it has no box. Raises DecodeError.

        The other columns stay as they are.
        """
        counts, filled = {}, dict(columns)
        for name, limit in self.limits.items():
            if name not in columns:
                raise DecodeError(f"it has no entry {name!r:.80}")
            boxes = _boxes(name, columns[name])
            counts[name] = len(boxes)
            if len(boxes) > limit:
                raise DecodeError(
                    f"it has {len(boxes):,} boxes in {name!r:.80}, and there is room for {limit:,}."
                    f" Raise it to the most that any sample has: boxes={{{name!r}: {len(boxes)}}} "
                    "or more"
                )
            filled[name] = _fill(boxes, Column("<f4", (limit, 4)))
        for name, (boxes_name, column) in self._per_box.items():
            value = columns.get(name)
            values = _items(value)
            count = counts[boxes_name]
            if len(values) != count or (count and values.shape[1:] != column.shape[1:]):
                raise DecodeError(
                    f"{name!r:.80} has the shape {values.shape}, and the sample has {count:,} boxes"
                )
            if count and values.dtype.kind == "f" and column.dtype[1] != "f":
                raise DecodeError(f"{name!r:.80} has fractions, and that of the first sample none")
            filled[name] = _fill(values, column)
        return filled


def _items(value: Any) -> np.ndarray:
    """Return an entry as an array. None has no items. In lists, as of JSON, None is NaN."""
    items = np.asarray(() if value is None else plain_array(value))
    if items.dtype.kind == "O":
        with contextlib.suppress(TypeError, ValueError):
            return items.astype(np.float64)
    return items


def _boxes(name: str, value: Any) -> np.ndarray:
    """Return the boxes of a sample, float32 ``(k, 4)``. Raises DecodeError and SourceError."""
    form = str(getattr(getattr(value, "format", None), "value", "XYXY"))  # of tv_tensors
    if form != "XYXY":
        raise SourceError(
            f"The boxes in {name!r:.80} are {form}, and XYXY is stored. Convert them in the data "
            "set: torchvision.transforms.v2.ConvertBoundingBoxFormat('XYXY')."
        )
    if isinstance(value, Mapping):
        raise SourceError(
            f"The boxes in {name!r:.80} are a dict of {listed(value, 5)}, and not a list. Give the "
            "boxes an entry of their own; for Hugging Face, dataset.flatten() does."
        )
    boxes = _items(value)
    if not boxes.size:
        return np.zeros((0, 4), np.float32)
    if boxes.shape == (4,):
        boxes = boxes[None]
    if boxes.ndim != 2 or boxes.shape[1] != 4 or boxes.dtype.kind not in "iuf":
        raise DecodeError(
            f"its boxes in {name!r:.80} are {boxes.dtype.name} of the shape {boxes.shape}, and not "
            "numbers of (k, 4)"
        )
    if (boxes[:, :2] > boxes[:, 2:]).any():
        first = boxes[(boxes[:, :2] > boxes[:, 2:]).any(axis=1)][0].tolist()
        raise DecodeError(
            f"its box {first} in {name!r:.80} is not x1, y1, x2, y2: it ends before it begins. If "
            "it is x, y, width, height, convert it"
        )
    return boxes.astype(np.float32)


def _fill(values: np.ndarray, column: Column) -> np.ndarray:
    filler = _NO_FLOAT if np.dtype(column.dtype).kind == "f" else _NO_INTEGER
    filled = np.full(column.shape, filler, column.dtype)
    if len(values):
        filled[: len(values)] = values
    return filled
