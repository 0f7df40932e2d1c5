"""How long a build will take, from what a sample of it took."""

from typing import Final, NamedTuple

from memload.planning.disk import DiskRates
from memload.planning.measuring import Conversion

#: The least that a prediction may be off, as a share of it: no machine is equally fast twice.
_LEAST_RELATIVE_ERROR: Final = 0.1
#: A build starts and ends in up to twice the time, or in half of it: its programs may have to come
#: from the disk, and the disk may be at other work when the index is flushed.
_START_FACTOR: Final = 2.0
#: The cores of another machine may be so many times faster or slower: clocks differ, and two of
#: them may be two threads of one core.
_CORES_FACTOR: Final = 1.5


def at_once(num_workers: int, cores: float) -> float:
    """Return how many records are converted at the same time. No workers are one process."""
    return min(max(1, num_workers), cores)


class Duration(NamedTuple):
    """How long a build will take, in seconds, and between which limits that probably is."""

    seconds: float
    low: float
    high: float


def range_factor(conversion: Conversion, *, load: float, is_other_machine: bool) -> float:
    """Return how many times longer or shorter than predicted a build may convert its records.

    ``load`` is how many other processes want each core. They may end, and others may begin.
    """
    of_sample = 1 + max(_LEAST_RELATIVE_ERROR, conversion.relative_error)
    return of_sample * (1 + load) * (_CORES_FACTOR if is_other_machine else 1)


def duration(
    conversion: Conversion,
    disk: DiskRates,
    *,
    records: int,
    data_bytes: int,
    unwritten_bytes: float,
    listing_seconds: float,
    scale: float,
    range_factor: float,
) -> Duration:
    """Return how long a build of so many records and bytes will take.

    ``listing_seconds`` pass before workers are started, for imports and for listing the source.
    ``unwritten_bytes`` are what the system may keep in RAM before the disk has it. Converting takes
    ``scale`` times as long as the sample did. A disk whose rate is not known is taken to keep up.
    """
    converting = scale * conversion.seconds_per_record * records
    flushing = min(data_bytes, unwritten_bytes) / disk.write if disk.write else 0.0
    writing = data_bytes / disk.write if disk.write else 0.0
    fixed = listing_seconds + conversion.start_seconds + conversion.finish_seconds
    work = max(converting + flushing, writing)
    low = fixed / _START_FACTOR + work / range_factor
    high = fixed * _START_FACTOR + work * range_factor
    return Duration(fixed + work, low, high)
