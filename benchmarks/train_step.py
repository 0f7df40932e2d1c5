"""What training a model makes of synthetic data, for each way of feeding.

Synthetic is the same step on one normalised batch that stays on the device, at the beginning of
each round and at its end; a share is of the first, within the round. Batches of 256, bfloat16
autocast, channels-last, SGD, no compilation, random order, pages warm. All ways normalise on the
device and end in bfloat16:

- `Loader` with each feed, from noise of 224×224×3; and the same with `train(224)`, which crops,
  resizes and flips too, from 256×256×3.
- torch's DataLoader over `MemmapDataset` with `fast_collate` and page-locked memory, copied without
  waiting: with as many workers as cores, without any, and without any in memload's prefetchers.
- JPEGs, decoded, resized and cropped by Pillow in a DataLoader of as many workers as cores; those
  below `--jpegs`, or 64 made ones of ImageNet's sizes, again and again.

Every way is warmed up, which also tells how many steps take `--seconds`. In a round each has a turn
of so many steps; with workers, it is at least four batches of each. A turn begins a new iteration,
whose first steps are not timed: a quarter of the others, or with workers one batch of each, so that
batches made before the clock starts do not count. When the clock stops, workers have two more
batches each to make, as within an epoch. The clock starts and stops when the device has done its
work. Cores: CPU time of feeding over the time of the timed steps. Feeding is what the training
thread does to ask for a batch, all other threads but autograd's, and workers.

`--quick` measures the Loaders alone. So does `--mask`, where a mask of the same size comes with each
image and moves with it; the step does not use it. `--recipe imagenet_v2` measures the Loaders with
that recipe, which makes 176×176 of 256×256 and mixes samples; then labels are shares of the classes,
in the synthetic batch, too. Beside them is a DataLoader over the same file, whose workers crop, flip
and augment by torchvision v2; the device normalises and mixes, and nothing is erased. `--toy` shows
on a CPU that all of it runs: few small pictures, and the stem, which is one convolution.
"""

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch
from augmentations import BILINEAR, torchvision_v2
from data import noise_dataset
from harness import move, need_cuda, run_benchmark, settle
from pictures import Numbered, find_jpegs, planes
from torch import Tensor, nn
from torch.utils.data import DataLoader

import memload
from memload import transforms

MODELS = {"resnet50": "ResNet-50", "resnet18": "ResNet-18", "stem": "stem"}
FEEDS = ("dma", "pinned", "resident")
WORKERS = len(os.sched_getaffinity(0))
NORMALISE = transforms.Compose(
    [transforms.Normalize("imagenet"), transforms.ToDtype(torch.bfloat16)]
)
#: Begins a new iteration of at least so many batches.
Begin = Callable[[int], Iterator[Any]]


def make_model(name: str) -> nn.Module:
    """Return a new model; all but the stem are torchvision's."""
    if name == "stem":
        pooled = (nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        return nn.Sequential(nn.Conv2d(3, 16, 7, 8), *pooled, nn.Linear(16, 1000))
    from torchvision import models

    return getattr(models, name)()


class Training:
    """A model and its step, for batches of one shape."""

    def __init__(self, model: nn.Module, device: torch.device, shape: tuple[int, ...] = ()) -> None:
        self.device, self.shape = device, shape
        self.model = model.to(device, memory_format=torch.channels_last)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01, momentum=0.9, fused=True)

    def step(self, images: Tensor, labels: Tensor) -> None:
        """Train on a batch."""
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = nn.functional.cross_entropy(self.model(images), labels)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()

    def now(self) -> float:
        """Return the time when the device has done what it was asked for."""
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return time.perf_counter()


