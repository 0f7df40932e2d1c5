import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps, features

from memload.building.conversion import ArrayConverter, ArraySettings, Converter, Row, Settings
from memload.building.decoders import Decoder, loaded_libraries
from memload.building.resizing import FITS, INTERPOLATIONS, Placement
from memload.building.sources import Column, Record
from memload.errors import DecodeError, SourceError
from memload.storage.format import FLAG_FALLBACK, FLAG_ORIENTED, FLAG_OUTSIDE

#: Formats that can hold an EXIF orientation.
ORIENTED = ["JPEG", "PNG", "WEBP", "TIFF", *(["AVIF"] if features.check("avif") else [])]


def picture(width: int = 61, height: int = 40, seed: int = 0) -> Image.Image:
    small = Image.fromarray(np.random.default_rng(seed).integers(0, 256, (4, 5, 3), np.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC)


def photograph(width: int = 640, height: int = 480, seed: int = 0) -> Image.Image:
    """A picture with detail at every scale, as photographs have it."""
    layers = [picture(width, height, seed)]
    for octave in range(2, 7):
        noise = np.random.default_rng(seed + octave).integers(0, 256, (3 * 2**octave,) * 2 + (3,))
        layer = Image.fromarray(noise.astype(np.uint8)).resize((width, height))
        layers.append(Image.blend(layers[-1], layer, 0.5**octave))
    return layers[-1]


def encode(image: Image.Image, format: str = "PNG", orientation: int = 1, **options: Any) -> bytes:
    buffer = io.BytesIO()
    if orientation > 1:
        exif = Image.Exif()
        exif[0x0112] = orientation
        options["exif"] = exif
    image.save(buffer, format, **options)
    return buffer.getvalue()


def convert(image: Any, columns: Mapping[str, Any] | None = None, **options: Any) -> Row:
    schema = {
        name: Column("<f8", np.shape(value), points=True) for name, value in (columns or {}).items()
    }
    return Converter(Settings(**options), schema)(Record("key", image, columns or {}))


def converted(image: Any, size: tuple[int, int] = (16, 16), **options: Any) -> np.ndarray:
    row = convert(image, size=size, **options)
    return np.frombuffer(row.pixels, np.uint8).reshape(*size, -1)


def reason(image: Any, **options: Any) -> str:
    with pytest.raises(DecodeError) as caught:
        convert(image, **options)
    return caught.value.reason


def difference(found: np.ndarray, expected: np.ndarray) -> int:
    return int(np.abs(found.astype(int) - expected).max())


def need_jpeg4py() -> None:
    jpeg4py = pytest.importorskip("jpeg4py", reason="jpeg4py is not installed")
    try:
        jpeg4py.initialize()
    except OSError as error:
        pytest.skip(f"jpeg4py finds no libturbojpeg: {error}")


# ----------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fit": "stretch"}, "fit must be one of crop, squash, pad, not 'stretch'"),
        ({"interpolation": "linear"}, "interpolation must be one of nearest, .*, not 'linear'"),
        ({"mode": "RGBA"}, "mode must be one of RGB, L, not 'RGBA'"),
        ({"decoder": "cv2"}, "decoder must be one of pillow, jpeg4py, not 'cv2'"),
        ({"size": (0, 4)}, r"size must be a height and a width from 1 to 65535, not \(0, 4\)"),
        ({"size": (4, 65536)}, "size must be"),
        ({"max_pixels": 0}, "max_pixels must be 1 or more, not 0"),
    ],
)
def test_wrong_settings_are_errors_before_anything_is_read(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(**options)


@pytest.mark.parametrize("argument", ["background", "fill"])
def test_a_wrong_color_is_an_error_before_anything_is_read(argument: str) -> None:
    with pytest.raises(ValueError, match=f"{argument}: 'whitish' is not a color"):
        Settings(**{argument: "whitish"}).converter({})  # type: ignore[arg-type]


def test_settings_say_what_is_stored_and_by_which_libraries() -> None:
    assert Settings(size=(3, 4)).shape == (3, 4, 3)
    assert Settings(size=(3, 4), mode="L").shape == (3, 4, 1)
    assert Settings(size=(3, 4)).as_dict()["size"] == [3, 4]
    assert Settings().libraries() == loaded_libraries()


# ---------------------------------------------------------------------------------------- what an image may be


def test_a_path_bytes_a_pil_image_and_an_array_give_the_same_row(tmp_path: Path) -> None:
    data = encode(picture())
    path, link = tmp_path / "picture.png", tmp_path / "link.png"
    path.write_bytes(data)
    link.symlink_to(path)
    expected = convert(path, size=(12, 10))
    assert len(expected.pixels) == 12 * 10 * 3
    lazy = Image.open(path)
    for image in (
        link, data, bytearray(data), memoryview(data), picture(), np.asarray(picture()), lazy,
    ):  # fmt: skip
        found = convert(image, size=(12, 10))
        assert (found.pixels, found.size, found.flags) == (expected.pixels, (61, 40), 0)
    lazy.close()


def test_grey_arrays_may_have_two_or_three_axes() -> None:
    grey = np.asarray(picture().convert("L"))
    expected = converted(Image.fromarray(grey), mode="L")
    np.testing.assert_array_equal(converted(grey, mode="L"), expected)
    np.testing.assert_array_equal(converted(grey[:, :, None], mode="L"), expected)


def test_an_array_of_four_channels_is_laid_on_the_background() -> None:
    image = np.zeros((8, 8, 4), np.uint8)
    assert (converted(image, (4, 4), background="#0a141e") == (10, 20, 30)).all()


def test_sixteen_bit_arrays_are_scaled_not_clipped() -> None:
    ramp = np.linspace(0, 65535, 256).round().astype(np.uint16).reshape(16, 16)
    expected = np.round(ramp / 257)[:, :, None]
    np.testing.assert_array_equal(converted(ramp, mode="L"), expected)
    np.testing.assert_array_equal(converted(ramp[:, :, None], mode="L"), expected)


def test_arrays_need_not_be_contiguous_or_writable() -> None:
    image = np.asarray(picture()).copy()
    image.flags.writeable = False
    np.testing.assert_array_equal(converted(image[::-1, ::-1]), converted(image[::-1, ::-1].copy()))


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((4, 4), np.float32),
        np.zeros((4, 4, 2), np.uint8),
        np.zeros((4, 4, 3), np.uint16),
        np.zeros((4, 4), ">u2"),
        np.zeros(4, np.uint8),
        np.zeros((2, 4, 4, 3), np.uint8),
    ],
    ids=lambda array: f"{array.shape} {array.dtype}",
)
def test_other_arrays_are_rejected_and_the_remedy_is_named(array: np.ndarray) -> None:
    found = reason(array)
    assert found.startswith(f"an array of {array.dtype} and shape {array.shape} is not a picture")
    assert "mode='array'" in found


