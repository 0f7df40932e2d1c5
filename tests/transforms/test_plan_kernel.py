"""The kernel against the reference, bit for bit: on a GPU or, without one, by Triton's interpreter.

Triton chooses between them when it is imported, so the interpreter has a process of its own.
"""

import functools
import random

import numpy as np
import pytest
import torch

from memload import transforms
from memload.transforms import filtering
from memload.transforms.draws import Draws
from memload.transforms.geometry import LARGEST_SIDE, Plan, precision_of
from memload.transforms.plan_reference import reference, reference_masks
from tests.transforms.kernels import (
    DEVICE,
    INTERPRETED,
    assert_passes_in_interpreter,
    needs_device,
    starts_the_interpreter,
)

pytestmark = pytest.mark.slow
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def run_kernel(images: torch.Tensor, plan: Plan, first: int) -> torch.Tensor:
    from memload.transforms.plan_kernel import run

    return run(images, plan, first)


def plan_of(compose: transforms.Compose, images: torch.Tensor, count: int, seed: int = 0) -> Plan:
    """Return what these steps, fused, come to for samples 0 to ``count`` - 1."""
    ((_, fused),) = compose._steps_of_views[0]
    draws = functools.partial(Draws, np.arange(count), seed, 0, view=0)
    plan: Plan = fused.plan(images, count, draws, compose.memory_format)
    return plan


