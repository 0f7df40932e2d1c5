"""Synchronous against prefetched loading, for both cases of the async data loading idiom, the device waited for.

    python benchmarks/async_prefetch.py [--rounds 5] [--samples 64] [--batches 60] [--device cuda]
        [--dry-run]

- "made on the device": a data set whose samples, 3×2048×2048 float32, are made on the GPU when they are asked for:
  noise with the spectrum of photographs, by an FFT, scaled. One sample a step of a network of six wide convolutions:
  few calls of much work each, as the device has to be what is waited for, not the host that hands work to it.
- "DataLoader": torch's DataLoader over uint8 pictures of 224×224×3 in memory, batches of 256, `fast_collate`, no
  workers; copied to the GPU, and mean and std applied there in float32. The network is eight convolutions.

Synchronous loads, then trains, on one stream. From page-locked memory a copy does not keep the host, which is a line
of its own, and what `CudaPrefetcher` has to be set beside, as it is given page-locked memory too. It does the loading
on its stream, two samples or batches ahead, and with `own_thread=True` on its thread; `background` is a thread without
a stream of its own. bfloat16 autocast, SGD, no compilation.

First it is checked that every way gives the synchronous one's samples, to the bit. Then each way in turn for a whole
epoch, in rounds, the first left out; the clock is read behind `torch.cuda.synchronize()`. Read before it, as many do,
it tells how fast work was handed to the device: that wrong figure is recorded beside it, as "the device not waited
for". "loading alone", synchronous from page-locked memory, and "training alone", on one sample again and again, are
the bounds: loading that is wholly hidden takes as long as the slower of them, and the share is of that. Times are
milliseconds a step.

With `--device cpu` it is a toy that shows that all of it runs: few small pictures, nothing recorded.
"""

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from record import arguments, at_least_one, need_cuda, record, run_main, spread
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import memload

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CHECKED = 8  #: samples or batches that are compared; others are of the same kind
Ways = dict[str, Callable[[], Iterable[tuple[Tensor, Tensor]]]]


class MadeOnDevice(Dataset[tuple[Tensor, Tensor]]):
    """Textures of 1/f noise as batches of one, ``(1, 3, side, side)`` float32, and a label ``(1,)``."""

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
    """uint8 pictures in memory, ``(3, side, side)``, channels-last, as a `MemmapDataset` gives them."""

    def __init__(self, count: int, side: int) -> None:
        random = torch.Generator().manual_seed(0)
        pixels = torch.randint(
            0, 256, (min(count, 1024), side, side, 3), dtype=torch.uint8, generator=random
        )
        self.count, self.images = count, pixels.permute(0, 3, 1, 2).unbind()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        return self.images[number % len(self.images)], number % 1000


def wide() -> nn.Module:
    """Return a network for large pictures: about 10¹² operations a step at 2048×2048, in few calls.

    With three convolutions of 32 and 64 channels a step took the host 1.46 ms to hand over, and the device less.
    """
    return nn.Sequential(
        nn.Conv2d(3, 64, 7, 2), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU(),
        nn.Conv2d(64, 128, 3, 2), nn.ReLU(), nn.Conv2d(128, 128, 3), nn.ReLU(),
        nn.Conv2d(128, 256, 3, 2), nn.ReLU(), nn.Conv2d(256, 256, 3), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 1000),
    )  # fmt: skip


def eight() -> nn.Module:
    """Return a network of eight convolutions, which takes more time than loading."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3), nn.ReLU()]
    sizes = (64, 64, 128, 128, 256, 256, 512, 512)
    for before, after in itertools.pairwise(sizes):
        layers += [
            nn.Conv2d(before, after, 3, 1 + (after > before), 1),
            nn.BatchNorm2d(after),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(sizes[-1], 1000))


class Training:
    """A network and its step."""

    def __init__(self, network: nn.Module, device: torch.device) -> None:
        self.device = device
        self.network = network.to(device, memory_format=torch.channels_last)
        self.optimizer = torch.optim.SGD(network.parameters(), 0.01, momentum=0.9, fused=True)

    def step(self, images: Tensor, labels: Tensor) -> None:
        """Train on a batch."""
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = nn.functional.cross_entropy(self.network(images), labels)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()


def wait(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def made_on_device(count: int, side: int, device: torch.device) -> Ways:
    """Return the ways to load samples that are made on the device."""
    dataset = MadeOnDevice(count, side, device)

    def synchronous() -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(count):
            yield dataset[number]

    return {
        "synchronous": synchronous,
        "background": memload.background(synchronous),
        "CudaPrefetcher": lambda: memload.CudaPrefetcher(dataset, device=device),
        "CudaPrefetcher, own_thread": lambda: memload.CudaPrefetcher(
            dataset, device=device, own_thread=True
        ),
    }


def data_loader(batches: int, batch: int, side: int, device: torch.device) -> Ways:
    """Return the ways to load from a DataLoader, with mean and std applied on the device."""
    dataset, locked = Pictures(batches * batch, side), device.type == "cuda"
    mean, std = (255 * torch.tensor(values, device=device).view(3, 1, 1) for values in (MEAN, STD))
    ordinary = DataLoader(dataset, batch, collate_fn=memload.fast_collate)
    page_locked = DataLoader(dataset, batch, collate_fn=memload.fast_collate, pin_memory=locked)

    def normalise(images: Tensor) -> Tensor:
        return (images.float() - mean) / std

    def synchronous(loader: Iterable[Any]) -> Iterator[tuple[Tensor, Tensor]]:
        for images, labels in loader:
            yield (
                normalise(images.to(device, non_blocking=True)),
                labels.to(device, non_blocking=True),
            )

    def prefetched(**options: Any) -> memload.CudaPrefetcher:
        return memload.CudaPrefetcher(page_locked, device=device, transform=normalise, **options)

    return {
        "synchronous": lambda: synchronous(ordinary),
        "synchronous, page-locked": lambda: synchronous(page_locked),
        "CudaPrefetcher": prefetched,
        "CudaPrefetcher, own_thread": lambda: prefetched(own_thread=True),
    }


def check(ways: Ways) -> None:
    """Raise RuntimeError where a way's first samples are not those of the first way, or its number of them is not."""
    wanted: list[tuple[Tensor, Tensor]] = []
    expected = 0
    for name, way in ways.items():
        found, count = [], 0
        for images, labels in way():
            if count < CHECKED:
                found.append((images.clone(), labels.clone()))
            count += 1
        if not wanted:
            wanted, expected = found, count
        if count != expected:
            raise RuntimeError(
                f"{name}: expected {expected} samples or batches as in the first way, found {count}"
            )
        pairs = [
            pair
            for one, own in zip(wanted, found, strict=True)
            for pair in zip(one, own, strict=True)
        ]
        if not all(torch.equal(one, own) for one, own in pairs):
            raise RuntimeError(
                f"{name}: expected what the first way gives, to the bit, found something else"
            )


