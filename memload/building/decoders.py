"""Encoded bytes to pictures. A decoder imports its library when it is made.

The JPEG decoders all stand on libjpeg-turbo and give the same pixels to the bit; the file decides what a
picture looks like, not the decoder.
"""

import io
import re
from collections.abc import Callable
from importlib import metadata
from typing import Any, Literal, NamedTuple, Protocol, get_args

import numpy as np
import PIL
from PIL import Image, ImageColor, UnidentifiedImageError, features

from memload.building.resizing import turn
from memload.errors import DecodeError, DependencyError

Mode = Literal["RGB", "L"]
MODES: tuple[str, ...] = get_args(Mode)
DECODERS = ("pillow", "jpeg4py")

#: What Pillow may open. PostScript, which it hands to another program, and formats whose files can claim
#: hundreds of megabytes in a few bytes are not among them. MPO (two JPEGs in a file, of which the first is
#: taken) is no entry: Pillow opens it as JPEG, and fails with a KeyError on the name.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")

#: Pillow's own limit for a picture that is no decompression bomb: 256 MiB at 3 bytes a pixel.
MAX_PIXELS = 89_478_485

# tags of EXIF and TIFF
_ORIENTATION, _BITS_PER_SAMPLE, _PHOTOMETRIC, _SAMPLE_FORMAT = 274, 258, 262, 339
_TILE_WIDTH, _TILE_LENGTH = 322, 323
_INVERSE = {6: 8, 8: 6}


class Picture(NamedTuple):
    """A decoded picture, and what is known of its file."""

    image: Image.Image  #: in the mode asked for
    size: tuple[int, int]  #: width and height as stored, before any scaling by the decoder
    box: tuple[
        float, float, float, float
    ]  #: the part of ``image`` that shows the whole of ``size``
    turned: int  #: the EXIF orientation that the decoder has applied already (TIFF), else 1
    orientation: int  #: the EXIF orientation that is still to be applied, 1 for none
    fallback: bool  #: the chosen library gave up, and Pillow decoded it


#: Given the size and EXIF orientation of a JPEG, the (width, height) below which it must not be scaled down.
Draft = Callable[[tuple[int, int], int], tuple[int, int]]


class Decoder(Protocol):
    """Makes pictures of one mode out of encoded bytes. Thread-safe."""

    name: str

    def open(self, data: bytes | Image.Image, draft: Draft | None = None) -> Picture:
        """Decode bytes, or take over a PIL image. ``draft`` allows JPEGs to come scaled down by 2, 4 or 8.

        Raises DecodeError.
        """
        ...

    def decode(self, data: bytes) -> np.ndarray:
        """Return the upright picture as uint8 ``(H, W, C)``, a copy. Raises DecodeError."""
        ...


def get_decoder(
    name: str = "pillow",
    *,
    mode: Mode = "RGB",
    background: str = "white",
    exif: bool = True,
    max_pixels: int = MAX_PIXELS,
    strict: bool = False,
) -> Decoder:
    """Return the decoder ``pillow`` (or pillow-simd, where that is installed) or ``jpeg4py``.

    ``background`` is the colour put behind transparent pixels, by CSS name or ``#rrggbb``. ``exif=False``
    leaves pictures as stored. ``max_pixels`` bounds width × height and is held against the header, before
    any memory is taken. ``strict`` rejects JPEGs with damage that Pillow passes in silence.

    Raises ValueError, and DependencyError where the library is not installed.
    """
    if mode not in MODES:
        raise ValueError(f"mode: expected one of {', '.join(MODES)}, found {mode!r}")
    if name == "pillow":
        return PillowDecoder(mode, background, exif, max_pixels, strict)
    if name == "jpeg4py":
        return Jpeg4pyDecoder(mode, background, exif, max_pixels, strict)
    raise ValueError(f"decoder: expected one of {', '.join(DECODERS)}, found {name!r}")


