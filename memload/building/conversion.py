"""Converts one record to the bytes of its row, and computes what the journal keeps of it.

`Settings` decode and resize pictures. `ArraySettings` store arrays as they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from memload.building.decoders import (
    DECODERS,
    MAX_PIXELS,
    MODES,
    Decoder,
    Picture,
    loaded_libraries,
    parse_color,
)
from memload.building.extra_arrays import ExtraArray, ExtraRow, Frame, read_mask
from memload.building.files import NO_FILE, read_file
from memload.building.notes import (
    ENLARGED,
    FLATTENED,
    MORE_BANDS,
    MORE_PAGES,
    REDUCED,
    REDUCED_COLORS,
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
from memload.building.stored_values import decode_values
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
    arrays: Sequence[ExtraRow] = ()  #: the rows of the masks and other arrays


# ---------------------------------------------------------------------------------------- pictures


_CHOICES = {
    "fit": FITS,
    "interpolation": INTERPOLATIONS,
    "mode": (*MODES, "mask"),
    "decoder": DECODERS,
}
#: The id beyond a mask that is built by itself, as that beside images by default.
_MASK_FILL = 255


# The sums of a channel's values and of their squares are products with its histogram. All numbers
# are integers below 2⁵³, so float64 is exact. It takes 4 µs, and int64 65.
_LEVELS = np.arange(256, dtype=np.float64)
_POWERS = np.stack([_LEVELS, _LEVELS * _LEVELS], axis=1)


@dataclass
class Settings:
    """Everything that decides what pixels a picture becomes. ``size`` is (height, width).

    ``arrays`` are the masks and other arrays that are stored beside the pictures. With mode "mask",
    the pictures themselves are masks, to be joined to images later: their ids are kept as
    `ExtraArray` keeps them, with nearest neighbor, and the options for colors do not apply.

    Raises ValueError, and DependencyError if a library is missing.
    """

    size: tuple[int, int] = (256, 256)
    fit: Fit = "crop"
    interpolation: Interpolation = "bilinear"
    mode: str = "RGB"
    decoder: str = "pillow"
    fast: bool = False
    strict: bool = False
    exif: bool = True
    background: str = "white"
    fill: str = "black"
    max_pixels: int = MAX_PIXELS
    arrays: tuple[ExtraArray, ...] = ()

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")
        if not all(0 < side <= 65535 for side in self.size):
            raise ValueError(f"size must be a height and a width from 1 to 65535, not {self.size}")
        if self.max_pixels < 1:
            raise ValueError(f"max_pixels must be 1 or more, not {self.max_pixels}")
        if self.mode == "mask":
            self.interpolation = "nearest"
        self._fill = parse_color(self.fill, "fill")
        self._decoder = Decoder(
            self.decoder,
            mode="L" if self.mode == "mask" else self.mode,  # type: ignore[arg-type]  # checked above
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
        del options["arrays"]
        options |= {"resizer": "pillow", "size": list(self.size)}
        return options | mask_options(self.arrays)

    def libraries(self) -> dict[str, str]:
        """Return name and version of the libraries that take part."""
        return loaded_libraries(self.decoder, strict=self.strict)

    def convert(self, record: Record, points: Sequence[str], boxes: Sequence[str] = ()) -> Row:
        """Return the row of a record. ``points`` and ``boxes`` are names of its columns.

        Raises DecodeError, and whatever Pillow's resizing raises.
        """
        picture, file_state = self._open(record.image)
        upright_size = turn_size(picture.size, picture.orientation)
        placement = Placement.of(upright_size, self.size[::-1], self.fit)
        resized = self._resize(picture, placement)
        flags = FLAG_ORIENTED * (picture.orientation > 1) | FLAG_FALLBACK * picture.used_fallback
        columns = dict(record.columns)
        for name in points:
            source_points = np.asarray(columns[name], np.float64)
            source_points = turn_points(source_points, picture.size, picture.orientation)
            columns[name] = placement.points(source_points)
            flags |= FLAG_OUTSIDE * _any_outside(columns[name], self.size)
        frame = Frame(picture.size, picture.orientation, placement)
        for name in boxes:
            columns[name] = move_boxes(columns[name], *frame)
        pixels, total, squares = _pixels_and_sums(resized)
        return Row(
            pixels,
            flags,
            picture.size,
            total,
            squares,
            columns,
            file_state,
            _remarks(picture, placement),
            picture.losses.reduced_range or (0, 0),
            convert_arrays(self.arrays, record, frame, self.max_pixels),
        )

    def _open(self, image: Any) -> tuple[Picture, FileState]:
        """Return a decoded picture, whose pixels may be ids, and the state of its file."""
        if self.mode != "mask":
            data, file_state = self._read(image)
            return self._decoder.open(data, self._draft if self.fast else None), file_state
        ids, file_state = read_mask(image, self.max_pixels)
        if ids.max() > np.iinfo(np.uint8).max:
            raise DecodeError(
                f"its largest id is {ids.max():,}, but mode 'mask' stores ids up to 255. Use mode "
                "'I;16' with interpolation 'nearest'"
            )
        mask = Image.fromarray(ids.astype(np.uint8))
        box = (0.0, 0.0, float(mask.width), float(mask.height))
        return Picture(mask, box, mask.size, orientation=1), file_state

    def _resize(self, picture: Picture, placement: Placement) -> Image.Image:
        if self.mode == "mask":
            ids = np.asarray(picture.image)
            return Image.fromarray(place_mask(ids, picture.orientation, placement, _MASK_FILL))
        return resize(
            picture.image,
            placement,
            interpolation=self.interpolation,
            fill=self._fill,
            box=picture.box if self.fast else None,
        )

    def _read(self, image: Any) -> tuple[bytes | Image.Image, FileState]:
        """Return an image for the decoder, and the state of its file."""
        if isinstance(image, Path):
            return read_file(image, self.max_pixels)
        if isinstance(image, np.ndarray):
            return _to_image(image), NO_FILE
        if isinstance(image, Image.Image):
            return image, NO_FILE
        if isinstance(image, (bytes, bytearray, memoryview)):
            return bytes(image), NO_FILE  # bytes are not copied
        raise DecodeError(
            f"an image must be a PIL image, an array, bytes or a path, not {type(image).__name__}"
        )

    def _draft(self, size: tuple[int, int]) -> tuple[int, int]:
        width, height = Placement.of(size, self.size[::-1], self.fit).resized
        return 2 * width, 2 * height


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
    _check_unmasked(array)
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


# ------------------------------------------------------------------------------------------ arrays

_TYPES = ", ".join(np.dtype(descr).name for descr in DESCRS)


@dataclass(frozen=True)
class ArraySettings:
    """What all arrays of a build have in common: shape (H, W, C) and element type."""

    shape: tuple[int, int, int]
    descr: str
    arrays: tuple[ExtraArray, ...] = ()
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
        return options | mask_options(self.arrays)

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
        height, width, _ = self.shape
        is_outside = any(
            _any_outside(np.asarray(record.columns[name]), (height, width)) for name in points
        )
        size = width, height
        frame = Frame(size, 1, Placement(size, size, size, 0, 0))
        columns = dict(record.columns)
        for name in boxes:
            columns[name] = move_boxes(columns[name], *frame)
        total, squares = stored_sums(pixels)
        return Row(
            pixels.tobytes(),
            FLAG_OUTSIDE * is_outside,
            size,
            total,
            squares,
            columns,
            file_state,
            arrays=convert_arrays(self.arrays, record, frame, self.max_pixels),
        )


def _as_stored(image: Any, max_pixels: int) -> tuple[np.ndarray, FileState]:
    """Return an array as it is stored, and the state of its .npy file if it is from one.

    It is ``(H, W, C)``, contiguous and little-endian.
    """
    file_state = NO_FILE
    if isinstance(image, Path) and image.suffix == ".npy":
        data, file_state = read_file(image, max_pixels)
        image = decode_values(data, max_pixels)
    if not isinstance(image, np.ndarray):
        raise DecodeError(
            "mode 'array' stores NumPy arrays and tensors and decodes nothing, but this is "
            f"{type(image).__name__}"
        )
    _check_unmasked(image)
    descr = image.dtype.newbyteorder("<").str
    if descr not in DESCRS or image.ndim not in (2, 3) or not image.size:
        raise DecodeError(
            f"an array of {image.dtype.name} and shape {image.shape} cannot be stored. Convert it "
            f"to (H, W) or (H, W, C) of one of {_TYPES}"
        )
    return np.ascontiguousarray(image, descr).reshape(*image.shape[:2], -1), file_state


def _sums(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return ``total`` and ``squares`` (see `Row`) of values ``(H × W, C)``."""
    if values.dtype.kind == "u":  # 64 bits hold the squares of up to 2³² pixels of 16 bits
        integers = values.astype(np.uint64)
        return integers.sum(axis=0), (integers * integers).sum(axis=0)
    with np.errstate(all="ignore"):  # sums of NaN and infinities are NaN and infinities
        floats = values.astype(np.float64)
        total = floats.sum(axis=0)
        return total, np.square(floats - total / len(floats)).sum(axis=0)


