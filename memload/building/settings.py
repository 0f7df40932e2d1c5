"""How the pictures or arrays of a build become its rows: from the options to the pixels.

`Settings` decode and resize pictures. `ArraySettings` store arrays as they are, and
`StoredSettings` the rows of a data set of memload's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from PIL import Image

from memload.building.decoders import (
    DECODERS,
    MODES,
    Decoder,
    Mode,
    loaded_libraries,
    parse_color,
)
from memload.building.extra_arrays import (
    MARGIN_ID,
    ExtraArray,
    ExtraRow,
    Frame,
    convert_arrays,
)
from memload.building.files import read_value
from memload.building.remarks import ENLARGED
from memload.building.resizing import (
    FITS,
    INTERPOLATIONS,
    Fit,
    Interpolation,
    Placement,
    move_boxes,
    resize,
    turn_points,
    turn_size,
)
from memload.building.stored_values import read_array
from memload.errors import DecodeError
from memload.sources.contents import MAX_PIXELS
from memload.sources.samples import Record, Source
from memload.storage.format import DESCRS, FLAG_FALLBACK, FLAG_ORIENTED, FLAG_OUTSIDE


class ConvertedRow(NamedTuple):
    """The pixels of a record, row-major ``H × W × C``, and what the journal keeps of it."""

    pixels: bytes | memoryview
    total: np.ndarray  #: the sum of the pixels, one number per channel
    squares: np.ndarray  #: the sum of their squares, see `record_type`
    flags: int
    source_size: tuple[int, int]  #: width and height of the image in its file
    columns: Mapping[str, Any]
    remarks: int = 0  #: what was lost, a bit each: see `memload.building.remarks`
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
        options["strict"] = False  # as all indexes have it: it was an option once
        return options | _mask_options(self.extra_arrays)

    def libraries(self) -> dict[str, str]:
        """Return name and version of the libraries that take part."""
        return loaded_libraries(self.decoder)

    def convert(
        self, record: Record, points: Sequence[str], boxes: Sequence[str] = ()
    ) -> ConvertedRow:
        """Return the row of a record. ``points`` and ``boxes`` are names of its columns.

        Raises DecodeError, and whatever Pillow's resizing raises.
        """
        data = read_value(record.image, self.max_pixels)
        stored = self.shape, self.descr
        if isinstance(data, np.ndarray) and (data.shape, data.dtype.str) == stored:
            return _unchanged(data, record, points, boxes, self)
        image = _to_image(data) if isinstance(data, np.ndarray) else data
        picture = self._decoder.open(image, self._draft if self.fast else None)
        upright_size = turn_size(picture.size, picture.orientation)
        placement = Placement.of(upright_size, self.size[::-1], self.fit)
        resized = resize(
            picture.image,
            placement,
            interpolation=self.interpolation,
            fill=self._fill,
        )
        frame = Frame(picture.size, picture.orientation, placement)
        columns, flags = _move_columns(record.columns, points, boxes, frame)
        flags |= FLAG_ORIENTED * (picture.orientation > 1) | FLAG_FALLBACK * picture.used_fallback
        return ConvertedRow(
            *_pixels_and_sums(resized),
            flags,
            picture.size,
            columns,
            picture.remarks | ENLARGED * placement.enlarges,
            convert_arrays(self.extra_arrays, record, frame, self.max_pixels),
        )

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
    """Return the bytes of a resized picture, and ``total`` and ``squares`` (see `ConvertedRow`)."""
    if image.mode == "F":
        values = np.rint(np.asarray(image)).clip(0, 65535).astype("<u2")
        return values.tobytes(), *_sums(values.reshape(-1, 1))
    return image.tobytes(), *_sums_of_picture(image)


def _sums_of_picture(image: Image.Image) -> tuple[np.ndarray, np.ndarray]:
    counts = np.array(image.histogram(), np.float64).reshape(-1, 256)
    total, squares = (counts @ _POWERS).T.astype(np.uint64)
    return total, squares


def stored_sums(pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return ``total`` and ``squares`` (see `ConvertedRow`) of a stored image ``(H, W, C)``."""
    values = pixels.reshape(-1, pixels.shape[2])
    if pixels.dtype != np.uint8:
        return _sums(values)
    # float32 sums 256 squares of uint8 exactly, as they are below 2²⁴, and is the fastest.
    whole = values[: len(values) // 256 * 256].reshape(256, -1).astype(np.float32)
    ones = np.ones(256, np.float32)
    total = ones @ whole
    squares = ones @ np.square(whole, out=whole)
    rest = values[len(values) // 256 * 256 :].astype(np.uint64)
    return tuple(
        sums.reshape(-1, values.shape[1]).astype(np.uint64).sum(0) + others.sum(0)
        for sums, others in ((total, rest), (squares, rest * rest))
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


# ------------------------------------------------------------------------------------------ arrays

_TYPES = ", ".join(np.dtype(descr).name for descr in DESCRS)


@dataclass(frozen=True)
class ArraySettings:
    """What all arrays of a build have in common: shape (H, W, C) and element type."""

    mode: ClassVar[str | None] = "array"

    shape: tuple[int, int, int]
    descr: str
    extra_arrays: tuple[ExtraArray, ...] = ()
    max_pixels: int = MAX_PIXELS  #: of a mask or a further picture

    @classmethod
    def of(cls, source: Source, index: int) -> "ArraySettings":
        """Return shape and type of a record. Raises DecodeError if it is no array to be stored."""
        array = _as_stored(source[index].image, cls.max_pixels)
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

    def convert(
        self, record: Record, points: Sequence[str], boxes: Sequence[str] = ()
    ) -> ConvertedRow:
        """Return the row of a record, whose values do not change. Raises DecodeError.

        Boxes are clipped. ``points`` and ``boxes`` are names of its columns.
        """
        pixels = _as_stored(record.image, self.max_pixels)
        if (pixels.shape, pixels.dtype.str) != (self.shape, self.descr):
            raise DecodeError(
                f"the array is {pixels.shape} of {pixels.dtype.name}, but the first one is "
                f"{self.shape} of {np.dtype(self.descr).name}"
            )
        return _unchanged(pixels, record, points, boxes, self)


@dataclass(frozen=True)
class StoredSettings(ArraySettings):
    """Rows of a data set of memload's, which are stored as they are, with what is known of them.

    ``build`` says how they were made, as far as their index knows. ``has_masks`` tells that it has
    masks, too. ``flags`` and ``crc32`` have a number for each row of the source.
    """

    mode: ClassVar[str | None] = None  # that of a data set is the default

    build: Mapping[str, Any] = field(default_factory=dict)
    has_masks: bool = False
    flags: Sequence[int] = ()
    crc32: Sequence[int] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the settings for the index: those with which the rows were made, if known."""
        known = self.build.get("settings") or {
            "size": [*self.size],
            "channels": self.shape[2],
            "dtype": np.dtype(self.descr).name,
        }
        return {**known} if self.has_masks else {**_mask_options(self.extra_arrays), **known}

    def libraries(self) -> dict[str, str]:
        """Return name and version of the libraries that made the rows, if known."""
        return dict(self.build.get("libraries", {}))


def _as_stored(image: Any, max_pixels: int) -> np.ndarray:
    """Return an array as it is stored: ``(H, W, C)``, contiguous and little-endian."""
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


def _sums(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return ``total`` and ``squares`` (see `ConvertedRow`) of values ``(H × W, C)``."""
    if values.dtype.kind == "u":  # 64 bits hold the squares of up to 2³² pixels of 16 bits
        integers = values.astype(np.uint64)
        return integers.sum(axis=0), (integers * integers).sum(axis=0)
    with np.errstate(all="ignore"):  # sums of NaN and infinities are NaN and infinities
        floats = values.astype(np.float64)
        total = floats.sum(axis=0)
        return total, np.square(floats - total / len(floats)).sum(axis=0)


# --------------------------------------------------------------------------------------------- all

#: How the records of a build are converted.
AnySettings = Settings | ArraySettings


def _unchanged(
    pixels: np.ndarray,
    record: Record,
    points: Sequence[str],
    boxes: Sequence[str],
    settings: AnySettings,
) -> ConvertedRow:
    """Return the row of a record whose image has the shape and type of the stored ones already."""
    height, width = settings.size
    size = width, height
    frame = Frame(size, 1, Placement(size, size, size, 0, 0))
    columns, flags = _move_columns(record.columns, points, boxes, frame)
    pixels = np.ascontiguousarray(pixels)
    return ConvertedRow(
        pixels.data.cast("B"),
        *stored_sums(pixels),
        flags,
        size,
        columns,
        extra_arrays=convert_arrays(settings.extra_arrays, record, frame, settings.max_pixels),
    )


def _mask_options(arrays: Sequence[ExtraArray]) -> dict[str, Any]:
    """Return what the settings say of masks; nothing if there are none."""
    masks = [array for array in arrays if array.kind == "mask"]
    if not masks:
        return {}
    missing_id = masks[0].missing_id
    # As all indexes have it: once, the margin and missing masks had the same id.
    missing = {None: "reject", MARGIN_ID: "fill"}.get(missing_id, missing_id)
    return {"mask_fill": MARGIN_ID, "missing_masks": missing}


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
