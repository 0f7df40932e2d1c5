"""What bounds the training, from milliseconds a batch. Numbers in, sentences out."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Bound = Literal["model", "disk", "threads", "workers", "transform", "gathering", "bus", "samples"]

#: What takes less than this share of the time of something else is much faster.
MUCH_LESS = 0.8
#: What is nearly as fast as the fastest takes at most this many times as long.
_NEARLY = 1.1
#: A model that waits for less than this share of its step is what bounds the training.
_NEGLIGIBLE = 0.05

_NAMES: dict[Bound, str] = {
    "disk": "Reading the disk",
    "transform": "The transform",
    "gathering": "Gathering rows",
    "bus": "Bringing rows to the GPU",
    "samples": "Reading and collating single samples",
}
_REMEDIES: dict[Bound, str] = {
    "transform": "Do before the build what is the same in every epoch. memload.transforms do the "
    "rest to whole batches, on a GPU or on more cores",
    "gathering": "Build smaller images (--size), or use a machine with more memory bandwidth",
    "bus": "Build smaller images (--size): fewer bytes cross the bus",
    "samples": "Use a memload.Loader, which reads whole batches",
}


@dataclass(frozen=True)
class Times:
    """How long a batch takes, in milliseconds."""

    #: From one batch to the next, as it is set up, while its rows are in RAM.
    batch: float
    #: Its rows that are not in RAM now, from the disk; and once an epoch has read all of them.
    disk: float = 0.0
    disk_later: float = 0.0
    #: The work on a batch, by what it is. On the CPU that of one thread or process.
    parts: Mapping[Bound, float] = field(default_factory=dict)
    #: How many threads or processes there are, and what a batch takes with other numbers of them.
    workers: int = 1
    by_workers: Mapping[int, float] = field(default_factory=dict)
    #: Whether these are processes of a DataLoader, and not threads of a Loader.
    are_processes: bool = False
    #: Whether batches are made while the model is at work.
    is_ahead: bool = True


@dataclass(frozen=True)
class Verdict:
    """What bounds the training, by how much, and what to do."""

    bound: Bound
    sentence: str
    remedy: str = ""
    #: After how many milliseconds a batch is there, and for how many the model waits for it.
    data_ms: float = 0.0
    wait_ms: float | None = None


def judge(times: Times, step_ms: float | None = None) -> Verdict:
    """Say what bounds a model that takes ``step_ms`` a batch; None: what the data allows.

    >>> judge(Times(batch=6), step_ms=54).sentence
    'The model: it takes 54 ms a batch, and data is there after 6 ms.'
    >>> judge(Times(batch=6, disk=81), step_ms=54).sentence
    'Reading the disk: 81 ms a batch, the model waits 27 ms of each step.'
    """
    data_ms = max(times.batch, times.disk)
    bound = _slowest(times, step_ms)
    if step_ms is None:
        sentence = (
            f"Data is there after {_ms(data_ms)} a batch, and a model that takes longer does not "
            f"wait. {_NAMES.get(bound) or _described(bound, times)}"
            f"{' takes longest' if bound in _NAMES else ''}."
        )
        return Verdict(bound, sentence, _remedy(bound, times, step_ms), data_ms)
    wait = max(0.0, data_ms - step_ms) if times.is_ahead else data_ms
    if wait <= _NEGLIGIBLE * step_ms:
        sentence = (
            f"The model: it takes {_ms(step_ms)} a batch, and data is there after {_ms(data_ms)}."
        )
        return Verdict("model", sentence, _spare_workers(times, step_ms), data_ms, wait)
    sentence = f"{_described(bound, times)}, the model waits {_ms(wait)} of each step."
    return Verdict(bound, sentence, _remedy(bound, times, step_ms), data_ms, wait)


def best_workers(by_workers: Mapping[int, float], step_ms: float | None = None) -> int | None:
    """Return the smallest number that is fast enough, or else nearly as fast as the fastest.

    >>> best_workers({1: 50, 2: 26, 4: 14, 8: 13.9})
    4
    >>> best_workers({1: 50, 2: 26, 4: 14, 8: 13.9}, step_ms=40)
    2
    """
    if not by_workers:
        return None
    enough = max(MUCH_LESS * (step_ms or 0), _NEARLY * min(by_workers.values()))
    return min(number for number, ms in by_workers.items() if ms <= enough)


def _slowest(times: Times, step_ms: float | None) -> Bound:
    """Return what the data waits for."""
    if times.disk > times.batch:
        return "disk"
    if _is_better_without_workers(times):
        return "workers"
    if not times.are_processes and times.workers == 0 and len(times.by_workers) > 1:
        return "threads"  # with none, the model waits for all of it
    more = _with_more_threads(times, step_ms)
    if more is not None and (step_ms is None or times.by_workers[more] <= step_ms):
        return "threads"
    parts = times.parts or {"gathering": times.batch}
    return max(parts, key=lambda part: parts[part])


def _is_better_without_workers(times: Times) -> bool:
    if not (times.are_processes and times.workers and 0 in times.by_workers):
        return False
    return times.by_workers[0] < MUCH_LESS * times.batch


def _with_more_threads(times: Times, step_ms: float | None) -> int | None:
    """Return how many threads would be much faster; None if not more than there are."""
    best = best_workers(times.by_workers, step_ms)
    if times.are_processes or best is None or best <= times.workers:
        return None
    return best if times.by_workers[best] < MUCH_LESS * times.batch else None


def _described(bound: Bound, times: Times) -> str:
    if bound == "disk":
        return f"{_NAMES[bound]}: {_ms(times.disk)} a batch"
    if bound == "threads":
        return f"Too few threads: {_ms(times.batch)} a batch with num_threads={times.workers}"
    if bound == "workers":
        without = _ms(times.by_workers[0])
        return (
            f"The DataLoader's {times.workers} workers: {_ms(times.batch)} a batch ({without} "
            "without them)"
        )
    return f"{_NAMES[bound]}: {_ms(times.batch)} a batch"


def _remedy(bound: Bound, times: Times, step_ms: float | None) -> str:
    if bound == "disk":
        return _remedy_for_disk(times)
    if bound == "threads":
        with_threads = {number: ms for number, ms in times.by_workers.items() if number}
        best = best_workers(with_threads, step_ms) or 1
        return f"Use num_threads={best}: {_ms(times.by_workers[best])} a batch."
    if bound == "workers":
        return (
            "Nothing is left to decode, so workers cost more than they bring. Use num_workers=0 "
            "or, to load while the model is at work, a memload.Loader."
        )
    remedy = _REMEDIES[bound]
    more = _with_more_threads(times, step_ms)
    if more is not None:
        remedy = f"Use num_threads={more}: {_ms(times.by_workers[more])} a batch. {remedy}"
    elif not times.is_ahead:
        remedy = f"Load while the model is at work, with a memload.Loader. {remedy}"
    return f"{remedy}."


def _remedy_for_disk(times: Times) -> str:
    if times.disk_later == 0:
        return (
            "That is so in the first epoch only: then all rows are in RAM, and data is there after "
            f"{_ms(times.batch)}. A local NVMe disk shortens the first one."
        )
    if times.disk_later <= times.batch:
        return f"Later epochs find most rows in RAM: {_ms(times.batch)} a batch."
    return (
        f"Not all rows fit in RAM, so later epochs take {_ms(times.disk_later)} a batch. Use a "
        "faster disk, more RAM, or build smaller images (--size)."
    )


def _spare_workers(times: Times, step_ms: float) -> str:
    """Return what can be saved although the model is what bounds the training."""
    alone = times.by_workers.get(0)
    if times.are_processes and times.workers and alone is not None and alone < step_ms:
        return (
            f"The DataLoader's {times.workers} workers are not needed: without them, a batch takes "
            f"{_ms(alone)}. A memload.Loader loads it while the model is at work."
        )
    return ""


def _ms(milliseconds: float) -> str:
    """Return a time with two or three digits, such as ``81 ms`` or ``0.35 ms``."""
    return f"{milliseconds:.0f} ms" if milliseconds >= 10 else f"{milliseconds:.2g} ms"
