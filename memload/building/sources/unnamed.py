"""Boxes, masks and points among the entries of samples that are not named as such.

They would be stored as they are, in pixels of the file, while their images are resized and cropped.
"""

import contextlib
import io
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from memload.building.sources.entries import is_tensor, plain_array, unpacked
from memload.building.sources.names import BOX_NAMES, MASK_NAMES, POINT_NAMES
from memload.building.sources.record import Column
from memload.errors import SourceError
from memload.wording import counted, listed

_TO_KEEP_IT = (
    "To store it as it is, or to leave it out, name what is stored: "
    "DatasetSource(dataset, columns=[…])."
)


def check_no_boxes(samples: Iterable[Mapping[str, Any]], *, by_name: bool = False) -> None:
    """Raise SourceError if entries of the first samples are boxes.

    These are entries with such a name, torchvision's BoundingBoxes, and unless ``by_name`` those of
    the shape ``(k, 4)`` whose k differs. More samples than the first are read only where its shapes
    allow for boxes.
    """
    iterator = iter(samples)
    first = next(iterator)
    names = [name for name, value in first.items() if _may_be_boxes(name, value)]
    is_certain = {name: _is_called_boxes(name, first[name]) for name in names}
    names = [name for name in names if is_certain[name] or not by_name]
    if not names:
        return
    read = [first, *iterator]
    for name in names:
        counts = [
            1 if _shape(sample[name]) == (4,) else _shape(sample[name])[0]
            for sample in read
            if name in sample and _may_be_boxes(name, sample[name])
        ]
        is_uneven = len(counts) == len(read) and len(set(counts)) > 1
        if is_certain[name] or is_uneven:
            most = max(counts)
            raise SourceError(
                f"Entry {name!r:.80} of the samples has boxes, which would not move with their "
                f"images: up to {most:,} in {counted(len(read), 'sample')} at the start. Name it, "
                f"with the most of any sample: boxes={{{name!r}: {most or 100}}}. {_TO_KEEP_IT}"
            )


def check_no_dicts(samples: Iterable[Mapping[str, Any]]) -> None:
    """Raise SourceError if entries of the first samples are lists of dicts, as those of COCO are.

    More samples than the first are read only where it has an empty list.
    """
    iterator = iter(samples)
    first = next(iterator)
    lists = [name for name, value in first.items() if isinstance(value, (list, tuple))]
    others = iterator if any(not len(first[name]) for name in lists) else ()
    for sample in (first, *others):
        for name in lists:
            items = sample.get(name)
            if isinstance(items, (list, tuple)) and items and isinstance(items[0], Mapping):
                raise SourceError(
                    f"Entry {name!r:.80} of the samples is a list of dicts of "
                    f"{listed(items[0], 5)}, which cannot be stored. Let the data set return a "
                    "dict of lists: (image, {'boxes': […], 'labels': […]}). Boxes are x1, y1, x2, "
                    "y2, so x, y, width, height of COCO become [x, y, x + width, y + height]. Name "
                    "them, with the most of any sample: boxes={'boxes': 100}."
                )


def check_no_masks(image: Any, entries: Mapping[str, Any]) -> None:
    """Raise SourceError if an entry of a sample has the size of its image, as masks have.

    Where the size of the image is not known, the names and the number of dimensions decide.
    """
    shapes = {name: _shape(value) for name, value in entries.items()}
    shapes = {name: shape for name, shape in shapes.items() if len(shape) in (2, 3)}
    size = _size(image) if shapes else None
    for name, shape in shapes.items():
        is_mask = name in MASK_NAMES if size is None else size in (shape[:2], shape[-2:])
        if not is_mask:
            continue
        own_name = "mask" if name == "label" else name
        remedy = f"Name it: masks=[{own_name!r}], or arrays=[{own_name!r}] if it has no ids."
        if len(shape) == 3 and 1 not in (shape[0], shape[2]):
            remedy = (
                "If it has a mask for each object, make one mask of their numbers, such as "
                "(masks * np.arange(1, len(masks) + 1)[:, None, None]).max(0), and name it: "
                f"masks=[{own_name!r}]."
            )
        raise SourceError(
            f"Entry {name!r:.80} of the samples has the shape {shape}, as a mask, and would not "
            f"move with its image. {remedy} {_TO_KEEP_IT}"
        )


def notes_on_columns(schema: Mapping[str, Column]) -> Iterator[str]:
    """Yield notes on columns that may be points or boxes, and are stored as they are."""
    for name, column in schema.items():
        last = column.shape[-1:]
        if name in POINT_NAMES and last in ((2,), (3,)) and not column.points:
            remedy = f"points=[{name!r}] lets points (k, 2)"
        elif column.shape == (4,) and "box" in str(name).lower():
            remedy = f"boxes={{{name!r}: 1}} lets boxes"
        elif (
            last == (4,) and len(column.shape) == 2 and column.shape != (4, 4) and not column.boxes
        ):
            remedy = f"boxes={{{name!r}: {column.shape[0]}}} lets boxes"
        else:
            continue
        yield f"{name} is stored as it is; {remedy} move with their images"


def _is_called_boxes(name: str, value: Any) -> bool:
    return name in BOX_NAMES or type(value).__name__ == "BoundingBoxes"


def _may_be_boxes(name: str, value: Any) -> bool:
    """Return whether a value has the shape of boxes. A single box may be ``(4,)``."""
    shape = _shape(value)
    is_one = shape == (4,) and _is_called_boxes(name, value)
    return shape == (0,) or shape[1:] == (4,) or is_one


def _shape(value: Any) -> tuple[int, ...]:
    """Return the shape of numbers, or () for anything else."""
    if not isinstance(value, (list, tuple, np.ndarray)) and not is_tensor(value):
        return ()
    with contextlib.suppress(ValueError):  # lists of different lengths
        array = np.asarray(plain_array(value))
        return array.shape if array.dtype.kind in "biuf" else ()
    return ()


def _size(image: Any) -> tuple[int, int] | None:
    """Return height and width of an image of a data set, or None if they are not known."""
    image = unpacked(image)
    if is_tensor(image):
        return tuple(image.shape[-2:])
    if isinstance(image, np.ndarray):
        return image.shape[0], image.shape[1]
    with contextlib.suppress(Exception):  # it is rejected when its turn comes
        if isinstance(image, (bytes, Path)):
            with Image.open(io.BytesIO(image) if isinstance(image, bytes) else image) as opened:
                return opened.height, opened.width
        return image.height, image.width
    return None
