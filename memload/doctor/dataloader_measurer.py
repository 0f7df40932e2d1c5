"""How long a batch of torch's DataLoader takes, and its parts: reading, transform and collating."""

import time
import warnings
from itertools import chain, cycle, islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset, Subset

from memload.bench import stages
from memload.bench.loading import warm_loader
from memload.bench.setting import Setting
from memload.bench.stages import Measurement, Stage, rate
from memload.doctor.disk import bring_sample_to_ram, disk_stage, disk_times
from memload.doctor.measurements import StageRunner
from memload.doctor.times import Part, Times
from memload.reading.dataset import MemmapDataset
from memload.reading.streams import tensors_of

#: Seconds of iterating over a DataLoader, at most, from its first batch on. Without workers, from
#: the start.
_EPOCH_SECONDS = 3.0
#: Batches of an epoch that is measured, at most. They come again and again from those in RAM.
_BATCHES = 256
#: Bytes of rows in RAM, at most, and seconds of bringing them there, about.
_SAMPLE_BYTES, _WARMING_SECONDS = 64 << 20, 3.0


class DataLoaderMeasurer:
    """Measures what a DataLoader does. Copies of it are iterated over.

    Their batches are the first ones of its sampler. Rows of memload's are brought to RAM before,
    and what the disk takes is measured apart.
    """

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
        self.dataset = _memmap_dataset(loader.dataset)
        #: The samples of the batches that are measured.
        self._batches: list[list[int]] = list(islice(loader.batch_sampler, _BATCHES))
        if not self._batches or not self._batches[0]:
            raise ValueError("The DataLoader has no batches. Use a smaller batch_size.")
        self._epoch = _epoch_length(loader, len(self._batches))
        self.runner = StageRunner(len(self._batches[0]), seconds)

    def measure(self) -> Times:
        """Measure everything, the most important first."""
        num_workers, runner = self._loader.num_workers, self.runner
        disk, disk_later = 0.0, 0.0
        if self.dataset is not None:
            cold_ms = runner.measure(disk_stage(self.dataset), kind="disk")
            disk, disk_later = disk_times(self.dataset, "cpu", cold_ms)
            self._bring_to_ram(self.dataset)
        batch_ms = runner.measure_anyway(self._loading(num_workers), kind="loader")
        if num_workers:
            runner.measure(self._loading(0), kind="loader")
        parts = self._parts(batch_ms)
        if self.dataset is not None:
            runner.measure(self._comparison(self.dataset), kind="loader")
        # Other processes may have been at work. The better result counts.
        batch_ms = runner.measure(self._loading(num_workers), kind="loader") or batch_ms
        alone_ms = runner.measure(self._loading(0), kind="loader") if num_workers else None
        return Times(
            batch_ms,
            disk=disk,
            disk_later=disk_later,
            parts=parts,
            num_workers=num_workers,
            without_workers=alone_ms,
            is_ahead=num_workers > 0,
            has_gpu=torch.cuda.is_available(),
        )

    def _bring_to_ram(self, dataset: MemmapDataset) -> None:
        """Read the samples to measure on. If there are too many, the first ones come repeatedly."""
        end = time.monotonic() + _WARMING_SECONDS
        most = max(1, _SAMPLE_BYTES // dataset.shards.array.row_bytes)
        samples: list[int] = []
        for index in chain.from_iterable(self._batches):
            if samples and (time.monotonic() > end or len(samples) == most):
                again, size = cycle(samples), self.runner.batch_size
                number = max(1, len(samples) // size)
                self._batches = [list(islice(again, size)) for _ in range(number)]
                return
            for tensor in tensors_of(self._loader.dataset[index]):
                tensor.clone()  # which reads the row
            samples.append(index)

    def _loading(self, num_workers: int) -> Stage:
        def measurement() -> float:
            batches = list(islice(cycle(self._batches), min(self._epoch, _BATCHES)))
            batch_ms = _batch_ms(
                _like(self._loader, num_workers, batches),
                epoch=self._epoch,
                workers_persist=self._loader.persistent_workers,
            )
            return 1000 * self.runner.batch_size / batch_ms

        return Stage(f"DataLoader, num_workers={num_workers}", lambda: measurement)

    def _parts(self, batch_ms: float) -> dict[Part, float]:
        """Return what the work on one batch takes in one process, again and again the same.

        If there is no time to measure that, it is not divided.
        """
        samples_ms = self._fetching("reading and collating samples", self._loader.dataset)
        if self.dataset is None:
            return {"dataset": samples_ms or batch_ms}
        if samples_ms is None or not self.dataset.has_transform:
            return {"samples": samples_ms or batch_ms}
        plain = _without_transforms(self.dataset)
        plain_ms = self._fetching("the same, without the transform", plain)
        if plain_ms is None:
            return {"samples": samples_ms}
        return {"samples": plain_ms, "transform": max(0.0, samples_ms - plain_ms)}

    def _fetching(self, subject: str, dataset: Any) -> float | None:
        """Return what reading and collating the samples of the first batch takes."""
        indices, collate = self._batches[0], self._loader.collate_fn

        def step() -> int:
            collate([dataset[index] for index in indices])
            return len(indices)

        stage = Stage(subject, lambda: lambda: rate(iter(step, None), stages.SECONDS))
        return self.runner.measure(stage, kind="samples")

    def _comparison(self, dataset: MemmapDataset) -> Stage:
        """Return the stage of a Loader over the same rows, which are brought to RAM before."""
        setting = Setting(_without_transforms(dataset), sample_bytes=_SAMPLE_BYTES)
        setting.batch_size = self.runner.batch_size
        subject = "a Loader over the same rows, feed cpu, without transform"

        def prepare() -> Measurement:
            bring_sample_to_ram(setting)
            return warm_loader(subject, setting, "cpu", ()).prepare()

        return Stage(subject, prepare)


def _epoch_length(loader: DataLoader[Any], otherwise: int) -> int:
    """Return how many batches an epoch has. A sampler need not know it."""
    try:
        return len(loader)
    except TypeError:
        return otherwise


class _Iteration(NamedTuple):
    """When batches of a DataLoader arrived, in seconds of a clock."""

    start: float
    arrivals: list[float]
    end: float
    is_whole_epoch: bool


def _iterate(loader: DataLoader[Any], epoch: int) -> _Iteration:
    """Take batches for some seconds, and whole rounds of the workers, which finish together."""
    start, round_size = time.perf_counter(), max(1, loader.num_workers)
    arrivals: list[float] = []
    for _ in loader:
        arrivals.append(time.perf_counter())
        begun = arrivals[0] if loader.num_workers else start
        is_long = arrivals[-1] - begun > _EPOCH_SECONDS
        if is_long and len(arrivals) % round_size == 0 and len(arrivals) < epoch:
            break
    is_whole_epoch = len(arrivals) == epoch
    # Workers end at the end of an epoch, and that belongs to it.
    end = time.perf_counter() if is_whole_epoch else arrivals[-1]
    return _Iteration(start, arrivals, end, is_whole_epoch)


def _batch_ms(loader: DataLoader[Any], *, epoch: int, workers_persist: bool) -> float:
    """Return the milliseconds of one batch. ``epoch`` is how many batches an epoch has.

    The start of workers counts, a batch's share of it, unless they persist from epoch to epoch.
    """
    start, arrivals, end, is_whole_epoch = _iterate(loader, epoch)
    first, workers = arrivals[0], loader.num_workers
    if is_whole_epoch and workers_persist and epoch > 1:
        return 1000 * (end - first) / (epoch - 1)
    # Some were made while the first one was waited for. They and the round of that do not count.
    ahead = workers * (loader.prefetch_factor or 0) + max(1, workers)
    if is_whole_epoch or len(arrivals) <= ahead:
        return 1000 * (end - start) / len(arrivals)
    each = (arrivals[-1] - arrivals[ahead - 1]) / (len(arrivals) - ahead)
    starting = 0.0 if workers_persist else max(0.0, first - start - each) / epoch
    return 1000 * (each + starting)


def _without_transforms(dataset: MemmapDataset) -> MemmapDataset:
    plain = dataset[:]
    plain.transform = plain.target_transform = plain.transforms = None
    return plain


def _like(loader: DataLoader[Any], num_workers: int, batches: list[list[int]]) -> DataLoader[Any]:
    """Return a DataLoader with the same settings, but these batches, and so many workers."""
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
            batch_sampler=batches,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            num_workers=num_workers,
            **options,
        )


def _memmap_dataset(dataset: Any) -> MemmapDataset | None:
    """Return the data set of memload's that another one reads; None if there is none.

    torch's Subset becomes a view, with the same samples. Other data sets that hold one as
    ``dataset`` are taken to read its samples in their order.
    """
    if isinstance(dataset, Subset):
        whole = _memmap_dataset(dataset.dataset)
        return None if whole is None else whole.subset(dataset.indices)
    if dataset is None or isinstance(dataset, MemmapDataset):
        return dataset
    return _memmap_dataset(getattr(dataset, "dataset", None))
