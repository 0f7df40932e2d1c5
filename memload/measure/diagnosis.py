"""The diagnosis: checks, measurements, and what they say together."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from memload.errors import FormatError, MemloadError, MissingError
from memload.measure.checks import Check, is_busy, machine_checks
from memload.wording import counted

if TYPE_CHECKING:
    from memload.measure.stages import Stage
    from memload.measure.verdict import BatchTimes, Verdict
    from memload.reading.loader import Loader

#: No stage begins after so many seconds, so that all takes at most 30 s with torch's import.
_SECONDS = 16.0


@dataclass(frozen=True)
class Diagnosis:
    """What was found. ``str()`` of it is the report, and `as_dict` is ready for JSON.

    - ``checks``: each has a ``subject``, a ``finding``, a ``remedy`` that is empty if there is
      nothing to do, and a ``mark``: ``"ok"``, ``"note"`` or ``"bad"``.
    - ``stages``: the lines of the table. Each has a ``name``, ``images_s`` and ``ms`` per batch, or
      a ``reason`` why it was not measured.
    - ``times``: the milliseconds that the verdict is made of.
    - ``verdict``: ``bound`` is what bounds the training, such as ``"model"`` or ``"disk"``,
      ``sentence`` says it, and ``remedy`` what to do. A batch is there after ``data_ms``, for which
      the model waits ``wait_ms``.
    - ``step_ms``, ``batch_size``: what was diagnosed.

    Without measurements, ``stages`` is empty, and all below it are None.
    """

    checks: Sequence[Check]
    stages: "Sequence[Stage]" = ()
    times: "BatchTimes | None" = None
    verdict: "Verdict | None" = None
    step_ms: float | None = None
    batch_size: int | None = None

    @property
    def speedup(self) -> float | None:
        """How many times as fast as decoding the Loader is, if ``images`` were given."""
        if self.times is None or self.times.decoding is None:
            return None
        return self.times.decoding / self.times.loader

    @property
    def ok(self) -> bool:
        """Whether nothing is broken."""
        return all(check.mark != "bad" for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        return {
            "ok": self.ok,
            **vars(self),
            "checks": [check._asdict() for check in self.checks],
            "stages": [stage._asdict() for stage in self.stages],
            "times": self.times and asdict(self.times),
            "verdict": self.verdict and asdict(self.verdict),
            "speedup": self.speedup,
        }

    def __str__(self) -> str:
        lines = [str(check) for check in self.checks]
        if self.verdict is None or self.batch_size is None:
            return "\n".join(lines)
        heading = f"batches of {counted(self.batch_size, 'sample')}"
        table = [f"{heading:36}  {'ms':>8}  {'images/s':>10}", *map(str, self.stages)]
        first = [f"{self.verdict.sentence} {self.verdict.remedy}"]
        if self.speedup is not None:
            first.append(f"The Loader is {self.speedup:.3g} times as fast as decoding the images.")
        return "\n".join([*first, "", *lines, "", *table])


def diagnose(
    loader: "Loader", *, step_ms: float | None = None, images: str | Path | None = None
) -> Diagnosis:
    """Measure what a Loader does here, and say what bounds a model that trains on it.

    Args:
        loader: your `Loader`, with your transform and number of threads. Others with the same
            settings are measured, over up to 256 MiB of rows that are read into RAM before. Its own
            state does not change.
        step_ms: what your model takes for a batch that is on its device already, in milliseconds.
            Without it, the result says what the data allows.
        images: the folder that the data set was built from. Decoding these images is then measured,
            too. Call it before CUDA is used: worker processes are forked.

    >>> loader = memload.Loader("out.bin", 256, shuffle=True, transform=my_transform)
    >>> print(memload.diagnose(loader, step_ms=54).verdict.sentence)
    Reading the disk bounds training: 81 ms per batch, so the model waits 27 ms of each step.

    Takes at most 30 s, unless a single batch takes seconds. With CUDA, call it before the training
    begins, or after.

    Raises TypeError for what is no Loader, and ValueError for one without batches or with a
    ``batch_sampler``, and for a ``step_ms`` that is no positive number. Errors of a transform are
    raised as they are.
    """
    return _diagnose(loader, step_ms, images, machine_checks())


def _diagnose(
    loader: "Loader", step_ms: float | None, images: str | Path | None, checks: Sequence[Check]
) -> Diagnosis:
    from memload.measure.checks import data_checks, share_in_ram
    from memload.measure.stages import LoaderMeasurer
    from memload.measure.verdict import judge
    from memload.reading.loader import Loader

    if not isinstance(loader, Loader):
        raise TypeError(f"diagnose() takes a memload.Loader, not a {type(loader).__name__}.")
    is_number = isinstance(step_ms, Real) and not isinstance(step_ms, bool)
    if step_ms is not None and not (is_number and 0 < step_ms < float("inf")):
        raise ValueError(f"step_ms must be a positive number of milliseconds, not {step_ms!r}.")
    measurer = LoaderMeasurer(loader, _SECONDS)
    share = share_in_ram(loader.dataset)
    checks = [*checks, *data_checks(loader.dataset, share)]
    times = measurer.measure(None if images is None else Path(images), share)
    verdict = judge(times, step_ms, is_busy=is_busy())
    return Diagnosis(checks, measurer.stages, times, verdict, step_ms, measurer.batch_size)


def examine(
    path: str | None,
    *,
    step_ms: float | None = None,
    batch_size: int = 256,
    images: str | None = None,
    before_measuring: Callable[[], object] = lambda: None,
) -> Diagnosis:
    """Check the machine and, if there is a path, diagnose a Loader over that data set.

    ``before_measuring`` is called if there is something to measure.
    """
    checks = machine_checks()
    if path is None or any(check.mark == "bad" for check in checks):
        return Diagnosis(checks)
    from memload.building.status import build_status
    from memload.reading.dataset import MemmapDataset

    try:
        dataset = MemmapDataset(path)
    except (FormatError, OSError) as error:
        status = build_status(path) if isinstance(error, MissingError) else None
        return Diagnosis([*checks, Check("data set", str(status or error), mark="bad")])
    if not len(dataset):
        finding = f"{path} has no samples"
        return Diagnosis([*checks, Check("data set", finding, "Build it from images", "bad")])
    before_measuring()
    try:
        return _diagnose(_training_loader(dataset, batch_size), step_ms, images, checks)
    except (MemloadError, RuntimeError, MemoryError, OSError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        return Diagnosis([*checks, Check("measuring", reason, mark="bad")])


def _training_loader(dataset: Any, batch_size: int) -> "Loader":
    """Return a Loader that shuffles, with ``transforms.train`` for 224 pixels or what fits.

    Images of integers other than uint8 have no transform, since that one refuses them.
    """
    from memload.reading.loader import Loader
    from memload.transforms import train

    dtype, (channels, height, width) = np.dtype(dataset.shards.array.descr), dataset.shape
    statistics: dict[str, Any] = {} if channels == 3 else {"mean": [0.5], "std": [0.5]}
    is_image = dtype == np.uint8 or dtype.kind == "f"
    transform = train(min(224, height, width), **statistics) if is_image else None
    return Loader(dataset, batch_size, shuffle=True, rank=0, num_replicas=1, transform=transform)
