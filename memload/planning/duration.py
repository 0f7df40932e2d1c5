"""How long a build will take, from what a sample of it took."""

from typing import Final, NamedTuple

from memload.planning.disk import DiskRates
from memload.planning.measuring import Conversion

#: The least that a prediction may be off, as a share of it: no machine is as fast twice.
_LEAST_UNCERTAINTY: Final = 0.1


class Workers(NamedTuple):
    """Workers of a build, and the cores that they share."""

    number: int  #: 0: the build's own process does their work
    cores: int

    @classmethod
    def of(cls, given: int | None, cores: int, records: int) -> "Workers":
        """Return the workers of a build that was told to have ``given``, or one for each core."""
        return cls(min(cores if given is None else given, records), cores)

    @property
    def at_once(self) -> int:
        """How many records are converted at the same time."""
        return max(1, min(self))


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
    writing = data_bytes / disk.write
    flushing = min(data_bytes, unwritten_bytes) / disk.write
    fixed = begin_seconds + conversion.start_seconds + conversion.finish_seconds + flushing
    seconds = fixed + max(converting, writing)
    uncertainty = max(_LEAST_UNCERTAINTY, conversion.uncertainty)
    return Duration(seconds, seconds * max(0.0, 1 - uncertainty), seconds * (1 + uncertainty))
