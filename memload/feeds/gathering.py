"""Rows copied from the page cache into memory, with the disk asked early for those that are not there."""

import sys

import numpy as np

from memload.shards import Shards

#: After pages had to be read from the disk, so many gathers more are asked for ahead.
_STAY_COLD = 64


class Gatherer:
    """Copies rows; where they are not in RAM, asks for all of a batch before it waits for the first.

    That keeps a disk's queue full. Cold pages are found by the thread's major page faults, since asking costs 2 µs a
    row where everything is there. Thread-safe.
    """

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._cold = 0

    def gather(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Copy rows into ``out`` ``(N, H, W, C)``."""
        if self._cold:
            self._cold -= 1
            self._shards.ask_for(rows)
        before = _major_faults()
        self._shards.gather(rows, out)
        if _major_faults() > before:
            self._cold = _STAY_COLD


def _major_faults() -> int:
    """Return how often this thread had to wait for a page from the disk; 0 where the system does not tell."""
    if sys.platform != "linux":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt
