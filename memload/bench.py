"""How fast each stage and each feed is on this machine, beside a limit of the same run.

    measure ─▶ decoding ─▶ cold disk ─▶ all that is warm      groups of stages
                  └─ all stages of a group in turn, round after round
               medians, shares of limits ─▶ Report ─▶ text(), as_dict(), plot()

A `Stage` is one line of the report, or the limit of another one. The tables of stages are
`_cold_stages` and `_warm_stages`. The functions that measure the stages follow each table.
"""

import os
import platform
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import cycle
from operator import itemgetter
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from PIL import Image, ImageOps
from torch.utils.data import DataLoader, Dataset

from memload import inspection
from memload.errors import DependencyError, MemloadError
from memload.feeds.choice import Choice, first_that_serves
from memload.feeds.interface import Feed
from memload.machine import available_cores
from memload.reading.dataset import MemmapDataset
from memload.reading.loader import Loader
from memload.reading.pipeline import samples_of
from memload.storage.mapping import forget
from memload.transforms import train
from memload.wording import counted, shape_text

#: Bytes of pixels to measure on, at most: more than a CPU's cache holds.
_SAMPLE_BYTES = 512 << 20
#: Bytes that a thread reads or gathers at a time.
_BLOCK_BYTES = 8 << 20
#: Seconds of one measurement, and of one that decodes or reads from the disk; and how many rounds.
_SECONDS, _SLOW_SECONDS = 0.2, 1.0
_ROUNDS, _SLOW_ROUNDS = 5, 3
#: Seconds of measuring what is warm after which no new round begins.
_LAST_ROUND_AFTER = 25.0

#: Does a part of the work, waits for the device, and returns how many images it was.
Step = Callable[[], int]
#: Measures for a while and returns images a second.
Measurement = Callable[[], float]


@dataclass
class Stage:
    """What to measure: ``prepare`` returns the measurement, or raises why there is none."""

    subject: str
    prepare: Callable[[], Measurement]
    #: The stages that limit this one. The slowest of them counts.
    limits: Sequence["Stage"] = ()
    #: False for a stage that is only the limit of others.
    reported: bool = True
    #: Images a second in each round; or none, and the reason why.
    rates: list[float] = field(default_factory=list)
    reason: str = ""


@dataclass(frozen=True)
class Line:
    """The rate of a stage and the rate that limits it, or the reason why there is none."""

    subject: str
    images_s: float | None = None  #: images a second, the median of all rounds
    lower_quartile: float = 0.0
    upper_quartile: float = 0.0
    gb_s: float | None = None  #: the same in gigabytes of stored pixels a second
    rounds: int = 0
    limit: str = ""  #: the name of the limit
    limit_images_s: float | None = None
    share: float | None = None  #: the median, over the rounds, of rate divided by limit
    reason: str = ""


