"""Each operation on colours is torchvision's, within one level of uint8 or 1.5e-5 of floats."""

import importlib
import inspect

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memload import transforms
from memload.transforms.operation_step import INDEX_OF, OperationStep
from memload.transforms.operations import change_each

#: Our names and torchvision's functions, with magnitudes, and what torchvision is given for one.
OPERATIONS = {
    "Brightness": ("adjust_brightness", [0, 0.3, 1.0, 1.99]),
    "Color": ("adjust_saturation", [0, 0.3, 1.0, 1.99]),
    "Contrast": ("adjust_contrast", [0, 0.3, 1.0, 1.99]),
    "Sharpness": ("adjust_sharpness", [0, 0.3, 1.0, 1.99, 50]),
    "Posterize": ("posterize", [0, 1, 3, 8]),
    "Solarize": ("solarize", [0, 0.3, 0.5, 1.0]),
    "AutoContrast": ("autocontrast", [0]),
    "Equalize": ("equalize", [0]),
    "Invert": ("invert", [0]),
    "Hue": ("adjust_hue", [-0.5, -0.2, 0, 0.1, 0.5]),
    "Grayscale": ("rgb_to_grayscale", [0]),
}


@st.composite
def batches(draw):
    """uint8 images of any size and layout: noise, few values, smooth, or of one colour."""
    sides = st.integers(1, 30)
    shape = draw(st.integers(0, 4)), draw(st.sampled_from([1, 3])), draw(sides), draw(sides)
    rng = np.random.default_rng(draw(st.integers(0, 1 << 20)))
    low = draw(st.integers(0, 255))
    images = rng.integers(low, draw(st.integers(low, 255)) + 1, shape, np.uint8)
    kind = draw(st.sampled_from(["noise", "plain", "grey", "shaded"]))
    if kind == "plain":
        images[:] = images[:, :, :1, :1]
    elif kind == "grey":
        images[:] = images[:, :1]
    elif kind == "shaded":
        images = np.sort(images, axis=3)
    batch = torch.from_numpy(images)
    layout = draw(st.sampled_from(["contiguous", "channels last", "part"]))
    if layout == "channels last":
        return batch.contiguous(memory_format=torch.channels_last)
    return batch if layout == "contiguous" else batch.repeat(1, 1, 1, 2)[..., : shape[3]]


def changed(images, name, magnitudes, **options):
    magnitude = np.resize(np.array(magnitudes, float), len(images))
    operation = np.full(len(images), INDEX_OF[name])
    return change_each(images, [OperationStep(operation, magnitude, **options)])


def torchvisions(functional, image, name, magnitude):
    arguments = [magnitude] if len(OPERATIONS[name][1]) > 1 else []
    if name == "Solarize" and image.dtype == torch.uint8:
        arguments = [magnitude * 255]
    if name in ("Hue", "Grayscale") and len(image) == 1:
        return image
    result = getattr(functional, OPERATIONS[name][0])(image, *arguments)
    return result.expand_as(image)


@pytest.mark.parametrize("name", OPERATIONS)
@settings(deadline=None, max_examples=15)
@given(images=batches())
def test_operations_are_torchvisions(name, images, functional):
    magnitudes = OPERATIONS[name][1]
    for batch, tolerance in ((images, 1), (images.float() / 255, 1.5e-5)):
        before = batch.clone()
        found = changed(batch, name, magnitudes)
        assert (found.dtype, found.shape) == (batch.dtype, batch.shape)
        assert torch.equal(batch, before)
        for index, image in enumerate(batch):
            magnitude = magnitudes[index % len(magnitudes)]
            expected = torchvisions(functional, image, name, magnitude)
            assert (found[index].double() - expected.double()).abs().max() <= tolerance


@pytest.mark.parametrize("name", OPERATIONS)
def test_other_floats_are_changed_like_float32(name, make_images):
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        images, magnitudes = (make_images(5) / 255).to(dtype), OPERATIONS[name][1]
        found = changed(images, name, magnitudes)
        expected = changed(images.float(), name, magnitudes)
        assert torch.equal(found, expected.to(dtype)), dtype


@settings(deadline=None, max_examples=20)
@given(images=batches(), data=st.data())
def test_blurs_are_torchvisions(images, functional, data):
    # The border that is reflected must be smaller than the image.
    size = [data.draw(st.integers(0, min(side - 1, 12))) * 2 + 1 for side in images.shape[:1:-1]]
    sigmas = data.draw(st.lists(st.floats(0.05, 5), min_size=1, max_size=4))
    for batch, tolerance in ((images, 1), (images.float() / 255, 1.5e-5)):
        found = changed(batch, "Blur", sigmas, kernel_size=tuple(size))
        for index, image in enumerate(batch):
            sigma = sigmas[index % len(sigmas)]
            expected = functional.gaussian_blur(image, size, [sigma, sigma])
            assert (found[index].double() - expected.double()).abs().max() <= tolerance


