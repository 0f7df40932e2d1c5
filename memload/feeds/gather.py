"""The feeds cpu and pinned: the threads that make batches copy rows out of the page cache.

page cache ─ np.take ─▶ memory that is used again ───────────▶ batch on the CPU   cpu
page cache ─ np.take ─▶ page-locked memory ─ copy engine ────▶ batch on the GPU   pinned
"""

import contextlib
import weakref
from collections import deque
from functools import partial

import numpy as np
import torch
from torch import Tensor

from memload.feeds.feed import BeginRows, Counts, PendingRows, SampleArray


class GatherFeed:
    """Copies rows on the caller's threads; several threads may fetch at once. Serves any file.

    On the CPU, the memory of a batch is used again once nothing refers to the batch any more. At
    most ``keep`` unused buffers are kept.
    """

    def __init__(self, array: SampleArray, device: torch.device, *, keep: int) -> None:
        self.name = "cpu" if device.type == "cpu" else "pinned"
        self.array, self.device = array, device
        self._pool = BufferPool(keep)

    def prepare(self, samples: np.ndarray) -> BeginRows:
        """See `Feed.prepare`."""
        rows = self.array.row[samples]
        return lambda start, stop: PendingRows(partial(self._fetch, rows[start:stop]))

    def _fetch(self, rows: np.ndarray) -> list[Tensor]:
        shards = self.array.shards
        if self.name == "pinned":
            # torch uses page-locked memory again when the copy out of it is over.
            staging = self.array.empty(len(rows), "cpu", pin_memory=True)
            shards.gather(rows, staging.numpy())
            return [staging.to(self.device, non_blocking=True)]
        buffer = self._pool.take(len(rows) * self.array.row_bytes)
        pixels = buffer.view(self.array.dtype).view(len(rows), *shards.array.shape)
        shards.gather(rows, pixels.numpy())
        return [pixels]

    def counts(self) -> Counts | None:
        """See `Feed.counts`. The system decides what stays in RAM, so nothing is counted."""
        return None

    def close(self) -> None:
        """See `Feed.close`."""


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
        with contextlib.suppress(IndexError):  # other threads have taken the rest
            for _ in range(len(self._free)):
                buffer = self._free.pop()
                if size <= buffer.size <= 2 * size:
                    return buffer
                # Such as one for masks, while this is for images. The oldest are dropped first.
                self._free.appendleft(buffer)
        return np.empty(size, np.uint8)
