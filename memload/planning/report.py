"""What ``memload plan`` prints."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from memload.wording import counted, shape_text, size_text

if TYPE_CHECKING:  # this imports torch, which a process that forks workers had better not
    from memload.planning.serving import Serving


@dataclass(frozen=True)
class Plan:
    """What a build will take and give. ``lines()`` of it are for people, ``as_dict()`` for JSON."""

    source: str  #: its name
    records: int  #: those that the source lists
    usable: int  #: those of them that can be used, as far as the sample tells
    shape: tuple[int, int, int]  #: (H, W, C) of an image
    dtype: str  #: such as ``uint8``
    arrays: Sequence[str]  #: the names of masks and other arrays
    bytes: int  #: size of the files of all arrays
    free_bytes: int  #: what is free on the disk now
    seconds: float  #: what the build will take
    seconds_range: tuple[float, float]  #: between which limits that probably is
    num_workers: int  #: of the build
    scaled_from_cores: float | None  #: if the sample was converted on other cores: how many
    serving: "Serving"
    tried: int  #: records that were converted
    tried_rejected: int  #: those of them that cannot be used
    seed: int  #: of their choice
    warnings: Sequence[str]  #: why the build would not succeed
    notes: Sequence[str]  #: what the source left out, and what makes the plan less certain
    output_exists: bool

    @property
    def images_per_second_built(self) -> float:
        """Records a second, from the beginning of the build to its end."""
        return self.records / self.seconds

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON has it. Times are in seconds, and sizes in bytes."""
        first, later = self.serving.first_epoch, self.serving.later_epochs
        return {
            "source": self.source,
            "records": self.records,
            "samples": self.usable,
            "shape": self.shape,
            "dtype": self.dtype,
            "arrays": self.arrays,
            "bytes": self.bytes,
            "free_bytes": self.free_bytes,
            "seconds": round(self.seconds, 2),
            "seconds_range": [round(seconds, 2) for seconds in self.seconds_range],
            "images_per_second_built": round(self.images_per_second_built, 1),
            "num_workers": self.num_workers,
            "scaled_from_cores": self.scaled_from_cores,
            "feed": self.serving.feed,
            "feed_reason": self.serving.reason,
            "first_epoch_bound": first.bound,
            "first_epoch_images_per_second": _rounded(first.images_per_second),
            "later_epochs_bound": later.bound,
            "later_epochs_images_per_second": _rounded(later.images_per_second),
            "share_in_memory": round(self.serving.share_in_memory, 4),
            "sampled": self.tried,
            "rejected": self.tried_rejected,
            "seed": self.seed,
            "output_exists": self.output_exists,
            "warnings": self.warnings,
            "notes": self.notes,
        }

    def lines(self) -> Iterator[str]:
        """Yield a few lines for people."""
        yield f"{self.source}: {counted(self.records, 'record')}; {self._tried()}"
        for name, text in self._facts():
            yield f"  {name:<14}{text}"
        for warning in self.warnings:
            yield f"  warning: {warning}"

    def _facts(self) -> Iterator[tuple[str, str]]:
        arrays = "".join(f" with {name}" for name in self.arrays)
        yield "rows", f"{self.usable:,} of {shape_text(self.shape)} {self.dtype}{arrays}"
        free = f"{size_text(self.free_bytes)} are free on the disk"
        yield "size", f"{size_text(self.bytes)}; {free}"
        yield "time", self._time()
        yield "feed", f"{self.serving.feed}: {self.serving.reason}"
        yield "first epoch", f"bound by {self.serving.first_epoch}"
        yield "later epochs", f"bound by {self.serving.later_epochs}"

    def _tried(self) -> str:
        rejected = self.tried_rejected
        unusable = f"; {rejected:,} of them cannot be used" if rejected else ""
        return f"a random sample of {self.tried:,} (seed {self.seed}) was converted{unusable}"

    def _time(self) -> str:
        unit = next((unit for unit in _UNITS if self.seconds >= unit.from_seconds), _UNITS[-1])
        middle, low, high = (
            f"{seconds / unit.seconds:,.{unit.digits}f}"
            for seconds in (self.seconds, *self.seconds_range)
        )
        by = f"by {counted(self.num_workers, 'worker')}" if self.num_workers else "in one process"
        scaled = ""
        if self.scaled_from_cores is not None:
            cores = f"{self.scaled_from_cores:g} core{'s' * (self.scaled_from_cores != 1)}"
            scaled = f"; measured with {cores} of this machine"
        return (
            f"{middle} {unit.name} ({low} to {high}) {by}, "
            f"{self.images_per_second_built:,.0f} images/s built{scaled}"
        )


def _rounded(number: float | None) -> float | None:
    return None if number is None else round(number, 1)


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
