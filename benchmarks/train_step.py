"""What training ResNet-18, ResNet-50 and next to nothing makes of synthetic data, for each way of feeding.

    python benchmarks/train_step.py [--models resnet50,resnet18,stem] [--rounds 5] [--seconds 0.6] [--images 20000]
        [--jpegs DIR] [--workers N] [--device cuda] [--dry-run]

Synthetic is the same step on one normalised batch that stays on the device, at the beginning of each round and at its
end; a share is of the mean of both, within the round. Batches of 256, bfloat16 autocast, channels-last, SGD, no
compilation, random order, pages warm. Ways, all of which normalise on the device and end in bfloat16:

- `Loader` with each feed, from noise of 224×224×3; and the same with `train(224)`, which crops, resizes and flips too,
  from 256×256×3.
- torch's DataLoader over `MemmapDataset` with `fast_collate` and page-locked memory, copied without waiting: with as
  many workers as cores, without any, and without any in memload's prefetchers.
- JPEGs, decoded, resized and cropped by Pillow in a DataLoader of as many workers as cores; those below DIR, or 64
  made ones of ImageNet's size, again and again.

Every way is warmed up, which also tells how many steps take `--seconds`. Then, in rounds, each has a turn of so many
steps, a multiple of the workers, in an order that is drawn for each round, so that no way always comes first. A turn
begins a new iteration, whose first steps are not timed: a quarter of the others, or with workers one batch of each, so
that what was made ahead counts for none. The time is the device's own, from the end of the last of these steps to the
end of the last of all. Cores: CPU time of feeding over the time of a turn; that is what the training thread takes to
ask for a batch, all other threads but autograd's, and workers.

With `--device cpu` it is a toy that shows that all of it runs: few small pictures, the stem alone, nothing recorded.
"""

import contextlib
import itertools
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from record import arguments, at_least_one, need_cuda, noise_dataset, record, run_main, spread
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import memload
from memload import transforms

MODELS = {"resnet50": "ResNet-50", "resnet18": "ResNet-18", "stem": "stem"}
FEEDS = ("dma", "uva", "pinned", "resident")


class Stem(nn.Sequential):
    """Next to nothing: one convolution and a linear layer."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 16, 7, 8),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(16, 1000),
        )


def model(name: str) -> nn.Module:
    """Return a new model. Ends the process with a message where torchvision is missing."""
    if name == "stem":
        return Stem()
    try:
        from torchvision import models
    except (ImportError, RuntimeError) as error:  # the latter where it is of another build of torch
        sys.exit(
            f"models: expected torchvision, which has {MODELS[name]}, found: {error}. "
            "Install the torchvision of this torch, or give --models stem"
        )
    return getattr(models, name)()


@dataclass
class Training:
    """A model and its step."""

    model: nn.Module
    device: torch.device

    def __post_init__(self) -> None:
        self.model.to(self.device, memory_format=torch.channels_last)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01, momentum=0.9, fused=True)

    def step(self, images: Tensor, labels: Tensor) -> None:
        """Train on a batch."""
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = nn.functional.cross_entropy(self.model(images), labels)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()


class Stretch:
    """So many random sample numbers an iteration: a sampler whose length is set between iterations."""

    def __init__(self, size: int) -> None:
        self.size, self.length, self._rng = size, size, np.random.default_rng(0)

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        yield from self._rng.integers(0, self.size, self.length).tolist()


class Jpegs(Dataset[tuple[Tensor, int]]):
    """Files decoded, resized and cropped as an ImageFolder with the usual transforms does it; bytes, not floats."""

    def __init__(self, paths: list[Path], side: int) -> None:
        self.paths, self.side = paths, side

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        with Image.open(self.paths[number]) as file:
            image = file.convert("RGB")
        scale = self.side / min(image.size)
        width, height = (max(self.side, int(size * scale)) for size in image.size)
        left, top = round((width - self.side) / 2), round((height - self.side) / 2)
        image = image.resize((width, height), Image.Resampling.BILINEAR)
        image = image.crop((left, top, left + self.side, top + self.side))
        return torch.from_numpy(np.array(image)).permute(2, 0, 1), number % 1000


@dataclass
class Way:
    """A way of feeding: ``begin(batches)`` begins a new iteration of at least so many batches."""

    begin: Callable[[int], Iterator[Any]]
    multiple: int = 1  #: of timed steps: the workers, whose batches come in flocks
    steps: int = 0  #: in each turn, once it is known how long one takes


def forever(batches: Iterable[Any]) -> Iterator[Any]:
    """Go from epoch to epoch."""
    while True:
        yield from batches


def by_loader(loader: memload.Loader) -> Way:
    """Return a Loader as a way."""
    pages = getattr(loader._open().feed, "_pages", None)
    if pages is not None:
        pages.wait(60)  # registering goes on in the background
    return Way(lambda count: forever(loader))


def by_data_loader(
    dataset: Any, batch: int, workers: int, then: Callable[[DataLoader[Any]], Iterable[Any]]
) -> Way:
    """Return torch's DataLoader, and what is put around it, as a way."""
    sampler = Stretch(len(dataset))
    loader: DataLoader[Any] = DataLoader(
        dataset, batch, sampler=sampler, num_workers=workers, persistent_workers=workers > 0,
        collate_fn=memload.fast_collate, pin_memory=torch.cuda.is_available(),
    )  # fmt: skip

    def begin(count: int) -> Iterator[Any]:
        sampler.length = count * batch  # so that workers are idle in others' turns
        return iter(then(loader))

    return Way(begin, max(1, workers))


