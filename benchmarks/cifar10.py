"""From a folder of 60,000 JPEG files to the accuracy on its test files, by the clock on the wall.

    python -m benchmarks.cifar10 --images cifar10/                      # has train/CLASS/*.jpg, test/CLASS/*.jpg
    python -m benchmarks.cifar10 --batches cifar-10-batches-bin/        # makes such a folder
    python -m benchmarks.cifar10 --quick                                # generated, on a CPU, too

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

``--batches`` is the unpacked binary version of CIFAR-10 (https://www.cs.toronto.edu/~kriz/cifar.html).
JPEGs of quality 75 are not the original pictures, for which the network is described with 94 %.
Others report 2 to 3.3 points less with such files, too. ``--only`` runs the arms whose names contain a
word.
"""

import itertools
import json
import math
import mmap
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

import memload
from benchmarks.cifar10_network import Training, accuracy, make_network
from benchmarks.data import made_pictures
from benchmarks.harness import (
    CORES,
    Way,
    cpu_of_children,
    move,
    run_benchmark,
    run_python,
    wait_for_device,
)

SIDE, PADDING, QUALITY = 32, 2, 75
#: Of CIFAR-10's training pictures, for values from 0 to 1.
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.float16 if DEVICE.type == "cuda" else torch.float32

Batches = Iterable[tuple[Tensor, Tensor]]
Tensors = dict[str, tuple[Tensor, Tensor]]


@dataclass
class Setting:
    """What an arm is given."""

    images: Path  #: has train/CLASS/*.jpg and test/CLASS/*.jpg
    built: Path  #: where files are, or are to be built
    batch: int
    workers: int
    epochs: int
    width: float


class Loaders(NamedTuple):
    """What an arm trains on, and tests with: each iteration of ``train`` is an epoch."""

    train: Batches
    steps: int  #: in an epoch; a last batch that is not whole is left out
    test: Batches


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
    return Loaders(Moved(train), len(train), Moved(test))


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
        order, side = (
            torch.randperm(len(self.labels), device=DEVICE),
            torch.arange(SIDE, device=DEVICE),
        )
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
    normalise = Normalise()
    test = [
        (normalise(p.permute(0, 3, 1, 2)), of_them)
        for p, of_them in zip(pixels, labels, strict=True)
    ]
    return Loaders(train, len(train), test)


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
    return Loaders(train, len(train), test)


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


def run(arm: str, setting: Setting, started: float) -> dict[str, float]:
    """Train and test; return the accuracy, and the seconds of each part from the start."""
    parts: dict[str, float] = {}

    def end(part: str) -> None:
        wait_for_device()
        parts[f"{part} (s)"] = (
            parts.get(f"{part} (s)", 0) + time.perf_counter() - started - sum(parts.values())
        )

    prepare, open_loaders = ARMS[arm]
    end("start")
    prepared = prepare(setting)
    end("build")
    torch.zeros(1, device=DEVICE)  # starts CUDA
    end("start")
    loaders = open_loaders(setting, prepared)
    batches = iter(loaders.train)
    first = next(batches)
    end("first batch")
    network = make_network(first[0], len(list((setting.images / "train").iterdir())), setting.width)
    training = Training(network, setting.epochs * loaders.steps, loaders.steps)
    for epoch in range(setting.epochs):
        for images, labels in loaders.train if epoch else itertools.chain([first], batches):
            training.step(images, labels)
    end("steps")
    share = accuracy(network, loaders.test)
    end("test")
    if training.done != training.steps:
        raise RuntimeError(f"There were {training.done} steps instead of {training.steps}.")
    return {"seconds": sum(parts.values()), "accuracy (%)": 100 * share, **parts}


def leave_files(setting: Setting) -> dict[str, float]:
    """Leave what the arms find that have their files there, kernels in Triton's cache, too."""
    torch.save(decode_all(setting), setting.built / "tensors.pt")
    build(setting)
    for batches in open_memload(setting, None)[::2]:
        next(iter(batches))
    return {}


# The benchmark


def write_batches(batches: Path, folder: Path) -> Path:
    """Write the binary version of CIFAR-10 as JPEG files; return their folder."""
    classes = (batches / "batches.meta.txt").read_text().split()
    for part, pattern in (("train", "data_batch_*.bin"), ("test", "test_batch.bin")):
        records = np.concatenate(
            [np.fromfile(file, np.uint8) for file in sorted(batches.glob(pattern))]
        )
        for number, record in enumerate(records.reshape(-1, 1 + 3 * SIDE**2)):
            path = folder / part / classes[record[0]] / f"{number:05d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = record[1:].reshape(3, SIDE, SIDE).transpose(1, 2, 0)
            Image.fromarray(np.ascontiguousarray(pixels)).save(path, quality=QUALITY)
    return folder


def child(arm: str, setting: Setting) -> dict[str, float]:
    """Run an arm in a new process; return what it found, with the CPU time of all its processes."""
    described, kernels = json.dumps(asdict(setting), default=str), str(setting.built / "kernels")
    before, started = cpu_of_children(), time.perf_counter()  # of one clock for all processes
    command = ("-m", "benchmarks.cifar10", "--run", arm, described, started)
    found = run_python(*command, TRITON_CACHE_DIR=kernels)
    return json.loads(found) | {"CPU (s)": cpu_of_children() - before}


def ways(options: Any, folder: Path) -> dict[str, Way]:
    """Return a run of each arm."""
    images, kept = options.images, folder / "kept"
    if options.batches:
        images = write_batches(options.batches, folder / "cifar10")
    elif not images:
        images = folder / "made"
        for part, share in (("train", 5), ("test", 1)):
            made_pictures(images / part, options.pictures * share // 6, size=(SIDE, SIDE))
    kept.mkdir(exist_ok=True)
    facts = {field.name: getattr(options, field.name, None) for field in fields(Setting)}
    setting = Setting(**facts | {"images": images, "built": kept})
    child("", setting)

    def way(arm: str) -> dict[str, float]:
        if arm != "memload, build":
            return child(arm, setting)
        with tempfile.TemporaryDirectory(dir=folder) as fresh:
            return child(arm, Setting(**facts | {"images": images, "built": Path(fresh)}))

    arms = [*ARMS][find_spec("torchvision") is None :]  # all but ImageFolder need no torchvision
    arms = [arm for arm in arms if not options.only or any(word in arm for word in options.only)]
    return {f"{arm}, {options.epochs} epochs": lambda arm=arm: way(arm) for arm in arms}


USUAL: dict[str, Any] = {
    "images": None,
    "batches": None,
    "rounds": 10,
    "epochs": 8,
    "batch": 2000,
    "width": 1.0,
    "workers": CORES,
    "pictures": 6000,
    "only": [],
}
QUICK = {"rounds": 1, "epochs": 2, "batch": 100, "width": 0.125, "pictures": 1200}

if __name__ == "__main__":
    if sys.argv[1:2] != ["--run"]:
        run_benchmark(ways, options=USUAL, quick=QUICK, facts={"pages": "warm"})
        sys.exit()
    given = json.loads(sys.argv[3])
    setting = Setting(**given | {name: Path(given[name]) for name in ("images", "built")})
    arm = sys.argv[2]
    print(json.dumps(run(arm, setting, float(sys.argv[4])) if arm else leave_files(setting)))
