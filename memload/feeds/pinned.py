"""Rows gathered by threads into page-locked memory, from where one copy takes a batch to the device."""

import itertools
import math
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from memload.errors import FeedError
from memload.feeds.gathering import Gatherer
from memload.feeds.interface import Fetch, Samples, upload
from memload.feeds.staging import Staging

#: Rows are shared out among threads in parts of at least so many bytes: half a millisecond's work.
_PART_BYTES = 2 << 20


class PinnedFeed:
    """Works with every file, also one larger than RAM, at the price of one copy by the CPU.

    ``num_threads`` threads gather, counting those that fetch: of them there are ``callers``, and the rest helps them
    with their batches. ``most`` is how many batches may be on their way. No page-locked memory is taken before the
    first batch, nor held after `close`.
    """

    name: ClassVar[str] = "pinned"

    def __init__(
        self, samples: Samples, device: torch.device, *, num_threads: int, callers: int, most: int
    ) -> None:
        if device.type != "cuda":
            raise FeedError(
                f"feed 'pinned': expected a CUDA device, found {device}. Use feed='cpu'"
            )
        self._samples, self.device, self._gatherer = samples, device, Gatherer(samples.shards)
        self._helpers = max(0, num_threads - callers)
        self._parts, self._most = 1 + -(-self._helpers // callers), most
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._staging: Staging | None = None

    def prepare(self, samples: np.ndarray) -> Fetch:
        """See `Feed.prepare`. Fetching blocks while rows are gathered."""
        rows = self._samples.row[samples]
        columns = [upload(column[samples], self.device) for column in self._samples.columns]
        return lambda start, stop: [
            self.fetch_rows(rows[start:stop]),
            *(column[start:stop] for column in columns),
        ]

    def fetch_rows(self, rows: np.ndarray) -> Tensor:
        """Return the pixels of rows ``(N, H, W, C)``."""
        shape, dtype = self._samples.shape(len(rows)), self._samples.dtype
        size = math.prod(shape) * dtype.itemsize
        with self._lock:
            if self._staging is None or self._staging.size < size:
                # the first batch is the largest, but for batches of a sampler of the user's
                self._staging = Staging(size, self.device, most=self._most)
            staging = self._staging
        buffer = staging.take()
        try:
            self._gather(rows, buffer[:size].view(dtype).view(shape).numpy())
            out = torch.empty(shape, dtype=dtype, device=self.device)
            out.copy_(buffer[:size].view(dtype).view(shape), non_blocking=True)
        finally:
            staging.give(buffer)
        return out

    def close(self) -> None:
        """See `Feed.close`."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        if self._staging is not None:
            self._staging.close()
            self._staging = None

    def _gather(self, rows: np.ndarray, out: np.ndarray) -> None:
        parts = min(self._parts, max(1, out.nbytes // _PART_BYTES))
        if parts <= 1:
            self._gatherer.gather(rows, out)
            return
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._helpers, "memload-gather")
            pool = self._pool
        ends: Sequence[int] = [len(rows) * part // parts for part in range(parts + 1)]
        under_way: list[Future[None]] = [
            pool.submit(self._gatherer.gather, rows[start:stop], out[start:stop])
            for start, stop in itertools.pairwise(ends[1:])
        ]
        try:
            self._gatherer.gather(rows[: ends[1]], out[: ends[1]])
        finally:
            wait(under_way)  # all of them end before the buffer goes back
        for part in under_way:
            part.result()