def feeding_time() -> float:
    """Return CPU seconds so far of all threads but the caller and autograd's, and of workers."""
    total = time.process_time() - time.thread_time()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(
            FileNotFoundError, ProcessLookupError
        ):  # a thread that has ended meanwhile
            if (task / "comm").read_text().startswith("pt_autograd"):
                total -= int((task / "schedstat").read_text().split()[0]) / 1e9
    for worker in multiprocessing.active_children():
        fields = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def mark(device: torch.device) -> Any:
    """Return the moment when the device will have done what it was asked for by now."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(start: Any, end: Any) -> float:
    """Return seconds from one mark to another, which is waited for."""
    if isinstance(start, float):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1000


def measure(
    training: Training, way: Way, shape: tuple[int, ...], steps: int
) -> tuple[float, float, float]:
    """Return images a second, the cores that feeding took, and seconds. Raises RuntimeError for other batches."""
    untimed = way.multiple if way.multiple > 1 else max(4, steps // 4)
    begun, before, asking = time.perf_counter(), feeding_time(), 0.0
    batches = way.begin(untimed + steps)
    start = None
    for number in range(untimed + steps):
        asked = time.thread_time()
        images, labels = next(batches)
        asking += time.thread_time() - asked
        if not number:
            found = tuple(images.shape), images.dtype, images.device, labels.device
            if found != (shape, torch.bfloat16, training.device, training.device):
                raise RuntimeError(
                    f"batch: expected {shape} of bfloat16 on {training.device}, found {found}"
                )
        training.step(images, labels)
        if number == untimed - 1:
            start = mark(training.device)
    seconds = between(start, mark(training.device))
    cores = (feeding_time() - before + asking) / (time.perf_counter() - begun)
    for _ in itertools.islice(
        batches, 1
    ):  # a DataLoader has no more, which ends its iteration; others are left
        pass
    return steps * shape[0] / seconds, cores, seconds


def settle(training: Training, way: Way, shape: tuple[int, ...], seconds: float) -> None:
    """Warm a way up, and find out how many steps a turn of so many seconds is."""
    steps = way.multiple
    while True:
        rate, _, taken = measure(training, way, shape, steps)
        if taken >= seconds / 4:
            break
        steps *= 4
    flocks = seconds * rate / shape[0] / way.multiple
    way.steps = way.multiple * max(1 if way.multiple > 1 else 4, round(flocks))


def run(
    training: Training, ways: dict[str, Way], shape: tuple[int, ...], rounds: int, seconds: float
) -> Any:
    """Return rates, shares and cores of each way, the first of which is synthetic."""
    reference, *fed = ways
    again = f"{reference}, again"
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in [*ways, again]}
    order = random.Random(0)
    for way in ways.values():
        settle(training, way, shape, seconds)
    for number in range(rounds):
        for name in [reference, *order.sample(fed, len(fed)), again]:
            way = ways[reference if name == again else name]
            found[name].append(measure(training, way, shape, way.steps))
        print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    ends = zip(found[reference], found[again], strict=True)
    base = [(one[0] + other[0]) / 2 for one, other in ends]
    return {
        name: {
            "images/s": spread([rate for rate, _, _ in values]),
            "share of synthetic": spread(
                [rate / own for (rate, _, _), own in zip(values, base, strict=True)]
            ),
            "cores": spread([cores for _, cores, _ in values]),
        }
        for name, values in found.items()
    }


def jpeg_files(folder: Path | None, made: Path, count: int) -> list[Path]:
    """Return the JPEGs below a folder, or makes some."""
    if folder is None:
        sys.path.append(str(Path(__file__).parents[1] / "scripts"))
        from photographs import write_folder

        return write_folder(made, count)
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    if not files:
        sys.exit(f"jpegs: expected a folder with JPEGs, found none below {folder}")
    return files


def main() -> None:
    """Run the benchmark."""
    parser = arguments(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--models", help=f"by default {','.join(MODELS)}; the stem alone on the CPU"
    )
    parser.add_argument("--rounds", type=at_least_one)
    parser.add_argument("--seconds", type=float)
    parser.add_argument(
        "--images", type=int, help="samples of 224×224, and half as many of 256×256"
    )
    parser.add_argument("--jpegs", type=Path, metavar="DIR")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    toy = options.device == "cpu"
    if not toy:
        need_cuda("--device cpu runs a toy")
    small = {"rounds": 2, "seconds": 0.05, "images": 400}
    usual = {"rounds": 5, "seconds": 0.6, "images": 20_000}
    for name, value in (small if toy else usual).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    names = (options.models or ("stem" if toy else ",".join(MODELS))).split(",")
    if not set(names) <= MODELS.keys():
        parser.error(f"--models: expected some of {','.join(MODELS)}, found {options.models}")
    device = torch.device("cpu") if toy else torch.device("cuda", torch.cuda.current_device())
    batch, side, larger_side = (16, 64, 72) if toy else (256, 224, 256)
    if toy:
        torch.set_num_threads(1)  # whose others would be taken for feeding
    torch.backends.cudnn.benchmark = True
    trainings = {
        name: Training(model(name), device) for name in names
    }  # says first of all what is missing
    shape = (batch, 3, side, side)
    normalise = transforms.Compose(
        [transforms.Normalize("imagenet"), transforms.ToDtype(torch.bfloat16)]
    )
    recipe = transforms.train(side, dtype=torch.bfloat16)

    with tempfile.TemporaryDirectory() as folder:
        path, larger = Path(folder) / "exact.bin", Path(folder) / "larger.bin"
        noise_dataset(path, options.images, side)
        noise_dataset(larger, options.images // 2, larger_side)
        files = jpeg_files(options.jpegs, Path(folder) / "jpegs", 8 if toy else 64)

        def loader(source: Path, feed: Any, transform: Any) -> Way:
            return by_loader(
                memload.Loader(
                    source,
                    batch,
                    shuffle=True,
                    drop_last=True,
                    device=device,
                    feed=feed,
                    transform=transform,
                )
            )

        def moved(batches: Iterable[Any]) -> Iterator[Any]:
            for images, labels in batches:
                yield (
                    normalise(images.to(device, non_blocking=True)),
                    labels.to(device, non_blocking=True),
                )

        images = torch.randn(shape, device=device, dtype=torch.bfloat16).to(
            memory_format=torch.channels_last
        )
        synthetic = (images, torch.randint(0, 1000, (batch,), device=device))
        feeds = ("cpu",) if toy else FEEDS
        mapped, workers = memload.MemmapDataset(path), options.workers
        ways = {
            "synthetic": Way(lambda count: itertools.repeat(synthetic)),
            **{f"Loader, {feed}": loader(path, feed, normalise) for feed in feeds},
            **{f"Loader, {feed}, train({side})": loader(larger, feed, recipe) for feed in feeds},
            f"DataLoader, {workers} workers": by_data_loader(mapped, batch, workers, moved),
            "DataLoader, no workers": by_data_loader(mapped, batch, 0, moved),
            "the same in ThreadPrefetcher": by_data_loader(
                mapped, batch, 0, lambda made: moved(memload.ThreadPrefetcher(made))
            ),
            "the same in CudaPrefetcher": by_data_loader(
                mapped,
                batch,
                0,
                lambda made: memload.CudaPrefetcher(made, device=device, transform=normalise),
            ),
            f"JPEGs in a DataLoader, {workers} workers": by_data_loader(
                Jpegs(files, side), batch, workers, moved
            ),
        }
        parameters = {name: getattr(options, name) for name in (*usual, "workers")}
        parameters |= {
            "pages": "warm",
            "batch": batch,
            "jpegs": len(files),
            "order": "drawn for each round",
        }
        usual["workers"] = parser.get_default("workers")
        for name, training in trainings.items():
            print(MODELS[name], file=sys.stderr, flush=True)
            results = run(training, ways, shape, options.rounds, options.seconds)
            if toy:
                print(json.dumps({"model": MODELS[name], "results": results}, indent=1))
            else:
                record("train_step", options, usual, {"model": MODELS[name], **parameters}, results)


if __name__ == "__main__":
    run_main(main)
