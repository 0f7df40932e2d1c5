"""Pictures with more than 8 bits a channel: their values, and how they become 8 bits.

Pillow keeps the values of one channel, in its modes I, I;16, I;16B and F. Of colors, it keeps only
the upper 8 bits.
"""

from typing import Any

import numpy as np
from PIL import Image

from memload.errors import DecodeError

# Tags of TIFF.
_BITS_PER_SAMPLE, _PHOTOMETRIC, _SAMPLE_FORMAT = 258, 262, 339

#: Where `largest_value` keeps the largest value of a PGM, which is lost when that is loaded.
_MAXVAL = "maxval"

_REMEDY = (
    "Read such pictures in a data set that returns arrays, and build it with mode='array', which "
    "stores values as they are"
)


def is_deep_gray(image: Image.Image) -> bool:
    """Return whether Pillow keeps more than 8 bits of a picture, which then has one channel."""
    return image.mode.startswith("I") or image.mode == "F"


def largest_value(image: Image.Image) -> int:
    """Return the largest value that a channel may have in the file: 255, 4095, 65535, …

    Ask before the picture is loaded: that scales PGM and PPM, and forgets what they were.
    """
    bits = getattr(image, "tag_v2", {}).get(_BITS_PER_SAMPLE)
    if bits:
        return (1 << int(bits[0])) - 1
    default = 65535 if is_deep_gray(image) else 255
    if image.format == "PPM":
        for decoder, _, _, arguments in _tiles(image):
            if decoder in ("ppm", "ppm_plain"):  # which scale
                image.info[_MAXVAL] = arguments[1]
        return int(image.info.get(_MAXVAL, default))
    return 65535 if ";16" in png_raw_mode(image) else default


def png_raw_mode(image: Image.Image) -> str:
    """Return how Pillow calls the pixels in the file of a PNG that is not loaded yet, else ""."""
    tiles = _tiles(image)
    return str(tiles[0][3]) if image.format == "PNG" and tiles else ""


def _tiles(image: Image.Image) -> list[tuple[str, Any, int, Any]]:
    """Return decoder, box, offset and arguments of what is left to load."""
    return list(getattr(image, "tile", ()))


def gray_values(image: Image.Image, largest: int) -> np.ndarray:
    """Return the values of a loaded picture of one channel as in its file, uint16 ``(H, W)``.

    ``largest`` is its `largest_value`. Raises DecodeError for other values than whole numbers of up
    to 16 bits: these do not say which one is white.
    """
    tags = getattr(image, "tag_v2", {})
    pixels = np.asarray(image)
    is_signed = tags.get(_SAMPLE_FORMAT, (1,))[0] == 2
    if (
        image.mode == "F"
        or largest > 65535
        or is_signed
        or pixels.min() < 0
        or pixels.max() > 65535
    ):
        raise DecodeError(
            f"a picture of Pillow's mode {image.mode} with values from {pixels.min():,.8g} to "
            f"{pixels.max():,.8g}, and not of whole numbers from 0 to 65,535. {_REMEDY}"
        )
    if image.format == "PPM" and largest < 65535:  # Pillow has scaled it to 65,535
        return np.rint(pixels * (largest / 65535)).astype(np.uint16)
    values: np.ndarray = pixels.astype(np.uint16)
    if tags.get(_PHOTOMETRIC) == 0:
        return largest - values  # white is zero, which Pillow heeds only up to 8 bits
    return values


def check_transparency(image: Image.Image, mode: str) -> None:
    """Raise DecodeError for a PNG whose transparency Pillow does not decode exactly.

    It scales pixels of 2, 4 and 16 bits to 8, but not their transparent color, and keeps 8 bits of
    gray with alpha. Ask before the picture is loaded.
    """
    raw_mode = png_raw_mode(image)
    is_scaled = raw_mode in ("L;2", "L;4") or ";16" in raw_mode
    if (is_scaled and "transparency" in image.info) or (mode, raw_mode) == ("I;16", "LA;16B"):
        raise DecodeError(
            f"a PNG of 2, 4 or 16 bits with transparency cannot be decoded exactly. {_REMEDY}"
        )


def to_8_bits(values: np.ndarray, largest: int) -> np.ndarray:
    """Return uint8 for uint16, where ``largest`` becomes 255."""
    return ((values.astype(np.uint32) * 255 + largest // 2) // largest).astype(np.uint8)
