"""memload beside what one would pick instead, from the same pictures to shuffled batches.

    python -m benchmarks.compare --images photographs/ --python FFCV=ffcv/bin/python
    CUDA_VISIBLE_DEVICES= taskset -c 0,1 python -m benchmarks.compare    # on two cores

Batches are (256, 3, 224, 224) uint8. Where there is a GPU they end there, through page-locked memory
and without waiting. ``pip install '.[bench]'`` in a new environment installs all but FFCV, which
compiles against OpenCV, in an environment of its own. torch and torchvision have to be of one build,
both for the CPU or both for CUDA.

Each way runs in a process of its own. One that is not installed, fails or hangs is a line in the
table; once the rounds have begun, it ends the run. Each is set up as its own documentation recommends
for data that fits in memory. The JPEGs below ``--images``, or made ones, are copied until there are
``--count``, or three batches a worker; those that are neither RGB nor grey, or have an orientation,
are left out, so that all decoders give the same. ``--only`` measures the ways whose name contains a
word.

In each round every way takes whole epochs, for ``--seconds`` at least. images/s are those behind the
first batches of an epoch, one for each worker, to its end. Cores are CPU time of all processes of a
way over the time of its rounds. Before, a whole epoch is checked: every picture comes once, and 64
pictures are those of Pillow's decoder and torchvision's Resize and CenterCrop, or so near (PSNR).
Ways that decode in training have three batches a worker, as their rate does not depend on more.
"""

import argparse
import atexit
import os
import re
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader

import memload
from benchmarks.data import Numbered, find_jpegs, planes
from benchmarks.harness import (
    CORES,
    Benchmark,
    Child,
    ChildError,
    Way,
    cpu_seconds,
    move,
    named_ways,
    rate_behind,
    run,
)

SIDE = 224
IS_CUDA = torch.cuda.is_available()
DEVICE = "cuda" if IS_CUDA else "cpu"


@dataclass(frozen=True)
class Job:
    """What to store or to read, and how."""

    folder: Path  #: has images/, pixels.npy of all images, and what contenders store
    count: int
    batch: int
    workers: int

    @property
    def files(self) -> list[str]:
        """The pictures; the place in this list is the label."""
        return sorted(map(str, (self.folder / "images").iterdir()))[: self.count]

    @property
    def pixels(self) -> np.ndarray:
        """All pictures, (count, 3, side, side), decoded."""
        # copy-on-write, as torch wants memory that it may write to
        return np.load(self.folder / "pixels.npy", mmap_mode="c")

    def options(self) -> dict[str, Any]:
        """Return what every kind of DataLoader is given."""
        workers = {"num_workers": self.workers, "persistent_workers": self.workers > 0}
        return {"batch_size": self.batch, "pin_memory": IS_CUDA, **workers}

    def data_loader(self, dataset: Any, **options: Any) -> Iterable[Any]:
        """Return torch's DataLoader in random order."""
        return DataLoader(dataset, shuffle=True, **self.options(), **options)


class Converted:
    """The batches of a loader, made ``(images, labels)``."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return ((batch["image"], batch["label"]) for batch in self.loader)


def unchanged(batch: Any) -> Any:
    """Collate what already is a batch."""
    return batch


# How each stores pictures, and reads them


def store_memload(job: Job) -> None:
    """Build by a table, whose labels are the numbers."""
    rows = [f"{Path(path).name},{number}" for number, path in enumerate(job.files)]
    table = job.folder / "numbers.csv"
    table.write_text("\n".join(["path,label", *rows, ""]))
    source = memload.open_source(table, root=job.folder / "images")
    memload.build(source, job.folder / "out.bin", size=SIDE, progress=False)


def read_memload(feed: Any, job: Job) -> Iterable[Any]:
    """Return the Loader."""
    options: dict[str, Any] = {"device": DEVICE, "feed": feed, "num_threads": job.workers}
    return memload.Loader(job.folder / "out.bin", job.batch, shuffle=True, **options)


def read_fast_collate(job: Job) -> Iterable[Any]:
    """Return torch's DataLoader with memload's data set and collate function."""
    dataset = memload.MemmapDataset(job.folder / "out.bin")
    return job.data_loader(dataset, collate_fn=memload.fast_collate)


def read_numpy(job: Job) -> Iterable[Any]:
    """Return torch's DataLoader over a memory map, with its own collate function."""
    return job.data_loader(Numbered(job.pixels, torch.from_numpy))


