"""One run of one arm of `cifar10.py`, in a process of its own: files to accuracy, each part timed.

`cifar10.py` starts it and reads what it prints. The clock runs from the start of the process.
"""

import argparse
import itertools
import json
import math
import mmap
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cifar10_network import WHITENED, WHITENING_EPOCHS, Training, accuracy, make_network
from harness import machine, move, wait_for_device
from PIL import Image
from torch import Tensor

import memload

SIDE, PADDING = 32, 2
#: Of CIFAR-10's training pictures, for values from 0 to 1.
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
TENSORS = "tensors.pt"
PARTS = ("start", "build", "first batch", "steps", "test")

Batches = Iterable[tuple[Tensor, Tensor]]


@dataclass
class Setting:
    """What an arm is given."""

    images: Path  #: has train/CLASS/*.jpg and test/CLASS/*.jpg
    built: Path  #: where files are, or are to be built
    batch: int
    workers: int
    seed: int

    @property
    def device(self) -> torch.device:
        """The GPU, or the CPU if there is none."""
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def dtype(self) -> torch.dtype:
        """Half precision on a GPU."""
        return torch.float16 if self.device.type == "cuda" else torch.float32


@dataclass
class Loaders:
    """What an arm trains on, and tests with: each iteration of ``train`` is an epoch."""

    train: Batches
    steps: int  #: in an epoch; a last batch that is not whole is left out
    test: Batches
    classes: int
    raw: Callable[[int], Tensor]  #: random training pictures as they are, normalised
    feed: str = ""


class Normalise:
    """Makes of uint8 images on the device what the network takes."""

    def __init__(self, setting: Setting) -> None:
        self.dtype = setting.dtype
        # made once, as copying them to the GPU waits for it
        values = torch.tensor([MEAN, STD], device=setting.device).view(2, 3, 1, 1) * 255
        self.mean, self.std = values

    def __call__(self, images: Tensor) -> Tensor:
        """Return images of the network's dtype."""
        return ((images.float() - self.mean) / self.std).to(self.dtype)


# ImageFolder


class Flipped:
    """An ImageFolder whose samples are asked for with their epoch: number + epoch × samples.

    The samples whose coin is 1 are flipped in epochs 0, 2, 4, …, the others in epochs 1, 3, 5, …
    """

    def __init__(self, folder: Any, crop: Any, coins: Tensor) -> None:
        self.folder, self.crop, self.coins = folder, crop, coins

    def __len__(self) -> int:
        return len(self.folder)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        from torchvision.transforms.v2 import functional

        epoch, sample = divmod(number, len(self.folder))
        image, label = self.folder[sample]
        image = self.crop(image)
        if (int(self.coins[sample]) + epoch) % 2:
            image = functional.horizontal_flip(image)
        return functional.pil_to_tensor(image), label


class ShuffledEpochs:
    """Sample numbers in a new random order each epoch, with their epoch for `Flipped`."""

    def __init__(self, samples: int) -> None:
        self.samples, self.epoch = samples, 0

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> Iterator[int]:
        start, self.epoch = self.epoch * self.samples, self.epoch + 1
        return iter((start + torch.randperm(self.samples)).tolist())


class Normalised:
    """Batches of a DataLoader, moved to the device and normalised there."""

    def __init__(self, batches: Any, setting: Setting) -> None:
        self.batches, self.device = batches, setting.device
        self.normalise = Normalise(setting)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        started = iter(self.batches)  # workers begin here, before a batch is asked for
        return ((self.normalise(images), labels) for images, labels in move(started, self.device))


def open_image_folders(setting: Setting, _: None) -> Loaders:
    """Return torchvision's ImageFolder in torch's DataLoader, whose workers stay between epochs."""
    from torch.utils.data import DataLoader
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    def raw(count: int) -> Tensor:
        chosen = torch.randperm(len(train))[:count].tolist()
        pictures = [v2.functional.pil_to_tensor(train[sample][0]) for sample in chosen]
        return Normalise(setting)(torch.stack(pictures).to(setting.device))

    workers: dict[str, Any] = {
        "num_workers": setting.workers,
        "pin_memory": setting.device.type == "cuda",
    }
    train = ImageFolder(setting.images / "train")
    coins = torch.randint(0, 2, (len(train),))
    cropped = Flipped(train, v2.RandomCrop(SIDE, PADDING, padding_mode="reflect"), coins)
    batches: Any = DataLoader(
        cropped,  # type: ignore[arg-type]
        setting.batch,
        sampler=ShuffledEpochs(len(train)),
        drop_last=True,
        persistent_workers=setting.workers > 0,
        **workers,
    )
    test: Any = DataLoader(
        ImageFolder(setting.images / "test", v2.PILToTensor()), setting.batch, **workers
    )
    return Loaders(
        Normalised(batches, setting),
        len(batches),
        Normalised(test, setting),
        len(train.classes),
        raw,
    )


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
    classes = sorted(folder.name for folder in (setting.images / part).iterdir())
    files = [sorted((setting.images / part / name).iterdir()) for name in classes]
    paths = [path for of_class in files for path in of_class]
    shape = (len(paths), SIDE, SIDE, 3)
    _shared = np.frombuffer(mmap.mmap(-1, math.prod(shape)), np.uint8).reshape(shape)
    with multiprocessing.get_context("fork").Pool(setting.workers or 1) as pool:
        for _ in pool.imap_unordered(decode, enumerate(paths), chunksize=250):
            pass
    labels = torch.repeat_interleave(torch.tensor([len(of_class) for of_class in files]))
    return torch.from_numpy(_shared), labels


