"""The values of masks and other arrays as they are given. Nothing is scaled or turned."""

import io
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

from memload.building.decoders import (
    INVERSE,
    decoding,
    enough_memory,
    open_image,
    orientation_of,
    tile_pixels,
    too_large,
)
from memload.building.depth import is_deep_gray, largest_value, png_raw_mode
from memload.building.files import read_value
from memload.building.resizing import turn_mask
from memload.errors import DecodeError, describe_error
from memload.storage.format import read_npy_header

#: Pillow's modes of pictures whose pixels have one whole number.
ID_MODES = ("1", "L", "P", "I", "I;16", "I;16L", "I;16B")

#: How an .npy file begins.
_NPY = b"\x93NUMPY"

#: How Pillow calls gray PNGs of 2 and of 4 bits, and their largest values.
_FEW_BITS = {"L;2": 3, "L;4": 15}

# Tags of TIFF, and a value of the second.
_PHOTOMETRIC, _SAMPLE_FORMAT, _SIGNED = 262, 339, 2


def read_array(value: Any, max_pixels: int) -> np.ndarray:
    """Return the array of a value as `Record` has it. Files and pictures are decoded.

    Raises DecodeError.
    """
    data = read_value(value, max_pixels)
    return data if isinstance(data, np.ndarray) else decode_values(data, max_pixels)


def decode_values(
    data: bytes | Image.Image,
    max_pixels: int,
    check: Callable[[Image.Image], None] = lambda image: None,
) -> np.ndarray:
    """Return the values in the bytes of an .npy file or a picture. Raises DecodeError.

    A PIL image, which a data set may have changed, has the values that it has for NumPy. ``check``
    is called with a picture before it is decoded.
    """
    with decoding(max_pixels):
        if isinstance(data, Image.Image):
            check(data)
            return np.asarray(data)
        if is_npy(data):
            return _read_npy(data)
        image = _open_picture(data, max_pixels)
        check(image)
        with enough_memory(image):
            return _picture_values(image)


def is_npy(data: bytes | Image.Image) -> bool:
    """Say whether data are the bytes of an .npy file, and not a picture."""
    return isinstance(data, bytes) and data.startswith(_NPY)


def _read_npy(data: bytes) -> np.ndarray:
    """Return the array in the bytes of an .npy file, not copied. Raises DecodeError."""
    try:
        shape, is_fortran, dtype, start = read_npy_header(io.BytesIO(data))
        if dtype.hasobject:
            raise DecodeError("an .npy file of Python objects. Save an array of numbers")
        # The shape has to be that of the data: a damaged header cannot ask for memory.
        values = np.frombuffer(data, dtype, offset=start)
        return values.reshape(shape, order="F" if is_fortran else "C")
    except DecodeError:
        raise
    except Exception as error:  # noqa: BLE001  # a damaged header may raise anything
        raise DecodeError(f"a damaged .npy file: {describe_error(error)}") from None


def _open_picture(data: bytes, max_pixels: int) -> Image.Image:
    """Return the picture in the bytes of a file, not decoded yet. Raises what Pillow does."""
    image = open_image(data)
    pixels = max(image.width * image.height, tile_pixels(image))
    if pixels > max_pixels:
        raise too_large(pixels, max_pixels)
    return image


def _picture_values(image: Image.Image) -> np.ndarray:
    """Decode a picture of a file, and return its values ``(H, W)`` or ``(H, W, C)``.

    They are as the file has them: palette indices, gray values of 1 to 16 bits or floats, or
    colors. Pillow would scale few bits to 8, turn white-is-zero round, and turn TIFFs upright.
    Raises DecodeError for colors of 16 bits, of which Pillow reads only 8.
    """
    largest, tags = largest_value(image), getattr(image, "tag_v2", {})
    largest = _FEW_BITS.get(png_raw_mode(image), largest)
    if largest > 255 and not is_deep_gray(image):
        raise DecodeError("a picture with 16 bits a channel, of which 8 would be lost. Use .npy")
    orientation = orientation_of(image) if tags else 1
    image.load()
    values: np.ndarray = np.asarray(image)
    is_deep = is_deep_gray(image)
    full = 65535 if is_deep else 255
    if image.format == "PPM" and is_deep:
        values = np.rint(values * (largest / full)).astype(np.uint16)
    elif largest < full and image.mode in ("L", "RGB"):
        values = np.rint(values * (largest / full)).astype(np.uint8)
    if tags.get(_PHOTOMETRIC) == 0 and image.mode in ("1", "L"):
        values = ~values if image.mode == "1" else largest - values
    if tags.get(_SAMPLE_FORMAT, (1,))[0] == _SIGNED and values.dtype == np.uint8:
        values = values.view(np.int8)  # Pillow takes them for unsigned ones
    return turn_mask(values, INVERSE.get(orientation, orientation))
