"""The RAM in which the Loaders of a process hold rows: they share one budget.

What one Loader holds is not left for the next. Parts of files that several of them hold count once.
"""

import os
import threading
import weakref
from collections.abc import Sequence

import numpy as np

from memload.feeds.windows import plan_for_rows, plan_within
from memload.storage.shards import Shards


class Claim:
    """Parts of the files of one array that are to be held. Ends when it is closed or dropped."""

    def __init__(self, files: Sequence[tuple[int, ...]], plan: np.ndarray) -> None:
        self.files, self.plan = files, plan

    @property
    def size(self) -> int:
        """How many bytes are held."""
        return int(self.plan.sum())

    def close(self) -> None:
        """Leave the bytes to other Loaders."""
        _claims.discard(self)


_claims: weakref.WeakSet[Claim] = weakref.WeakSet()
_lock = threading.Lock()


def identity_of(descriptor: int) -> tuple[int, ...]:
    """Return what tells an open file, in this process, from every other file."""
    status = os.fstat(descriptor)
    return os.getpid(), status.st_dev, status.st_ino, status.st_mtime_ns


def claimed_bytes() -> int:
    """Return how many bytes the Loaders of this process hold, or are about to hold."""
    held = _held_by_file()
    return int(sum(plan.sum() for plan in held.values()))


def claim(shards: Shards, rows: np.ndarray, budget: float) -> Claim:
    """Claim the files of some rows (int64), as far as a budget in bytes allows.

    The budget is for all claims of the process together. What others have claimed of the same files
    is claimed as well, and costs nothing.
    """
    files = [identity_of(descriptor) for descriptor in shards.descriptors]
    wanted = plan_for_rows(shards, rows)
    with _lock:
        held_by_file = _held_by_file()
        left = budget - sum(plan.sum() for plan in held_by_file.values())
        held = np.zeros_like(wanted)
        for number, file in enumerate(files):
            of_file = held_by_file.get(file, held[number])
            held[number, : len(of_file)] = of_file[: held.shape[1]]
        made = Claim(files, plan_within(wanted, held, max(0, left)))
        _claims.add(made)
    return made


def _held_by_file() -> dict[tuple[int, ...], np.ndarray]:
    """Return the bytes of each window of each file that are claimed by anyone."""
    held: dict[tuple[int, ...], np.ndarray] = {}
    for one in list(_claims):
        for file, plan in zip(one.files, one.plan, strict=True):
            if file in held:
                width = max(len(plan), len(held[file]))
                both = [np.pad(p, (0, width - len(p))) for p in (plan, held[file])]
                plan = np.maximum(*both)
            held[file] = plan
    return held