@dataclass(frozen=True)
class Report:
    """What `measure` found. ``facts`` describe the data and the machine, ready for JSON."""

    facts: dict[str, Any]
    lines: Sequence[Line]

    def as_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        return {**self.facts, "results": [asdict(line) for line in self.lines]}

    def heading(self) -> str:
        """Return two lines: the data, and the machine."""
        facts, machine = self.facts, self.facts["machine"]
        shape = shape_text(facts["shape"])
        part = ""
        if facts["sampled"] < facts["samples"]:
            part = f", measured on {facts['sampled']:,} of them"
        return (
            f"{Path(facts['path']).name}: {facts['samples']:,} samples of {shape} {facts['dtype']}"
            f"{part}; batches of {facts['batch_size']:,}, medians of {facts['rounds']} rounds, "
            f"{facts['seconds']:.0f} s in all\n"
            f"{machine['cpu']}, {machine['cores']} cores; {machine.get('gpu', 'no GPU')}; "
            f"torch {facts['versions']['torch']}"
        )

    def text(self) -> str:
        """Return a table, with the heading above and notes below."""
        width = max(len(line.subject) for line in self.lines)
        rows = [f"{'':{width}}    images/s    GB/s  share  of the limit, images/s"]
        for line in self.lines:
            start = f"{line.subject:{width}}  "
            if line.images_s is None:
                rows.append(f"{start}         –       –         {line.reason}")
                continue
            start += f"{_number(line.images_s):>10}  {line.gb_s:>6.3g}"
            if line.limit_images_s is not None:
                limit = f"{_number(line.limit_images_s):>10}  {line.limit}"
                start += f"  {line.share:>5.2f}  {limit}"
            rows.append(start)
        return "\n".join([self.heading(), "", *rows, "", *self.facts["notes"]])

    def plot(self, path: Path) -> None:
        """Write a picture with a bar for each rate and a mark at its limit. See `check_plot`."""
        from matplotlib.figure import Figure

        lines = [line for line in self.lines if line.images_s][::-1]
        rates = [line.images_s or 0.0 for line in lines]
        figure = Figure(figsize=(10, 1.8 + 0.35 * len(lines)), layout="constrained")
        axes = figure.add_subplot()
        bars = axes.barh([line.subject for line in lines], rates)
        axes.bar_label(bars, [*map(_number, rates)], label_type="center", color="white")
        for row, line in enumerate(lines):
            if line.limit_images_s:
                axes.plot(line.limit_images_s, row, "k|", markersize=20)
        axes.set_xscale("log")
        axes.set_xlim(left=min(rates) / 10)  # a bar for the slowest, too
        axes.set_xlabel("images a second; black marks are limits")
        figure.suptitle(self.heading(), fontsize="small")
        figure.savefig(path)


def check_plot(path: Path) -> None:
    """Check that `Report.plot` can write a file, before half a minute of measuring.

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
        raise ValueError(f"plot: {path} is not a picture. Use a name that ends in one of {known}.")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"plot: {path} cannot be written. Give a file in a folder that exists.")


def measure(path: str | Path, *, images: str | Path | None = None) -> Report:
    """Measure on at most 512 MiB of a data set, for about half a minute.

    ``images`` is the folder that the data set was built from; its images are then decoded in a
    DataLoader, too. Other arrays, such as masks, are left out. Drops the pages that it measures on
    from the page cache. Raises FormatError, FeedError, ValueError and OSError.
    """
    start = time.perf_counter()
    dataset = MemmapDataset(path)
    dataset.sample_names = tuple(name for name in dataset.sample_names if name in dataset.columns)
    setting = _Setting(dataset)
    # DataLoader's workers are forked before there are other threads. Pages are dropped from RAM
    # before a GPU registers them.
    decoding = [] if images is None else [_decoding_stage(setting, Path(images))]
    _measure_in_turn(decoding, _SLOW_ROUNDS)
    cold = _cold_stages(setting)
    _measure_in_turn(cold, _SLOW_ROUNDS)
    choice = _choose_feed(setting)
    warm = _warm_stages(setting, choice.name)
    _measure_in_turn(warm, _ROUNDS)
    stages = [stage for stage in [*cold, *warm, *decoding] if stage.reported]
    lines = [_line(stage, setting.row_bytes) for stage in stages]
    array = dataset.shards.array
    facts = {
        "path": str(path),
        "samples": len(dataset),
        "sampled": len(setting.sample),
        "shape": list(array.shape),
        "dtype": np.dtype(array.descr).name,
        "bytes": len(dataset.shards) * array.row_bytes,
        "batch_size": setting.batch_size,
        "rounds": max(line.rounds for line in lines),
        "feed": str(choice),
        "threads": setting.threads,
        "seconds": time.perf_counter() - start,
        "machine": _machine(),
        "versions": inspection.environment(),
        "notes": list(_notes(lines, choice)),
    }
    return Report(facts, lines)


def _notes(lines: Sequence[Line], choice: Choice) -> Iterator[str]:
    yield "Share: the median, over the rounds, of a rate divided by its limit in the same round."
    yield f'feed="auto" takes {choice}.'
    uneven = [
        line.subject
        for line in lines
        if line.upper_quartile - line.lower_quartile > 0.4 * (line.images_s or 0)
    ]
    if uneven:
        yield (
            f"The rounds of these differ by more than 40 %: {'; '.join(uneven)}. If other "
            "processes are running, end them and measure again."
        )


class _Setting:
    """What to measure on: some samples of a data set, the size of batches, device and threads."""

    def __init__(self, dataset: MemmapDataset) -> None:
        if not len(dataset):
            raise ValueError(f"{dataset.path} has no samples. Build it from a folder with images.")
        self.dataset = dataset
        self.row_bytes = dataset.shards.array.row_bytes
        self.block_size = max(1, _BLOCK_BYTES // self.row_bytes)
        self.threads = available_cores()
        self.device = torch.device("cpu")
        # 256 images of 256×256×3; on the CPU, less, so that slow transforms end soon.
        batch_bytes, largest = 8 << 20, 256
        if torch.cuda.is_available():
            self.device = torch.device("cuda")  # the current one; CUDA starts when it is used
            batch_bytes, largest = 64 << 20, 2048
        # The samples that lie first in the files, so that these are read from start to end.
        limit = max(1, _SAMPLE_BYTES // self.row_bytes)
        self.sample = dataset.subset(np.argsort(dataset.index.row, kind="stable")[:limit])
        batch_size = min(largest, len(self.sample), max(1, batch_bytes // self.row_bytes))
        self.batch_size = 1 << (batch_size.bit_length() - 1)

    def random_blocks(self) -> list[np.ndarray]:
        """Return all samples in random order, divided into blocks."""
        order = np.random.default_rng(0).permutation(len(self.sample))
        return np.split(order, range(self.block_size, len(order), self.block_size))

    def synchronize(self) -> None:
        """Wait for the GPU, if there is one."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


