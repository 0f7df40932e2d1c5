"""What each stage and each feed reaches on this machine, next to its limit measured in the same run.

measure(path) ─▶ decoding, cold disk        each alone, with its limit
              ─▶ Stages: disk, gathering, copies, feeds, transform, Loader     in turn, warm
              ─▶ Report of Lines ─▶ text(), as_dict(), plot()
"""

import contextlib
import functools
import itertools
import math
import os
import platform
import resource
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from PIL import Image, ImageOps

from memload import inspection
from memload.errors import DependencyError, FeedError, MemloadError
from memload.machine import available_cores
from memload.storage.format import HEADER_BYTES
from memload.storage.index import Array
from memload.storage.mapping import forget

if TYPE_CHECKING:
    import torch

    from memload.feeds.choice import Choice
    from memload.reading.dataset import MemmapDataset

#: Bytes of pixels to measure on, at most: more than a CPU's cache holds, read within seconds.
_SAMPLE_BYTES = 512 << 20
#: Bytes of pixels in a batch, at most: 256 pictures of 256×256×3.
_BATCH_BYTES = 64 << 20
#: Bytes that a thread reads at a time, large enough for the full speed of any disk.
_BLOCK_BYTES = 8 << 20
#: Seconds of one measurement, and of one that reads from the disk or decodes.
_SECONDS, _LONG_SECONDS = 0.2, 1.0
_ROUNDS, _LONG_ROUNDS = 5, 3
#: Seconds from the start after which no new round begins.
_LAST_ROUND_AFTER = 45.0
#: Batches that the GPU is asked for before it is waited for; and a transform, as in a Loader.
_CHUNK = 32
_SHARE = "Share: the median, over the rounds, of a rate divided by its limit in the same round."

#: Does a part of the work, waits for the device, and returns how many images it was.
Step = Callable[[], int]


@dataclass(frozen=True)
class Line:
    """The rate of a subject and the rate that limits it, or the reason why there is none."""

    subject: str
    images_s: float | None = None  #: images a second, the median of all rounds
    lower_quartile: float = 0.0
    upper_quartile: float = 0.0
    gb_s: float | None = None  #: the same in gigabytes of stored pixels a second
    rounds: int = 0
    limit: str = ""  #: what the limit is
    limit_images_s: float | None = None
    share: float | None = None  #: the median of the shares of all rounds
    reason: str = ""

    @classmethod
    def of(
        cls, subject: str, rates: Sequence[float], limit: str, limits: Sequence[float], size: int
    ) -> "Line":
        """Return the line for the rates of all rounds, of images of ``size`` bytes."""
        if not rates:
            return cls(subject, reason="not measured")
        low, middle, high = statistics.quantiles(rates, n=4) if len(rates) > 1 else [rates[0]] * 3
        line = (subject, middle, low, high, middle * size / 1e9, len(rates))
        if not limits:
            return cls(*line)
        share = statistics.median(rate / most for rate, most in zip(rates, limits, strict=True))
        return cls(*line, limit, statistics.median(limits), share)

    @property
    def uneven(self) -> bool:
        """Whether the quartiles are further apart than 40 % of the median."""
        return self.upper_quartile - self.lower_quartile > 0.4 * (self.images_s or 0)


