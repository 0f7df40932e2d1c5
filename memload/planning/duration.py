"""How long a build will take, from what a sample of it took."""

from typing import Final, NamedTuple

from memload.planning.disk import DiskRates
from memload.planning.measuring import Conversion

#: The least that a prediction may be off, as a share of it: no machine is as fast twice.
_LEAST_UNCERTAINTY: Final = 0.1


def at_once(num_workers: int, cores: float) -> float:
    """Return how many records are converted at the same time. No workers are one process."""
    return min(max(1, num_workers), cores)


class Duration(NamedTuple):
    """How long a build will take, in seconds, and between which limits that probably is."""

    seconds: float
    low: float
    high: float


def duration(
    conversion: Conversion,
    disk: DiskRates,
    *,
    records: int,
    data_bytes: int,
    unwritten_bytes: float,
    begin_seconds: float,
    scale: float,
) -> Duration:
    """Return how long a build of so many records and bytes will take.

    ``begin_seconds`` pass before workers are started. ``unwritten_bytes`` are what the system may
    keep in RAM before the disk has it. Converting takes ``scale`` times as long as the sample did.
    """
    converting = scale * conversion.seconds_per_record * records
    flushing = min(data_bytes, unwritten_bytes) / disk.write
    writing = data_bytes / disk.write
    fixed = begin_seconds + conversion.start_seconds + conversion.finish_seconds
    seconds = fixed + max(converting + flushing, writing)
    uncertainty = max(_LEAST_UNCERTAINTY, conversion.uncertainty)
    return Duration(seconds, seconds * max(0.0, 1 - uncertainty), seconds * (1 + uncertainty))
