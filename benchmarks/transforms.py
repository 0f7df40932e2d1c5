"""Transforms of a batch beside the plain torch operations they are made of, or beside a copy.

On the CPU each recipe stands beside the operations of torch that it takes at least, which are given
what was drawn. On CUDA the recipes stand beside a copy of as many bytes, and beside torchvision v2
and Kornia where they are installed, each with a draw of its own for every sample where it can.
Images a second, of calls one after another, with the host's part; or, "on the device", without it.
As in a Loader, the calls are for parts of stretches of samples; "a call by itself" is given its
samples and cannot share work with the next.
"""

import functools
import itertools
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import Way, need_cuda, rate, run_benchmark
from torch import Tensor
from torch.nn.functional import interpolate, pad

from memload import transforms

MEAN, STD = (
    torch.tensor(values).view(1, 3, 1, 1)
    for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
)
STEPS = [transforms.RandomHorizontalFlip(), transforms.Normalize("imagenet")]
FLIP = transforms.Compose(STEPS)
CROP = transforms.Compose([transforms.RandomCrop(32, padding=4), *STEPS])
OTHERS = ("torchvision", "kornia")


def normalise(images: Tensor) -> Tensor:
    """Return float32, as the two operations that it takes at least."""
    return images.mul(1 / (255 * STD)).add_(-MEAN / STD)


def random_boxes(count: int, side: int) -> list[tuple[int, int, int, int]]:
    """Return top, left, height and width of boxes as RandomResizedCrop draws them."""
    random = np.random.default_rng(0)
    area = random.uniform(0.08, 1, count) * side * side
    ratio = np.exp(random.uniform(np.log(3 / 4), np.log(4 / 3), count))
    heights, widths = (
        np.minimum(np.sqrt(area * shape).round(), side).astype(int) for shape in (1 / ratio, ratio)
    )
    tops, lefts = (random.integers(0, side - sizes + 1) for sizes in (heights, widths))
    return list(zip(*(a.tolist() for a in (tops, lefts, heights, widths)), strict=True))


def resized_crops(
    images: Tensor, side: int, boxes: list[tuple[int, int, int, int]], flipped: Tensor
) -> Tensor:
    """Crop, resize and flip one sample after another."""
    shape = (len(images), 3, side, side)
    out = torch.empty(shape, dtype=torch.uint8, memory_format=torch.channels_last)
    for number, (top, left, height, width) in enumerate(boxes):
        box = images[number : number + 1, :, top : top + height, left : left + width]
        piece = interpolate(box, (side, side), mode="bilinear", antialias=True)
        out[number : number + 1] = piece.flip(-1) if flipped[number] else piece
    return out


def flip_some(images: Tensor, flipped: Tensor) -> Tensor:
    """Flip the images that are to be flipped."""
    return torch.where(flipped, images.flip(-1), images)


def padded_crops(images: Tensor, starts: list[list[int]]) -> Tensor:
    """Pad by 4 and crop."""
    padded = pad(images, [4] * 4)
    pieces = [
        padded[number, :, top : top + 32, left : left + 32]
        for number, (top, left) in enumerate(starts)
    ]
    return torch.stack(pieces)