class PillowDecoder:
    """Everything through Pillow or pillow-simd, which share their code path here."""

    name = "pillow"

    def __init__(
        self, mode: Mode, background: str, exif: bool, max_pixels: int, strict: bool
    ) -> None:
        self.mode, self.exif, self.max_pixels = mode, exif, max_pixels
        self.background = parse_colour(background, "background")
        self.damage = _import_simplejpeg() if strict else None

    def open(self, data: bytes | Image.Image, draft: Draft | None = None) -> Picture:
        """See `Decoder.open`."""
        try:
            if isinstance(data, Image.Image):
                return self._open(data, b"", None)
            if not data:
                raise DecodeError("the file is empty")
            return self._open(Image.open(io.BytesIO(data), formats=FORMATS), data, draft)
        except DecodeError:
            raise
        except Image.DecompressionBombError as error:
            # Pillow's own limit, above which it tells no size but the number, in parentheses.
            raise self._too_large(int(re.findall(r"\((\d+) pixels\)", str(error))[0])) from None
        except MemoryError:
            raise DecodeError("there is not enough memory to decode it") from None
        # Pillow's plugins raise OSError, ValueError, SyntaxError, struct.error, EOFError, … for bad files
        except Exception as error:
            raise DecodeError(_reason(error)) from error

    def decode(self, data: bytes) -> np.ndarray:
        """See `Decoder.decode`."""
        picture = self.open(data)
        pixels = np.array(turn(picture.image, picture.orientation))
        return pixels.reshape(*pixels.shape[:2], -1)

    def _open(self, image: Image.Image, data: bytes, draft: Draft | None) -> Picture:
        size = image.size
        if 0 in size:
            raise DecodeError(f"expected a picture with pixels, found {size[0]}×{size[1]}")
        if size[0] * size[1] > self.max_pixels:
            raise self._too_large(size[0] * size[1])
        jpeg = image.format in ("JPEG", "MPO") and data
        if jpeg and self.damage is not None:
            self.damage(data)
        if (
            image.format == "TIFF" and _tile_pixels(image) > self.max_pixels
        ):  # a tile is decoded whole
            raise self._too_large(_tile_pixels(image))
        before = _orientation(image, loaded=False)
        transparent = _transparent_value(image)
        scaled = None
        if jpeg and draft is not None and image.mode in ("L", "RGB"):
            scaled = image.draft(image.mode, draft(size, before if self.exif else 1))
        decoded, fallback = self._load(image, data, scaled=image.size != size)
        if transparent is not None:
            decoded.info["transparency"] = transparent
        pending = _orientation(
            image, loaded=True
        )  # Pillow turns a TIFF while it loads it, and only that
        turned = before if pending != before else 1
        if turned >= 5:  # the size that Pillow tells before it loads such a TIFF is the upright one
            size = (decoded.height, decoded.width)
        upright = to_mode(decoded, self.mode, self.background)
        if not self.exif:
            upright = turn(upright, _INVERSE.get(turned, turned))
            turned = pending = 1
        box = (
            scaled[1]
            if scaled is not None
            else (0.0, 0.0, float(upright.width), float(upright.height))
        )
        return Picture(upright, size, box, turned, pending, fallback)

    def _too_large(self, pixels: int) -> DecodeError:
        return DecodeError(
            f"expected at most {self.max_pixels:,} pixels (--max-pixels), found {pixels:,}"
        )

    def _load(self, image: Image.Image, data: bytes, scaled: bool) -> tuple[Image.Image, bool]:
        image.load()
        return image, False