class Indexed(Numbered):
    """Pictures of which DataLoader takes a whole batch by one index."""

    def __getitems__(self, numbers: list[int]) -> tuple[Any, Any]:
        return self.load(self.items[numbers]), torch.tensor(numbers)


def read_indexed(job: Job) -> Iterable[Any]:
    """Return torch's DataLoader, which takes whole batches from the memory map by one index."""
    # an ordinary array, as parts of a memory map would be memory maps, slowly
    return job.data_loader(Indexed(np.asarray(job.pixels), torch.from_numpy), collate_fn=unchanged)


def store_tensordict(job: Job) -> None:
    """Fill memory-mapped tensors."""
    from tensordict import TensorDict

    columns = {"image": torch.from_numpy(job.pixels), "label": torch.arange(job.count)}
    TensorDict(columns, batch_size=[job.count]).memmap(job.folder / "tensordict")


def read_tensordict(job: Job) -> Iterable[Any]:
    """Return torch's DataLoader, which takes whole batches from a TensorDict by one index."""
    from tensordict import TensorDict

    data = TensorDict.load_memmap(job.folder / "tensordict")
    return Converted(job.data_loader(data, collate_fn=unchanged))


def rows_of(pixels: np.ndarray, number: int) -> np.ndarray:
    """Return the pixels of a picture, (side, side, 3), as FFCV stores them."""
    return np.ascontiguousarray(pixels[number].transpose(1, 2, 0))


def store_ffcv(job: Job) -> None:
    """Write raw pixels."""
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter

    fields = {"image": RGBImageField(write_mode="raw"), "label": IntField()}
    writer = DatasetWriter(str(job.folder / "data.beton"), fields, num_workers=CORES)
    samples = Numbered(range(job.count), partial(rows_of, job.pixels))
    writer.from_indexed_dataset(samples, shuffle_indices=False)


def read_ffcv(job: Job) -> Iterable[Any]:
    """Return FFCV's Loader."""
    from ffcv.fields.decoders import IntDecoder, SimpleRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import Squeeze, ToDevice, ToTensor, ToTorchImage

    device = torch.device(DEVICE, 0 if IS_CUDA else None)
    to_device = [ToDevice(device, non_blocking=True)] if IS_CUDA else []
    return Loader(
        str(job.folder / "data.beton"),
        batch_size=job.batch,
        num_workers=job.workers,
        order=OrderOption.RANDOM,
        os_cache=True,
        drop_last=False,
        pipelines={
            "image": [SimpleRGBImageDecoder(), ToTensor(), *to_device, ToTorchImage()],
            "label": [IntDecoder(), ToTensor(), Squeeze(), *to_device],
        },
    )


def sample_of(pixels: np.ndarray, number: int) -> dict[str, Any]:
    """Return what LitData stores."""
    return {"image": torch.from_numpy(np.array(pixels[number])), "label": number}


def store_litdata(job: Job) -> None:
    """Write chunks of tensors."""
    for number, kind in enumerate(("CACHE_FOLDER", "DATA_CACHE_FOLDER")):  # read at the import
        os.environ[f"DATA_OPTIMIZER_{kind}"] = str(job.folder / f"litdata-{number}")
    from litdata import optimize

    write: Any = partial(optimize, num_workers=CORES, start_method="fork", verbose=False)
    numbers, folder = list(range(job.count)), str(job.folder / "litdata")
    write(partial(sample_of, job.pixels), numbers, folder, chunk_bytes="64MB")


def read_litdata(job: Job) -> Iterable[Any]:
    """Return LitData's loader of local chunks, which it maps into memory."""
    from litdata import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(str(job.folder / "litdata"), shuffle=True, drop_last=False)
    return Converted(StreamingDataLoader(dataset, **job.options()))


def store_lance(job: Job) -> None:
    """Write a column of pixels, as lists of one length, in parts of 256 pictures."""
    import lance
    import pyarrow

    def parts() -> Iterator[Any]:
        for start in range(0, job.count, 256):
            rows = np.array(job.pixels[start : start + 256]).reshape(-1)
            images = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(rows), 3 * SIDE**2)
            labels = pyarrow.array(range(start, start + len(images)))
            yield pyarrow.record_batch([images, labels], ["image", "label"])

    schema = next(parts()).schema
    lance.write_dataset(parts(), job.folder / "data.lance", schema)


