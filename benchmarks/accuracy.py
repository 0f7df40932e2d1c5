"""What a network learns from stored squares, beside the whole photographs.

    python -m benchmarks.accuracy --images caltech-101/ [--seeds 5] [--jobs 4]

A ResNet-18 is trained from scratch, in the same steps for all arms, and tested on every fifth
photograph of each class. The arms are different ways from the photographs to the crops:

- JPEGs: torchvision's RandomResizedCrop from the whole photograph, which is decoded in each epoch.
  Tested on the middle of the photograph, by Resize to 8/7 of the crop's side and CenterCrop, as
  `transforms.evaluate` does.
- square 1.15, square 1.5: `memload build --size`, with sides of 1.15 and 1.5 of the crop's, and
  `transforms.train`. Tested on the middle of the stored square, by `transforms.evaluate`.
- pad 1.15, squash 1.15: the same with `--fit pad` and `--fit squash`.

Each accuracy is the share of test photographs whose class is the likeliest, after the last step.
The figures are the mean of all seeds, its standard error, the seconds of an epoch and the bytes that
are stored. ``--only`` runs the arms whose names contain a word. ``--jobs`` trainings share the GPU.
"""

import argparse
import math
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import memload
from benchmarks.harness import CORES, argument_parser, left_out, record
from benchmarks.training import make_model
from memload import transforms

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
#: How each arm stores photographs: the side as a multiple of the crop's, and ``--fit``.
STORED = {
    "square 1.15": (1.15, "crop"),
    "square 1.5": (1.5, "crop"),
    "pad 1.15": (1.15, "pad"),
    "squash 1.15": (1.15, "squash"),
}
ARMS = ("JPEGs", *STORED)
TEST_EVERY, JPEG = 5, (".jpg", ".jpeg")
OPTIONS: dict[str, Any] = {"side": 128, "epochs": 90, "batch": 128, "seeds": 5, "jobs": 1}
RATE, DECAY, WARM_UP = 0.1, 5e-4, 5


class Photograph(NamedTuple):
    """A file and the number of its class."""

    path: str
    label: int


class Photographs(torch.utils.data.Dataset[Any]):
    """Decodes a file for each sample."""

    def __init__(self, photographs: list[Photograph], transform: Any) -> None:
        self.photographs, self.transform = photographs, transform

    def __len__(self) -> int:
        return len(self.photographs)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        from torchvision.datasets.folder import pil_loader

        path, label = self.photographs[number]
        return self.transform(pil_loader(path)), label


def split(images: Path) -> tuple[list[Photograph], list[Photograph]]:
    """Return the photographs to train with, and those to test with: every fifth of each class."""
    parts: tuple[list[Photograph], list[Photograph]] = ([], [])
    for label, folder in enumerate(sorted(path for path in images.iterdir() if path.is_dir())):
        files = sorted(path for path in folder.iterdir() if path.suffix.lower() in JPEG)
        for number, path in enumerate(files):
            parts[number % TEST_EVERY == 0].append(Photograph(str(path), label))
    return parts


class Batches(NamedTuple):
    """Batches to train with, anew in each iteration, and batches to test with."""

    training: Any
    testing: Any


