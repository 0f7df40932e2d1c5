"""Painted boxes and mixed images of the kernels against those of torch, bit for bit."""

import random

import numpy as np
import pytest
import torch

from memload.transforms import erasing, mixing
from memload.transforms.draws import Draws
from tests.transforms.kernels import (
    DEVICE,
    INTERPRETED,
    assert_passes_in_interpreter,
    needs_device,
    starts_the_interpreter,
)

pytestmark = pytest.mark.slow
EXAMPLES = 200 if torch.cuda.is_available() else 40
FLOATS = [torch.float16, torch.float32, torch.float64, torch.bfloat16]
#: Triton's interpreter cuts numbers off where it converts them to bfloat16.
BLENDED = FLOATS[:3] if INTERPRETED else FLOATS
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@starts_the_interpreter
def test_all_of_this_holds_in_tritons_interpreter() -> None:
    assert_passes_in_interpreter(__file__, 4 * EXAMPLES + 2)


def pixels(rng: random.Random, dtype: torch.dtype) -> torch.Tensor:
    """Return (N, C, H, W): channels-last, contiguous, transposed, or a part of larger images."""
    count, channels = rng.randint(1, 9), rng.choice([1, 3, 3, 4])
    height, width = rng.randint(1, 40), rng.choice([rng.randint(1, 40), rng.randint(80, 120)])
    generator = torch.Generator().manual_seed(rng.randrange(1 << 31))
    images = torch.randn((count, height + 3, width + 2, channels), generator=generator) * 50
    images = (images.abs() if dtype == torch.uint8 else images).to(dtype).permute(0, 3, 1, 2)
    layout = rng.randrange(4)
    if layout == 3:
        return images[:, :, 1:-2, 1:-1]
    images = images[:, :, :height, :width].contiguous()
    if layout == 2:
        return images.transpose(2, 3)
    return images.contiguous(memory_format=(torch.channels_last, torch.contiguous_format)[layout])


def random_boxes(rng: random.Random, images: torch.Tensor, number: int) -> np.ndarray:
    """Return boxes ``(4, number, N)`` of which some are empty, and some reach beyond the images."""
    random_numbers, shape = np.random.default_rng(rng.randrange(1 << 31)), (number, len(images))
    height, width = images.shape[2:]
    start = [random_numbers.integers(-9, extent + 3, shape) for extent in (height, width)]
    length = [random_numbers.integers(0, extent + 9, shape) for extent in (height, width)]
    length[0][random_numbers.random(shape) < 0.3] = 0
    return np.array([*start, *length])


def assert_same_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype
    assert found.stride() == expected.stride()
    integers = INTEGERS[found.element_size()]
    assert torch.equal(found.cpu().view(integers), expected.view(integers))


@needs_device
@pytest.mark.parametrize("seed", range(EXAMPLES))
def test_boxes_are_painted_with_a_colour(seed: int) -> None:
    from memload.transforms import painting_kernel

    rng = random.Random(seed)
    images = pixels(rng, rng.choice([torch.uint8, *FLOATS]))
    boxes = random_boxes(rng, images, rng.choice([1, 1, 3]))
    colour = tuple(rng.uniform(0, 255) for _ in range(images.shape[1]))
    found = painting_kernel.paint(
        images.to(DEVICE), boxes, torch.tensor(colour, dtype=torch.float64).to(images.dtype)
    )
    assert_same_bits(found, erasing._paint(images, boxes, colour))


@needs_device
@pytest.mark.parametrize("seed", range(EXAMPLES))
def test_boxes_are_painted_with_noise(seed: int) -> None:
    from memload.transforms import painting_kernel

    rng = random.Random(seed)
    images = pixels(rng, rng.choice(FLOATS))
    boxes = random_boxes(rng, images, rng.choice([1, 3]))
    boxes[:2] = boxes[:2].clip(0)
    for axis, extent in enumerate(images.shape[2:]):
        boxes[2 + axis] = np.minimum(boxes[2 + axis], np.maximum(extent - boxes[axis], 0))
    draws = Draws(np.arange(len(images)) + rng.randrange(1000), seed, 0, position=0, view=0)
    table = erasing._normal_quantiles(images.dtype, torch.device(DEVICE))
    first = erasing._FIRST_NOISE_NUMBER
    found = painting_kernel.paint_noise(images.to(DEVICE), boxes, draws.streams, first, table)
    assert_same_bits(found, erasing._add_noise(images, boxes, draws))


def mixture(rng: random.Random, images: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return factors, of which some are 1 and some 0, and boxes, of which some are empty."""
    factor = [rng.choice([1.0, 1.0, 0.0, rng.random(), rng.random()]) for _ in images]
    return np.array(factor, np.float32), random_boxes(rng, images, 1)[:, 0]


@needs_device
@pytest.mark.parametrize("seed", range(EXAMPLES))
def test_images_are_mixed_with_the_one_before(seed: int) -> None:
    from memload.transforms import painting_kernel

    rng = random.Random(seed)
    images = pixels(rng, rng.choice(BLENDED))
    factor, boxes = mixture(rng, images)
    images[:1, :, :, ::2] = -0.0  # a factor of 1 keeps the sign
    found = painting_kernel.mix(images.to(DEVICE), factor, boxes)
    assert_same_bits(found, mixing.mix(images, factor, boxes))


@needs_device
@pytest.mark.parametrize("seed", range(EXAMPLES))
def test_boxes_of_the_image_before_are_shown(seed: int) -> None:
    from memload.transforms import painting_kernel

    rng = random.Random(seed)
    images = pixels(rng, rng.choice([torch.uint8, *FLOATS]))
    _, boxes = mixture(rng, images)
    whole = np.ones(len(images), np.float32)
    found = painting_kernel.mix(images.to(DEVICE), whole, boxes)
    assert_same_bits(found, mixing.mix(images, whole, boxes))


@needs_device
def test_masks_and_labels_are_mixed_as_images_are() -> None:
    from memload.transforms import painting_kernel

    rng = random.Random(0)
    masks = torch.randint(0, 60_000, (7, 20, 30), dtype=torch.int32).to(torch.uint16)
    factor, boxes = mixture(rng, masks[:, None])
    whole, none = np.ones_like(factor), np.zeros_like(boxes)
    found = painting_kernel.mix(masks[:, None].to(DEVICE), whole, boxes)
    assert_same_bits(found, mixing.mix(masks[:, None], whole, boxes))
    labels = torch.rand(7, 1000)[:, None, None]
    found = painting_kernel.mix(labels.to(DEVICE), factor, none)
    assert_same_bits(found, mixing.mix(labels, factor, none))


@needs_device
def test_batches_without_images_stay_empty() -> None:
    from memload.transforms import painting_kernel

    images, boxes = torch.zeros(0, 3, 4, 5, device=DEVICE), np.zeros((4, 2, 0), np.int64)
    streams, table = np.zeros(0, np.int64), torch.zeros(1 << 16, device=DEVICE)
    for found in (
        painting_kernel.paint(images, boxes, torch.ones(3)),
        painting_kernel.paint_noise(images, boxes, streams, 0, table),
        painting_kernel.mix(images, np.zeros(0, np.float32), boxes[:, 0]),
    ):
        assert found.shape == images.shape
