"""Rows copied from the page cache into ordinary memory, for training on the CPU."""

import math
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from memload.errors import FeedError
from memload.feeds.budget import Claim
from memload.feeds.buffers import BufferPool
from memload.feeds.gathered import GatheredRows
from memload.feeds.interface import Begin, ReadCounts, Samples
from memload.jobs import Job


class CpuFeed:
    """Copies rows on the caller's threads; several threads may fetch at once.

    The memory of a batch is used again once nothing refers to the batch any more. At most ``keep``
    unused buffers are held. ``claim`` says which rows stay in the page cache, see `GatheredRows`.
    """

    name: ClassVar[str] = "cpu"

    def __init__(self, samples: Samples, device: torch.device, *, keep: int, claim: Claim) -> None:
        if device.type != "cpu":
            raise FeedError(
                f"feed='cpu' needs device='cpu', but the device is {device}. Use another feed or "
                "device."
            )
        self._samples, self.device = samples, device
        self._rows = GatheredRows(samples, claim)
        self._pool = BufferPool(keep)

    def prepare(self, samples: np.ndarray) -> Begin:
        """See `Feed.prepare`."""
        rows, dtype = self._samples.row[samples], self._samples.dtype
        columns = [column[samples] for column in self._samples.columns]

        def fetch(start: int, stop: int) -> list[Tensor]:
            shape = self._samples.shape(stop - start)
            pixels = self._pool.take(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
            self._rows.gather(rows[start:stop], pixels.numpy())
            return [pixels, *(torch.from_numpy(column[start:stop].copy()) for column in columns)]

        return lambda start, stop: Job(partial(fetch, start, stop))

    def counts(self) -> ReadCounts:
        """See `Feed.counts`."""
        return self._rows.counts()

    def close(self) -> None:
        """See `Feed.close`."""
        self._pool = BufferPool(0)
