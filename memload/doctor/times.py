"""What was measured of a loader: numbers only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

#: What the work on a batch consists of. ``samples`` is reading and collating single samples of
#: memload's, and ``dataset`` the same of a data set of another kind.
Part = Literal["transform", "gathering", "bus", "samples", "dataset"]

#: Other processes make a batch take more than this many times as long as other trials allow (5 to
#: 40 times were seen). Unsuitable settings alone hardly do.
_OUTLIER = 4.0


@dataclass(frozen=True)
class Trial:
    """How long a batch of a Loader takes with these settings."""

    #: None: its feed uses no threads.
    num_threads: int | None
    prefetch_factor: int
    ms: float

    @property
    def threads_at_work(self) -> int:
        """How many threads make batches, counting that of the training loop if it is alone."""
        return self.num_threads or 1

    def __str__(self) -> str:
        threads = "" if self.num_threads is None else f"num_threads={self.num_threads}, "
        return f"{threads}prefetch_factor={self.prefetch_factor}"


@dataclass(frozen=True)
class Times:
    """How long a batch takes, in milliseconds."""

    #: From one batch to the next, as the loader is set up, while its rows are in RAM.
    batch: float
    #: Reading from the disk, in the first epoch and in later ones: the rows that are not in RAM.
    disk: float = 0.0
    disk_later: float = 0.0
    #: The work on a batch, by what it is. On the CPU that of one thread or process. Empty: it was
    #: not divided.
    parts: Mapping[Part, float] = field(default_factory=dict)
    #: Of a Loader: its own settings, then the others that were tried.
    trials: Sequence[Trial] = ()
    #: Of a DataLoader: how many workers it has, and what a batch takes without them.
    num_workers: int | None = None
    without_workers: float | None = None
    #: Whether batches are made while the model is at work.
    is_ahead: bool = True
    #: Whether batches are made in the memory of a GPU, and whether there is a GPU for the model.
    is_on_gpu: bool = False
    has_gpu: bool = True

    @property
    def is_disk_slower(self) -> bool:
        """Whether a batch takes longer to be read from the disk than to be made."""
        return self.disk > self.batch


def outliers(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials that took much longer than another one allows.

    Half as many threads take at most twice as long, and more threads no longer.

    >>> outliers([Trial(2, 2, 119.0), Trial(1, 2, 1450.0), Trial(2, 4, 60.0)])
    [Trial(num_threads=1, prefetch_factor=2, ms=1450.0)]
    """
    return [trial for trial in trials if trial.ms > _OUTLIER * _allowed(trial, trials)]


def _allowed(trial: Trial, trials: Sequence[Trial]) -> float:
    """Return how long a trial should take at most, as the fastest of them suggests."""
    return min(
        other.ms * max(1.0, other.threads_at_work / trial.threads_at_work) for other in trials
    )


def milliseconds(number: float) -> str:
    """Return milliseconds as all lines and sentences show them.

    >>> milliseconds(1450.4), milliseconds(81.2), milliseconds(0.354)
    ('1,450', '81', '0.35')
    """
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"