# -------------------------------------------------------------------------------------------- both


def convert_arrays(
    arrays: Sequence[ExtraArray], record: Record, frame: Frame, max_pixels: int
) -> list[ExtraRow]:
    """Return the rows of a record's masks and other arrays. Raises DecodeError."""
    return [array.convert(record.arrays.get(array.name), frame, max_pixels) for array in arrays]


def mask_options(arrays: Sequence[ExtraArray]) -> dict[str, Any]:
    """Return what the settings say of masks; nothing if there are none."""
    masks = [array for array in arrays if array.kind == "mask"]
    if not masks:
        return {}
    missing = "fill" if masks[0].fills_missing else "reject"
    return {"mask_fill": masks[0].fill, "missing_masks": missing}


def _any_outside(points: np.ndarray, size: tuple[int, int]) -> bool:
    """Return whether a point of ``(k, 2)`` lies outside a picture of ``size`` (height, width)."""
    height, width = size
    is_inside = (points >= -0.5) & (points < np.array([width - 0.5, height - 0.5]))
    return not bool(is_inside.all())  # NaN is nowhere, and so outside


def _check_unmasked(array: np.ndarray) -> None:
    if np.ma.is_masked(array):
        raise DecodeError(
            "some values of the array are masked, and a mask cannot be stored. Fill them."
        )