def pixels(rng: random.Random, count: int, height: int, width: int, channels: int) -> torch.Tensor:
    """Return uint8 (N, C, H, W): channels-last, contiguous, or a part of larger images."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 31))
    images = torch.randint(
        0, 256, (count, height + 3, width + 2, channels), dtype=torch.uint8, generator=generator
    )
    images = images.permute(0, 3, 1, 2)
    layout = rng.randrange(3)
    if layout == 2:
        return images[:, :, 1:-2, 1:-1]
    images = images[:, :, :height, :width]
    return images.contiguous(memory_format=(torch.channels_last, torch.contiguous_format)[layout])


def steps(rng: random.Random, channels: int, largest: int) -> list[transforms.Transform]:
    """Return what can be fused, anything of it."""
    side = functools.partial(rng.randint, 1, largest)
    antialias = rng.random() < 0.6
    crop = rng.choice([
        transforms.CenterCrop((side(), side())),
        transforms.RandomCrop(
            (side(), side()), rng.randint(0, 4), pad_if_needed=True, fill=rng.randint(0, 255)
        ),
    ])  # fmt: skip
    interpolation = rng.choice(["bilinear", "bilinear", "bicubic", "bicubic", "random"])
    # To a width of 1, bilinear pixels of the reference may differ by 1.
    size = (side(), max(1 if interpolation == "bicubic" else 2, side()))
    resize = rng.choice([
        transforms.Resize(size, interpolation, antialias=antialias),
        transforms.RandomResizedCrop(
            size, scale=(0.01, 1), interpolation=interpolation, antialias=antialias
        ),
    ])  # fmt: skip
    flips = (transforms.RandomHorizontalFlip(), transforms.RandomVerticalFlip())
    moves = rng.choice([[], [crop], [resize], [resize], [crop, resize], [resize, crop]])
    made = [*rng.sample(flips, rng.randrange(3)), *moves, *rng.sample(flips, rng.randrange(3))]
    if rng.random() < 0.8 or not made:
        mean, std = [[rng.uniform(0.1, 0.9) for _ in range(channels)] for _ in range(2)]
        # the interpreter truncates to bfloat16
        made += [
            transforms.Normalize(mean, std),
            transforms.ToDtype(rng.choice(DTYPES[: 2 if INTERPRETED else 3])),
        ]
    return made


@starts_the_interpreter
def test_all_of_this_holds_in_tritons_interpreter() -> None:
    assert_passes_in_interpreter(__file__, 109)


@needs_device
@pytest.mark.parametrize("seed", range(300 if torch.cuda.is_available() else 30))
def test_the_kernel_gives_the_reference_bit_for_bit(seed: int) -> None:
    rng = random.Random(seed)
    channels, largest = rng.choice([1, 3, 3, 4, 5]), 20 if INTERPRETED else 300
    count, height = rng.randint(1, 3 if INTERPRETED else 17), rng.randint(1, largest)
    images = pixels(rng, count, height, rng.randint(1, largest), channels)
    layout = rng.choice([torch.channels_last, torch.contiguous_format])
    compose = transforms.Compose(steps(rng, channels, largest), memory_format=layout)
    first = rng.randrange(3)  # of the plan's samples, some of which are other batches'
    plan = plan_of(compose, images, first + count + rng.randrange(3), seed)
    expected = reference(images, plan, first)
    found = run_kernel(images.to(DEVICE), plan, first)
    assert found.dtype == expected.dtype
    assert found.is_contiguous(memory_format=layout)
    assert expected.is_contiguous(memory_format=layout)
    assert torch.equal(found.cpu(), expected), compose


@needs_device
@pytest.mark.parametrize("seed", range(300 if torch.cuda.is_available() else 40))
def test_the_kernel_of_masks_gives_the_reference_bit_for_bit(seed: int) -> None:
    from memload.transforms.plan_kernel import run_masks

    rng = random.Random(seed)
    largest = 150 if INTERPRETED else 700
    compose = transforms.Compose(steps(rng, 1, largest))
    count = rng.randint(0, 3 if INTERPRETED else 17)
    images = pixels(rng, count, rng.randint(1, largest), rng.randint(1, largest), 1)
    dtype = rng.choice([torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
    limits, shape = torch.iinfo(dtype), (count, *images.shape[2:])
    generator = torch.Generator().manual_seed(seed)
    masks = torch.randint(limits.min, limits.max, shape, dtype=dtype, generator=generator)
    masks = rng.choice([masks, masks.mT.contiguous().mT, masks.repeat(1, 2, 2)[:, ::2, ::2]])
    first = rng.randrange(3)
    plan = plan_of(compose, images, first + count + rng.randrange(3), seed)
    fill = rng.choice([0, 1, limits.min, limits.max])
    expected = reference_masks(masks, plan, fill, first)
    found = run_masks(masks.to(DEVICE), plan, fill, first)
    assert found.dtype == dtype
    assert torch.equal(found.cpu(), expected), compose


@needs_device
@pytest.mark.parametrize("seed", range(300 if torch.cuda.is_available() else 8))
@pytest.mark.parametrize("padding_mode", ["edge", "reflect", "symmetric"])
def test_the_kernels_pad_as_the_reference_does(padding_mode: str, seed: int) -> None:
    from memload.transforms.plan_kernel import run_masks

    rng = random.Random(f"{padding_mode} {seed}")
    channels, count = rng.choice([1, 3, 4]), rng.randint(1, 3)
    images = pixels(rng, count, rng.randint(6, 20), rng.randint(6, 20), channels)
    interpolation = rng.choice(["bilinear", "bicubic", "random"])
    resize = transforms.Resize((rng.randint(6, 20), rng.randint(6, 20)), interpolation)
    crop = transforms.RandomCrop(
        rng.randint(6, 16), 5, pad_if_needed=padding_mode == "edge", padding_mode=padding_mode
    )
    flips = [transforms.RandomHorizontalFlip(), transforms.RandomVerticalFlip()]
    moves = rng.choice([[crop], [crop], [crop, resize], [resize, crop]])
    # the interpreter truncates to bfloat16
    last = [[], [transforms.Normalize("imagenet")]][channels == 3 and rng.random() < 0.5]
    compose = transforms.Compose([*flips[:1], *moves, *flips[1:], *last])
    plan = plan_of(compose, images, count + 2, seed)
    expected = reference(images, plan, 1)
    assert torch.equal(run_kernel(images.to(DEVICE), plan, 1).cpu(), expected), compose
    masks = images[:, 0].contiguous()
    expected = reference_masks(masks, plan, 255, 1)
    assert torch.equal(run_masks(masks.to(DEVICE), plan, 255, 1).cpu(), expected), compose


def exact_weights(length: int, resized: int, antialias: bool, at: np.ndarray) -> list[list[int]]:
    """Return the weights of output pixels ``at`` by Python's integers, rounded half up."""
    half = 2 * max(length, resized) if antialias else 2 * resized
    bits = precision_of(length, resized, antialias)
    rows = []
    for pixel in at.tolist():
        centre = (2 * pixel + 1) * length
        first = max((centre - half + resized) // (2 * resized), 0)
        distances = [
            max(half - abs((2 * source + 1) * resized - centre), 0)
            for source in range(first, min(first + (half + resized - 1) // resized, length))
        ]
        total = sum(distances)
        rows.append([((distance << bits + 1) + total) // (2 * total) for distance in distances])
    return rows


def sides(rng: random.Random, largest: int) -> list[int]:
    """Return a length and what it is resized to, of all orders of magnitude."""
    return [min(largest, round(largest ** rng.random()) + rng.randrange(3)) for _ in range(2)]


@needs_device
@pytest.mark.parametrize("antialias", [True, False])
def test_weights_are_exact_for_all_sizes_up_to_the_limit(antialias: bool) -> None:
    import triton
    import triton.language as tl

    from memload.transforms.plan_kernel import _filter, _weight

    def store(at, out, length, resized, bits, taps, ANTIALIAS: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
        lanes = tl.arange(0, N)
        pixels = tl.load(at + lanes)
        first, half, _, total, unit = _filter(pixels, length, resized, bits, ANTIALIAS)
        for tap in range(taps):
            weight = _weight(first + tap, pixels, length, resized, half, total, unit, bits)
            tl.store(out + tap * N + lanes, weight)

    store.__globals__.update(tl=tl, _filter=_filter, _weight=_weight)
    kernel = triton.jit(store)
    rng = random.Random(antialias)
    pairs = [sides(rng, LARGEST_SIDE) for _ in range(25)]
    pairs += [[LARGEST_SIDE, LARGEST_SIDE], [1, LARGEST_SIDE], [LARGEST_SIDE, 224]]
    compared = 0
    for length, resized in pairs:
        half = 2 * max(length, resized) if antialias else 2 * resized
        taps = min((half + resized - 1) // resized, length)
        if taps > 150:  # slow in the interpreter
            continue
        at = np.array([rng.randrange(resized) for _ in range(62)] + [0, resized - 1], np.int32)
        out = torch.zeros((taps, 64), dtype=torch.int32, device=DEVICE)
        bits = precision_of(length, resized, antialias)
        kernel[(1,)](
            torch.from_numpy(at).to(DEVICE), out, length, resized, bits, taps, antialias, 64
        )
        for column, expected in zip(
            out.T.tolist(), exact_weights(length, resized, antialias, at), strict=True
        ):
            assert column == expected + [0] * (taps - len(expected)), (length, resized)
            compared += len(expected)
    assert compared > 2_000


@needs_device
@pytest.mark.parametrize("seed", range(300 if torch.cuda.is_available() else 12))
def test_the_kernel_of_blurs_gives_the_bits_of_other_devices(seed: int) -> None:
    from memload.transforms.blur_kernel import blur

    rng = random.Random(seed)
    # Some tiles have several strips, and some several programs for a row.
    size = [rng.choice([1, 3, 5, 9, 23, 33]) if seed % 3 else rng.choice([3, 9, 23])]
    size += [rng.choice([1, 3, 9, 23])] if seed % 3 else []
    largest = 300 if not INTERPRETED else 30 if seed % 4 else 130
    height, width = (rng.randint(one // 2 + 1, largest) for one in (size[-1], size[0]))
    images = pixels(rng, rng.randint(1, 2), height, width, rng.choice([1, 3, 3, 4]))
    # With the smallest, all weights but the middle one are 0, and with the next, next to 0.
    sigma = np.array([rng.choice([0.05, 0.15, rng.uniform(0.2, 5)]) for _ in images])
    expected = filtering.gaussian_blur(images, size, sigma)
    radii = filtering.radii_of(size, images)
    weights = torch.from_numpy(filtering.weights_of(sigma, radii)).float()
    found = blur(images.to(DEVICE), weights.to(DEVICE), radii)
    assert found.stride() == expected.stride()
    assert torch.equal(found.cpu(), expected), (size, images.shape, images.stride())


@needs_device
def test_an_empty_batch_stays_empty() -> None:
    images = torch.empty((0, 3, 9, 9), dtype=torch.uint8, device=DEVICE)
    plan = plan_of(transforms.train(8), images, 0)
    assert run_kernel(images, plan, 0).shape == (0, 3, 8, 8)
    from memload.transforms.plan_kernel import run_masks

    assert run_masks(images[:, 0], plan, 255).shape == (0, 8, 8)
