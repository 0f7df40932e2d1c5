"""Rows gathered into page-locked memory by threads, and copied to the device from there."""

import itertools
import math
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from memload.feeds.budget import Claim
from memload.feeds.gathered import GatheredRows
from memload.feeds.interface import Begin, ReadCounts, Samples, require_cuda
from memload.feeds.page_locked import Staging
from memload.jobs import Job
from memload.machine import starting_threads
from memload.profiling import profiled
from memload.upload import upload

#: Each thread gathers at least this much of a batch, which takes half a millisecond.
_BYTES_PER_THREAD = 2 << 20


class PinnedFeed:
    """Works with any file, even one larger than RAM, for the price of one copy by the CPU.

    ``callers`` is how many threads of the caller fetch batches at once, at least 1. The feed adds
    ``num_threads - callers`` helper threads, and divides them evenly among the callers. Threads
    start, and page-locked memory is allocated, with the first batch. ``claim`` says which rows stay
    in the page cache, see `GatheredRows`.
    """

    name: ClassVar[str] = "pinned"

    def __init__(
        self,
        samples: Samples,
        device: torch.device,
        *,
        num_threads: int,
        callers: int,
        claim: Claim | None = None,
    ) -> None:
        require_cuda(self.name, device)
        self._samples, self.device, self._callers = samples, device, callers
        self._helpers = max(0, num_threads - callers)
        self._rows = GatheredRows(samples, claim)
        self._pool, self._staging = self._new_resources()

    def prepare(self, samples: np.ndarray) -> Begin:
        """See `Feed.prepare`. Fetching blocks while rows are gathered."""
        rows = self._samples.row[samples]
        columns = [upload(column[samples], self.device) for column in self._samples.columns]

        def fetch(start: int, stop: int) -> list[Tensor]:
            pixels = self.fetch_rows(rows[start:stop])
            return [pixels, *(column[start:stop] for column in columns)]

        return lambda start, stop: Job(partial(fetch, start, stop))

    def counts(self) -> ReadCounts:
        """See `Feed.counts`."""
        return self._rows.counts()

    def fetch_rows(self, rows: np.ndarray) -> Tensor:
        """Return the pixels of rows on the device, ``(N, H, W, C)``."""
        shape, dtype = self._samples.shape(len(rows)), self._samples.dtype
        size = math.prod(shape) * dtype.itemsize
        staging = self._staging
        buffer = staging.take(size)
        try:
            pixels = buffer[:size].view(dtype).view(shape)
            self._gather(rows, pixels.numpy())
            out = torch.empty(shape, dtype=dtype, device=self.device)
            with profiled("copy"):
                out.copy_(pixels, non_blocking=True)
        finally:
            staging.give_back(buffer)
        return out

    def close(self) -> None:
        """Drop the threads and the page-locked memory.

        Fetching that is under way goes on, and keeps both to its end. Later fetching makes new
        ones.
        """
        self._pool, self._staging = self._new_resources()

    def _new_resources(self) -> tuple[ThreadPoolExecutor, Staging]:
        """Return what starts threads and allocates page-locked memory when it is first used."""
        pool = ThreadPoolExecutor(max(1, self._helpers), "memload-gather")
        return pool, Staging(self.device, soft_limit=self._callers + 2)

    def _gather(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Gather rows on this thread and on helpers."""
        gather, pool = self._rows.gather, self._pool
        parts = 1 + math.ceil(self._helpers / self._callers)
        parts = min(parts, max(1, out.nbytes // _BYTES_PER_THREAD))
        ends = [len(rows) * part // parts for part in range(parts + 1)]
        with starting_threads("use num_threads=0, which gathers on your own thread"):
            helped = [
                pool.submit(gather, rows[start:stop], out[start:stop])
                for start, stop in itertools.pairwise(ends[1:])
            ]
        try:
            gather(rows[: ends[1]], out[: ends[1]])
        finally:
            wait(helped)  # nobody may write into the buffer once it is given back
        for part in helped:
            part.result()
