"""Kernels against torch's operations: on a GPU or, without one, by Triton's interpreter.

Triton chooses between them when it is imported, so the interpreter has a process of its own.
"""

import random

import numpy as np
import pytest
import torch

from memload import transforms
from memload.transforms.crops_in_torch import run_plan
from memload.transforms.draws import Drawn, Draws
from memload.transforms.following import move_masks
from memload.transforms.passes import group
from tests.transforms.kernels import (
    DEVICE,
    INTERPRETED,
    assert_passes_in_interpreter,
    needs_device,
    starts_the_interpreter,
)

pytestmark = pytest.mark.slow
T = transforms
FEW = 4  #: examples of a test in the interpreter, which is slow
EXAMPLES = FEW if INTERPRETED else 60


@starts_the_interpreter
def test_all_of_this_holds_in_tritons_interpreter():
    assert_passes_in_interpreter(__file__, 8 * FEW)


def pixels(rng, count, channels, height, width):
    """Return smooth uint8 (N, C, H, W): channels-last, contiguous, or a part of larger images."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 31))
    small = torch.rand((count, channels, 5, 6), generator=generator)
    large = torch.nn.functional.interpolate(small, (height + 3, width + 2), mode="bilinear")
    images = (large * 256).to(torch.uint8)
    layout = rng.choice([torch.channels_last, torch.contiguous_format, None])
    if layout is None:
        return images[:, :, 1:-2, 1:-1]
    return images[:, :, :height, :width].contiguous(memory_format=layout)


def assert_within(found, expected, levels):
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    difference = (found.cpu().double() - expected.double()).abs()
    assert not difference.numel() or difference.max() <= levels, difference.max()


def plan_of(steps, images, seed):
    ((_, step),) = group(steps)
    return step.plan(Draws(np.arange(len(images)), seed, 0), images)


def crops(rng, bicubic):
    """Return crops, resizes, flips and maps, anything of it that one pass does."""
    largest = 14 if INTERPRETED else 300

    def side():
        return rng.randint(1, largest)

    interpolation, antialias = "bicubic" if bicubic else "bilinear", rng.random() < 0.6
    crop = rng.choice([
        T.CenterCrop((side(), side())),
        T.RandomCrop((side(), side()), rng.randint(0, 3), pad_if_needed=True, fill=9),
        T.RandomCrop((side(), side()), 2 * largest, padding_mode="edge"),
        T.RandomCrop(3, 2, padding_mode=rng.choice(["reflect", "symmetric"])),
    ])  # fmt: skip
    resize = rng.choice([
        T.Resize((side() + 1, side() + 1), interpolation, antialias=antialias),
        T.RandomResizedCrop((side(), side() + 1), (0.01, 1), (0.5, 2), interpolation, antialias),
    ])  # fmt: skip
    flips = T.RandomHorizontalFlip(), T.RandomVerticalFlip()
    moves = rng.choice([[crop], [crop], [resize], [crop, resize], [resize, T.CenterCrop(9)]])
    steps = [*rng.sample(flips, rng.randrange(3)), *moves, *rng.sample(flips, rng.randrange(3))]
    return steps + [T.Normalize([0.4], [0.25])] * rng.randrange(2)


@needs_device
@pytest.mark.parametrize("seed", range(3 * EXAMPLES))
def test_crops_are_those_of_torch(seed):
    from memload.transforms.kernels.crops import crop

    rng, bicubic = random.Random(seed), seed % 2 == 1
    count, largest = (2, 14) if INTERPRETED else (9, 300)
    images = pixels(
        rng, count, rng.choice([1, 3, 3, 4]), rng.randint(3, largest), rng.randint(3, largest)
    )
    layout = rng.choice([torch.channels_last, torch.contiguous_format])
    steps = crops(rng, bicubic)
    plan = plan_of(steps, images, seed)
    expected = run_plan(images, plan, plan.boxes(), layout)
    boxes, maps = (torch.from_numpy(each).to(DEVICE) for each in (plan.boxes(), plan.maps()))
    found = crop(images.to(DEVICE), plan, boxes, maps, layout)
    assert found.is_contiguous(memory_format=layout)
    level = 1.01 / 255 / 0.25 if plan.maps_pixels else 1
    assert_within(found, expected, 2 * level)
    # On some processors, torch rounds few pixels of a bilinear resize by another level.
    if found.numel() and not bicubic:
        assert ((found.cpu().float() - expected.float()).abs() > level).float().mean() < 1e-3


@needs_device
@pytest.mark.parametrize("seed", range(EXAMPLES))
def test_masks_are_those_of_torch(seed):
    from memload.transforms.kernels.masks import gather

    rng, random_numbers = random.Random(seed), np.random.default_rng(seed)
    dtype = rng.choice([torch.uint8, torch.int16, torch.int64])
    masks = torch.from_numpy(random_numbers.integers(0, 100, (3, 30, 41))).to(dtype)
    mode = rng.choice(["constant", "constant", "edge", "reflect", "symmetric"])
    if rng.random() < 0.5:
        steps = [T.RandomResizedCrop(rng.randint(1, 70)), T.RandomVerticalFlip()]
        if mode != "constant":
            steps = [T.RandomCrop(rng.randint(1, 40), 9, padding_mode=mode)]
        plan = plan_of(steps, masks[:, None], seed)
        matrices, size, shown = plan.matrices(), plan.size, torch.from_numpy(plan.shown())
    else:
        matrices = np.eye(3) + random_numbers.normal(
            0, [[0.3, 0.3, 9], [0.3, 0.3, 9], [0.002, 0.002, 0]], (3, 3, 3)
        )
        size, shown, mode = (rng.randint(1, 70), rng.randint(1, 70)), None, "constant"
    matrices = torch.from_numpy(matrices)
    expected = move_masks(masks, matrices, size, shown, mode, 77)
    there = None if shown is None else shown.to(DEVICE)
    found = gather(masks.to(DEVICE), matrices.to(DEVICE), size, there, mode, 77)
    assert torch.equal(found.cpu(), expected)


def drawn_operations(kind, rng, channels, smallest):
    """Return transforms that draw operations, one after another, as few as need all kernels."""
    options = {
        "interpolation": rng.choice(["nearest", "bilinear"]),
        "fill": rng.choice([None, 0, 77.5, [3, 200.3, 90][:channels]]),
    }
    blurs = [T.RandomApply([T.GaussianBlur((3, 5))], 0.5)] if smallest > 2 else []
    kinds = [
        [T.TrivialAugmentWide(**options)],
        [T.AutoAugment(rng.choice(["imagenet", "svhn", "cifar10"]), **options)],
        [T.TimmRandAugment(num_ops=1, p=1, **options)],
        [T.RandomPerspective(0.5, 1, **options)],
        [T.RandomAffine(99, (0.2, 0.2), (0.5, 2), 9, **options)],
        [T.ColorJitter(0.8), T.RandomGrayscale(0.2), T.RandomSolarize(128, 0.2)],
        [T.RandomApply([T.ColorJitter(contrast=0.8)], 0.8), T.RandomInvert()],
        [*blurs, T.ColorJitter(saturation=0.8, hue=0.3)],
        [T.RandomAdjustSharpness(2.3), T.RandomPosterize(3)],
        [T.RandomEqualize(0.5)], [T.RandomAutocontrast(0.5)], [*blurs, T.RandomGrayscale(0.5)],
    ]  # fmt: skip
    return kinds[kind % len(kinds)]


@needs_device
@pytest.mark.parametrize("seed", range(3 * EXAMPLES))
def test_operations_are_those_of_torch(seed):
    from memload.transforms.kernels.operations import passes_of
    from memload.transforms.operations import change_each

    rng = random.Random(seed)
    count, largest, channels = (
        rng.randint(1, 4 if INTERPRETED else 100),
        24 if INTERPRETED else 200,
        rng.choice([1, 3, 3]),
    )
    height, width = rng.randint(3, largest), rng.randint(3, largest)
    images = pixels(rng, count, channels, height, width)
    steps = drawn_operations(seed, rng, channels, min(height, width))
    ((_, together),) = group([*steps, T.Normalize([0.4], [0.2])])
    drawn = Drawn(together.draw(Draws(np.arange(count), seed, 0), images), images.device)
    expected = change_each(images, drawn.on_host("steps"))
    plan, maps = drawn.on_host("plan"), drawn["maps"].to(DEVICE)
    expected = run_plan(expected, plan, np.zeros((count, 8), int), torch.channels_last)
    found = images.to(DEVICE)
    passes, numbers = passes_of(drawn.on_host("steps"), plan, images.shape[1])
    for each, array in zip(passes, numbers, strict=True):
        found = each(found, torch.from_numpy(array).to(DEVICE), maps, torch.channels_last)
    difference = ((found.cpu() - expected).abs() * 255 * 0.2).round()
    # A second operation may be of another level; nearest pixels may be others at ties.
    assert (difference > 1).float().mean() < 0.01, difference.max()
    is_one = len(steps) == 1 and not isinstance(steps[0], T.AutoAugment)
    if is_one and getattr(steps[0], "interpolation", "") != "nearest":
        assert difference.max() <= 1


@needs_device
@pytest.mark.parametrize("seed", range(EXAMPLES))
def test_painted_and_mixed_images_are_those_of_torch(seed):
    from memload.transforms.erasing import _table
    from memload.transforms.kernels import painting

    rng = random.Random(seed)
    dtype = rng.choice([torch.uint8, torch.float16, torch.float32])
    images = (pixels(rng, 5, rng.choice([1, 3]), 19, 33) / 255).to(dtype)
    draws = Draws(np.arange(5), seed, 0, 0)
    erase = T.RandomErasing(0.7, value="random" if dtype.is_floating_point else 0.0)
    drawn = Drawn(erase.draw(draws, images), images.device)
    table = _table(erase.colour(images), dtype, torch.device(DEVICE))
    offsets = drawn["offsets"].to(DEVICE) if dtype.is_floating_point else None
    found = painting.paint(images.to(DEVICE), drawn["boxes"].to(DEVICE), table, offsets)
    expected = erase(images, samples=np.arange(5), seed=seed)
    assert torch.equal(found.cpu(), expected)
    mix = (
        T.CutMix(num_classes=2)
        if rng.random() < 0.5 or dtype == torch.uint8
        else T.MixUp(num_classes=2)
    )
    drawn = Drawn(mix.draw(draws, images), images.device)
    factor = drawn["factor"].to(DEVICE) if dtype.is_floating_point else None
    found = painting.mix(images.to(DEVICE), factor, drawn["boxes"].to(DEVICE))
    expected, _ = mix(images, {"label": torch.arange(5) % 2}, samples=np.arange(5), seed=seed)
    assert_within(found, expected, 1e-3 if dtype == torch.float16 else 1e-6)
