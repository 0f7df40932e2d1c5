"""Changes of colours are those of torchvision, where a processor has AVX2 to the bit."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memload import transforms
from memload.transforms import color, lookup
from memload.transforms.transform import Transform
from tests.transforms.processors import FUSES, are_equal_but_for_rounding

Make = Callable[..., torch.Tensor]
CPU = torch.device("cpu")


@st.composite
def batches(draw: st.DrawFn, channels: tuple[int, ...] = (1, 3)) -> torch.Tensor:
    """uint8 images of any size and layout: noise, few values, smooth, or of one colour."""
    shape = (
        draw(st.integers(0, 4)), draw(st.sampled_from(channels)),
        draw(st.integers(1, 30)), draw(st.integers(1, 30)),
    )  # fmt: skip
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
    layout = draw(st.sampled_from(["contiguous", "channels last", "part"]))
    batch = torch.from_numpy(images)
    if layout == "channels last":
        return batch.contiguous(memory_format=torch.channels_last)
    return batch if layout == "contiguous" else batch.repeat(1, 1, 1, 2)[..., : shape[3]]


def factors(count: int, seed: int) -> np.ndarray:
    """Return factors, some of them round."""
    rng = np.random.default_rng(seed)
    drawn = rng.uniform(0, 2, count)
    return np.where(rng.random(count) < 0.3, drawn.round(1), drawn)


def each(function: Callable[..., Any], images: torch.Tensor, *parameters: Any) -> torch.Tensor:
    """Call a function of torchvision for each image with its own parameters."""
    changed = [
        function(image, *(values[index].item() for values in parameters))
        for index, image in enumerate(images)
    ]
    return torch.stack(changed) if changed else images


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.dtype == expected.dtype and torch.equal(found, expected)


@settings(deadline=None, max_examples=40)
@given(images=batches((1, 2, 3, 4)), seed=st.integers(0, 1 << 20))
def test_solarize_posterize_invert_and_equalize_are_torchvisions(
    images: torch.Tensor, seed: int, functional: Any
) -> None:
    rng, count, floats = np.random.default_rng(seed), len(images), images / 255
    before = images.clone()
    threshold = np.where(
        rng.random(count) < 0.5, rng.integers(-1, 256, count), 255 * rng.random(count)
    )
    assert same(lookup.solarize(images, threshold), each(functional.solarize, images, threshold))
    limit = threshold / 255
    assert same(lookup.solarize(floats, limit), each(functional.solarize, floats, limit))
    bits = rng.integers(0, 9, count)
    assert same(lookup.posterize(images, bits), each(functional.posterize, images, bits))
    for name in ("invert", "equalize"):
        ours, theirs = getattr(lookup, name), getattr(functional, name)
        assert same(ours(images), each(theirs, images))
        assert same(ours(floats), each(theirs, floats))
    assert same(images, before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_floats_are_posterized_as_by_torchvision(dtype: torch.dtype, functional: Any) -> None:
    # Levels are exact in each dtype, and some values lie on them, or outside of 0 to 1.
    values = torch.cat([torch.arange(257) / 256, torch.rand(700), torch.randn(66)])
    images = values.to(dtype).view(1, 1, 31, 33).expand(9, 3, 31, 33)
    bits = np.arange(9)
    assert same(lookup.posterize(images, bits), each(functional.posterize, images, bits))
    found = transforms.RandomPosterize(3, p=1)(images)
    assert same(found, functional.posterize(images, 3))
    with pytest.raises(ValueError, match=r"posterize: bits must be .*, not 9"):
        lookup.posterize(images, bits + 1)


@settings(deadline=None, max_examples=40)
@given(images=batches())
def test_autocontrast_is_torchvisions(images: torch.Tensor, functional: Any) -> None:
    floats = images / 255
    for batch in (images, floats, floats.double(), floats.half(), floats.bfloat16()):
        assert same(lookup.autocontrast(batch), each(functional.autocontrast, batch))


@settings(deadline=None, max_examples=40)
@given(images=batches(), seed=st.integers(0, 1 << 20))
def test_brightness_contrast_and_saturation_are_torchvisions(
    images: torch.Tensor, seed: int, functional: Any
) -> None:
    factor, floats = factors(len(images), seed), images / 255
    for name in ("adjust_brightness", "adjust_contrast", "adjust_saturation"):
        ours, theirs = getattr(color, name), getattr(functional, name)
        # torchvision rounds twice instead of once in the last values, which fill no vector.
        tiles = images.contiguous().repeat(1, 1, 32, 1)
        expected = each(theirs, tiles, factor)[:, :, : images.shape[2]]
        exactly = FUSES or name == "adjust_brightness"
        assert are_equal_but_for_rounding(ours(images, factor), expected, exactly), name
        torch.testing.assert_close(
            ours(floats, factor), each(theirs, floats, factor), rtol=0, atol=1e-6
        )


@settings(deadline=None, max_examples=40)
@given(images=batches(), seed=st.integers(0, 1 << 20))
def test_tables_have_the_values_and_the_layout_of_the_changes(
    images: torch.Tensor, seed: int
) -> None:
    rng, count = np.random.default_rng(seed), len(images)
    threshold, factor = rng.uniform(0, 255, count), factors(count, seed)
    changes: list[tuple[torch.Tensor, torch.Tensor]] = [
        (lookup.solarize(images, threshold), lookup.solarize_table(threshold, CPU)),
        (lookup.autocontrast(images), lookup.autocontrast_table(images)),
        (lookup.equalize(images), lookup.equalize_table(images)),
        (color.adjust_contrast(images, factor), color.contrast_table(images, factor)),
    ]
    for changed, tables in changes:
        assert same(lookup.look_up(images, tables), changed)
        assert changed.stride() == torch.empty_like(changed).stride()


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_lookup_in_many_images_is_that_in_each(
    count: int, layout: torch.memory_format, make_images: Make
) -> None:
    images = make_images(50, 5, 6).contiguous(memory_format=layout)
    tables = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (50, count, 256), np.uint8))
    expected = tables.expand(50, 3, 256).gather(2, images.flatten(2).long()).view(50, 3, 5, 6)
    found = lookup.look_up(images, tables)
    assert same(found, expected)
    assert found.is_contiguous(memory_format=layout)


@pytest.mark.parametrize("is_uint8", [True, False])
def test_an_image_does_not_depend_on_the_others(is_uint8: bool, make_images: Make) -> None:
    images = make_images(50, 5, 6) if is_uint8 else make_images(50, 5, 6) / 255
    factor = factors(50, 0)
    for name in ("adjust_brightness", "adjust_contrast", "adjust_saturation"):
        change = getattr(color, name)
        alone = [change(images[i : i + 1], factor[i : i + 1]) for i in range(50)]
        assert same(change(images, factor), torch.cat(alone)), name
    for change in (lookup.autocontrast, lookup.equalize):
        assert same(change(images), torch.cat([change(image[None]) for image in images]))


STEPS: list[Callable[..., Transform]] = [
    lambda p: transforms.RandomSolarize(100, p),
    lambda p: transforms.RandomPosterize(3, p),
    transforms.RandomInvert,
    transforms.RandomAutocontrast,
    transforms.RandomEqualize,
]


@pytest.mark.parametrize("make_step", STEPS)
def test_a_share_of_the_images_is_changed_and_the_others_are_not(
    make_step: Callable[..., Transform], make_images: Make
) -> None:
    images = make_images(600, channels=1) // 2 + 30
    before = images.clone()
    changed = make_step(1.0)(images)
    found, columns = make_step(0.3)(images, {"mask": images})
    is_changed = (found == changed).flatten(1).all(1)
    assert abs(int(is_changed.sum()) - 180) < 50
    assert torch.equal(found[~is_changed], images[~is_changed])
    assert torch.equal(images, before)
    assert columns["mask"] is images
    assert torch.equal(make_step(0.0)(images), images)


def test_arguments_that_have_no_meaning_are_refused(make_images: Make) -> None:
    images, floats = make_images(2), make_images(2) / 255
    for make_step, message in (
        (lambda: transforms.RandomSolarize("128"), "RandomSolarize: threshold must be a number"),  # type: ignore[arg-type]
        (lambda: transforms.RandomPosterize(9), "RandomPosterize: bits must be integers from 0 to 8, not 9"),
        (lambda: transforms.RandomPosterize(2.5), "RandomPosterize: bits must be an integer"),  # type: ignore[arg-type]
        (lambda: transforms.RandomInvert(p=1.5), "RandomInvert: p must be a number from 0 to 1"),
        (lambda: transforms.RandomSolarize(256, p=0)(images), "RandomSolarize: threshold must be at most 255"),
        (lambda: transforms.RandomSolarize(128, p=0)(floats), "RandomSolarize: threshold must be at most 1"),
        (lambda: transforms.RandomAutocontrast(0)(images[:, :2]), "RandomAutocontrast: images must be of 1 or 3"),
        (lambda: lookup.solarize(images, np.array([3, np.nan])), "solarize: threshold must be at most 255"),
        (lambda: lookup.posterize(images, np.array([-1, 3])), "posterize: bits must be .*, not -1"),
        (lambda: color.adjust_contrast(images, np.array([1, -0.1])), "adjust_contrast: factor must be"),
        (lambda: color.adjust_saturation(images[:, :2], np.ones(2)), "adjust_saturation: images must be of 1 or 3"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            make_step()