@pytest.mark.parametrize("image", [None, 7, "picture.jpg", [[0]]], ids=str)
def test_other_types_are_rejected_by_name(image: Any) -> None:
    assert reason(image).endswith(f"not {type(image).__name__}")


def test_a_pil_image_stays_as_it_was() -> None:
    image = picture()
    before = image.tobytes()
    convert(image, size=(40, 61))
    convert(image, size=image.size[::-1])
    assert (image.tobytes(), image.mode, image.size) == (before, "RGB", (61, 40))


def test_a_pil_image_without_pixels_or_that_was_closed_is_rejected() -> None:
    for image in (Image.new("RGB", (0, 5)), np.zeros((5, 0), np.uint8)):
        assert "its size is 0×5" in reason(image)
    with Image.open(io.BytesIO(encode(picture(), "PNG"))) as image:
        pass
    assert reason(image)


@pytest.mark.parametrize(
    "image", [encode(picture()), picture(), np.asarray(picture())], ids=["bytes", "PIL", "array"]
)
def test_max_pixels_holds_for_all_kinds_of_image(image: Any) -> None:
    assert "2,440 pixels, and at most 2,439" in reason(image, max_pixels=61 * 40 - 1)
    convert(image, max_pixels=61 * 40)


# -------------------------------------------------------------------------------------------------------- files


def test_what_cannot_be_read_is_told_apart(tmp_path: Path) -> None:
    link, loop, empty = (tmp_path / name for name in ("link.jpg", "loop.jpg", "empty.jpg"))
    link.symlink_to(tmp_path / "missing.jpg")
    loop.symlink_to(loop)
    empty.touch()
    os.mkfifo(tmp_path / "pipe.jpg")  # nobody writes to it
    assert reason(tmp_path / "missing.jpg") == "no such file"
    assert reason(link) == "a link to a file that does not exist"
    assert reason(loop).startswith("the file cannot be read: ")
    assert reason(empty) == "the file is empty"
    for path in (tmp_path, tmp_path / "pipe.jpg"):
        assert reason(path) == "not a file, but a folder, a pipe or a device"


