"""What `diagnose` found, as text and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from memload.doctor.checks import Check
from memload.doctor.judging import Times, Verdict
from memload.wording import counted


@dataclass(frozen=True)
class Measured:
    """How long a batch takes in a stage, or why that is not known."""

    subject: str
    ms: float | None = None  #: milliseconds a batch
    images_s: float | None = None
    reason: str = ""

    def line(self, width: int) -> str:
        """Return a row of a table whose first column has this width."""
        if self.ms is None or self.images_s is None:
            return f"{self.subject:{width}}  {'–':>8}  {'–':>10}  {self.reason}"
        ms = f"{self.ms:,.0f}" if self.ms >= 100 else f"{self.ms:.3g}"
        return f"{self.subject:{width}}  {ms:>8}  {self.images_s:>10,.0f}"


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` found. ``str()`` of it is the report."""

    checks: Sequence[Check]
    measured: Sequence[Measured] = ()
    times: Times | None = None
    verdict: Verdict | None = None
    step_ms: float | None = None
    batch_size: int | None = None
    #: The best values for a Loader here. None: they make no difference, or were not measured.
    num_threads: int | None = None
    prefetch_factor: int | None = None

    @property
    def ok(self) -> bool:
        """Whether nothing is broken."""
        return all(check.mark != "bad" for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        return {"ok": self.ok, **asdict(self)}

    def __str__(self) -> str:
        lines = [str(check) for check in self.checks]
        if self.measured:
            width = max(len(one.subject) for one in self.measured)
            heading = f"batches of {counted(self.batch_size or 0, 'sample')}"
            lines += ["", f"{heading:{width}}  {'ms':>8}  {'images/s':>10}"]
            lines += [one.line(width) for one in self.measured]
        if self.verdict is not None:
            best = {"num_threads": self.num_threads, "prefetch_factor": self.prefetch_factor}
            found = [f"{name}={value}" for name, value in best.items() if value is not None]
            enough = "Enough here" if self.verdict.bound == "model" else "Best here"
            lines += ["", *([f"{enough}: {', '.join(found)}."] if found else [])]
            lines += [f"{self.verdict.sentence} {self.verdict.remedy}".rstrip()]
        return "\n".join(lines)
