"""Masks, which go where the pixels of their image go, and other arrays, which stay as they are."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from PIL import Image

from memload.building.files import read_value
from memload.building.resizing import Placement, place_mask
from memload.building.stored_values import ID_MODES, decode_values, read_array
from memload.errors import DecodeError
from memload.sources.samples import Record
from memload.storage.format import DESCRS_OF_ARRAYS

#: The id of the margin of a mask, where there is no image. Most losses leave it out.
MARGIN_ID = 255

_TYPES = ", ".join(np.dtype(descr).name for descr in DESCRS_OF_ARRAYS)
_ALL_BYTES = bytes(range(256))


class Frame(NamedTuple):
    """Where an image went, so that its masks follow."""

    size: tuple[int, int]  #: width and height in its file
    orientation: int  #: the EXIF orientation from which it was turned upright
    placement: Placement


class ExtraRow(NamedTuple):
    """The row of a mask or another array, and what the journal keeps of it."""

    data: bytes
    ids: np.ndarray = np.zeros(0, np.uint8)  #: which ids occur, see `ExtraArray.bitmap_size`


@dataclass(frozen=True)
class ExtraArray:
    """A mask or another array of all samples: what their rows have in common.

    The shape of a mask is the size (H, W) of the stored images. ``missing_id`` is the id of the
    whole mask of a sample that has none. If it is None, such a sample is rejected.
    """

    name: str
    kind: Literal["mask", "array"]
    descr: str
    shape: tuple[int, ...]
    missing_id: int | None = None

    @property
    def bitmap_size(self) -> int:
        """How many bytes say which ids occur in a row: 32 for a mask of uint8, else 0.

        Id 0 is the highest bit of the first byte, as `numpy.packbits` has it.
        """
        return 32 if self.kind == "mask" and self.descr == "|u1" else 0

    def __str__(self) -> str:
        return f"{self.shape} of {np.dtype(self.descr).name}"

    def convert(self, value: Any, frame: Frame, max_pixels: int) -> ExtraRow:
        """Return the row of a value as `Record` has it. Raises DecodeError, which names it."""
        try:
            if value is None and self.missing_id is not None:
                return self._mask_row(np.full(self.shape, self.missing_id, self.descr))
            if value is None:
                remedy = ". Add it, or say --missing-masks 0" if self.kind == "mask" else ""
                raise DecodeError(f"it is missing{remedy}")
            if self.kind == "array":
                return self._convert_array(value, max_pixels)
            return self._convert_mask(value, frame, max_pixels)
        except DecodeError as error:
            raise DecodeError(f"{self.kind} {self.name!r}: {error.reason}") from error

    def _convert_array(self, value: Any, max_pixels: int) -> ExtraRow:
        array = _stored_array(value, max_pixels)
        if (array.shape, array.dtype.str) != (self.shape, self.descr):
            remedy = ". Arrays are stored as they are"
            if array.ndim == 2 and array.dtype.name in ("uint8", "uint16"):
                remedy += f"; --mask {self.name}=… resizes them with their images"
            raise DecodeError(
                f"it is {array.shape} of {array.dtype.name}, but the first one is {self}{remedy}"
            )
        return ExtraRow(array.tobytes())

    def _convert_mask(self, value: Any, frame: Frame, max_pixels: int) -> ExtraRow:
        mask = read_mask(value, max_pixels)
        _check_size(mask.shape[::-1], frame)
        mask = _with_type(mask, self.descr)
        return self._mask_row(place_mask(mask, frame.orientation, frame.placement, MARGIN_ID))

    def _mask_row(self, mask: np.ndarray) -> ExtraRow:
        data = mask.tobytes()
        return ExtraRow(data, _occurring_bits(data)[: self.bitmap_size])


def convert_arrays(
    arrays: Sequence[ExtraArray], record: Record, frame: Frame, max_pixels: int
) -> list[ExtraRow]:
    """Return the rows of a record's masks and other arrays. Raises DecodeError."""
    return [array.convert(record.arrays.get(array.name), frame, max_pixels) for array in arrays]