def test_a_file_too_large_for_any_picture_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large.bmp"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a hole
    assert "it has 1,099,511,627,776 bytes, and at most 732,605,096 are read" in reason(path)


def test_a_row_tells_size_and_time_of_the_file_that_was_read(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(encode(picture()))
    os.utime(path, ns=(1, 1_234_567_890_123_456_789))
    row = convert(path, size=(8, 8))
    assert (row.file_size, row.file_mtime_ns) == (path.stat().st_size, 1_234_567_890_123_456_789)
    row = convert(path.read_bytes(), size=(8, 8))
    assert (row.file_size, row.file_mtime_ns) == (-1, -1)


@pytest.mark.parametrize("size", [(600_000, 1), (1, 600_000), (30_000, 2)])
@pytest.mark.parametrize("options", [{}, {"fast": True}, {"fit": "squash"}], ids=str)
def test_strips_are_converted(size: tuple[int, int], options: dict[str, Any]) -> None:
    assert (converted(Image.new("RGB", size, (5, 6, 7)), **options) == (5, 6, 7)).all()


# ---------------------------------------------------------------------------------------------- what a row holds


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_rows_are_rows_of_pixels_height_first(mode: str) -> None:
    image = picture(30, 20)
    found = converted(image, (20, 30), mode=mode)
    np.testing.assert_array_equal(found.squeeze(), np.asarray(image.convert(mode)))


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("image", [picture(90, 70), Image.new("RGB", (4, 4), "white")])
def test_the_sums_for_the_statistics_are_exact(image: Image.Image, mode: str) -> None:
    for size in [(1, 1), (7, 5), (600, 600)]:
        row = convert(image, size=size, mode=mode)
        values = np.frombuffer(row.pixels, np.uint8).reshape(size[0] * size[1], -1).astype(int)
        assert row.total.tolist() == values.sum(axis=0).tolist()
        assert row.squares.tolist() == (values * values).sum(axis=0).tolist()


def test_columns_are_carried_over() -> None:
    record = Record("key", picture(), {"label": 3, "box": np.arange(4)})
    schema = {"label": Column("<i8"), "box": Column("<i8", (4,))}
    found = Converter(Settings(size=(8, 8)), schema)(record).columns
    assert found["label"] == 3
    np.testing.assert_array_equal(found["box"], np.arange(4))


def test_what_pillow_had_to_decode_is_flagged() -> None:
    need_jpeg4py()
    data = encode(picture(), "JPEG")
    scan = data.rindex(b"\xff\xda")
    damaged = data[: (scan + len(data)) // 2] + b"\xff\xd9"
    assert convert(data, decoder="jpeg4py").flags == 0
    assert convert(damaged, decoder="jpeg4py").flags == FLAG_FALLBACK
    assert convert(damaged).flags == 0


@pytest.mark.parametrize("options", [{"fast": True}, {"mode": "L"}, {}], ids=str)
def test_rows_do_not_depend_on_the_decoder(options: dict[str, Any]) -> None:
    need_jpeg4py()
    for image in (picture(300, 200), picture(300, 200).convert("CMYK")):
        data = encode(image, "JPEG")
        found = convert(data, size=(20, 30), decoder="jpeg4py", **options)
        assert found.pixels == convert(data, size=(20, 30), **options).pixels


# --------------------------------------------------------------------------------------------------------- EXIF


def expected_pixels(data: bytes, size: tuple[int, int], fit: Any, resample: str) -> np.ndarray:
    """Turn upright, resize and crop with Pillow alone."""
    with Image.open(io.BytesIO(data)) as image:
        upright = ImageOps.exif_transpose(image).convert("RGB")
    target = size[::-1]
    placement = Placement.of(upright.size, target, fit)
    resized = upright.resize(placement.resized, Image.Resampling[resample.upper()])
    stored = Image.new("RGB", target, "red")
    if fit == "pad":
        stored.paste(resized, (-placement.left, -placement.top))
        return np.asarray(stored)
    corner = (placement.left, placement.top)
    return np.asarray(resized.crop((*corner, corner[0] + target[0], corner[1] + target[1])))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("fit", FITS)
def test_a_picture_is_turned_upright_and_then_resized_to_the_bit(
    fit: Any, orientation: int
) -> None:
    sources = [(61, 40), (40, 61), (33, 33), (150, 40), (30, 160)]
    for width, height in sources:
        image = photograph(width, height)
        for number, format in enumerate(ORIENTED):
            data = encode(image, format, orientation)
            size = [(16, 16), (15, 22), (22, 15), (70, 50)][number % 4]
            row = convert(data, size=size, fit=fit, fill="red")
            found = np.frombuffer(row.pixels, np.uint8).reshape(*size, 3)
            np.testing.assert_array_equal(found, expected_pixels(data, size, fit, "bilinear"))
            assert row.flags == FLAG_ORIENTED * (orientation > 1)
            assert row.size == (width, height)


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize("orientation", range(2, 9))
def test_turning_comes_first_for_each_filter(orientation: int, interpolation: str) -> None:
    data = encode(photograph(66, 48), "PNG", orientation)
    found = converted(data, (32, 32), interpolation=interpolation)
    np.testing.assert_array_equal(found, expected_pixels(data, (32, 32), "crop", interpolation))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ORIENTED)
@pytest.mark.parametrize("fast", [False, True])
def test_without_exif_the_stored_picture_is_converted(
    fast: bool, format: str, orientation: int
) -> None:
    turned, plain = (encode(picture(), format, number) for number in (orientation, 1))
    for fit in FITS:
        options: dict[str, Any] = {"size": (15, 22), "fit": fit, "fast": fast}
        found = convert(turned, exif=False, **options)
        assert (found.pixels, found.flags) == (convert(plain, **options).pixels, 0)
        assert found.size == (61, 40)


# ------------------------------------------------------------------------------------------------------- points


def mark(size: tuple[int, int], at: tuple[float, float], radius: float) -> Image.Image:
    """A black picture with one bright blob."""
    columns, rows = np.meshgrid(np.arange(size[0]), np.arange(size[1]))
    distance = ((columns - at[0]) ** 2 + (rows - at[1]) ** 2) / (2 * radius**2)
    return Image.fromarray((255 * np.exp(-distance)).astype(np.uint8))


def brightest(values: np.ndarray) -> np.ndarray:
    """Return x and y of the middle of what is bright."""
    weights = values.squeeze().astype(float)
    weights *= weights > weights.max() / 2
    rows, columns = np.indices(weights.shape)
    return np.array([(columns * weights).sum(), (rows * weights).sum()]) / weights.sum()


@pytest.mark.parametrize("exif", [True, False])
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG", "TIFF"])
def test_points_stay_on_what_they_mark(format: str, orientation: int, exif: bool) -> None:
    at = (52.0, 31.0)
    for size, target in [((96, 70), (31, 24)), ((90, 61), (200, 150)), ((60, 60), (60, 60))]:
        data = encode(mark(size, at, 3), format, orientation)
        for fit in FITS:
            for fast in (False, True):
                row = convert(
                    data, {"points": [at]}, size=target, fit=fit, mode="L", exif=exif, fast=fast
                )
                assert row.flags == FLAG_ORIENTED * (exif and orientation > 1)
                pixels = np.frombuffer(row.pixels, np.uint8).reshape(target)
                np.testing.assert_allclose(row.columns["points"][0], brightest(pixels), atol=0.5)


def test_points_follow_a_picture_that_was_decoded_smaller() -> None:
    at = (611.0, 333.0)
    data = encode(mark((960, 700), at, 20), "JPEG", 6)
    row = convert(data, {"points": [at]}, size=(64, 64), mode="L", fast=True)
    pixels = np.frombuffer(row.pixels, np.uint8).reshape(64, 64)
    np.testing.assert_allclose(row.columns["points"][0], brightest(pixels), atol=0.5)


@pytest.mark.parametrize(
    ("point", "outside"),
    [
        ((25.0, 0.0), False),  # the crop keeps columns 25 to 74 of 100
        ((24.5, 0.0), False),
        ((24.4, 0.0), True),
        ((74.4, 49.4), False),
        ((74.6, 25.0), True),
        ((49.5, -0.6), True),
        ((49.5, 49.6), True),
        ((float("nan"), 25.0), True),
        ((float("inf"), 25.0), True),
    ],
)
def test_a_point_that_leaves_the_picture_is_flagged(
    point: tuple[float, float], outside: bool
) -> None:
    columns = {"points": np.array([(49.5, 24.5), point])}
    row = convert(picture(100, 50), columns, size=(50, 50))
    assert row.flags == FLAG_OUTSIDE * outside
    assert columns["points"][0].tolist() == [49.5, 24.5]  # the record keeps its own


@pytest.mark.parametrize("fit", ["squash", "pad"])
def test_no_point_of_a_picture_leaves_it_by_squash_or_pad(fit: str) -> None:
    corners = [(-0.4, -0.4), (99.4, -0.4), (-0.4, 49.4), (99.4, 49.4)]
    assert convert(picture(100, 50), {"points": corners}, size=(33, 20), fit=fit).flags == 0


def test_only_columns_of_points_move() -> None:
    schema = {"eyes": Column("<f8", (2, 2), points=True), "size": Column("<f8", (2, 2))}
    values = np.array([[0.0, 0.0], [60.0, 39.0]])
    row = Converter(Settings(size=(20, 20), fit="squash"), schema)(
        Record("key", picture(), {"eyes": values, "size": values})
    )
    np.testing.assert_array_equal(row.columns["size"], values)
    np.testing.assert_allclose(row.columns["eyes"], (values + 0.5) * [20 / 61, 20 / 40] - 0.5)


# --------------------------------------------------------------------------------------------------------- fast


def psnr(found: np.ndarray, expected: np.ndarray) -> float:
    error = np.square(found.astype(float) - expected).mean()
    return float(10 * np.log10(255**2 / max(error, 1e-9)))


@pytest.mark.parametrize(
    ("side", "largest", "least_psnr"),
    [
        (400, 1, 60),
        (236, 1, 60),  # just above twice the target, where scaling by 2 would leave too little
        (118, 12, 45),
        (60, 12, 45),
        (12, 12, 45),
    ],
)
@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_fast_is_close_to_exact(
    side: int, largest: int, least_psnr: float, orientation: int
) -> None:
    data = encode(photograph(), "JPEG", orientation, quality=93)
    fast, exact = (converted(data, (side, side), fast=fast) for fast in (True, False))
    assert difference(fast, exact) <= largest
    assert psnr(fast, exact) >= least_psnr


@settings(max_examples=60, deadline=None)
@given(
    source=st.tuples(st.integers(1, 500), st.integers(1, 500)),
    size=st.tuples(st.integers(1, 64), st.integers(1, 64)),
    fit=st.sampled_from(FITS),
    orientation=st.sampled_from([1, 6]),
)
def test_a_draft_is_never_below_twice_the_size_it_is_resized_to(
    source: tuple[int, int], size: tuple[int, int], fit: Any, orientation: int
) -> None:
    data = encode(Image.new("L", source), "JPEG", orientation)
    upright = source[::-1] if orientation == 6 else source
    opened: list[tuple[int, int]] = []
    resize = Image.Image.resize
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Image.Image, "resize", lambda *a, **k: (opened.append(a[0].size), resize(*a, **k))[1]
        )
        convert(data, size=size, fit=fit, fast=True)
    resized = Placement.of(upright, size[::-1], fit).resized
    if opened[0] != upright:
        assert opened[0][0] >= 2 * resized[0]
        assert opened[0][1] >= 2 * resized[1]


