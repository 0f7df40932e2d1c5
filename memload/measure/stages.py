"""What is measured of a Loader: each stage of a batch's way to the model, timed in one way."""

import mmap
import statistics
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import chain, cycle, islice, repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch.utils.data import DataLoader

from memload.errors import MemloadError
from memload.feeds.choice import expected_feed
from memload.feeds.held import ram_budget
from memload.feeds.reader import RowReader
from memload.machine import available_cores, available_memory
from memload.measure.verdict import BatchTimes, milliseconds
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
#: Seconds to wait until a Loader holds what it is to hold.
_FILL_SECONDS = 5.0

#: Does a part of the work each time, and yields how many images it was.
Work = Generator[int, None, None]


@dataclass(frozen=True)
class Stage:
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
    begins after ``end``, but for those without which there is no verdict.
    """

    def __init__(self, loader: Loader, end: float) -> None:
        if loader.batch_sampler is not None:
            raise ValueError("diagnose() takes a Loader with batch_size, not with batch_sampler.")
        if not len(loader):
            raise ValueError("The Loader has no batches. Give it samples, or a smaller batch_size.")
        self._loader, self._end = loader, end
        #: of the batches that the Loader really makes: an epoch may be smaller than one
        self.batch_size = min(loader.batch_size, loader._num_samples)
        self.arrays = samples_of(loader.dataset, loader._names.ordered)
        self.stages: list[Stage] = []

    def decoding(self, images: Path) -> float | None:
        """Measure decoding the files of the samples, before all else: processes are forked."""
        cores = available_cores()
        name = f"decoding, {counted(cores, 'process', 'processes')}"
        return self._try(name, _decode(self._loader.dataset, images, cores))

    def measure(self, share_in_ram: float | None) -> BatchTimes:
        """Measure all other stages. What the verdict needs most comes first.

        ``share_in_ram`` is that of the rows. Errors of the transform are raised as they are.
        """
        loader = self._loader
        cold_ms = self._try("disk, random rows", _read_disk(loader.dataset))
        self._sample = self._read_into_ram()
        self._feed: Any = loader._given_feed
        if self._feed == "auto":
            self._feed = expected_feed(self.arrays, loader.device, loader._cache_bytes)
        name, num_threads = f"your Loader, {self._feed}", None
        if self._feed in ("cpu", "pinned"):
            num_threads = loader.num_threads
            name += f", {counted(num_threads, 'thread')}"
        own_ms, without = self._measure(name, self._iterate()), None
        if loader.transform is not None:
            work = self._iterate(transform=None)
            without = self._measure("the same without its transform", work)
        counts = [n for n in (1, 2, 4, 8) if n == 1 or n <= available_cores()]
        more = [n for n in counts if num_threads is not None and n > num_threads]
        with_threads = {
            n: self._try(
                f"Loader, {self._feed}, {counted(n, 'thread')}", self._iterate(num_threads=n)
            )
            for n in more
        }
        for n in counts:
            work = self._iterate(device="cpu", feed="cpu", transform=None, num_threads=n)
            self._try(f"gathering, {counted(n, 'thread')}", work)
        if loader.device.type == "cuda":
            self._try("copy to the GPU", self._copy_to_gpu())
            for feed in ("resident", "dma", "pinned"):
                self._try(f"feed {feed}, no transform", self._iterate(feed=feed, transform=None))
        disk_ms, disk_later_ms = self._disk_times(cold_ms, share_in_ram)
        return BatchTimes(
            loader=own_ms,
            disk=disk_ms,
            disk_later=disk_later_ms,
            without_transform=without,
            num_threads=num_threads,
            with_threads={n: ms for n, ms in with_threads.items() if ms is not None},
            is_on_gpu=loader.device.type == "cuda",
        )

    def _try(self, name: str, work: Work) -> float | None:
        """Measure a stage, and return milliseconds per batch; None if that cannot be done."""
        reason = "not measured: there was no time left"
        if time.monotonic() < self._end:
            try:
                return self._measure(name, work)
            except (MemloadError, RuntimeError, OSError, MemoryError) as error:
                reason = (str(error) or type(error).__name__).splitlines()[0]
        self.stages.append(Stage(name, reason=reason))
        return None

    def _measure(self, name: str, work: Work) -> float:
        """Repeat a part of the work, and return milliseconds per batch."""
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
        images_s = statistics.median(rates)
        ms = 1000 * self.batch_size / images_s
        self.stages.append(Stage(name, images_s, ms))
        return ms

    # ------------------------------------------------------------------------------------- stages

    def _iterate(self, **options: Any) -> Work:
        """Iterate over another Loader, with these options and else with those of the user's.

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
        samples = self._sample.subset(np.arange(_BATCHES * size) % len(self._sample))
        other = Loader(samples, size, shuffle=True, rank=0, num_replicas=1, **settings)
        end = time.monotonic() + _FILL_SECONDS
        while (counts := other.feed.counts) and counts.rows_held < counts.rows_to_hold:
            if time.monotonic() > end:
                break
            time.sleep(0.02)
        batches = chain.from_iterable(repeat(other))
        while True:  # batches of several threads arrive together
            yield sum(len(batch[0]) for batch in islice(batches, max(1, other.num_threads)))

    def _copy_to_gpu(self) -> Work:
        """Copy batches from page-locked memory, many before the GPU is waited for."""
        source = self.arrays[0].empty(self.batch_size, "cpu", pin_memory=True)
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
        dataset, array, size = self._loader.dataset, self.arrays[0], self.batch_size
        order = np.argsort(array.row)[: max(size, _SAMPLE_BYTES // array.row_bytes)]
        start, end = 0, time.monotonic() + _WARMING_SECONDS
        while start < len(order) and time.monotonic() < end:
            dataset.gather(order[start : start + size])
            start += size
        return dataset.subset(order[:start])

    def _bytes_to_hold(self) -> int:
        """Return the RAM with which the feed "dma" holds the sample, and not all of its files.

        It holds the same share of each file, from its beginning: here the largest share that the
        sample needs of any. A page more for each file makes up for rounding.
        """
        share, size, pages = 0.0, 0, 0
        for array in samples_of(self._sample, self._loader._names.ordered):
            number, offset = array.shards.array.locate(array.used_rows)
            sizes = np.array([file.bytes for file in array.shards.array.shards])
            share = max(share, float(((offset + array.row_bytes) / sizes[number]).max()))
            size += int(sizes[array.used_shards].sum())
            pages += len(sizes)
        return int(share * size) + pages * mmap.PAGESIZE

    def _disk_times(
        self, cold_ms: float | None, share_in_ram: float | None
    ) -> tuple[float | None, float]:
        """Return what reading a batch takes now, and after the first epoch. None: not known.

        ``cold_ms`` is what the images take if no row is in RAM, None if it could not be measured.
        Other arrays take as long per byte. In later epochs, what does not fit in RAM is read again.
        """
        if cold_ms is None:
            return (0.0 if share_in_ram == 1 else None), 0.0
        cold_ms *= sum(array.row_bytes for array in self.arrays) / self.arrays[0].row_bytes
        used = sum(len(array.used_rows) * array.row_bytes for array in self.arrays)
        room = available_memory() or 0
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
    again: Any = files * (1 + 100_000 // len(files))
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
        pictures.append(np.array(ImageOps.fit(picture, (width, height), Image.Resampling.BILINEAR)))
    return torch.from_numpy(np.stack(pictures))
