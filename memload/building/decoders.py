"""Turns encoded bytes into pictures.

All JPEG decoders here are built on libjpeg-turbo and give the same pixels to the bit.
"""

import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import PIL
from PIL import Image, ImageColor, UnidentifiedImageError, features

from memload.building.depth import (
    check_transparency,
    gray_values,
    is_deep_gray,
    largest_value,
    to_8_bits,
)
from memload.building.record import FLATTENED, REDUCED
from memload.building.resizing import turn, turn_size
from memload.errors import BuildError, DecodeError, DependencyError, describe_error
from memload.sources.contents import MAX_PIXELS

Mode = Literal["RGB", "L", "I;16"]
MODES: tuple[str, ...] = get_args(Mode)
#: The mode that a stored picture of this element type and number of channels has.
MODE_OF_STORED: Mapping[tuple[str, int], Mode] = {
    ("|u1", 1): "L",
    ("|u1", 3): "RGB",
    ("<u2", 1): "I;16",
}
DECODERS = ("pillow", "jpeg4py")

#: What Pillow may open. PostScript, which it hands to another program, is left out, and so are
#: formats whose files can claim hundreds of megabytes in a few bytes. MPO (a JPEG followed by more
#: pictures) is opened as JPEG.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")

#: What decoding takes at most. The dearest kinds are transparency and 16 bits.
_BYTES_PER_PIXEL = 20

#: Takes the upright size of a JPEG and returns the (width, height) that it must keep at least.
Draft = Callable[[tuple[int, int]], tuple[int, int]]


class Picture(NamedTuple):
    """A decoded picture, and what is known of its file."""

    image: Image.Image  #: upright, in the mode asked for; F for I;16
    size: tuple[int, int]  #: width and height as stored, before any scaling by the decoder
    orientation: int = 1  #: the EXIF orientation from which it was turned upright
    used_fallback: bool = False  #: whether the chosen library gave up and Pillow decoded the file
    remarks: int = 0  #: what was lost, see `memload.building.record`


class Decoder:
    """Decodes encoded images to pictures of one mode. Thread-safe.

    ``mode`` is RGB, L (gray) or I;16 (gray of 16 bits). RGB and L scale values of more than 8 bits
    to 8. In I;16, gray pictures keep the values that their file has, whether they go up to 255,
    4,095 or 65,535: nothing is scaled. Colors become gray of 8 bits, from 0 to 255, as in mode L,
    because Pillow reads only 8 bits of each color.

    ``name`` is ``pillow`` (or pillow-simd, if that is installed) or ``jpeg4py``. ``background`` is
    the color behind transparent pixels, a CSS name or ``#rrggbb``. ``exif=False`` leaves pictures
    as stored. ``max_pixels`` limits width × height, and is compared with the header before any
    memory is taken.

    Raises ValueError for a wrong color, and DependencyError if a library is not installed.
    """

    def __init__(
        self,
        name: str = "pillow",
        *,
        mode: Mode = "RGB",
        background: str = "white",
        exif: bool = True,
        max_pixels: int = MAX_PIXELS,
    ) -> None:
        self.mode, self.exif, self.max_pixels = mode, exif, max_pixels
        self.background = parse_color(background, "background")
        self._jpeg4py = _import_jpeg4py() if name == "jpeg4py" else None

    def open(self, data: bytes | Image.Image, draft: Draft | None = None) -> Picture:
        """Decode the bytes of a file, or take a PIL image as it is. Raises DecodeError.

        With ``draft``, a JPEG may be decoded at 1/2, 1/4 or 1/8 of its size.
        """
        with opened(data, self.max_pixels) as image:
            if isinstance(data, bytes) and image.format in ("JPEG", "MPO"):
                return self._decode_jpeg(image, data, draft)
            return self._decode(image)

    def _decode_jpeg(self, image: Image.Image, data: bytes, draft: Draft | None) -> Picture:
        size = image.size
        orientation = orientation_of(image) if self.exif else 1
        is_plain = image.mode in ("L", "RGB")  # not CMYK
        if draft is not None and is_plain:
            wanted = turn_size(draft(turn_size(size, orientation)), orientation)
            image.draft(image.mode, wanted)
        found, used_fallback = None, False
        if self._jpeg4py and is_plain and image.size == size:  # it is not to be scaled down
            found = _decode_with(self._jpeg4py, data)
            used_fallback = found is None
        if found is None:
            image.load()
            found = image
        converted, remarks = to_mode(found, self.mode, self.background)
        return Picture(turn(converted, orientation), size, orientation, used_fallback, remarks)

    def _decode(self, image: Image.Image) -> Picture:
        largest, is_tiff = largest_value(image), image.format == "TIFF"
        check_transparency(image, self.mode)
        orientation = orientation_of(image) if is_tiff else 1  # which loading forgets
        image.load()  # and turns a TIFF upright
        converted, remarks = to_mode(image, self.mode, self.background, largest)
        if is_tiff:
            converted = turn(converted, INVERSE.get(orientation, orientation))  # as it is stored
        else:
            orientation = orientation_of(image)
        size = converted.size
        if not self.exif:
            orientation = 1
        return Picture(turn(converted, orientation), size, orientation, remarks=remarks)


