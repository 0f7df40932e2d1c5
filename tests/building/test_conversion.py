import importlib.util
import io
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from memload.building.conversion import Converter, Row, Settings
from memload.building.decoders import get_decoder, loaded_libraries
from memload.building.resizing import FITS, place, resize
from memload.building.sources import Column, Record
from memload.errors import DecodeError, DependencyError
from memload.storage.format import FLAG_FALLBACK, FLAG_ORIENTED, FLAG_OUTSIDE

ORIENTED = ("JPEG", "PNG", "WEBP", "TIFF")


def picture(width: int = 61, height: int = 40, seed: int = 0) -> Image.Image:
    small = Image.fromarray(np.random.default_rng(seed).integers(0, 256, (4, 5, 3), np.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC)


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


def pixels(row: Row, size: tuple[int, int], channels: int = 3) -> np.ndarray:
    return np.frombuffer(row.pixels, np.uint8).reshape(*size, channels)


def converted(image: Any, size: tuple[int, int] = (16, 16), **options: Any) -> np.ndarray:
    return pixels(
        convert(image, size=size, **options), size, 1 if options.get("mode") == "L" else 3
    )


def reason(image: Any, **options: Any) -> str:
    with pytest.raises(DecodeError) as caught:
        convert(image, **options)
    return caught.value.reason


def levels(found: np.ndarray, expected: np.ndarray) -> int:
    return int(np.abs(found.astype(int) - expected).max())


@pytest.fixture(scope="module")
def photographs() -> list[Image.Image]:
    """Three of 640×480, as scripts/photographs.py makes them."""
    path = Path(__file__).parents[2] / "scripts" / "photographs.py"
    module = _module(path)
    return [module.photograph(np.random.default_rng(seed), 640, 480) for seed in range(3)]


def _module(path: Path) -> ModuleType:
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


# ------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fit": "stretch"}, "fit: expected one of crop, squash, pad, found 'stretch'"),
        ({"interpolation": "linear"}, "interpolation: expected one of nearest, .*, found 'linear'"),
        ({"mode": "RGBA"}, "mode: expected one of RGB, L, found 'RGBA'"),
        ({"resizer": "cv2"}, "resizer: expected one of pillow, torch, found 'cv2'"),
        ({"fill": "blackish"}, "fill: expected a colour .*, found 'blackish'"),
        ({"size": (0, 4)}, r"size: expected a height and a width from 1 to 65535, found \(0, 4\)"),
        ({"size": (4, 65536)}, "size: expected a height and a width"),
        ({"size": (4.0, 4)}, "size: expected a height and a width"),
        ({"max_pixels": 0}, "max_pixels: expected 1 or more, found 0"),
        (
            {"resizer": "torch", "interpolation": "box"},
            "for the resizer 'torch': expected one of bilinear, bicubic",
        ),
        ({"resizer": "torch", "fast": True}, "fast: expected the resizer 'pillow', found 'torch'"),
    ],
)
def test_wrong_settings_are_told_before_anything_is_read(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(**options)


def test_settings_name_the_libraries_that_take_part() -> None:
    assert Settings().libraries() == loaded_libraries()
    assert "torch" in Settings(resizer="torch").libraries()
    assert Settings(mode="L").channels == 1
    assert Settings().channels == 3
    assert Settings(size=(3, 4)).as_dict()["size"] == [3, 4]


def test_a_converter_that_misses_torch_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    with pytest.raises(DependencyError, match="resizer 'torch'"):
        Converter(Settings(resizer="torch"), {})


# ------------------------------------------------------------------------------------------- what an image may be


def test_a_path_bytes_a_pil_image_and_an_array_give_the_same_row(tmp_path: Path) -> None:
    data = encode(picture())
    path = tmp_path / "picture.png"
    path.write_bytes(data)
    first = convert(path, size=(12, 10))
    assert len(first.pixels) == 12 * 10 * 3
    for image in (
        data,
        bytearray(data),
        memoryview(data),
        picture(),
        np.asarray(picture()),
        Image.open(path),
    ):
        found = convert(image, size=(12, 10))
        assert found.pixels == first.pixels
        assert (found.size, found.flags) == ((61, 40), 0)
        if isinstance(image, Image.Image):
            image.close()


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


def test_arrays_need_not_be_contiguous_and_are_not_written_to() -> None:
    image = np.asarray(picture()).copy()
    image.flags.writeable = False
    np.testing.assert_array_equal(converted(image[::-1, ::-1]), converted(image[::-1, ::-1].copy()))


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((4, 4), np.float32),
        np.zeros((4, 4), bool),
        np.zeros((4, 4), np.int64),
        np.zeros((4, 4, 2), np.uint8),
        np.zeros((3, 4, 5), np.uint8),
        np.zeros((4, 4, 3), np.uint16),
        np.zeros((4, 4), ">u2"),
        np.zeros(4, np.uint8),
        np.zeros((2, 4, 4, 3), np.uint8),
        np.zeros((0, 4), np.uint8),
        np.zeros((4, 0, 3), np.uint8),
    ],
    ids=lambda array: f"{array.shape} {array.dtype}",
)
def test_other_arrays_are_decode_errors_that_say_what_was_expected(array: np.ndarray) -> None:
    assert reason(array).endswith(f"found {array.shape} of {array.dtype}")


