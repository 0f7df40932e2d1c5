"""What is measured of a Loader: each stage of a batch's way to the model, timed in one way."""

import mmap
import statistics
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from functools import partial
from itertools import chain, cycle, islice, repeat
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from PIL import Image, ImageOps
from torch.utils.data import DataLoader, Dataset

from memload.errors import MemloadError
from memload.feeds.choice import expected_feed
from memload.feeds.held import ram_budget
from memload.feeds.reader import RowReader
from memload.machine import available_cores, available_memory
from memload.measure.verdict import BatchTimes, Part, milliseconds
from memload.reading.dataset import MemmapDataset
from memload.reading.loader import Loader
from memload.reading.pipeline import samples_of
from memload.wording import counted

#: Seconds of one measurement. Each is repeated, unless it takes too long; the median counts.
SECONDS, ROUNDS, MAX_SECONDS = 0.2, 3, 1.0
#: Bytes of rows to measure on: more than the cache of a CPU holds. Reading them takes a while.
_SAMPLE_BYTES, _WARMING_SECONDS = 256 << 20, 3.0
#: Batches of an epoch that is measured, and rows that are read from the disk at a time.
_BATCHES, _READS = 1024, 128
#: The part of the available RAM in which rows stay as page cache, if nothing holds them.
_PAGE_CACHE_SHARE = 0.8
#: Seconds to wait until a Loader holds what it is to hold.
_FILL_SECONDS = 5.0

