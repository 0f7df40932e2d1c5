"""Bicubic and random interpolation: torch and torchvision define the pixels."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

from memload import transforms
from memload.transforms.draws import Draws
from memload.transforms.geometry import Plan
from memload.transforms.resampling import Filter, filter_of, filters_of

Make = Callable[..., Tensor]
SIDES = st.integers(1, 70)


def plan_of(images: Tensor, *steps: transforms.Transform) -> Plan:
    """Return what these steps, fused, come to for samples 0 to N - 1."""
    ((_, fused),) = transforms.Compose(steps)._steps_of_views[0]
    draws = functools.partial(Draws, np.arange(len(images)), 0, 0, view=0)
    plan: Plan = fused.plan(images, len(images), draws, torch.channels_last)
    return plan


def draw_images(data: st.DataObject, height: int, width: int) -> Tensor:
    """Return noise, or black and white, which goes beyond the ends."""
    rng = np.random.default_rng(data.draw(st.integers(0, 1000), label="seed"))
    count, channels = data.draw(st.sampled_from([(1, 3), (2, 3), (3, 1), (2, 5)]), label="images")
    shape = count, channels, height, width
    pixels = rng.integers(0, 256, shape, np.uint8)
    if data.draw(st.booleans(), label="black and white"):
        pixels = np.where(pixels < 128, np.uint8(0), np.uint8(255))
    layout = data.draw(st.sampled_from([torch.contiguous_format, torch.channels_last]))
    return torch.from_numpy(pixels).contiguous(memory_format=layout)


def torchs(images: Tensor, size: tuple[int, int], antialias: bool) -> Tensor:
    """Return torch's pixels, one channel at a time: of more it fails at a width of 1."""
    planes = images.contiguous().flatten(0, 1)[:, None]
    resized = interpolate(planes, size, mode="bicubic", antialias=antialias)
    return resized.view(*images.shape[:2], *size)


@settings(deadline=None, max_examples=60)
@given(st.data(), SIDES, SIDES, st.tuples(SIDES, SIDES), st.booleans())
def test_bicubic_pixels_are_torchs_to_the_bit(
    data: st.DataObject, height: int, width: int, size: tuple[int, int], antialias: bool
) -> None:
    images = draw_images(data, height, width)
    found = transforms.Resize(size, "bicubic", antialias=antialias)(images)
    assert found.dtype == torch.uint8
    assert torch.equal(found, torchs(images, size, antialias))
    if size[1] > 1:
        assert torch.equal(found, interpolate(images, size, mode="bicubic", antialias=antialias))


@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("size", [(1, 1), (1, 9), (9, 1), (5, 5)])
@pytest.mark.parametrize("extent", [(1, 1), (1, 7), (7, 1)])
def test_sides_of_one_pixel_are_resized_as_all_others(
    extent: tuple[int, int], size: tuple[int, int], antialias: bool, make_images: Make
) -> None:
    for images in (make_images(3, *extent), make_images(3, *extent).contiguous()):
        resized = transforms.Resize(size, "bicubic", antialias=antialias)(images)
        assert torch.equal(resized, torchs(images, size, antialias))


@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("size", [(9, 13), (50, 41), (20, 60)])
def test_resize_and_resized_crops_are_torchvisions(
    size: tuple[int, int], antialias: bool, make_images: Make, functional: Any, torchvision: Any
) -> None:
    bicubic = torchvision.transforms.InterpolationMode.BICUBIC
    images = make_images(6, 33, 47)
    found = transforms.Resize(size, bicubic, antialias=antialias)(images)
    resize = functools.partial(functional.resize, interpolation=bicubic, antialias=antialias)
    assert torch.equal(found, resize(images, size))
    step = transforms.RandomResizedCrop(size, interpolation=bicubic, antialias=antialias)
    found, plan = step(images, samples=np.arange(6)), plan_of(images, step)
    for number, (image, result) in enumerate(zip(images, found, strict=True)):
        box = [int(axis.start[number]) for axis in (plan.height, plan.width)]
        box += [int(axis.length[number]) for axis in (plan.height, plan.width)]
        expected = functional.resized_crop(image, *box, size, bicubic, antialias)
        assert torch.equal(result, expected)


@settings(deadline=None, max_examples=30)
@given(st.data(), SIDES, SIDES, st.tuples(SIDES, SIDES), st.booleans())
def test_bicubic_floats_are_torchs_and_not_cut_off(
    data: st.DataObject, height: int, width: int, size: tuple[int, int], antialias: bool
) -> None:
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


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 300), st.integers(2, 300), st.booleans(), st.booleans())
def test_filters_of_the_kernels_table_give_torchs_pixels(
    length: int, resized: int, antialias: bool, bicubic: bool
) -> None:
    found = filter_of(length, resized, antialias, bicubic)
    weights = found.rows[1 : 1 + found.taps]
    assert np.abs(weights).max() < 1 << 15
    assert len(found.rows) >= 5
    assert not found.rows[1 + found.taps :].any()
    line = np.random.default_rng(length).integers(0, 2, length).astype(np.uint8) * 255
    pixels = np.minimum(found.rows[0] + np.arange(found.taps)[:, np.newaxis], length - 1)
    sums = (weights * line[pixels].astype(np.int64)).sum(0) + (1 << found.bits >> 1)
    mode = "bicubic" if bicubic else "bilinear"
    row = torch.from_numpy(line).expand(1, 3, 2, length)
    row = row.contiguous(memory_format=torch.channels_last)
    expected = interpolate(row, (2, resized), mode=mode, antialias=antialias)[0, 0, 0]
    assert (sums >> found.bits).clip(0, 255).tolist() == expected.tolist()


