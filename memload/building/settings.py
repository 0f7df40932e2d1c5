"""What decides on the rows of a build, and how one sample becomes its row."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from PIL import Image

from memload.building.decoders import DECODERS, MODES, Decoder, Mode, loaded_libraries, parse_color
from memload.building.extra_arrays import MARGIN_ID, ExtraArray
from memload.building.record import ENLARGED
from memload.building.resizing import (
    FITS,
    INTERPOLATIONS,
    Fit,
    Interpolation,
    Placement,
    resize,
)
from memload.building.values import read_array, read_value
from memload.errors import DecodeError
from memload.sources.contents import MAX_PIXELS
from memload.sources.samples import Sample
from memload.storage.format import DESCRS, FLAG_FALLBACK, FLAG_ORIENTED, FLAG_OUTSIDE

#: The settings of pictures apart from size and mode, which are arguments of `memload.build`, too.
PICTURE_SETTINGS = (
    *("fit", "interpolation", "decoder", "fast", "exif", "background", "fill", "max_pixels"),
)

_CHOICES: Mapping[str, Sequence[str]] = {
    "fit": FITS,
    "interpolation": INTERPOLATIONS,
    "mode": (*MODES, "array"),
    "decoder": DECODERS,
}
# The sums of a channel's values and of their squares are products with its histogram. All numbers
# are integers below 2⁵³, so float64 is exact.
_LEVELS = np.arange(256, dtype=np.float64)
_POWERS = np.stack([_LEVELS, _LEVELS * _LEVELS], axis=1)

_TYPES = ", ".join(np.dtype(descr).name for descr in DESCRS)


class Row(NamedTuple):
    """What a sample becomes, and what the journal keeps of it."""

    pixels: np.ndarray  #: ``(H, W, C)``
    sums: tuple[np.ndarray, np.ndarray]  #: ``total`` and ``squares``, see `record_type`
    flags: int
    source_size: tuple[int, int]  #: width and height of the image in its file
    columns: Mapping[str, Any]
    remarks: int  #: what was lost, a bit each: see `memload.building.record`
    extra_arrays: Sequence[np.ndarray]  #: the rows of the masks and other arrays


class Origin(NamedTuple):
    """What a data set of memload's knows of rows that are stored as they are."""

    settings: Mapping[str, Any]
    libraries: Mapping[str, str]
    flags: Sequence[int]  #: by row of the source
    crc32: Sequence[int]