#: Does a part of the work each time, and yields how many images it was.
Work = Generator[int, None, None]


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
        self._arrays = samples_of(loader.dataset, loader._names.ordered)
        self._feed: Any = loader._given_feed
        self.batch_size = loader.batch_size  # samples are repeated, if there are fewer
        self.stages: list[Stage] = []

    def measure(self, images: Path | None, share_in_ram: float | None) -> BatchTimes:
        """Measure all stages. What the verdict needs most comes first.

        ``images`` has the files of the samples, and ``share_in_ram`` is that of the rows. Errors of
        the transform are raised as they are.
        """
        loader, is_on_gpu = self._loader, self._loader.device.type == "cuda"
        cores, dataset, decoding = available_cores(), loader.dataset, None
        if images is not None:  # first, as its processes are forked
            name = f"decoding, {counted(cores, 'process', 'processes')}"
            decoding = self._time(name, _decode(dataset, images, cores))
        cold_ms = self._time("disk, random rows", _read_disk(dataset))
        self._sample = self._read_into_ram()
        if self._feed == "auto":
            self._feed = expected_feed(self._arrays, loader.device, loader._cache_bytes)
        feed = self._feed
        num_threads = loader.num_threads if feed in ("cpu", "pinned") else None
        own = feed if num_threads is None else f"{feed}, {counted(num_threads, 'thread')}"
        own_ms = self._add(f"your Loader, {own}", self._rate(self._load()))
        without = None
        if loader.transform is not None:
            without = self._time("the same without its transform", self._load(transform=None))
        counts = [n for n in (1, 2, 4, 8) if n == 1 or n <= cores]
        more = [] if num_threads is None else [n for n in counts if n > num_threads]
        with_threads = self._time_threads(f"Loader, {feed}", more)
        bare: dict[str, Any] = {"device": "cpu", "feed": "cpu", "transform": None}
        gathering = self._time_threads("gathering", counts, **bare)
        parts: dict[Part, float] = {}
        if num_threads is not None and gathering:
            parts["gathering"] = min(gathering.values())
        if is_on_gpu:
            bus = self._time("copy to the GPU", self._copy_to_gpu())
            parts |= {} if bus is None or feed == "resident" else {"bus": bus}
            for name in ("resident", "dma", "pinned"):
                self._time(f"feed {name}, no transform", self._load(feed=name, transform=None))
        disk_ms = self._disk_times(cold_ms or 0.0, share_in_ram)
        knows_disk = cold_ms is not None or share_in_ram == 1
        return BatchTimes(
            own_ms,
            *disk_ms,
            knows_disk,
            without,
            parts,
            num_threads,
            with_threads,
            is_on_gpu,
            decoding,
        )

    def _time_threads(self, name: str, counts: Sequence[int], **options: Any) -> dict[int, float]:
        """Measure a Loader with each number of threads."""
        found = {}
        for count in counts:
            work = self._load(num_threads=count, **options)
            if ms := self._time(f"{name}, {counted(count, 'thread')}", work):
                found[count] = ms
        return found

    def _time(self, name: str, work: Work) -> float | None:
        """Measure a stage, and return milliseconds per batch; None if that cannot be done."""
        reason = "not measured: there was no time left"
        if time.monotonic() < self._end:
            try:
                return self._add(name, self._rate(work))
            except (MemloadError, RuntimeError, OSError, MemoryError) as error:
                reason = (str(error) or type(error).__name__).splitlines()[0]
        self.stages.append(Stage(name, reason=reason))
        return None

    def _add(self, name: str, images_s: float) -> float:
        ms = 1000 * self.batch_size / images_s
        self.stages.append(Stage(name, images_s, ms))
        return ms

    def _rate(self, work: Work) -> float:
        """Repeat a part of the work, and return images per second."""
        rates: list[float] = []
        with closing(work):
            next(work)  # until kernels are compiled, and caches filled
            began = time.perf_counter()
            while len(rates) < ROUNDS and time.perf_counter() - began < MAX_SECONDS:
                start, images = time.perf_counter(), 0
                while not images or time.perf_counter() - start < SECONDS:
                    images += next(work)
                if self._loader.device.type == "cuda":
                    torch.cuda.synchronize(self._loader.device)
                rates.append(images / (time.perf_counter() - start))
        return statistics.median(rates)

    # ------------------------------------------------------------------------------------- stages

    def _load(self, **options: Any) -> Work:
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
            settings["cache_bytes"] = self._bytes_to_hold()
        rows = np.arange(_BATCHES * size) % len(self._sample)
        order: dict[str, Any] = {"shuffle": True, "rank": 0, "num_replicas": 1}
        like = Loader(self._sample.subset(rows), size, **order, **settings)
        end = time.monotonic() + _FILL_SECONDS
        while (counts := like.feed.counts) and counts.rows_held < counts.rows_to_hold:
            time.sleep(0.02)
            if time.monotonic() > end:
                break
        batches = chain.from_iterable(repeat(like))
        # Those of several threads arrive together.
        group = max(1, like.num_threads) if settings["feed"] in ("cpu", "pinned") else 1
        while True:
            yield sum(len(batch[0]) for batch in islice(batches, group))

    def _copy_to_gpu(self) -> Work:
        """Copy batches from page-locked memory, many before the GPU is waited for."""
        source = self._arrays[0].empty(self.batch_size, "cpu", pin_memory=True)
        target = torch.empty_like(source, device=self._loader.device)
        while True:
            for _ in range(32):
                target.copy_(source, non_blocking=True)
            torch.cuda.synchronize(target.device)
            yield 32 * len(target)

    # --------------------------------------------------------------------------- rows and the disk

    def _read_into_ram(self) -> MemmapDataset:
        """Return the samples to measure on, whose rows lie first in a file, as "dma" holds them.

        What a slow disk does not read soon is left out.
        """
        dataset, array, size = self._loader.dataset, self._arrays[0], self.batch_size
        shard, _ = array.shards.array.locate(array.row)
        order = np.lexsort((array.row, shard != shard.min()))
        order = order[: max(size, _SAMPLE_BYTES // array.row_bytes)]
        start, end = 0, time.monotonic() + _WARMING_SECONDS
        while start < len(order) and time.monotonic() < end:
            dataset.gather(order[start : start + size])
            start += size
        return dataset.subset(order[:start])

    def _bytes_to_hold(self) -> int:
        """Return the RAM with which the feed "dma" holds the sample, and not all of its files.

        It holds the same share of each file.
        """
        share, size, pages = 0.0, 0, 0
        for array in samples_of(self._sample, self._loader._names.ordered):
            number, offset = array.shards.array.locate(array.used_rows)
            sizes = np.array([file.bytes for file in array.shards.array.shards])
            share = max(share, float(((offset + array.row_bytes) / sizes[number]).max()))
            size += int(sizes[array.used_shards].sum())
            pages += len(sizes)
        return int(share * size) + pages * mmap.PAGESIZE

    def _disk_times(self, cold_ms: float, share_in_ram: float | None) -> tuple[float, float]:
        """Return what reading a batch takes from now on, and after the first epoch.

        ``cold_ms`` is what it takes if no row is in RAM. Only the images count. The feed
        ``resident`` has read all rows before its first batch.
        """
        if self._feed == "resident":
            return 0.0, 0.0
        used = sum(len(array.used_rows) * array.row_bytes for array in self._arrays)
        room = _PAGE_CACHE_SHARE * (available_memory() or used / _PAGE_CACHE_SHARE)
        if self._feed in ("dma", "disk"):
            room = ram_budget(self._loader._cache_bytes)
        later = max(0.0, 1 - room / used) * cold_ms
        return max((1 - (share_in_ram or 0.0)) * cold_ms, later), later


def _read_disk(dataset: MemmapDataset) -> Work:
    """Read random rows past the page cache, as the feed "dma" does those that it does not hold."""
    order = np.random.default_rng(0).permutation(dataset.index.row)
    parts = np.array_split(order, -(-len(order) // _READS))
    with closing(RowReader(dataset.shards)) as reader:
        if not reader.is_direct:
            raise MemloadError("the files cannot be read past the page cache")
        for rows in cycle(parts):
            reader.begin(*dataset.shards.array.locate(rows), np.zeros(len(rows), bool)).wait()
            yield len(rows)


def _decode(dataset: MemmapDataset, folder: Path, cores: int) -> Work:
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
    batches = iter(DataLoader(again, 8, num_workers=cores, collate_fn=decode))
    for _ in range(4 * cores):  # until all workers are busy
        next(batches)
    for batch in batches:
        yield len(batch)


def _decode_batch(shape: tuple[int, ...], files: Sequence[Path]) -> torch.Tensor:
    height, width, channels = shape
    pictures = []
    for file in files:
        with Image.open(file) as image:
            picture = image.convert("L" if channels == 1 else "RGB")
        fitted = ImageOps.fit(picture, (width, height), Image.Resampling.BILINEAR)
        pictures.append(torch.from_numpy(np.array(fitted)))
    return torch.stack(pictures)
