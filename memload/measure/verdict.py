"""What bounds the training, from milliseconds per batch. Numbers in, sentences out."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

#: What bringing rows to the device consists of.
Part = Literal["gathering", "bus"]
Bound = Literal["model", "disk", "threads", "loading", "transform", "gathering", "bus"]

#: Times within this factor of each other count as equal; and while other processes are at work.
_NOISE, _NOISE_IF_BUSY = 1.25, 1.5
#: A model that waits for less than this share of its step is what bounds the training.
_NEGLIGIBLE = 0.05

_NAMES: dict[Bound, str] = {
    "disk": "Reading the disk",
    "threads": "The number of threads",
    "loading": "Making batches",
    "transform": "The transform",
    "gathering": "Gathering rows in RAM",
    "bus": "Copying rows to the GPU",
}
_SMALLER = "Build smaller images (--size)"


@dataclass(frozen=True)
class BatchTimes:
    """How long a batch takes, in milliseconds."""

    #: From one batch to the next, as the Loader is set up, while its rows are in RAM.
    loader: float
    #: Reading from the disk, in the first epoch and in later ones: the rows that are not in RAM.
    disk: float = 0.0
    disk_later: float = 0.0
    disk_was_measured: bool = True
    #: The same as ``loader``, if there were no transform. None: there is none.
    without_transform: float | None = None
    #: What bringing the rows takes, by what it is.
    parts: Mapping[Part, float] = field(default_factory=dict)
    #: The number of threads, and what a batch takes with more. None: the feed uses no threads.
    num_threads: int | None = None
    with_threads: Mapping[int, float] = field(default_factory=dict)
    is_on_gpu: bool = False
    #: Decoding the images. None: not measured.
    decoding: float | None = None

    @property
    def is_ahead(self) -> bool:
        """Whether batches are made while the model is at work."""
        return self.num_threads != 0

    def data(self, disk: float) -> float:
        """Return after how long a batch is there, if reading its rows takes ``disk``."""
        return max(self.loader, disk) if self.is_ahead else self.loader + disk


@dataclass(frozen=True)
class Verdict:
    """What bounds the training, by how much, and what to do.

    ``bound`` is ``"model"``, ``"disk"``, ``"threads"``, ``"transform"``, ``"gathering"``,
    ``"bus"``, or ``"loading"`` if its parts were not measured. A batch is there after ``data_ms``,
    for which the model waits ``wait_ms``. ``num_threads`` is the best number of threads if another
    one is better.
    """

    bound: Bound
    sentence: str
    remedy: str
    data_ms: float
    wait_ms: float | None = None
    num_threads: int | None = None


def judge(times: BatchTimes, step_ms: float | None = None, *, is_busy: bool = False) -> Verdict:
    """Say what bounds a model that takes ``step_ms`` per batch. None: what the data allows.

    ``is_busy``: other processes were at work, so only large differences count.

    >>> judge(BatchTimes(6), 54).sentence
    'The model bounds training: it takes 54 ms per batch, and data is there after 6 ms.'
    >>> judge(BatchTimes(6, disk=81), 54).sentence
    'Reading the disk bounds training: 81 ms per batch, so the model waits 27 ms of each step.'
    """
    data_ms, wait_ms = times.data(times.disk), None
    threads = _better_threads(times, _NOISE_IF_BUSY if is_busy else _NOISE)
    bound = _slowest(times, threads)
    if step_ms is not None:
        wait_ms = max(0.0, data_ms - step_ms) if times.is_ahead else data_ms
        bound = "model" if wait_ms <= _NEGLIGIBLE * step_ms else bound
    sentence = _sentence(bound, data_ms, step_ms, wait_ms)
    remedy = _remedy(bound, times, threads, step_ms or 0.0)
    if not times.disk_was_measured:
        remedy += " The disk was not measured: rows that are not in RAM take longer."
    if is_busy:
        remedy += " Other processes were at work: measure again when they have ended."
    return Verdict(bound, sentence, remedy, data_ms, wait_ms, threads)


def _sentence(bound: Bound, data_ms: float, step_ms: float | None, wait_ms: float | None) -> str:
    if step_ms is None or wait_ms is None:
        return (
            f"A batch is there after {_ms(data_ms)}, and a model that takes longer does not wait: "
            f"{_NAMES[bound]} takes longest."
        )
    if bound == "model":
        return (
            f"The model bounds training: it takes {_ms(step_ms)} per batch, and data is there "
            f"after {_ms(data_ms)}."
        )
    return (
        f"{_NAMES[bound]} bounds training: {_ms(data_ms)} per batch, so the model waits "
        f"{_ms(wait_ms)} of each step."
    )


def _better_threads(times: BatchTimes, noise: float) -> int | None:
    """Return the least number of threads that is as fast as any, if the own one is slower."""
    if not times.with_threads:
        return None
    fastest = min(times.with_threads.values())
    if times.is_ahead and times.loader <= noise * fastest:
        return None
    return min(count for count, ms in times.with_threads.items() if ms <= noise * fastest)


def _slowest(times: BatchTimes, threads: int | None) -> Bound:
    if times.disk > times.loader:
        return "disk"
    if threads is not None:
        return "threads"
    # On the GPU, one batch is transformed while the rows of the next one come. On the CPU, a thread
    # does both, one after the other.
    most = _NOISE if times.is_on_gpu else 2
    if times.without_transform is not None and times.loader > most * times.without_transform:
        return "transform"
    parts = sorted(times.parts, key=times.parts.__getitem__)
    return parts[-1] if parts else "loading"


def _remedy(bound: Bound, times: BatchTimes, threads: int | None, step_ms: float) -> str:
    if bound == "model":
        return "Loading is fast enough." + _shared_cores(times, step_ms)
    if bound == "disk":
        return _remedy_for_disk(times)
    if bound == "threads" and threads is not None:
        return f"Use num_threads={threads}: {_ms(times.with_threads[threads])} per batch."
    if bound == "transform":
        other = "a cheaper transform" if times.is_on_gpu else "a GPU, or more cores"
        return f"Do before the build what is the same in every epoch. The rest needs {other}."
    if bound == "gathering":
        return f"{_SMALLER}, or use a machine with more memory bandwidth."
    if bound == "bus":
        return f"{_SMALLER}: fewer bytes cross the bus."
    return "See docs/profiling.md."


def _remedy_for_disk(times: BatchTimes) -> str:
    later = _ms(times.data(times.disk_later))
    if not times.disk_later:
        return (
            "That is so in the first epoch only: then all rows are in RAM, and data is there after "
            f"{later}. A local NVMe disk shortens the first one."
        )
    return (
        f"Not all rows fit in RAM, so later epochs take {later} per batch. Use a faster disk or "
        "more RAM, or build smaller images (--size)."
    )


def _shared_cores(times: BatchTimes, step_ms: float) -> str:
    """Return what loading costs a model that runs on the same cores."""
    if times.is_on_gpu or not times.is_ahead or times.loader <= _NEGLIGIBLE * step_ms:
        return ""
    most = _ms(step_ms + times.loader)
    return f" A model on the CPU shares the cores with loading: a step takes up to {most}."


def milliseconds(number: float) -> str:
    """Return milliseconds as lines and sentences show them.

    >>> milliseconds(1450.4), milliseconds(81.2), milliseconds(0.354)
    ('1,450', '81', '0.35')
    """
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def _ms(number: float) -> str:
    return f"{milliseconds(number)} ms"
