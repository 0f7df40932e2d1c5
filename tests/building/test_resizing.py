from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from memload.building.resizing import (
    FITS,
    INTERPOLATIONS,
    Fit,
    Placement,
    resize,
    turn,
    turn_box,
    turn_points,
)

sides = st.integers(1, 600)
sizes = st.tuples(sides, sides)
targets = st.tuples(st.integers(1, 64), st.integers(1, 64))
huge_sizes = st.tuples(st.integers(1, 70000), st.integers(1, 70000))
fits = st.sampled_from(FITS)


def noise(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    shape = (height, width, 3) if mode == "RGB" else (height, width)
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, np.uint8))


def smooth(width: int, height: int) -> Image.Image:
    return noise(6, 5).resize((width, height), Image.Resampling.BICUBIC)


def torchvision_crop(
    image: Image.Image, side: int, resample: int = Image.Resampling.BILINEAR
) -> Image.Image:
    """Resize(side) and CenterCrop(side) of a PIL image, as torchvision 0.2x computes them."""
    width, height = image.size
    short, long = (width, height) if width <= height else (height, width)
    new_short, new_long = side, int(side * long / short)
    new_width, new_height = (new_short, new_long) if width <= height else (new_long, new_short)
    image = image.resize((new_width, new_height), resample)
    top = int(round((new_height - side) / 2.0))  # noqa: RUF046  # torchvision's own expression
    left = int(round((new_width - side) / 2.0))  # noqa: RUF046
    return image.crop((left, top, left + side, top + side))


def assert_equal(found: Image.Image, expected: Image.Image) -> None:
    assert found.mode == expected.mode
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected), strict=True)


def difference(found: Image.Image, expected: Image.Image) -> int:
    return int(np.abs(np.asarray(found).astype(int) - np.asarray(expected)).max())


# ------------------------------------------------------------------------------------------------------- pixels


@settings(max_examples=150, deadline=None)
@given(size=sizes, side=st.integers(1, 64), mode=st.sampled_from(["RGB", "L"]))
@example(size=(500, 375), side=64, mode="RGB")
@example(size=(600, 1), side=64, mode="RGB")
@example(size=(1, 600), side=64, mode="L")
@example(size=(67, 64), side=64, mode="RGB")  # a margin of 1.5, which is rounded to even
@example(size=(64, 65), side=64, mode="RGB")  # a margin of 0.5
@example(size=(7, 5), side=64, mode="RGB")
def test_crop_equals_torchvisions_resize_and_center_crop(
    size: tuple[int, int], side: int, mode: str
) -> None:
    image = noise(*size, mode)
    found = resize(image, Placement.of(size, (side, side)))
    assert_equal(found, torchvision_crop(image, side))


@settings(max_examples=200, deadline=None)
@given(size=sizes, target=targets, interpolation=st.sampled_from(INTERPOLATIONS))
@example(size=(41, 181), target=(23, 300), interpolation="box")
def test_crop_equals_a_whole_resize_for_each_filter_and_aspect(
    size: tuple[int, int], target: tuple[int, int], interpolation: Any
) -> None:
    image, placement = noise(*size), Placement.of(size, target)
    assume(np.prod(placement.resized) < 1 << 22)
    left, top = placement.left, placement.top
    whole = image.resize(placement.resized, Image.Resampling[interpolation.upper()])
    expected = whole.crop((left, top, left + target[0], top + target[1]))
    assert_equal(resize(image, placement, interpolation=interpolation), expected)


@settings(max_examples=60, deadline=None)
@given(size=sizes, target=targets)
def test_squash_is_one_plain_resize(size: tuple[int, int], target: tuple[int, int]) -> None:
    image = noise(*size)
    found = resize(image, Placement.of(size, target, "squash"))
    assert_equal(found, image.resize(target, Image.Resampling.BILINEAR))


@settings(max_examples=100, deadline=None)
@given(size=sizes, target=targets)
def test_pad_is_pillows_pad(size: tuple[int, int], target: tuple[int, int]) -> None:
    image = noise(*size)
    assume(min(ImageOps.contain(image, target).size) > 0)  # Pillow lets a thin strip vanish
    found = resize(image, Placement.of(size, target, "pad"), fill=(9, 8, 7))
    assert_equal(found, ImageOps.pad(image, target, Image.Resampling.BILINEAR, color=(9, 8, 7)))


def test_pad_shows_a_row_even_of_a_thin_strip() -> None:
    assert Placement.of((600, 1), (20, 20), "pad").resized == (20, 1)


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_pad_fills_the_margin(mode: str) -> None:
    placement = Placement.of((40, 10), (20, 20), "pad")
    found = np.asarray(resize(noise(40, 10, mode), placement, fill=(5, 5, 5)))
    assert (found[[0, 6, 13, 19]] == 5).all()
    assert not (found[7:12] == 5).all()


@pytest.mark.parametrize("fit", FITS)
def test_a_picture_of_the_target_size_is_left_as_it_is(fit: Fit) -> None:
    image = noise(24, 16)
    assert_equal(resize(image, Placement.of(image.size, image.size, fit)), image)


