"""What is measured of a Loader: each stage of a batch's way to the model, timed in one way."""

import mmap
import os
import statistics
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from PIL import Image, ImageOps
from torch.utils.data import DataLoader, Dataset

from memload.errors import MemloadError
from memload.feeds.choice import expected_feed
from memload.feeds.held import ram_budget
from memload.machine import available_cores, available_memory
from memload.measure.checks import share_in_ram
from memload.measure.verdict import BatchTimes, Part, milliseconds
from memload.reading.dataset import MemmapDataset
from memload.reading.loader import Loader
from memload.reading.pipeline import samples_of
from memload.storage.shards import open_direct
from memload.transforms import Transform
from memload.wording import counted

#: Seconds of one measurement. Each is repeated, unless it takes too long; the median counts.
SECONDS, ROUNDS, MAX_SECONDS = 0.2, 3, 1.0
#: Bytes of rows to measure on: more than the cache of a CPU holds. Reading them takes a while.
_SAMPLE_BYTES, _WARMING_SECONDS = 256 << 20, 3.0
#: Numbers of threads to try, as far as there are cores; and threads that read the disk.
_THREADS, _DISK_THREADS = (1, 2, 4, 8), 32
#: Rows to read from the disk at most, and batches of an epoch that is measured.
_DISK_ROWS, _BATCHES = 100_000, 1024
#: The part of the available RAM in which rows stay as page cache, if nothing holds them.
_PAGE_CACHE_SHARE = 0.8
#: Seconds to wait until a Loader holds what it is to hold.
_FILL_SECONDS = 5.0

#: Does a part of the work, and returns how many images it was.
Step = Callable[[], int]
#: Makes a step. What it opens is closed with the stack.
Prepare = Callable[[ExitStack], Step]


class Stage(NamedTuple):
    """How fast a stage is, or the reason why that is not known."""

    name: str
    images_s: float | None = None
    ms: float | None = None  #: milliseconds per batch
    reason: str = ""

    def __str__(self) -> str:
        if self.images_s is None or self.ms is None:
            return f"{self.name:36}  {'–':>8}  {'–':>10}  {self.reason}"
        return f"{self.name:36}  {milliseconds(self.ms):>8}  {self.images_s:>10,.0f}"