class Jpeg4pyDecoder(PillowDecoder):
    """JPEGs through jpeg4py, and through Pillow what it cannot read (CMYK, junk in headers, other formats).

    Measured at about the speed of Pillow (1.06 times): the resize is what takes the time.
    """

    name = "jpeg4py"

    def __init__(
        self, mode: Mode, background: str, exif: bool, max_pixels: int, strict: bool
    ) -> None:
        super().__init__(mode, background, exif, max_pixels, strict)
        _import_jpeg4py()

    def _load(self, image: Image.Image, data: bytes, scaled: bool) -> tuple[Image.Image, bool]:
        if (
            not data
            or image.format not in ("JPEG", "MPO")
            or image.mode not in ("L", "RGB")
            or scaled
        ):
            return super()._load(image, data, scaled)
        jpeg = _import_jpeg4py()(np.frombuffer(data, np.uint8))
        try:
            return Image.fromarray(jpeg.decode()), False
        except Exception:  # noqa: BLE001  # JPEGRuntimeError and whatever else; Pillow has the last word
            # The decompressor stays in a bad state after an error, and jpeg4py would put it back into the
            # pool that all later decoding draws from: one damaged file made 393 of 400 good ones fail, and
            # one cut off inside its header crashed the next. So take it out and free it.
            handle, jpeg.decompressor = jpeg.decompressor, None
            if handle is not None:
                handle.release()
        image.load()
        return image, True


def to_mode(image: Image.Image, mode: Mode, background: tuple[int, int, int]) -> Image.Image:
    """Convert a picture of any mode to RGB or L, transparency laid upon ``background`` (R, G, B).

    16 bits are scaled to 8, not clipped. Raises DecodeError where a mode has no declared range.
    """
    if image.mode.startswith("I") or image.mode == "F":
        value = image.info.get("transparency")
        seen = Image.fromarray(np.where(np.asarray(image) == value, 0, 255).astype(np.uint8))
        image = Image.fromarray(_scale_16_bit(image))
        if isinstance(value, int):
            image = Image.merge("LA", (image, seen))
    if image.mode == "La":
        image = image.convert("LA")  # the only way that Pillow has from there
    if image.has_transparency_data:
        image = image.convert("RGBA")
        canvas = Image.new("RGBA", image.size, (*background, 255))
        image = Image.alpha_composite(canvas, image).convert("RGB")
    return image if image.mode == mode else image.convert(mode)


