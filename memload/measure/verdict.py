"""What bounds the training, from milliseconds per batch. Numbers in, sentences out."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Bound = Literal["model", "disk", "threads", "transform", "rows"]

#: Times within this factor of each other count as equal.
_NOISE = 1.25
#: A model that waits for less than this share of its step is what bounds the training.
_NEGLIGIBLE = 0.05

_NAMES: dict[Bound, str] = {
    "disk": "Reading the disk",
    "threads": "The number of threads",
    "transform": "The transform",
    "rows": "Copying rows",
}


@dataclass(frozen=True)
class BatchTimes:
    """How long a batch takes, in milliseconds."""

    #: From one batch to the next, as the Loader is set up, while its rows are in RAM.
    loader: float
    #: Reading the rows that are not in RAM, in the first epoch and in later ones. None: not known.
    disk: float | None = 0.0
    disk_later: float = 0.0
    #: The same as ``loader``, if there were no transform. None: there is none.
    without_transform: float | None = None
    #: The number of threads, and what a batch takes with more. None: the feed uses no threads.
    num_threads: int | None = None
    with_threads: Mapping[int, float] = field(default_factory=dict)
    is_on_gpu: bool = False

    def data(self, disk: float) -> float:
        """Return after how long a batch is there, if reading its rows takes ``disk``."""
        return self.loader + disk if self.num_threads == 0 else max(self.loader, disk)


@dataclass(frozen=True)
class Verdict:
    """What bounds the training, by how much, and what to do.

    ``bound`` is ``"model"``, ``"disk"``, ``"threads"``, ``"transform"`` or ``"rows"``: copying them
    to where the model is. A batch is there after ``data_ms``, for which the model waits
    ``wait_ms``.
    """

    bound: Bound
    sentence: str
    remedy: str
    data_ms: float
    wait_ms: float | None = None


def judge(times: BatchTimes, step_ms: float | None = None) -> Verdict:
    """Say what bounds a model that takes ``step_ms`` per batch. None: what the data allows.

    >>> judge(BatchTimes(6), 54).sentence
    'The model bounds training: it takes 54 ms per batch, and data is there after 6 ms.'
    >>> judge(BatchTimes(6, disk=81), 54).sentence
    'Reading the disk bounds training: 81 ms per batch, so the model waits 27 ms of each step.'
    """
    data_ms, wait_ms = times.data(times.disk or 0.0), None
    bound, remedy = _slowest(times, step_ms or times.loader)
    # Without threads, nothing is made while the model is at work.
    is_ahead = times.num_threads != 0
    if step_ms is not None:
        wait_ms = max(0.0, data_ms - step_ms) if is_ahead else data_ms
    if step_ms is None or wait_ms is None:
        waits = "a model that takes longer does not wait" if is_ahead else "the model waits for it"
        sentence = (
            f"A batch is there after {_ms(data_ms)}, and {waits}: {_NAMES[bound]} takes longest."
        )
    elif wait_ms > _NEGLIGIBLE * step_ms:
        sentence = (
            f"{_NAMES[bound]} bounds training: {_ms(data_ms)} per batch, so the model waits "
            f"{_ms(wait_ms)} of each step."
        )
    else:
        bound, remedy = "model", "Loading is fast enough."
        sentence = (
            f"The model bounds training: it takes {_ms(step_ms)} per batch, and data is there "
            f"after {_ms(data_ms)}."
        )
        if not times.is_on_gpu:
            most = _ms(step_ms + times.loader)
            remedy += f" A model on the CPU shares the cores with it: a step takes up to {most}."
    if times.disk is None:
        remedy += " The disk was not measured: rows that are not in RAM take longer."
    return Verdict(bound, sentence, remedy, data_ms, wait_ms)


def _slowest(times: BatchTimes, step_ms: float) -> tuple[Bound, str]:
    """Return what takes longest of making a batch, and what to do about it."""
    if times.disk is not None and times.disk > times.loader:
        later = _ms(times.data(times.disk_later))
        if times.disk_later:
            return "disk", (
                f"Not all rows fit in RAM, so later epochs take {later} per batch. Use a faster "
                "disk or more RAM, or build smaller images (--size)."
            )
        return "disk", (
            "That is so in the first epoch only: then all rows are in RAM, and data is there after "
            f"{later}. A local NVMe disk shortens the first one."
        )
    own, with_threads = times.loader, dict(times.with_threads)
    if times.num_threads == 0:  # the model waits for a batch, and the batch for the model
        own += step_ms
        with_threads = {count: max(ms, step_ms) for count, ms in with_threads.items()}
    enough = _NOISE * min(with_threads.values(), default=own)
    if own > enough:
        threads = min(count for count, ms in with_threads.items() if ms <= enough)
        return (
            "threads",
            f"Use num_threads={threads}: {_ms(times.with_threads[threads])} per batch.",
        )
    # On the GPU, one batch is transformed while the rows of the next one come. On the CPU, a thread
    # does both, one after the other.
    most = _NOISE if times.is_on_gpu else 2
    if times.without_transform is not None and times.loader > most * times.without_transform:
        other = "a cheaper transform" if times.is_on_gpu else "a GPU, or more cores"
        return "transform", (
            f"Do before the build what is the same in every epoch. The rest needs {other}."
        )
    return "rows", "Build smaller images (--size): fewer bytes are copied."


def milliseconds(number: float) -> str:
    """Return milliseconds as lines and sentences show them.

    >>> milliseconds(1450.4), milliseconds(81.2), milliseconds(0.354)
    ('1,450', '81', '0.35')
    """
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def _ms(number: float) -> str:
    return f"{milliseconds(number)} ms"