class LoaderMeasurer:
    """Measures others with the settings of a Loader, on rows that are in RAM, and the disk.

    The Loader itself is not iterated over. ``stages`` are the lines of the table so far. No stage
    begins after ``seconds``.
    """

    def __init__(self, loader: Loader, seconds: float) -> None:
        if loader.batch_sampler is not None:
            raise ValueError("diagnose() takes a Loader with batch_size, not with batch_sampler.")
        if not len(loader.dataset) or not len(loader):
            missing = "batches. Use a smaller batch_size" if len(loader.dataset) else "samples"
            raise ValueError(f"The Loader has no {missing}.")
        self._loader, self._end = loader, time.monotonic() + seconds
        self.batch_size = min(loader.batch_size, len(loader.dataset))
        self.stages: list[Stage] = []
        self._sample = _first_rows(loader.dataset, self.batch_size)

    def measure(self) -> BatchTimes:
        """Measure all stages. What the verdict needs most comes first.

        Errors of the transform are raised as they are.
        """
        loader = self._loader
        cold_ms = self._time("disk, random rows", partial(_read_disk, loader.dataset))
        self._sample = _read_into_ram(self._sample)
        feed = self._feed = _expected_feed(loader)
        num_threads = loader.num_threads if feed in ("cpu", "pinned") else None
        own_ms = self._time_own(feed, num_threads)
        parts = self._time_parts(feed, num_threads or 1)
        with_threads = {
            n: self._time(
                f"Loader, {feed}, {counted(n, 'thread')}", partial(self._load, num_threads=n)
            )
            for n in _thread_counts()
            if num_threads is not None and n > num_threads
        }
        for name in () if loader.device.type == "cpu" else ("resident", "dma", "pinned"):
            self._time(f"feed {name}, no transform", partial(self._load, feed=name, transform=None))
        disk_ms, disk_later_ms = disk_times(loader, feed, cold_ms or 0.0)
        return BatchTimes(
            own_ms,
            disk_ms,
            disk_later_ms,
            {part: ms for part, ms in parts.items() if ms is not None},
            num_threads,
            {count: ms for count, ms in with_threads.items() if ms is not None},
            is_on_gpu=loader.device.type == "cuda",
        )

    def decode(self, folder: Path) -> float | None:
        """Measure decoding the samples' files, on all cores. Return milliseconds per batch.

        It comes first: its worker processes are forked before there are threads or CUDA.
        """
        name = f"decoding, {counted(available_cores(), 'process', 'processes')}"
        prepare = partial(_decode, self._loader.dataset, folder)
        return self._time(name, prepare)

    # ------------------------------------------------------------------------------ how it is timed

    def _time(self, name: str, prepare: Prepare) -> float | None:
        """Measure a stage, and return milliseconds per batch; None if that cannot be done."""
        if time.monotonic() > self._end:
            self.stages.append(Stage(name, reason="not measured: there was no time left"))
            return None
        try:
            return self._add(name, self._rate(prepare))
        except (MemloadError, RuntimeError, OSError, MemoryError) as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            self.stages.append(Stage(name, reason=reason))
            return None

    def _time_own(self, feed: str, num_threads: int | None) -> float:
        threads = "" if num_threads is None else f", {counted(num_threads, 'thread')}"
        return self._add(f"your Loader, {feed}{threads}", self._rate(self._load))

    def _add(self, name: str, images_s: float) -> float:
        ms = 1000 * self.batch_size / images_s
        self.stages.append(Stage(name, images_s, ms))
        return ms

    def _rate(self, prepare: Prepare) -> float:
        """Repeat a step, and return images per second."""
        with ExitStack() as stack:
            step = prepare(stack)
            step()  # until kernels are compiled, and caches filled
            return self._median_rate(step)

    def _median_rate(self, step: Step) -> float:
        rates: list[float] = []
        start_of_all = time.perf_counter()
        while len(rates) < ROUNDS and time.perf_counter() - start_of_all < MAX_SECONDS:
            start, images = time.perf_counter(), 0
            while not images or time.perf_counter() - start < SECONDS:
                images += step()
            if self._loader.device.type == "cuda":
                torch.cuda.synchronize(self._loader.device)
            rates.append(images / (time.perf_counter() - start))
        return statistics.median(rates)

    # ------------------------------------------------------------------------------------- stages

    def _time_parts(self, feed: str, threads: int) -> dict[Part, float | None]:
        """Measure what the work on a batch consists of."""
        sample, size, device = self._sample, self.batch_size, self._loader.device
        gathering = {
            n: self._time(f"gathering, {counted(n, 'thread')}", partial(_gather, sample, size, n))
            for n in _thread_counts()
        }
        parts: dict[Part, float | None] = {}
        if feed == "cpu":
            parts["gathering"] = gathering[1]
        elif feed == "pinned":
            parts["gathering"] = gathering[max(n for n in gathering if n <= threads)]
        if device.type == "cuda":
            bus = self._time("copy to the GPU", partial(_copy_to_gpu, sample, size, device))
            parts |= {} if feed == "resident" else {"bus": bus}
        if self._loader.transform is not None:
            parts["transform"] = self._time("transform, alone", self._transform)
        return parts

    def _load(self, stack: ExitStack, **options: Any) -> Step:
        """Iterate over a Loader with these options, else with those of the user's.

        Its samples come again and again, so that an epoch is long.
        """
        loader, size = self._loader, self.batch_size
        settings: dict[str, Any] = {
            "columns": loader._names.ordered,
            "device": loader.device,
            "feed": self._feed,
            "transform": loader.transform,
            "num_threads": loader.num_threads,
            "prefetch_factor": loader.prefetch_factor,
            **options,
        }
        if settings["feed"] in ("dma", "disk"):
            settings["cache_bytes"] = _bytes_to_hold(self._sample)
        rows = np.arange(_BATCHES * size) % len(self._sample)
        order: dict[str, Any] = {"shuffle": True, "rank": 0, "num_replicas": 1}
        like = Loader(self._sample.subset(rows), size, **order, **settings)
        _wait_until_filled(like)
        batches = stack.enter_context(closing(_endless(like)))
        # Those of several threads arrive together.
        group = max(1, like.num_threads) if settings["feed"] in ("cpu", "pinned") else 1
        return lambda: sum(len(batch[0]) for batch in islice(batches, group))

    def _transform(self, stack: ExitStack) -> Step:
        """Transform one batch again and again; on the CPU in a thread, as a Loader does.

        On a busy machine, torch's operations took 6 times as long on the main thread.
        """
        loader, size = self._loader, self.batch_size
        device, names = loader.device, loader._names.ordered
        one = Loader(self._sample, size, columns=names, device=device, num_threads=0)
        images, *values = next(iter(one))
        columns, transform = dict(zip(names, values, strict=True)), loader.transform

        def step() -> int:
            if isinstance(transform, Transform):
                transform.prepare(np.arange(size))(images, columns, 0, size)
            elif transform is not None:
                transform(images)
            return size

        if device.type == "cuda":
            return step
        pool = stack.enter_context(ThreadPoolExecutor(1))
        return lambda: pool.submit(step).result()


