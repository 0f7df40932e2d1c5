"""The values of masks and other arrays as they are given. Nothing is scaled or turned."""

import io
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

from memload.building.decoders import opened, orientation_of
from memload.building.depth import largest_value, png_raw_mode
from memload.building.files import read_value
from memload.errors import DecodeError, describe_error
from memload.storage.format import read_npy_header

#: Pillow's modes of pictures whose pixels have one whole number.
ID_MODES = ("1", "L", "P", "I", "I;16", "I;16L", "I;16B")

#: How an .npy file begins.
_NPY = b"\x93NUMPY"

# Tags of TIFF.
_PHOTOMETRIC, _SAMPLE_FORMAT = 262, 339


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

    Those of a picture are ``(H, W)`` or ``(H, W, C)``, as its file has them: palette indices, gray
    values of up to 16 bits or floats, or colors. A PIL image, which a data set may have changed,
    has the values that it has for NumPy. ``check`` is called with a picture before it is decoded.
    """
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
        if dtype.hasobject:
            raise DecodeError("an .npy file of Python objects. Save an array of numbers")
        # The shape has to be that of the data: a damaged header cannot ask for memory.
        values = np.frombuffer(data, dtype, offset=start)
        return values.reshape(shape, order="F" if is_fortran else "C")
    except DecodeError:
        raise
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
