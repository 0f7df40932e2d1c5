"""The feeds cpu and pinned: the threads that make batches copy rows out of the page cache.

page cache ─ np.take ─▶ memory that is used again ───────────▶ batch on the CPU   cpu
page cache ─ np.take ─▶ page-locked memory ─ copy engine ────▶ batch on the GPU   pinned
"""

import weakref
from collections import deque
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from memload.feeds.feed import Counts, Samples


class GatherFeed:
    """Copies rows on the caller's threads; several threads may fetch at once. Serves any file.

    On the CPU, the memory of a batch is used again once nothing refers to the batch any more. At
    most ``keep`` unused buffers are kept.
    """

    def __init__(self, samples: Samples, device: torch.device, *, keep: int) -> None:
        self.name = "cpu" if device.type == "cpu" else "pinned"
        self.samples, self.device = samples, device
        self._pool = BufferPool(keep)

    def prepare(self, samples: np.ndarray) -> "_GatheredSamples":
        """See `Feed.prepare`."""
        columns = self.samples.upload_columns(samples, self.device)
        return _GatheredSamples(self, self.samples.row[samples], columns)

    def gather(self, rows: np.ndarray) -> Tensor:
        """Return the pixels of rows (int64) on the device."""
        shards = self.samples.shards
        if self.device.type == "cpu":
            pixels = self._pool.take(len(rows) * self.samples.row_bytes).view(self.samples.dtype)
            pixels = pixels.view(len(rows), *shards.array.shape)
            shards.gather(rows, pixels.numpy())
            return pixels
        # torch uses page-locked memory again when the copy out of it is over.
        staging = self.samples.empty_page_locked(len(rows))
        shards.gather(rows, staging.numpy())
        return staging.to(self.device, non_blocking=True)

    def counts(self) -> Counts | None:
        """See `Feed.counts`. The system decides what stays in RAM, so nothing is counted."""
        return None

    def close(self) -> None:
        """See `Feed.close`. The memory is freed with the feed."""


class _GatheredSamples(NamedTuple):
    feed: GatherFeed
    rows: np.ndarray
    columns: list[Tensor]

    def begin(self, start: int, stop: int) -> "_RowsToGather":
        """See `PreparedSamples.begin`."""
        columns = [column[start:stop] for column in self.columns]
        return _RowsToGather(self.feed, self.rows[start:stop], columns)


class _RowsToGather(NamedTuple):
    feed: GatherFeed
    rows: np.ndarray
    columns: list[Tensor]

    def is_ready(self) -> bool:
        """See `PendingRows.is_ready`. Whether the page cache has the rows is not known."""
        return True

    def fetch(self) -> list[Tensor]:
        """See `PendingRows.fetch`."""
        columns = self.columns
        if self.feed.device.type == "cpu":  # a part would keep the columns of the whole chunk
            columns = [column.clone() for column in columns]
        return [self.feed.gather(self.rows), *columns]


class BufferPool:
    """Hands out memory, and takes it back when the last reference to it dies, never before.

    Fresh memory costs a page fault every 4 KiB, which takes longer than copying a batch into it.
    The pool keeps at most ``keep`` buffers that are not in use. Thread-safe.
    """

    def __init__(self, keep: int) -> None:
        self._free: deque[np.ndarray] = deque(maxlen=keep)

    def take(self, size: int) -> Tensor:
        """Return an uninitialised uint8 tensor ``(size,)``."""
        buffer = self._find(size)
        view = buffer[:size]
        # The tensor's storage refers to this view, and all tensors that share the storage refer to
        # the storage. So once the view dies, no tensor can reach the memory any more.
        weakref.finalize(view, self._free.append, buffer).atexit = False
        return torch.from_numpy(view)

    def _find(self, size: int) -> np.ndarray:
        """Return a free buffer of this size or up to twice as large, or a new one."""
        unfit = []
        try:
            while True:
                buffer = self._free.pop()
                if size <= buffer.size <= 2 * size:
                    return buffer
                unfit.append(buffer)  # such as one for masks, while this is for images
        except IndexError:
            return np.empty(size, np.uint8)
        finally:
            self._free.extendleft(unfit)  # as the oldest, which are dropped first
