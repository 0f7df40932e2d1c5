"""One record to the bytes of its row: read, decode, resize, turn, and what is learned on the way."""

import errno
import os
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from memload.building.decoders import (
    MAX_PIXELS,
    MODES,
    Picture,
    get_decoder,
    loaded_libraries,
    parse_colour,
)
from memload.building.resizing import (
    FITS,
    INTERPOLATIONS,
    RESIZERS,
    TORCH_INTERPOLATIONS,
    Placement,
    flip,
    import_torch,
    place,
    resize,
    turn,
    turn_points,
)
from memload.building.sources import Column, Record
from memload.errors import BuildError, DecodeError
from memload.storage.format import FLAG_FALLBACK, FLAG_ORIENTED, FLAG_OUTSIDE

# In double precision, where all sums of a picture are whole numbers below 2⁵³ and so exact: 4 µs, against 65 in int64.
_LEVELS = np.arange(256, dtype=np.float64)
_POWERS = np.stack([_LEVELS, _LEVELS * _LEVELS], axis=1)


@dataclass(frozen=True)
class Settings:
    """All that decides what pixels a picture becomes. ``size`` is (height, width)."""

    size: tuple[int, int] = (256, 256)
    fit: str = "crop"
    interpolation: str = "bilinear"
    mode: str = "RGB"
    decoder: str = "pillow"
    resizer: str = "pillow"
    fast: bool = False
    strict: bool = False
    exif: bool = True
    background: str = "white"
    fill: str = "black"
    max_pixels: int = MAX_PIXELS

    def __post_init__(self) -> None:
        _one_of("fit", self.fit, FITS)
        _one_of("interpolation", self.interpolation, INTERPOLATIONS)
        _one_of("mode", self.mode, MODES)
        _one_of("resizer", self.resizer, RESIZERS)
        parse_colour(self.fill, "fill")
        if not all(isinstance(side, int) and 0 < side <= 65535 for side in self.size):
            raise ValueError(
                f"size: expected a height and a width from 1 to 65535, found {self.size}"
            )
        if self.max_pixels < 1:
            raise ValueError(f"max_pixels: expected 1 or more, found {self.max_pixels}")
        if self.resizer == "torch":
            _one_of(
                "interpolation for the resizer 'torch'", self.interpolation, TORCH_INTERPOLATIONS
            )
            if self.fast:
                raise ValueError(
                    "fast: expected the resizer 'pillow', found 'torch', which has no matched box"
                )

    @property
    def shape(self) -> tuple[int, int, int]:
        """(H, W, C) of what is stored."""
        return (*self.size, self.channels)

    @property
    def descr(self) -> str:
        """The element type of what is stored."""
        return "|u1"

    @property
    def channels(self) -> int:
        """3 for RGB, 1 for L."""
        return 3 if self.mode == "RGB" else 1

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as JSON has them."""
        return asdict(self) | {"size": list(self.size)}

    def converter(self, schema: Mapping[str, Column]) -> "Converter":
        """Return what turns records into rows. Raises DependencyError if it cannot be."""
        return Converter(self, schema)

    def libraries(self) -> dict[str, str]:
        """Return name and version of the libraries that take part."""
        versions = loaded_libraries(self.decoder, strict=self.strict)
        return versions | (
            {"torch": str(import_torch().__version__)} if self.resizer == "torch" else {}
        )


class Row(NamedTuple):
    """What a record became: its pixels, row-major ``H × W × C``, and what the journal keeps of it.

    ``file_size`` and ``file_mtime_ns`` (bytes, and nanoseconds since 1970) are those of the file that was read, taken
    from the open file; both are -1 where the sample is no file. An unfinished build tells by them that a file changed.
    """

    pixels: bytes
    flags: int
    size: tuple[int, int]
    total: np.ndarray
    squares: np.ndarray
    columns: Mapping[str, Any]
    file_size: int = -1
    file_mtime_ns: int = -1


class Converter:
    """Turns records into rows. Made in the process that uses it; raises DependencyError if it cannot be."""

    def __init__(self, settings: Settings, schema: Mapping[str, Column]) -> None:
        self.settings = settings
        self._points = [name for name, column in schema.items() if column.points]
        self._fill = parse_colour(settings.fill, "fill")
        self._decoder = get_decoder(
            settings.decoder,
            mode=settings.mode,  # type: ignore[arg-type]  # checked by Settings
            background=settings.background,
            exif=settings.exif,
            max_pixels=settings.max_pixels,
            strict=settings.strict,
        )
        if settings.resizer == "torch":
            import_torch()

    def __call__(self, record: Record) -> Row:
        """Return the row of a record. Raises DecodeError."""
        settings = self.settings
        encoded, file_size, file_mtime_ns = self._read(record.image)
        picture = self._decoder.open(encoded, self._draft if settings.fast else None)
        placement = self._place(
            picture.image.size if picture.turned > 1 else picture.size, picture.orientation
        )
        try:
            small = resize(
                picture.image,
                placement,
                interpolation=settings.interpolation,  # type: ignore[arg-type]  # checked by Settings
                resizer=settings.resizer,  # type: ignore[arg-type]  # checked by it
                fill=self._fill,
                box=picture.box if settings.fast else None,
            )
        except (
            ValueError,
            MemoryError,
            RuntimeError,
        ) as error:  # a side of millions of pixels, or no memory
            width, height = picture.size
            reason = str(error) or type(error).__name__
            raise DecodeError(f"cannot be resized from {width}×{height}: {reason}") from error
        small = turn(
            small, picture.orientation
        )  # here, where it is 50 times smaller than when it was read
        flags = (
            FLAG_ORIENTED * (picture.orientation > 1 or picture.turned > 1)
            | FLAG_FALLBACK * picture.fallback
        )
        columns = dict(record.columns)
        for name in self._points:
            columns[name] = self._move(columns[name], picture, placement)
            flags |= FLAG_OUTSIDE * outside(columns[name], settings.size)
        counts = np.array(small.histogram(), np.float64).reshape(settings.channels, 256)
        total, squares = (counts @ _POWERS).T.astype(np.uint64)
        return Row(
            pixels=small.tobytes(),
            flags=flags,
            size=picture.size,
            total=total,
            squares=squares,
            columns=columns,
            file_size=file_size,
            file_mtime_ns=file_mtime_ns,
        )

    def _read(self, image: Any) -> tuple[bytes | Image.Image, int, int]:
        """Return an image for the decoder, and the size and time of change of its file, or -1 and -1."""
        if isinstance(image, Path):
            # No picture within max_pixels is larger, at 8 bytes a pixel and with some metadata.
            data, status = _read_file(image, 8 * self.settings.max_pixels + (16 << 20))
            return data, status.st_size, status.st_mtime_ns
        if isinstance(image, np.ndarray):
            return _image_of(image), -1, -1
        if isinstance(image, (bytes, Image.Image)):
            return image, -1, -1
        if isinstance(image, (bytearray, memoryview)):
            return bytes(image), -1, -1
        raise DecodeError(
            f"expected a PIL image, an array, bytes or a path, found {type(image).__name__}"
        )

    def _place(self, source: tuple[int, int], orientation: int) -> Placement:
        height, width = self.settings.size
        target = (
            (height, width) if orientation >= 5 else (width, height)
        )  # turned by a quarter afterwards
        placement = place(source, target, self.settings.fit)  # type: ignore[arg-type]  # checked by Settings
        return flip(placement, orientation)

    def _draft(self, source: tuple[int, int], orientation: int) -> tuple[int, int]:
        width, height = self._place(source, orientation).resized
        return 2 * width, 2 * height

    def _move(self, points: np.ndarray, picture: Picture, placement: Placement) -> np.ndarray:
        points = turn_points(np.asarray(points, np.float64), picture.size, picture.turned)
        return turn_points(placement.points(points), placement.target, picture.orientation)


def outside(points: np.ndarray, size: tuple[int, int]) -> bool:
    """Say whether one of the points ``(k, 2)`` lies outside a picture of ``size`` (height, width)."""
    height, width = size
    inside = (points >= -0.5) & (points < np.array([width - 0.5, height - 0.5]))
    return not bool(inside.all())  # NaN is nowhere, and so outside


def _one_of(argument: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{argument}: expected one of {', '.join(choices)}, found {value!r}")


#: What a process runs out of, which says nothing of a picture.
_RUN_OUT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def _read_file(path: Path, limit: int) -> tuple[bytes, os.stat_result]:
    try:
        # Not waiting for somebody to write, if it is a pipe. And not Path.open: 40 µs a file instead of 160.
        descriptor = os.open(
            path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        )
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise DecodeError("expected a file, found a folder, a pipe or a device")
            if status.st_size > limit:
                raise DecodeError(
                    f"expected a file of at most {limit:,} bytes, found {status.st_size:,}"
                )
            with open(descriptor, "rb", buffering=0, closefd=False) as file:  # as above
                return file.read(), status
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        raise DecodeError("a link to nothing" if path.is_symlink() else "no such file") from None
    except OSError as error:
        if error.errno in _RUN_OUT:
            raise BuildError(
                f"{path}: expected to be able to read it, found: {error.strerror}. Mend that, then run the same "
                "command again: it goes on where it stopped",
                path=path,
            ) from error
        raise DecodeError(f"cannot be read: {error.strerror or error}") from error


def _image_of(array: np.ndarray) -> Image.Image:
    if np.ma.is_masked(array):
        raise DecodeError("expected an array of values, found some that are masked. Fill them")
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    fine = array.dtype == np.uint8 and (
        array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4))
    )
    if not array.size or not (fine or (array.dtype == np.uint16 and array.ndim == 2)):
        raise DecodeError(
            "expected an array (H, W) or (H, W, 1, 3 or 4) of uint8, or (H, W) of uint16 (others: mode='array'), "
            f"found {array.shape} of {array.dtype}"
        )
    return Image.fromarray(array)