@dataclass
class Settings:
    """What decides on the rows of a build. ``size`` is (height, width).

    In mode ``array``, arrays of ``channels`` and of the type ``descr`` are stored as they are, and
    nothing is decoded or resized. ``origin`` is that of the rows of a data set of memload's.
    ``extra_arrays`` are the masks and other arrays beside the images.

    Raises ValueError, and DependencyError if a library is missing.
    """

    size: tuple[int, int] = (256, 256)
    fit: Fit = "crop"
    interpolation: Interpolation = "bilinear"
    mode: Mode | Literal["array"] = "RGB"
    decoder: str = "pillow"
    fast: bool = False
    exif: bool = True
    background: str = "white"
    fill: str = "black"
    max_pixels: int = MAX_PIXELS
    channels: int = 0
    descr: str = ""
    origin: Origin | None = None
    extra_arrays: tuple[ExtraArray, ...] = ()

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")
        if not all(0 < side <= 65535 for side in self.size):
            raise ValueError(f"size must be a height and a width from 1 to 65535, not {self.size}")
        if self.max_pixels < 1:
            raise ValueError(f"max_pixels must be 1 or more, not {self.max_pixels}")
        self._fill = parse_color(self.fill, "fill")
        if self.mode != "array":
            self.channels = 3 if self.mode == "RGB" else 1
            self.descr = "<u2" if self.mode == "I;16" else "|u1"
            self._decoder = Decoder(
                self.decoder,
                mode=self.mode,
                background=self.background,
                exif=self.exif,
                max_pixels=self.max_pixels,
            )

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape (H, W, C) of a row."""
        return (*self.size, self.channels)

    def as_dict(self) -> dict[str, Any]:
        """Return the settings for the index, which is JSON: those with which rows were made."""
        known: dict[str, Any] = {
            "size": [*self.size],
            "channels": self.channels,
            "dtype": np.dtype(self.descr).name,
        }
        if self.origin is not None:
            known = {**self.origin.settings} or known
        elif self.mode == "array":
            known["mode"] = "array"
        else:
            known = {name: getattr(self, name) for name in ("mode", *PICTURE_SETTINGS)}
            # As all indexes have it: others could resize, and "strict" was an option once.
            known |= {"size": [*self.size], "resizer": "pillow", "strict": False}
        for array in self.extra_arrays:
            if array.kind == "mask":  # once, the margin and missing masks had the same id
                missing = {None: "reject", MARGIN_ID: "fill"}.get(
                    array.missing_id, array.missing_id
                )
                known = {"mask_fill": MARGIN_ID, "missing_masks": missing} | known
        return known

    def libraries(self) -> dict[str, str]:
        """Return name and version of the libraries that make the rows, as far as they are known."""
        if self.origin is not None:
            return dict(self.origin.libraries)
        if self.mode == "array":
            return {"numpy": np.__version__}
        return loaded_libraries(self.decoder)

    def convert(self, sample: Sample, points: Sequence[str], boxes: Sequence[str] = ()) -> Row:
        """Return the row of a sample. ``points`` and ``boxes`` are names of its columns.

        Raises DecodeError, and whatever Pillow's resizing raises.
        """
        read: Any = as_stored if self.mode == "array" else read_value
        image: Any = read(sample.image, self.max_pixels)
        size, flags, remarks = self.size[::-1], 0, 0
        is_array = isinstance(image, np.ndarray)
        if is_array and (image.shape, image.dtype.str) == (self.shape, self.descr):
            pixels, placement = np.ascontiguousarray(image), Placement(size, 1, size, size)
            both = sums(pixels)
        elif self.mode == "array":
            raise DecodeError(
                f"the array is {image.shape} of {image.dtype.name}, but the first one is "
                f"{self.shape} of {np.dtype(self.descr).name}"
            )
        else:
            image = _to_image(image) if is_array else image
            picture = self._decoder.open(image, self._draft if self.fast else None)
            placement = Placement.of(picture.size, size, self.fit, picture.orientation)
            resized = resize(picture.image, placement, self.interpolation, self._fill)
            pixels = np.asarray(resized)
            if resized.mode == "F":
                pixels = np.rint(pixels).clip(0, 65535).astype("<u2").reshape(self.shape)
                both = sums(pixels)
            else:
                pixels, both = pixels.reshape(self.shape), _sums_of_picture(resized)
            flags = FLAG_ORIENTED * (picture.orientation > 1)
            flags |= FLAG_FALLBACK * picture.used_fallback
            (width, height), (to_width, to_height) = placement.upright, placement.resized
            remarks = picture.remarks | ENLARGED * (to_width > width or to_height > height)
        columns = sample.columns
        if points or boxes:
            moved = {name: placement.points(columns[name]) for name in points}
            flags |= FLAG_OUTSIDE * any(_any_outside(each, size) for each in moved.values())
            columns = {**columns, **moved}
            columns |= {name: placement.boxes(columns[name]) for name in boxes}
        extra_arrays = [
            array.convert(sample.arrays.get(array.name), placement, self.max_pixels)
            for array in self.extra_arrays
        ]
        return Row(pixels, both, flags, placement.size, columns, remarks, extra_arrays)

    def _draft(self, size: tuple[int, int]) -> tuple[int, int]:
        width, height = Placement.of(size, self.size[::-1], self.fit).resized
        return 2 * width, 2 * height


def as_stored(image: Any, max_pixels: int) -> np.ndarray:
    """Return an array as it is stored in mode ``array``: ``(H, W, C)``, contiguous, little-endian.

    Raises DecodeError.
    """
    is_npy = isinstance(image, Path) and image.suffix == ".npy"
    if not (is_npy or isinstance(image, np.ndarray)):
        raise DecodeError(
            "mode 'array' stores NumPy arrays, tensors and .npy files and decodes nothing, but "
            f"this is {image.name if isinstance(image, Path) else type(image).__name__}"
        )
    array = read_array(image, max_pixels)
    descr = array.dtype.newbyteorder("<").str
    if descr not in DESCRS or array.ndim not in (2, 3) or not array.size:
        raise DecodeError(
            f"an array of {array.dtype.name} and shape {array.shape} cannot be stored. Convert it "
            f"to (H, W) or (H, W, C) of one of {_TYPES}"
        )
    return np.ascontiguousarray(array, descr).reshape(*array.shape[:2], -1)


def sums(pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return ``total`` and ``squares`` of a row ``(H, W, C)``, see `record_type`."""
    height, width, channels = pixels.shape
    if pixels.dtype == np.uint8:
        # float32 sums 256 squares of uint8 exactly, as they are below 2²⁴, and is the fastest.
        both = np.zeros((2, width * channels))
        for start in range(0, height, 256):
            values = pixels[start : start + 256].reshape(-1, width * channels).astype(np.float32)
            ones = np.ones(len(values), np.float32)
            both[0] += ones @ values
            both[1] += ones @ np.square(values, out=values)
        total, squares = both.reshape(2, width, channels).sum(axis=1).astype(np.uint64)
        return total, squares
    values = pixels.reshape(-1, channels)
    if values.dtype.kind == "u":  # 64 bits hold the squares of up to 2³² pixels of 16 bits
        values = values.astype(np.uint64)
        return values.sum(axis=0), (values * values).sum(axis=0)
    with np.errstate(all="ignore"):  # sums of NaN and infinities are NaN and infinities
        values = values.astype(np.float64)
        total = values.sum(axis=0)
        return total, np.square(values - total / len(values)).sum(axis=0)


def _sums_of_picture(image: Image.Image) -> tuple[np.ndarray, np.ndarray]:
    """Return the same for a picture of 8 bits, from its histogram, which is there sooner."""
    counts = np.array(image.histogram(), np.float64).reshape(-1, 256)
    total, squares = (counts @ _POWERS).T.astype(np.uint64)
    return total, squares


def _to_image(array: np.ndarray) -> Image.Image:
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    is_gray = array.ndim == 2 and array.dtype in (np.uint8, np.uint16) and array.dtype.isnative
    is_color = array.ndim == 3 and array.shape[2] in (3, 4) and array.dtype == np.uint8
    if not (is_gray or is_color):
        remedy = "Drop ToTensor() in the data set, or store floats" * (array.dtype.kind == "f")
        raise DecodeError(
            f"an array of {array.dtype} and shape {array.shape} is not a picture. Pictures are "
            "(H, W) or (H, W, 1, 3 or 4) of uint8, or (H, W) of uint16. "
            f"{remedy or 'Store others'} with mode='array'."
        )
    return Image.fromarray(array)


def _any_outside(points: np.ndarray, size: tuple[int, int]) -> bool:
    """Return whether a point of ``(k, 2)`` lies outside a picture of ``size`` (width, height)."""
    is_outside = (points < -0.5) | (points >= np.array(size) - 0.5)  # a missing one, NaN, is not
    return bool(is_outside.any())
