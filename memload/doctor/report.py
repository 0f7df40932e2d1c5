"""What `diagnose` found, as text and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from memload.doctor.checks import Check
from memload.doctor.judging import Verdict
from memload.doctor.measurements import Measured
from memload.doctor.times import Times
from memload.wording import counted


@dataclass(frozen=True)
class Result:
    """What was measured of a loader, and what that says."""

    measured: Sequence[Measured]
    times: Times
    verdict: Verdict
    step_ms: float | None
    batch_size: int


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` found. ``str()`` of it is the report, and `as_dict` is ready for JSON.

    - ``ok``: whether nothing is broken, so that no check has the mark ``"bad"``.
    - ``checks``: each has a ``subject``, a ``mark`` (``"ok"``, ``"note"`` or ``"bad"``), a
      ``finding``, and a ``remedy`` that is empty if there is nothing to do.
    - ``measured``: the lines of the table. Each has a ``subject``, ``ms`` a batch and ``images_s``,
      or a ``reason`` why it was not measured.
    - ``times``: the milliseconds that the verdict is made of.
    - ``verdict``: ``bound`` is what bounds the training: ``"model"``, ``"disk"``, ``"threads"``,
      ``"prefetching"``, ``"workers"``, ``"transform"``, ``"gathering"``, ``"bus"``, ``"samples"``,
      ``"dataset"``, or ``"loading"`` if its parts were not measured. ``sentence`` says it,
      ``remedy`` what to do, and ``note`` what else to know of it. A batch is there after
      ``data_ms``, for which the model waits ``wait_ms``.
    - ``step_ms``, ``batch_size``: what was diagnosed.
    - ``num_threads``, ``prefetch_factor``: the best values for a Loader here that were measured
      together. None: they make no difference, or nothing was compared.

    Without measurements, ``measured`` is empty, and all below it are None.
    """

    checks: Sequence[Check]
    result: Result | None = None

    @property
    def ok(self) -> bool:
        """Whether nothing is broken."""
        return all(check.mark != "bad" for check in self.checks)

    @property
    def measured(self) -> Sequence[Measured]:
        """The lines of the table."""
        return self.result.measured if self.result else ()

    @property
    def times(self) -> Times | None:
        """The milliseconds that the verdict is made of."""
        return self.result.times if self.result else None

    @property
    def verdict(self) -> Verdict | None:
        """What bounds the training, by how much, and what to do."""
        return self.result.verdict if self.result else None

    @property
    def step_ms(self) -> float | None:
        """What the model takes for a batch."""
        return self.result.step_ms if self.result else None

    @property
    def batch_size(self) -> int | None:
        """How many samples a batch has."""
        return self.result.batch_size if self.result else None

    @property
    def num_threads(self) -> int | None:
        """The best number of threads here."""
        return self.verdict.num_threads if self.verdict else None

    @property
    def prefetch_factor(self) -> int | None:
        """The best prefetch_factor here."""
        return self.verdict.prefetch_factor if self.verdict else None

    def as_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        return {
            "ok": self.ok,
            "checks": [asdict(check) for check in self.checks],
            "measured": [asdict(line) for line in self.measured],
            "times": self.times and asdict(self.times),
            "verdict": self.verdict and asdict(self.verdict),
            "step_ms": self.step_ms,
            "batch_size": self.batch_size,
            "num_threads": self.num_threads,
            "prefetch_factor": self.prefetch_factor,
        }

    def __str__(self) -> str:
        lines = [str(check) for check in self.checks]
        if self.result is not None:
            lines += ["", *_table(self.result), "", *self._conclusion(self.result.verdict)]
        return "\n".join(lines)

    def _conclusion(self, verdict: Verdict) -> list[str]:
        """Return the best settings, and the verdict."""
        best = {"num_threads": self.num_threads, "prefetch_factor": self.prefetch_factor}
        found = ", ".join(f"{name}={value}" for name, value in best.items() if value is not None)
        enough = "Enough for this model" if verdict.bound == "model" else "Best here"
        sentences = filter(None, [verdict.sentence, verdict.remedy, verdict.note])
        return [*([f"{enough}: {found}."] if found else []), " ".join(sentences)]


def _table(result: Result) -> list[str]:
    """Return a heading, and a row for each line that was measured."""
    width = max(len(line.subject) for line in result.measured)
    heading = f"batches of {counted(result.batch_size, 'sample')}"
    return [
        f"{heading:{width}}  {'ms':>8}  {'images/s':>10}",
        *(line.line(width) for line in result.measured),
    ]