@dataclass(frozen=True)
class Report:
    """What `measure` found. ``facts`` say on what data and machine, ready for JSON."""

    facts: dict[str, Any]
    lines: Sequence[Line]

    def as_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        return {**self.facts, "results": [asdict(line) for line in self.lines]}

    def heading(self) -> list[str]:
        """Return two lines: the data, and the machine."""
        facts, machine = self.facts, self.facts["machine"]
        whole = facts["sampled"] == facts["samples"]
        part = "" if whole else f", measured on {facts['sampled']:,} of them"
        shape = "×".join(map(str, facts["shape"]))
        return [
            f"{Path(facts['path']).name}: {facts['samples']:,} samples of {shape} {facts['dtype']}"
            f"{part}; batches of {facts['batch_size']:,}, medians of {facts['rounds']} rounds, "
            f"{facts['seconds']:.0f} s in all",
            f"{machine['cpu']}, {machine['cores']} cores; {machine.get('gpu', 'no GPU')}; "
            f"torch {facts['versions']['torch']}",
        ]

    def text(self) -> str:
        """Return a table, with the heading above and notes below."""
        rows = [("", "images/s", "GB/s", "share", "of its limit, images/s")]
        for line in self.lines:
            if line.images_s is None:
                rows.append((line.subject, "–", "–", "", line.reason))
                continue
            limit, share = "", ""
            if line.limit_images_s is not None and line.share is not None:
                limit, share = f"{_number(line.limit_images_s)}  {line.limit}", f"{line.share:.2f}"
            rows.append((line.subject, _number(line.images_s), f"{line.gb_s:.3g}", share, limit))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = [
            "  ".join(
                [
                    subject.ljust(widths[0]),
                    *(cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=False)),
                    limit,
                ]
            ).rstrip()
            for subject, *cells, limit in rows
        ]
        return "\n".join([*self.heading(), "", *table, "", _SHARE, *self.facts["notes"]])

    def plot(self, path: Path) -> None:
        """Write a picture with a bar for each rate and a mark at its limit. See `check_plot`."""
        from matplotlib.figure import Figure

        lines = [line for line in self.lines if line.images_s is not None][::-1]
        rates = [line.images_s or 0.0 for line in lines]
        figure = Figure(figsize=(10, 1.8 + 0.35 * len(lines)), layout="constrained")
        axes = figure.add_subplot()
        axes.barh([line.subject for line in lines], rates, color="#4c78a8")
        for place, line in enumerate(lines):
            end = max(rates[place], line.limit_images_s or 0.0)
            if line.limit_images_s is not None:
                axes.plot([line.limit_images_s] * 2, [place - 0.4, place + 0.4], "k", linewidth=2)
            share = "" if line.share is None else f"   share {line.share:.2f}"
            axes.text(1.05 * end, place, f" {_number(rates[place])}{share}", va="center")
        axes.set_xscale("log")
        axes.set_xlim(right=20 * axes.get_xlim()[1])  # room for the texts
        axes.set_xlabel(f"images a second; black marks are limits. {_SHARE}", fontsize="small")
        figure.suptitle("\n".join(self.heading()), fontsize="small")
        figure.savefig(path)


