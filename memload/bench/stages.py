"""Stages: what is measured, round after round."""

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from memload.errors import MemloadError
from memload.feeds.feed import Counts

#: Seconds of one measurement, and of one that decodes or reads from the disk; and how many rounds.
SECONDS, SLOW_SECONDS = 0.2, 1.0
ROUNDS, SLOW_ROUNDS = 5, 3
#: Seconds of measuring what is warm after which no new round begins.
_LAST_ROUND_AFTER = 25.0

#: Does a part of the work, waits for the device, and returns how many images it was.
Step = Callable[[], int]
#: Measures for a while and returns images a second.
Measurement = Callable[[], float]


@dataclass
class Stage:
    """What to measure: ``prepare`` returns the measurement, or raises why there is none."""

    subject: str
    prepare: Callable[[], Measurement]
    #: The stages that limit this one. The slowest of them counts.
    limits: Sequence["Stage"] = ()
    #: False for a stage that is only the limit of others.
    reported: bool = True
    #: Images a second in each round; or none, and the reason why.
    rates: list[float] = field(default_factory=list)
    reason: str = ""
    #: Where the rows were found, if a Loader was measured whose feed counts that.
    counts: Counts | None = None


def measure_in_turn(stages: Sequence[Stage], rounds: int) -> None:
    """Prepare all stages, then measure one after the other, round after round."""
    measurements: list[tuple[Stage, Measurement]] = []
    for stage in stages:
        try:
            measurements.append((stage, stage.prepare()))
        except (MemloadError, RuntimeError, MemoryError, OSError, ValueError) as error:
            stage.reason = (str(error) or type(error).__name__).splitlines()[0]
    end = time.perf_counter() + _LAST_ROUND_AFTER
    for number in range(rounds):
        if number and time.perf_counter() > end:
            return
        for stage, measurement in measurements:
            stage.rates.append(measurement())


def rate(counts: Iterable[float], seconds: float) -> float:
    """Return images a second. Stops after so many seconds, or when the counts of images end."""
    start, images, passed = time.perf_counter(), 0.0, 0.0
    for number in counts:
        images += number
        passed = time.perf_counter() - start
        if passed >= seconds:
            break
    return images / passed


def steady(step: Step) -> Measurement:
    """Repeat a step until it gets no faster, then return what measures it.

    By then, kernels are compiled, files are in RAM, and their pages registered with the GPU.
    """

    def measurement() -> float:
        return rate(iter(step, None), SECONDS)

    fastest, found = 0.0, measurement()
    while found > 1.1 * fastest:
        fastest, found = found, measurement()
    return measurement


def on_threads(threads: int, work: Callable[[int], int], items: Iterable[int]) -> int:
    """Call ``work`` with each item, and add up the results."""
    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(work, items))