def run(training: Training, ways: Ways, rounds: int) -> dict[str, Any]:
    """Return milliseconds a step of each way, waited for and not, speed-ups over synchronous ones, and shares."""
    check(ways)
    synchronous, *_ = ways
    again = next(iter(ways[synchronous]()))

    def once(batches: Iterable[tuple[Tensor, Tensor]], train: bool) -> tuple[float, float]:
        wait(training.device)
        start, steps = time.perf_counter(), 0
        for images, labels in batches:
            if train:
                training.step(images, labels)
            steps += 1
        told = time.perf_counter() - start
        wait(training.device)
        return 1000 * (time.perf_counter() - start) / steps, 1000 * told / steps

    steps = sum(1 for _ in ways[synchronous]())
    best = [name for name in ways if name.startswith(synchronous)][
        -1
    ]  # from page-locked memory, if one is
    measured = {"loading alone": ways[best], "training alone": lambda: [again] * steps, **ways}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in measured}
    for number in range(rounds + 1):
        for name, batches in measured.items():
            times = once(batches(), name != "loading alone")
            if number:
                found[name].append(times)
        print(f"round {number + 1} of {rounds + 1}", file=sys.stderr, flush=True)
    waited = {name: [time for time, _ in values] for name, values in found.items()}
    bound = [
        max(pair) for pair in zip(waited["loading alone"], waited["training alone"], strict=True)
    ]

    def over(other: str, name: str) -> dict[str, float]:
        return spread([a / b for a, b in zip(waited[other], waited[name], strict=True)])

    return {
        name: {
            "ms a step": spread(waited[name]),
            "ms a step, the device not waited for": spread([told for _, told in values]),
        }
        | (
            {
                **{
                    f"times as fast as {other}": over(other, name)
                    for other in dict.fromkeys((synchronous, best))
                },
                "share of the bound": spread(
                    [a / b for a, b in zip(bound, waited[name], strict=True)]
                ),
            }
            if name in ways
            else {}
        )
        for name, values in found.items()
    }


def main() -> None:
    """Run the benchmark."""
    parser = arguments(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=at_least_one)
    parser.add_argument("--samples", type=int, help="of those made on the device")
    parser.add_argument("--batches", type=int, help="of the DataLoader")
    options = parser.parse_args()
    toy = options.device == "cpu"
    if not toy:
        need_cuda("--device cpu runs a toy")
    usual = {"rounds": 5, "samples": 64, "batches": 60}
    for name, whole in usual.items():
        if getattr(options, name) is None:
            setattr(options, name, (2 if name == "rounds" else 10) if toy else whole)
    device = torch.device("cpu") if toy else torch.device("cuda", torch.cuda.current_device())
    torch.backends.cudnn.benchmark = True
    if toy:
        torch.set_num_threads(1)  # of which own_thread has another
    large, batch, side = (128, 8, 32) if toy else (2048, 256, 224)
    results = {
        f"made on the device, 3×{large}×{large}": run(
            Training(wide(), device), made_on_device(options.samples, large, device), options.rounds
        ),
        f"DataLoader, {batch} of 3×{side}×{side}": run(
            Training(eight(), device),
            data_loader(options.batches, batch, side, device),
            options.rounds,
        ),
    }
    if toy:
        print(json.dumps(results, indent=1))
    else:
        parameters = {name: getattr(options, name) for name in usual}
        parameters |= {"data": "made on the device, and in memory", "checked": "equal to the bit"}
        record("async_prefetch", options, usual, parameters, results)


if __name__ == "__main__":
    run_main(main)