def check_plot(path: Path) -> None:
    """Check that `Report.plot` can write a file, before a minute of measuring.

    Raises DependencyError if matplotlib is not installed, and ValueError for a bad path.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise DependencyError(
            f"--plot needs matplotlib, which cannot be imported: {error}. Run "
            "pip install 'memload[plot]'",
            name="matplotlib",
        ) from error
    endings = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in endings:
        known = ", ".join(sorted(endings))
        raise ValueError(f"plot: {path} is no picture. Give a name that ends in one of {known}.")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"plot: {path} cannot be written. Give a file in a folder that exists.")


def measure(path: str | Path, *, images: str | Path | None = None) -> Report:
    """Measure on at most 512 MiB of a data set, for less than a minute.

    ``images`` is the folder that the data set was built from; its pictures are then decoded in a
    DataLoader, too. Drops the pages that it measures on from the page cache. Raises FormatError,
    FeedError, ValueError and OSError.
    """
    start = time.perf_counter()
    from memload.reading.dataset import MemmapDataset

    dataset = MemmapDataset(path)
    if not len(dataset):
        raise ValueError(f"{path} has no samples. Build it from a folder with pictures.")
    array = dataset.shards.array
    # The samples that lie first in the files, so that these are read from start to end.
    count = max(1, _SAMPLE_BYTES // array.row_bytes)
    sample = dataset.subset(np.sort(np.argsort(dataset.index.row, kind="stable")[:count]))
    batch = min(2048, len(sample), max(1, _BATCH_BYTES // array.row_bytes))
    batch = 1 << (batch.bit_length() - 1)
    # First, while this process has no threads and devices yet, as those do not survive a fork.
    jpegs = [] if images is None else [_measure_decoding(_find_files(dataset, Path(images)), array)]
    files, stages = _Files(sample, batch), Stages()
    with files.pool:
        cold = _measure_cold_disk(files)
        try:
            choice = _add_stages(stages, dataset, files, batch)
            rounds = stages.measure(start + _LAST_ROUND_AFTER)
        except RuntimeError as error:  # torch's, where there is no room for the limits
            raise FeedError(
                "Measuring takes 2 GB of free memory, on the GPU too if there is one: "
                f"{_first_line(error)}. Make room, or let CUDA_VISIBLE_DEVICES name another GPU"
            ) from error
    lines = [cold, *stages.lines(array.row_bytes)]
    facts = {
        "path": str(path),
        "samples": len(dataset),
        "sampled": len(sample),
        "shape": list(array.shape),
        "dtype": np.dtype(array.descr).name,
        "bytes": len(dataset.shards) * array.row_bytes,
        "batch_size": batch,
        "rounds": rounds,
        "feed": str(choice),
        "threads": available_cores(),
        "seconds": time.perf_counter() - start,
        "machine": _machine(),
        "versions": inspection.environment(),
        "notes": [f'feed="auto" takes {choice}.', *_notes(lines, jpegs)],
    }
    return Report(facts, [*lines, *jpegs])


def _notes(lines: Sequence[Line], jpegs: Sequence[Line]) -> Iterator[str]:
    """Say what follows from the lines, of which the Loader's is the last."""
    for line in jpegs:
        if line.images_s and lines[-1].images_s:
            yield (
                f"The Loader with crops and normalisation is {lines[-1].images_s / line.images_s:.3g} "
                "times as fast as a DataLoader that only decodes and resizes the JPEGs."
            )
    uneven = [line.subject for line in [*lines, *jpegs] if line.uneven]
    if uneven:
        yield (
            f"The rounds of these differ by more than 40 %: {'; '.join(uneven)}. If other "
            "processes are running, end them and measure again."
        )


# Decoding


def _find_files(dataset: "MemmapDataset", images: Path) -> list[Path]:
    """Return the source files of up to 1,000 random samples."""
    chosen = np.random.default_rng(0).permutation(len(dataset))[:1000].tolist()
    files = [images / dataset.keys[sample] for sample in chosen]
    found = [file for file in files if file.is_file()]
    if not found:
        raise ValueError(
            f"images: {str(images)!r} has none of the {len(files):,} files looked for, such as "
            f"{dataset.keys[chosen[0]]!r}. Give the folder that {dataset.path.name} was built from"
        )
    return found


class _Pictures:
    """A map-style data set without end that decodes pictures and resizes them."""

    def __init__(self, files: Sequence[Path], shape: tuple[int, ...]) -> None:
        self.files, self.shape = files, shape

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, number: int) -> np.ndarray:
        height, width, channels = self.shape
        with Image.open(self.files[number % len(self.files)]) as image:
            converted = image.convert("L" if channels == 1 else "RGB")
        return np.array(ImageOps.fit(converted, (width, height), Image.Resampling.BILINEAR))