# Measuring


def _measure_in_turn(stages: Sequence[Stage], rounds: int) -> None:
    """Prepare all stages, then measure one after the other, round after round."""
    measurements: list[tuple[Stage, Measurement]] = []
    for stage in stages:
        try:
            measurements.append((stage, stage.prepare()))
        except (MemloadError, RuntimeError, MemoryError, OSError, ValueError) as error:
            stage.reason = (str(error) or type(error).__name__).splitlines()[0]
    end = time.perf_counter() + _LAST_ROUND_AFTER
    for number in range(rounds):
        if number and time.perf_counter() > end:
            return
        for stage, measurement in measurements:
            stage.rates.append(measurement())


def _line(stage: Stage, row_bytes: int) -> Line:
    if not stage.rates:
        return Line(stage.subject, reason=stage.reason)
    low, median, high = np.quantile(stage.rates, [0.25, 0.5, 0.75]).tolist()
    facts = (stage.subject, median, low, high, median * row_bytes / 1e9, len(stage.rates))
    limits = [(float(np.median(limit.rates)), limit) for limit in stage.limits if limit.rates]
    if not limits:
        return Line(*facts)
    slowest, limit = min(limits, key=itemgetter(0))
    share = float(np.median(np.divide(stage.rates, limit.rates)))
    return Line(*facts, limit.subject, slowest, share)


def _rate(counts: Iterable[float], seconds: float) -> float:
    """Return images a second. Stops after so many seconds, or when the counts of images end."""
    start, images, passed = time.perf_counter(), 0.0, 0.0
    for number in counts:
        images += number
        passed = time.perf_counter() - start
        if passed >= seconds:
            break
    return images / passed


def _steady(step: Step) -> Measurement:
    """Repeat a step until it gets no faster, then return what measures it.

    By then, kernels are compiled, files are in RAM, and their pages registered with the GPU.
    """

    def measurement() -> float:
        return _rate(iter(step, None), _SECONDS)

    fastest, rate = 0.0, measurement()
    while rate > 1.1 * fastest:
        fastest, rate = rate, measurement()
    return measurement


