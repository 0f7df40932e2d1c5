"""Transforms of a batch against the plain torch operations they are made of; on CUDA against a copy of as many bytes.

    python benchmarks/transforms.py [--device cuda] [--batch 256] [--repeats 30] [--dry-run]

A round is one call of each way in turn; the first rounds are left out. Ratios are within a round. On CUDA, a time is
that of calls one after another, with the host's part, or, "on the device", without it. As in a Loader, the calls are
for parts of stretches of samples; "a call by itself" is given its samples, and cannot share work with the next.
torchvision v2 and Kornia do the same recipe where they are installed, each with a draw of its own for every sample
where it can.
"""

import functools
import itertools
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from record import arguments, at_least_one, need_cuda, numbers_of, record, run_main, spread
from torch import Tensor
from torch.nn.functional import interpolate

from memload import transforms
from memload.transforms.draws import Draws

MEAN, STD = (
    torch.tensor(values).view(1, 3, 1, 1)
    for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
)
Way = Callable[[], Any]


def normalise(images: Tensor) -> Tensor:
    """Return float32, as the two operations that it takes at least."""
    return images.mul(1 / (255 * STD)).add_(-MEAN / STD)


def resized_crops(images: Tensor, side: int, table: list[list[int]]) -> Tensor:
    """Crop, resize and flip one sample after another."""
    out = torch.empty(
        (len(images), 3, side, side), dtype=torch.uint8, memory_format=torch.channels_last
    )
    for place, (top, height, _, _, left, width, _, flipped) in enumerate(table):
        box = images[place : place + 1, :, top : top + height, left : left + width]
        piece = interpolate(box, (side, side), mode="bilinear", antialias=True)
        out[place : place + 1] = piece.flip(-1) if flipped else piece
    return out


