import importlib
import io
import struct
import subprocess
import sys
import types
import warnings
import zlib
from importlib import metadata

import numpy as np
import PIL
import pytest
from PIL import Image, ImageOps, JpegImagePlugin, PngImagePlugin, features

from memload.building.decoders import Decoder, loaded_libraries
from memload.errors import DecodeError, DependencyError

AVIF = pytest.param(
    "AVIF", marks=pytest.mark.skipif(not features.check("avif"), reason="this Pillow has no AVIF")
)
LOSSLESS = {"PNG": {}, "WEBP": {"lossless": True, "exact": True}, "BMP": {}, "TIFF": {}, "PPM": {}}
WIDTH, HEIGHT = 53, 38


def picture(seed=0, width=WIDTH, height=HEIGHT):
    small = Image.fromarray(np.random.default_rng(seed).integers(0, 256, (4, 5, 3), np.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC)


def encode(image, format, **options):
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def oriented(image, format, orientation, **options):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encode(image, format, exif=exif, **options)


def decode(data, **options):
    """Return the upright pixels ``(H, W, C)``."""
    image = Decoder(**options).open(data).image
    return np.array(image).reshape(image.height, image.width, -1)


def far(found, expected):
    """Return the largest difference."""
    return int(np.abs(found.astype(int) - np.asarray(expected).astype(int)).max())


def reason(data, **options):
    with pytest.raises(DecodeError) as caught:
        decode(data, **options)
    return caught.value.reason


def png(width, height, depth, colour, rows, extra=b""):
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    ends = _chunk(b"IDAT", zlib.compress(rows)) + _chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + extra + ends


def _chunk(name, data):
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def tagged(tiff, tag, old, new):
    """Change the value of a tag of a single number."""
    kind = 4 if tag in (256, 257) else 3
    before, after = (struct.pack("<HHII", tag, kind, 1, value) for value in (old, new))
    assert tiff.count(before) == 1
    return tiff.replace(before, after)


def early_end(jpeg):
    """Leave out the second half of the last scan, but not the marker of the end."""
    return jpeg[: (jpeg.rindex(b"\xff\xda") + len(jpeg)) // 2] + b"\xff\xd9"


def jpegs():
    image = picture(1)
    return {
        "4:4:4": encode(image, "JPEG", subsampling="4:4:4", quality=93),
        "4:2:0": encode(image, "JPEG", subsampling="4:2:0"),
        "grey": encode(image.convert("L"), "JPEG"),
        "progressive": encode(image, "JPEG", progressive=True),
        "restart markers": encode(image, "JPEG", restart_marker_blocks=2),
        "CMYK": encode(image.convert("CMYK"), "JPEG", quality=95),
        "1×1": encode(picture(2, 1, 1), "JPEG"),
        "one row": encode(picture(3, 67, 1), "JPEG"),
        "turned": oriented(image, "JPEG", 6),
    }


JPEGS = jpegs()


def _has_jpeg4py():
    try:
        importlib.import_module("jpeg4py").initialize()
    except (ImportError, OSError):
        return False
    return True


#: The decoder with each optional library.
OPTIONS = [
    {"name": "pillow"},
    pytest.param(
        {"name": "jpeg4py"},
        marks=pytest.mark.skipif(not _has_jpeg4py(), reason="jpeg4py or libturbojpeg is missing"),
    ),
]


# ---------------------------------------------------------------------------------------- optional libraries


def no_libturbojpeg():
    raise OSError("Could not load libjpeg-turbo library")


@pytest.mark.parametrize(
    ("module", "missing"),
    [(None, "jpeg4py"), (types.SimpleNamespace(initialize=no_libturbojpeg), "libturbojpeg")],
)
def test_a_missing_library_is_an_error_that_says_what_to_install(monkeypatch, module, missing):
    monkeypatch.setitem(sys.modules, "jpeg4py", module)
    Decoder()  # which needs none of them
    with pytest.raises(DependencyError, match=r"memload\[jpeg4py\]'.*libturbojpeg0") as caught:
        Decoder("jpeg4py")
    assert caught.value.name == missing
    assert isinstance(caught.value, ImportError)


def test_loaded_libraries_are_named_with_their_versions(monkeypatch, jpeg4py):
    monkeypatch.setattr(features, "check_feature", lambda name: name == "libjpeg_turbo")
    monkeypatch.setattr(features, "version_feature", lambda name: "9.9.9")
    usual = {"pillow": PIL.__version__, "libjpeg-turbo": "9.9.9"}
    assert loaded_libraries() == usual
    versions = {"jpeg4py": metadata.version("jpeg4py")}
    assert loaded_libraries("jpeg4py") == usual | versions
    monkeypatch.setattr(features, "check_feature", lambda name: False)
    monkeypatch.setattr(features, "version_codec", lambda name: "9.6")
    monkeypatch.setattr(PIL, "__version__", "12.1.1.post0")
    assert loaded_libraries() == {"pillow-simd": "12.1.1.post0", "libjpeg": "9.6"}


# ---------------------------------------------------------------------------- the same pixels whichever decoder


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("kind", [*JPEGS, "early end", "PNG"])
def test_the_pixels_do_not_depend_on_jpeg4py(jpeg4py, kind, mode):
    damaged, png = early_end(JPEGS["4:4:4"]), encode(picture(), "PNG")
    data = {**JPEGS, "early end": damaged, "PNG": png}[kind]
    expected = decode(data, mode=mode)
    np.testing.assert_array_equal(decode(data, name="jpeg4py", mode=mode), expected, strict=True)
    assert Decoder("jpeg4py").open(data).used_fallback == (data == damaged)


JPEG4PY_SCRIPT = """
import io
import numpy as np
from PIL import Image
from memload.building.decoders import Decoder
from memload.errors import DecodeError

noise = np.random.default_rng(5).integers(0, 256, (9, 9, 3), np.uint8)
buffer = io.BytesIO()
Image.fromarray(noise).resize((97, 75)).save(buffer, "JPEG")
good = buffer.getvalue()
expected = np.asarray(Decoder().open(good).image)
decoder = Decoder("jpeg4py")
for number in range(200):
    bad = bytearray(good[: 200 + 7 * (number % 40)] if number % 2 else good)
    bad[number + 20 : number + 30] = b"\\xff" * (number % 5)
    try:
        decoder.open(bytes(bad))
    except DecodeError:
        pass
    picture = decoder.open(good)
    assert not picture.used_fallback, number
    assert np.array_equal(np.asarray(picture.image), expected), number
print("survived")
"""


def test_no_bad_file_poisons_or_crashes_a_later_one_with_jpeg4py(jpeg4py):
    # in a process of its own: without the guard, it dies of a segmentation fault
    command = [sys.executable, "-c", JPEG4PY_SCRIPT]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.stdout == "survived\n", f"exit status {done.returncode}: {done.stderr[-2000:]}"


# ---------------------------------------------------------------------------------------------------- formats


@pytest.mark.parametrize(
    ("format", "mode"),
    [
        *((format, mode) for format in LOSSLESS for mode in ("RGB", "L", "1")),
        *((format, "P") for format in ("PNG", "GIF", "BMP", "TIFF")),
    ],
)
def test_lossless_formats_come_back_exactly(format, mode):
    image = picture().quantize(31) if mode == "P" else picture().convert(mode)
    for into in ("RGB", "L"):
        found = decode(encode(image, format, **LOSSLESS.get(format, {})), mode=into)
        expected = np.asarray(image.convert("RGB").convert(into)).reshape(found.shape)
        np.testing.assert_array_equal(found, expected, strict=True)


@pytest.mark.parametrize("format", ["ICO", "TGA", "PDF", "EPS"])
def test_other_formats_are_rejected_by_name(format):
    expected = "not an image in a supported format (JPEG, PNG,"
    assert reason(encode(picture(), format)).startswith(expected)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_what_is_damaged_or_no_picture_is_a_decode_error(options):
    for data in (b"", b"no picture at all", b"\xff\xd8\xff", bytes(4096)):
        assert reason(data, **options)
    whole = [JPEGS[kind] for kind in ("4:4:4", "grey", "progressive", "CMYK")]
    if features.check("avif"):
        whole.append(encode(picture(), "AVIF"))
    whole += [encode(picture(), format) for format in ("PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")]
    for data in whole:
        for keep in (0.02, 0.5, 0.9):
            assert reason(data[: int(len(data) * keep)], **options)


# ------------------------------------------------------------------------------------------------------- modes


RAMP = np.linspace(0, 65535, 64 * 48).round().astype(np.uint16).reshape(48, 64)
SCALED = np.round(RAMP / 257).astype(np.uint8)


def test_sixteen_bit_grey_is_scaled_not_clipped():
    tiff, *others = (encode(Image.fromarray(RAMP), format) for format in ("TIFF", "PNG", "PPM"))
    white_is_zero = tagged(tiff, 262, 1, 0)
    for data in (tiff, *others, white_is_zero):
        expected = 255 - SCALED if data == white_is_zero else SCALED
        np.testing.assert_array_equal(decode(data), expected[:, :, None].repeat(3, axis=2))
        np.testing.assert_array_equal(decode(data, mode="L")[:, :, 0], expected)


@pytest.mark.parametrize("kind", ["color", "alpha"])
def test_sixteen_bit_color_and_alpha_are_scaled_not_clipped(kind):
    channels, color_type = (3, 2) if kind == "color" else (2, 4)
    rows = b"".join(b"\0" + row.repeat(channels).astype(">u2").tobytes() for row in RAMP)
    expected = SCALED if kind == "color" else (SCALED * (SCALED / 255)).round()
    found = decode(png(64, 48, 16, color_type, rows), background="black", mode="L")
    assert far(found[:, :, 0], expected) <= 2


@pytest.mark.parametrize("mode", ["I", "F"])
def test_pixels_without_a_declared_range_are_rejected(mode):
    # of small whole numbers too, which would pass for very dark 16 bits
    found = reason(encode(Image.new(mode, (8, 8), 200), "TIFF"))
    assert found.startswith(
        f"a picture of Pillow's mode {mode} with values from 200 to 200, and not"
    )
    assert "mode='array'" in found


def test_cmyk_is_shown_in_its_colors():
    inks = picture(1).convert("CMYK")
    for data in (JPEGS["CMYK"], encode(inks, "TIFF")):
        assert far(decode(data), inks.convert("RGB")) < 16


def veil():
    return Image.linear_gradient("L").resize((WIDTH, HEIGHT))


def on(image, alpha, background):
    share = alpha[:, :, None] / 255
    return np.round(np.asarray(image.convert("RGB")) * share + np.array(background) * (1 - share))


@pytest.mark.parametrize(
    ("options", "color"), [({}, (255, 255, 255)), ({"background": "#4080c0"}, (64, 128, 192))]
)
@pytest.mark.parametrize(
    ("mode", "format"), [("RGBA", "PNG"), ("RGBA", "WEBP"), ("RGBA", "TIFF"), ("LA", "PNG")]
)
def test_transparency_is_laid_on_the_background_which_is_white_by_default(
    mode, format, options, color
):
    image = picture().convert(mode)
    image.putalpha(veil())
    found = decode(encode(image, format, **LOSSLESS[format]), **options)
    assert far(found, on(image, np.asarray(veil()), color)) <= 1


# ----------------------------------------------------------------------------------------------- frames and EXIF


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG", "TIFF", "MPO"])
def test_of_several_frames_the_first_is_taken(format, options):
    frames = [Image.new("RGB", (20, 14), colour) for colour in ("red", "lime", "blue")]
    found = decode(encode(frames[0], format, save_all=True, append_images=frames[1:]), **options)
    assert far(found, frames[0]) < 12


@pytest.mark.parametrize("exif", [True, False])
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF", "LZW", AVIF])
def test_exif_orientation_is_applied_or_left(format, orientation, exif):
    options = {"compression": "tiff_lzw"} if format == "LZW" else {}
    stored, plain = (
        oriented(picture(), format.replace("LZW", "TIFF"), number, **options)
        for number in (orientation, 1)
    )
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(stored if exif else plain)))
    found = Decoder(exif=exif).open(stored)
    np.testing.assert_array_equal(np.asarray(found.image), np.asarray(expected))
    assert far(decode(plain), picture()) < 24
    assert found.orientation == (orientation if exif else 1)
    assert found.size == (WIDTH, HEIGHT)


