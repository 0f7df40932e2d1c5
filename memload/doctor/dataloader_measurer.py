"""How long a batch of torch's DataLoader takes, and its parts: reading, transform and collating."""

import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from memload.bench.loading import warm_loader
from memload.bench.setting import Setting
from memload.bench.stages import Measurement, Stage, steady
from memload.doctor.disk import bring_sample_to_ram, disk_stage, disk_times
from memload.doctor.measurements import StageRunner
from memload.doctor.times import Part, Times
from memload.reading.dataset import MemmapDataset

#: Seconds of iterating over a DataLoader, at most, once its first batch is there.
_EPOCH_SECONDS = 3.0
#: Bytes of rows on which a Loader is measured for comparison.
_SAMPLE_BYTES = 64 << 20
#: More than this share of the rows has to be on the disk for that to be what takes long.
_COLD_SHARE = 0.01
#: If less than this share of the time is work, the rest is waiting for something else.
_WORKING_SHARE = 0.5


class DataLoaderMeasurer:
    """Measures what a DataLoader does. Copies of it are iterated over, with its sampler."""

    def __init__(self, loader: DataLoader[Any], seconds: float) -> None:
        if isinstance(loader.dataset, IterableDataset):
            raise ValueError(
                "diagnose() takes a DataLoader over a map-style data set, which has __getitem__, "
                f"not over an IterableDataset ({type(loader.dataset).__name__})."
            )
        if loader.batch_sampler is None:
            raise ValueError(
                "diagnose() takes a DataLoader that makes batches. Give it a batch_size."
            )
        self._loader = loader
        self._indices: Sequence[int] = next(iter(loader.batch_sampler), ())
        if not self._indices:
            raise ValueError("The DataLoader has no batches. Use a smaller batch_size.")
        self.dataset = _memmap_dataset(loader.dataset)
        self.runner = StageRunner(len(self._indices), seconds)

    def measure(self) -> Times:
        """Measure everything, the most important first."""
        num_workers, runner = self._loader.num_workers, self.runner
        batch_ms = runner.measure_anyway(self._loading(num_workers), kind="loader")
        if num_workers:
            runner.measure(self._loading(0), kind="loader")
        parts, cold_ms, disk, disk_later = self._parts(), None, 0.0, 0.0
        if self.dataset is not None:
            cold_ms = runner.measure(disk_stage(self.dataset), kind="disk")
            disk, disk_later = disk_times(self.dataset, "cpu", cold_ms)
            runner.measure(self._comparison(self.dataset), kind="loader")
        # Other processes may have been at work. The better result counts.
        batch_ms = runner.measure(self._loading(num_workers), kind="loader") or batch_ms
        alone_ms = runner.measure(self._loading(0), kind="loader") if num_workers else None
        times = Times(
            batch_ms,
            disk=disk,
            disk_later=disk_later,
            parts=parts,
            num_workers=num_workers,
            without_workers=alone_ms,
            is_ahead=num_workers > 0,
            has_gpu=torch.cuda.is_available(),
        )
        return _without_cold_disk(times, cold_ms)

    def _loading(self, num_workers: int) -> Stage:
        def measurement() -> float:
            loader = _like(self._loader, num_workers)
            batch_ms = _batch_ms(loader, workers_persist=self._loader.persistent_workers)
            return 1000 * len(self._indices) / batch_ms

        return Stage(f"DataLoader, num_workers={num_workers}", lambda: measurement)

    def _parts(self) -> dict[Part, float]:
        """Return what the work on one batch takes in one process, again and again the same."""
        dataset: Any = self._loader.dataset
        samples_ms = self._fetching("reading and collating samples", dataset)
        if samples_ms is None:
            return {}
        if self.dataset is None:
            return {"dataset": samples_ms}
        if not self.dataset.has_transform:
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

        return self.runner.measure(Stage(subject, lambda: steady(step)), kind="samples")

    def _comparison(self, dataset: MemmapDataset) -> Stage:
        """Return the stage of a Loader over the same rows, which are brought to RAM before."""
        setting = Setting(dataset._without_transforms(), sample_bytes=_SAMPLE_BYTES)
        setting.batch_size = len(self._indices)
        subject = "a Loader over the same rows, feed cpu, without transform"

        def prepare() -> Measurement:
            bring_sample_to_ram(setting)
            return warm_loader(subject, setting, "cpu", ()).prepare()

        return Stage(subject, prepare)


def _without_cold_disk(times: Times, cold_ms: float | None) -> Times:
    """Return the times with the wait for the disk taken out of what a batch takes in RAM.

    A DataLoader is measured on the rows that its sampler draws, and these may not be in RAM yet.
    """
    workers = times.num_workers or 0
    alone_ms = times.batch if times.without_workers is None else times.without_workers
    work_ms = sum(times.parts.values())
    is_cold = times.disk > _COLD_SHARE * (cold_ms or 0.0)
    if not is_cold or work_ms > _WORKING_SHARE * alone_ms:
        return times
    return replace(times, batch=work_ms / max(1, workers), disk=max(times.disk, times.batch))


def _batch_ms(loader: DataLoader[Any], *, workers_persist: bool) -> float:
    """Return what a batch takes. Starting workers in each epoch belongs to it, unless they persist.

    A long epoch is left early.
    """
    start = time.perf_counter()
    arrivals, is_left_early = [], False
    for _ in loader:
        arrivals.append(time.perf_counter())
        is_left_early = len(arrivals) > 1 and arrivals[-1] - arrivals[0] > _EPOCH_SECONDS
        if is_left_early:
            break
    end, first = time.perf_counter(), arrivals[0]
    if is_left_early:
        # Some were made while the first one was waited for. They do not count.
        ahead = min(loader.num_workers * (loader.prefetch_factor or 0), len(arrivals) - 2)
        each = (arrivals[-1] - arrivals[ahead]) / (len(arrivals) - 1 - ahead)
        starting = 0.0 if workers_persist else max(0.0, first - start - each) / len(loader)
        return 1000 * (each + starting)
    if workers_persist and len(arrivals) > 1:
        return 1000 * (end - first) / (len(arrivals) - 1)
    return 1000 * (end - start) / len(arrivals)


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