def decoded(options: argparse.Namespace, seed: int) -> Batches:
    """Return batches that are decoded by worker processes."""
    from torchvision.transforms import v2

    last = [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)]
    last.append(v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    draw = v2.Compose([v2.RandomResizedCrop(options.side), v2.RandomHorizontalFlip(), *last])
    middle = [v2.Resize(round(8 / 7 * options.side)), v2.CenterCrop(options.side)]
    load = partial(
        torch.utils.data.DataLoader,
        batch_size=options.batch,
        num_workers=max(1, CORES // options.jobs),
        persistent_workers=True,
        pin_memory=DEVICE.type == "cuda",
    )
    train, test = split(options.images)
    generator = torch.Generator().manual_seed(seed)
    return Batches(
        load(Photographs(train, draw), shuffle=True, drop_last=True, generator=generator),
        load(Photographs(test, v2.Compose([*middle, *last]))),
    )


def stored(options: argparse.Namespace, arm: str, seed: int) -> Batches:
    """Return batches of memload's."""
    train, test = (options.built / f"{arm}-{part}.bin" for part in ("train", "test"))
    load = partial(memload.Loader, batch_size=options.batch, device=DEVICE)
    draw, middle = transforms.train(options.side), transforms.evaluate(options.side)
    return Batches(
        load(train, shuffle=True, drop_last=True, seed=seed, transform=draw),
        load(test, transform=middle),
    )


def build(options: argparse.Namespace, arm: str) -> int:
    """Build the files of an arm and return their size in bytes, or that of the photographs."""
    parts = split(options.images)
    if arm == "JPEGs":
        return sum(Path(path).stat().st_size for part in parts for path, _ in part)
    scale, fit = STORED[arm]
    for name, part in zip(("train", "test"), parts, strict=True):
        memload.build(
            [(Path(path), label) for path, label in part],
            options.built / f"{arm}-{name}.bin",
            size=math.ceil(scale * options.side),
            fit=fit,
            progress=False,
        )
    return sum(path.stat().st_size for path in options.built.glob(f"{arm}-*.bin"))


def accuracy(network: nn.Module, batches: Iterable[Any]) -> float:
    """Return the share of test photographs whose class is the likeliest, in percent."""
    network.eval()
    right, count = torch.zeros((), device=DEVICE), 0
    with torch.inference_mode(), torch.autocast(DEVICE.type, torch.bfloat16):
        for images, labels, *_ in batches:
            scores = network(images.to(DEVICE, memory_format=torch.channels_last))
            right += (scores.argmax(1) == labels.to(DEVICE)).sum()
            count += len(labels)
    return 100 * right.item() / count


def train(options: argparse.Namespace, arm: str, seed: int) -> tuple[float, float]:
    """Train a network; return its accuracy in percent and the seconds of an epoch."""
    torch.manual_seed(seed)
    batches = decoded(options, seed) if arm == "JPEGs" else stored(options, arm, seed)
    network = make_model("resnet18").to(DEVICE, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(
        network.parameters(), RATE, momentum=0.9, nesterov=True, weight_decay=DECAY
    )
    steps = options.epochs * len(batches.training)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, RATE, steps, pct_start=min(0.3, WARM_UP / options.epochs)
    )
    start = time.perf_counter()
    for _ in range(options.epochs):
        network.train()
        for images, labels, *_ in batches.training:
            images = images.to(DEVICE, memory_format=torch.channels_last, non_blocking=True)
            with torch.autocast(DEVICE.type, torch.bfloat16):
                scores = network(images)
                loss = nn.functional.cross_entropy(scores, labels.to(DEVICE, non_blocking=True))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
    percent = accuracy(network, batches.testing)  # waits for the device
    seconds = (time.perf_counter() - start) / options.epochs
    print(f"{arm}, seed {seed}: {percent:.2f} %, {seconds:.1f} s an epoch", file=sys.stderr)
    return percent, seconds


def main() -> None:
    """Parse the command line, train all arms, print, and add a line to ``results/``."""
    parser = argument_parser()
    parser.add_argument("--images", type=Path, required=True, help="a folder for each class")
    parser.add_argument("--only", default="", help="a word in the names of the arms to run")
    for name, default in OPTIONS.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    options = parser.parse_args()
    if options.quick:
        options.epochs, options.seeds = 1, 2
    arms = [arm for arm in ARMS if options.only in arm]
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="memload-benchmark-") as folder:
        options.built = Path(folder)
        sizes = {arm: build(options, arm) for arm in arms}
        with ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
            runs = {
                (arm, seed): pool.submit(train, options, arm, seed)
                for seed in range(options.seeds)
                for arm in arms
            }
            found = {key: run.result() for key, run in runs.items()}
    results = {}
    for arm in arms:
        shares, seconds = zip(*(found[arm, seed] for seed in range(options.seeds)), strict=True)
        deviation = statistics.stdev(shares) if len(shares) > 1 else math.nan
        results[arm] = {
            "accuracy (%)": statistics.mean(shares),
            "standard error (%)": deviation / math.sqrt(len(shares)),
            "epoch (s)": statistics.median(seconds),
            "stored (bytes)": sizes[arm],
        }
    parameters = {name: getattr(options, name) for name in OPTIONS} | {"images": "given"}
    record("accuracy", options, results, parameters, left_out(options, OPTIONS))


if __name__ == "__main__":
    main()