@contextmanager
def opened(data: bytes | Image.Image, max_pixels: int) -> Iterator[Image.Image]:
    """Yield the picture in the bytes of a file, or a PIL image, which is decoded meanwhile.

    Whatever that raises becomes DecodeError, as for a picture that is damaged or too large, or
    BuildError if this process lacks the memory for it.
    """
    width = height = 0
    try:
        if not data:
            raise DecodeError("the file is empty")
        image: Any = data
        if isinstance(data, bytes):
            image = Image.open(io.BytesIO(data), formats=FORMATS)
        width, height = image.size
        tags: Any = getattr(image, "tag_v2", {})
        in_tile = int(tags.get(_TILE_WIDTH, 0)) * int(tags.get(_TILE_LENGTH, 0))  # decoded whole
        pixels = max(width * height, in_tile)
        if not width * height:
            raise DecodeError(f"the picture has no pixels: its size is {width}×{height}")
        if pixels > max_pixels:
            raise DecodeError(
                f"too large: it has {pixels:,} pixels, and at most {max_pixels:,} are allowed "
                "(--max-pixels)"
            )
        yield image
    except (DecodeError, BuildError):
        raise
    except MemoryError as error:
        raise _memory_error(width, height) from error
    except UnidentifiedImageError as error:
        raise DecodeError(f"not an image in a supported format ({', '.join(FORMATS)})") from error
    except Exception as error:  # Pillow raises anything for a damaged file
        is_plain = isinstance(error, OSError) and str(error)
        raise DecodeError(str(error) if is_plain else describe_error(error)) from error


def _memory_error(width: int, height: int) -> DecodeError | BuildError:
    """Return the error for a lack of memory, which may be the fault of a damaged file."""
    try:
        bytearray(_BYTES_PER_PIXEL * width * height)
    except MemoryError:
        return BuildError(
            f"There is not enough memory to decode a picture of {width:,}×{height:,} pixels. Free "
            "some, use fewer workers (--num-workers), or reject such pictures (--max-pixels). Then "
            "run the same command again: it goes on where it stopped."
        )
    return DecodeError("it asks for more memory than a picture of its size needs")


def to_mode(
    image: Image.Image, mode: Mode, background: tuple[int, int, int], largest: int = 255
) -> tuple[Image.Image, int]:
    """Convert a picture of any mode to RGB or L, or to F for the mode I;16. Returns remarks, too.

    Transparent pixels show ``background`` (R, G, B). ``largest`` is the picture's `largest_value`;
    for RGB and L, values are scaled so that it becomes 255, not clipped. Raises DecodeError if the
    pixels have no declared range.
    """
    if is_deep_gray(image):
        values = gray_values(image, largest)
        if mode == "I;16":
            return Image.fromarray(values.astype(np.float32)), 0
        gray = Image.fromarray(to_8_bits(values, largest))
        return gray if mode == "L" else gray.convert(mode), REDUCED
    if image.mode == "La":
        image = image.convert("LA")  # Pillow cannot convert premultiplied gray to anything else
    remarks = REDUCED * (largest > 255)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        remarks |= FLATTENED * (image.getchannel("A").getextrema() != (255, 255))
        canvas = Image.new("RGBA", image.size, (*background, 255))
        image = Image.alpha_composite(canvas, image).convert("RGB")
    if mode == "I;16":
        return image.convert("L").convert("F"), remarks
    return image if image.mode == mode else image.convert(mode), remarks


