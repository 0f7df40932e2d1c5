import io

import numpy as np
import pytest
from PIL import Image, ImageOps, features

from memload.building.resizing import FITS, INTERPOLATIONS, Placement
from memload.building.settings import Settings
from memload.errors import DecodeError
from memload.sources.samples import Sample
from memload.storage.format import FLAG_FALLBACK, FLAG_ORIENTED, FLAG_OUTSIDE

#: Formats that can hold an EXIF orientation.
ORIENTED = ["JPEG", "PNG", "WEBP", "TIFF", *(["AVIF"] if features.check("avif") else [])]


def picture(width=61, height=40, seed=0):
    small = Image.fromarray(np.random.default_rng(seed).integers(0, 256, (4, 5, 3), np.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC)


def photograph(width=640, height=480, seed=0):
    """A picture with detail at every scale, as photographs have it."""
    layers = [picture(width, height, seed)]
    for octave in range(2, 7):
        noise = np.random.default_rng(seed + octave).integers(0, 256, (3 * 2**octave,) * 2 + (3,))
        layer = Image.fromarray(noise.astype(np.uint8)).resize((width, height))
        layers.append(Image.blend(layers[-1], layer, 0.5**octave))
    return layers[-1]


def encode(image, format="PNG", orientation=1, **options):
    buffer = io.BytesIO()
    if orientation > 1:
        exif = Image.Exif()
        exif[0x0112] = orientation
        options["exif"] = exif
    image.save(buffer, format, **options)
    return buffer.getvalue()


def convert(image, columns=None, **options):
    """Return the row of an image. The columns are points."""
    columns = columns or {}
    return Settings(**options).convert(Sample("key", image, columns), list(columns))


def converted(image, size=(16, 16), **options):
    row = convert(image, size=size, **options)
    return np.frombuffer(row.pixels, np.uint8).reshape(*size, -1)


def reason(image, **options):
    with pytest.raises(DecodeError) as caught:
        convert(image, **options)
    return caught.value.reason


# ---------------------------------------------------------------------------------------- what an image may be


def test_a_path_bytes_a_pil_image_and_an_array_give_the_same_row(tmp_path):
    data = encode(picture())
    path, link = tmp_path / "picture.png", tmp_path / "link.png"
    path.write_bytes(data)
    link.symlink_to(path)
    expected = convert(path, size=(12, 10))
    assert expected.pixels.shape == (12, 10, 3)
    lazy = Image.open(path)
    images = [link, data, bytearray(data), memoryview(data), picture(), np.asarray(picture()), lazy]
    for image in images:
        found = convert(image, size=(12, 10))
        np.testing.assert_array_equal(found.pixels, expected.pixels)
        assert (found.source_size, found.flags) == ((61, 40), 0)
    lazy.close()


GRAY = np.asarray(picture(16, 16).convert("L"))
RAMP = np.linspace(0, 65535, 256).round().astype(np.uint16).reshape(16, 16)


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (GRAY, GRAY),
        (GRAY[:, :, None], GRAY),
        (GRAY[::-1, ::-1], np.ascontiguousarray(GRAY[::-1, ::-1])),
        (RAMP, np.round(RAMP / 257)),  # scaled, not clipped
        (RAMP[:, :, None], np.round(RAMP / 257)),
        (np.zeros((16, 16, 4), np.uint8), np.full((16, 16), 255)),  # transparent, on white
    ],
)
def test_arrays_are_pictures_of_one_three_or_four_channels(array, expected):
    array.flags.writeable = False
    np.testing.assert_array_equal(converted(array, mode="L")[:, :, 0], expected)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((4, 4), np.float32),
        np.zeros((4, 4, 2), np.uint8),
        np.zeros((4, 4, 3), np.uint16),
        np.zeros((4, 4), ">u2"),
        np.zeros(4, np.uint8),
    ],
    ids=lambda array: f"{array.shape} {array.dtype}",
)
def test_other_arrays_are_rejected_and_the_remedy_is_named(array):
    found = reason(array)
    assert found.startswith(f"an array of {array.dtype} and shape {array.shape} is not a picture")
    assert "mode='array'" in found


def test_what_is_no_picture_is_rejected():
    for image in (None, "picture.jpg", [[0]]):
        assert reason(image).endswith(f"not {type(image).__name__}")
    for image in (Image.new("RGB", (0, 5)), np.zeros((5, 0), np.uint8)):
        assert "its size is 0×5" in reason(image)
    with Image.open(io.BytesIO(encode(picture(), "PNG"))) as closed:
        pass
    assert reason(closed)


@pytest.mark.parametrize(
    "image", [encode(picture()), picture(), np.asarray(picture())], ids=["bytes", "PIL", "array"]
)
def test_max_pixels_holds_for_all_kinds_of_image(image):
    assert "2,440 pixels, and at most 2,439" in reason(image, max_pixels=61 * 40 - 1)
    convert(image, max_pixels=61 * 40)


# ---------------------------------------------------------------------------------------------- what a row holds


