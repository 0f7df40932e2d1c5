"""Rows gathered from the page cache into ordinary memory, for training on the CPU."""

import math
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from memload.errors import FeedError
from memload.feeds.buffers import BufferPool
from memload.feeds.gathering import Gatherer
from memload.feeds.interface import Fetch, Samples


class CpuFeed:
    """Copies rows into memory that is used again once a batch is dropped. Threads of the caller's make it faster.

    ``keep`` is how many buffers are held for the next batches.
    """

    name: ClassVar[str] = "cpu"

    def __init__(self, samples: Samples, device: torch.device, *, keep: int) -> None:
        if device.type != "cpu":
            raise FeedError(
                f"feed 'cpu': expected the CPU as device, found {device}. Choose another feed or device"
            )
        self._samples, self._gatherer = samples, Gatherer(samples.shards)
        self._pool, self.device = BufferPool(keep), device

    def prepare(self, samples: np.ndarray) -> Fetch:
        """See `Feed.prepare`."""
        # The index is read here alone, which is where the Loader has just looked at it, and not on threads later on.
        rows = self._samples.row[samples]
        columns = [column[samples] for column in self._samples.columns]

        def fetch(start: int, stop: int) -> list[Tensor]:
            part = [torch.from_numpy(column[start:stop].copy()) for column in columns]
            return [self._pixels(rows[start:stop]), *part]

        return fetch

    def _pixels(self, rows: np.ndarray) -> Tensor:
        shape, dtype = self._samples.shape(len(rows)), self._samples.dtype
        out = self._pool.take(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
        self._gatherer.gather(rows, out.numpy())
        return out

    def close(self) -> None:
        """See `Feed.close`."""
        self._pool = BufferPool(0)