def parse_color(text: str, argument: str) -> tuple[int, int, int]:
    """Return (R, G, B) of a CSS color name or ``#rrggbb``. Raises ValueError."""
    try:
        return ImageColor.getrgb(text)[:3]
    except (ValueError, AttributeError):  # AttributeError: a tuple
        raise ValueError(
            f"{argument}: {text!r} is not a color. Give a name such as 'white', or '#7f7f7f'."
        ) from None


def loaded_libraries(decoder: str = "pillow") -> dict[str, str]:
    """Return name and version of the libraries that decode.

    These are the loaded libraries, which may differ from the installed ones: pillow-simd and Pillow
    share the package ``PIL``, and only a post-release number tells them apart.
    """
    is_simd = ".post" in PIL.__version__
    versions = {"pillow-simd" if is_simd else "pillow": PIL.__version__}
    if features.check_feature("libjpeg_turbo"):
        versions["libjpeg-turbo"] = features.version_feature("libjpeg_turbo") or "unknown"
    else:
        versions["libjpeg"] = features.version_codec("jpg") or "none"
    if decoder == "jpeg4py":
        from importlib import metadata  # 30 ms

        versions["jpeg4py"] = metadata.version("jpeg4py")
    return versions


# -------------------------------------------------------------------------------- EXIF orientation

_ORIENTATION, _TILE_WIDTH, _TILE_LENGTH = 274, 322, 323  # tags
#: The orientation that undoes another one, if it is not the same.
INVERSE = {6: 8, 8: 6}

#: Where pictures of other formats than TIFF keep an orientation.
_EXIF_KEYS = frozenset(("exif", "xmp", "XML:com.adobe.xmp", "Raw profile type exif"))


def orientation_of(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 if there is none.

    Ask before a JPEG or TIFF is loaded: the size to which a JPEG may be scaled depends on the
    orientation, and Pillow removes it from TIFFs. Ask after other formats are loaded: a PNG may
    have its EXIF behind the pixels.
    """
    if image.format != "TIFF" and _EXIF_KEYS.isdisjoint(image.info):
        return 1  # saves 20 µs for each picture without EXIF
    try:
        orientation = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # noqa: BLE001  # broken EXIF is no reason to reject a picture
        return 1
    return orientation if orientation in range(1, 9) else 1


# ------------------------------------------------------------------------------ optional libraries


def _import_jpeg4py() -> Any:
    try:
        import jpeg4py

        jpeg4py.initialize()  # looks for the library, which importing does not
    except (ImportError, OSError) as error:
        missing = "jpeg4py" if isinstance(error, ImportError) else "libturbojpeg"
        raise DependencyError(
            f"decoder 'jpeg4py': {missing} cannot be loaded: {error}. Run \"pip install "
            "'memload[jpeg4py]'\" and install libturbojpeg (Debian: apt install libturbojpeg0), "
            "or use the decoder 'pillow', which is as fast.",
            name=missing,
        ) from None
    return jpeg4py


def _decode_with(jpeg4py: Any, data: bytes) -> Image.Image | None:
    """Return a JPEG decoded by jpeg4py, or None if it fails, as on CMYK and on junk in headers.

    It is about as fast as Pillow (1.06 times), since resizing takes most of the time.
    """
    jpeg = jpeg4py.JPEG(np.frombuffer(data, np.uint8))
    try:
        return Image.fromarray(jpeg.decode())
    except Exception:  # noqa: BLE001  # JPEGRuntimeError and others; Pillow has the last word
        # After an error the decompressor stays in a bad state, and jpeg4py would put it back into
        # the pool from which all later decoding draws. One damaged file then made 393 of 400 good
        # ones fail, and one that was truncated in its header crashed the next. So take it out of
        # the pool and free it.
        handle, jpeg.decompressor = jpeg.decompressor, None
        if handle is not None:
            handle.release()
        return None
