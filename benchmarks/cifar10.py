"""From a folder of 60,000 JPEG files to the accuracy on its test files, by the clock on the wall.

    python -m benchmarks.cifar10 --images cifar10/    # has train/CLASS/*.jpg and test/CLASS/*.jpg
    python -m benchmarks.cifar10 --quick              # made pictures, on a CPU, too

This makes such a folder:

    for part in ("train", "test"):
        pictures = torchvision.datasets.CIFAR10(".", part == "train", download=True)
        for number, (image, label) in enumerate(pictures):
            path = Path("cifar10", part, pictures.classes[label], f"{number:05d}.jpg")
            path.parent.mkdir(parents=True, exist_ok=True)
            image.save(path, quality=75)

The clock runs from the start of a new process to the printed accuracy, with all imports, the start of
CUDA and whatever else a first batch takes. Nothing is compiled but memload's kernels. The arms:

- ImageFolder: torchvision's, in a DataLoader whose workers stay between epochs; it crops and flips in
  the workers and normalises on the GPU.
- by hand: what one would write for this data set alone, the limit. A pool of processes decodes the
  files into one tensor, which is kept on the GPU as uint8. Crops and flips are part of the gather of
  a batch.
- by hand, tensors there: the same from a file of that tensor.
- memload, build: `memload.build` for both parts, then the `Loader`, with an empty cache of kernels, as
  when it is used for the first time on a machine.
- memload, files there: the second time.

All train the same network in the same steps (`cifar10_network.py`), with crops of a padding of two
reflected pixels and flips, in half precision on a GPU. Only the random order and draws differ. Files
and libraries are in the page cache.

The parts: "start" is Python, torch and CUDA. "build" ends when all pictures are decoded. "first batch"
ends when one is on the GPU, normalised. "steps" is from making the network to the last step. "test"
averages six views of each test picture.

JPEGs of quality 75 are not the original pictures, for which the network is described with 94 %.
Others report 2 to 3.3 points less with such files, too.
"""

import argparse
import itertools
import math
import mmap
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

import memload
from benchmarks.cifar10_network import Training, accuracy, make_network
from benchmarks.data import made_pictures
from benchmarks.harness import (
    CORES,
    Benchmark,
    Child,
    Way,
    cpu_of_children,
    move,
    run,
    wait_for_device,
)

SIDE, PADDING = 32, 2
#: Of CIFAR-10's training pictures, for values from 0 to 1.
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.float16 if DEVICE.type == "cuda" else torch.float32

#: What an arm trains on, whose iterations are epochs, and what it tests with.
Loaders = tuple[Any, Iterable[tuple[Tensor, Tensor]]]
#: The options of the command line, with ``images``, which has train/CLASS/*.jpg and test/CLASS/*.jpg,
#: and ``built``, where files are or are to be built.
Setting = argparse.Namespace
Tensors = dict[str, tuple[Tensor, Tensor]]


class Normalise:
    """Makes of uint8 images on the device what the network takes."""

    def __init__(self) -> None:
        # made once, as copying them to the GPU waits for it
        values = torch.tensor([MEAN, STD], device=DEVICE).view(2, 3, 1, 1) * 255
        self.mean, self.std = values

    def __call__(self, images: Tensor) -> Tensor:
        """Return images of the network's dtype."""
        return ((images.float() - self.mean) / self.std).to(DTYPE)


# ImageFolder


class Moved:
    """Batches of a DataLoader, moved to the device and normalised there."""

    def __init__(self, batches: Any) -> None:
        self.batches, self.normalise = batches, Normalise()

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for images, labels in move(self.batches, DEVICE):
            yield self.normalise(images), labels


def open_image_folders(setting: Setting, _: None) -> Loaders:
    """Return torchvision's ImageFolder in torch's DataLoader, whose workers stay between epochs."""
    from torch.utils.data import DataLoader
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    options: dict[str, Any] = {"num_workers": setting.workers, "pin_memory": DEVICE.type == "cuda"}
    crop = v2.RandomCrop(SIDE, PADDING, padding_mode="reflect")
    steps = v2.Compose([crop, v2.RandomHorizontalFlip(), v2.PILToTensor()])
    train = DataLoader(
        ImageFolder(setting.images / "train", steps),
        setting.batch,
        shuffle=True,
        drop_last=True,
        persistent_workers=setting.workers > 0,
        **options,
    )
    test = DataLoader(
        ImageFolder(setting.images / "test", v2.PILToTensor()), setting.batch, **options
    )
    return Moved(train), Moved(test)