@pytest.mark.parametrize("fit", FITS)
def test_fast_has_the_same_geometry(fit: Any) -> None:
    for orientation in (1, 3, 6):
        data = encode(picture(403, 301), "JPEG", orientation, quality=95)
        options: dict[str, Any] = {"size": (30, 41), "fit": fit, "fill": "blue"}
        assert difference(converted(data, fast=True, **options), converted(data, **options)) <= 4


@pytest.mark.parametrize("format", ["PNG", "WEBP", "TIFF", "GIF"])
def test_fast_holds_for_formats_that_cannot_be_scaled(format: str) -> None:
    data = encode(picture(200, 150), format)
    assert difference(converted(data, fast=True), converted(data)) <= 1


def test_fast_tells_the_size_of_the_stored_picture() -> None:
    assert convert(encode(picture(400, 300), "JPEG", 6), size=(16, 16), fast=True).size == (
        400,
        300,
    )


def test_the_default_is_torchvisions_arithmetic_on_the_decoded_picture() -> None:
    data = encode(photograph(640, 427), "JPEG")
    large = (
        Decoder().open(data).image.resize((int(224 * 640 / 427), 224), Image.Resampling.BILINEAR)
    )
    left = int(round((large.width - 224) / 2.0))  # noqa: RUF046  # torchvision's own expression
    expected = large.crop((left, 0, left + 224, 224))
    np.testing.assert_array_equal(converted(data, (224, 224)), np.asarray(expected))


