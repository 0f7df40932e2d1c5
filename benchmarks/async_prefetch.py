"""Synchronous beside prefetched loading, for both cases of the async data loading idiom.

    python benchmarks/async_prefetch.py [--samples 64] [--batches 60] [--rounds 5] [--device cuda]
        [--quick] [--dry-run]

- "made on the device": samples of 3×2048×2048 float32 that the GPU makes when they are asked for,
  noise with the spectrum of photographs by an FFT. One sample a step of six wide convolutions.
- "DataLoader": uint8 pictures of 224×224×3 in memory, batches of 256, `fast_collate`, no workers;
  copied to the GPU and normalised there. The network is eight convolutions.

Synchronous loads, then trains, on one stream. `CudaPrefetcher` loads on a stream of its own, two
batches ahead, and with `own_thread=True` on a thread of its own; `background` is a thread without a
stream. "loading alone" and "training alone" are the bounds: loading that is hidden completely takes
as long as the slower of them. Milliseconds a step of whole epochs, with the device waited for at the
end; and as many programs measure it, without waiting, which only tells how fast work was handed
over. bfloat16 autocast, SGD, no compilation.

`--device cpu` is a toy that shows that all of it runs.
"""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from harness import Way, need_cuda, run_benchmark
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import memload

CASES = {"made on the device": 2048, "DataLoader": 224}
WAYS = ("background", "CudaPrefetcher", "CudaPrefetcher, own_thread", "synchronous, page-locked")
Batches = Callable[[], Iterable[tuple[Tensor, Tensor]]]


class MadeOnDevice(Dataset[tuple[Tensor, Tensor]]):
    """Textures of 1/f noise as batches of one, ``(1, 3, side, side)`` float32, with a label."""

    def __init__(self, count: int, side: int, device: torch.device) -> None:
        self.count, self.side, self.device = count, side, device
        across = torch.fft.rfftfreq(side, device=device)
        down = torch.fft.fftfreq(side, device=device)[:, None]
        self.falling = 1 / (down.square() + across.square()).sqrt().clamp_(1 / side)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        random = torch.Generator(self.device).manual_seed(number)
        noise = torch.randn(3, self.side, self.side, generator=random, device=self.device)
        texture = torch.fft.irfft2(torch.fft.rfft2(noise) * self.falling, s=(self.side, self.side))
        texture = texture / texture.std(dim=(1, 2), keepdim=True)
        return texture[None], torch.full((1,), number % 1000, device=self.device)


class Pictures(Dataset[tuple[Tensor, int]]):
    """uint8 pictures in memory, ``(3, side, side)``, channels-last."""

    def __init__(self, count: int, side: int) -> None:
        pixels = torch.randint(0, 256, (min(count, 1024), side, side, 3), dtype=torch.uint8)
        self.count, self.images = count, pixels.permute(0, 3, 1, 2).unbind()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        return self.images[number % len(self.images)], number % 1000


def network(sizes: Sequence[int]) -> nn.Module:
    """Return a convolution for each pair of sizes, every second of which halves the picture."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2), nn.ReLU()]
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Conv2d(before, after, 3, 1 + (after > before), 1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(sizes[-1], 1000))


def trainer(model: nn.Module, device: torch.device) -> Callable[[Tensor, Tensor], None]:
    """Return a training step of a model."""
    model = model.to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, fused=True)

    def step(images: Tensor, labels: Tensor) -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return step


def made_on_device(count: int, side: int, device: torch.device) -> dict[str, Batches]:
    """Return the ways to load samples that are made on the device."""
    dataset = MadeOnDevice(count, side, device)

    def synchronous() -> Iterator[tuple[Tensor, Tensor]]:
        yield from (dataset[number] for number in range(count))

    return {
        "synchronous": synchronous,
        "background": memload.background(synchronous),
        "CudaPrefetcher": lambda: memload.CudaPrefetcher(dataset, device=device),
        "CudaPrefetcher, own_thread": lambda: memload.CudaPrefetcher(
            dataset, device=device, own_thread=True
        ),
    }


def data_loader(batches: int, batch: int, side: int, device: torch.device) -> dict[str, Batches]:
    """Return the ways to load from a DataLoader, normalised on the device."""
    dataset = Pictures(batches * batch, side)
    mean, std = (255 * torch.full((3, 1, 1), value, device=device) for value in (0.45, 0.225))
    ordinary = DataLoader(dataset, batch, collate_fn=memload.fast_collate)
    page_locked = DataLoader(
        dataset, batch, collate_fn=memload.fast_collate, pin_memory=device.type == "cuda"
    )

    def normalise(images: Tensor) -> Tensor:
        return (images.float() - mean) / std

    def synchronous(loader: Iterable[Any]) -> Iterator[tuple[Tensor, Tensor]]:
        for images, labels in loader:
            images, labels = (part.to(device, non_blocking=True) for part in (images, labels))
            yield normalise(images), labels

    def prefetched(**options: Any) -> memload.CudaPrefetcher:
        return memload.CudaPrefetcher(page_locked, device=device, transform=normalise, **options)

    return {
        "synchronous": lambda: synchronous(ordinary),
        "synchronous, page-locked": lambda: synchronous(page_locked),
        "CudaPrefetcher": prefetched,
        "CudaPrefetcher, own_thread": lambda: prefetched(own_thread=True),
    }


def epoch(batches: Batches, step: Callable[[Tensor, Tensor], object]) -> Way:
    """Return a way that takes an epoch."""

    def way() -> dict[str, float]:
        wait()
        start, steps = time.perf_counter(), 0
        for images, labels in batches():
            step(images, labels)
            steps += 1
        handed_over = time.perf_counter() - start
        wait()
        seconds = time.perf_counter() - start
        return {
            "time a step (ms)": 1000 * seconds / steps,
            "device not waited for (ms)": 1000 * handed_over / steps,
        }

    def wait() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return way


def ways(options: Any, folder: Path) -> dict[str, Way]:
    """Return the bounds and the ways of both cases."""
    toy = options.device == "cpu"
    if not toy:
        need_cuda("--device cpu runs a toy.")
    torch.backends.cudnn.benchmark = True
    device = torch.device(options.device)
    large, side, batch = (128, 32, 8) if toy else (*CASES.values(), 256)
    cases = {
        "made on the device": made_on_device(options.samples, large, device),
        "DataLoader": data_loader(options.batches, batch, side, device),
    }
    sizes = ((64, 64, 128, 128, 256, 256), (64, 64, 128, 128, 256, 256, 512, 512))
    found: dict[str, Way] = {}
    for (case, loading), widths in zip(cases.items(), sizes, strict=True):
        again = next(iter(loading["synchronous"]()))
        step, steps = trainer(network(widths), device), sum(1 for _ in loading["synchronous"]())
        found[f"{case} › loading alone"] = epoch(loading["synchronous"], lambda *_: None)
        found[f"{case} › training alone"] = epoch(lambda n=steps, one=again: [one] * n, step)
        for name, batches in loading.items():
            found[f"{case} › {name}"] = epoch(batches, step)
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