# By hand

#: The pictures of the part that is being decoded, in memory that all processes share.
_shared: np.ndarray = np.empty(0)


def decode(job: tuple[int, Path]) -> None:
    """Decode a file into its row of the shared memory."""
    row, path = job
    with Image.open(path) as image:
        _shared[row] = np.asarray(image.convert("RGB"))


def decode_part(setting: Setting, part: str) -> tuple[Tensor, Tensor]:
    """Return all pictures of a part, uint8 (N, 32, 32, 3), and their labels."""
    global _shared  # noqa: PLW0603  # the processes of the pool inherit it
    classes = sorted((setting.images / part).iterdir())
    files = [sorted(folder.iterdir()) for folder in classes]
    paths = [path for of_class in files for path in of_class]
    shape = (len(paths), SIDE, SIDE, 3)
    _shared = np.frombuffer(mmap.mmap(-1, math.prod(shape)), np.uint8).reshape(shape)
    with multiprocessing.get_context("fork").Pool(setting.workers or 1) as pool:
        for _ in pool.imap_unordered(decode, enumerate(paths), chunksize=250):
            pass
    labels = torch.repeat_interleave(torch.tensor([len(of_class) for of_class in files]))
    return torch.from_numpy(_shared), labels


def decode_all(setting: Setting) -> Tensors:
    """Decode both parts in a pool of processes."""
    return {part: decode_part(setting, part) for part in ("train", "test")}


def load_tensors(setting: Setting) -> Tensors:
    """Return what `decode_all` returned in an earlier process."""
    return torch.load(setting.built / "tensors.pt", weights_only=True)


class OnDevice:
    """All training pictures in the device's memory, padded; crops and flips are part of a gather."""

    def __init__(self, pixels: Tensor, labels: Tensor, batch: int) -> None:
        planes = pixels.to(DEVICE).permute(0, 3, 1, 2)
        padded = [
            torch.nn.functional.pad(some.to(DTYPE), (PADDING,) * 4, "reflect").to(torch.uint8)
            for some in planes.split(10_000)
        ]
        self.padded = torch.cat(padded).permute(0, 2, 3, 1).contiguous()
        self.labels, self.batch, self.normalise = labels.to(DEVICE), batch, Normalise()

    def __len__(self) -> int:
        return len(self.labels) // self.batch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(self.labels), device=DEVICE)
        side = torch.arange(SIDE, device=DEVICE)
        for chosen in order[: len(self) * self.batch].split(self.batch):
            shape = (2, self.batch, 1)
            down, right = torch.randint(0, 2 * PADDING + 1, shape, device=DEVICE)
            flipped = torch.rand(self.batch, 1, device=DEVICE) < 0.5
            columns = right + torch.where(flipped, SIDE - 1 - side, side)
            rows = down + side
            images = self.padded[chosen[:, None, None], rows[:, :, None], columns[:, None, :]]
            yield self.normalise(images.permute(0, 3, 1, 2)), self.labels[chosen]


def open_tensors(setting: Setting, tensors: Tensors) -> Loaders:
    """Return what one writes by hand for a data set that fits in the device's memory."""
    train = OnDevice(*tensors["train"], setting.batch)
    pixels, labels = (values.to(DEVICE).split(setting.batch) for values in tensors["test"])
    images = [train.normalise(part.permute(0, 3, 1, 2)) for part in pixels]
    return train, list(zip(images, labels, strict=True))


# memload


def build(setting: Setting) -> None:
    """Build both parts, as `memload build` does."""
    options: Any = {"size": SIDE, "progress": False}
    train, test = (setting.built / f"{part}.bin" for part in ("train", "test"))
    memload.build(setting.images / "train", train, **options)
    memload.build(setting.images / "test", test, classes=train, **options)


def open_memload(setting: Setting, _: None) -> Loaders:
    """Return memload's Loaders."""
    from memload import transforms

    plain = [transforms.Normalize(MEAN, STD), transforms.ToDtype(DTYPE)]
    crop = transforms.RandomCrop(SIDE, padding=PADDING, padding_mode="reflect")
    steps = transforms.Compose([crop, transforms.RandomHorizontalFlip(), *plain])
    options: dict[str, Any] = {"shuffle": True, "drop_last": True, "transform": steps}
    seed = int(torch.initial_seed() % 2**31)
    train = memload.Loader(setting.built / "train.bin", setting.batch, seed=seed, **options)
    test = memload.Loader(
        setting.built / "test.bin", setting.batch, transform=transforms.Compose(plain)
    )
    return train, test


