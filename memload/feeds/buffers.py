"""Memory for batches, reused once nothing refers to it any more."""

import weakref
from collections import deque

import numpy as np
import torch
from torch import Tensor


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
