"""How long a batch of a Loader takes, and its parts: disk, gathering, bus and transform."""

from collections.abc import Generator
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np

from memload.bench import stages
from memload.bench.direct import is_direct, random_reads
from memload.bench.loading import make_loader
from memload.bench.memory import copy_stage, gather_stage
from memload.bench.run import choose_feed
from memload.bench.setting import Setting
from memload.bench.stages import Measurement, Stage, rate, steady
from memload.doctor.data_checks import rows_in_ram, share_held
from memload.doctor.judging import MUCH_LESS, Bound, Times, best_workers
from memload.doctor.measurements import Measurements
from memload.errors import MemloadError
from memload.machine import available_cores
from memload.reading.loader import Loader
from memload.transforms import Transform
from memload.wording import counted

#: Numbers of threads to try, as far as there are cores.
_THREADS = (1, 2, 4, 8)
_PREFETCH_FACTORS = (1, 2, 4)
#: Threads that read the disk, and about how much each of them at once. A disk that reads 15 MB/s
#: of random rows is done with that in 0.6 s.
_DISK_THREADS, _DISK_BYTES = 32, 256 << 10
#: Seconds of reading the disk to find out how fast it is, and to bring rows to RAM.
_DISK_SECONDS, _WARMING_SECONDS = 1.0, 3.0
#: Rows to gather, at most: more than the cache of a CPU holds.
_SAMPLE_BYTES = 256 << 20
#: Batches of an epoch that is measured. Samples come again if there are too few.
_BATCHES = 256


