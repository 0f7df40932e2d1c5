"""What ``memload plan`` prints."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from memload.wording import counted, shape_text, size_text

#: What batches wait for where training could take more of them.
Bound = Literal["disk", "bus", "cpu", "gpu"]


class Serving(NamedTuple):
    """Which feed will serve, why, and what its epochs will be bound by, in a word and in a text."""

    feed: str
    reason: str
    first_epoch: Bound
    first_text: str
    later_epochs: Bound
    later_text: str


@dataclass(frozen=True)
class Plan:
    """What a build will take and give. ``lines()`` of it are for people, ``as_dict()`` for JSON."""

    source: str  #: its name
    records: int  #: those that the source lists
    samples: int  #: those of them that can be used, as far as the sample tells
    shape: tuple[int, int, int]  #: (H, W, C) of an image
    dtype: str  #: such as ``uint8``
    arrays: Sequence[str]  #: the names of masks and other arrays
    bytes: int  #: size of the files of all arrays
    free_bytes: int  #: what is free on the disk now
    seconds: float  #: what the build will take
    seconds_range: tuple[float, float]  #: between which limits that probably is
    num_workers: int  #: of the build
    scaled_from_cores: int | None  #: if the sample was converted on other cores: how many
    serving: Serving
    sampled: int  #: records that were converted
    rejected: int  #: those of them that cannot be used
    seed: int  #: of their choice
    warnings: Sequence[str]  #: why the build would not succeed
    notes: Sequence[str]  #: what the source left out

    @property
    def images_per_second(self) -> float:
        """Records that are converted a second."""
        return self.records / self.seconds

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON has it. Times are in seconds, and sizes in bytes."""
        facts = {name: value for name, value in vars(self).items() if name != "serving"}
        serving = self.serving
        return facts | {
            "seconds": round(self.seconds, 2),
            "seconds_range": [round(seconds, 2) for seconds in self.seconds_range],
            "images_per_second": round(self.images_per_second, 1),
            "feed": serving.feed,
            "feed_reason": serving.reason,
            "first_epoch_bound": serving.first_epoch,
            "later_epochs_bound": serving.later_epochs,
        }

    def lines(self) -> Iterator[str]:
        """Yield a few lines for people."""
        yield f"{self.source}: {counted(self.records, 'record')}; {self._sample()}"
        for name, text in self._facts():
            yield f"  {name:<14}{text}"
        for warning in self.warnings:
            yield f"  warning: {warning}"

    def _facts(self) -> Iterator[tuple[str, str]]:
        arrays = "".join(f" with {name}" for name in self.arrays)
        yield "rows", f"{self.samples:,} of {shape_text(self.shape)} {self.dtype}{arrays}"
        yield "size", f"{size_text(self.bytes)}; {self._room()}"
        yield "time", self._time()
        yield "feed", f"{self.serving.feed}: {self.serving.reason}"
        yield "first epoch", f"bound by {self.serving.first_text}"
        yield "later epochs", f"bound by {self.serving.later_text}"

    def _room(self) -> str:
        free = f"{size_text(self.free_bytes)} are free on the disk"
        return free if self.bytes <= self.free_bytes else f"this does not fit, since only {free}"

    def _sample(self) -> str:
        usable = f"; {self.rejected:,} of them cannot be used" if self.rejected else ""
        return f"a random sample of {self.sampled:,} (seed {self.seed}) was converted{usable}"

    def _time(self) -> str:
        unit = next((unit for unit in _UNITS if self.seconds >= unit.from_seconds), _UNITS[-1])
        middle, low, high = (
            f"{seconds / unit.seconds:,.{unit.digits}f}"
            for seconds in (self.seconds, *self.seconds_range)
        )
        by = f"by {counted(self.num_workers, 'worker')}" if self.num_workers else "in one process"
        scaled = ""
        if self.scaled_from_cores is not None:
            scaled = f"; measured with {counted(self.scaled_from_cores, 'core')} of this machine"
        return (
            f"{middle} {unit.name} ({low} to {high}) {by}, "
            f"{self.images_per_second:,.0f} images/s{scaled}"
        )


class _Unit(NamedTuple):
    """A unit of time, which is used from so many seconds on, with so many decimal digits."""

    name: str
    seconds: int
    from_seconds: float
    digits: int


_UNITS: Final = (
    _Unit("hours", 3600, 2 * 3600, 1),
    _Unit("minutes", 60, 600, 0),
    _Unit("minutes", 60, 120, 1),
    _Unit("seconds", 1, 10, 0),
    _Unit("seconds", 1, 0, 1),
)
