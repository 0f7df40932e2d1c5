"""Memory for batches, used again once nothing refers to it any more."""

import weakref
from collections import deque

import numpy as np
import torch
from torch import Tensor


class BufferPool:
    """Hands out memory; what was handed out comes back when its last reference dies, never before.

    Fresh memory costs a page fault every 4 KiB, which takes longer than copying a batch into it. At most ``keep``
    buffers that nobody uses are held. Thread-safe.
    """

    def __init__(self, keep: int) -> None:
        self._free: deque[np.ndarray] = deque(maxlen=keep)

    def take(self, size: int) -> Tensor:
        """Return an uninitialised uint8 tensor ``(size,)``."""
        buffer = self._find(size)
        lease = buffer[:size]
        # The tensor's storage holds this view, and whatever shares the storage holds that: when the view dies,
        # no batch can reach the memory any more.
        weakref.finalize(lease, self._free.append, buffer).atexit = False
        return torch.from_numpy(lease)

    def _find(self, size: int) -> np.ndarray:
        """Return a free buffer of at least this size and at most twice that, or a new one."""
        others = []
        try:
            while True:
                buffer = self._free.pop()
                if size <= buffer.size <= 2 * size:
                    return buffer
                others.append(buffer)  # for a mask, say, beside the image
        except IndexError:  # no more
            return np.empty(size, np.uint8)
        finally:
            self._free.extendleft(others)  # as the oldest, which give way first
