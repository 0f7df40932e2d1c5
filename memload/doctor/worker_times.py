"""How long a batch of torch's DataLoader takes, and its parts: reading, transform and collating."""

import time
import warnings
from collections.abc import Sequence
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader

from memload.bench.loading import warm_loader
from memload.bench.setting import Setting
from memload.bench.stages import Stage, steady
from memload.doctor.disk import disk_stage, disk_times
from memload.doctor.judging import Bound, Times
from memload.doctor.measurements import Measurements
from memload.reading.dataset import MemmapDataset

#: Seconds of iterating over a DataLoader, at most, once its first batch is there.
_EPOCH_SECONDS = 3.0
#: Bytes of rows on which a Loader is measured for comparison.
_SAMPLE_BYTES = 64 << 20
#: More than this share of the rows has to be on the disk for that to be what takes long.
_COLD_SHARE = 0.01


class WorkerTimes:
    """Measures what a DataLoader does. Copies of it are iterated over, with its sampler."""

    def __init__(self, loader: DataLoader[Any], seconds: float) -> None:
        if loader.batch_sampler is None or not hasattr(loader.dataset, "__getitem__"):
            raise ValueError(
                "diagnose() takes a DataLoader that makes batches of a map-style data set. Give it "
                "a batch_size."
            )
        self._loader = loader
        self._indices: Sequence[int] = next(iter(loader.batch_sampler), ())
        if not self._indices:
            raise ValueError("The DataLoader has no batches. Use a smaller batch_size.")
        self.dataset = _memmap_dataset(loader.dataset)
        self.measurements = Measurements(len(self._indices), seconds)

    def measure(self) -> Times:
        """Measure everything, the most important first."""
        workers = self._loader.num_workers
        batch_ms = self.measurements.measure_anyway(self._loading(workers))
        by_workers = {workers: batch_ms}
        if workers:
            by_workers |= self.measurements.sweep([0], self._loading)
        parts = self._parts()
        cold_ms, disk, disk_later = None, 0.0, 0.0
        if self.dataset is not None:
            cold_ms = self.measurements.measure(disk_stage(self.dataset))
            disk, disk_later = disk_times(self.dataset, "cpu", cold_ms)
        work_ms = sum(parts.values()) / max(1, workers)
        alone_ms = by_workers.get(0, batch_ms)
        if disk > _COLD_SHARE * (cold_ms or 0) and 2 * sum(parts.values()) < alone_ms:
            # Without workers, too, most of the time is neither reading from RAM nor work.
            disk, batch_ms = max(disk, batch_ms), work_ms
        self._compare_with_loader()
        return Times(
            batch_ms,
            disk=disk,
            disk_later=disk_later,
            parts=parts,
            workers=workers,
            by_workers=by_workers,
            are_processes=True,
            is_ahead=workers > 0,
        )

    def _loading(self, num_workers: int) -> Stage:
        def measurement() -> float:
            loader = _like(self._loader, num_workers)
            batch_ms = _batch_ms(loader, workers_persist=self._loader.persistent_workers)
            return 1000 * len(self._indices) / batch_ms

        return Stage(f"DataLoader, num_workers={num_workers}", lambda: measurement)

    def _parts(self) -> dict[Bound, float]:
        """Return what the work on one batch takes in one process, again and again the same."""
        dataset: Any = self._loader.dataset
        samples_ms = self._fetching("reading and collating samples", dataset)
        if samples_ms is None:
            return {}
        if self.dataset is None or not self.dataset.has_transform:
            return {"samples": samples_ms}
        plain_ms = self._fetching(
            "the same, without the transform", self.dataset._without_transforms()
        )
        if plain_ms is None:
            return {"samples": samples_ms}
        return {"samples": plain_ms, "transform": max(0.0, samples_ms - plain_ms)}

    def _fetching(self, subject: str, dataset: Any) -> float | None:
        indices, collate = self._indices, self._loader.collate_fn

        def step() -> int:
            collate([dataset[index] for index in indices])
            return len(indices)

        return self.measurements.measure(Stage(subject, lambda: steady(step)))

    def _compare_with_loader(self) -> None:
        if self.dataset is not None:
            setting = Setting(self.dataset._without_transforms(), sample_bytes=_SAMPLE_BYTES)
            setting.batch_size = len(self._indices)
            subject = "a Loader over the same rows, feed cpu, without transform"
            self.measurements.measure(warm_loader(subject, setting, "cpu", ()))


def _batch_ms(loader: DataLoader[Any], *, workers_persist: bool) -> float:
    """Return what a batch takes. Starting workers in each epoch belongs to it, unless they persist.

    A long epoch is left early.
    """
    start = time.perf_counter()
    batches = iter(loader)
    next(batches)
    first = time.perf_counter()
    # These were made while the first one was waited for.
    ahead = sum(1 for _ in islice(batches, loader.num_workers * (loader.prefetch_factor or 0)))
    begin, number = time.perf_counter(), 0
    for _ in batches:
        number += 1
        if time.perf_counter() - first > _EPOCH_SECONDS:
            each = (time.perf_counter() - begin) / number
            starting = 0.0 if workers_persist else max(0.0, first - start - each) / len(loader)
            return 1000 * (each + starting)
    end, others = time.perf_counter(), ahead + number
    if workers_persist and others:
        return 1000 * (end - first) / others
    return 1000 * (end - start) / (1 + others)


def _like(loader: DataLoader[Any], num_workers: int) -> DataLoader[Any]:
    """Return a DataLoader with the same settings and another number of workers."""
    options: dict[str, Any] = {}
    if num_workers:
        options = {
            "prefetch_factor": loader.prefetch_factor,
            "multiprocessing_context": loader.multiprocessing_context,
            "worker_init_fn": loader.worker_init_fn,
            "timeout": loader.timeout,
        }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of more workers than cores: it came for the first one
        return DataLoader(
            loader.dataset,
            batch_sampler=loader.batch_sampler,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            num_workers=num_workers,
            **options,
        )


def _memmap_dataset(dataset: Any) -> MemmapDataset | None:
    """Return the data set of memload's of which another one is a view; None if there is none."""
    while not isinstance(dataset, MemmapDataset):
        if not hasattr(dataset, "dataset"):  # which torch's Subset has
            return None
        dataset = dataset.dataset
    return dataset
