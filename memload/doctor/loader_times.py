"""How long a batch of a Loader takes, and its parts: disk, gathering, bus and transform."""

import time
from collections.abc import Generator, Iterable, Mapping
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np

from memload.bench import stages
from memload.bench.loading import make_loader, wait_until_filled
from memload.bench.memory import copy_stage, gather_stage
from memload.bench.run import choose_feed
from memload.bench.setting import Setting
from memload.bench.stages import Measurement, Stage, rate
from memload.doctor.disk import disk_stage, disk_times
from memload.doctor.judging import MUCH_LESS, Bound, Times, best_workers
from memload.doctor.measurements import Measurements
from memload.machine import available_cores
from memload.reading.loader import Loader
from memload.transforms import Transform
from memload.wording import counted

#: Numbers of threads to try, as far as there are cores.
_THREADS = (1, 2, 4, 8)
_PREFETCH_FACTORS = (1, 2, 4)
#: Seconds of reading the disk to bring rows to RAM, about.
_WARMING_SECONDS = 3.0
#: Seconds after which a Loader is no longer waited for, before its time counts and then.
_MAX_SECONDS = 2.0
#: Rows to gather, at most: more than the cache of a CPU holds.
_SAMPLE_BYTES = 256 << 20
#: Batches of an epoch that is measured. Samples come again if there are too few.
_BATCHES = 256


