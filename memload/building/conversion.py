"""Converts one record to the bytes of its row, and computes what the journal keeps of it.

`Settings` decode and resize pictures. `MaskSettings` do so with masks that are built by themselves.
`ArraySettings` store arrays as they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from memload.building.decoders import (
    DECODERS,
    MAX_PIXELS,
    MODES,
    Decoder,
    Mode,
    Picture,
    loaded_libraries,
    parse_color,
)
from memload.building.extra_arrays import (
    ExtraArray,
    ExtraRow,
    Frame,
    MaskType,
    convert_arrays,
    read_mask,
    with_type,
)
from memload.building.files import NO_FILE, read_value
from memload.building.notes import (
    ENLARGED,
    FLATTENED,
    MORE_BANDS,
    MORE_PAGES,
    REDUCED,
    REDUCED_COLORS,
    TURNED_WITH_MASK,
)
from memload.building.resizing import (
    FITS,
    INTERPOLATIONS,
    Fit,
    Interpolation,
    Placement,
    move_boxes,
    place_mask,
    resize,
    turn_points,
    turn_size,
)
from memload.building.sources.record import FileState, Record, Source
from memload.building.stored_values import read_array
from memload.errors import DecodeError
from memload.storage.format import DESCRS, FLAG_FALLBACK, FLAG_ORIENTED, FLAG_OUTSIDE


class Row(NamedTuple):
    """The pixels of a record, row-major ``H × W × C``, and what the journal keeps of it.

    ``file_state`` shows a later build whether the file has changed.
    """

    pixels: bytes
    flags: int
    source_size: tuple[int, int]  #: width and height of the image in its file
    total: np.ndarray  #: the sum of the pixels, one number a channel
    squares: np.ndarray  #: the sum of their squares, see `record_type`
    columns: Mapping[str, Any]
    file_state: FileState = NO_FILE
    remarks: int = 0  #: what a note is to count it for, see `memload.building.notes`
    value_range: tuple[int, int] = (0, 0)  #: of a picture whose depth was reduced, before that
    extra_arrays: Sequence[ExtraRow] = ()  #: the rows of the masks and other arrays


# ---------------------------------------------------------------------------------------- pictures


_CHOICES = {
    "fit": FITS,
    "interpolation": INTERPOLATIONS,
    "mode": MODES,
    "decoder": DECODERS,
}

# The sums of a channel's values and of their squares are products with its histogram. All numbers
# are integers below 2⁵³, so float64 is exact. It takes 4 µs, and int64 65.
_LEVELS = np.arange(256, dtype=np.float64)
_POWERS = np.stack([_LEVELS, _LEVELS * _LEVELS], axis=1)


@dataclass
class Settings:
    """Everything that decides what pixels a picture becomes. ``size`` is (height, width).

    ``extra_arrays`` are the masks and other arrays that are stored beside the pictures.

    Raises ValueError, and DependencyError if a library is missing.
    """

    size: tuple[int, int] = (256, 256)
    fit: Fit = "crop"
    interpolation: Interpolation = "bilinear"
    mode: Mode = "RGB"
    decoder: str = "pillow"
    fast: bool = False
    strict: bool = False
    exif: bool = True
    background: str = "white"
    fill: str = "black"
    max_pixels: int = MAX_PIXELS
    extra_arrays: tuple[ExtraArray, ...] = ()

    def __post_init__(self) -> None:
        _check_options(**{name: getattr(self, name) for name in (*_CHOICES, "size", "max_pixels")})
        self._fill = parse_color(self.fill, "fill")
        self._decoder = Decoder(
            self.decoder,
            mode=self.mode,
            background=self.background,
            exif=self.exif,
            max_pixels=self.max_pixels,
            strict=self.strict,
        )

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape (H, W, C) of a stored picture."""
        return (*self.size, 3 if self.mode == "RGB" else 1)

    @property
    def descr(self) -> str:
        """The element type of a stored picture."""
        return "<u2" if self.mode == "I;16" else "|u1"

    def as_dict(self) -> dict[str, Any]:
        """Return the settings for the index, which is JSON. It names what resizes: Pillow."""
        options = asdict(self)
        del options["extra_arrays"]
        options |= {"resizer": "pillow", "size": list(self.size)}
        return options | _mask_options(self.extra_arrays)

    def libraries(self) -> dict[str, str]:
        """Return name and version of the libraries that take part."""
        return loaded_libraries(self.decoder, strict=self.strict)

    def convert(self, record: Record, points: Sequence[str], boxes: Sequence[str] = ()) -> Row:
        """Return the row of a record. ``points`` and ``boxes`` are names of its columns.

        Raises DecodeError, and whatever Pillow's resizing raises.
        """
        data, file_state = self._read(record.image)
        picture = self._decoder.open(data, self._draft if self.fast else None)
        upright_size = turn_size(picture.size, picture.orientation)
        placement = Placement.of(upright_size, self.size[::-1], self.fit)
        resized = resize(
            picture.image,
            placement,
            interpolation=self.interpolation,
            fill=self._fill,
            box=picture.box if self.fast else None,
        )
        frame = Frame(picture.size, picture.orientation, placement)
        columns, flags = _move_columns(record.columns, points, boxes, frame)
        flags |= FLAG_ORIENTED * (picture.orientation > 1) | FLAG_FALLBACK * picture.used_fallback
        pixels, total, squares = _pixels_and_sums(resized)
        return Row(
            pixels,
            flags,
            picture.size,
            total,
            squares,
            columns,
            file_state,
            _remarks(picture, placement) | TURNED_WITH_MASK * self._turns_mask(record, picture),
            picture.losses.reduced_range or (0, 0),
            convert_arrays(self.extra_arrays, record, frame, self.max_pixels),
        )

    def _turns_mask(self, record: Record, picture: Picture) -> bool:
        """Say whether a mask is turned that may have been drawn upright: it has the same size."""
        masks = [array.name for array in self.extra_arrays if array.kind == "mask"]
        has_mask = any(record.arrays.get(name) is not None for name in masks)
        upright_size = turn_size(picture.size, picture.orientation)
        return has_mask and picture.orientation > 1 and upright_size == picture.size

    def _read(self, image: Any) -> tuple[bytes | Image.Image, FileState]:
        """Return an image for the decoder, and the state of its file."""
        data, file_state = read_value(image, self.max_pixels)
        return _to_image(data) if isinstance(data, np.ndarray) else data, file_state

    def _draft(self, size: tuple[int, int]) -> tuple[int, int]:
        width, height = Placement.of(size, self.size[::-1], self.fit).resized
        return 2 * width, 2 * height


