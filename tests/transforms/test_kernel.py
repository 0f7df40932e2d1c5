"""The kernel against the reference, bit for bit: on a GPU or, without one, by Triton's interpreter.

Which of the two is settled when Triton is imported, so that the interpreter has a process of its own.
"""

import functools
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from memload import transforms
from memload.transforms.draws import Draws
from memload.transforms.fused import Fused, Plan, reference

pytestmark = pytest.mark.slow
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
here = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="done in another process"
)
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def run_kernel(images: torch.Tensor, plan: Plan, first: int) -> torch.Tensor:
    from memload.transforms.kernel import run

    return run(images, plan, first)


def pixels(rng: random.Random, count: int, height: int, width: int, channels: int) -> torch.Tensor:
    """Return uint8 (N, C, H, W): channels-last as a Loader gives them, contiguous, or a part of something larger."""
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
        made += [
            transforms.Normalize(mean, std),
            transforms.ToDtype(rng.choice(DTYPES[: 2 if INTERPRETED else 3])),
        ]
    return made


@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="done in this process")
def test_all_of_this_holds_in_tritons_interpreter() -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--noconftest",
        "-p",
        "no:cacheprovider",
        __file__,
    ]
    done = subprocess.run(
        command,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert not done.returncode, done.stdout
    assert "31 passed" in done.stdout


@here
@pytest.mark.parametrize("seed", range(300 if torch.cuda.is_available() else 30))
def test_the_kernel_gives_the_reference_bit_for_bit(seed: int) -> None:
    rng = random.Random(seed)
    channels, largest = rng.choice([1, 3, 3, 4, 5]), 20 if INTERPRETED else 300
    images = pixels(
        rng,
        rng.randint(1, 3 if INTERPRETED else 17),
        rng.randint(1, largest),
        rng.randint(1, largest),
        channels,
    )
    layout = rng.choice([torch.channels_last, torch.contiguous_format])
    compose = transforms.Compose(steps(rng, channels, largest), memory_format=layout)
    ((_, fused),) = compose._steps
    assert isinstance(fused, Fused)
    first = rng.randrange(3)  # of the plan's samples, some of which are other batches'
    samples = np.arange(first + len(images) + rng.randrange(3))
    plan = fused.plan(
        images, len(samples), functools.partial(Draws, samples, seed, 0, view=0), layout
    )
    expected = reference(images, plan.part(slice(first, first + len(images))))
    found = run_kernel(images.to(DEVICE), plan, first)
    assert found.dtype == expected.dtype
    assert found.is_contiguous(memory_format=layout)
    assert expected.is_contiguous(memory_format=layout)
    assert torch.equal(found.cpu(), expected), compose


@here
def test_an_empty_batch_stays_empty() -> None:
    images = torch.empty((0, 3, 9, 9), dtype=torch.uint8, device=DEVICE)
    ((_, fused),) = transforms.train(8)._steps
    plan = fused.plan(
        images, 0, functools.partial(Draws, np.arange(0), 0, 0, view=0), torch.channels_last
    )
    assert run_kernel(images, plan, 0).shape == (0, 3, 8, 8)
