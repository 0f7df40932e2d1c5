"""The diagnosis: checks, measurements, and what they say together."""

import contextlib
import random
from collections.abc import Iterator, Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from memload.doctor.checks import Check
from memload.doctor.data_checks import data_checks, feed_check
from memload.doctor.dataloader_measurer import DataLoaderMeasurer
from memload.doctor.judging import judge
from memload.doctor.loader_measurer import LoaderMeasurer
from memload.doctor.machine_checks import machine_checks
from memload.doctor.report import Diagnosis, Result
from memload.reading.loader import Loader

#: When the last stage should end, so that all takes at most 30 s with the checks.
_SECONDS = 24.0


def diagnose(loader: Loader | DataLoader[Any], step_ms: float | None = None) -> Diagnosis:
    """Measure what a loader does here, and say what bounds a model that takes ``step_ms`` a batch.

    ``loader`` is your `Loader`, with your transform and number of threads, or torch's DataLoader
    over a `MemmapDataset` or any other map-style data set. ``step_ms`` is what your model takes for
    a batch that is on its device already, in milliseconds. Without it, the result says what the
    data allows. ``print`` the result, or see `Diagnosis`.

    >>> loader = memload.Loader("out.bin", 256, shuffle=True, transform=my_transform)
    >>> print(memload.diagnose(loader, step_ms=54).verdict.sentence)
    Reading the disk: 81 ms a batch, the model waits 27 ms of each step.

    Takes at most 30 s, unless a single batch takes seconds. Of a Loader, others with the same
    settings are measured, in random order, over up to 256 MiB of rows that are read into RAM before
    that. ``cache_bytes`` counts for what later epochs read from the disk. Its own state does not
    change. Of a DataLoader, copies are measured, which call its sampler and its data set: a sampler
    that can be iterated over only once is used up. With CUDA, call it before the training begins,
    or after.

    Raises TypeError for what is neither, and for a ``step_ms`` that is no number. Raises ValueError
    for one that is not positive, for a loader without batches, and for one that leaves making
    batches to a ``batch_sampler`` (Loader) or to the data set (DataLoader). Errors of a transform
    or of the data set are raised as they are.
    """
    return diagnose_loader(loader, step_ms, machine_checks())


def diagnose_loader(loader: Any, step_ms: float | None, of_machine: Sequence[Check]) -> Diagnosis:
    """Diagnose a loader, after the machine was checked. See `diagnose`."""
    if step_ms is not None:
        wanted = f"step_ms must be a positive number of milliseconds, not {step_ms!r}."
        if not isinstance(step_ms, Real) or isinstance(step_ms, bool):
            raise TypeError(wanted)
        if not 0 < step_ms < float("inf"):
            raise ValueError(wanted)
    with _random_numbers_kept(getattr(loader, "generator", None)):
        if isinstance(loader, Loader):
            return _diagnose_memload_loader(loader, step_ms, of_machine)
        if isinstance(loader, DataLoader):
            return _diagnose_torch_loader(loader, step_ms, of_machine)
    raise TypeError(
        f"diagnose() takes a memload.Loader or a torch DataLoader, not a {type(loader).__name__}."
    )


@contextlib.contextmanager
def _random_numbers_kept(generator: torch.Generator | None) -> Iterator[None]:
    """Keep samplers and transforms from drawing the random numbers of the user's training."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    of_loader = None if generator is None else generator.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        if generator is not None and of_loader is not None:
            generator.set_state(of_loader)


def _diagnose_memload_loader(
    loader: Loader, step_ms: float | None, of_machine: Sequence[Check]
) -> Diagnosis:
    dataset, measurer = loader.dataset, LoaderMeasurer(loader, _SECONDS)
    feeds = feed_check(loader.device, dataset, loader._names.ordered)
    checks = [*of_machine, *data_checks(dataset, measurer.feed, loader._cache_bytes), feeds]
    return Diagnosis(checks, _measure(measurer, step_ms, of_machine))


def _diagnose_torch_loader(
    loader: DataLoader[Any], step_ms: float | None, of_machine: Sequence[Check]
) -> Diagnosis:
    measurer = DataLoaderMeasurer(loader, _SECONDS)
    of_data = [] if measurer.dataset is None else data_checks(measurer.dataset)
    return Diagnosis([*of_machine, *of_data], _measure(measurer, step_ms, of_machine))


def _measure(
    measurer: LoaderMeasurer | DataLoaderMeasurer,
    step_ms: float | None,
    of_machine: Sequence[Check],
) -> Result:
    """Measure a loader, and judge what was measured."""
    times, runner = measurer.measure(), measurer.runner
    is_busy = any(check.subject == "load" and check.mark == "note" for check in of_machine)
    verdict = judge(times, step_ms, is_busy=is_busy)
    return Result(runner.lines, times, verdict, step_ms, runner.batch_size)