class LoaderTimes:
    """Measures what a Loader does, on samples that it is brought to RAM before.

    The Loader itself is not iterated over. Others with its settings are, in random order.
    """

    def __init__(self, loader: Loader, seconds: float) -> None:
        if loader.batch_sampler is not None:
            raise ValueError(
                "diagnose() takes a Loader with batch_size, not one with batch_sampler. Make one "
                "with the same settings, for the batch size that is usual."
            )
        self._loader = loader
        batch_size = min(loader.batch_size, len(loader.dataset))
        self.measurements = Measurements(batch_size, seconds)
        self._rows_from_disk = self._disk_rate()
        self._setting = Setting(loader.dataset, sample_bytes=self._bytes_to_warm())
        self._setting.batch_size, self._setting.device = batch_size, loader.device
        self.feed: str = loader._given_feed
        if self.feed == "auto":
            self.feed = choose_feed(self._setting).name
        #: The best values here, once they are measured.
        self.num_threads: int | None = None
        self.prefetch_factor: int | None = None

    def measure(self, step_ms: float | None = None) -> Times:
        """Measure everything, the most important first."""
        loader, measurements = self._loader, self.measurements
        self._setting.sample.gather(np.arange(len(self._setting.sample)))  # brings them to RAM
        batch_ms = measurements.measure(self._loading(loader.num_threads, loader.prefetch_factor))
        assert batch_ms is not None  # it comes before the time is over, and raises errors
        parts = self._parts()
        cores = available_cores()
        threads = [number for number in _THREADS if number == 1 or number <= cores]
        gathering = measurements.sweep(threads, partial(gather_stage, self._setting))
        if self.feed == "cpu" and 1 in gathering:
            parts["gathering"] = gathering[1]
        by_threads = {}
        if self._has_threads:
            others = [number for number in threads if number != loader.num_threads]
            prefetch = loader.prefetch_factor
            by_threads = measurements.sweep(others, lambda n: self._loading(n, prefetch))
            by_threads[loader.num_threads] = batch_ms
            self.num_threads = best_workers(by_threads, step_ms)
        best_ms = by_threads.get(self.num_threads or 0, batch_ms)
        self._find_prefetch_factor(best_ms)
        disk, disk_later = self._disk_times()
        return Times(
            batch_ms,
            disk=disk,
            disk_later=disk_later,
            parts=parts,
            workers=loader.num_threads,
            by_workers=by_threads,
            is_ahead=loader.num_threads > 0 or not self._has_threads,
        )

    def _disk_rate(self) -> float | None:
        """Return how many random rows a second the disk reads; None if it cannot be told."""
        dataset = self._loader.dataset
        rows_at_once = max(1, _DISK_BYTES // dataset.shards.array.row_bytes)

        def prepare() -> Measurement:
            if not is_direct(dataset):
                raise MemloadError("the files cannot be read past the page cache")
            return lambda: random_reads(dataset, _DISK_THREADS, _DISK_SECONDS, rows_at_once)

        stage = Stage("reading the disk, random rows", prepare)
        self.measurements.measure(stage)
        return stage.rates[0] if stage.rates else None

    def _bytes_to_warm(self) -> int:
        """Return the size of the rows to measure on: those that the disk reads in a short time."""
        if self._rows_from_disk is None:
            return _SAMPLE_BYTES
        row_bytes = self._loader.dataset.shards.array.row_bytes
        readable = int(self._rows_from_disk * row_bytes * _WARMING_SECONDS)
        return min(_SAMPLE_BYTES, readable)

    def _disk_times(self) -> tuple[float, float]:
        """Return what reading a batch takes now, and after the first epoch, in milliseconds."""
        dataset = self._loader.dataset
        if self._rows_from_disk is None or self.feed == "resident":  # which reads it before
            return 0.0, 0.0
        batch_ms = 1000 * self.measurements.batch_size / self._rows_from_disk
        in_ram = rows_in_ram(dataset) or 0.0
        later = 1 - share_held(dataset, self.feed)
        return (1 - in_ram) * batch_ms, later * batch_ms

    def _loading(self, num_threads: int, prefetch_factor: int) -> Stage:
        """Return the stage of a Loader with these settings."""

        def prepare() -> Measurement:
            loader = self._loader_like(
                _BATCHES,
                transform=self._loader.transform,
                num_threads=num_threads,
                prefetch_factor=prefetch_factor,
            )
            # As many as come at once, if there are threads.
            group = max(1, num_threads * prefetch_factor) if self._has_threads else 4

            def measurement() -> float:
                with closing(_endless(loader)) as batches:

                    def step() -> int:
                        return sum(len(next(batches)[0]) for _ in range(group))

                    step()  # until all threads are busy, and kernels are compiled
                    return rate(iter(step, None), stages.SECONDS)

            return measurement

        threads = f"{counted(num_threads, 'thread')}, " if self._has_threads else ""
        name = f"Loader, feed {self.feed}, {threads}prefetch_factor={prefetch_factor}"
        return Stage(name, prepare)

    @property
    def _has_threads(self) -> bool:
        return self.feed in ("cpu", "pinned")

    def _loader_like(self, num_batches: int, **options: Any) -> Loader:
        """Return a Loader with the same settings over samples in RAM, which come again and again.

        Errors that it raises are those of the Loader that is diagnosed.
        """
        size, sample = self._setting.batch_size, self._setting.sample
        return make_loader(
            sample.subset(np.arange(num_batches * size) % len(sample)),
            size,
            columns=self._loader._names,
            device=self._setting.device,
            feed=self.feed,
            **options,
        )

    def _find_prefetch_factor(self, batch_ms: float) -> None:
        loader = self._loader
        threads = self.num_threads or loader.num_threads
        own = loader.prefetch_factor
        by_factor = self.measurements.sweep(
            [factor for factor in _PREFETCH_FACTORS if factor != own],
            lambda factor: self._loading(threads, factor),
        )
        fastest = min(by_factor, key=by_factor.__getitem__, default=own)
        is_better = by_factor.get(fastest, batch_ms) < MUCH_LESS * batch_ms
        self.prefetch_factor = fastest if is_better else own

    def _parts(self) -> dict[Bound, float]:
        """Return what the work on a batch takes in one thread, or on the GPU."""
        parts: dict[Bound, float] = {}
        on_gpu = self._setting.device.type == "cuda"
        if on_gpu:
            bus = self.measurements.measure(copy_stage(self._setting))
            if bus is not None and self.feed != "resident":
                parts["bus"] = bus
        if self._loader.transform is not None:
            where = "on the GPU" if on_gpu else "one thread"
            stage = Stage(f"transform, {where}", self._transforming)
            transform = self.measurements.measure(stage)
            if transform is not None:
                parts["transform"] = transform
        return parts

    def _transforming(self) -> Measurement:
        """Return what measures the transform alone, on one batch again and again."""
        size, transform = self._setting.batch_size, self._loader.transform
        images, *values = next(iter(self._loader_like(1, num_threads=1)))
        columns = dict(zip(self._loader._names, values, strict=True))

        def step() -> int:
            if isinstance(transform, Transform):
                transform.prepare(np.arange(size))(images, columns, 0, size)
            else:
                transform(images)
            self._setting.synchronize()
            return size

        return steady(step)


def _endless(loader: Loader) -> Generator[Any, None, None]:
    """Yield the batches of one epoch after another."""
    while True:
        yield from loader