def _on_threads(threads: int, work: Callable[[int], int], items: Iterable[int]) -> int:
    """Call ``work`` with each item, and add up the results."""
    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(work, items))


# Decoding


def _decoding_stage(setting: _Setting, folder: Path) -> Stage:
    """Return the stage that decodes the source files of some random samples."""
    keys = setting.dataset.keys
    chosen = np.random.default_rng(0).permutation(len(keys))[:300].tolist()
    names = [keys[sample] for sample in chosen]
    files = [folder / name for name in names if (folder / name).is_file()]
    if not files:
        raise ValueError(
            f"images: {str(folder)!r} has none of the {len(names):,} files looked for, such as "
            f"{names[0]!r}. Give the folder that {setting.dataset.path.name} was built from."
        )
    subject = f"JPEGs in a DataLoader, {counted(setting.threads, 'worker')}"
    return Stage(subject, partial(_decode, setting, files))


def _decode(setting: _Setting, files: list[Path]) -> Measurement:
    decode = partial(_decode_batch, setting.dataset.shards.array.shape)
    for file in files:
        file.read_bytes()  # the CPU is measured, not the disk
    decode(files[:1])  # if it cannot be decoded, the message is plainer here than in a worker
    repeated = files * (1 + 1_000_000 // len(files))  # more than can be decoded meanwhile
    dataset = cast("Dataset[Path]", repeated)
    batches = iter(DataLoader(dataset, 8, num_workers=setting.threads, collate_fn=decode))
    for _ in range(4 * setting.threads):  # until all workers are busy
        next(batches)
    return lambda: _rate(map(len, batches), _SLOW_SECONDS)


def _decode_batch(shape: tuple[int, ...], files: Sequence[Path]) -> torch.Tensor:
    height, width, channels = shape
    pictures = []
    for file in files:
        with Image.open(file) as image:
            picture = image.convert("L" if channels == 1 else "RGB")
        resized = ImageOps.fit(picture, (width, height), Image.Resampling.BILINEAR)
        pictures.append(np.array(resized))
    return torch.from_numpy(np.stack(pictures))


# The disk


def _cold_stages(setting: _Setting) -> list[Stage]:
    read_in_order = partial(_cold, setting, _read_in_order)
    limit = Stage("reading from start to end, cold", read_in_order, reported=False)
    read_at_random = partial(_cold, setting, _read_at_random)
    return [limit, Stage("disk cold, random order", read_at_random, [limit])]


def _cold(setting: _Setting, read: Callable[[_Setting], Iterable[float]]) -> Measurement:
    """Return what measures reading from the disk. ``read`` yields how many images it has read.

    Raises MemloadError if pages cannot be dropped from RAM.
    """
    if not hasattr(os, "posix_fadvise"):
        raise MemloadError("this system cannot drop pages from its cache")
    blocks = _blocks(setting.sample)

    def measurement() -> float:
        _drop(setting.sample, blocks)
        return _rate(read(setting), _SLOW_SECONDS)

    _drop(setting.sample, blocks)
    path, offset, size = blocks[0]
    with path.open("rb") as file, suppress(OSError):  # which says that the page is not in RAM
        if os.preadv(file.fileno(), [bytearray(1)], offset + size // 2, os.RWF_NOWAIT):
            raise MemloadError(
                "its pages stay in RAM: the disk is in memory, or another process maps them"
            )
    return measurement


#: A path, and the offset and size of a part of the file.
Block = tuple[Path, int, int]


def _blocks(sample: MemmapDataset) -> list[Block]:
    """Return the part of the files that holds a sample, divided into blocks."""
    shards, row_bytes = sample.shards, sample.shards.array.row_bytes
    header_bytes = shards.array.header_bytes
    first, last = int(sample.index.row.min()), int(sample.index.row.max())
    blocks = []
    for path, start, stop in zip(shards.paths, shards.starts, shards.starts[1:], strict=False):
        begin = header_bytes + (max(start, first) - start) * row_bytes
        end = header_bytes + (min(stop, last + 1) - start) * row_bytes
        for offset in range(begin, end, _BLOCK_BYTES):
            blocks.append((path, offset, min(_BLOCK_BYTES, end - offset)))
    return blocks


def _drop(sample: MemmapDataset, blocks: Sequence[Block]) -> None:
    """Remove the pages of a sample from RAM, unless another process maps them."""
    for pixels in sample.shards.maps:
        forget(pixels)
    for path, offset, size in blocks:
        with path.open("rb") as file:
            os.fsync(file)  # pages that are not written yet would stay
            os.posix_fadvise(file.fileno(), offset, size, os.POSIX_FADV_DONTNEED)


def _read_in_order(setting: _Setting) -> Iterator[float]:
    def read(block: Block) -> float:
        path, offset, size = block
        return np.fromfile(path, np.uint8, size, offset=offset).nbytes / setting.row_bytes

    with ThreadPoolExecutor(setting.threads) as pool:
        yield from pool.map(read, _blocks(setting.sample))


def _read_at_random(setting: _Setting) -> Iterator[float]:
    batch_size = min(64, setting.batch_size)  # of larger ones, too few would be read in a second
    loader = _loader(setting.sample, batch_size, device="cpu")  # now, before the time runs
    return (len(batch[0]) for batch in loader)


# All that is warm


def _warm_stages(setting: _Setting, auto: str) -> list[Stage]:
    """Return the stages for data in RAM. ``auto`` is the feed that a Loader chooses."""
    side = min(224, *setting.dataset.shape[1:])
    statistics = {} if setting.dataset.shape[0] == 3 else {"mean": [0.5], "std": [0.5]}
    recipe = train(side, **cast("Any", statistics))
    # 256 MB, so that the cost of starting a copy does not show.
    block = max(1, (256 << 20) // setting.row_bytes)

    take = Stage("np.take into one buffer", partial(_take, setting), reported=False)
    in_ram = partial(_copy, setting, from_ram=True)
    copy = Stage("one copy of 256 MB to the GPU", partial(in_ram, block), reported=False)
    on_gpu = partial(_copy, setting, block, from_ram=False)
    inside = Stage("one copy of 256 MB within the GPU", on_gpu, reported=False)
    limits = {"resident": inside, "dma": copy, "uva": copy, "pinned": copy, "cpu": take}
    gathers = [
        Stage(f"gather, {counted(number, 'thread')}", partial(_gather, setting, number), [take])
        for number in sorted({1, setting.threads})
    ]
    copies = Stage("copy of a batch to the GPU", partial(in_ram, setting.batch_size), [copy])
    feeds = {
        feed: Stage(f"feed {feed}", partial(_load, setting, feed), [limit])
        for feed, limit in limits.items()
    }
    transform = Stage(f"transform train({side})", partial(_transform, setting, recipe))
    loader = Stage(
        f"Loader, {auto}, train({side})",
        partial(_load, setting, auto, recipe),
        [feeds[auto], transform],
    )
    return [take, *gathers, copy, copies, inside, *feeds.values(), transform, loader]


def _take(setting: _Setting) -> Measurement:
    pixels, blocks = setting.dataset.shards.maps[0], cycle(setting.random_blocks())
    out = np.zeros((setting.block_size, *pixels.shape[1:]), pixels.dtype)

    def step() -> int:
        block = next(blocks)
        np.take(pixels, block % len(pixels), axis=0, out=out[: len(block)], mode="clip")
        return len(block)

    return _steady(step)


def _gather(setting: _Setting, threads: int) -> Measurement:
    blocks = setting.random_blocks()
    buffers = [setting.sample.gather(blocks[0]) for _ in range(threads)]

    def gather(thread: int) -> int:
        for block in blocks[thread::threads]:
            setting.sample.gather(block, buffers[thread][: len(block)])
        return sum(map(len, blocks[thread::threads]))

    return _steady(lambda: _on_threads(threads, gather, range(threads)))


def _on_gpu(setting: _Setting, operation: Callable[[], object], images: int) -> Measurement:
    """Return what measures an operation on so many images, which the GPU does asynchronously."""

    def step() -> int:
        for _ in range(32):
            operation()
        setting.synchronize()
        return 32 * images

    return _steady(step)


def _copy(setting: _Setting, images: int, *, from_ram: bool) -> Measurement:
    """Copy so many images at once to the GPU's memory."""
    if setting.device.type != "cuda":
        raise MemloadError("torch finds no CUDA device")
    target = torch.zeros((images, setting.row_bytes), dtype=torch.uint8, device=setting.device)
    source = target.cpu().pin_memory() if from_ram else target.clone()
    return _on_gpu(setting, lambda: target.copy_(source, non_blocking=True), images)


def _transform(setting: _Setting, transform: Any) -> Measurement:
    """Prepare the random numbers of many batches at once, as a Loader does."""
    size, on_gpu = setting.batch_size, setting.device.type == "cuda"
    images = setting.sample.gather(np.arange(size)).to(setting.device).permute(0, 3, 1, 2)
    positions = np.arange((32 if on_gpu else setting.threads) * size)

    def step() -> int:
        prepared = transform.prepare(positions)

        def transform_batch(start: int) -> int:
            return len(prepared(images, None, start, start + size))

        starts = range(0, len(positions), size)
        transformed = _on_threads(1 if on_gpu else setting.threads, transform_batch, starts)
        setting.synchronize()
        return transformed

    return _steady(step)


def _load(setting: _Setting, feed: str, transform: Any = None) -> Measurement:
    """Iterate over a Loader. Samples come again if an epoch has too few."""
    num_batches = 256 if setting.device.type == "cuda" else 8 * setting.threads
    positions = np.arange(num_batches * setting.batch_size) % len(setting.sample)
    device = "cpu" if feed == "cpu" else setting.device
    loader = _loader(
        setting.sample.subset(positions),
        setting.batch_size,
        device=device,
        feed=feed,
        transform=transform,
    )

    def epoch() -> int:
        images = sum(len(batch[0]) for batch in loader)
        setting.synchronize()
        return images

    return _steady(epoch)


def _loader(sample: MemmapDataset, batch_size: int, **options: Any) -> Loader:
    """Return a Loader in random order, not divided among ranks."""
    return Loader(sample, batch_size, shuffle=True, rank=0, num_replicas=1, **options)


def _choose_feed(setting: _Setting) -> Choice:
    """Choose as ``feed="auto"`` does for the whole data set, of which only a sample is loaded."""
    if setting.device.type == "cpu":
        return Choice("cpu", "the device is cpu")

    def create(names: Sequence[str]) -> Feed:
        # A Loader stands for its feed here: `first_that_serves` looks only at whether making it
        # raises, and returns it unused.
        return cast("Feed", _loader(setting.sample, 1, device=setting.device, feed=names[0]))

    samples = samples_of(setting.dataset, setting.dataset.sample_names)
    return first_that_serves(create, samples, setting.device)[1]


# Text


def _number(value: float) -> str:
    """Return a number with at most four significant digits."""
    return f"{float(f'{value:.4g}'):,.10g}"


def _machine() -> dict[str, Any]:
    """Return the processor, its cores, the system and the GPU, ready for JSON."""
    cpuinfo = Path("/proc/cpuinfo")
    model = re.search("model name\\s*: (.*)", cpuinfo.read_text() if cpuinfo.exists() else "")
    cpu = model[1] if model else platform.machine()
    facts = {"cpu": cpu, "cores": available_cores(), "system": platform.platform()}
    if torch.cuda.is_available():
        facts |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return facts