# A run


def nothing(_: Setting) -> None:
    """Prepare nothing."""


#: What comes before the GPU is started, and what comes after, by arm.
ARMS: dict[str, tuple[Callable[[Setting], Any], Callable[[Setting, Any], Loaders]]] = {
    "ImageFolder": (nothing, open_image_folders),
    "by hand": (decode_all, open_tensors),
    "by hand, tensors there": (load_tensors, open_tensors),
    "memload, build": (build, open_memload),
    "memload, files there": (nothing, open_memload),
}


def run_arm(setting: Setting, arm: str, started: float) -> dict[str, float]:
    """Train and test; return the accuracy, and the seconds of each part from the start."""
    parts: dict[str, float] = {}

    def end(part: str) -> None:
        wait_for_device()
        seconds = time.perf_counter() - started - sum(parts.values())
        parts[f"{part} (s)"] = parts.get(f"{part} (s)", 0) + seconds

    prepare, open_loaders = ARMS[arm]
    end("start")
    prepared = prepare(setting)
    end("build")
    torch.zeros(1, device=DEVICE)  # starts CUDA
    end("start")
    train, test = open_loaders(setting, prepared)
    batches = iter(train)
    first = next(batches)
    end("first batch")
    network = make_network(first[0], len(list((setting.images / "train").iterdir())), setting.width)
    training = Training(network, setting.epochs * len(train), len(train))
    for epoch in range(setting.epochs):
        for images, labels in train if epoch else itertools.chain([first], batches):
            training.step(images, labels)
    end("steps")
    share = accuracy(network, test)
    end("test")
    if training.done != training.steps:
        raise RuntimeError(f"There were {training.done} steps instead of {training.steps}.")
    return {"seconds": sum(parts.values()), "accuracy (%)": 100 * share, **parts}


def leave_files(setting: Setting) -> None:
    """Leave what the arms find that have their files there, kernels in Triton's cache, too."""
    torch.save(decode_all(setting), setting.built / "tensors.pt")
    build(setting)
    for batches in open_memload(setting, None):
        next(iter(batches))


# The benchmark


def in_process(setting: Setting, function: str, *arguments: Any) -> Any:
    """Return what a function of this module returns in a new process."""
    child = Child("cifar10", TRITON_CACHE_DIR=str(setting.built / "kernels"))
    try:
        return child.ask(function, setting, *arguments)
    finally:
        child.end()


def ways(options: Any, folder: Path) -> dict[str, Way]:
    """Return a run of each arm."""
    images, kept = options.images or folder / "made", folder / "kept"
    if not options.images:
        for part, share in (("train", 5), ("test", 1)):
            count = options.pictures * share // 6
            made_pictures(images / part, count, size=(SIDE, SIDE))
    kept.mkdir(exist_ok=True)
    setting = Setting(**vars(options) | {"images": images, "built": kept})
    in_process(setting, "leave_files")

    def way(arm: str) -> dict[str, float]:
        with tempfile.TemporaryDirectory(dir=folder) as fresh:
            setting.built = Path(fresh) if arm == "memload, build" else kept
            cpu, started = cpu_of_children(), time.perf_counter()  # of one clock for all processes
            found = in_process(setting, "run_arm", arm, started)
            return found | {"CPU (s)": cpu_of_children() - cpu}

    arms = [*ARMS][find_spec("torchvision") is None :]  # all but ImageFolder need no torchvision
    return {f"{arm}, {options.epochs} epochs": partial(way, arm) for arm in arms}


BENCHMARKS = {
    "cifar10": Benchmark(
        ways,
        {
            "images": None,
            "rounds": 10,
            "epochs": 8,
            "batch": 2000,
            "width": 1.0,
            "workers": CORES,
            "pictures": 6000,
        },
        quick={"rounds": 1, "epochs": 2, "batch": 100, "width": 0.125, "pictures": 1200},
        facts={"pages": "warm"},
    )
}

if __name__ == "__main__":
    run(BENCHMARKS)