def test_exif_behind_the_pixels_of_a_png_is_found():
    exif = Image.Exif()
    exif[0x0112] = 6
    plain = encode(picture(), "PNG")
    end = plain.index(b"IEND") - 4
    late = plain[:end] + _chunk(b"eXIf", exif.tobytes()[6:]) + plain[end:]
    turned = picture().transpose(Image.Transpose.ROTATE_270)
    np.testing.assert_array_equal(decode(late), np.asarray(turned))


def test_exif_that_says_nothing_usable_is_ignored():
    for value in (0, 9, 255):
        assert Decoder().open(oriented(picture(), "JPEG", value)).orientation == 1
    text = PngImagePlugin.PngInfo()
    text.add_text("Raw profile type exif", "\nexif\n      14\nno hexadecimal digits")
    data = encode(picture(), "PNG", pnginfo=text)
    np.testing.assert_array_equal(decode(data), np.asarray(picture()))
    data = encode(picture(), "JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff junk")
    with warnings.catch_warnings(action="ignore"):
        np.testing.assert_array_equal(decode(data), decode(encode(picture(), "JPEG")))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_max_pixels_is_compared_with_the_header_before_anything_is_decoded(monkeypatch, options):
    decode(JPEGS["4:4:4"], max_pixels=WIDTH * HEIGHT, **options)
    for load in (JpegImagePlugin.JpegImageFile, PngImagePlugin.PngImageFile):
        monkeypatch.setattr(load, "load", lambda self: pytest.fail("it was decoded"))
    for data in (JPEGS["4:4:4"], encode(picture(), "PNG")):
        found = reason(data, max_pixels=WIDTH * HEIGHT - 1, **options)
        assert (
            found == "too large: it has 2,014 pixels, and at most 2,013 are allowed (--max-pixels)"
        )


