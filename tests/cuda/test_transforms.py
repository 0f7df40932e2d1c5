"""The kernel against the reference, bit for bit; on a GPU, or with TRITON_INTERPRET=1 on the CPU."""

import functools
import os
import random
import warnings

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from memload import transforms
from memload.transforms.draws import Draws
from memload.transforms.fused import Fused, reference
from memload.transforms.kernel import run

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU")
on_a_gpu = pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def pixels(rng: random.Random, count: int, height: int, width: int, channels: int) -> torch.Tensor:
    """Return uint8 (N, C, H, W): channels-last as a Loader gives them, contiguous, or a part of something larger."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 31))
    images = torch.randint(0, 256, (count, height + 3, width + 2, channels), dtype=torch.uint8, generator=generator)
    images = images.permute(0, 3, 1, 2)
    layout = rng.randrange(3)
    if layout == 2:
        return images[:, :, 1:-2, 1:-1]
    images = images[:, :, :height, :width]
    return images.contiguous(memory_format=(torch.channels_last, torch.contiguous_format)[layout])


def steps(rng: random.Random, channels: int, largest: int) -> list[transforms.Transform]:
    """Return what can be fused, anything of it."""
    side = functools.partial(rng.randint, 2, largest)
    antialias = rng.random() < 0.6
    crop = rng.choice([
        transforms.CenterCrop((side(), side())),
        transforms.RandomCrop((side(), side()), rng.randint(0, 4), pad_if_needed=True, fill=rng.randint(0, 255)),
    ])  # fmt: skip
    resize = rng.choice([
        transforms.Resize((side(), side()), antialias=antialias),
        transforms.RandomResizedCrop((side(), side()), scale=(0.01, 1), antialias=antialias),
    ])  # fmt: skip
    flips = (transforms.RandomHorizontalFlip(), transforms.RandomVerticalFlip())
    moves = rng.choice([[], [crop], [resize], [resize], [crop, resize], [resize, crop]])
    made = [*rng.sample(flips, rng.randrange(3)), *moves, *rng.sample(flips, rng.randrange(3))]
    if rng.random() < 0.8 or not made:
        mean, std = [[rng.uniform(0.1, 0.9) for _ in range(channels)] for _ in range(2)]
        # the interpreter truncates to bfloat16
        made += [transforms.Normalize(mean, std), transforms.ToDtype(rng.choice(DTYPES[: 2 if INTERPRETED else 3]))]
    return made


@pytest.mark.parametrize("seed", range(30 if INTERPRETED else 300))
def test_the_kernel_gives_the_reference_bit_for_bit(seed: int) -> None:
    rng = random.Random(seed)
    channels, largest = rng.choice([1, 3, 3, 4, 5]), 30 if INTERPRETED else 300
    images = pixels(
        rng, rng.randint(1, 3 if INTERPRETED else 17), rng.randint(1, largest), rng.randint(1, largest), channels
    )
    layout = rng.choice([torch.channels_last, torch.contiguous_format])
    compose = transforms.Compose(steps(rng, channels, largest), memory_format=layout)
    ((_, fused),) = compose._steps
    assert isinstance(fused, Fused)
    plan = fused._plan(images, functools.partial(Draws, np.arange(len(images)), seed, 0, view=0), layout)
    expected, found = reference(images, plan), run(images.to(DEVICE), plan)
    assert found.dtype == expected.dtype
    assert found.is_contiguous(memory_format=layout)
    assert expected.is_contiguous(memory_format=layout)
    assert torch.equal(found.cpu(), expected), compose


def test_an_empty_batch_stays_empty() -> None:
    assert transforms.train(8)(torch.empty((0, 3, 9, 9), dtype=torch.uint8, device=DEVICE)).shape == (0, 3, 8, 8)


EVERYTHING = [
    transforms.RandomResizedCrop(40),
    transforms.RandomHorizontalFlip(),
    transforms.ColorJitter(0.4, 0.4, 0.4, 0.1),
    transforms.RandomGrayscale(0.3),
    transforms.Cutout(9),
    transforms.RandomErasing(),
    transforms.Normalize("imagenet"),
    transforms.RandomErasing(value="random"),
    transforms.MixUp(alpha=0.2, num_classes=7),
    transforms.CutMix(num_classes=7),
]


@on_a_gpu
@pytest.mark.parametrize("count", range(1, len(EVERYTHING) + 1))
def test_a_gpu_gives_what_the_cpu_gives(count: int) -> None:
    images = pixels(random.Random(count), 32, 50, 60, 3)
    columns = {"label": torch.arange(32) % 7, "points": torch.rand(32, 5, 2) * 50}
    compose = transforms.Compose(EVERYTHING[:count], points=("points",), views=2)
    expected = compose(images, columns, samples=np.arange(32), seed=3, epoch=1)
    on_device = {name: column.cuda() for name, column in columns.items()}
    found = compose(images.cuda(), on_device, samples=np.arange(32), seed=3, epoch=1)
    for view in (0, 1):
        assert found[0][view].is_cuda
        assert found[0][view].is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(found[0][view].cpu(), expected[0][view], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found[1]["points"][view].cpu(), expected[1]["points"][view])
    torch.testing.assert_close(
        [part.cpu() for part in found[1]["label"]] if count > 8 else found[1]["label"].cpu(),
        list(expected[1]["label"]) if count > 8 else expected[1]["label"],
    )


@on_a_gpu
def test_nothing_waits_for_the_gpu_where_samples_are_on_the_host() -> None:
    images = pixels(random.Random(0), 8, 50, 60, 3).cuda()
    columns = {"label": torch.arange(8, device="cuda") % 7}
    compose = transforms.Compose(EVERYTHING)
    compose(images, columns, samples=np.arange(8))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it calls itself a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        compose(images, columns, samples=np.arange(8))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@on_a_gpu
def test_samples_on_the_gpu_are_understood() -> None:
    images = pixels(random.Random(0), 8, 50, 60, 3).cuda()
    expected = transforms.train(32)(images, samples=np.arange(8))
    assert torch.equal(transforms.train(32)(images, samples=torch.arange(8, device="cuda")), expected)


@on_a_gpu
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's compiler, of its own imports
@pytest.mark.parametrize("compiled", ["consumer", "caller"])
def test_torch_compile_works_over_the_result(compiled: str) -> None:
    images, transform = pixels(random.Random(0), 8, 50, 60, 3).cuda(), transforms.train(32, dtype=torch.bfloat16)
    double = torch.compile(lambda batch: batch * 2 + 1)
    both = torch.compile(lambda batch: transform(batch, samples=np.arange(8)) * 2 + 1)
    made = transform(images, samples=np.arange(8))
    found = double(made) if compiled == "consumer" else both(images)
    torch.testing.assert_close(found, made * 2 + 1, rtol=0.02, atol=0.02)
