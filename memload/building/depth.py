"""Pictures with more than 8 bits a channel: their values, and how they become 8 bits.

Pillow keeps the values of one channel, in its modes I, I;16, I;16B and F. Of colors, it keeps only
the upper 8 bits.
"""

import contextlib
import io
from typing import Any

import numpy as np
from PIL import Image, TiffImagePlugin

from memload.errors import DecodeError

# Tags of TIFF.
_BITS_PER_SAMPLE, _COMPRESSION, _PHOTOMETRIC = 258, 259, 262
_SAMPLES_PER_PIXEL, _SAMPLE_FORMAT = 277, 339

#: What a TIFF's sample format says.
_KINDS = {1: "unsigned integers", 2: "signed integers", 3: "floats", 5: "complex integers"}

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

    ``largest`` is its `largest_value`. Raises DecodeError if the values do not fit in 16 bits.
    """
    pixels = np.asarray(image)
    if image.mode == "F" or pixels.min() < 0 or pixels.max() > 65535:
        raise DecodeError(
            f"{_content(image)}, but gray values are whole numbers from 0 to 65,535. {_REMEDY}"
        )
    if image.format == "PPM" and largest < 65535:  # Pillow has scaled it to 65,535
        return np.rint(pixels * (largest / 65535)).astype(np.uint16)
    values: np.ndarray = pixels.astype(np.uint16)
    if getattr(image, "tag_v2", {}).get(_PHOTOMETRIC) == 0:
        return largest - values  # white is zero, which Pillow heeds only up to 8 bits
    return values


def transparent_value(image: Image.Image) -> np.ndarray | None:
    """Return the alpha of a loaded picture with a transparent gray value: 0 there, else 65535."""
    transparent = image.info.get("transparency")
    if not isinstance(transparent, int):
        return None
    return np.where(np.asarray(image) == transparent, 0, 65535).astype(np.uint16)


def load_deep(image: Image.Image, data: bytes) -> tuple[np.ndarray, np.ndarray | None] | None:
    """Load what Pillow would load with a loss, or slowly, out of the ``data`` of its file.

    Return gray and alpha, uint16 ``(H, W)``, or None for all other pictures. The image is of no use
    afterwards. Raises ValueError if the file is truncated.
    """
    if png_raw_mode(image) == "LA;16B":  # Pillow keeps the upper 8 bits of gray and alpha
        # RGBA has 4 bytes a pixel, too, so that it keeps them all.
        tiles = [(*tile[:3], "RGBA") for tile in _tiles(image)]
        image.tile = tiles  # type: ignore[attr-defined]  # of images in files
        image.load()
        pairs = np.ascontiguousarray(image).view(">u2").astype(np.uint16)
        return pairs[:, :, 0], pairs[:, :, 1]
    if image.format == "PPM" and image.mode == "I":
        decoder, _, offset, arguments = _tiles(image)[0]
        if decoder == "ppm":  # Pillow takes 2 µs a pixel
            values = np.frombuffer(data, ">u2", image.width * image.height, offset)
            values = values.reshape(image.height, image.width).astype(np.uint16)
            return np.minimum(values, arguments[1]), None
    return None


def check_range(image: Image.Image) -> None:
    """Raise DecodeError if a picture of one channel does not say which value is white."""
    tags = getattr(image, "tag_v2", {})
    is_signed = tags.get(_SAMPLE_FORMAT, (1,))[0] == 2
    if image.mode == "F" or largest_value(image) > 65535 or is_signed:
        raise DecodeError(
            f"{_content(image)}, without a declared range to scale to 8 bits. {_REMEDY}"
        )


def to_8_bits(values: np.ndarray, largest: int) -> np.ndarray:
    """Return uint8 for uint16, where ``largest`` becomes 255."""
    return ((values.astype(np.uint32) * 255 + largest // 2) // largest).astype(np.uint8)


def color_range(image: Image.Image, largest: int) -> tuple[int, int]:
    """Return about the least and greatest value of colors, of which Pillow has kept 8 bits."""
    bands = np.asarray(image).reshape(image.height, image.width, -1)[:, :, :3]
    low, high = int(bands.min()), int(bands.max()) + 1
    return low * (largest + 1) // 256, high * (largest + 1) // 256 - 1


def describe_tiff(data: bytes) -> str:
    """Say what a TIFF holds that Pillow cannot decode. Return "" if it is no TIFF."""
    with contextlib.suppress(Exception):  # a damaged file may raise anything
        file = io.BytesIO(data)
        header = file.read(8)
        tags = TiffImagePlugin.ImageFileDirectory_v2(header + file.read(8 * (header[2] == 43)))
        file.seek(tags.next)
        tags.load(file)
        compression = tags.get(_COMPRESSION, 1)
        if compression not in TiffImagePlugin.COMPRESSION_INFO:
            return f"a TIFF whose compression ({compression}) is not supported. Convert it"
        bands = tags.get(_SAMPLES_PER_PIXEL, 1)
        count = f"{bands} band" if bands == 1 else f"{bands} bands"
        if _BITS_PER_SAMPLE in tags:  # otherwise it is damaged
            what = f"a TIFF with {count} of {_numbers(tags)}"
            return f"{what}, which cannot be decoded as a picture. {_REMEDY}"
    return ""


def _numbers(tags: Any) -> str:
    """Return, for example, ``16-bit signed integers``."""
    kind = _KINDS.get(tags.get(_SAMPLE_FORMAT, (1,))[0], "numbers of an unknown kind")
    return f"{tags.get(_BITS_PER_SAMPLE, (1,))[0]}-bit {kind}"


def _content(image: Image.Image) -> str:
    """Return, for example, ``a TIFF of 32-bit floats from -0.5 to 20``."""
    tags = getattr(image, "tag_v2", None)
    what = f"a picture of Pillow's mode {image.mode}"
    if tags is not None:
        what = f"a TIFF of {_numbers(tags)}"
    low, high = image.getextrema()
    return f"{what} from {low:,.8g} to {high:,.8g}"