def _measure_decoding(files: Sequence[Path], array: Array) -> Line:
    """Decode in a DataLoader with one worker a core; the limit is one process times the cores."""
    from torch.utils.data import DataLoader

    workers = available_cores()
    subject = f"JPEGs in a DataLoader, {workers} worker{'s' * (workers > 1)}"
    end = time.perf_counter() + _LONG_SECONDS
    try:
        warm = [file for file in files if time.perf_counter() < end and file.read_bytes()]
        pictures, numbers = _Pictures(warm or files, array.shape), itertools.count()
        limit = workers * _rate(lambda: len([pictures[next(numbers)]]), _LONG_SECONDS)
        batch = max(1, min(64, int(limit / workers / 5)))  # a worker takes a fifth of a second
        batches = iter(DataLoader(cast("Any", pictures), batch, num_workers=workers))
        for _ in range(2 * workers):  # until all workers are busy
            next(batches)
        rates = [
            _rate(lambda: len(next(batches)), 1.5 * _LONG_SECONDS) for _ in range(_LONG_ROUNDS)
        ]
    except (OSError, ValueError, RuntimeError, MemoryError) as error:
        return Line(subject, reason=_first_line(error))
    what = f"decoding {len(pictures.files):,} of them in one process, × {workers} cores"
    return Line.of(subject, rates, what, [limit] * len(rates), array.row_bytes)


# The disk


class _Buffer(threading.local):
    """Memory, of its own for each thread."""

    def __init__(self, size: int) -> None:
        self.memory = np.zeros(size, np.uint8)


class _Files:
    """The part of the files that holds a sample: read from start to end, or gathered by rows."""

    def __init__(self, sample: "MemmapDataset", batch: int) -> None:
        from memload.feeds.gathering import Gatherer

        self.sample, self.rows = sample, sample.index.row
        self.shards, self.array = sample.shards, sample.shards.array
        self._gatherer, row_bytes = Gatherer(self.shards), self.array.row_bytes
        self._buffer = _Buffer(max(_BLOCK_BYTES, batch * row_bytes))
        self.threads = available_cores()
        self.pool = ThreadPoolExecutor(self.threads)
        #: File, offset and size of one block after another.
        self.blocks: list[tuple[Path, int, int]] = []
        first, last = int(self.rows.min()), int(self.rows.max())
        last = min(last, first + _SAMPLE_BYTES // row_bytes)  # used rows may be far apart
        for path, start, stop in zip(
            self.shards.paths, self.shards.starts, self.shards.starts[1:], strict=False
        ):
            end = HEADER_BYTES + (min(last + 1, stop) - start) * row_bytes
            offset = HEADER_BYTES + (max(first, start) - start) * row_bytes
            for at in range(offset, end, _BLOCK_BYTES):
                self.blocks.append((path, at, min(_BLOCK_BYTES, end - at)))

    def read(self, block: tuple[Path, int, int]) -> int:
        """Read a block and return its number of rows, a fraction included."""
        path, offset, size = block
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            return file.readinto(self._buffer.memory[:size].data) or 0

    def gather(self, rows: np.ndarray) -> int:
        """Copy rows as the feeds do, and return how many."""
        memory = self._buffer.memory[: len(rows) * self.array.row_bytes]
        out = memory.view(self.array.descr).reshape(len(rows), *self.array.shape)
        self._gatherer.gather(rows, out)
        return len(rows)

    def on_threads(
        self, work: Callable[[Any], int], items: Iterable[Any], seconds: float = math.inf
    ) -> int:
        """Call work on all threads for each item, until so many seconds have passed; add up."""
        end = time.perf_counter() + seconds
        return sum(
            self.pool.map(lambda item: work(item) if time.perf_counter() < end else 0, items)
        )

    def drop(self) -> None:
        """Remove the blocks from the page cache, unless another process maps them."""
        self.forget()
        for path, offset, size in self.blocks:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)  # pages that are not written yet would stay
                os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)

    def forget(self) -> None:
        """Unmap all pages; those that are in the page cache stay there."""
        for pixels in self.shards.maps:
            forget(pixels)


