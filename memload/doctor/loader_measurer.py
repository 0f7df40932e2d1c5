"""How long a batch of a Loader takes, and its parts: disk, gathering, bus and transform."""

import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import torch

from memload.bench import stages
from memload.bench.loading import make_loader, wait_until_filled
from memload.bench.memory import copy_stage, gather_stage
from memload.bench.run import choose_feed
from memload.bench.setting import Setting
from memload.bench.stages import Measurement, Stage, rate
from memload.doctor.disk import bring_sample_to_ram, disk_stage, disk_times
from memload.doctor.measurements import StageRunner
from memload.doctor.times import Part, Times, Trial, outliers
from memload.machine import available_cores
from memload.reading.loader import Loader
from memload.transforms import Transform
from memload.wording import counted

#: Numbers of threads to try, as far as there are cores.
_THREADS = (1, 2, 4, 8)
_PREFETCH_FACTORS = (1, 2, 4)
#: Seconds of warming a Loader up, at most, and of measuring it.
_MAX_SECONDS = 2.0
#: Rows to gather, at most: more than the cache of a CPU holds.
_SAMPLE_BYTES = 256 << 20
#: Batches of an epoch that is measured. Samples come again if there are too few.
_BATCHES = 256


class LoaderMeasurer:
    """Measures what a Loader does, on samples that are in RAM, and what the disk takes apart.

    The Loader itself is not iterated over. Others with its settings are, in random order.
    """

    def __init__(self, loader: Loader, seconds: float) -> None:
        if loader.batch_sampler is not None:
            raise ValueError(
                "diagnose() takes a Loader with batch_size, not one with batch_sampler. Make one "
                "with the same settings, for the batch size that is usual."
            )
        if not len(loader.dataset):
            raise ValueError("The Loader has no samples. Use a data set that has some.")
        if not len(loader):
            raise ValueError("The Loader has no batches. Use a smaller batch_size.")
        self._loader = loader
        batch_size = min(loader.batch_size, len(loader.dataset))
        self.runner = StageRunner(batch_size, seconds)
        self._setting = Setting(loader.dataset, sample_bytes=_SAMPLE_BYTES)
        self._setting.batch_size, self._setting.device = batch_size, loader.device
        self.feed: str = loader._given_feed
        if self.feed == "auto":
            self.feed = choose_feed(self._setting, loader._cache_bytes).name
        self._has_threads = self.feed in ("cpu", "pinned")

    def measure(self) -> Times:
        """Measure everything, the most important first."""
        loader, runner = self._loader, self.runner
        cold_ms = runner.measure(disk_stage(loader.dataset), kind="disk")
        disk, disk_later = disk_times(loader.dataset, self.feed, cold_ms, loader._cache_bytes)
        bring_sample_to_ram(self._setting)
        trials = self._try_own()
        plain_ms = self._without_transform()
        trials += self._try_threads(n for n in _threads() if n > loader.num_threads)
        trials += self._try_prefetch_factors(trials)
        # All of these are printed. The parts of the feed pinned need that of one thread.
        gathering = [
            runner.measure(gather_stage(self._setting, number), kind="gathering")
            for number in _threads()
        ]
        # Fewer threads come last: they only tell whether some can be saved.
        trials += self._try_threads(n for n in _threads()[::-1] if n < loader.num_threads)
        trials = self._repeat(trials)
        if self.feed == "cpu":
            parts = self._parts_of_a_thread(plain_ms, trials)
        else:
            parts = self._parts_of_gpu(gathering[0])
        return Times(
            trials[0].ms,
            disk=disk,
            disk_later=disk_later,
            parts=parts,
            trials=trials,
            is_ahead=loader.num_threads > 0 or not self._has_threads,
            is_on_gpu=self.feed != "cpu",
            has_gpu=torch.cuda.is_available(),
        )

    def _try_own(self) -> list[Trial]:
        """Return how long a batch takes with the settings of the Loader itself."""
        loader = self._loader
        num_threads = loader.num_threads if self._has_threads else None
        stage = self._loading(num_threads, loader.prefetch_factor)
        ms = self.runner.measure_anyway(stage, kind="loader")
        return [Trial(num_threads, loader.prefetch_factor, ms)]

    def _try_threads(self, numbers: Iterable[int]) -> list[Trial]:
        factor = self._loader.prefetch_factor
        return self._try((number, factor) for number in numbers if self._has_threads)

    def _try_prefetch_factors(self, trials: Sequence[Trial]) -> list[Trial]:
        """Try them with the number of threads that was the fastest so far, if any load ahead."""
        ahead = [trial for trial in trials if trial.num_threads != 0]
        if not ahead:
            return []
        fastest = min(ahead, key=lambda trial: trial.ms)
        others = [factor for factor in _PREFETCH_FACTORS if factor != fastest.prefetch_factor]
        return self._try((fastest.num_threads, factor) for factor in others)

    def _try(self, settings: Iterable[tuple[int | None, int]]) -> list[Trial]:
        """Measure a Loader with each of these numbers of threads and prefetch factors."""
        found = [
            (*one, self.runner.measure(self._loading(*one), kind="loader")) for one in settings
        ]
        return [Trial(threads, factor, ms) for threads, factor, ms in found if ms is not None]

    def _repeat(self, trials: Sequence[Trial]) -> list[Trial]:
        """Measure the Loader's own settings and outliers once more. The better result counts.

        Other processes may have been at work the first time.
        """
        chosen = dict.fromkeys([trials[0], *outliers(trials)])
        repeated = self._try((trial.num_threads, trial.prefetch_factor) for trial in chosen)
        better = dict(zip(chosen, repeated, strict=True))
        return [better.get(trial, trial) for trial in trials]

    def _without_transform(self) -> float | None:
        """Return what a batch takes in one thread without the transform."""
        if self.feed != "cpu" or self._loader.transform is None:
            return None
        plain = self._loading(1, self._loader.prefetch_factor, has_transform=False)
        return self.runner.measure(plain, kind="loader")

    def _parts_of_a_thread(
        self, plain_ms: float | None, trials: Sequence[Trial]
    ) -> dict[Part, float]:
        """Return what the work on a batch takes in one thread."""
        all_ms = min(trial.threads_at_work * trial.ms for trial in trials)
        if self._loader.transform is None:
            return {"gathering": all_ms}
        if plain_ms is None:
            return {}
        gather_ms = min(all_ms, plain_ms)
        return {"gathering": gather_ms, "transform": all_ms - gather_ms}

    def _parts_of_gpu(self, gather_ms: float | None) -> dict[Part, float]:
        """Return what a batch takes on its way to the GPU and there."""
        parts: dict[Part, float] = {}
        bus_ms = self.runner.measure(copy_stage(self._setting), kind="gpu")
        if bus_ms is not None and self.feed != "resident":
            parts["bus"] = bus_ms
        if self._loader.transform is not None:
            stage = Stage("transform on the GPU", self._transforming)
            transform_ms = self.runner.measure(stage, kind="gpu")
            if transform_ms is not None:
                parts["transform"] = transform_ms
        if self.feed == "pinned" and gather_ms is not None:  # its threads do nothing else
            # So much at least: several threads share the bandwidth of the memory.
            parts["gathering"] = gather_ms / max(1, self._loader.num_threads)
        return parts

    def _transforming(self) -> Measurement:
        """Return what measures the transform alone, on one batch again and again."""
        size, transform = self._setting.batch_size, self._loader.transform
        images, *values = next(iter(self._loader_like(1, num_threads=1)))
        columns = dict(zip(self._loader._names.ordered, values, strict=True))

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
        self, num_threads: int | None, prefetch_factor: int, *, has_transform: bool = True
    ) -> Stage:
        """Return the stage of a Loader with these settings. None: its feed uses no threads."""

        def measurement() -> float:
            loader = self._loader_like(
                _BATCHES,
                transform=self._loader.transform if has_transform else None,
                num_threads=self._loader.num_threads if num_threads is None else num_threads,
                prefetch_factor=prefetch_factor,
            )
            wait_until_filled(loader)
            # As many as are in flight. Before, threads and kernels start.
            group = 1 + prefetch_factor
            if num_threads is not None:
                group = max(1, num_threads * prefetch_factor)
            with closing(_endless(loader)) as batches:
                start = time.perf_counter()
                first = self._steady_rate(batches, group, num_threads or 1)
                is_slow = time.perf_counter() - start > _MAX_SECONDS
                return first if is_slow else self._steady_rate(batches, group, num_threads or 1)

        name = f"Loader, feed {self.feed}"
        if num_threads is not None:
            name += f", {counted(num_threads, 'thread')}"
        if prefetch_factor != self._loader.prefetch_factor:
            name += f", prefetch_factor={prefetch_factor}"
        if not has_transform:
            name += ", no transform"
        return Stage(name, lambda: measurement)

    def _steady_rate(self, batches: Generator[Any, None, None], group: int, threads: int) -> float:
        """Return images a second over whole groups of batches, or of what comes in 2 s.

        It stops after the same number of batches from each thread, since these arrive together.
        """
        start = time.perf_counter()
        images, passed = 0, 0.0
        while not images or passed < stages.SECONDS:
            for number in range(1, group + 1):
                images += len(next(batches)[0])
                passed = time.perf_counter() - start
                if passed > _MAX_SECONDS and number % threads == 0:
                    break
        self._setting.synchronize()
        return images / (time.perf_counter() - start)

    def _loader_like(self, num_batches: int, **options: Any) -> Loader:
        """Return a Loader with the same settings over samples in RAM, which come again."""
        size, sample = self._setting.batch_size, self._setting.sample
        if self.feed in ("dma", "disk"):
            options["cache_bytes"] = self._setting.cache_bytes(sample)
        return make_loader(
            sample.subset(np.arange(num_batches * size) % len(sample)),
            size,
            columns=self._loader._names.ordered,
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