def _check_options(size: tuple[int, int], max_pixels: int, **choices: str) -> None:
    """Raise ValueError for a wrong option."""
    for name, value in choices.items():
        if value not in _CHOICES[name]:
            raise ValueError(f"{name} must be one of {', '.join(_CHOICES[name])}, not {value!r}")
    if not all(0 < side <= 65535 for side in size):
        raise ValueError(f"size must be a height and a width from 1 to 65535, not {size}")
    if max_pixels < 1:
        raise ValueError(f"max_pixels must be 1 or more, not {max_pixels}")


def _pixels_and_sums(image: Image.Image) -> tuple[bytes, np.ndarray, np.ndarray]:
    """Return the bytes of a resized picture, and ``total`` and ``squares`` (see `Row`)."""
    if image.mode == "F":
        values = np.rint(np.asarray(image)).clip(0, 65535).astype("<u2")
        return values.tobytes(), *_sums(values.reshape(-1, 1))
    return image.tobytes(), *_sums_of_picture(image)


def _sums_of_picture(image: Image.Image) -> tuple[np.ndarray, np.ndarray]:
    counts = np.array(image.histogram(), np.float64).reshape(-1, 256)
    total, squares = (counts @ _POWERS).T.astype(np.uint64)
    return total, squares


def stored_sums(pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return ``total`` and ``squares`` (see `Row`) of a stored image ``(H, W, C)``."""
    channels = pixels.shape[2]
    if pixels.dtype == np.uint8 and channels in (1, 3, 4):  # 25 times as fast
        return _sums_of_picture(Image.fromarray(pixels[:, :, 0] if channels == 1 else pixels))
    return _sums(pixels.reshape(-1, channels))


def _remarks(picture: Picture, placement: Placement) -> int:
    losses = picture.losses
    is_gray = losses.reduced_range is not None and not losses.is_color
    return (
        ENLARGED * placement.enlarges
        | FLATTENED * losses.is_flattened
        | REDUCED * is_gray
        | REDUCED_COLORS * losses.is_color
        | MORE_BANDS * losses.has_more_bands
        | MORE_PAGES * losses.has_more_pages
    )


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


# ------------------------------------------------------------------------------------------- masks


@dataclass(frozen=True)
class MaskSettings:
    """How masks that are built by themselves are stored, to be joined to images later.

    Ids are kept as in masks beside images (see `ExtraArray`), with nearest neighbor. ``size`` is
    (height, width), ``fill`` the id of the margin, and ``descr`` the type of all masks, uint8 or
    uint16. Raises ValueError.
    """

    size: tuple[int, int] = (256, 256)
    fit: Fit = "crop"
    fill: int = 255
    descr: str = "|u1"
    max_pixels: int = MAX_PIXELS
    extra_arrays: tuple[ExtraArray, ...] = ()

    def __post_init__(self) -> None:
        _check_options(self.size, self.max_pixels, fit=self.fit)

    def of(self, source: Source, index: int) -> tuple["MaskSettings", bool]:
        """Return these settings with the type of a record, and whether the type is certain.

        Raises DecodeError if it is no mask.
        """
        ids, _ = read_mask(source[index].image, self.max_pixels)
        descr, is_certain = MaskType.of(ids)
        return replace(self, descr=descr), is_certain

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape (H, W, 1) of a stored mask."""
        return (*self.size, 1)

    def as_dict(self) -> dict[str, Any]:
        """Return the settings for the index, which is JSON."""
        options = {
            "mode": "mask",
            "size": list(self.size),
            "fit": self.fit,
            "mask_fill": self.fill,
            "max_pixels": self.max_pixels,
        }
        return options | _mask_options(self.extra_arrays)

    def libraries(self) -> dict[str, str]:
        """Return name and version of the libraries that take part."""
        return loaded_libraries()

    def convert(self, record: Record, points: Sequence[str], boxes: Sequence[str] = ()) -> Row:
        """Return the row of a record. ``points`` and ``boxes`` are names of its columns.

        The EXIF orientation of a mask is ignored. Raises DecodeError.
        """
        ids, file_state = read_mask(record.image, self.max_pixels)
        ids = with_type(ids, self.descr)
        height, width = ids.shape
        placement = Placement.of((width, height), self.size[::-1], self.fit)
        frame = Frame((width, height), 1, placement)
        placed = place_mask(ids, 1, placement, self.fill).reshape(self.shape)
        columns, flags = _move_columns(record.columns, points, boxes, frame)
        return Row(
            placed.tobytes(),
            flags,
            frame.size,
            *stored_sums(placed),
            columns,
            file_state,
            ENLARGED * placement.enlarges,
            extra_arrays=convert_arrays(self.extra_arrays, record, frame, self.max_pixels),
        )


# ------------------------------------------------------------------------------------------ arrays

_TYPES = ", ".join(np.dtype(descr).name for descr in DESCRS)


@dataclass(frozen=True)
class ArraySettings:
    """What all arrays of a build have in common: shape (H, W, C) and element type."""

    shape: tuple[int, int, int]
    descr: str
    extra_arrays: tuple[ExtraArray, ...] = ()
    max_pixels: int = MAX_PIXELS  #: of a mask or a further picture

    @classmethod
    def of(cls, source: Source, index: int) -> "ArraySettings":
        """Return shape and type of a record. Raises DecodeError if it is no array to be stored."""
        array, _ = _as_stored(source[index].image, cls.max_pixels)
        height, width, channels = array.shape
        return cls((height, width, channels), array.dtype.str)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return self.shape[:2]

    def as_dict(self) -> dict[str, Any]:
        """Return the settings for the index, which is JSON."""
        height, width, channels = self.shape
        dtype = np.dtype(self.descr).name
        options = {"mode": "array", "size": [height, width], "channels": channels, "dtype": dtype}
        return options | _mask_options(self.extra_arrays)

    def libraries(self) -> dict[str, str]:
        """Return name and version of the library that takes part."""
        return {"numpy": np.__version__}

    def convert(self, record: Record, points: Sequence[str], boxes: Sequence[str] = ()) -> Row:
        """Return the row of a record, whose values do not change. Raises DecodeError.

        Boxes are clipped. ``points`` and ``boxes`` are names of its columns.
        """
        pixels, file_state = _as_stored(record.image, self.max_pixels)
        if (pixels.shape, pixels.dtype.str) != (self.shape, self.descr):
            raise DecodeError(
                f"the array is {pixels.shape} of {pixels.dtype.name}, but the first one is "
                f"{self.shape} of {np.dtype(self.descr).name}"
            )
        height, width = self.size
        size = width, height
        frame = Frame(size, 1, Placement(size, size, size, 0, 0))
        columns, flags = _move_columns(record.columns, points, boxes, frame)
        return Row(
            pixels.tobytes(),
            flags,
            size,
            *stored_sums(pixels),
            columns,
            file_state,
            extra_arrays=convert_arrays(self.extra_arrays, record, frame, self.max_pixels),
        )


def _as_stored(image: Any, max_pixels: int) -> tuple[np.ndarray, FileState]:
    """Return an array as it is stored, and the state of its .npy file if it is from one.

    It is ``(H, W, C)``, contiguous and little-endian.
    """
    is_npy = isinstance(image, Path) and image.suffix == ".npy"
    if not (is_npy or isinstance(image, np.ndarray)):
        raise DecodeError(
            "mode 'array' stores NumPy arrays and tensors and decodes nothing, but this is "
            f"{type(image).__name__}"
        )
    array, file_state = read_array(image, max_pixels)
    descr = array.dtype.newbyteorder("<").str
    if descr not in DESCRS or array.ndim not in (2, 3) or not array.size:
        raise DecodeError(
            f"an array of {array.dtype.name} and shape {array.shape} cannot be stored. Convert it "
            f"to (H, W) or (H, W, C) of one of {_TYPES}"
        )
    return np.ascontiguousarray(array, descr).reshape(*array.shape[:2], -1), file_state


def _sums(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return ``total`` and ``squares`` (see `Row`) of values ``(H × W, C)``."""
    if values.dtype.kind == "u":  # 64 bits hold the squares of up to 2³² pixels of 16 bits
        integers = values.astype(np.uint64)
        return integers.sum(axis=0), (integers * integers).sum(axis=0)
    with np.errstate(all="ignore"):  # sums of NaN and infinities are NaN and infinities
        floats = values.astype(np.float64)
        total = floats.sum(axis=0)
        return total, np.square(floats - total / len(floats)).sum(axis=0)


# --------------------------------------------------------------------------------------------- all

#: How the records of a build are converted.
AnySettings = Settings | MaskSettings | ArraySettings


def _mask_options(arrays: Sequence[ExtraArray]) -> dict[str, Any]:
    """Return what the settings say of masks; nothing if there are none."""
    masks = [array for array in arrays if array.kind == "mask"]
    if not masks:
        return {}
    missing = "fill" if masks[0].fills_missing else "reject"
    return {"mask_fill": masks[0].fill, "missing_masks": missing}


def _move_columns(
    columns: Mapping[str, Any], points: Sequence[str], boxes: Sequence[str], frame: Frame
) -> tuple[dict[str, Any], int]:
    """Return the columns, with points and boxes where they are in the stored picture, and flags.

    The flag is FLAG_OUTSIDE if a point is outside.
    """
    moved, flags = dict(columns), 0
    for name in points:
        source_points = np.asarray(columns[name], np.float64)
        source_points = turn_points(source_points, frame.size, frame.orientation)
        moved[name] = frame.placement.points(source_points)
        flags |= FLAG_OUTSIDE * _any_outside(moved[name], frame.placement.target)
    for name in boxes:
        moved[name] = move_boxes(columns[name], *frame)
    return moved, flags


def _any_outside(points: np.ndarray, size: tuple[int, int]) -> bool:
    """Return whether a point of ``(k, 2)`` lies outside a picture of ``size`` (width, height)."""
    is_inside = (points >= -0.5) & (points < np.array(size) - 0.5)
    return not bool(is_inside.all())  # NaN is nowhere, and so outside
