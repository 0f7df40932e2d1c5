"""Training ResNet-18, ResNet-50 and a model so small that only feeding counts, fed in each way, against synthetic data.

    python benchmarks/training.py [--images 40000] [--rounds 3] [--seconds 4]

Noise of 224×224×3 in batches of 256, bfloat16 autocast, channels-last, SGD, no compilation; pages warm. Synthetic is
the same step on one normalised batch that stays on the device. `Loader`s normalise to bfloat16 on their own stream,
and with `train(224)` from 256×256×3 crop, resize and flip too. A round is each way in turn for so many seconds' worth
of steps, the device waited for at the end; the first round is left out. So is one more Loader, which has the first
place behind synthetic: whichever Loader had it ran ResNet-50 at 0.983 of synthetic, with `dma` as with `resident`,
and in any other place at 0.995 and more, so it is where torch places the first batches in memory. Its share is
recorded as "first place". Shares are within a round. CPU is the thread's time inside the Loader's `next`, over the
time of the round, which leaves out the training step's own.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torchvision
from record import noise_dataset, record, spread
from torch import nn

import memload
from memload import transforms

DEVICE = torch.device("cuda", 0)
BATCH = 256


class Stem(nn.Sequential):
    """Next to nothing: one convolution and a linear layer."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 16, 7, 8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 1000))


class Training:
    """A model and its step."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model.to(DEVICE, memory_format=torch.channels_last)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01, momentum=0.9, fused=True)

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        """Train on a batch."""
        with torch.autocast("cuda", torch.bfloat16):
            loss = nn.functional.cross_entropy(self.model(images), labels)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()


def forever(batches: Any) -> Iterator[Any]:
    """Go from epoch to epoch."""
    while True:
        yield from batches


def measure(training: Training, batches: Iterator[Any], steps: int) -> tuple[float, float]:
    """Return images a second, and the part of a core that asking for batches took."""
    torch.cuda.synchronize()
    start, feeding = time.perf_counter(), 0.0
    for _ in range(steps):
        before = time.thread_time()
        images, labels = next(batches)
        feeding += time.thread_time() - before
        training.step(images, labels)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    return steps * BATCH / seconds, feeding / seconds


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=40_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    normalise = transforms.Compose([transforms.Normalize("imagenet"), transforms.ToDtype(torch.bfloat16)])
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        path, larger = Path(folder) / "224.bin", Path(folder) / "256.bin"
        noise_dataset(path, options.images, 224)
        noise_dataset(larger, options.images // 2, 256)
        images = torch.randn(BATCH, 3, 224, 224, device=DEVICE, dtype=torch.bfloat16)
        synthetic = (images.to(memory_format=torch.channels_last), torch.randint(0, 1000, (BATCH,), device=DEVICE))

        def loader(source: Path, feed: Any, transform: Any) -> memload.Loader:
            made = memload.Loader(
                source, BATCH, shuffle=True, drop_last=True, device=DEVICE, feed=feed, transform=transform
            )
            if hasattr(made._open().feed, "_pages"):
                made._open().feed._pages.wait(60)
            return made

        recipe = transforms.train(224, dtype=torch.bfloat16)
        ways: dict[str, Callable[[], Any]] = {
            **{feed: lambda feed=feed: loader(path, feed, normalise) for feed in ("dma", "uva", "resident", "pinned")},
            "dma, train(224)": lambda: loader(larger, "dma", recipe),
        }
        for name, build in (
            ("ResNet-50", torchvision.models.resnet50),
            ("ResNet-18", torchvision.models.resnet18),
            ("stem", Stem),
        ):
            training = Training(build())
            sources: dict[str, Iterator[Any]] = {"synthetic": forever([synthetic])}
            sources["first place"] = forever(ways["resident"]())
            sources |= {way: forever(make()) for way, make in ways.items()}
            measure(training, sources["synthetic"], 10)
            rate, _ = measure(training, sources["synthetic"], 10)
            steps = max(20, int(options.seconds * rate / BATCH))
            found: dict[str, list[tuple[float, float]]] = {way: [] for way in sources}
            for number in range(options.rounds + 1):
                for way, batches in sources.items():
                    got = measure(training, batches, steps if number else 10)
                    if number:
                        found[way].append(got)
            base = [rate for rate, _ in found["synthetic"]]
            results[name] = {
                way: {
                    "images/s": spread([rate for rate, _ in values]),
                    "share of synthetic": spread([rate / own for (rate, _), own in zip(values, base, strict=True)]),
                    "cores": spread([cores for _, cores in values]),
                }
                for way, values in found.items()
            }
            del sources
    record("training", vars(options) | {"pages": "warm", "batch": BATCH}, results)


if __name__ == "__main__":
    main()
