import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from memload.building.resizing import (
    INTERPOLATIONS,
    Placement,
    resize,
)
from memload.errors import DecodeError

sides = st.integers(1, 600)
sizes = st.tuples(sides, sides)
targets = st.tuples(st.integers(1, 64), st.integers(1, 64))


def noise(width, height, mode="RGB", seed=0):
    shape = (height, width, 3) if mode == "RGB" else (height, width)
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, np.uint8))


def torchvision_crop(image, side, resample=Image.Resampling.BILINEAR):
    """Resize(side) and CenterCrop(side) of a PIL image, as torchvision 0.2x computes them."""
    width, height = image.size
    short, long = (width, height) if width <= height else (height, width)
    new_short, new_long = side, int(side * long / short)
    new_width, new_height = (new_short, new_long) if width <= height else (new_long, new_short)
    image = image.resize((new_width, new_height), resample)
    top = int(round((new_height - side) / 2.0))  # noqa: RUF046  # torchvision's own expression
    left = int(round((new_width - side) / 2.0))  # noqa: RUF046
    return image.crop((left, top, left + side, top + side))


def assert_equal(found, expected):
    assert found.mode == expected.mode
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected), strict=True)


@settings(max_examples=150, deadline=None)
@given(size=sizes, side=st.integers(1, 64), mode=st.sampled_from(["RGB", "L"]))
@example(size=(500, 375), side=64, mode="RGB")
@example(size=(600, 1), side=64, mode="RGB")
@example(size=(1, 600), side=64, mode="L")
@example(size=(67, 64), side=64, mode="RGB")  # a margin of 1.5, which is rounded to even
@example(size=(64, 65), side=64, mode="RGB")  # a margin of 0.5
@example(size=(7, 5), side=64, mode="RGB")
def test_crop_equals_torchvisions_resize_and_center_crop(size, side, mode):
    image = noise(*size, mode)
    found = resize(image, Placement.of(size, (side, side)))
    assert_equal(found, torchvision_crop(image, side))


@settings(max_examples=200, deadline=None)
@given(
    size=sizes,
    target=targets,
    fit=st.sampled_from(["crop", "squash"]),
    interpolation=st.sampled_from(INTERPOLATIONS),
)
@example(size=(41, 181), target=(23, 300), fit="crop", interpolation="box")
@example(size=(24, 16), target=(24, 16), fit="crop", interpolation="bilinear")
def test_crop_and_squash_equal_a_whole_resize_for_each_filter_and_aspect(
    size, target, fit, interpolation
):
    image, placement = noise(*size), Placement.of(size, target, fit)
    assume(np.prod(placement.resized) < 1 << 22)
    left, top = placement.left, placement.top
    whole = image.resize(placement.resized, Image.Resampling[interpolation.upper()])
    expected = whole.crop((left, top, left + target[0], top + target[1]))
    assert_equal(resize(image, placement, interpolation=interpolation), expected)
    if fit == "squash":
        assert placement.resized == target


@settings(max_examples=100, deadline=None)
@given(size=sizes, target=targets, mode=st.sampled_from(["RGB", "L"]))
def test_pad_is_pillows_pad(size, target, mode):
    image = noise(*size, mode)
    assume(min(ImageOps.contain(image, target).size) > 0)  # Pillow lets a thin strip vanish
    found = resize(image, Placement.of(size, target, "pad"), fill=(9, 8, 7))
    color = (9, 8, 7) if mode == "RGB" else 9
    assert_equal(found, ImageOps.pad(image, target, Image.Resampling.BILINEAR, color=color))


def test_pad_shows_a_row_even_of_a_thin_strip():
    assert Placement.of((600, 1), (20, 20), "pad").resized == (20, 1)


@pytest.mark.parametrize("size", [(4_000_000, 1), (1, 4_000_000)])
def test_an_extreme_strip_is_rejected_before_it_takes_memory(size):
    with pytest.raises(DecodeError, match="too unlike"):
        resize(Image.new("L", size, 77), Placement.of(size, (64, 64)))  # of 64 × 256 million