@dataclass
class Feeding:
    """A way of feeding a training."""

    training: Training
    begin: Begin
    workers: int = 1  #: timed steps are a multiple of these, as their batches come together
    seconds: float = 0.6
    steps: int = 0  #: that are timed in each turn, once it is known how long one takes

    def __call__(self) -> dict[str, float]:
        """Take a turn; return images a second and the cores that feeding took."""
        if not self.steps:
            self._warm_up()
        rate, cores, _ = self._run(self.steps)
        return {"images/s": rate, "cores": cores}

    def _warm_up(self) -> None:
        steps, seconds = self.workers, 0.0
        while seconds < self.seconds / 4:
            steps *= 2
            rate, _, seconds = self._run(steps)
        batches_each = round(self.seconds * rate / self.training.shape[0] / self.workers)
        self.steps = self.workers * max(4, batches_each)

    def _run(self, steps: int) -> tuple[float, float, float]:
        """Train for some steps; return images a second, cores and seconds."""
        untimed, ahead = max(4, steps // 4), 0
        if self.workers > 1:
            untimed, ahead = self.workers, 2 * self.workers
        batches = self.begin(untimed + steps + ahead)
        for _ in range(untimed):
            self._step(batches)
        self.training.now()
        before = feeding_time()
        start = self.training.now()
        asking = sum(self._step(batches) for _ in range(steps))
        end = self.training.now()
        cores = (feeding_time() - before + asking) / (end - start)
        for _ in itertools.islice(batches, ahead + 1):
            pass  # the iteration of a DataLoader ends, and its workers are idle
        return steps * self.training.shape[0] / (end - start), cores, end - start

    def _step(self, batches: Iterator[Any]) -> float:
        """Train on the next batch; return the CPU seconds that asking for it took."""
        asked = time.thread_time()
        images, labels, *_ = next(batches)
        asking = time.thread_time() - asked
        self.training.step(images, labels)
        return asking


def feeding_time() -> float:
    """Return CPU seconds so far of all threads but the caller and autograd's, and of workers."""
    total = harness.cpu_seconds() - time.thread_time()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread has ended
            if (task / "comm").read_text().startswith("pt_autograd"):
                total -= int((task / "schedstat").read_text().split()[0]) / 1e9
    return total


def read_by_loaders(
    options: Any, folder: Path, side: int, larger_side: int
) -> dict[str, tuple[Path, transforms.Compose]]:
    """Return what the Loaders read, and their transforms, by what follows the Loader's name."""
    larger = noise_dataset(folder, options.images // 2, larger_side, masks=options.masks)
    if options.recipe == "imagenet_v2":
        recipe = transforms.recipes.imagenet_v2(side, dtype=torch.bfloat16)
        return {f", imagenet_v2({side})": (larger, recipe)}
    exact = noise_dataset(folder, options.images, side, masks=options.masks)
    crop = transforms.train(side, dtype=torch.bfloat16)
    return {"": (exact, NORMALISE), f", train({side})": (larger, crop)}


def synthetic_batch(training: Training, soft: bool) -> tuple[Tensor, Tensor]:
    """Return normalised images, and labels: numbers or, ``soft``, the shares of mixed classes."""
    images = torch.randn(training.shape, device=training.device, dtype=torch.bfloat16)
    labels = torch.randint(0, 1000, training.shape[:1], device=training.device)
    if soft:
        shares = nn.functional.one_hot(labels, 1000).float()
        labels = shares.lerp(shares.roll(1, 0), 0.25)
    return images.to(memory_format=torch.channels_last), labels


def loaders(
    training: Training, read: dict[str, tuple[Path, transforms.Compose]], feeds: Iterable[Any]
) -> dict[str, Begin]:
    """Return the Loaders."""

    def forever(loader: Any, _: int) -> Iterator[Any]:
        while True:
            yield from loader

    found: dict[str, Begin] = {}
    settings: dict[str, Any] = {"shuffle": True, "drop_last": True, "device": training.device}
    for kind, (path, transform) in read.items():
        for feed in feeds:
            loader = memload.Loader(
                path, training.shape[0], feed=feed, transform=transform, **settings
            )
            if feed == "dma":
                settle(loader, 2.0)
            found[f"Loader, {feed}{kind}"] = partial(forever, loader)
    return found


def in_data_loader(
    dataset: Any, batch: int, workers: int, around: Callable[[Any], Iterable[Any]]
) -> tuple[Begin, int]:
    """Return torch's DataLoader with something around it, and its number of workers or 1."""
    random = np.random.default_rng(0)
    chosen: list[int] = []  # exactly the samples of a turn, so that workers are idle in others'
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch,
        sampler=chosen,
        num_workers=workers,
        persistent_workers=workers > 0,
        collate_fn=memload.fast_collate,
        pin_memory=torch.cuda.is_available(),
    )

    def begin(batches: int) -> Iterator[Any]:
        chosen[:] = random.integers(0, len(dataset), batches * batch).tolist()
        return iter(around(loader))

    return begin, max(1, workers)


def data_loaders(
    training: Training, exact: Path, jpegs: list[Path], workers: int
) -> dict[str, tuple[Begin, int]]:
    """Return torch's DataLoader, and what is put around it, with the number of workers."""
    batch, _, side, _ = training.shape
    device = training.device

    def in_loop(batches: Iterable[Any]) -> Iterator[Any]:
        for images, labels in move(batches, device):
            yield NORMALISE(images), labels

    def in_thread(loader: Any) -> Iterable[Any]:
        return in_loop(memload.ThreadPrefetcher(loader))

    def on_stream(loader: Any) -> Iterable[Any]:
        return memload.CudaPrefetcher(loader, device=device, transform=NORMALISE)

    mapped = memload.MemmapDataset(exact)
    decoded = Numbered(jpegs[:1000], partial(planes, side=side))
    return {
        f"DataLoader, {workers} workers": in_data_loader(mapped, batch, workers, in_loop),
        "DataLoader, no workers": in_data_loader(mapped, batch, 0, in_loop),
        "the same in ThreadPrefetcher": in_data_loader(mapped, batch, 0, in_thread),
        "the same in CudaPrefetcher": in_data_loader(mapped, batch, 0, on_stream),
        f"JPEGs in a DataLoader, {workers} workers": in_data_loader(
            decoded, batch, workers, in_loop
        ),
    }


def augmenting_data_loader(
    training: Training, stored: Path, workers: int
) -> dict[str, tuple[Begin, int]]:
    """Return torch's DataLoader whose workers augment, if torchvision is installed."""
    v2 = torchvision_v2()
    if not v2:
        return {}
    batch, _, side, _ = training.shape
    trivial = v2.TrivialAugmentWide(interpolation=BILINEAR)
    augment = v2.Compose([v2.RandomResizedCrop(side), v2.RandomHorizontalFlip(), trivial])
    mix = v2.RandomChoice([
        v2.MixUp(alpha=0.2, num_classes=1000), v2.CutMix(alpha=1.0, num_classes=1000)
    ])  # fmt: skip

    def in_loop(batches: Iterable[Any]) -> Iterator[Any]:
        for images, labels in move(batches, training.device):
            yield mix(NORMALISE(images), labels)

    mapped = memload.MemmapDataset(stored, transform=augment)
    made = in_data_loader(mapped, batch, workers, in_loop)
    return {f"DataLoader, {workers} workers, torchvision v2": made}


def ways(options: Any, folder: Path) -> dict[str, harness.Way]:
    """Return a turn of each way of feeding."""
    if toy := options.toy:
        torch.set_num_threads(1)  # the others would be taken for feeding
        options.model, options.images, options.seconds = "stem", min(400, options.images), 0.05
    else:
        need_cuda("--toy shows on a CPU that all of it runs.")
    torch.backends.cudnn.benchmark = True
    mixes = options.recipe == "imagenet_v2"
    batch, side, larger_side = (16, 64, 72) if toy else (256, 176 if mixes else 224, 256)
    device = torch.device("cpu") if toy else torch.device("cuda", torch.cuda.current_device())
    training = Training(make_model(options.model), device, (batch, 3, side, side))
    # as the results name it
    options.model = MODELS[options.model] + " with masks" * options.masks
    options.model += " with imagenet_v2" * mixes
    read = read_by_loaders(options, folder, side, larger_side)
    batch_on_device = synthetic_batch(training, soft=mixes)

    def feeding(begin: Begin, workers: int = 1) -> Feeding:
        return Feeding(training, begin, workers, options.seconds)

    synthetic = feeding(lambda count: itertools.repeat(batch_on_device))
    found = {"synthetic": synthetic}
    for name, begin in loaders(training, read, ("cpu",) if toy else FEEDS).items():
        found[name] = feeding(begin)
    others: dict[str, tuple[Begin, int]] = {}
    if mixes and not options.quick:
        ((stored, _),) = read.values()
        others = augmenting_data_loader(training, stored, options.workers)
    elif not (options.quick or options.masks):
        jpegs = find_jpegs(options.jpegs, folder / "jpegs", 8 if toy else 64)
        others = data_loaders(training, read[""][0], jpegs, options.workers)
    for name, made in others.items():
        found[name] = feeding(*made)
    return found | {"synthetic, again": synthetic}


if __name__ == "__main__":
    kinds = ("", ", train(224)", ", imagenet_v2(176)")
    fed = [f"Loader, {feed}{kind}" for feed in ("cpu", *FEEDS) for kind in kinds]
    fed += ["DataLoader, no workers", "the same in ThreadPrefetcher", "the same in CudaPrefetcher"]
    fed += [f"DataLoader, {WORKERS} workers, torchvision v2"]
    fed += [f"DataLoader, {WORKERS} workers", f"JPEGs in a DataLoader, {WORKERS} workers"]
    run_benchmark(
        ways,
        options={
            "model": tuple(MODELS),
            "recipe": ("train", "imagenet_v2"),
            "rounds": 5,
            "seconds": 0.6,
            "images": 20_000,
            "workers": WORKERS,
            "jpegs": None,
            "masks": False,
            "toy": False,
        },
        quick={"images": 10_000, "rounds": 4},
        ratios={
            f"{name} › share of synthetic": (f"{name} › images/s", "synthetic › images/s")
            for name in [*fed, "synthetic, again"]
        },
        facts={"pages": "warm", "batch": 256},
    )