class LoaderTimes:
    """Measures what a Loader does, on samples that are in RAM, and what the disk takes apart.

    The Loader itself is not iterated over. Others with its settings are, in random order.
    """

    def __init__(self, loader: Loader, seconds: float) -> None:
        if loader.batch_sampler is not None:
            raise ValueError(
                "diagnose() takes a Loader with batch_size, not one with batch_sampler. Make one "
                "with the same settings, for the batch size that is usual."
            )
        self._loader = loader
        if not len(loader):
            raise ValueError("The Loader has no batches. Use a smaller batch_size.")
        batch_size = min(loader.batch_size, len(loader.dataset))
        self.measurements = Measurements(batch_size, seconds)
        self._setting = Setting(loader.dataset, sample_bytes=_SAMPLE_BYTES)
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
        cold_ms = measurements.measure(disk_stage(loader.dataset))
        disk, disk_later = disk_times(loader.dataset, self.feed, cold_ms)
        self._bring_sample_to_ram()
        batch_ms = measurements.measure_anyway(
            self._loading(loader.num_threads, loader.prefetch_factor)
        )
        plain = self._loading(1, loader.prefetch_factor, has_transform=False)
        plain_ms = measurements.measure(plain) if self.feed == "cpu" else None
        by_threads = {loader.num_threads: batch_ms, **self._by_more_threads()}
        self._find_prefetch_factor(by_threads)
        gathering = measurements.sweep(_threads(), partial(gather_stage, self._setting))
        by_threads |= self._by_fewer_threads()
        if len(by_threads) > 1:  # otherwise nothing was compared
            with_threads = {number: ms for number, ms in by_threads.items() if number}
            self.num_threads = best_workers(with_threads, step_ms)
        if self.feed == "cpu":
            parts = self._parts_of_a_thread(plain_ms, by_threads)
        else:
            parts = self._parts_of_gpu(gathering.get(1))
        return Times(
            batch_ms,
            disk=disk,
            disk_later=disk_later,
            parts=parts,
            workers=loader.num_threads,
            by_workers=by_threads if self._has_threads else {},
            is_ahead=loader.num_threads > 0 or not self._has_threads,
        )

    def _bring_sample_to_ram(self) -> None:
        """Read the samples to measure on. Of a slow disk, those that it reads in a short time."""
        setting, end = self._setting, time.monotonic() + _WARMING_SECONDS
        for start in range(0, len(setting.sample), setting.block_size):
            stop = min(start + setting.block_size, len(setting.sample))
            setting.sample.gather(np.arange(start, stop))
            if time.monotonic() > end:
                setting.sample = setting.sample.subset(slice(stop))
                return

    def _by_more_threads(self) -> dict[int, float]:
        return self._by_threads(n for n in _threads() if n > self._loader.num_threads)

    def _by_fewer_threads(self) -> dict[int, float]:
        """Return what a batch takes with fewer threads. That only tells whether they would do."""
        return self._by_threads(n for n in _threads()[::-1] if n < self._loader.num_threads)

    def _by_threads(self, numbers: Iterable[int]) -> dict[int, float]:
        if not self._has_threads:
            return {}
        prefetch_factor = self._loader.prefetch_factor
        return self.measurements.sweep(
            list(numbers), lambda number: self._loading(number, prefetch_factor)
        )

    def _find_prefetch_factor(self, by_threads: Mapping[int, float]) -> None:
        """Look for a factor that is much faster than that of the Loader, with the best threads."""
        threads = min(by_threads, key=by_threads.__getitem__)
        own = self._loader.prefetch_factor
        by_factor = self.measurements.sweep(
            [factor for factor in _PREFETCH_FACTORS if factor != own],
            lambda factor: self._loading(threads, factor),
        )
        if by_factor:  # otherwise nothing was compared
            fastest = min(by_factor, key=by_factor.__getitem__)
            is_better = by_factor[fastest] < MUCH_LESS * by_threads[threads]
            self.prefetch_factor = fastest if is_better else own

    def _parts_of_a_thread(
        self, plain_ms: float | None, by_threads: Mapping[int, float]
    ) -> dict[Bound, float]:
        """Return what the work on a batch takes in one thread."""
        if self._loader.transform is None:
            return {"gathering": plain_ms or 0.0}
        all_ms = by_threads.get(1) or max(max(1, n) * ms for n, ms in by_threads.items())
        gather_ms = plain_ms or 0.0
        return {"gathering": gather_ms, "transform": max(0.0, all_ms - gather_ms)}

    def _parts_of_gpu(self, gather_ms: float | None) -> dict[Bound, float]:
        """Return what a batch takes on its way to the GPU and there."""
        parts: dict[Bound, float] = {}
        bus_ms = self.measurements.measure(copy_stage(self._setting))
        if bus_ms is not None and self.feed != "resident":
            parts["bus"] = bus_ms
        if self._loader.transform is not None:
            stage = Stage("transform on the GPU", self._transforming)
            transform_ms = self.measurements.measure(stage)
            if transform_ms is not None:
                parts["transform"] = transform_ms
        if self.feed == "pinned" and gather_ms is not None:  # its threads do nothing else
            parts["gathering"] = gather_ms / max(1, self._loader.num_threads)
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

        step()  # until kernels are compiled
        return lambda: rate(iter(step, None), stages.SECONDS)

    def _loading(
        self, num_threads: int, prefetch_factor: int, *, has_transform: bool = True
    ) -> Stage:
        """Return the stage of a Loader with these settings."""

        def measurement() -> float:
            loader = self._loader_like(
                _BATCHES,
                transform=self._loader.transform if has_transform else None,
                num_threads=num_threads,
                prefetch_factor=prefetch_factor,
            )
            wait_until_filled(loader)
            # As many as come at once, if there are threads. Before, threads and kernels start.
            group = max(1, num_threads * prefetch_factor) if self._has_threads else 8
            with closing(_endless(loader)) as batches:
                start = time.perf_counter()
                first = _steady_rate(batches, group)
                is_slow = time.perf_counter() - start > _MAX_SECONDS
                return first if is_slow else _steady_rate(batches, group)

        name = f"Loader, feed {self.feed}"
        if self._has_threads:
            name += f", {counted(num_threads, 'thread')}"
        if prefetch_factor != self._loader.prefetch_factor:
            name += f", prefetch_factor={prefetch_factor}"
        if not has_transform:
            name += ", no transform"
        return Stage(name, lambda: measurement)

    @property
    def _has_threads(self) -> bool:
        return self.feed in ("cpu", "pinned")

    def _loader_like(self, num_batches: int, **options: Any) -> Loader:
        """Return a Loader with the same settings over samples in RAM, which come again."""
        size, sample = self._setting.batch_size, self._setting.sample
        return make_loader(
            sample.subset(np.arange(num_batches * size) % len(sample)),
            size,
            columns=self._loader._names,
            device=self._setting.device,
            feed=self.feed,
            **options,
        )


def _threads() -> list[int]:
    """Return the numbers of threads to try."""
    cores = available_cores()
    return [number for number in _THREADS if number == 1 or number <= cores]


def _endless(loader: Loader) -> Generator[Any, None, None]:
    """Yield the batches of one epoch after another."""
    while True:
        yield from loader


def _steady_rate(batches: Generator[Any, None, None], group: int) -> float:
    """Return images a second over whole groups of batches, or of what comes in `_MAX_SECONDS`."""
    start = time.perf_counter()
    images, passed = 0, 0.0
    while not images or passed < stages.SECONDS:
        for _ in range(group):
            images += len(next(batches)[0])
            passed = time.perf_counter() - start
            if passed > _MAX_SECONDS:
                return images / passed
    return images / passed