def look_at_array(array: ExtraArray, value: Any, max_pixels: int) -> ExtraArray:
    """Return an array with the type and shape of a value as `Record` has it. Raises DecodeError.

    Masks of uint16 stay uint16. All others become uint8, unless an id is above 255: libraries often
    save small ids as int32 or int64.
    """
    try:
        if array.kind == "mask":
            ids = read_mask(value, max_pixels)
            is_deep = ids.dtype.itemsize > 1 and (ids.dtype.name == "uint16" or ids.max() > 255)
            return replace(array, descr="<u2" if is_deep else "|u1")
        stored = _stored_array(value, max_pixels)
        return replace(array, descr=stored.dtype.str, shape=stored.shape)
    except DecodeError as error:
        raise DecodeError(f"{array.kind} {array.name!r}: {error.reason}") from error


def read_mask(value: Any, max_pixels: int) -> np.ndarray:
    """Return the ids of a mask, integers from 0 to 65,535 ``(H, W)``. Raises DecodeError.

    Those of a picture are bool, uint8 or uint16, and those of an array are of its type.
    """
    data = read_value(value, max_pixels)
    if not isinstance(data, np.ndarray):
        data = decode_values(data, max_pixels, _check_mode)
    return _checked_ids(data)


def _with_type(ids: np.ndarray, descr: str) -> np.ndarray:
    """Return ids with the type of all masks. Raises DecodeError if it is too small."""
    largest = np.iinfo(descr).max
    if ids.dtype.itemsize > np.dtype(descr).itemsize and ids.max() > largest:
        raise DecodeError(
            f"its largest id is {ids.max():,}, but all masks are stored with 8 bits, as the first "
            "ones need no more, and so with ids up to 255. Save the first one with 16 bits (uint16)"
        )
    return ids.astype(descr, copy=False)


def _stored_array(value: Any, max_pixels: int) -> np.ndarray:
    """Return an array as it is stored, contiguous and little-endian."""
    array = read_array(value, max_pixels)
    descr = array.dtype.newbyteorder("<").str
    if not array.ndim:
        raise DecodeError("it is a single number without a shape. Save it with the shape (1,)")
    if descr not in DESCRS_OF_ARRAYS or not array.size:
        raise DecodeError(
            f"{array.shape} of {array.dtype.name} cannot be stored. Convert it to one or more "
            f"numbers of {_TYPES}"
        )
    return np.ascontiguousarray(array, descr)


def _checked_ids(array: np.ndarray) -> np.ndarray:
    """Return a mask as ``(H, W)``. Raises DecodeError if it has no ids from 0 to 65,535."""
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.ndim != 2 or array.dtype.kind not in "bui" or not array.size:
        objects = ". If it has a mask for each object, make one of their numbers" * (
            array.ndim == 3 and array.dtype.kind in "bui"
        )
        raise DecodeError(
            f"{array.shape} of {array.dtype.name} is no mask, which has one whole number for each "
            f"pixel. Convert it to uint8 or uint16 of (H, W){objects}"
        )
    if array.dtype.name not in ("bool", "uint8", "uint16"):
        low, high = int(array.min()), int(array.max())
        if low < 0 or high > 65535:
            raise DecodeError(
                f"its ids go from {low:,} to {high:,}, but a mask has ids from 0 to 65,535. Give "
                "others an id of their own, such as 255 in place of -1"
            )
    return array


def _check_mode(image: Image.Image) -> None:
    """Raise DecodeError for a picture whose pixels are no ids."""
    if image.format == "JPEG":
        raise DecodeError("a JPEG, in which ids are not exact. Save it as a palette or gray PNG")
    if image.mode not in ID_MODES:
        content = "floats" if image.mode == "F" else "colors"
        raise DecodeError(
            f"it has {content} (Pillow's mode {image.mode}), but a mask has one id for each pixel. "
            "Save it as a palette or gray PNG of ids"
        )


def _check_size(size: tuple[int, int], frame: Frame) -> None:
    if size == frame.size:
        return
    (width, height), (image_width, image_height) = size, frame.size
    turned = ""
    if frame.orientation > 1:
        turned = f" in its file, before EXIF orientation {frame.orientation} turns it"
    raise DecodeError(
        f"its size is {width}×{height}, but its image has {image_width}×{image_height}{turned}. "
        "Save both in the same size"
    )


def _occurring_bits(data: bytes) -> np.ndarray:
    """Return a bit for each byte: whether it occurs. It takes 25 µs for 256×256."""
    occurs = np.ones(256, np.uint8)
    occurs[list(_ALL_BYTES.translate(None, data))] = 0
    return np.packbits(occurs)