def decode_all(setting: Setting) -> dict[str, tuple[Tensor, Tensor]]:
    """Decode both parts in a pool of processes."""
    return {part: decode_part(setting, part) for part in ("train", "test")}


def load_tensors(setting: Setting) -> dict[str, tuple[Tensor, Tensor]]:
    """Return what `decode_all` returned in an earlier process."""
    return torch.load(setting.built / TENSORS, weights_only=True)


class OnDevice:
    """All training pictures in the device's memory, padded; crops and flips are part of a gather."""

    def __init__(self, pixels: Tensor, labels: Tensor, setting: Setting) -> None:
        padding = (PADDING,) * 4
        planes = pixels.to(setting.device).permute(0, 3, 1, 2)
        padded = [
            torch.nn.functional.pad(some.to(setting.dtype), padding, "reflect").to(torch.uint8)
            for some in planes.split(10_000)
        ]
        self.padded = torch.cat(padded).permute(0, 2, 3, 1).contiguous()
        self.labels, self.setting, self.epoch = labels.to(setting.device), setting, 0
        self.coins = self.random(2, len(labels)).bool()
        self.normalise = Normalise(setting)

    def random(self, below: int, *shape: int) -> Tensor:
        """Return random integers on the device."""
        return torch.randint(0, below, shape, device=self.setting.device)

    def __len__(self) -> int:
        return len(self.labels) // self.setting.batch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        batch, count, device = self.setting.batch, len(self.labels), self.setting.device
        flipped = self.coins ^ bool(self.epoch % 2)
        self.epoch += 1
        order = torch.randperm(count, device=device)
        side = torch.arange(SIDE, device=device)
        for first in range(0, count - batch + 1, batch):
            chosen = order[first : first + batch]
            down, right = self.random(2 * PADDING + 1, 2, batch, 1)
            columns = right + torch.where(flipped[chosen, None], SIDE - 1 - side, side)
            rows = down + side
            images = self.padded[chosen[:, None, None], rows[:, :, None], columns[:, None, :]]
            yield self.normalise(images.permute(0, 3, 1, 2)), self.labels[chosen]

    def raw(self, count: int) -> Tensor:
        """Return random pictures without their padding."""
        chosen = torch.randperm(len(self.labels), device=self.setting.device)[:count]
        inner = slice(PADDING, PADDING + SIDE)
        return self.normalise(self.padded[chosen, inner, inner].permute(0, 3, 1, 2))


class InOrder:
    """All test pictures, in the device's memory."""

    def __init__(self, pixels: Tensor, labels: Tensor, setting: Setting) -> None:
        self.pixels, self.labels = pixels.to(setting.device), labels.to(setting.device)
        self.batch, self.normalise = setting.batch, Normalise(setting)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        parts = (values.split(self.batch) for values in (self.pixels, self.labels))
        for pixels, labels in zip(*parts, strict=True):
            yield self.normalise(pixels.permute(0, 3, 1, 2)), labels


def open_tensors(setting: Setting, tensors: dict[str, tuple[Tensor, Tensor]]) -> Loaders:
    """Return what one writes by hand for a data set that fits in the device's memory."""
    classes = int(tensors["train"][1].max()) + 1
    train = OnDevice(*tensors["train"], setting)
    test = InOrder(*tensors["test"], setting)
    return Loaders(train, len(train), test, classes, train.raw)


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

    def raw(count: int) -> Tensor:
        pixels = dataset.gather(torch.randperm(len(dataset))[:count])
        return Normalise(setting)(pixels.to(setting.device).permute(0, 3, 1, 2))

    recipe = transforms.recipes.airbench(
        SIDE, padding=PADDING, mean=MEAN, std=STD, dtype=setting.dtype
    )
    plain = transforms.Compose([transforms.Normalize(MEAN, STD), transforms.ToDtype(setting.dtype)])
    dataset = memload.MemmapDataset(setting.built / "train.bin")
    train = memload.Loader(
        dataset, setting.batch, shuffle=True, drop_last=True, seed=setting.seed, transform=recipe
    )
    test = memload.Loader(setting.built / "test.bin", setting.batch, transform=plain)
    return Loaders(train, len(train), test, dataset.num_classes, raw, train.feed.name)


