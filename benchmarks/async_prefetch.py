"""Synchronous beside prefetched loading, for both cases of the async data loading idiom.

    python benchmarks/async_prefetch.py [--samples 64] [--batches 60] [--rounds 5] [--device cuda]
        [--quick] [--dry-run]

- "made on the device": noise of 3×2048×2048 float32, filtered by an FFT, that the GPU makes when it
  is asked for. One sample a step.
- "DataLoader": uint8 pictures of 224×224×3 in memory, batches of 256, `fast_collate`, no workers,
  page-locked; copied to the GPU and normalised there.

Synchronous loads, then trains six convolutions, on one stream. `CudaPrefetcher` loads two batches
ahead on a stream of its own, and with `own_thread=True` on a thread of its own. "loading alone" and
"training alone" are the bounds: loading that is hidden completely takes as long as the slower of
them. Milliseconds a step of whole epochs, bfloat16. `--device cpu` is a toy that shows that all of it
runs.
"""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from harness import Way, need_cuda, run_benchmark
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import memload

CASES = ("made on the device", "DataLoader")
WAYS = ("CudaPrefetcher", "CudaPrefetcher, own_thread")
WIDTHS = (64, 64, 128, 128, 256, 256)


class MadeOnDevice(Dataset[tuple[Tensor, Tensor]]):
    """Batches of one, ``(1, 3, side, side)`` float32, with a label."""

    def __init__(self, count: int, side: int, device: str) -> None:
        self.count, self.side, self.device = count, side, device
        self.falling = 1 / (1 + torch.arange(side // 2 + 1, device=device))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        if number >= self.count:
            raise IndexError(number)
        noise = torch.randn(1, 3, self.side, self.side, device=self.device)
        texture = torch.fft.irfft2(torch.fft.rfft2(noise) * self.falling, s=noise.shape[2:])
        return texture, torch.full((1,), number % 1000, device=self.device)


def normalise(images: Tensor) -> Tensor:
    """Return float32 of zero mean."""
    return (images.float() - 115) / 57


def moved(loader: Iterable[Any], device: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches on the device, normalised."""
    for images, labels in loader:
        yield normalise(images.to(device, non_blocking=True)), labels.to(device, non_blocking=True)


def trainer(device: str) -> Callable[[Tensor, Tensor], None]:
    """Return a training step of a new network."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2), nn.ReLU()]
    for before, after in itertools.pairwise(WIDTHS):
        layers += [nn.Conv2d(before, after, 3, 1 + (after > before), 1), nn.ReLU()]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTHS[-1], 1000)]
    model = nn.Sequential(*layers).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, fused=True)

    def step(images: Tensor, labels: Tensor) -> None:
        with torch.autocast(device, torch.bfloat16):
            loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return step


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


class Synchronous:
    """The batches of a DataLoader, moved when they are asked for."""

    def __init__(self, loader: Iterable[Any], device: str) -> None:
        self.loader, self.device = loader, device

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return moved(self.loader, self.device)


def ways(options: Any, folder: Path) -> dict[str, Way]:
    """Return the bounds and the ways of both cases."""
    device, toy = options.device, options.device == "cpu"
    if not toy:
        need_cuda("--device cpu runs a toy.")
    torch.backends.cudnn.benchmark = True
    large, side, batch = (128, 32, 8) if toy else (2048, 224, 256)
    made = MadeOnDevice(options.samples, large, device)
    pictures = torch.randint(0, 256, (1024, 3, side, side), dtype=torch.uint8)
    chosen = [(pictures[number % 1024], number % 1000) for number in range(options.batches * batch)]
    loader = DataLoader(chosen, batch, collate_fn=memload.fast_collate, pin_memory=not toy)
    found: dict[str, Way] = {}
    cases = {"made on the device": (made, made, None)}
    cases["DataLoader"] = (loader, Synchronous(loader, device), normalise)
    for case, (source, synchronous, transform) in cases.items():
        step, settings = trainer(device), {"device": device, "transform": transform}
        again = [next(iter(synchronous))] * len(source)
        ahead = memload.CudaPrefetcher(source, **settings)
        on_thread = memload.CudaPrefetcher(source, own_thread=True, **settings)
        found[f"{case} › loading alone"] = epoch(synchronous, lambda *_: None)
        found[f"{case} › training alone"] = epoch(again, step)
        found[f"{case} › synchronous"] = epoch(synchronous, step)
        found[f"{case} › CudaPrefetcher"] = epoch(ahead, step)
        found[f"{case} › CudaPrefetcher, own_thread"] = epoch(on_thread, step)
    return found


if __name__ == "__main__":
    run_benchmark(
        "async_prefetch",
        __doc__,
        ways,
        options={"samples": 64, "batches": 60, "rounds": 5},
        quick={"samples": 32, "batches": 30, "rounds": 3},
        ratios={
            f"{case} › {way} › times as fast as synchronous": (
                f"{case} › synchronous › time a step (ms)",
                f"{case} › {way} › time a step (ms)",
            )
            for case in CASES
            for way in WAYS
        },
        extend=lambda parser: parser.add_argument(
            "--device", choices=("cuda", "cpu"), default="cuda"
        ),
    )