SHARES = [
    lambda p: transforms.RandomSolarize(100, p),
    lambda p: transforms.RandomPosterize(3, p),
    lambda p: transforms.RandomAdjustSharpness(2, p),
    transforms.RandomInvert,
    transforms.RandomAutocontrast,
    transforms.RandomEqualize,
]


@pytest.mark.parametrize("make_step", SHARES)
def test_a_share_of_the_images_is_changed_and_the_others_are_not(make_step, make_images):
    images = make_images(600, 16, 17, channels=1) // 2 + 30
    before = images.clone()
    everywhere = make_step(1.0)(images)
    found, columns = make_step(0.3)(images, {"mask": images})
    is_changed = (found == everywhere).flatten(1).all(1)
    assert abs(int(is_changed.sum()) - 180) < 50
    assert torch.equal(found[~is_changed], images[~is_changed])
    assert torch.equal(images, before)
    assert columns["mask"] is images
    assert torch.equal(make_step(0.0)(images), images)


def test_each_sample_gets_factors_and_an_order_of_its_own(make_images):
    images = make_images(1).expand(64, -1, -1, -1)
    found = transforms.ColorJitter(0.5, 0.5, 0.5, 0.2)(images)
    assert len({image.numpy().tobytes() for image in found}) == 64
    ends = transforms.ColorJitter(brightness=(0.5, 0.5), contrast=(1.7, 1.7))(images)
    assert len({image.numpy().tobytes() for image in ends}) == 2  # the two orders
    assert torch.equal(transforms.ColorJitter()(images), images)
    grey = make_images(channels=1)
    assert torch.equal(transforms.ColorJitter(saturation=0.3, hue=0.2)(grey), grey)


def test_factors_and_sigmas_are_drawn_evenly_from_their_range():
    images = torch.full((4000, 1, 1, 1), 0.5)
    factors = transforms.ColorJitter(brightness=0.4)(images).flatten() / 0.5
    assert torch.histc(factors, 10, 0.6, 1.4).min() > 330
    assert transforms.ColorJitter(brightness=1.5).brightness == (0, 2.5)
    assert transforms.ColorJitter(hue=0.1).hue == (-0.1, 0.1)
    # The value beside a single point tells sigma.
    images = torch.zeros(400, 1, 1, 5)
    images[:, :, :, 2] = 1
    found = transforms.GaussianBlur((3, 1), sigma=(0.5, 1.5))(images, seed=4)[:, 0, 0]
    sigma = (0.5 / (found[:, 2] / found[:, 1]).log()).sqrt()
    assert torch.histc(sigma, 5, 0.5, 1.5).min() > 50


def test_tiny_and_huge_sigmas_are_the_image_and_its_mean(make_images):
    images = make_images(2, 9, 9)
    assert torch.equal(transforms.GaussianBlur(9, 1e-300)(images), images)
    found = transforms.GaussianBlur(9, 1e300)(images)
    padded = torch.nn.functional.pad(images[1:].double(), (4, 4, 4, 4), mode="reflect")
    mean = torch.nn.functional.avg_pool2d(padded, 9, stride=1)
    assert (found[1:] - mean).abs().max() <= 0.501


def test_images_smaller_than_half_the_kernel_are_refused_as_by_torchvision(make_images, functional):
    for height, width in [(1, 1), (2, 5), (5, 2), (3, 3), (4, 9)]:
        for size in [[1, 1], [3, 1], [1, 3], [5, 5], [3, 7]]:
            images, blur = make_images(1, height, width), transforms.GaussianBlur(size)
            try:
                functional.gaussian_blur(images, size, [1.0, 1.0])
            except RuntimeError:
                with pytest.raises(ValueError, match="GaussianBlur: kernel_size must be less"):
                    blur(images)
            else:
                assert blur(images).shape == images.shape


def test_arguments_and_defaults_are_those_of_torchvision(torchvision):
    v2 = importlib.import_module(f"{torchvision.__name__}.transforms.v2")
    for name in ("GaussianBlur", "RandomAdjustSharpness", "RandomAffine", "RandomPerspective"):
        theirs = inspect.signature(getattr(v2, name)).parameters.values()
        ours = inspect.signature(getattr(transforms, name)).parameters.values()
        assert [(p.name, p.default) for p in ours][:2] == [(p.name, p.default) for p in theirs][:2]
    assert transforms.GaussianBlur([9], 1).kernel_size == (9, 9)