def test_the_largest_weight_counts_before_the_border_is_added_to_it() -> None:
    # At the last of 236 pixels, torch chooses the bits before a weight beyond the border lowers it.
    assert filter_of(236, 235, antialias=False, bicubic=True).bits == 14
    line = torch.randint(0, 256, (1, 3, 2, 236), dtype=torch.uint8)
    found = transforms.Resize((2, 235), "bicubic", antialias=False)(line)
    assert torch.equal(found, interpolate(line, (2, 235), mode="bicubic"))


def test_a_table_has_each_filter_once_and_each_sample_finds_its_own(make_images: Make) -> None:
    images = make_images(300, 30, 40)
    plan = plan_of(images, transforms.RandomResizedCrop((20, 27), interpolation="random"))
    found = filters_of(plan)
    sizes, table = 0, np.concatenate(found.tables)
    for row, axis in enumerate((plan.height, plan.width)):
        assert axis.resized is not None
        which = set(zip(axis.length.tolist(), plan.bicubic.tolist(), strict=True))
        sizes += sum(filter_of(size, axis.resized, True, cubic).rows.size for size, cubic in which)
        for number in range(300):
            expected: Filter = filter_of(
                int(axis.length[number]), axis.resized, True, bool(plan.bicubic[number])
            )
            start, taps = found.places[row, number], found.places[2 + row, number]
            rows = table[start : start + expected.rows.size].reshape(expected.rows.shape)
            assert (rows == expected.rows).all()
            assert (taps, found.bits[row, number]) == (expected.taps, expected.bits)
    assert table.size == sizes


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize(
    "step",
    [
        functools.partial(transforms.Resize, (17, 31)),
        functools.partial(transforms.RandomResizedCrop, (17, 31)),
    ],
)
def test_a_random_interpolation_is_bilinear_or_bicubic_for_each_sample(
    step: Callable[..., transforms.Transform], flip: bool, make_images: Make
) -> None:
    images, samples = make_images(400, 14, 15), np.arange(1000, 1400)
    flips = [transforms.RandomHorizontalFlip()] if flip else []
    found, bilinear, bicubic = (
        transforms.Compose([*flips, step(interpolation=name)])(images, samples=samples, seed=3)
        for name in ("random", "bilinear", "bicubic")
    )
    are_bilinear, are_bicubic = (
        (found == one).flatten(1).all(1).numpy() for one in (bilinear, bicubic)
    )
    assert (are_bilinear != are_bicubic).all()
    assert abs(are_bicubic.sum() - 200) < 40
    some = transforms.Compose([*flips, step(interpolation="random")])
    assert torch.equal(some(images[50:60], samples=samples[50:60], seed=3), found[50:60])


def test_an_interpolation_is_independent_of_the_box() -> None:
    step = transforms.RandomResizedCrop(8, interpolation="random")
    images = torch.empty((20_000, 1, 64, 64), dtype=torch.uint8)
    plan = plan_of(images, step)
    assert abs(plan.bicubic.mean() - 0.5) < 0.02
    for values in (plan.height.start, plan.height.length, plan.width.start, plan.width.length):
        assert abs(np.corrcoef(values, plan.bicubic)[0, 1]) < 0.03
    plain = plan_of(images, transforms.RandomResizedCrop(8))
    assert (plan.table() == plain.table()).all()
    assert not plain.bicubic.any()


def test_interpolations_have_torchvisions_and_pillows_names(torchvision: Any) -> None:
    modes = torchvision.transforms.InterpolationMode
    for name, others in {
        "bilinear": (modes.BILINEAR, 2, Image.Resampling.BILINEAR),
        "bicubic": (modes.BICUBIC, 3, Image.Resampling.BICUBIC),
        "random": ("random",),
    }.items():
        for other in (name, *others):
            assert transforms.Resize(8, other).interpolation == name
            step = transforms.RandomResizedCrop(8, interpolation=other)
            assert step.interpolation == name
    for wrong in (modes.NEAREST, modes.LANCZOS, 0, 1, None):
        with pytest.raises(ValueError, match="Resize: interpolation must be 'bilinear', 'bicubic'"):
            transforms.Resize(8, wrong)


def test_masks_and_boxes_follow_whatever_the_interpolation_is(make_images: Make) -> None:
    images = make_images(9, 30, 40)
    columns = {
        "mask": torch.arange(9 * 30 * 40, dtype=torch.int32).view(9, 30, 40),
        "box": torch.tensor([[[3.0, 4, 30, 20]]]).expand(9, 1, 4),
        "point": torch.tensor([[[3.0, 4]]]).expand(9, 1, 2),
    }
    names = {"masks": ["mask"], "boxes": ["box"], "points": ["point"]}
    found = [
        transforms.Compose([transforms.RandomResizedCrop(24, interpolation=name)], **names)(  # type: ignore[arg-type]
            images, columns, samples=np.arange(9)
        )[1]
        for name in ("bilinear", "bicubic", "random")
    ]
    for name in columns:
        for other in found[1:]:
            torch.testing.assert_close(other[name], found[0][name], rtol=0, atol=0, equal_nan=True)


def test_an_empty_batch_stays_empty_with_any_interpolation() -> None:
    images = torch.empty((0, 3, 9, 9), dtype=torch.uint8)
    for name in ("bicubic", "random"):
        assert transforms.Resize((4, 1), name)(images).shape == (0, 3, 4, 1)
        step = transforms.RandomResizedCrop(5, interpolation=name)
        assert step(images).shape == (0, 3, 5, 5)
