"""What a network learns from stored squares, beside the whole photographs.

    python -m benchmarks.accuracy --images caltech-101/ [--seeds 5] [--jobs 8] [--data trained/]

A ResNet-18 is trained from scratch, in the same steps for all arms, and tested on every fifth
photograph of each class. The arms are different ways from the photographs to the crops:

- JPEGs: torchvision's RandomResizedCrop from the whole photograph. Tested on the middle of the
  photograph, by Resize to 8/7 of the crop's side and CenterCrop, as `transforms.evaluate` does.
- square 1.15, 1.5 and 2.75: `memload build --size`, with so many times the crop's side, and
  `transforms.train`. Tested on the middle of the stored square, by `transforms.evaluate`.
- from 0.25: the same with crops of at least a quarter of the area, in place of 0.08.
- pad 1.15, squash 1.15: `--fit pad` and `--fit squash`.

Each accuracy is the share of test photographs whose class is the likeliest, after the last step. The
figures are the mean of all seeds, its standard error, the bytes that are stored, and the seconds of
an epoch. These are the median of a short training that has the machine for itself, without its first
epoch; there, a worker on each core decodes JPEGs in each epoch. Then ``--jobs`` trainings at a time
share the GPU. So that this takes minutes, the JPEGs' crops come from photographs that were decoded
once and stay in memory. What is in ``--data`` from an earlier run with the same parameters is not
built or trained again.
"""

import argparse
import itertools
import json
import math
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import memload
from benchmarks.harness import CORES, parse_options, record
from memload import transforms

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
#: How each arm stores photographs: the side as a multiple of the crop's, and ``--fit``; and the least
#: share of the area that a crop has.
STORED = {
    "square 1.15": (1.15, "crop", 0.08),
    "square 1.15, from 0.25": (1.15, "crop", 0.25),
    "square 1.5": (1.5, "crop", 0.08),
    "square 2.75": (2.75, "crop", 0.08),
    "square 2.75, from 0.25": (2.75, "crop", 0.25),
    "pad 1.15": (1.15, "pad", 0.08),
    "squash 1.15": (1.15, "squash", 0.08),
}
ARMS = ("JPEGs", *STORED)
TEST_EVERY, JPEG = 5, (".jpg", ".jpeg")
NUMBERS = {"side": 128, "epochs": 60, "batch": 128, "seeds": 5, "jobs": 1}
AUTOCAST = torch.autocast(DEVICE.type, torch.bfloat16, enabled=DEVICE.type == "cuda")
RATE, DECAY, WARM_UP = 0.1, 5e-4, 5
#: The epochs of the short training whose time is measured, and its seed.
TIMED_EPOCHS, TIMED = 5, -1


class Photographs(torch.utils.data.Dataset[Any]):
    """Crops of photographs, which are decoded for each sample, or once if they are kept."""

    def __init__(self, photographs: list[tuple[str, int]], crop: Any, keep: bool) -> None:
        self.photographs, self.crop, self.keep = photographs, crop, keep
        if keep:
            with ThreadPoolExecutor(CORES) as pool:
                self.images = list(pool.map(decode, [path for path, _ in photographs]))

    def __len__(self) -> int:
        return len(self.photographs)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        path, label = self.photographs[number]
        return self.crop(self.images[number] if self.keep else decode(path)), label


def decode(path: str) -> Tensor:
    """Return the pixels of a photograph."""
    from torchvision.datasets.folder import pil_loader
    from torchvision.transforms.v2.functional import pil_to_tensor

    return pil_to_tensor(pil_loader(path))


def split(images: Path) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Return the photographs to train with, and those to test with: every fifth of each class."""
    parts: tuple[list[tuple[str, int]], list[tuple[str, int]]] = ([], [])
    for label, folder in enumerate(sorted(path for path in images.iterdir() if path.is_dir())):
        files = sorted(path for path in folder.iterdir() if path.suffix.lower() in JPEG)
        for number, path in enumerate(files):
            parts[number % TEST_EVERY == 0].append((str(path), label))
    return parts


#: Batches to train with, anew in each iteration, batches to test with, and what ends both.
Batches = tuple[Any, Any, Callable[[Tensor], Tensor]]


def jpegs(options: argparse.Namespace, seed: int) -> Batches:
    """Return batches from whole photographs; they are decoded anew only where time is measured."""
    from torchvision.transforms import v2

    draw = v2.Compose([v2.RandomResizedCrop(options.side), v2.RandomHorizontalFlip()])
    middle = v2.Compose([v2.Resize(round(8 / 7 * options.side)), v2.CenterCrop(options.side)])
    load = partial(
        torch.utils.data.DataLoader,
        batch_size=options.batch,
        num_workers=CORES if seed == TIMED else max(1, CORES // options.jobs),
        multiprocessing_context="fork",
        persistent_workers=True,
        pin_memory=DEVICE.type == "cuda",
    )
    train, test = (
        Photographs(part, crop, seed != TIMED)
        for part, crop in zip(split(options.images), (draw, middle), strict=True)
    )
    normalise = [transforms.Normalize("imagenet"), transforms.ToDtype(torch.float32)]
    return load(train, shuffle=True, drop_last=True), load(test), transforms.Compose(normalise)


def stored(options: argparse.Namespace, arm: str, seed: int) -> Batches:
    """Return batches of memload's."""
    train, test = (options.data / f"{arm}, {part}.bin" for part in ("train", "test"))
    load = partial(memload.Loader, batch_size=options.batch, device=DEVICE)
    _, _, least = STORED[arm]
    crop = transforms.RandomResizedCrop(options.side, scale=(least, 1))
    draw = transforms.Compose(
        [crop, transforms.RandomHorizontalFlip(), transforms.Normalize("imagenet")]
    )
    training = load(train, shuffle=True, drop_last=True, seed=seed, transform=draw)
    return training, load(test, transform=transforms.evaluate(options.side)), nn.Identity()


