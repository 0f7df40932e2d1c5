"""The values of images, masks and arrays as they are given. Nothing is scaled or turned."""

import errno
import io
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from memload.building.decoders import opened, orientation_of
from memload.building.depth import largest_value, png_raw_mode
from memload.errors import BuildError, DecodeError, describe_error
from memload.storage.format import read_npy_header

#: Errors that are the fault of this process or machine, not of the file.
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

#: How an .npy file begins.
_NPY = b"\x93NUMPY"

# Tags of TIFF.
_PHOTOMETRIC, _SAMPLE_FORMAT = 262, 339


def read_value(value: Any, max_pixels: int) -> bytes | Image.Image | np.ndarray:
    """Return a value as `Sample` has it. If it is a path, that are the bytes of the file.

    Raises DecodeError, also for a file that is too large for any picture within ``max_pixels``, and
    BuildError if this process lacks memory or open files.
    """
    if isinstance(value, Path):
        return _read_file(value, max_pixels)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)  # bytes are not copied
    if np.ma.is_masked(value):
        raise DecodeError("some of its values are masked out. Fill them")
    if isinstance(value, (Image.Image, np.ndarray)):
        return value
    raise DecodeError(
        f"it must be a PIL image, an array, bytes or a path, not {type(value).__name__}"
    )


def _read_file(path: Path, max_pixels: int) -> bytes:
    # No picture within max_pixels is larger, at 8 bytes per pixel and with some metadata.
    limit = 8 * max_pixels + (16 << 20)
    try:
        # O_NONBLOCK: a pipe is not waited for. Path.open would take 160 µs per file, not 40.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise DecodeError("not a file, but a folder, a pipe or a device")
            if status.st_size > limit:
                raise DecodeError(
                    f"the file is too large: it has {status.st_size:,} bytes, and at most "
                    f"{limit:,} are read"
                )
            return file.read()
    except FileNotFoundError:
        is_link = path.is_symlink()
        raise DecodeError(
            "a link to a file that does not exist" if is_link else "no such file"
        ) from None
    except OSError as error:
        if error.errno in _EXHAUSTED:
            raise BuildError(
                f"{path} cannot be read: {error.strerror}. Free some, then run the same command "
                "again: it goes on where it stopped.",
                path=path,
            ) from error
        raise DecodeError(f"the file cannot be read: {error.strerror}") from error


def read_array(
    value: Any, max_pixels: int, check: Callable[[Image.Image], None] = lambda image: None
) -> np.ndarray:
    """Return the array of a value as `Sample` has it. Raises DecodeError.

    The values of a picture are ``(H, W)`` or ``(H, W, C)``, as its file has them: palette indices,
    gray values of up to 16 bits or floats, or colors. A PIL image, which a data set may have
    changed, has the values that it has for NumPy. ``check`` is called with a picture before it is
    decoded.
    """
    data = read_value(value, max_pixels)
    if isinstance(data, np.ndarray):
        return data
    if isinstance(data, bytes) and data.startswith(_NPY):
        return _read_npy(data)
    with opened(data, max_pixels) as image:
        check(image)
        if image is data:
            return np.asarray(image)
        largest = largest_value(image)
        _check_exact(image, largest)
        image.load()
        values = np.asarray(image)
        return values.astype(np.uint16) if (image.mode, largest) == ("I", 65535) else values


def _read_npy(data: bytes) -> np.ndarray:
    """Return the array in the bytes of an .npy file, not copied. Raises DecodeError."""
    try:
        shape, is_fortran, dtype, start = read_npy_header(io.BytesIO(data))
        # The shape has to be that of the data: a damaged header cannot ask for memory.
        values = np.frombuffer(data, dtype, offset=start)
        return values.reshape(shape, order="F" if is_fortran else "C")
    except Exception as error:  # noqa: BLE001  # a damaged header may raise anything
        raise DecodeError(f"a damaged .npy file: {describe_error(error)}") from None


def _check_exact(image: Image.Image, largest: int) -> None:
    """Raise DecodeError for a picture whose values Pillow scales or turns when it loads them."""
    tags = getattr(image, "tag_v2", {})
    is_deep_color = largest > 255 and len(image.getbands()) > 1
    is_scaled = png_raw_mode(image) in ("L;2", "L;4") or (
        image.format == "PPM" and largest not in (255, 65535)
    )
    is_other = tags.get(_PHOTOMETRIC) == 0 or (largest == 255 and tags.get(_SAMPLE_FORMAT) == (2,))
    is_turned = bool(tags) and orientation_of(image) > 1
    if is_deep_color or is_scaled or is_other or is_turned:
        raise DecodeError(
            "Pillow would change its values, as of pictures with 2, 4 or 16 bits per channel and "
            "some TIFFs. Save it as a PNG of 8 bits, or of 16 bits of gray, or as .npy"
        )