def on_cpu(batch: int) -> dict[str, tuple[Way, Way]]:
    """Return each recipe with its plain operations, which are given what was drawn."""
    large = torch.randint(0, 256, (batch, 256, 256, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
    small = torch.randint(0, 256, (batch, 32, 32, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
    numbers, flipped = np.arange(batch), (torch.rand(batch) < 0.5)[:, None, None, None]
    train = transforms.train(224)
    draws = functools.partial(Draws, numbers, 0, 0, view=0)
    table = train._steps[0][1].plan(large, len(large), draws, torch.channels_last).table().tolist()
    flip = transforms.Compose([transforms.RandomHorizontalFlip(), transforms.Normalize("imagenet")])
    crop = transforms.Compose([transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip(),
                               transforms.Normalize("imagenet")])  # fmt: skip
    starts = np.random.default_rng(0).integers(0, 9, (batch, 2)).tolist()

    def crops() -> Tensor:
        padded = torch.nn.functional.pad(small, [4] * 4)
        pieces = [
            padded[n, :, top : top + 32, left : left + 32] for n, (top, left) in enumerate(starts)
        ]
        images = torch.stack(pieces)
        return normalise(torch.where(flipped, images.flip(-1), images))

    evaluate = transforms.evaluate(224, resize=232)
    return {
        "resized crop, flip, normalise, 256": (
            lambda: train(large, samples=numbers), lambda: normalise(resized_crops(large, 224, table))),
        "flip, normalise, 256": (
            lambda: flip(large, samples=numbers), lambda: normalise(torch.where(flipped, large.flip(-1), large))),
        "flip, normalise, 32": (
            lambda: flip(small, samples=numbers), lambda: normalise(torch.where(flipped, small.flip(-1), small))),
        "padded crop, flip, normalise, 32": (lambda: crop(small, samples=numbers), crops),
        "resize, centre crop, normalise, 256": (
            lambda: evaluate(large),
            lambda: normalise(interpolate(large, (232, 232), mode="bilinear", antialias=True)[:, :, 4:228, 4:228])),
    }  # fmt: skip


def in_stretches(transform: transforms.Compose, images: Tensor) -> Way:
    """Return what transforms the next batch of 2^15 samples, then of as many others."""

    def batches() -> Iterator[Tensor]:
        for epoch in itertools.count():
            prepared = transform.prepare(np.arange(1 << 15), epoch=epoch)
            for start in range(0, (1 << 15) - len(images) + 1, len(images)):
                yield prepared(images, None, start, start + len(images))

    return batches().__next__


def on_cuda(batch: int) -> dict[str, Way]:
    """Return the recipes, the copies that move as many bytes, and others' recipes."""
    make = functools.partial(torch.randint, 0, 256, dtype=torch.uint8, device="cuda")
    images = make((batch, 224, 224, 3)).permute(0, 3, 1, 2)
    large = make((batch, 256, 256, 3)).permute(0, 3, 1, 2)
    numbers = np.arange(batch)
    flip = transforms.Compose([transforms.RandomHorizontalFlip(), transforms.Normalize("imagenet"),
                               transforms.ToDtype(torch.bfloat16)])  # fmt: skip
    train = transforms.train(224, dtype=torch.bfloat16)
    half = (
        images.numel() * 3 // 2
    )  # reads 1 byte and writes 2 a pixel: a copy reads and writes half of it each
    source, target = make((half,)), make((half,))
    ways: dict[str, Way] = {
        "copy": lambda: target.copy_(source),
        "flip, normalise": in_stretches(flip, images),
        "resized crop, flip, normalise": in_stretches(train, large),
        "flip, normalise, a call by itself": lambda: flip(images, samples=numbers),
        "resized crop, flip, normalise, a call by itself": lambda: train(large, samples=numbers),
    }
    if find_spec("torchvision"):
        from torchvision.transforms import v2

        steps = [v2.RandomResizedCrop(224), v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True),
                 v2.Normalize(MEAN.flatten().tolist(), STD.flatten().tolist())]  # fmt: skip
        theirs = v2.Compose(steps)
        # one draw a batch is all that v2 has; with one for each sample it takes a call for each
        ways["torchvision v2, one draw a batch"] = lambda: theirs(large).bfloat16()
        ways["torchvision v2, one draw a sample"] = lambda: torch.stack(
            [theirs(image) for image in large]
        ).bfloat16()
    if find_spec("kornia"):
        import kornia.augmentation as kornia

        augment = torch.nn.Sequential(
            kornia.RandomResizedCrop((224, 224)), kornia.RandomHorizontalFlip(),
            kornia.Normalize(MEAN.flatten(), STD.flatten()),
        )  # fmt: skip
        ways["kornia"] = lambda: augment(large / 255).bfloat16()
    return ways


def seconds(way: Way, cuda: bool) -> float:
    """Return how long a call takes; on CUDA with the host's part, of as many calls as take 20 ms at least."""
    least, calls = 0.02 if cuda else 0.0, 0
    if cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    while not calls or time.perf_counter() - start < least:
        way()
        calls += 1
    if cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls


def seconds_on_device(way: Way) -> float:
    """Return how long a call takes the GPU, of ten that are all in its queue before it comes to the first."""
    busy = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(16):
        busy[: 1 << 29].copy_(busy[1 << 29 :])
    start.record()
    for _ in range(10):
        way()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 10_000


def main() -> None:
    """Run the benchmark."""
    parser = arguments(__doc__)
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--repeats", type=at_least_one, default=30)
    options = parser.parse_args()
    cuda = options.device == "cuda"
    if cuda:
        need_cuda("Leave --device out to measure the CPU")
    recipes = {} if cuda else on_cpu(options.batch)
    ways = on_cuda(options.batch) if cuda else {
        f"{name}{kind}": way for name, pair in recipes.items() for kind, way in zip(("", ", plain"), pair, strict=True)
    }  # fmt: skip
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(options.repeats + 3):
        for name, way in ways.items():
            took = seconds(way, cuda)
            if number >= 3:
                taken[name].append(took)
            if cuda and not name.startswith(("torchvision", "kornia")):
                took = seconds_on_device(way)
                if number >= 3:
                    taken.setdefault(f"{name}, on the device", []).append(took)
    results: dict[str, Any] = {
        f"{name}, images/s": spread([options.batch / took for took in times])
        for name, times in taken.items()
    }
    pairs = [(f"copy{kind}", f"flip, normalise{kind}") for kind in ("", ", on the device")] if cuda else [
        (name, f"{name}, plain") for name in recipes
    ]  # fmt: skip
    pairs += [
        (name, "resized crop, flip, normalise")
        for name in taken
        if name.startswith(("torchvision", "kornia"))
    ]
    for one, other in pairs:
        results[f"time: {one} / {other}"] = spread(
            [a / b for a, b in zip(taken[one], taken[other], strict=True)]
        )
    record(
        "transforms", options, numbers_of(parser), vars(options) | {"images": "in memory"}, results
    )


if __name__ == "__main__":
    run_main(main)