@pytest.mark.parametrize("size", [(4_000_000, 1), (1, 4_000_000)])
def test_a_strip_takes_no_memory_for_what_is_cut_off(size: tuple[int, int]) -> None:
    found = resize(Image.new("L", size, 77), Placement.of(size, (64, 64)))  # of 64 × 256 million
    assert found.getextrema() == (77, 77)


# ----------------------------------------------------------------------------------------------- the visible box


@settings(max_examples=150, deadline=None)
@given(size=sizes, target=targets, fit=fits)
def test_a_box_gives_nearly_the_exact_pixels(
    size: tuple[int, int], target: tuple[int, int], fit: Fit
) -> None:
    image, placement = smooth(*size), Placement.of(size, target, fit)
    boxed = resize(image, placement, box=(0.0, 0.0, *size))
    assert boxed.size == target
    assert difference(boxed, resize(image, placement)) <= 1


def test_the_box_may_be_part_of_a_picture_that_was_scaled_down() -> None:
    image = smooth(203, 151)
    half = image.reduce(2)  # 102×76, of which 101.5×75.5 show the picture
    placement = Placement.of(image.size, (24, 24))
    expected = resize(image, placement)
    assert difference(resize(half, placement, box=(0.0, 0.0, 101.5, 75.5)), expected) <= 3
    turned = turn(half, 3)
    box = turn_box((0.0, 0.0, 101.5, 75.5), half.size, 3)
    assert box == (0.5, 0.5, 102.0, 76.0)
    assert difference(turn(resize(turned, placement, box=box), 3), expected) <= 3


# ------------------------------------------------------------------------------------------------------ geometry


@settings(max_examples=300, deadline=None)
@given(source=huge_sizes, target=targets, fit=st.sampled_from(["crop", "pad"]))
def test_crop_and_pad_keep_even_margins(
    source: tuple[int, int], target: tuple[int, int], fit: Fit
) -> None:
    found = Placement.of(source, target, fit)
    for resized, side, before in zip(found.resized, target, (found.left, found.top), strict=True):
        after = resized - side - before
        assert abs(before - after) <= 1
        assert resized >= 1
        assert min(before, after) >= 0 if fit == "crop" else max(before, after) <= 0
    assert found.resized[0] == target[0] or found.resized[1] == target[1]


@settings(max_examples=200, deadline=None)
@given(source=sizes, target=targets, fit=fits)
def test_width_and_height_are_treated_alike(
    source: tuple[int, int], target: tuple[int, int], fit: Fit
) -> None:
    found = Placement.of(source, target, fit)
    transposed = Placement.of(source[::-1], target[::-1], fit)
    assert (transposed.resized, transposed.left) == (found.resized[::-1], found.top)
    if fit != "squash":
        width, height = found.resized
        wanted = height * source[0] / source[1], width * source[1] / source[0]
        assert abs(width - wanted[0]) <= 1 or abs(height - wanted[1]) <= 1


# ------------------------------------------------------------------------------------------------------- turning


@pytest.mark.parametrize("orientation", range(1, 9))
def test_turning_is_pillows_exif_transpose(orientation: int) -> None:
    image = noise(7, 4)
    image.getexif()[0x0112] = orientation
    expected = ImageOps.exif_transpose(image)
    np.testing.assert_array_equal(np.asarray(turn(image, orientation)), np.asarray(expected))


@settings(max_examples=100, deadline=None)
@given(
    size=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    orientation=st.integers(1, 8),
    data=st.data(),
)
def test_points_turn_with_their_pixels(
    size: tuple[int, int], orientation: int, data: st.DataObject
) -> None:
    x, y = data.draw(st.integers(0, size[0] - 1)), data.draw(st.integers(0, size[1] - 1))
    image = Image.new("L", size)
    image.putpixel((x, y), 255)
    ((u, v),) = turn_points(np.array([[x, y]]), size, orientation)
    assert turn(image, orientation).getpixel((int(u), int(v))) == 255


# --------------------------------------------------------------------------------------------------------- points


@pytest.mark.parametrize("fit", FITS)
def test_points_land_on_the_pixel_that_they_mark(fit: Fit) -> None:
    source = (80, 50)
    placement = Placement.of(source, (30, 40), fit)
    for x, y in [(40, 25), (33, 10), (46, 41)]:
        image = Image.new("L", source)
        image.paste(255, (x - 2, y - 2, x + 3, y + 3))
        found = np.asarray(resize(image, placement)).astype(float)
        rows, columns = np.indices(found.shape)
        centre = [(columns * found).sum() / found.sum(), (rows * found).sum() / found.sum()]
        np.testing.assert_allclose(placement.points(np.array([[x, y]]))[0], centre, atol=0.1)


@settings(max_examples=50, deadline=None)
@given(source=sizes, target=targets)
def test_squash_takes_corners_to_corners(source: tuple[int, int], target: tuple[int, int]) -> None:
    corners = np.array([[-0.5, -0.5], [source[0] - 0.5, source[1] - 0.5]])
    expected = [[-0.5, -0.5], [target[0] - 0.5, target[1] - 0.5]]
    found = Placement.of(source, target, "squash").points(corners)
    np.testing.assert_allclose(found, expected, atol=1e-9)
