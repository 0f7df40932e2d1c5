"""The diagnosis: checks, measurements, and what they say together."""

from collections.abc import Sequence
from typing import Any

from memload.doctor.checks import Check
from memload.doctor.data_checks import data_checks, feed_check
from memload.doctor.judging import judge
from memload.doctor.loader_times import LoaderTimes
from memload.doctor.machine_checks import machine_checks
from memload.doctor.report import Diagnosis
from memload.reading.loader import Loader

#: No stage begins to be measured after these seconds. So all ends within 30 s.
_SECONDS = 20.0


def diagnose(loader: Any, step_ms: float | None = None) -> Diagnosis:
    """Measure what a loader does here, and say what bounds a model that takes ``step_ms`` a batch.

    >>> loader = memload.Loader("out.bin", 256, shuffle=True, transform=my_transform)
    >>> print(memload.diagnose(loader, step_ms=54).verdict.sentence)
    Reading the disk: 81 ms a batch, the model waits 27 ms of each step.

    Takes at most 30 s.
    """
    if not isinstance(loader, Loader):
        raise TypeError(f"diagnose() takes a memload.Loader, not a {type(loader).__name__}.")
    return diagnose_loader(loader, step_ms, machine_checks())


def diagnose_loader(
    loader: Loader, step_ms: float | None, of_machine: Sequence[Check]
) -> Diagnosis:
    """Diagnose a Loader, after the machine was checked."""
    if step_ms is not None and not 0 < step_ms < float("inf"):
        raise ValueError(f"step_ms must be a positive number of milliseconds, not {step_ms!r}.")
    dataset = loader.dataset
    checks = [*of_machine, *data_checks(dataset), feed_check(loader.device, dataset.subset([0]))]
    measuring = LoaderTimes(loader, _SECONDS)
    times = measuring.measure(step_ms)
    return Diagnosis(
        checks,
        measuring.measurements.lines,
        times,
        judge(times, step_ms),
        step_ms,
        measuring.measurements.batch_size,
        measuring.num_threads,
        measuring.prefetch_factor,
    )