@pytest.mark.parametrize("fast", [True, False])
def test_rows_do_not_depend_on_the_decoder_and_say_what_pillow_had_to_decode(jpeg4py, fast):
    data = encode(picture(), "JPEG")
    scan = data.rindex(b"\xff\xda")
    damaged = data[: (scan + len(data)) // 2] + b"\xff\xd9"
    cmyk = encode(picture(300, 200).convert("CMYK"), "JPEG")
    for file, flags in [(data, 0), (cmyk, 0), (damaged, FLAG_FALLBACK)]:
        found, expected = (
            convert(file, size=(64, 64), fast=fast, decoder=decoder)
            for decoder in ("jpeg4py", "pillow")
        )
        np.testing.assert_array_equal(found.pixels, expected.pixels)
        assert (found.flags, expected.flags) == (flags, 0)


# --------------------------------------------------------------------------------------------------------- EXIF


def expected_pixels(data, size, fit, resample):
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
def test_a_picture_is_turned_upright_and_then_resized_to_the_bit(fit, orientation):
    for width, height in [(61, 40), (40, 61), (33, 33), (150, 40), (30, 160)]:
        image = photograph(width, height)
        for number, interpolation in enumerate(INTERPOLATIONS):
            data = encode(image, ORIENTED[number % len(ORIENTED)], orientation)
            size = [(16, 16), (15, 22), (22, 15), (70, 50)][number % 4]
            row = convert(data, size=size, fit=fit, fill="red", interpolation=interpolation)
            found = np.frombuffer(row.pixels, np.uint8).reshape(*size, 3)
            np.testing.assert_array_equal(found, expected_pixels(data, size, fit, interpolation))
            assert row.flags == FLAG_ORIENTED * (orientation > 1)
            assert row.source_size == (width, height)


# ------------------------------------------------------------------------------------------------------- points


def mark(size, at, radius):
    """A black picture with one bright blob."""
    columns, rows = np.meshgrid(np.arange(size[0]), np.arange(size[1]))
    distance = ((columns - at[0]) ** 2 + (rows - at[1]) ** 2) / (2 * radius**2)
    return Image.fromarray((255 * np.exp(-distance)).astype(np.uint8))


def brightest(values):
    """Return x and y of the middle of what is bright."""
    weights = values.squeeze().astype(float)
    weights *= weights > weights.max() / 2
    rows, columns = np.indices(weights.shape)
    return np.array([(columns * weights).sum(), (rows * weights).sum()]) / weights.sum()


@pytest.mark.parametrize("exif", [True, False])
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG", "TIFF"])
def test_points_stay_on_what_they_mark(format, orientation, exif):
    options = {"mode": "L", "exif": exif}
    for size, at, target in [
        ((96, 70), (52.0, 31.0), (31, 24)),
        ((90, 61), (52.0, 31.0), (200, 150)),
        ((480, 350), (305.0, 166.0), (32, 32)),  # a JPEG is decoded smaller if it has to be fast
    ]:
        data = encode(mark(size, at, size[0] / 40), format, orientation)
        for fit in FITS:
            for fast in (False, True):
                row = convert(data, {"points": [at]}, size=target, fit=fit, fast=fast, **options)
                assert row.source_size == size
                assert row.flags == FLAG_ORIENTED * (exif and orientation > 1)
                pixels = np.frombuffer(row.pixels, np.uint8).reshape(target)
                np.testing.assert_allclose(row.columns["points"][0], brightest(pixels), atol=0.5)


@pytest.mark.parametrize(
    ("point", "fit", "outside"),
    [
        ((24.5, 0.0), "crop", False),  # the crop keeps columns 25 to 74 of 100
        ((24.4, 0.0), "crop", True),
        ((74.4, 49.4), "crop", False),
        ((74.6, 25.0), "crop", True),
        ((49.5, -0.6), "crop", True),
        ((49.5, 49.6), "crop", True),
        ((float("nan"), 25.0), "crop", False),  # it is missing
        ((float("inf"), 25.0), "crop", True),
        ((-0.4, -0.4), "squash", False),
        ((99.4, 49.4), "pad", False),
    ],
)
def test_a_point_that_leaves_the_picture_is_flagged(point, fit, outside):
    columns = {"points": np.array([(49.5, 24.5), point])}
    row = convert(picture(100, 50), columns, size=(50, 50), fit=fit)
    assert row.flags == FLAG_OUTSIDE * outside
    assert columns["points"][0].tolist() == [49.5, 24.5]  # the record keeps its own


# --------------------------------------------------------------------------------------------------------- fast


@pytest.mark.parametrize(
    ("side", "largest", "mean"),
    [
        (400, 1, 0.1),
        (236, 1, 0.1),  # just above twice the target, where scaling by 2 would leave too little
        (118, 12, 1),
        (12, 12, 1),
    ],
)
@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_fast_is_close_to_exact(side, largest, mean, orientation):
    data = encode(photograph(), "JPEG", orientation, quality=93)
    fast, exact = (converted(data, (side, side), fast=fast) for fast in (True, False))
    errors = np.abs(fast.astype(int) - exact)
    assert errors.max() <= largest
    assert errors.mean() <= mean