def test_a_size_beyond_pillows_own_limit_is_told_by_its_pixels():
    data = png(60000, 60000, 8, 2, b"\0\0\0\0")
    assert "3600000000 pixels" in reason(data)


def test_an_enormous_tile_of_a_tiny_tiff_is_compared_with_max_pixels():
    # size, bits, compression, photometric, samples, size of a tile, its offset and its bytes
    tags = {256: 1, 257: 1, 258: 8, 259: 8, 262: 1, 277: 1, 322: 32768, 323: 32768, 324: 8, 325: 9}
    fields = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    data = b"II*\0" + struct.pack("<IQIH", 20, 0, 0, len(tags)) + fields + bytes(4)
    assert reason(data).startswith("too large: it has 1,073,741,824 pixels")


@pytest.mark.parametrize(
    ("depth", "colour", "row", "transparent", "other"),
    [
        (8, 0, b"\0\x12\xff", b"\0\x12", 255),
        (8, 2, b"\0\7\x08\x09\xff\xff\xff", b"\0\7\0\x08\0\x09", 255),
    ],
)  # fmt: skip
def test_a_transparent_colour_shows_the_background(depth, colour, row, transparent, other):
    data = png(2, 1, depth, colour, row, _chunk(b"tRNS", transparent))
    found = decode(data, background="red")
    assert found[0].tolist() == [[255, 0, 0], [other] * 3]


@pytest.mark.parametrize(
    ("depth", "colour", "row", "transparent"),
    [
        (4, 0, b"\0\x5f", b"\0\x05"),
        (2, 0, b"\0\xc0", b"\0\x03"),
        (16, 0, b"\0\x12\x34\xff\xff", b"\x12\x34"),
        (16, 2, b"\0" + b"\x12\x34" * 3 + b"\xff\xff" * 3, b"\x12\x34" * 3),
    ],
)
def test_a_transparent_colour_that_pillow_does_not_scale_is_refused(
    depth, colour, row, transparent
):
    found = reason(png(2, 1, depth, colour, row, _chunk(b"tRNS", transparent)))
    assert found.startswith("a PNG of 2, 4 or 16 bits with transparency")