def _scale_16_bit(image: Image.Image) -> np.ndarray:
    pixels = np.asarray(image)
    tags = getattr(image, "tag_v2", {})  # a TIFF says more than the mode does
    bits, signed = tags.get(_BITS_PER_SAMPLE, (16,))[0], tags.get(_SAMPLE_FORMAT, (1,))[0] == 2
    low, high = (int(pixels.min()), int(pixels.max())) if image.mode != "F" else (-1, -1)
    if low < 0 or high > 65535 or bits > 16 or signed:
        raise DecodeError(f"pixels of mode {image.mode} have no declared range to scale from")
    top = (1 << bits) - 1
    scaled: np.ndarray = ((pixels.astype(np.uint32) * 255 + top // 2) // top).astype(np.uint8)
    return (
        255 - scaled if tags.get(_PHOTOMETRIC) == 0 else scaled
    )  # white is zero, which Pillow heeds up to 8 bits


def parse_colour(text: str, argument: str) -> tuple[int, int, int]:
    """Return (R, G, B) of a CSS colour name or ``#rrggbb``. Raises ValueError that names the argument."""
    try:
        return ImageColor.getrgb(text)[:3]
    except (ValueError, AttributeError):
        raise ValueError(
            f"{argument}: expected a colour such as 'white' or '#7f7f7f', found {text!r}"
        ) from None


def loaded_libraries(decoder: str = "pillow", *, strict: bool = False) -> dict[str, str]:
    """Return name and version of the libraries that decode: those really loaded, not those installed.

    pillow-simd and Pillow share the package ``PIL``; a post-release number is what tells them apart.
    """
    simd = ".post" in PIL.__version__
    versions = {"pillow-simd" if simd else "pillow": PIL.__version__}
    turbo = (
        features.version_feature("libjpeg_turbo")
        if features.check_feature("libjpeg_turbo")
        else None
    )
    if turbo:
        versions["libjpeg-turbo"] = turbo
    else:
        versions["libjpeg"] = features.version_codec("jpg") or "none"
    if decoder == "jpeg4py":
        versions["jpeg4py"] = metadata.version("jpeg4py")
    if strict:
        versions["simplejpeg"] = metadata.version("simplejpeg")
    return versions


def _tile_pixels(image: Image.Image) -> int:
    tags = getattr(image, "tag_v2", {})
    return int(tags.get(_TILE_WIDTH, 0)) * int(tags.get(_TILE_LENGTH, 0))


def _transparent_value(image: Image.Image) -> Any:
    """Return the transparent colour of a PNG as Pillow's pixels will have it: it scales these, but not that."""
    value, tile = image.info.get("transparency"), getattr(image, "tile", None)
    if image.format != "PNG" or value is None or not tile:
        return None
    args = tile[0][3]
    raw = args[0] if isinstance(args, tuple) else args
    if isinstance(value, int) and raw in ("L;2", "L;4"):
        return value * (85 if raw == "L;2" else 17)
    if isinstance(value, tuple) and raw == "RGB;16B":  # of which Pillow keeps the upper 8 bits
        return tuple(part >> 8 for part in value)
    return None


#: Where pictures of other formats than TIFF keep an orientation.
_EXIF = ("exif", "xmp", "XML:com.adobe.xmp")


def _orientation(image: Image.Image, *, loaded: bool) -> int:
    places = (*_EXIF, "Raw profile type exif") if loaded else _EXIF
    if image.format != "TIFF" and not any(place in image.info for place in places):
        return 1  # 20 µs saved on each picture that has no EXIF at all
    if image.format == "PNG" and not loaded and "exif" not in image.info:
        return 1  # getexif would load it, and keep to itself what is wrong with it
    try:
        found = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # noqa: BLE001  # EXIF that cannot be parsed says nothing; the picture may be fine
        return 1
    return found if found in range(1, 9) else 1


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return f"not a picture in one of the formats {', '.join(FORMATS)}"
    return (
        f"{error}"
        if isinstance(error, OSError) and str(error)
        else f"{type(error).__name__}: {error}"
    )


def _import_jpeg4py() -> Callable[..., Any]:
    try:
        import jpeg4py  # an extra

        jpeg4py.initialize()  # only this looks for the library, and only once
    except ImportError:
        raise DependencyError(
            "decoder 'jpeg4py': expected the package jpeg4py, found it not installed. Run "
            "\"pip install 'memload[jpeg4py]'\" and install libturbojpeg (Debian: libturbojpeg0), "
            "or use the decoder 'pillow', which is as fast",
            name="jpeg4py",
        ) from None
    except OSError as error:
        raise DependencyError(
            f"decoder 'jpeg4py': expected the system library libturbojpeg, found: {error}. Install it "
            "(Debian: apt install libturbojpeg0), or use the decoder 'pillow', which is as fast",
            name="libturbojpeg",
        ) from None
    return jpeg4py.JPEG  # type: ignore[no-any-return]  # it ships no types


def _import_simplejpeg() -> Callable[[bytes], None]:
    try:
        import simplejpeg  # an extra
    except ImportError:
        raise DependencyError(
            "strict: expected the package simplejpeg, found it not installed. "
            "Run \"pip install 'memload[strict]'\", or leave --strict out",
            name="simplejpeg",
        ) from None

    def check(data: bytes) -> None:
        try:
            # Scaled down by 8 every bit of the file is still read, which finds the same damage as a full
            # decode (146 of 200 altered files both ways) in 0.7 of the time.
            simplejpeg.decode_jpeg(data, colorspace="GRAY", min_height=1, min_width=1, min_factor=8)
        except ValueError as error:
            if str(error).startswith(_DAMAGE):
                raise DecodeError(f"damaged JPEG: {error}") from None
            # else it is a kind of JPEG that simplejpeg does not read, such as 12 bits: Pillow decides

    return check


#: How libjpeg's warnings about damaged data begin (its jerror.h).
_DAMAGE = ("Corrupt JPEG data", "Premature end of JPEG", "Inconsistent progression", "Invalid SOS")
