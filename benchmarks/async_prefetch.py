"""Synchronous beside prefetched loading, for both cases of the async data loading idiom.

- "made on the device": noise of 3×2048×2048 float32, filtered by an FFT, that the GPU makes when it
  is asked for. One sample a step.
- "DataLoader": uint8 pictures of 224×224×3 in memory, batches of 256, `fast_collate`, no workers,
  page-locked; copied to the GPU and normalised there.

Synchronous loads, then trains six convolutions, on one stream. `CudaPrefetcher` loads two batches
ahead on a stream of its own. "loading alone" and "training alone" are the bounds: loading that is
hidden completely takes as long as the slower of them. Milliseconds a step of whole epochs, bfloat16.
`--toy` shows on a CPU that all of it runs.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from harness import Way, move, need_cuda, run_benchmark
from torch import Tensor, nn
from torch.utils.data import DataLoader
from train_step import Training

import memload

CASES = ("made on the device", "DataLoader")


class Epochs:
    """The batches of an iterator that begins anew for each epoch."""

    def __init__(self, begin: Callable[[], Iterator[Any]]) -> None:
        self.begin = begin

    def __iter__(self) -> Iterator[Any]:
        return self.begin()


def normalise(images: Tensor) -> Tensor:
    """Return float32 of zero mean."""
    return (images.float() - 115) / 57


def network() -> nn.Module:
    """Return six convolutions and what makes classes of them."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2), nn.ReLU()]
    for before, after in ((64, 64), (64, 128), (128, 128), (128, 256), (256, 256)):
        layers += [nn.Conv2d(before, after, 3, 1 + (after > before), 1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 1000))


def epoch(batches: Iterable[Any], step: Callable[[Tensor, Tensor], object]) -> Way:
    """Return a way that measures a step of an epoch."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None

    def way() -> dict[str, float]:
        wait()
        start, steps = time.perf_counter(), 0
        for images, labels in batches:
            step(images, labels)
            steps += 1
        wait()
        return {"time a step (ms)": 1000 * (time.perf_counter() - start) / steps}

    return way


def ways(options: Any, folder: Path) -> dict[str, Way]:
    """Return the bounds and the ways of both cases."""
    if not options.toy:
        need_cuda("--toy shows on a CPU that all of it runs.")
    torch.backends.cudnn.benchmark = True
    device, large, side, batch = ("cpu", 128, 32, 8) if options.toy else ("cuda", 2048, 224, 256)
    falling = 1 / (1 + torch.arange(large // 2 + 1, device=device))

    def make() -> Iterator[Any]:
        for number in range(options.samples):
            noise = torch.randn(1, 3, large, large, device=device)
            texture = torch.fft.irfft2(torch.fft.rfft2(noise) * falling, s=noise.shape[2:])
            yield texture, torch.full((1,), number % 1000, device=device)

    pictures = torch.randint(0, 256, (1024, 3, side, side), dtype=torch.uint8)
    chosen = [(pictures[number % 1024], number % 1000) for number in range(options.batches * batch)]
    loader = DataLoader(chosen, batch, collate_fn=memload.fast_collate, pin_memory=device == "cuda")

    def move_and_normalise() -> Iterator[Any]:
        for images, labels in move(loader, device):
            yield normalise(images), labels

    made: Any = Epochs(make)
    found: dict[str, Way] = {}
    for case, source, synchronous, transform, count in (
        (CASES[0], made, made, None, options.samples),
        (CASES[1], loader, Epochs(move_and_normalise), normalise, options.batches),
    ):
        step = Training(network(), torch.device(device)).step
        settings = {"device": device, "transform": transform}
        ahead = memload.CudaPrefetcher(source, **settings)
        found[f"{case} › loading alone"] = epoch(synchronous, lambda *_: None)
        found[f"{case} › training alone"] = epoch([next(iter(synchronous))] * count, step)
        found[f"{case} › synchronous"] = epoch(synchronous, step)
        found[f"{case} › CudaPrefetcher"] = epoch(ahead, step)
    return found


if __name__ == "__main__":
    run_benchmark(
        ways,
        options={"samples": 64, "batches": 60, "rounds": 5, "toy": False},
        quick={"samples": 32, "batches": 30, "rounds": 3},
        ratios={
            f"{case} › CudaPrefetcher › times as fast as synchronous": (
                f"{case} › synchronous › time a step (ms)",
                f"{case} › CudaPrefetcher › time a step (ms)",
            )
            for case in CASES
        },
    )