def _measure_cold_disk(files: _Files) -> Line:
    """Gather random rows, none of which is in RAM; the limit is reading from start to end."""
    subject, row_bytes = "disk cold, random order", files.array.row_bytes
    if not hasattr(os, "posix_fadvise"):
        return Line(subject, reason="this system cannot drop pages from its cache")
    rates: list[float] = []
    limits: list[float] = []
    for number in range(_LONG_ROUNDS):
        try:
            files.drop()
            read = functools.partial(files.on_threads, files.read, files.blocks, _LONG_SECONDS)
            limits.append(_rate(read) / row_bytes)
            files.drop()
        except OSError as error:
            return Line(subject, reason=f"its pages cannot be dropped: {error}")
        order = np.random.default_rng(number).permutation(files.rows)
        pieces = _split(order, max(1, min(64, len(order) // files.threads)))
        before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        count = files.on_threads(files.gather, pieces, _LONG_SECONDS)
        rates.append(count / (time.perf_counter() - start))
        after = resource.getrusage(resource.RUSAGE_SELF)
        # Some filesystems do not count what is read; then a wait for a page shows it.
        bytes_read = 512 * (after.ru_inblock - before.ru_inblock)
        waited = after.ru_majflt > before.ru_majflt
        if bytes_read < count * row_bytes / 2 and (bytes_read or not waited):
            reason = "its pages stay in RAM: the disk is in memory, or another process maps them"
            return Line(subject, reason=reason)
    return Line.of(subject, rates, "the file from start to end, cold", limits, row_bytes)


# All that is warm


class Stages:
    """Subjects and their limits, which are measured in turn; or why a subject is not."""

    def __init__(self) -> None:
        self._steps: dict[str, Step] = {}
        self._limits: dict[str, str] = {}
        self._derived: dict[str, Callable[[], list[float]]] = {}
        #: Images a second in each round.
        self.rates: dict[str, list[float]] = {}
        self.reasons: dict[str, str] = {}

    def add(self, name: str, step: Step, limit: str = "") -> None:
        """Add a subject with its limit; or without one, something that limits subjects."""
        step()  # compiles, loads and registers
        self._steps[name], self.rates[name] = step, []
        if limit:
            self._limits[name] = limit

    def derive(self, limit: str, compute: Callable[[], list[float]]) -> None:
        """Add a limit that is computed from `rates`."""
        self._derived[limit] = compute

    def leave_out(self, subject: str, reason: str) -> None:
        """Add a subject that cannot be measured."""
        self._limits[subject], self.reasons[subject] = "", reason

    def measure(self, end: float) -> int:
        """Measure all in turn, in one round at least; return the number of rounds."""
        for number in range(_ROUNDS):
            if number and time.perf_counter() > end:
                return number
            for name, step in self._steps.items():
                self.rates[name].append(_rate(step, _SECONDS))
        return _ROUNDS

    def lines(self, row_bytes: int) -> list[Line]:
        """Return a line for each subject."""
        limits = self.rates | {name: compute() for name, compute in self._derived.items()}
        return [
            Line(subject, reason=self.reasons[subject])
            if subject in self.reasons
            else Line.of(subject, self.rates[subject], limit, limits[limit], row_bytes)
            for subject, limit in self._limits.items()
        ]


def _rate(step: Step, seconds: float = 0.0) -> float:
    """Return images a second of a step, repeated until so many seconds have passed."""
    start, images = time.perf_counter(), 0
    while True:
        images += step()
        if (passed := time.perf_counter() - start) >= seconds:
            return images / passed


def _add_stages(stages: Stages, dataset: "MemmapDataset", files: "_Files", batch: int) -> "Choice":
    """Add all stages; return the feed that ``"auto"`` chooses for the whole data set."""
    import torch

    cuda, sample = torch.cuda.is_available(), files.sample
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    _add_memory(stages, files, batch)
    if cuda:
        _add_copies(stages, sample, batch, device)
    else:
        stages.leave_out("to the GPU", "torch finds no CUDA device")
    _add_feeds(stages, sample, batch, device)
    choice = _choose_feed(dataset, stages, device)
    _add_transform(stages, files, batch, device, choice.name)
    return choice


def _add_memory(stages: Stages, files: _Files, batch: int) -> None:
    """Add reading and gathering what is in the page cache."""
    array, threads = files.array, files.threads
    order = np.random.default_rng(1).permutation(files.rows)
    batches = _split(order[: len(order) // batch * batch], batch)
    pieces = _split(order, max(1, min(-(-batch // threads), (4 << 20) // array.row_bytes)))
    pixels = max(files.shards.maps, key=len)
    out = np.zeros((batch, *array.shape), array.descr)

    def take() -> int:
        for rows in batches:
            np.take(pixels, rows % len(pixels), axis=0, out=out, mode="clip")
        return batch * len(batches)

    def touch() -> int:
        files.forget()
        return files.on_threads(files.gather, pieces)

    read, one_buffer = "the file from start to end, warm", "np.take into one buffer"
    stages.add(read, lambda: files.on_threads(files.read, files.blocks) // array.row_bytes)
    stages.add("disk warm, first touch", touch, read)
    stages.add(one_buffer, take)
    stages.add("gather, 1 thread", lambda: sum(map(files.gather, batches)), one_buffer)
    subject = f"gather, {threads} thread{'s' * (threads > 1)}"
    stages.add(subject, lambda: files.on_threads(files.gather, pieces), one_buffer)


def _add_copies(
    stages: Stages, sample: "MemmapDataset", batch: int, device: "torch.device"
) -> None:
    """Add copies to the GPU, and the bare operations that limit feeds."""
    import torch

    from memload.feeds.interface import widest_word

    images, row_bytes = sample.gather(np.arange(batch)), sample.shards.array.row_bytes
    pinned = images.pin_memory()
    # One copy of 256 MB, as a copy of a single batch would show what it costs to start it.
    many = max(1, (256 << 20) // images.nbytes)
    block = torch.empty((many, *images.shape), dtype=images.dtype, pin_memory=True)
    target = torch.empty_like(block, device=device)
    stored = torch.zeros((len(sample), row_bytes), dtype=torch.uint8, device=device)
    words = stored.view(widest_word(row_bytes))
    numbers = torch.randperm(len(sample), device=device)[:batch]
    out = torch.empty((batch, words.shape[1]), dtype=words.dtype, device=device)

    def repeat(operation: Callable[[], object], images: int = batch) -> Step:
        def step() -> int:
            for _ in range(_CHUNK):
                operation()
            torch.cuda.synchronize(device)
            return _CHUNK * images

        return step

    one_copy = "one copy from page-locked memory"
    stages.add(one_copy, repeat(lambda: target.copy_(block, non_blocking=True), many * batch))
    stages.add(
        "index_select on the GPU",
        repeat(lambda: torch.index_select(words, 0, numbers, out=out)),
    )
    to_device = functools.partial(pinned.to, device, non_blocking=True)
    stages.add("to the GPU, page-locked batches", repeat(to_device), one_copy)
    stages.add("to the GPU, ordinary memory", repeat(lambda: images.to(device)), one_copy)


def _epoch(
    sample: "MemmapDataset", batch: int, device: "torch.device", feed: str, transform: Any = None
) -> Step:
    """Return a step that is an epoch of a Loader. The images come again if the sample has few."""
    import torch

    from memload.reading.loader import Loader

    cuda = device.type == "cuda"
    count = batch * (256 if cuda else 16)  # 0.1 to 0.2 s where nothing is transformed
    loader = Loader(
        sample.subset(np.arange(count) % len(sample)),
        batch,
        shuffle=True,
        rank=0,
        num_replicas=1,
        device="cpu" if feed == "cpu" else device,
        feed=cast("Any", feed),
        transform=transform,
    )

    def step() -> int:
        images = sum(len(batch[0]) for batch in loader)
        if cuda:
            torch.cuda.synchronize(device)
        return images

    return step


def _add_feeds(stages: Stages, sample: "MemmapDataset", batch: int, device: "torch.device") -> None:
    """Add a Loader with each feed."""
    from memload.feeds.choice import FEEDS

    limits = {"resident": "index_select on the GPU", "cpu": "np.take into one buffer"}
    for feed in FEEDS[1:]:
        if feed != "cpu" and device.type != "cuda":
            stages.leave_out(f"feed {feed}", "it needs a CUDA device, and there is none")
            continue
        try:
            limit = limits.get(feed, "one copy from page-locked memory")
            stages.add(f"feed {feed}", _epoch(sample, batch, device, feed), limit)
        except (MemloadError, RuntimeError, MemoryError) as error:
            stages.leave_out(f"feed {feed}", _first_line(error))


def _choose_feed(dataset: "MemmapDataset", stages: Stages, device: "torch.device") -> "Choice":
    """Choose as ``feed="auto"`` does for the whole data set, among the feeds that work here."""
    from memload.feeds import choice
    from memload.feeds.interface import Feed, Samples

    if device.type != "cuda":
        return choice.Choice("cpu", f"the device is {device}")

    def create(name: str) -> Feed:
        if f"feed {name}" in stages.reasons:
            raise FeedError(stages.reasons[f"feed {name}"])
        return cast("Feed", None)  # a real one would load or register all of the files

    columns = [dataset.index.columns[name] for name in dataset.sample_columns]
    samples = Samples(dataset.shards, dataset.index.row, columns)
    return choice.first_that_serves(create, samples, device)[1]


def _add_transform(
    stages: Stages, files: _Files, batch: int, device: "torch.device", feed: str
) -> None:
    """Add a transform, and a Loader with it, which the feed and the transform limit together."""
    import torch

    from memload.transforms.recipes import train

    (height, width, channels), cuda = files.array.shape, device.type == "cuda"
    side, plain = min(224, height, width), {} if channels == 3 else {"mean": [0.5], "std": [0.5]}
    transform = train(side, **cast("Any", plain))
    images = files.sample.gather(np.arange(batch)).to(device).permute(0, 3, 1, 2)
    # On the CPU, the Loader calls transforms on threads, each with a batch of its own.
    batches = range(_CHUNK if cuda else files.threads)
    shape, positions = (batch, channels, side, side), np.arange(len(batches) * batch)
    floats = torch.empty(shape, device=device, memory_format=torch.channels_last)
    epochs = itertools.count()

    def transform_chunk() -> int:
        prepared = transform.prepare(positions, epoch=next(epochs))

        def one(place: int) -> int:
            return len(prepared(images, None, place * batch, (place + 1) * batch))

        return wait(sum(map(one, batches)) if cuda else files.on_threads(one, batches))

    def cast_chunk() -> int:
        return wait(sum(len(floats.copy_(images[:, :, :side, :side])) for _ in batches))

    def wait(images: int) -> int:
        if cuda:
            torch.cuda.synchronize(device)
        return images

    def rates_together() -> list[float]:
        pairs = zip(stages.rates[f"feed {feed}"], stages.rates[subject], strict=True)
        return [min(pair) if cuda else 1 / (1 / pair[0] + 1 / pair[1]) for pair in pairs]

    subject, together = f"transform train({side})", "feed and transform, one after the other"
    if cuda:
        together = f"the slower of feed {feed} and transform"
    stages.add("one cast to float32", cast_chunk)
    stages.add(subject, transform_chunk, "one cast to float32")
    loader = _epoch(files.sample, batch, device, feed, transform)
    stages.add(f"Loader, {feed}, train({side})", loader, together)
    stages.derive(together, rates_together)


def _split(rows: np.ndarray, size: int) -> list[np.ndarray]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _first_line(error: BaseException) -> str:
    lines = (line.strip() for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)


def _number(value: float) -> str:
    """Return a number with at most four significant digits."""
    return f"{float(f'{value:.4g}'):,.10g}"


def _machine() -> dict[str, Any]:
    """Return the processor, its cores, the system and the GPU, ready for JSON."""
    import torch

    found = {"cpu": platform.machine(), "cores": available_cores(), "system": platform.platform()}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                found["cpu"] = line.partition(":")[2].strip()
                break
    if torch.cuda.is_available():
        found |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
        with contextlib.suppress(OSError):
            found["driver"] = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    return found
