"""Masks, which go where the pixels of their image go, and other arrays, which stay as they are."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from PIL import Image

from memload.building.resizing import Placement
from memload.building.values import read_array
from memload.errors import DecodeError
from memload.storage.format import DESCRS_OF_ARRAYS

#: The id of the margin of a mask, where there is no image. Most losses leave it out.
MARGIN_ID = 255

#: Pillow's modes of pictures whose pixels have one whole number.
_ID_MODES = ("1", "L", "P", "I", "I;16", "I;16L", "I;16B")

_TYPES = ", ".join(np.dtype(descr).name for descr in DESCRS_OF_ARRAYS)


@dataclass(frozen=True)
class ExtraArray:
    """A mask or another array of all samples: what their rows have in common.

    The shape of a mask is the size (H, W) of the stored images. ``missing_id`` is the id of the
    whole mask of a sample that has none. If it is None, such a sample is rejected.
    ``is_black_and_white`` says whether the first mask has the ids 0 and 255, and no other.
    """

    name: str
    kind: Literal["mask", "array"]
    descr: str
    shape: tuple[int, ...]
    missing_id: int | None = None
    is_black_and_white: bool = False

    def __str__(self) -> str:
        return f"{self.shape} of {np.dtype(self.descr).name}"

    def seen_in(self, value: Any, max_pixels: int) -> "ExtraArray":
        """Return this array with the type and shape of a value as `Sample` has it.

        Masks of uint16 stay uint16. All others become uint8, unless an id is above 255: libraries
        often save small ids as int32 or int64. Raises DecodeError.
        """
        try:
            if self.kind == "array":
                stored = _as_stored(value, max_pixels)
                return replace(self, descr=stored.dtype.str, shape=stored.shape)
            ids = _read_mask(value, max_pixels)
        except DecodeError as error:
            raise self._named(error) from error
        is_deep = ids.dtype.itemsize > 1 and (ids.dtype.name == "uint16" or ids.max() > 255)
        return replace(
            self,
            descr="<u2" if is_deep else "|u1",
            is_black_and_white=np.unique(ids).tolist() == [0, 255],
        )

    def convert(self, value: Any, placement: Placement, max_pixels: int) -> np.ndarray:
        """Return the row of a value as `Sample` has it. Raises DecodeError, which names it."""
        try:
            if value is None and self.missing_id is not None:
                return np.full(self.shape, self.missing_id, self.descr)
            if value is None:
                remedy = ". Add it, or say --missing-masks 0" if self.kind == "mask" else ""
                raise DecodeError(f"it is missing{remedy}")
            if self.kind == "mask":
                return self._convert_mask(value, placement, max_pixels)
            array = _as_stored(value, max_pixels)
        except DecodeError as error:
            raise self._named(error) from error
        if (array.shape, array.dtype.str) != (self.shape, self.descr):
            raise self._named(
                DecodeError(
                    f"it is {array.shape} of {array.dtype.name}, but the first one is {self}. "
                    "Arrays are stored as they are. Masks of ids (--mask) are resized with their "
                    "images"
                )
            )
        return array

    def _convert_mask(self, value: Any, placement: Placement, max_pixels: int) -> np.ndarray:
        ids = _read_mask(value, max_pixels)
        if ids.shape[::-1] != placement.size:
            raise DecodeError(
                f"its size is {ids.shape[1]}×{ids.shape[0]}, but its image has "
                "{}×{} in its file. Save both in the same size".format(*placement.size)
            )
        if ids.dtype.itemsize > np.dtype(self.descr).itemsize:
            largest = ids.max()
            if largest > np.iinfo(self.descr).max:
                raise DecodeError(
                    f"its largest id is {largest:,}, but all masks are stored with 8 bits, as the "
                    "first ones need no more. Save the first one with 16 bits (uint16)"
                )
        return placement.mask(ids.astype(self.descr, copy=False), MARGIN_ID)

    def _named(self, error: DecodeError) -> DecodeError:
        return DecodeError(f"{self.kind} {self.name!r}: {error.reason}")


def _read_mask(value: Any, max_pixels: int) -> np.ndarray:
    """Return the ids of a mask, integers from 0 to 65,535 ``(H, W)``. Raises DecodeError."""
    array = read_array(value, max_pixels, _check_mode)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.ndim != 2 or array.dtype.kind not in "bui" or not array.size:
        raise DecodeError(
            f"{array.shape} of {array.dtype.name} is no mask, which has one whole number for each "
            "pixel. Convert it to uint8 or uint16 of (H, W). Of a mask for each object, make one "
            "of their numbers"
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
    if image.mode not in _ID_MODES:
        raise DecodeError(
            f"it has colors or floats (Pillow's mode {image.mode}), but a mask has one id for each "
            "pixel. Save it as a palette or gray PNG of ids"
        )


def _as_stored(value: Any, max_pixels: int) -> np.ndarray:
    """Return an array as it is stored, contiguous and little-endian."""
    array = read_array(value, max_pixels)
    descr = array.dtype.newbyteorder("<").str
    if descr not in DESCRS_OF_ARRAYS or not (array.size and array.ndim):
        raise DecodeError(
            f"{array.shape} of {array.dtype.name} cannot be stored. Convert it to one or more "
            f"numbers of {_TYPES}; a single number to the shape (1,)"
        )
    return np.ascontiguousarray(array, descr)