# A run


@dataclass
class Arm:
    """A way from files to batches: what comes before the GPU is started, and what comes after."""

    prepare: Callable[[Setting], Any]
    open: Callable[[Setting, Any], Loaders]


def nothing(_: Setting) -> None:
    """Prepare nothing."""


ARMS = {
    "ImageFolder": Arm(nothing, open_image_folders),
    "by hand": Arm(decode_all, open_tensors),
    "by hand, tensors there": Arm(load_tensors, open_tensors),
    "memload, build": Arm(build, open_memload),
    "memload, files there": Arm(nothing, open_memload),
}


class Clock:
    """The seconds of each part, from the start of the process."""

    def __init__(self, started: float) -> None:
        self.started = self.last = started
        self.parts = dict.fromkeys(PARTS, 0.0)
        self.noted: list[Any] = []

    def end(self, part: str) -> None:
        """Count the time since the last part to this one, once the device is done."""
        wait_for_device()
        now = time.perf_counter()
        self.parts[part] += now - self.last
        self.last = now

    def note(self) -> None:
        """Note this moment, on the GPU in the order of its work, without waiting for it."""
        if torch.cuda.is_initialized():
            self.noted.append(torch.cuda.Event(enable_timing=True))
            self.noted[-1].record()
        else:
            self.noted.append(time.perf_counter())

    def moments(self) -> list[float]:
        """Return seconds from the start for all that was noted; the last is when a part ended."""
        last, end = self.noted[-1], self.last - self.started
        if isinstance(last, float):
            return [moment - self.started for moment in self.noted]
        return [end - moment.elapsed_time(last) / 1000 for moment in self.noted]


def run(arm: Arm, setting: Setting, epochs: int, width: float, clock: Clock) -> dict[str, Any]:
    """Train and test; return the accuracy, the losses, and the seconds of each part."""
    clock.end("start")
    prepared = arm.prepare(setting)
    clock.end("build")
    torch.manual_seed(setting.seed)
    torch.zeros(1, device=setting.device)  # starts CUDA
    clock.end("start")

    loaders = arm.open(setting, prepared)
    batches = iter(loaders.train)
    pictures = loaders.raw(WHITENED)  # while workers make the first batch
    first = next(batches)
    clock.end("first batch")

    clock.note()
    network = make_network(pictures, loaders.classes, width)
    steps = epochs * loaders.steps
    training = Training(network, steps, min(steps, WHITENING_EPOCHS * loaders.steps))
    losses = []
    for epoch in range(epochs):
        for images, labels in loaders.train if epoch else itertools.chain([first], batches):
            losses.append(training.step(images, labels))
        clock.note()
    clock.end("steps")
    moments = clock.moments()

    share = accuracy(network, loaders.test)
    clock.end("test")
    if len(losses) != steps:
        raise RuntimeError(f"There were {len(losses)} steps instead of {steps}.")
    return {
        "seconds": clock.last - clock.started,
        **clock.parts,
        "accuracy": share,
        "losses": torch.stack(losses).tolist(),
        "moments": moments,
        "feed": loaders.feed,
    }


def prepare(setting: Setting) -> dict[str, Any]:
    """Leave what the arms find that have their files there; return what this machine is.

    memload's kernels are compiled and stay in Triton's cache.
    """
    torch.save(decode_all(setting), setting.built / TENSORS)
    build(setting)
    loaders = open_memload(setting, None)
    for batches in (loaders.train, loaders.test):
        next(iter(batches))
    return {"machine": machine(), "feed": loaders.feed}


def main() -> None:
    """Run an arm, or prepare, and print what was found as JSON."""
    parser = argparse.ArgumentParser()
    for name in ("images", "built"):
        parser.add_argument(f"--{name}", type=Path)
    for name in ("batch", "workers", "seed", "epochs"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("width", "started"):
        parser.add_argument(f"--{name}", type=float)
    parser.add_argument("--cudnn", choices=("heuristics", "benchmark"))
    parser.add_argument("--arm", choices=ARMS, help="without it: prepare")
    given = parser.parse_args()
    setting = Setting(given.images, given.built, given.batch, given.workers, given.seed)
    torch.backends.cudnn.benchmark = given.cudnn == "benchmark"
    if given.arm is None:
        found = prepare(setting)
    else:
        clock = Clock(given.started)
        found = run(ARMS[given.arm], setting, given.epochs, given.width, clock)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
