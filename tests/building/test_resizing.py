import subprocess
import sys
import textwrap
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
    flip,
    place,
    resize,
    turn,
    turn_points,
)
from memload.errors import DependencyError

sides = st.integers(1, 600)
sizes = st.tuples(sides, sides)
targets = st.tuples(st.integers(1, 64), st.integers(1, 64))
fits = st.sampled_from(FITS)
orientations = st.integers(1, 8)


def noise(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    shape = (height, width, 3) if mode == "RGB" else (height, width)
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, np.uint8))


def smooth(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    return noise(6, 5, mode, seed).resize((width, height), Image.Resampling.BICUBIC)


def torchvisions(
    image: Image.Image, side: int, interpolation: int = Image.Resampling.BILINEAR
) -> Image.Image:
    """Resize(side) and CenterCrop(side) of a PIL image, as torchvision 0.2x computes them."""
    width, height = image.size
    short, long = (width, height) if width <= height else (height, width)
    new_short, new_long = side, int(side * long / short)
    new_width, new_height = (new_short, new_long) if width <= height else (new_long, new_short)
    image = image.resize((new_width, new_height), interpolation)
    top = int(round((new_height - side) / 2.0))  # noqa: RUF046  # its own words
    left = int(round((new_width - side) / 2.0))  # noqa: RUF046
    return image.crop((left, top, left + side, top + side))


def levels(found: Image.Image, expected: Image.Image) -> int:
    """Return the largest difference of two pictures of one size."""
    assert (found.size, found.mode) == (expected.size, expected.mode)
    return int(np.abs(np.asarray(found).astype(int) - np.asarray(expected)).max())


# ---------------------------------------------------------------------------------------------- the default way


@settings(max_examples=150, deadline=None)
@given(size=sizes, side=st.integers(1, 64), mode=st.sampled_from(["RGB", "L"]))
@example(size=(500, 375), side=64, mode="RGB")
@example(size=(600, 1), side=64, mode="RGB")
@example(size=(1, 600), side=64, mode="L")
@example(size=(67, 64), side=64, mode="RGB")  # a margin of 1.5, which is rounded to even
@example(size=(64, 65), side=64, mode="RGB")  # a margin of 0.5
@example(size=(7, 5), side=64, mode="RGB")
def test_the_default_is_bit_identical_to_torchvisions_resize_and_center_crop(
    size: tuple[int, int], side: int, mode: str
) -> None:
    image = noise(*size, mode)
    found = resize(image, place(size, (side, side)))
    assert found.mode == mode
    np.testing.assert_array_equal(
        np.asarray(found), np.asarray(torchvisions(image, side)), strict=True
    )


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_each_filter_is_pillows_of_that_name(interpolation: Any) -> None:
    image = noise(47, 31)
    found = resize(image, place(image.size, (16, 16)), interpolation=interpolation)
    expected = torchvisions(image, 16, Image.Resampling[interpolation.upper()])
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


@settings(max_examples=60, deadline=None)
@given(size=sizes, target=targets)
def test_squash_is_one_plain_resize(size: tuple[int, int], target: tuple[int, int]) -> None:
    image = noise(*size)
    found = resize(image, place(size, target, "squash"))
    np.testing.assert_array_equal(
        np.asarray(found), np.asarray(image.resize(target, Image.Resampling.BILINEAR))
    )


@settings(max_examples=100, deadline=None)
@given(size=sizes, target=targets)
def test_pad_is_pillows_pad(size: tuple[int, int], target: tuple[int, int]) -> None:
    image = noise(*size)
    assume(
        min(ImageOps.contain(image, target).size) > 0
    )  # Pillow lets a thin strip vanish; here a row of it stays
    found = resize(image, place(size, target, "pad"), fill=(9, 8, 7))
    expected = ImageOps.pad(image, target, Image.Resampling.BILINEAR, color=(9, 8, 7))
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


def test_pad_shows_a_row_even_of_a_thin_strip() -> None:
    assert place((600, 1), (20, 20), "pad") == Placement(
        (600, 1), (20, 1), (20, 20), 0, round(-19 / 2)
    )


def test_pad_fills_with_the_colour_asked_for() -> None:
    found = np.asarray(resize(noise(40, 10), place((40, 10), (20, 20), "pad"), fill=(1, 2, 3)))
    assert (found[[0, 6, 13, 19]] == (1, 2, 3)).all(axis=2).all(axis=1).tolist() == [
        True,
        True,
        True,
        True,
    ]
    assert not (found[7:12] == (1, 2, 3)).all()
    grey = np.asarray(resize(noise(40, 10, "L"), place((40, 10), (20, 20), "pad"), fill=(5, 5, 5)))
    assert (grey[0] == 5).all()


def test_an_unknown_fit_is_an_error() -> None:
    with pytest.raises(ValueError, match="fit: expected one of crop, squash, pad, found 'stretch'"):
        place((4, 4), (2, 2), "stretch")  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------ geometry


@settings(max_examples=400, deadline=None)
@given(source=st.tuples(st.integers(1, 70000), st.integers(1, 70000)), target=targets)
def test_crop_covers_the_target_and_cuts_evenly(
    source: tuple[int, int], target: tuple[int, int]
) -> None:
    found = place(source, target, "crop")
    for resized, side, before in zip(found.resized, target, (found.left, found.top), strict=True):
        after = resized - side - before
        assert before >= 0
        assert after >= 0
        assert abs(before - after) <= 1
    assert found.resized[0] == target[0] or found.resized[1] == target[1]


@settings(max_examples=400, deadline=None)
@given(source=st.tuples(st.integers(1, 70000), st.integers(1, 70000)), target=targets)
def test_pad_stays_inside_the_target_with_even_margins(
    source: tuple[int, int], target: tuple[int, int]
) -> None:
    found = place(source, target, "pad")
    for resized, side, before in zip(found.resized, target, (found.left, found.top), strict=True):
        after = resized - side - before
        assert resized >= 1
        assert before <= 0
        assert after <= 0
        assert abs(before - after) <= 1
    assert found.resized[0] == target[0] or found.resized[1] == target[1]


@settings(max_examples=200, deadline=None)
@given(source=sizes, target=targets, fit=st.sampled_from(["crop", "pad"]))
def test_crop_and_pad_keep_the_aspect_ratio_to_a_pixel(
    source: tuple[int, int], target: tuple[int, int], fit: Fit
) -> None:
    width, height = place(source, target, fit).resized
    high, wide = width * source[1] / source[0], height * source[0] / source[1]
    assert abs(height - high) <= 1 or abs(width - wide) <= 1


@settings(max_examples=200, deadline=None)
@given(source=sizes, target=targets, fit=fits)
def test_placing_does_not_prefer_a_direction(
    source: tuple[int, int], target: tuple[int, int], fit: Fit
) -> None:
    found, turned = place(source, target, fit), place(source[::-1], target[::-1], fit)
    assert turned == Placement(
        source[::-1], found.resized[::-1], target[::-1], found.top, found.left
    )


@settings(max_examples=100, deadline=None)
@given(source=sizes, target=targets, fit=fits, boxed=st.booleans())
def test_the_result_always_has_the_target_size(
    source: tuple[int, int], target: tuple[int, int], fit: Fit, boxed: bool
) -> None:
    box = (0.0, 0.0, float(source[0]), float(source[1])) if boxed else None
    assert resize(noise(*source), place(source, target, fit), box=box).size == target


@pytest.mark.parametrize("fit", FITS)
def test_a_picture_of_the_target_size_is_left_as_it_is(fit: Fit) -> None:
    image = noise(24, 16)
    found = resize(image, place(image.size, image.size, fit))
    np.testing.assert_array_equal(np.asarray(found), np.asarray(image))


@pytest.mark.parametrize("resizer", ["pillow", "torch"])
@pytest.mark.parametrize("size", [(4_000_000, 1), (1, 4_000_000)])
def test_a_strip_takes_no_memory_for_what_is_cut_off(size: tuple[int, int], resizer: Any) -> None:
    # at 64 it would be 256 million × 64
    assert resize(
        Image.new("L", size, 77), place(size, (64, 64)), resizer=resizer
    ).getextrema() == (77, 77)


# ------------------------------------------------------------------------------------------------ the matched box


@settings(max_examples=150, deadline=None)
@given(size=sizes, target=targets, fit=fits, mode=st.sampled_from(["RGB", "L"]))
def test_the_matched_box_is_close_to_the_exact_way(
    size: tuple[int, int], target: tuple[int, int], fit: Fit, mode: str
) -> None:
    image, placement = smooth(*size, mode), place(size, target, fit)
    boxed = resize(image, placement, box=(0.0, 0.0, float(size[0]), float(size[1])))
    assert levels(boxed, resize(image, placement)) <= 1


@settings(max_examples=100, deadline=None)
@given(size=st.tuples(st.integers(9, 300), st.integers(9, 300)), target=targets, fit=fits)
def test_the_matched_box_keeps_the_edges_of_fine_detail(
    size: tuple[int, int], target: tuple[int, int], fit: Fit
) -> None:
    image, placement = noise(*size), place(size, target, fit)
    boxed = resize(image, placement, box=(0.0, 0.0, float(size[0]), float(size[1])))
    assert levels(boxed, resize(image, placement)) <= 2


def test_the_box_may_be_part_of_a_picture_that_was_scaled_down() -> None:
    image = smooth(203, 151)
    half = image.reduce(2)  # 102×76, of which 101.5×75.5 show the picture
    placement = place(image.size, (24, 24))
    found = resize(half, placement, box=(0.0, 0.0, 101.5, 75.5))
    assert levels(found, resize(image, placement)) <= 3


# ---------------------------------------------------------------------------------------------------------- torch


@settings(max_examples=60, deadline=None)
@given(
    size=sizes, target=targets, fit=fits, mode=st.sampled_from(["RGB", "L"]), cubic=st.booleans()
)
def test_torch_is_within_two_levels_of_pillow(
    size: tuple[int, int], target: tuple[int, int], fit: Fit, mode: str, cubic: bool
) -> None:
    image, placement = noise(*size, mode), place(size, target, fit)
    if cubic:  # away from black and white: what overshoots is clipped between the passes, which torch does otherwise
        image = image.point(lambda value: 80 + value * 95 // 255)
    filter: Any = "bicubic" if cubic else "bilinear"
    found = resize(image, placement, interpolation=filter, resizer="torch")
    assert levels(found, resize(image, placement, interpolation=filter)) <= 2


def test_torch_has_only_some_filters() -> None:
    with pytest.raises(
        ValueError, match="expected one of bilinear, bicubic for torch, found 'lanczos'"
    ):
        resize(noise(9, 9), place((9, 9), (4, 4)), interpolation="lanczos", resizer="torch")


def test_a_missing_torch_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(DependencyError, match="leave --resizer at 'pillow'") as caught:
        resize(noise(9, 9), place((9, 9), (4, 4)), resizer="torch")
    assert caught.value.name == "torch"


def test_torch_is_imported_only_where_it_is_asked_for() -> None:
    script = """
        import sys
        from PIL import Image
        from memload.building.conversion import Converter, Settings
        from memload.building.sources import Record

        for fast in (False, True):
            Converter(Settings(size=(8, 8), fast=fast), {})(Record("k", Image.new("RGB", (20, 30)), {}))
        assert "torch" not in sys.modules
        Converter(Settings(size=(8, 8), resizer="torch"), {})
        assert "torch" in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=60)


# -------------------------------------------------------------------------------------------------------- turning


@pytest.mark.parametrize("orientation", range(1, 9))
def test_turning_is_pillows_exif_transpose(orientation: int) -> None:
    image = noise(7, 4)
    image.getexif()[0x0112] = orientation
    expected = ImageOps.exif_transpose(image)
    np.testing.assert_array_equal(np.asarray(turn(image, orientation)), np.asarray(expected))


@settings(max_examples=100, deadline=None)
@given(
    size=st.tuples(st.integers(1, 40), st.integers(1, 40)), orientation=orientations, data=st.data()
)
def test_points_turn_with_their_pixels(
    size: tuple[int, int], orientation: int, data: st.DataObject
) -> None:
    x, y = data.draw(st.integers(0, size[0] - 1)), data.draw(st.integers(0, size[1] - 1))
    image = Image.new("L", size)
    image.putpixel((x, y), 255)
    ((u, v),) = turn_points(np.array([[x, y]]), size, orientation)
    assert turn(image, orientation).getpixel((int(u), int(v))) == 255


@settings(max_examples=200, deadline=None)
@given(size=sizes, target=targets, fit=fits, orientation=orientations)
def test_the_upright_pictures_margins_are_those_of_placing_it_upright(
    size: tuple[int, int], target: tuple[int, int], fit: Fit, orientation: int
) -> None:
    turned = orientation >= 5
    upright = place(size[::-1] if turned else size, target, fit)
    stored = flip(place(size, target[::-1] if turned else target, fit), orientation)
    corners = np.array([[-0.5, -0.5], [size[0] - 0.5, size[1] - 0.5]])
    found = turn_points(stored.points(corners), stored.target, orientation)
    expected = upright.points(turn_points(corners, size, orientation))
    np.testing.assert_allclose(found, expected, atol=1e-6)


# --------------------------------------------------------------------------------------------------------- points


@pytest.mark.parametrize("fit", FITS)
def test_points_land_on_the_pixel_that_they_mark(fit: Fit) -> None:
    source, target = (80, 50), (30, 40)
    placement = place(source, target, fit)
    for x, y in [(40, 25), (33, 10), (46, 41)]:
        image = Image.new("L", source)
        image.paste(255, (x - 2, y - 2, x + 3, y + 3))
        found = np.asarray(resize(image, placement)).astype(float)
        rows, columns = np.indices(found.shape)
        centre = [(columns * found).sum() / found.sum(), (rows * found).sum() / found.sum()]
        np.testing.assert_allclose(placement.points(np.array([[x, y]]))[0], centre, atol=0.1)


@settings(max_examples=100, deadline=None)
@given(source=sizes, target=targets)
def test_squash_takes_corners_to_corners(source: tuple[int, int], target: tuple[int, int]) -> None:
    corners = np.array([[-0.5, -0.5], [source[0] - 0.5, source[1] - 0.5]])
    expected = [[-0.5, -0.5], [target[0] - 0.5, target[1] - 0.5]]
    np.testing.assert_allclose(place(source, target, "squash").points(corners), expected, atol=1e-9)
