"""Stages of `memload.bench`, measured one after another until their time is over."""

import time
from collections.abc import Callable, Sequence

from memload.bench.stages import Stage, measure_in_turn
from memload.doctor.report import Measured


class Measurements:
    """What is measured, in milliseconds a batch.

    No stage begins that would end after ``seconds`` if it took as long as the longest one of its
    kind, which is the first word of its subject.
    """

    def __init__(self, batch_size: int, seconds: float) -> None:
        self.batch_size = batch_size
        self.lines: list[Measured] = []
        self._end = time.monotonic() + seconds
        self._longest: dict[str, float] = {}

    def measure(self, stage: Stage) -> float | None:
        """Measure a stage once. Returns None, and notes the reason, if it cannot be measured.

        Raises errors of the measurement itself, other than those of preparing it.
        """
        if time.monotonic() + self._longest.get(_kind(stage), 0.0) > self._end:
            stage.reason = "not measured: there was no time left"
        else:
            self._run(stage)
        if not stage.rates:
            self.lines.append(Measured(stage.subject, reason=stage.reason))
            return None
        return self._add(stage)

    def measure_anyway(self, stage: Stage) -> float:
        """Measure a stage that all others are compared with, whose preparation cannot fail."""
        self._run(stage)
        return self._add(stage)

    def sweep(self, numbers: Sequence[int], make_stage: Callable[[int], Stage]) -> dict[int, float]:
        """Measure a stage for several numbers, such as numbers of threads."""
        found = {number: self.measure(make_stage(number)) for number in numbers}
        return {number: ms for number, ms in found.items() if ms is not None}

    def _run(self, stage: Stage) -> None:
        start = time.monotonic()
        measure_in_turn([stage], 1)
        seconds, kind = time.monotonic() - start, _kind(stage)
        self._longest[kind] = max(self._longest.get(kind, 0.0), seconds)

    def _add(self, stage: Stage) -> float:
        ms = 1000 * self.batch_size / stage.rates[0]
        self.lines.append(Measured(stage.subject, ms, stage.rates[0]))
        return ms


def _kind(stage: Stage) -> str:
    return stage.subject.replace(",", " ").split()[0]