class LanceRows:
    """Rows of a Lance data set, opened by each process, of which a whole batch is taken at once."""

    def __init__(self, path: str, count: int) -> None:
        self.path, self.count, self.opened = path, count, None

    def __len__(self) -> int:
        return self.count

    def __getitems__(self, numbers: list[int]) -> tuple[Any, Any]:
        import lance

        self.opened = self.opened or lance.dataset(self.path)
        table = self.opened.take(numbers)
        pixels = table["image"].combine_chunks().flatten().to_numpy()
        images = torch.from_numpy(pixels.reshape(len(table), 3, SIDE, SIDE))
        return images, torch.from_numpy(table["label"].to_numpy())


def read_lance(job: Job) -> Iterable[Any]:
    """Return torch's DataLoader over a Lance data set, whose workers are not forked."""
    rows = LanceRows(str(job.folder / "data.lance"), job.count)
    context = {"multiprocessing_context": "forkserver"} if job.workers else {}
    return job.data_loader(rows, collate_fn=unchanged, **context)


def by_torchvision(path: str) -> torch.Tensor:
    """Decode and resize with torchvision alone, on tensors."""
    from torchvision.io import ImageReadMode, decode_jpeg, read_file
    from torchvision.transforms.v2 import functional

    pixels = decode_jpeg(read_file(path), mode=ImageReadMode.RGB)
    return functional.center_crop(functional.resize(pixels, [SIDE], antialias=True), [SIDE, SIDE])


def read_jpegs(load: Callable[[str], torch.Tensor], job: Job) -> Iterable[Any]:
    """Return torch's DataLoader over the files themselves."""
    return job.data_loader(Numbered(job.files, load))


@dataclass(frozen=True)
class Contender:
    """A way to store pictures, unless it reads the JPEGs or pixels.npy, and to read them."""

    read: Callable[[Job], Iterable[Any]]
    store: Callable[[Job], None] | None = None
    counts: tuple[int, ...] = (CORES,)  #: of workers
    decodes: bool = False


BOTH = (CORES, 0)
LOADERS = {"memload, Loader": "cpu"}
if IS_CUDA:
    LOADERS = {f"memload, Loader, {feed}": feed for feed in ("dma", "pinned")}
#: What is compared, by its name in the table. The first that is measured is memload's best.
CONTENDERS = {
    **{
        name: Contender(partial(read_memload, feed), store_memload)
        for name, feed in LOADERS.items()
    },
    "memload, DataLoader + fast_collate": Contender(read_fast_collate, store_memload, (0,)),
    "FFCV, raw": Contender(read_ffcv, store_ffcv),
    "NumPy memmap, a batch by one index": Contender(read_indexed, counts=BOTH),
    "NumPy memmap, default collate": Contender(read_numpy, counts=BOTH),
    "tensordict, memory-mapped": Contender(read_tensordict, store_tensordict, BOTH),
    "LitData, tensors": Contender(read_litdata, store_litdata, BOTH),
    "Lance, lists of pixels": Contender(read_lance, store_lance, BOTH),
    "JPEG, DataLoader, torchvision.io": Contender(
        partial(read_jpegs, by_torchvision), decodes=True
    ),
    "JPEG, DataLoader, Pillow": Contender(
        partial(read_jpegs, partial(planes, side=SIDE)), decodes=True
    ),
}
#: Title and number of workers, by the name in the table.
NAMES = {
    title if workers else f"{title}, no workers": (title, workers)
    for title, contender in CONTENDERS.items()
    for workers in contender.counts
}


# What a process of its own does

#: The job and the loader of this process.
opened = argparse.Namespace()


def open_contender(title: str, folder: str, *numbers: int) -> dict[str, Any]:
    """Store pictures unless it is done, open them, and check them."""
    warnings.simplefilter("ignore")
    contender, opened.job = CONTENDERS[title], Job(Path(folder), *numbers)
    if contender.store and not (done := opened.job.folder / contender.store.__name__).exists():
        contender.store(opened.job)
        done.touch()
    opened.loader = contender.read(opened.job)
    return {"pixels": checked(opened.loader, opened.job)}


def take_epochs(seconds: float) -> dict[str, float]:
    """Measure whole epochs, for so many seconds at least."""
    before, start = cpu_seconds(), time.perf_counter()
    untimed = max(1, opened.job.workers)
    rate = rate_behind(lambda: move(opened.loader, DEVICE), untimed, seconds)()
    return {"images/s": rate, "cores": (cpu_seconds() - before) / (time.perf_counter() - start)}