def _thread_counts() -> list[int]:
    cores = available_cores()
    return [count for count in _THREADS if count == 1 or count <= cores]


def _endless(loader: Loader) -> Generator[Any, None, None]:
    while True:
        yield from loader


def _first_rows(dataset: MemmapDataset, least: int) -> MemmapDataset:
    """Return the samples whose rows lie first in a file, which the feed "dma" would hold."""
    shard, _ = dataset.shards.array.locate(dataset.index.row)
    order = np.lexsort((dataset.index.row, shard != shard.min()))
    return dataset.subset(order[: max(least, _SAMPLE_BYTES // dataset.shards.array.row_bytes)])


def _read_into_ram(sample: MemmapDataset) -> MemmapDataset:
    """Read the samples to measure on, and leave out what a slow disk does not read soon."""
    end, rows = time.monotonic() + _WARMING_SECONDS, np.arange(len(sample))
    step = max(1, (1 << 20) // sample.shards.array.row_bytes)
    for start in range(0, len(rows), step):
        sample.gather(rows[start : start + step])
        if time.monotonic() > end:
            return sample.subset(rows[: start + step])
    return sample


def _read_disk(dataset: MemmapDataset, stack: ExitStack) -> Step:
    """Read random rows past the page cache, so that nothing in it is dropped."""
    array, rows = dataset.shards.array, np.random.default_rng(0).permutation(dataset.index.row)
    files, offsets = array.locate(rows[:_DISK_ROWS])
    starts = offsets // mmap.PAGESIZE * mmap.PAGESIZE
    ends = -(-(offsets + array.row_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    places = cycle(zip(files.tolist(), starts.tolist(), (ends - starts).tolist(), strict=True))
    direct: dict[int, int] = {}
    for number in np.unique(files).tolist():
        descriptor = open_direct(dataset.shards.descriptors[number])
        if descriptor is None:
            raise MemloadError("the files cannot be read past the page cache")
        direct[number] = descriptor
        stack.callback(os.close, descriptor)
    pool = stack.enter_context(ThreadPoolExecutor(_DISK_THREADS))

    def read(place: tuple[int, int, int]) -> int:
        number, start, size = place
        with mmap.mmap(-1, size) as buffer:  # begins at a page, as direct reads need
            os.preadv(direct[number], [buffer], start)
        return 1

    return lambda: sum(pool.map(read, islice(places, _DISK_THREADS)))


def _gather(sample: MemmapDataset, size: int, threads: int, stack: ExitStack) -> Step:
    """Gather random batches, one on each thread."""
    order = np.random.default_rng(0).permutation(np.arange(max(size, len(sample))) % len(sample))
    batches = cycle(np.array_split(order, len(order) // size))
    buffers = [sample.gather(np.zeros(2 * size, np.int64)) for _ in range(threads)]
    pool = stack.enter_context(ThreadPoolExecutor(threads))

    def gather(buffer: torch.Tensor, batch: np.ndarray) -> int:
        sample.gather(batch, buffer[: len(batch)])
        return len(batch)

    return lambda: sum(pool.map(gather, buffers, islice(batches, threads)))


def _copy_to_gpu(sample: MemmapDataset, size: int, device: torch.device, _: ExitStack) -> Step:
    """Copy batches from page-locked memory, many before the GPU is waited for."""
    target = torch.empty((size, sample.shards.array.row_bytes), dtype=torch.uint8, device=device)
    source = torch.empty_like(target, device="cpu", pin_memory=True)

    def step() -> int:
        for _ in range(32):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)
        return 32 * size

    return step


def _decode(dataset: MemmapDataset, folder: Path, _stack: ExitStack) -> Step:
    """Decode and resize files of random samples in a DataLoader, with a worker for each core."""
    keys = dataset.keys
    chosen = np.random.default_rng(0).permutation(len(keys))[:300].tolist()
    files = [folder / keys[sample] for sample in chosen if (folder / keys[sample]).is_file()]
    if not files:
        raise MemloadError(f"it has none of the files, such as {keys[chosen[0]]}")
    for file in files:
        file.read_bytes()  # the CPU is measured, not the disk
    again = cast("Dataset[Path]", files * (1 + 100_000 // len(files)))
    decode = partial(_decode_batch, dataset.shards.array.shape)
    cores = available_cores()
    batches = iter(DataLoader(again, 8, num_workers=cores, collate_fn=decode))
    for _ in range(4 * cores):  # until all workers are busy
        next(batches)
    return lambda: len(next(batches))


def _decode_batch(shape: tuple[int, ...], files: Sequence[Path]) -> torch.Tensor:
    height, width, channels = shape
    pictures = []
    for file in files:
        with Image.open(file) as image:
            picture = image.convert("L" if channels == 1 else "RGB")
        fitted = ImageOps.fit(picture, (width, height), Image.Resampling.BILINEAR)
        pictures.append(np.asarray(fitted))
    return torch.from_numpy(np.stack(pictures))


# ---------------------------------------------------------------------------- feeds and the disk


def _expected_feed(loader: Loader) -> str:
    """Return the feed that the Loader takes, without creating it: that may read all rows."""
    if loader._given_feed != "auto":
        return loader._given_feed
    arrays = samples_of(loader.dataset, loader._names.ordered)
    return expected_feed(arrays, loader.device)


def _bytes_to_hold(sample: MemmapDataset) -> int:
    """Return the RAM with which the feed "dma" holds these samples, and not all of their files.

    It holds the same share of each file.
    """
    share, size, pages = 0.0, 0, 0
    for array in samples_of(
        sample, [name for name in sample.sample_names if name in sample.arrays]
    ):
        files = array.shards.array.shards
        number, offset = array.shards.array.locate(array.used_rows)
        sizes = np.array([file.bytes for file in files])
        share = max(share, float(((offset + array.row_bytes) / sizes[number]).max()))
        size += int(sizes[array.used_shards].sum())
        pages += len(files)
    return int(share * size) + pages * mmap.PAGESIZE


def _wait_until_filled(loader: Loader) -> None:
    end = time.monotonic() + _FILL_SECONDS
    while (counts := loader.feed.counts) and time.monotonic() < end:
        if counts.rows_held >= counts.rows_to_hold:
            return
        time.sleep(0.02)


def disk_times(loader: Loader, feed: str, cold_ms: float) -> tuple[float, float]:
    """Return what reading a batch takes from now on, and after the first epoch, in milliseconds.

    ``cold_ms`` is what it takes if no row is in RAM. Only the images count. The feed ``resident``
    has read all rows before its first batch.
    """
    if feed == "resident":
        return 0.0, 0.0
    arrays = samples_of(loader.dataset, loader._names.ordered)
    used = sum(len(array.used_rows) * array.row_bytes for array in arrays)
    room = _PAGE_CACHE_SHARE * (available_memory() or used / _PAGE_CACHE_SHARE)
    if feed in ("dma", "disk"):
        room = ram_budget(loader._cache_bytes)
    later = max(0.0, 1 - room / used) * cold_ms
    return max((1 - (share_in_ram(loader.dataset) or 0.0)) * cold_ms, later), later