@pytest.mark.parametrize(
    "image", [None, 7, "picture.jpg", [[0]], object()], ids=lambda image: type(image).__name__
)
def test_other_types_are_decode_errors_that_name_the_type(image: Any) -> None:
    found = reason(image)
    assert found == f"expected a PIL image, an array, bytes or a path, found {type(image).__name__}"


def test_a_pil_image_that_was_handed_in_stays_as_it_was() -> None:
    image = picture()
    before = image.tobytes()
    convert(image, size=(40, 61))
    convert(image, size=image.size[::-1])
    assert (image.tobytes(), image.mode, image.size) == (before, "RGB", (61, 40))


def test_a_pil_image_without_pixels_is_a_decode_error() -> None:
    assert reason(Image.new("RGB", (0, 5))) == "expected a picture with pixels, found 0×5"
    with Image.open(io.BytesIO(encode(picture(), "PNG"))) as image:
        pass
    assert reason(image)


# ---------------------------------------------------------------------------------------------------- bad paths


def test_a_missing_file_a_link_to_nothing_and_a_folder_are_told_apart(tmp_path: Path) -> None:
    assert reason(tmp_path / "missing.jpg") == "no such file"
    link = tmp_path / "link.jpg"
    link.symlink_to(tmp_path / "missing.jpg")
    assert reason(link) == "a link to nothing"
    assert reason(tmp_path) == "expected a file, found a folder, a pipe or a device"
    loop = tmp_path / "loop.jpg"
    loop.symlink_to(loop)
    assert reason(loop).startswith("cannot be read: ")


def test_an_empty_file_is_told_as_such(tmp_path: Path) -> None:
    path = tmp_path / "empty.jpg"
    path.touch()
    assert reason(path) == "the file is empty"


