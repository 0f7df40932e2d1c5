"""Stages of `memload.bench`, measured one after another until their time is over."""

import time
from dataclasses import dataclass
from typing import Literal

from memload.bench.stages import Stage, measure_in_turn
from memload.doctor.times import milliseconds

#: Stages of one kind take about as long as each other.
Kind = Literal["disk", "loader", "gathering", "gpu", "samples"]


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
        return f"{self.subject:{width}}  {milliseconds(self.ms):>8}  {self.images_s:>10,.0f}"


class StageRunner:
    """Measures stages, in milliseconds a batch, and keeps a line on each of them.

    No stage begins that would end after ``seconds`` if it took as long as the longest one of its
    kind so far.
    """

    def __init__(self, batch_size: int, seconds: float) -> None:
        self.batch_size = batch_size
        self._lines: dict[str, Measured] = {}
        self._end = time.monotonic() + seconds
        self._longest: dict[Kind, float] = {}

    @property
    def lines(self) -> list[Measured]:
        """What was measured so far, a line for each subject."""
        return list(self._lines.values())

    def measure(self, stage: Stage, *, kind: Kind) -> float | None:
        """Measure a stage. If its subject was measured before, the faster result counts.

        Returns None if it cannot be measured. Errors while preparing become the reason. Errors
        while measuring are raised.
        """
        if time.monotonic() + self._longest.get(kind, 0.0) > self._end:
            stage.reason = "not measured: there was no time left"
        else:
            self._run(stage, kind)
        line = Measured(stage.subject, reason=stage.reason)
        if stage.rates:
            line = self._line_of(stage)
        before = self._lines.get(stage.subject, line)
        faster = max(before, line, key=lambda one: one.images_s or 0.0)
        self._lines[stage.subject] = faster
        return faster.ms

    def measure_anyway(self, stage: Stage, *, kind: Kind) -> float:
        """Measure a stage that all others are compared with, whose preparation cannot fail."""
        self._run(stage, kind)
        self._lines[stage.subject] = self._line_of(stage)
        return self._ms(stage)

    def _run(self, stage: Stage, kind: Kind) -> None:
        start = time.monotonic()
        measure_in_turn([stage], 1)
        seconds = time.monotonic() - start
        self._longest[kind] = max(self._longest.get(kind, 0.0), seconds)

    def _line_of(self, stage: Stage) -> Measured:
        return Measured(stage.subject, self._ms(stage), stage.rates[0])

    def _ms(self, stage: Stage) -> float:
        return 1000 * self.batch_size / stage.rates[0]