def build(options: argparse.Namespace, arm: str) -> int:
    """Build the files of an arm and return their size in bytes, or that of the photographs."""
    parts = split(options.images)
    if arm == "JPEGs":
        return sum(Path(path).stat().st_size for part in parts for path, _ in part)
    (scale, fit, _), total = STORED[arm], 0
    for name, part in zip(("train", "test"), parts, strict=True):
        path = options.data / f"{arm}, {name}.bin"
        if not path.with_suffix(".idx").exists():
            photographs = [(Path(path), label) for path, label in part]
            side = math.ceil(scale * options.side)
            memload.build(photographs, path, size=side, fit=fit, progress=False)
        total += path.stat().st_size
    return total


def result_path(options: argparse.Namespace, arm: str, seed: int, epochs: int) -> Path:
    """Return the file for what a training finds."""
    return options.data / f"{arm}, seed {seed}, {epochs} epochs.json"


def train(options: argparse.Namespace, arm: str, seed: int, epochs: int) -> None:
    """Train a network; write its accuracy in percent and the median seconds of an epoch."""
    from torchvision.models import resnet18

    torch.manual_seed(seed)
    batches = jpegs(options, seed) if arm == "JPEGs" else stored(options, arm, seed)
    training, testing, last_step = batches
    network = resnet18(num_classes=1 + max(label for _, label in split(options.images)[0]))
    network = network.to(DEVICE, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(
        network.parameters(), RATE, momentum=0.9, nesterov=True, weight_decay=DECAY
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, RATE, epochs * len(training), pct_start=min(0.3, WARM_UP / epochs)
    )
    times = [time.perf_counter()]
    for _ in range(epochs):
        for images, labels, *_ in training:
            images = last_step(images.to(DEVICE, non_blocking=True))
            with AUTOCAST:
                scores = network(images.to(memory_format=torch.channels_last))
                loss = nn.functional.cross_entropy(scores, labels.to(DEVICE, non_blocking=True))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
        loss.item()  # waits for the device
        times.append(time.perf_counter())
    network.eval()
    right, count = 0, 0
    with torch.inference_mode(), AUTOCAST:
        for images, labels, *_ in testing:
            scores = network(last_step(images.to(DEVICE)))
            right += (scores.argmax(1) == labels.to(DEVICE)).sum().item()
            count += len(labels)
    later = [end - start for start, end in itertools.pairwise(times[1:])]
    found = {
        "accuracy (%)": 100 * right / count,
        "epoch (s)": statistics.median(later or [times[1] - times[0]]),
    }
    print(f"{arm}, seed {seed}, {epochs} epochs: {found}", file=sys.stderr, flush=True)
    result_path(options, arm, seed, epochs).write_text(json.dumps(found))


def in_processes(options: argparse.Namespace, trainings: list[Any], jobs: int) -> list[Any]:
    """Do the trainings of which nothing is there, so many at a time; return what all found."""
    context = multiprocessing.get_context("spawn")
    missing = [training for training in trainings if not result_path(options, *training).exists()]
    # a new process for each, so that none has threads or memory of the one before
    with ProcessPoolExecutor(jobs, mp_context=context, max_tasks_per_child=1) as pool:
        list(pool.map(partial(train, options), *zip(*missing, strict=True)))
    return [json.loads(result_path(options, *training).read_text()) for training in trainings]


def main() -> None:
    """Train all arms, print, and add a line to ``results/``."""
    usual = {"images": None, "data": None, **NUMBERS}
    options = parse_options(usual, {"epochs": 1, "seeds": 2}, sys.argv[1:])
    if not options.images:
        sys.exit("Give --images a folder that has a folder of photographs for each class.")
    seeds, results = range(options.seeds), {}
    with tempfile.TemporaryDirectory(prefix="memload-benchmark-") as temporary:
        name = f"{options.images.name}, side {options.side}, batch {options.batch}"
        options.data = (options.data or Path(temporary)) / f"{name}, {options.epochs} epochs"
        options.data.mkdir(parents=True, exist_ok=True)
        sizes = [build(options, arm) for arm in ARMS]
        timed = in_processes(options, [(arm, TIMED, TIMED_EPOCHS) for arm in ARMS], 1)
        trainings = [(arm, seed, options.epochs) for arm in ARMS for seed in seeds]
        trained = iter(in_processes(options, trainings, options.jobs))
    for arm, size, alone in zip(ARMS, sizes, timed, strict=True):
        shares = [next(trained)["accuracy (%)"] for _ in seeds]
        deviation = statistics.stdev(shares) if len(shares) > 1 else math.nan
        results[arm] = {
            "accuracy (%)": statistics.mean(shares),
            "standard error (%)": deviation / math.sqrt(len(shares)),
            "seeds": len(shares),
            "epoch (s)": alone["epoch (s)"],
            "stored (bytes)": size,
        }
    parameters = {name: getattr(options, name) for name in NUMBERS}
    record("accuracy", options, NUMBERS, results, parameters | {"images": options.images.name})


if __name__ == "__main__":
    main()
