"""Kernels of drawn operations against the reference, on a GPU or by Triton's interpreter.

Triton chooses between them when it is imported, so the interpreter has a process of its own.
"""

import functools
import random
from typing import Any

import numpy as np
import pytest
import torch

from memload import transforms
from memload.transforms import warping
from memload.transforms.draws import Draws
from memload.transforms.operations_reference import change_each
from tests.transforms.kernels import (
    DEVICE,
    INTERPRETED,
    assert_passes_in_interpreter,
    needs_device,
    starts_the_interpreter,
)

pytestmark = pytest.mark.slow
EXAMPLES = 90 if torch.cuda.is_available() else 24


@starts_the_interpreter
def test_all_of_this_holds_in_tritons_interpreter() -> None:
    assert_passes_in_interpreter(__file__, EXAMPLES + 13)


def steps(rng: random.Random, channels: int, smallest: int) -> list[transforms.Transform]:
    """Return transforms that draw operations, one after another."""
    options: dict[str, Any] = {
        "interpolation": rng.choice(["nearest", "bilinear"]),
        "fill": rng.choice([None, 0, 77.5, [3, 200.3, 90][:channels]]),
    }
    jitter = transforms.ColorJitter(0.8, 0.8, 0.8, 0.3)
    blurs = [transforms.RandomApply([transforms.GaussianBlur(3)], 0.5)] if smallest > 2 else []
    made = rng.choice([
        [transforms.TrivialAugmentWide(**options)],
        [transforms.RandAugment(2, 20, **options)],
        [transforms.AutoAugment(rng.choice(["imagenet", "svhn", "cifar10"]), **options)],
        [transforms.TimmRandAugment(**options)],
        [jitter, transforms.RandomGrayscale(0.2), transforms.RandomSolarize(128, 0.2)],
        [
            transforms.RandomApply([jitter], 0.8), transforms.RandomEqualize(0.3), *blurs,
            transforms.RandomAdjustSharpness(2.3), transforms.RandomInvert(),
        ],
        [
            transforms.RandomChoice([
                transforms.RandomGrayscale(1.0), transforms.RandomSolarize(128, 1.0),
                transforms.RandomPosterize(3, 1.0), *blurs,
            ]),
            jitter, transforms.TrivialAugmentWide(**options), transforms.RandomAutocontrast(),
        ],
    ])  # fmt: skip
    normalize = transforms.Normalize([0.4] * channels, [0.2] * channels)
    return [*made, *rng.choice([[], [normalize], [transforms.ToDtype(torch.float16)]])]


def pixels(rng: random.Random, count: int, channels: int, height: int, width: int) -> torch.Tensor:
    """Return uint8 (N, C, H, W) of noise or of few levels, channels-last or contiguous."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 31))
    shape = (count, channels, height, width)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    if rng.random() < 0.5:
        images = images // rng.randint(2, 9) + rng.randint(0, 100)
    layout = rng.choice([torch.channels_last, torch.contiguous_format])
    return images.contiguous(memory_format=layout)


@needs_device
@pytest.mark.parametrize("seed", range(EXAMPLES))
def test_kernels_give_the_reference_bit_for_bit(seed: int) -> None:
    from memload.transforms.operations_kernel import run

    rng = random.Random(seed)
    count, largest = (rng.randint(1, 30), 24) if INTERPRETED else (rng.randint(1, 100), 200)
    channels = rng.choice([1, 3, 3])
    height, width = rng.randint(1, largest), rng.randint(1, largest)
    images = pixels(rng, count, channels, height, width)
    layout = rng.choice([torch.channels_last, torch.contiguous_format])
    compose = transforms.Compose(steps(rng, channels, min(height, width)), memory_format=layout)
    ((_, together),) = compose._steps_of_views[0]
    draws = functools.partial(Draws, np.arange(count + 5), seed, 0, view=0)
    plan = together.plan(images, count + 5, draws, layout)
    first = rng.randint(0, 5)
    expected, _ = together.run(images, {}, plan, first)
    found = run(images.to(DEVICE), plan, first)
    assert found.dtype == expected.dtype
    assert found.is_contiguous(memory_format=layout)
    assert torch.equal(found.cpu(), expected)


@needs_device
@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
@pytest.mark.parametrize("fill", [None, 0, [9.4, 200.5, 77]])
@pytest.mark.parametrize("perspective", [False, True])
def test_warps_give_the_reference_bit_for_bit(
    interpolation: Any, fill: Any, perspective: bool
) -> None:
    from memload.transforms.operations_kernel import warp

    for seed in range(2 if INTERPRETED else 20):
        rng, random_numbers = random.Random(seed), np.random.default_rng(seed)
        height, width, count = rng.randint(3, 40), rng.randint(3, 40), 6
        images = pixels(rng, count, 3, height, width)
        if perspective:
            right, bottom = width - 1, height - 1
            starts = np.array([[0, 0], [right, 0], [right, bottom], [0, bottom]], np.float64)
            starts = np.tile(starts, (count, 1, 1))
            ends = starts + random_numbers.uniform(-1, 1, (count, 4, 2))
            matrices = warping.perspective_matrices(starts, ends)
        else:
            matrices = warping.affine_matrices(
                height,
                width,
                random_numbers.uniform(-180, 180, count),
                random_numbers.integers(-9, 9, (count, 2)).astype(float),
                random_numbers.uniform(0.3, 3, count),
                random_numbers.uniform(-40, 40, (count, 2)),
            )
        expected = warping.warp(images, matrices, interpolation, fill)
        colours = None if fill is None else tuple(np.broadcast_to(fill, 3).astype(float))
        found = warp(images.to(DEVICE), matrices, interpolation, colours)
        assert torch.equal(found.cpu(), expected)


def test_no_operation_at_all_leaves_a_copy() -> None:
    images = pixels(random.Random(0), 4, 3, 5, 6)
    changed = change_each(images, [])
    assert torch.equal(changed, images)
    assert changed.data_ptr() != images.data_ptr()
