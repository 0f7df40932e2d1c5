"""Painted boxes and mixed images of the kernels against those of torch, bit for bit."""

import random

import numpy as np
import pytest
import torch

from memload.transforms import erasing, mixing
from memload.transforms.draws import Draws
from memload.upload import Parameters
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
#: Which of a plan's samples is the first of the batch.
FIRST = 3
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
    """Return edges ``(M, number, 4)`` of boxes, of which some are empty, for more than the images.

    The images are those of the samples from `FIRST` on.
    """
    random_numbers = np.random.default_rng(rng.randrange(1 << 31))
    edges = np.empty((FIRST + len(images) + 2, number, 4), np.int32)
    for axis, extent in enumerate(images.shape[2:]):
        edges[..., 2 * axis : 2 * axis + 2] = random_numbers.integers(
            0, extent + 1, (*edges.shape[:2], 2)
        )
    edges[random_numbers.random(edges.shape[:2]) < 0.3] = 0
    return edges


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
    boxes = Parameters(random_boxes(rng, images, rng.choice([1, 1, 3])))
    values = [rng.uniform(0, 255) for _ in range(images.shape[1])]
    colour = torch.tensor(values, dtype=torch.float64).to(images.dtype)
    found = painting_kernel.paint(images.to(DEVICE), boxes, FIRST, colour.to(DEVICE))
    colour_bytes = Parameters(colour.view(torch.uint8).numpy())
    assert_same_bits(found, erasing._paint(images, boxes, colour_bytes, FIRST))


@needs_device
@pytest.mark.parametrize("seed", range(EXAMPLES))
def test_boxes_are_painted_with_noise(seed: int) -> None:
    from memload.transforms import painting_kernel

    rng = random.Random(seed)
    images = pixels(rng, rng.choice(FLOATS))
    boxes = Parameters(random_boxes(rng, images, rng.choice([1, 3])))
    samples = np.arange(len(boxes.array)) + rng.randrange(1000)
    streams = Parameters(Draws(samples, seed, 0, position=0, view=0).streams)
    table = erasing._normal_quantiles(images.dtype, torch.device(DEVICE))
    first_number = erasing._FIRST_NOISE_NUMBER
    found = painting_kernel.paint(images.to(DEVICE), boxes, FIRST, table, streams, first_number)
    assert_same_bits(found, erasing._add_noise(images, boxes, streams, FIRST))


def mixture(rng: random.Random, images: torch.Tensor) -> tuple[Parameters, Parameters]:
    """Return factors, of which some are 1 and some 0, and boxes, of which some are empty."""
    boxes = random_boxes(rng, images, 1)[:, 0]
    factor = [rng.choice([1.0, 1.0, 0.0, rng.random(), rng.random()]) for _ in boxes]
    return Parameters(np.array(factor, np.float32)), Parameters(boxes)


def assert_mixed_alike(
    images: torch.Tensor, factor: Parameters | None, boxes: Parameters | None
) -> None:
    """Assert that the kernel gives the bits of the reference."""
    from memload.transforms import painting_kernel

    found = painting_kernel.mix(images.to(DEVICE), factor, boxes, FIRST)
    assert_same_bits(found, mixing.mix(images, factor, boxes, FIRST))


@needs_device
@pytest.mark.parametrize("seed", range(EXAMPLES))
def test_images_are_mixed_with_the_one_before(seed: int) -> None:
    rng = random.Random(seed)
    images = pixels(rng, rng.choice(BLENDED))
    images[:1, :, :, ::2] = -0.0  # a factor of 1 keeps the sign
    assert_mixed_alike(images, *mixture(rng, images))


@needs_device
@pytest.mark.parametrize("seed", range(EXAMPLES))
def test_boxes_of_the_image_before_are_shown(seed: int) -> None:
    rng = random.Random(seed)
    images = pixels(rng, rng.choice([torch.uint8, *FLOATS]))
    _, boxes = mixture(rng, images)
    assert_mixed_alike(images, None, boxes)


@needs_device
def test_masks_and_labels_are_mixed_as_images_are() -> None:
    rng = random.Random(0)
    masks = torch.randint(0, 60_000, (7, 20, 30), dtype=torch.int32).to(torch.uint16)
    factor, boxes = mixture(rng, masks[:, None])
    assert_mixed_alike(masks[:, None], None, boxes)
    assert_mixed_alike(torch.rand(7, 1000)[:, None, None], factor, None)


@needs_device
def test_batches_without_images_stay_empty() -> None:
    from memload.transforms import painting_kernel

    images, streams = torch.zeros(0, 3, 4, 5, device=DEVICE), Parameters(np.zeros(0, np.int64))
    factor, boxes = Parameters(np.zeros(0, np.float32)), Parameters(np.zeros((0, 2, 4), np.int32))
    for found in (
        painting_kernel.paint(images, boxes, 0, torch.ones(3, device=DEVICE)),
        painting_kernel.paint(images, boxes, 0, torch.zeros(1 << 16, device=DEVICE), streams, 0),
        painting_kernel.mix(images, factor, boxes, 0),
    ):
        assert found.shape == images.shape