# ------------------------------------------------------------------------------------------------------- arrays


def convert_array(array: Any, shape: tuple[int, int, int], descr: str, **columns: Any) -> Row:
    schema = {name: Column("<f8", (1, 2), points=True) for name in columns}
    return ArrayConverter(ArraySettings(shape, descr), schema)(Record("key", array, columns))


@pytest.mark.parametrize("descr", ["|u1", "<u2", "<f2", "<f4", ">f4"])
def test_arrays_are_stored_bit_for_bit(descr: str) -> None:
    array = (np.random.default_rng(0).random((4, 3, 5)) * 200).astype(descr)[:, ::-1]
    little = array.astype(np.dtype(descr).newbyteorder("<"))
    row = convert_array(array, (4, 3, 5), little.dtype.str)
    assert row.pixels == little.tobytes()
    assert row.size == (3, 4)
    assert (row.file_size, row.file_mtime_ns) == (-1, -1)
    values = little.reshape(12, 5).astype(float)
    np.testing.assert_allclose(row.total.astype(float), values.sum(axis=0))
    squares = values - (values.mean(axis=0) if "f" in descr else 0)
    np.testing.assert_allclose(row.squares.astype(float), np.square(squares).sum(axis=0))


def test_an_array_of_two_axes_has_one_channel() -> None:
    assert convert_array(np.ones((2, 3), np.uint8), (2, 3, 1), "|u1").pixels == b"\1" * 6


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.ones((2, 2, 3), np.float32), r"the array is \(2, 2, 3\) of float32, but the first one"),
        (np.ones((2, 3, 3), np.uint8), r"the array is \(2, 3, 3\) of uint8, but the first one is"),
        (np.ones((2, 2, 3), np.int64), r"int64 and shape \(2, 2, 3\) cannot be stored. Convert it"),
        (np.ones(3, np.uint8), "cannot be stored"),
        (np.ones((0, 2, 3), np.uint8), "cannot be stored"),
        (picture(), "decodes nothing, but this is Image"),
        (b"", "decodes nothing, but this is bytes"),
    ],
)
def test_arrays_that_differ_from_the_first_are_rejected(array: Any, message: str) -> None:
    with pytest.raises(DecodeError, match=message):
        convert_array(array, (2, 2, 3), "|u1")


