"""Rows gathered from the page cache into ordinary memory, for training on the CPU."""

import math
import sys

import numpy as np
import torch
from torch import Tensor

from memload.buffers import BufferPool
from memload.shards import Shards

#: After pages had to be read from the disk, so many batches more are asked for ahead.
_STAY_COLD = 64


class CpuFeed:
    """Copies rows into memory that is used again once a batch is dropped. Threads of the caller's make it faster.

    Where pages are not in RAM, those of a whole batch are asked for at once, before the first of them is waited for:
    that keeps a disk's queue full. Found by the thread's major page faults, since asking costs 2 µs a row where
    everything is there.
    """

    name = "cpu"

    def __init__(self, shards: Shards, *, keep: int) -> None:
        self._shards = shards
        self._shape = shards.array.shape
        self._dtype = torch.from_numpy(np.empty(0, shards.array.descr)).dtype
        self._pool = BufferPool(keep)
        self._cold = 0

    def fetch(self, rows: np.ndarray) -> Tensor:
        """See `Feed.fetch`."""
        shape = (len(rows), *self._shape)
        out = self._pool.take(math.prod(shape) * self._dtype.itemsize).view(self._dtype).view(shape)
        if self._cold:
            self._cold -= 1
            self._shards.ask_for(rows)
        before = _major_faults()
        self._shards.gather(rows, out.numpy())
        if _major_faults() > before:
            self._cold = _STAY_COLD
        return out

    def close(self) -> None:
        """See `Feed.close`."""
        self._pool = BufferPool(0)


def _major_faults() -> int:
    """Return how often this thread had to wait for a page from the disk; 0 where the system does not tell."""
    if sys.platform != "linux":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt
