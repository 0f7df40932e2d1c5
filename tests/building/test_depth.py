"""Gray pictures of more than 8 bits: kept as uint16 with mode I;16, and noted when they are reduced."""

import io

import numpy as np
import pytest
from PIL import Image, TiffImagePlugin

import memload
from memload.building.resizing import FITS, INTERPOLATIONS, Placement
from memload.building.settings import Settings
from memload.errors import DecodeError
from memload.sources.samples import Sample

RNG = np.random.default_rng(0)
DEEP = RNG.integers(0, 65536, (30, 41), dtype=np.uint16)
TWELVE = RNG.integers(0, 4096, (30, 40), dtype=np.uint16)


def encode(values, format, **options):
    buffer = io.BytesIO()
    Image.fromarray(values).save(buffer, format, **options)
    return buffer.getvalue()


def pgm(values, maxval, *, plain=False):
    height, width = values.shape
    header = f"P{2 if plain else 5} {width} {height} {maxval}\n".encode()
    if plain:
        return header + " ".join(map(str, values.ravel().tolist())).encode()
    return header + values.astype(">u2").tobytes()


def tiff(samples, size, tags):
    """Return a little-endian TIFF of one strip. ``size`` is (height, width)."""
    facts = {256: size[1], 257: size[0], 259: 1, 262: 1, 277: 1, 278: size[0], 279: len(samples)}
    ifd = TiffImagePlugin.ImageFileDirectory_v2(b"II\x2a\0\0\0\0\0")
    for tag, value in (facts | tags | {273: 0}).items():  # the samples follow the tags
        ifd[tag] = value
    return b"II\x2a\0\x08\0\0\0" + ifd.tobytes(8) + samples


def packed(values):
    """Return values of 12 bits, two in three bytes."""
    pairs = values.reshape(-1, 2).tolist()
    return b"".join(bytes([a >> 4, (a & 15) << 4 | b >> 8, b & 255]) for a, b in pairs)


FILES = {
    "PNG": (encode(DEEP, "PNG"), DEEP),
    "TIFF": (encode(DEEP, "TIFF"), DEEP),
    "TIFF LZW": (encode(DEEP, "TIFF", compression="tiff_lzw"), DEEP),
    "TIFF big-endian": (encode(DEEP.astype(">u2"), "TIFF"), DEEP),
    "TIFF of 12 bits": (tiff(packed(TWELVE), TWELVE.shape, {258: 12}), TWELVE),
    "TIFF whose white is 0": (tiff(DEEP.tobytes(), DEEP.shape, {258: 16, 262: 0}), 65535 - DEEP),
    "PGM": (pgm(DEEP, 65535), DEEP),
    "PGM of 12 bits": (pgm(TWELVE, 4095), TWELVE),
    "plain PGM of 12 bits": (pgm(TWELVE, 4095, plain=True), TWELVE),
    "PGM up to 1,000": (pgm(TWELVE % 1001, 1000), TWELVE % 1001),
    "array": (DEEP, DEEP),
    "PNG of 8 bits": (encode(DEEP.astype(np.uint8), "PNG"), DEEP.astype(np.uint8)),
    "PNG of 1 bit": (encode(DEEP > 32767, "PNG"), (DEEP > 32767) * 255),
}


def convert(image, columns=None, **options):
    settings = Settings(**{"mode": "I;16"} | options)
    return settings.convert(Sample("key", image, columns or {}), list(columns or {}))


def pixels(row, size):
    return np.frombuffer(row.pixels, "<u2").reshape(size)


@pytest.mark.parametrize("name", FILES)
def test_16_bits_are_kept_as_in_the_file(name):
    image, values = FILES[name]
    row = convert(image, size=values.shape)
    np.testing.assert_array_equal(pixels(row, values.shape), values)
    total, squares = row.sums
    assert total.tolist() == [values.astype(int).sum()]
    assert squares.tolist() == [np.square(values.astype(np.int64)).sum()]
    assert row.remarks == 0


@pytest.mark.parametrize("mode", ["L", "I;16"])
@pytest.mark.parametrize("name", ["PGM", "PGM of 12 bits", "TIFF of 12 bits"])
def test_a_truncated_file_of_16_bits_is_rejected(name, mode):
    with pytest.raises(DecodeError):
        convert(FILES[name][0][:-100], mode=mode)


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("size", [(16, 16), (13, 50), (64, 64)])
def test_16_bits_are_resized_like_floats_and_rounded(size, fit, interpolation):
    placement = Placement.of((41, 30), size[::-1], fit)
    whole = Image.fromarray(DEEP.astype(np.float32)).resize(
        placement.resized, Image.Resampling[interpolation.upper()]
    )
    expected = Image.new("F", size[::-1], 65535)
    expected.paste(whole, (-placement.left, -placement.top))
    row = convert(FILES["PNG"][0], size=size, fit=fit, interpolation=interpolation, fill="white")
    rounded = np.asarray(expected).round().clip(0, 65535)
    np.testing.assert_array_equal(pixels(row, size), rounded)


@pytest.mark.parametrize("mode", ["I;16", "L"])
def test_transparency_of_16_bits_is_rejected_where_it_would_be_lost(mode):
    value = encode(DEEP, "PNG", transparency=int(DEEP[0, 0]))
    with pytest.raises(DecodeError, match=r"16 bits with transparency .* mode='array'"):
        convert(value, mode=mode)


@pytest.mark.parametrize("mode", ["RGB", "L", "I;16"])
@pytest.mark.parametrize(
    ("values", "range_text"),
    [
        (np.linspace(-0.5, 20, 64, dtype=np.float32), "F with values from -0.5 to 20"),
        (np.arange(64, dtype=np.int32) * -9, "I with values from -567 to 0"),
    ],
)
def test_measurements_are_no_picture(values, range_text, mode):
    with pytest.raises(DecodeError) as caught:
        convert(encode(values.reshape(8, 8), "TIFF"), mode=mode)
    assert range_text in caught.value.reason
    assert "mode='array'" in caught.value.reason


@pytest.fixture
def scans(tmp_path):
    """Five scans of 12 and 16 bits, of which one is in color, and a photograph."""
    root = tmp_path / "scans"
    root.mkdir()
    values = TWELVE % 3000
    values[0, :2] = 7, 4000
    (root / "1.png").write_bytes(encode(values.clip(7), "PNG"))
    (root / "2.tif").write_bytes(encode(values.clip(9), "TIFF"))
    (root / "3.pgm").write_bytes(pgm(values.clip(8), 4095))
    (root / "4.tif").write_bytes(tiff(packed(values.clip(10)), values.shape, {258: 12}))
    colors = (TWELVE % 1000)[:, :, None].repeat(3, 2)
    (root / "5.tif").write_bytes(
        tiff(colors.tobytes(), TWELVE.shape, {258: (16,) * 3, 262: 2, 277: 3})
    )
    Image.new("RGB", (40, 30)).save(root / "6.jpg")
    return root


@pytest.mark.parametrize("num_workers", [0, 2])
def test_reduced_pictures_are_noted_once(scans, tmp_path, num_workers):
    for mode in ("RGB", "L"):
        output = tmp_path / f"{mode}.bin"
        report = memload.build(scans, output, size=30, mode=mode, num_workers=num_workers)
        (note,) = (note for note in report.notes if " reduced to 8" in note)
        assert note.startswith("5 of 6 pictures have up to 16 bits and were reduced to 8.")
