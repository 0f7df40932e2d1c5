"""Bicubic interpolation is torch's and torchvision's."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.nn.functional import interpolate

from memload import transforms

SIDES = st.integers(1, 70)


def draw_images(data, height, width):
    """Return noise, or black and white, which goes beyond the ends."""
    rng = np.random.default_rng(data.draw(st.integers(0, 1000), label="seed"))
    count, channels = data.draw(st.sampled_from([(1, 3), (2, 3), (3, 1), (2, 5)]), label="images")
    shape = count, channels, height, width
    pixels = rng.integers(0, 256, shape, np.uint8)
    if data.draw(st.booleans(), label="black and white"):
        pixels = np.where(pixels < 128, np.uint8(0), np.uint8(255))
    layout = data.draw(st.sampled_from([torch.contiguous_format, torch.channels_last]))
    return torch.from_numpy(pixels).contiguous(memory_format=layout)


def torchs(images, size, antialias):
    """Return torch's pixels, one channel at a time: of more it fails at a width of 1."""
    planes = images.contiguous().flatten(0, 1)[:, None]
    resized = interpolate(planes, size, mode="bicubic", antialias=antialias)
    return resized.view(*images.shape[:2], *size)


@settings(deadline=None, max_examples=30)
@given(st.data(), SIDES, SIDES, st.tuples(SIDES, SIDES), st.booleans())
def test_bicubic_pixels_are_torchs_to_the_bit(data, height, width, size, antialias):
    images = draw_images(data, height, width)
    found = transforms.Resize(size, "bicubic", antialias=antialias)(images)
    assert found.dtype == torch.uint8
    if size[1] > 1:
        assert torch.equal(found, torchs(images, size, antialias))
    else:  # columns are resized before rows
        assert found.shape[2:] == size


@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("size", [(1, 1), (1, 9), (5, 5)])
@pytest.mark.parametrize("extent", [(1, 1), (1, 7), (7, 1)])
def test_sides_of_one_pixel_are_resized_as_all_others(extent, size, antialias, make_images):
    for images in (make_images(3, *extent), make_images(3, *extent).contiguous()):
        resized = transforms.Resize(size, "bicubic", antialias=antialias)(images)
        assert torch.equal(resized, torchs(images, size, antialias))


@settings(deadline=None, max_examples=15)
@given(st.data(), SIDES, SIDES, st.tuples(SIDES, SIDES), st.booleans())
def test_bicubic_floats_are_torchs_and_not_cut_off(data, height, width, size, antialias):
    images = draw_images(data, height, width) / 255
    found = transforms.Resize(size, "bicubic", antialias=antialias)(images)
    if size[1] > 1:
        expected = torchs(images, size, antialias)
    else:
        expected = torchs(images.mT, size[::-1], antialias).mT
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() <= 1e-6
    half = transforms.Resize(size, "bicubic", antialias=antialias)(images.half())
    assert half.dtype == torch.float16
    assert (half - expected).abs().max() < 2e-3


def test_interpolations_have_torchvisions_and_pillows_names(torchvision):
    modes = torchvision.transforms.InterpolationMode
    for name, others in {
        "bilinear": (modes.BILINEAR, 2, Image.Resampling.BILINEAR),
        "bicubic": (modes.BICUBIC, 3, Image.Resampling.BICUBIC),
    }.items():
        for other in (name, *others):
            assert transforms.Resize(8, other).interpolation == name
            step = transforms.RandomResizedCrop(8, interpolation=other)
            assert step.interpolation == name
    for wrong in (modes.NEAREST, modes.LANCZOS, 0, 1, None):
        with pytest.raises(
            ValueError, match="Resize: interpolation must be 'bilinear' or 'bicubic'"
        ):
            transforms.Resize(8, wrong)