def checked(loader: Iterable[Any], job: Job) -> str:
    """Take an epoch in which every picture has to come once; tell how near its pixels are."""
    seen, errors, pixels = [], [], job.pixels
    for images, labels in move(loader, DEVICE):
        numbers = labels.flatten().tolist()
        for number, image in zip(numbers[: 64 - len(errors)], images, strict=False):
            difference = pixels[number].astype(float) - image.cpu().numpy()
            errors.append(float(np.mean(difference**2)))
        seen += numbers
    if sorted(seen) != list(range(job.count)):
        raise ValueError(
            f"an epoch has {len(seen)} pictures, {len(set(seen))} different, not {job.count}"
        )
    if not any(errors):
        return "equal"
    # 99 dB for a picture without any difference
    found = [float(10 * np.log10(255**2 / error)) if error else 99.0 for error in errors]
    return f"{statistics.median(found):.0f} dB, {min(found):.0f} at the least"


# What the parent does


def usable(path: Path) -> bool:
    """Tell whether all decoders give the same picture of a JPEG."""
    with Image.open(path) as image:
        return image.mode in ("RGB", "L") and image.getexif().get(0x0112, 1) == 1  # is upright


def write_pictures(options: Any, folder: Path) -> int:
    """Copy (or make) JPEGs until there are enough, and decode them; return how many differ."""
    given = find_jpegs(options.images, folder / "made", min(options.count, 256))
    found = list(filter(usable, given))[: options.count]
    (folder / "images").mkdir()
    shape = (options.count, 3, SIDE, SIDE)
    pixels = np.lib.format.open_memmap(folder / "pixels.npy", "w+", np.uint8, shape)
    for number in range(options.count):
        # copies, not links: each has pages of its own, as different pictures would
        shutil.copyfile(found[number % len(found)], folder / "images" / f"{number:08d}.jpg")
        first = number < len(found)
        pixels[number] = planes(found[number], SIDE) if first else pixels[number - len(found)]
    pixels.flush()
    return len(found)


def start(title: str, options: Any, *job: Any) -> Way:
    """Start a process that stores and reads; return its epochs, or a row that says why it fails."""
    pythons = dict(entry.split("=", 1) for entry in options.python)
    python = next((pythons[word] for word in pythons if word in title), sys.executable)
    try:
        child = Child("compare", python)
        found = child.ask("open_contender", title, *job)
    except (ChildError, OSError) as error:
        # the last line, as a worker's error has a traceback; folders of this machine tell others nothing
        failed = {"error": re.sub(r"/\S*/", "", str(error).strip().splitlines()[-1])[:200]}
        print(f"{title}: {failed}", file=sys.stderr, flush=True)
        return lambda: failed
    return lambda: found | child.ask("take_epochs", options.seconds)


def ways(options: Any, folder: Path) -> dict[str, Way]:
    """Return the epochs of each contender."""
    options.count = max(options.count, 3 * options.batch * CORES)
    temporary = tempfile.TemporaryDirectory(dir=folder)
    atexit.register(temporary.cleanup)
    folder = Path(temporary.name)
    FACTS["pictures"] = "given" if options.images else "made"
    FACTS["different"], FACTS["images"] = write_pictures(options, folder), options.count
    found = {}
    for name, (title, workers) in named_ways(NAMES, options.only).items():
        count = 3 * options.batch * CORES if CONTENDERS[title].decodes else options.count
        found[name] = start(title, options, str(folder), count, options.batch, workers)
    return found


#: Parameters of the line; `ways` adds what the pictures are.
FACTS: dict[str, Any] = {"side": SIDE, "device": DEVICE, "files": "warm"}

FIRST, *OTHERS = NAMES
BENCHMARKS = {
    "compare": Benchmark(
        ways,
        {
            "images": None,
            "count": 4096,
            "batch": 256,
            "rounds": 5,
            "seconds": 0.5,
            "only": [],
            "python": [],
        },
        quick={"count": 1536, "rounds": 3, "seconds": 0.1},
        ratios={
            f"{name} › memload / it": (f"{FIRST} › images/s", f"{name} › images/s")
            for name in OTHERS
        },
        facts=FACTS,
    )
}

if __name__ == "__main__":
    run(BENCHMARKS)