def test_a_link_to_a_picture_is_followed(tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(encode(picture()))
    (tmp_path / "link.png").symlink_to(tmp_path / "picture.png")
    np.testing.assert_array_equal(converted(tmp_path / "link.png"), converted(picture()))


def test_a_file_too_large_for_any_picture_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large.bmp"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a hole
    assert reason(path) == "expected a file of at most 732,605,096 bytes, found 1,099,511,627,776"
    limit = 8 * 1000 + (16 << 20)
    with path.open("wb") as file:
        file.truncate(limit + 1)
    assert reason(path, max_pixels=1000).startswith(f"expected a file of at most {limit:,} bytes")


@pytest.mark.parametrize(
    "image", [encode(picture()), picture(), np.asarray(picture())], ids=["bytes", "PIL", "array"]
)
def test_max_pixels_holds_for_all_kinds_of_image(image: Any) -> None:
    assert reason(image, max_pixels=61 * 40 - 1).endswith("found 2,440")
    convert(image, max_pixels=61 * 40)


@pytest.mark.parametrize("decoder", ["pillow", "jpeg4py"])
def test_a_damaged_file_is_a_decode_error(decoder: str) -> None:
    if decoder == "jpeg4py":
        _need_jpeg4py()
    assert reason(encode(picture(), "JPEG")[:-50], decoder=decoder)


@pytest.mark.parametrize(
    "error", [MemoryError(), ValueError("Box can't be empty"), RuntimeError("no memory")]
)
def test_a_picture_that_cannot_be_resized_is_a_decode_error(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("memload.building.conversion.resize", fail)
    assert reason(picture()) == f"cannot be resized from 61×40: {str(error) or 'MemoryError'}"


@pytest.mark.parametrize("size", [(600_000, 1), (1, 600_000), (30_000, 2)])
@pytest.mark.parametrize(
    "options", [{}, {"fast": True}, {"resizer": "torch"}, {"fit": "squash"}], ids=str
)
def test_strips_are_converted(size: tuple[int, int], options: dict[str, Any]) -> None:
    assert (converted(Image.new("RGB", size, (5, 6, 7)), **options) == (5, 6, 7)).all()


# ------------------------------------------------------------------------------------------------ what a row holds


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("resizer", ["pillow", "torch"])
def test_rows_are_rows_of_pixels_height_first(mode: str, resizer: str) -> None:
    image = picture(30, 20)
    found = converted(image, (20, 30), mode=mode, resizer=resizer)
    np.testing.assert_array_equal(found.squeeze(), np.asarray(image.convert(mode)))


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_the_sums_for_the_statistics_are_exact(mode: str) -> None:
    for seed, size in enumerate([(1, 1), (7, 5), (64, 48)]):
        row = convert(picture(90, 70, seed), size=size, mode=mode)
        channels = 3 if mode == "RGB" else 1
        values = pixels(row, size, channels).reshape(-1, channels).astype(np.int64)
        np.testing.assert_array_equal(row.total, values.sum(axis=0))
        np.testing.assert_array_equal(row.squares, (values * values).sum(axis=0))


def test_the_sums_do_not_overflow() -> None:
    row = convert(Image.new("L", (4, 4), 255), size=(600, 600), mode="L")
    assert (row.total.tolist(), row.squares.tolist()) == ([600 * 600 * 255], [600 * 600 * 255**2])


def test_the_size_is_that_of_the_stored_picture() -> None:
    for format in ORIENTED:
        for orientation in (1, 6):
            for fast in (False, True):
                found = convert(
                    encode(picture(400, 300), format, orientation), size=(16, 16), fast=fast
                )
                assert found.size == (400, 300)


def test_columns_are_carried_over() -> None:
    record = Record("key", picture(), {"label": 3, "box": np.arange(4)})
    schema = {"label": Column("<i8"), "box": Column("<i8", (4,))}
    found = Converter(Settings(size=(8, 8)), schema)(record).columns
    assert found["label"] == 3
    np.testing.assert_array_equal(found["box"], np.arange(4))


def test_the_record_keeps_its_own_points() -> None:
    columns = {"points": np.array([[3.0, 4.0]])}
    found = convert(picture(), columns, size=(8, 8))
    assert columns["points"].tolist() == [[3.0, 4.0]]
    assert found.columns["points"].tolist() != [[3.0, 4.0]]


def test_what_pillow_had_to_decode_is_flagged() -> None:
    _need_jpeg4py()
    data = encode(picture(), "JPEG")
    scan = data.rindex(b"\xff\xda")
    damaged = data[: (scan + len(data)) // 2] + b"\xff\xd9"
    assert convert(data, decoder="jpeg4py").flags == 0
    assert convert(damaged, decoder="jpeg4py").flags == FLAG_FALLBACK
    assert convert(damaged).flags == 0


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("options", [{"fast": True}, {"fit": "pad"}, {}], ids=str)
def test_rows_do_not_depend_on_the_decoder(options: dict[str, Any], mode: str) -> None:
    _need_jpeg4py()
    for data in (
        encode(picture(300, 200), "JPEG"),
        encode(picture(300, 200).convert("CMYK"), "JPEG"),
    ):
        ours = convert(data, size=(20, 30), mode=mode, decoder="jpeg4py", **options)
        assert ours.pixels == convert(data, size=(20, 30), mode=mode, **options).pixels


# ----------------------------------------------------------------------------------------------------------- EXIF


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ORIENTED)
@pytest.mark.parametrize("fit", FITS)
def test_exif_is_applied_as_if_before_resizing(fit: Any, format: str, orientation: int) -> None:
    for width, height in [(61, 40), (40, 61), (33, 33)]:  # margins that are odd on one side
        data = encode(picture(width, height), format, orientation)
        with Image.open(io.BytesIO(data)) as image:
            upright = ImageOps.exif_transpose(image)
        for size in [(16, 16), (15, 22), (22, 15), (70, 50)]:
            row = convert(data, size=size, fit=fit, fill="red")
            expected = resize(upright, place(upright.size, size[::-1], fit), fill=(255, 0, 0))
            assert levels(pixels(row, size), np.asarray(expected)) <= 1
            assert row.flags == FLAG_ORIENTED * (orientation > 1)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ORIENTED)
@pytest.mark.parametrize("fast", [False, True])
def test_without_exif_the_stored_picture_is_converted(
    fast: bool, format: str, orientation: int
) -> None:
    for fit in FITS:
        turned, plain = (encode(picture(), format, number) for number in (orientation, 1))
        options: dict[str, Any] = {"size": (15, 22), "fit": fit, "fast": fast}
        found = convert(turned, exif=False, **options)
        assert (found.pixels, found.flags) == (convert(plain, **options).pixels, 0)
        assert found.size == (61, 40)


# --------------------------------------------------------------------------------------------------------- points


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
@pytest.mark.parametrize("format", ORIENTED)
def test_points_stay_on_what_they_mark(format: str, orientation: int, exif: bool) -> None:
    at = (52.0, 31.0)
    options = {"lossless": True} if format == "WEBP" else {}
    for size, target in [
        ((96, 70), (31, 24)),
        ((96, 70), (24, 31)),
        ((90, 61), (200, 150)),
        ((60, 60), (60, 60)),
    ]:
        data = encode(mark(size, at, 3), format, orientation, **options)
        for fit in FITS:
            for fast in (False, True):
                row = convert(
                    data, {"points": [at]}, size=target, fit=fit, mode="L", exif=exif, fast=fast
                )
                assert row.flags == FLAG_ORIENTED * (exif and orientation > 1)
                found = row.columns["points"]
                np.testing.assert_allclose(found[0], brightest(pixels(row, target, 1)), atol=0.5)


@pytest.mark.parametrize("format", ["PNG", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_points_follow_a_single_pixel_exactly_where_nothing_is_resized(
    orientation: int, format: str
) -> None:
    image = Image.new("L", (40, 25))
    image.putpixel((31, 4), 255)
    size = (40, 25) if orientation >= 5 else (25, 40)
    row = convert(encode(image, format, orientation), {"points": [(31, 4)]}, size=size, mode="L")
    ((x, y),) = row.columns["points"]
    assert pixels(row, size, 1)[int(y), int(x), 0] == 255


def test_points_follow_a_picture_that_was_decoded_smaller() -> None:
    at = (611.0, 333.0)
    data = encode(mark((960, 700), at, 20), "JPEG", 6)
    row = convert(data, {"points": [at]}, size=(64, 64), mode="L", fast=True)
    np.testing.assert_allclose(
        row.columns["points"][0], brightest(pixels(row, (64, 64), 1)), atol=0.5
    )


@pytest.mark.parametrize(
    ("point", "outside"),
    [
        ((49.5, 24.5), False),
        ((25.0, 0.0), False),  # the crop keeps columns 25 to 74 of 100
        ((24.5, 0.0), False),
        ((24.4, 0.0), True),
        ((74.4, 49.4), False),
        ((74.6, 25.0), True),
        ((49.5, -0.6), True),
        ((49.5, 49.6), True),
        ((float("nan"), 25.0), True),
        ((49.5, float("nan")), True),
        ((float("inf"), 25.0), True),
    ],
)
def test_a_point_that_leaves_the_picture_is_flagged(
    point: tuple[float, float], outside: bool
) -> None:
    row = convert(picture(100, 50), {"points": [(49.5, 24.5), point]}, size=(50, 50))
    assert row.flags == FLAG_OUTSIDE * outside


def test_no_point_of_a_picture_leaves_it_by_squash_or_pad() -> None:
    corners = [(-0.4, -0.4), (99.4, -0.4), (-0.4, 49.4), (99.4, 49.4)]
    for fit in ("squash", "pad"):
        assert convert(picture(100, 50), {"points": corners}, size=(33, 20), fit=fit).flags == 0
    assert convert(picture(100, 50), {"points": corners}, size=(33, 20)).flags == FLAG_OUTSIDE


def test_several_columns_of_points_move_and_others_do_not() -> None:
    schema = {"eyes": Column("<f8", (2, 2), points=True), "size": Column("<f8", (2, 2))}
    values = np.array([[0.0, 0.0], [60.0, 39.0]])
    row = Converter(Settings(size=(20, 20), fit="squash"), schema)(
        Record("key", picture(), {"eyes": values, "size": values})
    )
    np.testing.assert_array_equal(row.columns["size"], values)
    np.testing.assert_allclose(row.columns["eyes"], (values + 0.5) * [20 / 61, 20 / 40] - 0.5)


# ----------------------------------------------------------------------------------------------------------- fast


def psnr(found: np.ndarray, expected: np.ndarray) -> float:
    error = np.square(found.astype(float) - expected).mean()
    return float(10 * np.log10(255**2 / max(error, 1e-9)))


@pytest.mark.parametrize(
    ("side", "scaled", "most", "least"),
    [
        (400, 1, 1, 70),
        (236, 1, 1, 70),  # just above twice the target, where scaling by 2 would leave too little
        (120, 2, 12, 45),
        (118, 2, 12, 45),
        (60, 4, 12, 45),
        (30, 8, 12, 45),
        (12, 8, 12, 45),
    ],
)
@pytest.mark.parametrize("subsampling", ["4:2:0", "4:4:4"])
def test_fast_is_close_to_exact(
    photographs: list[Image.Image],
    side: int,
    scaled: int,
    most: int,
    least: float,
    subsampling: str,
) -> None:
    for photograph in photographs:
        data = encode(photograph, "JPEG", quality=93, subsampling=subsampling)
        fast, exact = (converted(data, (side, side), fast=fast) for fast in (True, False))
        assert levels(fast, exact) <= most
        assert psnr(fast, exact) >= least
    assert _opened(data, (side, side)) == (640 // scaled, 480 // scaled)


def _opened(data: bytes, size: tuple[int, int], fit: Any = "crop") -> tuple[int, int]:
    """Return the size at which a fast conversion has the picture decoded."""
    converter = Converter(Settings(size=size, fit=fit, fast=True), {})
    return converter._decoder.open(data, converter._draft).image.size


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
    width, height = _opened(data, size, fit)
    if (width, height) != source:
        resized = place(source, size if orientation == 6 else size[::-1], fit).resized
        assert width >= 2 * resized[0]
        assert height >= 2 * resized[1]


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_fast_has_the_same_geometry(fit: Any, orientation: int) -> None:
    data = encode(picture(403, 301), "JPEG", orientation, quality=95)
    options: dict[str, Any] = {"size": (30, 41), "fit": fit, "fill": "blue"}
    fast, exact = convert(data, fast=True, **options), convert(data, **options)
    assert levels(pixels(fast, (30, 41)), pixels(exact, (30, 41))) <= 4
    assert (fast.size, fast.flags) == (exact.size, exact.flags)


@pytest.mark.parametrize("format", ["PNG", "WEBP", "TIFF", "GIF"])
def test_fast_holds_for_formats_that_cannot_be_scaled(format: str) -> None:
    data = encode(picture(200, 150), format)
    assert levels(converted(data, fast=True), converted(data)) <= 1


def test_by_default_every_pixel_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    converter: Any = Converter(Settings(size=(8, 8)), {})
    drafts: list[Any] = []
    opened: Callable[..., Any] = converter._decoder.open
    monkeypatch.setattr(
        converter._decoder,
        "open",
        lambda data, draft=None: drafts.append(draft) or opened(data, draft),
    )
    converter(Record("key", encode(picture(400, 300), "JPEG"), {}))
    assert drafts == [None]


def test_the_default_is_torchvisions_arithmetic_on_the_decoded_picture(
    photographs: list[Image.Image],
) -> None:
    for photograph in photographs:
        data = encode(photograph.crop((0, 0, 640, 427)), "JPEG")
        image = Image.fromarray(get_decoder().decode(data))
        large = image.resize((int(224 * 640 / 427), 224), Image.Resampling.BILINEAR)
        left = int(round((large.width - 224) / 2.0))  # noqa: RUF046  # torchvision's own words
        expected = large.crop((left, 0, left + 224, 224))
        np.testing.assert_array_equal(converted(data, (224, 224)), np.asarray(expected))


def test_the_resizer_torch_is_within_two_levels(photographs: list[Image.Image]) -> None:
    for photograph in photographs:
        for options in ({}, {"interpolation": "bicubic"}, {"mode": "L"}, {"fit": "pad"}):
            found, expected = (
                converted(photograph, (96, 96), resizer=name, **options)
                for name in ("torch", "pillow")
            )
            assert levels(found, expected) <= 2


def _need_jpeg4py() -> None:
    found = pytest.importorskip("jpeg4py", reason="jpeg4py is not installed")
    try:
        found.initialize()
    except OSError as error:
        pytest.skip(f"jpeg4py finds no libturbojpeg: {error}")


def test_a_pipe_costs_one_picture_and_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    with pytest.raises(DecodeError, match="expected a file, found a folder, a pipe or a device"):
        Converter(Settings((8, 8)), {})(Record("", tmp_path / "pipe.jpg", {}))


# ---------------------------------------------------------------------------------------------- the file of a record


def test_a_row_tells_size_and_time_of_the_file_that_was_read(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(encode(picture()))
    os.utime(path, ns=(1, 1_234_567_890_123_456_789))
    row = convert(path, size=(8, 8))
    assert (row.file_size, row.file_mtime_ns) == (path.stat().st_size, 1_234_567_890_123_456_789)


def test_a_row_of_a_sample_that_is_no_file_tells_neither() -> None:
    row = convert(encode(picture()), size=(8, 8))
    assert (row.file_size, row.file_mtime_ns) == (-1, -1)
