"""The diagnosis: checks, measurements, and what they say together."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from memload.errors import MemloadError
from memload.measure.checks import Check, dataset_check, machine_checks, share_in_ram
from memload.wording import counted

if TYPE_CHECKING:  # torch may be what is broken
    from memload.measure.stages import Stage
    from memload.measure.verdict import Verdict
    from memload.reading.loader import Loader

#: No stage begins after so many seconds, with torch's import, so that all takes at most 30 s.
_SECONDS = 15.0


@dataclass(frozen=True)
class Diagnosis:
    """What was found. ``str()`` of it is the report, and `as_dict` is ready for JSON.

    - ``checks``: each has a ``subject``, a ``finding``, a ``remedy`` that is empty if there is
      nothing to do, and a ``mark``: ``"ok"``, ``"note"`` or ``"bad"``.
    - ``stages``: the lines of the table. Each has a ``name``, ``images_s`` and ``ms`` per batch, or
      a ``reason`` why it was not measured.
    - ``verdict``: ``bound`` is what bounds the training, such as ``"model"`` or ``"disk"``,
      ``sentence`` says it, and ``remedy`` what to do. A batch is there after ``data_ms``, for which
      the model waits ``wait_ms``.
    - ``speedup``: how many times as fast as decoding the Loader is, if ``images`` were given.
    - ``step_ms``, ``batch_size``: what was diagnosed.

    Without measurements, ``stages`` is empty, and all below it are None.
    """

    checks: Sequence[Check]
    stages: "Sequence[Stage]" = ()
    verdict: "Verdict | None" = None
    speedup: float | None = None
    step_ms: float | None = None
    batch_size: int | None = None

    @property
    def ok(self) -> bool:
        """Whether nothing is broken."""
        return all(check.mark != "bad" for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        return {"ok": self.ok, **asdict(self)}

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
    return _diagnose(loader, step_ms, images, machine_checks(), time.monotonic() + _SECONDS)


def _diagnose(
    loader: "Loader",
    step_ms: float | None,
    images: str | Path | None,
    checks: Sequence[Check],
    end: float,
) -> Diagnosis:
    from memload.measure.stages import LoaderMeasurer
    from memload.measure.verdict import judge
    from memload.reading.loader import Loader

    if not isinstance(loader, Loader):
        raise TypeError(f"diagnose() takes a memload.Loader, not a {type(loader).__name__}.")
    if step_ms is not None and not 0 < step_ms < float("inf"):
        raise ValueError(f"step_ms must be a positive number of milliseconds, not {step_ms!r}.")
    measurer = LoaderMeasurer(loader, end)
    share = share_in_ram(measurer.arrays)
    decoding = None if images is None else measurer.decoding(Path(images))
    times = measurer.measure(share)
    return Diagnosis(
        [*checks, dataset_check(loader.dataset, share)],
        measurer.stages,
        judge(times, step_ms),
        None if decoding is None else decoding / times.loader,
        step_ms,
        measurer.batch_size,
    )


def examine(
    path: str | None, *, step_ms: float | None, batch_size: int, images: str | None
) -> Diagnosis:
    """Check the machine and, if there is a path, diagnose a Loader over that data set.

    If measuring fails, the checks say so. Errors of the data set are raised as elsewhere.
    """
    end = time.monotonic() + _SECONDS
    checks = machine_checks()
    if path is None or any(check.mark == "bad" for check in checks):
        return Diagnosis(checks)
    loader = _training_loader(path, batch_size)
    try:
        return _diagnose(loader, step_ms, images, checks, end)
    except (MemloadError, RuntimeError, MemoryError, OSError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        return Diagnosis([*checks, Check("measuring", reason, mark="bad")])


def _training_loader(path: str, batch_size: int) -> "Loader":
    """Return a Loader that shuffles, with ``transforms.train`` for 224 pixels or what fits.

    The samples of a data set smaller than a batch come several times. Images of integers other than
    uint8 have no transform, since that one refuses them.
    """
    from memload.reading.dataset import MemmapDataset
    from memload.reading.loader import Loader
    from memload.transforms import train

    dataset = MemmapDataset(path)
    if 0 < len(dataset) < batch_size:
        dataset = dataset.subset(np.arange(batch_size) % len(dataset))
    dtype, (channels, height, width) = np.dtype(dataset.shards.array.descr), dataset.shape
    statistics: dict[str, Any] = {} if channels == 3 else {"mean": [0.5], "std": [0.5]}
    is_image = dtype == np.uint8 or dtype.kind == "f"
    transform = train(min(224, height, width), **statistics) if is_image else None
    return Loader(dataset, batch_size, shuffle=True, rank=0, num_replicas=1, transform=transform)