def test_the_first_usable_array_gives_shape_and_type() -> None:
    class Arrays(list[Any]):
        def __getitem__(self, index: Any) -> Record:
            if isinstance(image := super().__getitem__(index), Exception):
                raise image
            return Record("key", image, {})

    broken = [b"", KeyError("k"), np.ones(3)]
    source: Any = Arrays([*broken, np.ones((2, 3), ">u2"), np.ones((4, 4), np.uint8)])
    assert ArraySettings.of(source) == ArraySettings((2, 3, 1), "<u2")
    with pytest.raises(SourceError, match=r"none of the first 2 samples .*: KeyError: 'k'"):
        ArraySettings.of(Arrays(broken[1:]))  # type: ignore[arg-type]


def test_points_outside_an_array_are_flagged() -> None:
    array = np.ones((2, 2, 3), np.uint8)
    inside, outside = (
        convert_array(array, (2, 2, 3), "|u1", p=[[x, 0.0]]).flags for x in (1.0, 1.6)
    )
    assert (inside, outside) == (0, FLAG_OUTSIDE)


def test_a_masked_array_is_rejected_in_both_modes() -> None:
    array = np.ma.masked_array(np.ones((2, 2, 3), np.uint8), mask=False)
    assert convert_array(array, (2, 2, 3), "|u1").pixels == b"\1" * 12
    array[0, 1, 2] = np.ma.masked
    with pytest.raises(DecodeError, match="masked"):
        convert_array(array, (2, 2, 3), "|u1")
    assert "masked" in reason(array)


def test_the_settings_in_an_index_name_what_resizes() -> None:
    assert Settings().as_dict()["resizer"] == "pillow"
