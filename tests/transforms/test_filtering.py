"""RandomAdjustSharpness and GaussianBlur, against torchvision."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memload import transforms
from memload.transforms.filtering import gaussian_blur, sharpen

Make = Callable[..., torch.Tensor]
Filter = Callable[[torch.Tensor, np.ndarray], torch.Tensor]
FILTERS: list[Filter] = [
    sharpen,
    lambda images, sigma: gaussian_blur(images, (7, 3), sigma + 0.1),
]
SAMPLES = np.arange(500, 900)


@st.composite
def batches(draw: Any, channels: tuple[int, ...] = (1, 2, 3)) -> torch.Tensor:
    """Return random uint8 images, some with few different levels, in either layout."""
    sides = st.integers(1, 40)
    shape = draw(st.integers(0, 3)), draw(sides), draw(sides), draw(st.sampled_from(channels))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    levels = draw(st.sampled_from([[0, 255], [254, 255], range(256)]))
    images = torch.from_numpy(random.choice(np.array(levels, np.uint8), shape)).permute(0, 3, 1, 2)
    return images.contiguous() if draw(st.booleans()) else images


def each(function: Callable[..., torch.Tensor], images: torch.Tensor, *arguments: Any) -> Any:
    """Return what torchvision does, image by image."""
    rows = zip(images, *arguments, strict=True)
    return torch.stack([function(*row) for row in rows]) if len(images) else images.clone()


@settings(max_examples=60, deadline=None)
@given(images=batches((1, 3)), data=st.data())
def test_sharpness_of_uint8_is_that_of_torchvision(
    functional: Any, images: torch.Tensor, data: Any
) -> None:
    factors = st.one_of(st.floats(0, 4), st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0, 1.99, 50.0]))
    factor = np.array(data.draw(st.lists(factors, min_size=len(images), max_size=len(images))))
    before = images.clone()
    found = sharpen(images, factor)
    assert torch.equal(found, each(functional.adjust_sharpness, images, factor.tolist()))
    assert torch.equal(images, before)
    assert found.stride() == images.clone().stride()


@settings(max_examples=40, deadline=None)
@given(images=batches(), data=st.data())
def test_blur_is_that_of_torchvision_but_for_ties(
    functional: Any, images: torch.Tensor, data: Any
) -> None:
    # The border that is reflected must be smaller than the image.
    size = [data.draw(st.integers(0, min(side - 1, 12))) * 2 + 1 for side in images.shape[:1:-1]]
    sigmas = st.lists(st.floats(0.05, 5), min_size=len(images), max_size=len(images))
    sigma = np.array(data.draw(sigmas))
    blur = each(lambda x, s: functional.gaussian_blur(x, size, s), images.double(), sigma.tolist())
    found = gaussian_blur(images, size, sigma)
    assert found.dtype == torch.uint8
    assert found.shape == images.shape
    assert (found - blur).abs().le(0.5 + 1e-4).all()
    floats = gaussian_blur(images / 255, size, sigma)
    assert torch.allclose(floats.double() * 255, blur, rtol=1e-6, atol=1e-9)
    doubles = gaussian_blur(images.double(), size, sigma)
    assert torch.allclose(doubles, blur, rtol=1e-13, atol=1e-12)


@pytest.mark.parametrize("kernel_size", [9, 23])
def test_blur_differs_from_torchvisions_in_few_values(
    kernel_size: int, functional: Any, make_images: Make
) -> None:
    images, sigma = make_images(5, 224, 224), np.linspace(0.3, 2.0, 5)
    found = gaussian_blur(images, kernel_size, sigma)
    size = [kernel_size, kernel_size]
    expected = each(lambda x, s: functional.gaussian_blur(x, size, s), images, sigma.tolist())
    difference = (found.int() - expected.int()).abs()
    assert difference.max() <= 1
    assert difference.float().mean() <= 5e-5


def test_sharpness_of_floats_is_that_of_torchvision(functional: Any) -> None:
    images = torch.rand(6, 3, 30, 20, dtype=torch.float64) * 1.4 - 0.2
    factor = np.array([0, 0.3, 1, 1.7, 2, 5])
    expected = each(functional.adjust_sharpness, images, factor.tolist())
    assert torch.allclose(sharpen(images, factor), expected, rtol=1e-14, atol=1e-14)
    tolerances = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
    for dtype, tolerance in tolerances.items():
        found = sharpen(images.to(dtype), factor)
        assert found.dtype == dtype
        assert torch.allclose(found.double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_blur_of_half_precision_rounds_once(dtype: torch.dtype) -> None:
    images = torch.rand(3, 3, 30, 20).to(dtype)
    sigma = np.array([0.5, 1, 2])
    assert torch.equal(
        gaussian_blur(images, 5, sigma), gaussian_blur(images.float(), 5, sigma).to(dtype)
    )


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("change", FILTERS)
def test_an_image_has_the_same_bits_in_any_batch_and_layout(
    change: Filter, dtype: torch.dtype, make_images: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = make_images(13, 61, 43)
    images = images if dtype == torch.uint8 else images / 255
    strengths = np.linspace(0, 3, 13)
    expected = change(images, strengths)
    alone = [change(images[i : i + 1], strengths[i : i + 1]) for i in range(13)]
    assert torch.equal(torch.cat(alone), expected)
    assert torch.equal(change(images.contiguous(), strengths), expected)
    assert torch.equal(change(images[:, :1], strengths), expected[:, :1])
    monkeypatch.setattr("memload.transforms.sub_batches._CACHED_BYTES", 1)
    assert torch.equal(change(images, strengths), expected)


def test_images_smaller_than_half_the_kernel_are_refused_as_by_torchvision(
    functional: Any, make_images: Make
) -> None:
    for height, width in [(1, 1), (2, 5), (5, 2), (3, 3), (4, 9)]:
        images = make_images(1, height, width)
        for size in [[1, 1], [3, 1], [1, 3], [5, 5], [3, 7]]:
            try:
                expected = functional.gaussian_blur(images, size, [1.0, 1.0])
            except RuntimeError:
                with pytest.raises(ValueError, match=r"GaussianBlur: kernel_size must be less"):
                    gaussian_blur(images, size, np.ones(1))
            else:
                assert torch.equal(gaussian_blur(images, size, np.ones(1)), expected)
    assert gaussian_blur(make_images(0, 1, 1), 9, np.ones(0)).shape == (0, 3, 1, 1)


def test_tiny_and_huge_sigmas_are_the_image_and_its_mean(make_images: Make) -> None:
    images = make_images(2, 9, 9)
    found = gaussian_blur(images, 9, np.array([1e-300, 1e300]))
    assert torch.equal(found[0], images[0])
    padded = torch.nn.functional.pad(images[1:].double(), (4, 4, 4, 4), mode="reflect")
    mean = torch.nn.functional.avg_pool2d(padded, 9, stride=1)
    assert (found[1:] - mean).abs().max() <= 0.5001


def test_the_drawn_share_of_samples_is_sharpened(make_images: Make) -> None:
    images = make_images(400, 6, 5)
    sharper = sharpen(images, np.full(400, 2.0))
    found = transforms.RandomAdjustSharpness(2, p=0.3)(images, samples=SAMPLES)
    is_sharper = (found == sharper).flatten(1).all(1)
    assert (is_sharper | (found == images).flatten(1).all(1)).all()
    assert abs(is_sharper.float().mean() - 0.3) < 0.1
    always = transforms.RandomAdjustSharpness(2, p=1)(images, samples=SAMPLES)
    assert torch.equal(always, sharper)
    never = transforms.RandomAdjustSharpness(2, p=0)(images, samples=SAMPLES)
    assert torch.equal(never, images)
    assert never.data_ptr() != images.data_ptr()


def test_sigma_is_drawn_evenly_for_each_sample() -> None:
    # The value beside a single point tells sigma.
    images = torch.zeros(400, 1, 1, 5, dtype=torch.float64)
    images[:, :, :, 2] = 1
    blur = transforms.GaussianBlur((3, 1), sigma=(0.5, 1.5))
    found = blur(images, samples=SAMPLES, seed=4)
    sigma = (0.5 / (found[:, 0, 0, 2] / found[:, 0, 0, 1]).log()).sqrt()
    assert torch.histc(sigma, 5, 0.5, 1.5).min() > 50
    assert torch.histc(sigma, 5, 0.5, 1.5).sum() == 400
    order = np.random.default_rng(0).permutation(400)[:90]
    assert torch.equal(blur(images[order], samples=SAMPLES[order], seed=4), found[order])
    assert not torch.equal(blur(images, samples=SAMPLES, seed=4, epoch=1), found)


def test_masks_stay_as_they_are(make_images: Make) -> None:
    masks = make_images(channels=1)[:, 0]
    step = transforms.Compose(
        [transforms.GaussianBlur(5), transforms.RandomAdjustSharpness(2, p=1)], masks=["mask"]
    )
    images, columns = step(make_images(), {"mask": masks})
    assert torch.equal(columns["mask"], masks)
    assert not torch.equal(images, make_images())


def test_arguments_and_defaults_are_those_of_torchvision(torchvision: Any) -> None:
    v2 = importlib.import_module(f"{torchvision.__name__}.transforms.v2")
    for name in ("GaussianBlur", "RandomAdjustSharpness"):
        theirs = inspect.signature(getattr(v2, name)).parameters.values()
        ours = inspect.signature(getattr(transforms, name)).parameters.values()
        assert [(p.name, p.default) for p in ours] == [(p.name, p.default) for p in theirs]
    assert transforms.GaussianBlur([9], 1).kernel_size == (9, 9)
    assert repr(transforms.GaussianBlur((3, 5), [0.5])) == (
        "GaussianBlur(kernel_size=(3, 5), sigma=(0.5, 0.5))"
    )
    assert repr(transforms.RandomAdjustSharpness(2)) == (
        "RandomAdjustSharpness(sharpness_factor=2.0, p=0.5)"
    )


@pytest.mark.parametrize("kernel_size", [0, 4, -3, 3.0, (3, 4), (3, 3, 3), (), None, "9"])
def test_kernels_that_are_not_odd_are_refused(kernel_size: Any) -> None:
    with pytest.raises(ValueError, match=r"GaussianBlur: kernel_size must be an odd integer"):
        transforms.GaussianBlur(kernel_size)


@pytest.mark.parametrize("sigma", [0, -1, (2, 1), (0, 1), (1, 2, 3), (), float("nan"), None, "1"])
def test_sigmas_that_are_not_above_0_are_refused(sigma: Any, make_images: Make) -> None:
    with pytest.raises(ValueError, match=r"GaussianBlur: sigma must be a number above 0"):
        transforms.GaussianBlur(3, sigma)
    with pytest.raises(ValueError, match=r"GaussianBlur: sigma must be numbers above 0 \(2,\)"):
        gaussian_blur(make_images(2), 3, np.array([1.0, -1.0]))


@pytest.mark.parametrize("factor", [-0.1, float("inf"), None, "2"])
def test_sharpness_that_is_below_0_is_refused(factor: Any, make_images: Make) -> None:
    with pytest.raises(ValueError, match=r"RandomAdjustSharpness: sharpness_factor must be a num"):
        transforms.RandomAdjustSharpness(factor)
    for factors in ([1.0, -1.0], [1.0, float("inf")], [1.0]):
        with pytest.raises(ValueError, match=r"sharpen: factor must be numbers of at least 0"):
            sharpen(make_images(2), np.array(factors))


@pytest.mark.parametrize("change", FILTERS)
def test_floats_have_gradients(change: Filter) -> None:
    images = (torch.rand(2, 1, 5, 6, dtype=torch.float64) * 0.2 + 0.4).requires_grad_()
    strengths = np.array([0.5, 1.5])
    assert torch.autograd.gradcheck(lambda x: change(x, strengths), images, fast_mode=True)
