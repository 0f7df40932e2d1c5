"""Stages of `memload.bench`, measured one after another until their time is over."""

import time
from collections.abc import Callable, Sequence

from memload.bench.stages import Stage, measure_in_turn
from memload.doctor.report import Measured


class Measurements:
    """What is measured, in milliseconds a batch. No stage begins after ``seconds``."""

    def __init__(self, batch_size: int, seconds: float) -> None:
        self.batch_size = batch_size
        self.lines: list[Measured] = []
        self._end = time.monotonic() + seconds
        self._seconds = seconds

    def measure(self, stage: Stage) -> float | None:
        """Measure a stage once. Returns None, and notes the reason, if it cannot be measured."""
        if time.monotonic() > self._end:
            stage.reason = f"not measured: {self._seconds:.0f} s were over"
        else:
            measure_in_turn([stage], 1)
        if not stage.rates:
            self.lines.append(Measured(stage.subject, reason=stage.reason))
            return None
        return self.add(stage.subject, 1000 * self.batch_size / stage.rates[0])

    def add(self, subject: str, ms: float) -> float:
        """Note how long a batch takes."""
        self.lines.append(Measured(subject, ms, 1000 * self.batch_size / ms))
        return ms

    def sweep(self, numbers: Sequence[int], make_stage: Callable[[int], Stage]) -> dict[int, float]:
        """Measure a stage for several numbers, such as numbers of threads."""
        found = {number: self.measure(make_stage(number)) for number in numbers}
        return {number: ms for number, ms in found.items() if ms is not None}
