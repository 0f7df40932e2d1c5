"""Gray pictures of more than 8 bits: kept as uint16 with mode I;16, and noted when they are reduced."""

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, TiffImagePlugin

import memload
from memload.building.conversion import Row, Settings
from memload.building.notes import FLATTENED
from memload.building.resizing import FITS, INTERPOLATIONS, Placement
from memload.building.sources.record import Record
from memload.errors import DecodeError

RNG = np.random.default_rng(0)
DEEP = RNG.integers(0, 65536, (30, 41), dtype=np.uint16)
TWELVE = RNG.integers(0, 4096, (30, 40), dtype=np.uint16)


def encode(values: np.ndarray, format: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(values).save(buffer, format, **options)
    return buffer.getvalue()


def pgm(values: np.ndarray, maxval: int, *, plain: bool = False) -> bytes:
    height, width = values.shape
    header = f"P{2 if plain else 5} {width} {height} {maxval}\n".encode()
    if plain:
        return header + " ".join(map(str, values.ravel().tolist())).encode()
    return header + values.astype(">u2").tobytes()


def tiff(samples: bytes, size: tuple[int, int], tags: dict[int, Any]) -> bytes:
    """Return a little-endian TIFF of one strip. ``size`` is (height, width)."""
    facts = {256: size[1], 257: size[0], 259: 1, 262: 1, 277: 1, 278: size[0], 279: len(samples)}
    ifd = TiffImagePlugin.ImageFileDirectory_v2(b"II\x2a\0\0\0\0\0")
    for tag, value in (facts | tags | {273: 0}).items():  # the samples follow the tags
        ifd[tag] = value
    return b"II\x2a\0\x08\0\0\0" + ifd.tobytes(8) + samples


def png_with_alpha(gray: np.ndarray, alpha: np.ndarray) -> bytes:
    """Return a PNG of 16-bit gray and alpha, which Pillow does not write."""
    rows = np.stack([gray, alpha], 2).astype(">u2").reshape(len(gray), -1)
    lines = b"".join(b"\0" + row.tobytes() for row in rows)
    header = struct.pack(">IIBBBBB", gray.shape[1], gray.shape[0], 16, 4, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


def packed(values: np.ndarray) -> bytes:
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
    "TIFF of 32 bits": (tiff(DEEP.astype("<u4").tobytes(), DEEP.shape, {258: 32}), DEEP),
    "PGM": (pgm(DEEP, 65535), DEEP),
    "PGM of 12 bits": (pgm(TWELVE, 4095), TWELVE),
    "plain PGM of 12 bits": (pgm(TWELVE, 4095, plain=True), TWELVE),
    "PGM up to 1,000": (pgm(TWELVE % 1001, 1000), TWELVE % 1001),
    "PNG with alpha": (png_with_alpha(DEEP, DEEP | 65535), DEEP),
    "array": (DEEP, DEEP),
    "PNG of 8 bits": (encode(DEEP.astype(np.uint8), "PNG"), DEEP.astype(np.uint8)),
    "PNG of 1 bit": (encode(DEEP > 32767, "PNG"), (DEEP > 32767) * 255),
}


def convert(image: Any, columns: dict[str, Any] | None = None, **options: Any) -> Row:
    settings = Settings(**{"mode": "I;16"} | options)
    return settings.convert(Record("key", image, columns or {}), list(columns or {}))


def pixels(row: Row, size: tuple[int, int]) -> np.ndarray:
    return np.frombuffer(row.pixels, "<u2").reshape(size)


@pytest.mark.parametrize("name", FILES)
def test_16_bits_are_kept_as_in_the_file(name: str) -> None:
    image, values = FILES[name]
    row = convert(image, size=values.shape)
    np.testing.assert_array_equal(pixels(row, values.shape), values)
    assert row.total.tolist() == [values.astype(int).sum()]
    assert row.squares.tolist() == [np.square(values.astype(np.int64)).sum()]
    assert row.remarks == 0


@pytest.mark.parametrize("mode", ["L", "I;16"])
@pytest.mark.parametrize("name", ["PNG with alpha", "PGM", "PGM of 12 bits", "TIFF of 12 bits"])
def test_a_truncated_file_of_16_bits_is_rejected(name: str, mode: str) -> None:
    with pytest.raises(DecodeError):
        convert(FILES[name][0][:-100], mode=mode)


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("size", [(16, 16), (13, 50), (64, 64)])
def test_16_bits_are_resized_like_floats_and_rounded(
    size: tuple[int, int], fit: Any, interpolation: Any
) -> None:
    placement = Placement.of((41, 30), size[::-1], fit)
    whole = Image.fromarray(DEEP.astype(np.float32)).resize(
        placement.resized, Image.Resampling[interpolation.upper()]
    )
    expected = Image.new("F", size[::-1], 65535)
    expected.paste(whole, (-placement.left, -placement.top))
    row = convert(FILES["PNG"][0], size=size, fit=fit, interpolation=interpolation, fill="white")
    rounded = np.asarray(expected).round().clip(0, 65535)
    np.testing.assert_array_equal(pixels(row, size), rounded)


def test_points_and_orientation_are_as_in_other_modes() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encode(DEEP, "PNG", exif=exif)
    points = {"points": [(3.0, 4.0)]}
    row, gray = (convert(data, points, size=(20, 24), mode=mode) for mode in ("I;16", "L"))
    np.testing.assert_array_equal(row.columns["points"], gray.columns["points"])
    assert (row.flags, row.source_size) == (gray.flags, gray.source_size)
    upright = convert(data, size=(41, 30))
    np.testing.assert_array_equal(pixels(upright, (41, 30)), np.rot90(DEEP, -1))


def test_colors_become_gray_of_8_bits() -> None:
    colors = RNG.integers(0, 256, (8, 8, 3), np.uint8)
    for image in (colors, encode(colors, "PNG"), Image.fromarray(colors).convert("P")):
        found, gray = (convert(image, size=(8, 8), mode=mode) for mode in ("I;16", "L"))
        np.testing.assert_array_equal(pixels(found, (8, 8)).tobytes()[::2], gray.pixels)


@pytest.mark.parametrize(("background", "level"), [("white", 65535), ("black", 0)])
def test_a_transparent_value_becomes_the_background(background: str, level: int) -> None:
    data = encode(DEEP, "PNG", transparency=int(DEEP[0, 0]))
    row = convert(data, size=DEEP.shape, background=background)
    expected = np.where(DEEP[0, 0] == DEEP, level, DEEP)
    np.testing.assert_array_equal(pixels(row, DEEP.shape), expected)


def test_alpha_of_16_bits_lets_the_background_through() -> None:
    alpha = DEEP[::-1].copy()
    row = convert(png_with_alpha(DEEP, alpha), size=DEEP.shape)
    expected = 65535 + (DEEP - 65535.0) * (alpha / 65535)
    assert np.abs(pixels(row, DEEP.shape) - expected).max() < 0.6
    assert row.remarks == FLATTENED
    gray = convert(png_with_alpha(DEEP, alpha), size=DEEP.shape, mode="L")
    assert np.abs(np.frombuffer(gray.pixels, np.uint8) - expected.ravel() / 257).max() < 2
    assert gray.value_range == (DEEP.min(), DEEP.max())


@pytest.mark.parametrize("mode", ["RGB", "L", "I;16"])
@pytest.mark.parametrize(
    ("data", "what"),
    [
        (tiff(bytes(8 * 8 * 8), (8, 8), {258: (8,) * 8, 277: 8}), "8 bands of 8-bit unsigned int"),
        (tiff(bytes(8 * 64 * 4), (8, 8), {258: (32,) * 8, 277: 8, 339: (3,) * 8}), "8 bands of 32-bit floats"),
        (tiff(bytes(64 * 8), (8, 8), {258: 64, 339: 3}), "1 band of 64-bit floats"),
        (encode(np.linspace(-0.5, 20, 64, dtype=np.float32).reshape(8, 8), "TIFF"), "of 32-bit floats from -0.5 to 20"),
        (encode(np.arange(64, dtype=np.int32).reshape(8, 8) * -9, "TIFF"), "of 32-bit signed integers from -567 to 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_tiff_that_is_no_picture_is_told_as_what_it_is(data: bytes, what: str, mode: str) -> None:
    with pytest.raises(DecodeError) as caught:
        convert(data, mode=mode)
    assert caught.value.reason.startswith("a TIFF ")
    assert what in caught.value.reason
    assert "mode='array'" in caught.value.reason


@pytest.fixture
def scans(tmp_path: Path) -> Path:
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
def test_reduced_pictures_are_noted_once_with_their_range(
    scans: Path, tmp_path: Path, num_workers: int
) -> None:
    for mode in ("RGB", "L"):
        output = tmp_path / f"{mode}.bin"
        report = memload.build(scans, output, size=30, mode=mode, num_workers=num_workers)
        gray, colors = (note for note in report.notes if " reduced to 8" in note)
        assert gray == (
            "4 of 6 pictures have up to 16 bits and were reduced to 8; their values go from 7 to "
            "4,000. Use --mode 'I;16' to keep them"
        )
        assert colors.startswith("1 of 6 pictures have colors of up to 16 bits")
        assert "from about 0 to 1,023" in colors


@pytest.mark.parametrize(("largest", "is_dark"), [(4095, True), (65535, False)])
def test_scans_of_12_bits_in_files_of_16_are_told_to_be_dark(
    tmp_path: Path, largest: int, is_dark: bool
) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "0.png").write_bytes(encode(TWELVE * (largest // 4095), "PNG"))
    report = memload.build(tmp_path / "images", tmp_path / "out.bin", num_workers=0)
    assert any("of 65,535, so that they are nearly black now" in n for n in report.notes) == is_dark


def test_bands_and_pages_that_are_left_out_are_noted(tmp_path: Path) -> None:
    root = tmp_path / "images"
    root.mkdir()
    tags = {258: (8,) * 4, 262: 2, 277: 4, 338: 0}  # as infrared of a satellite
    (root / "infrared.tif").write_bytes(tiff(bytes(20 * 30 * 4), (20, 30), tags))
    pages = [Image.new("L", (30, 20)) for _ in range(3)]
    pages[0].save(root / "pages.tif", save_all=True, append_images=pages[1:])
    pages[0].save(root / "page.tif")
    report = memload.build(root, tmp_path / "out.bin", size=16, num_workers=0)
    bands, files = report.notes[-2:]
    assert bands.startswith("1 of 3 pictures have bands besides their colors, which were left out")
    assert files == "1 of 3 pictures are TIFFs with several pages, of which the first was taken"


def test_a_data_set_of_16_bits_is_read_everywhere(scans: Path, tmp_path: Path) -> None:
    report = memload.build(scans, tmp_path / "out.bin", size=(30, 40), mode="I;16", num_workers=0)
    assert not [note for note in report.notes if "--mode 'I;16' to keep" in note]
    assert (report.shape, report.dtype) == ((30, 40, 1), "uint16")
    stored = np.load(tmp_path / "out.bin")
    statistics = memload.info(tmp_path / "out.bin")["statistics"]
    assert statistics["mean"] == pytest.approx([stored.mean() / 65535], rel=1e-12)
    assert statistics["std"] == pytest.approx([stored.std() / 65535], rel=1e-9)
    dataset = memload.MemmapDataset(tmp_path / "out.bin")
    np.testing.assert_array_equal(dataset.gather([0])[0].numpy(), stored[0])
    assert memload.verify(tmp_path / "out.bin").ok
    memload.preview(tmp_path / "out.bin", tmp_path / "grid.png")
    memload.build(tmp_path / "out.bin", tmp_path / "small.bin", size=(15, 20), num_workers=0)
    halves = Image.fromarray(stored[0, :, :, 0].astype(np.float32)).resize((20, 15), 2)
    small = np.load(tmp_path / "small.bin")[0, :, :, 0]
    np.testing.assert_array_equal(small, np.asarray(halves).round())