def on_cpu(batch: int) -> dict[str, Callable[[], Tensor]]:
    """Return each recipe, and what it takes at least under the same name with ``, plain``."""
    large = torch.randint(0, 256, (batch, 256, 256, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
    small = torch.randint(0, 256, (batch, 32, 32, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
    numbers, flipped = np.arange(batch), (torch.rand(batch) < 0.5)[:, None, None, None]
    train, evaluate = transforms.train(224), transforms.evaluate(224, resize=232)
    boxes = random_boxes(batch, 256)
    starts = np.random.default_rng(0).integers(0, 9, (batch, 2)).tolist()

    def centre(images: Tensor) -> Tensor:
        resized = interpolate(images, (232, 232), mode="bilinear", antialias=True)
        return resized[:, :, 4:228, 4:228]

    return {
        "resized crop, flip, normalise, 256": lambda: train(large, samples=numbers),
        "resized crop, flip, normalise, 256, plain": lambda: normalise(
            resized_crops(large, 224, boxes, flipped)
        ),
        "flip, normalise, 256": lambda: FLIP(large, samples=numbers),
        "flip, normalise, 256, plain": lambda: normalise(flip_some(large, flipped)),
        "flip, normalise, 32": lambda: FLIP(small, samples=numbers),
        "flip, normalise, 32, plain": lambda: normalise(flip_some(small, flipped)),
        "padded crop, flip, normalise, 32": lambda: CROP(small, samples=numbers),
        "padded crop, flip, normalise, 32, plain": lambda: normalise(
            flip_some(padded_crops(small, starts), flipped)
        ),
        "resize, centre crop, normalise, 256": lambda: evaluate(large),
        "resize, centre crop, normalise, 256, plain": lambda: normalise(centre(large)),
    }


def in_stretches(transform: transforms.Compose, images: Tensor) -> Callable[[], Tensor]:
    """Return what transforms the next batch of 2^15 samples, then of as many others."""

    def batches() -> Iterator[Tensor]:
        for epoch in itertools.count():
            prepared = transform.prepare(np.arange(1 << 15), epoch=epoch)
            for start in range(0, (1 << 15) - len(images) + 1, len(images)):
                yield prepared(images, None, start, start + len(images))

    return batches().__next__


def on_cuda(batch: int, with_others: bool) -> dict[str, Callable[[], Any]]:
    """Return the recipes, a copy that moves as many bytes, and others' recipes."""
    make = functools.partial(torch.randint, 0, 256, dtype=torch.uint8, device="cuda")
    images = make((batch, 224, 224, 3)).permute(0, 3, 1, 2)
    large = make((batch, 256, 256, 3)).permute(0, 3, 1, 2)
    numbers = np.arange(batch)
    flip = transforms.Compose([*STEPS, transforms.ToDtype(torch.bfloat16)])
    train = transforms.train(224, dtype=torch.bfloat16)
    # The recipe reads 1 byte and writes 2 a pixel; a copy reads and writes half of that each.
    source, target = (make((batch, images[0].numel() * 3 // 2)) for _ in range(2))
    calls: dict[str, Callable[[], Any]] = {
        "copy": lambda: target.copy_(source),
        "flip, normalise": in_stretches(flip, images),
        "resized crop, flip, normalise": in_stretches(train, large),
        "flip, normalise, a call by itself": lambda: flip(images, samples=numbers),
        "resized crop, flip, normalise, a call by itself": lambda: train(large, samples=numbers),
    }
    return calls | (of_others(large) if with_others else {})


def of_others(large: Tensor) -> dict[str, Callable[[], Any]]:
    """Return the recipes of torchvision and Kornia, where they are installed."""
    calls: dict[str, Callable[[], Any]] = {}
    if find_spec("torchvision"):
        from torchvision.transforms import v2

        theirs = v2.Compose(
            [
                v2.RandomResizedCrop(224),
                v2.RandomHorizontalFlip(),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize(MEAN.flatten().tolist(), STD.flatten().tolist()),
            ]
        )
        # v2 draws once a batch; to draw for each sample takes a call for each
        calls["torchvision v2, one draw a batch"] = lambda: theirs(large).bfloat16()
        calls["torchvision v2, one draw a sample"] = lambda: torch.stack(
            [theirs(image) for image in large]
        ).bfloat16()
    if find_spec("kornia"):
        import kornia.augmentation as kornia

        augment = torch.nn.Sequential(
            kornia.RandomResizedCrop((224, 224)),
            kornia.RandomHorizontalFlip(),
            kornia.Normalize(MEAN.flatten(), STD.flatten()),
        )
        calls["kornia"] = lambda: augment(large / 255).bfloat16()
    return calls


def rate_on_device(call: Callable[[], Any], batch: int) -> float:
    """Return images a second of ten calls that are all queued before the GPU begins the first."""
    busy = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(16):
        busy[: 1 << 29].copy_(busy[1 << 29 :])
    start.record()
    for _ in range(10):
        call()
    end.record()
    torch.cuda.synchronize()
    return 10 * batch / (start.elapsed_time(end) / 1000)


def ways(options: Any, folder: Path) -> dict[str, Way]:
    """Return what is called."""

    def counted(call: Callable[[], Any]) -> Callable[[], int]:
        return lambda: len(call())  # a batch

    if options.device == "cpu":
        calls = on_cpu(options.batch)
        return {f"{name}, images/s": rate(counted(call)) for name, call in calls.items()}
    need_cuda("Leave --device out to measure the CPU.")
    calls = on_cuda(options.batch, not options.quick)
    found: dict[str, Way] = {}
    for name, call in calls.items():
        found[f"{name}, images/s"] = rate(counted(call), torch.cuda.synchronize, 0.02)
        if not name.startswith(OTHERS):
            found[f"{name}, on the device, images/s"] = functools.partial(
                rate_on_device, call, options.batch
            )
    # compiled, and with all memory that it takes, before the first round
    warm_until = time.perf_counter() + 2
    while time.perf_counter() < warm_until:
        for call in calls.values():
            call()
        torch.cuda.synchronize()
    return found


def time_ratios() -> dict[str, tuple[str, str]]:
    """Return the ratios of times, which are those of rates the other way round."""
    flip, crop = "flip, normalise", "resized crop, flip, normalise"
    sizes = (f"{crop}, 256", f"{flip}, 256", f"{flip}, 32", f"padded crop, {flip}, 32")
    pairs = [(name, f"{name}, plain") for name in (*sizes, "resize, centre crop, normalise, 256")]
    pairs += [(f"copy{kind}", f"{flip}{kind}") for kind in ("", ", on the device")]
    theirs = ("torchvision v2, one draw a batch", "torchvision v2, one draw a sample", "kornia")
    pairs += [(name, crop) for name in theirs]
    return {
        f"time: {one} / {other}": (f"{other}, images/s", f"{one}, images/s") for one, other in pairs
    }


if __name__ == "__main__":
    devices = ("cuda", "cpu") if torch.cuda.is_available() else ("cpu", "cuda")
    run_benchmark(
        ways,
        options={"batch": 256, "rounds": 30, "device": devices},
        quick={"rounds": 12},
        ratios=time_ratios(),
        facts={"images": "in memory"},
    )
