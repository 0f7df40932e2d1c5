"""Page-locked memory, which the device copies from by itself."""

import contextlib
import mmap
import os
import threading
import weakref
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memload.errors import FeedError


class Staging:
    """Page-locked buffers. Each is used again when the copy out of it has finished. Thread-safe.

    Once ``soft_limit`` buffers exist, `take` waits for the oldest copy instead of allocating
    another. There are more only if more than that are in use at the same time. The memory is
    freed with the last reference to it, when the device has finished its work.
    """

    def __init__(self, device: torch.device, *, soft_limit: int) -> None:
        self._device, self._soft_limit = device, soft_limit
        self._size = 0
        #: The finalizers of the buffers of this size, which are alive until the memory is freed.
        self._allocated: list[weakref.finalize[..., Any]] = []
        self._lock = threading.Lock()
        #: Buffers to use again, oldest first, and the CUDA event after the copy out of each.
        self._free: deque[tuple[Tensor, Any]] = deque()

    def take(self, size: int, room: int = 0) -> Tensor:
        """Return a uint8 buffer of at least ``size`` bytes. No copy reads from it any more.

        Give it back with `give_back`, or drop it. If a batch is larger than all before, buffers are
        allocated anew, with ``room`` for somewhat larger ones: page-locking 38 MB takes 12 ms.
        """
        with self._lock:
            if size > self._size:
                self._free.clear()
                self._size, self._allocated = size + room, []
            self._allocated = [buffer for buffer in self._allocated if buffer.alive]
            at_limit = len(self._allocated) >= self._soft_limit
            if not self._free or not (at_limit or self._free[0][1].query()):
                return self._allocate()
            buffer, copied = self._free.popleft()
        copied.synchronize()
        return buffer

    def give_back(self, buffer: Tensor) -> None:
        """Accept a buffer back, once the last copy out of it was put on the current stream."""
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # sleeps
        copied.record(torch.cuda.current_stream(self._device))
        with self._lock:
            if len(buffer) >= self._size:
                self._free.append((buffer, copied))

    def _allocate(self) -> Tensor:
        pages = mmap.mmap(-1, max(self._size, 1))
        memory = np.frombuffer(pages, np.uint8)
        address, process = memory.ctypes.data, os.getpid()
        with torch.cuda.device(self._device):
            register(address, memory.size, 0)
        buffer = weakref.finalize(memory, _free, pages, address, self._device, process)
        self._allocated.append(buffer)
        return torch.from_numpy(memory)


def _free(_pages: mmap.mmap, address: int, device: torch.device, process: int) -> None:
    """Unlock memory at an address. ``_pages`` keeps it mapped until then.

    With NumPy 2.5, the array lets go of its memory before this is called.
    """
    if os.getpid() == process:
        torch.cuda.synchronize(device)  # copies may be under way
        unregister(address)


def register(address: int, size: int, flags: int) -> None:
    """Page-lock memory and make it known to CUDA on torch's current device.

    Raises FeedError if CUDA refuses.
    """
    status = _runtime().cudaHostRegister(address, size, flags)
    if int(status):
        # CUDA keeps the error and reports it to whatever torch calls next. A kernel clears it.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")
        reason = _runtime().cudaGetErrorString(status)
        raise FeedError(f"CUDA cannot page-lock {size:,} bytes of memory: {reason}.")


def unregister(address: int) -> None:
    """Undo `register`."""
    _runtime().cudaHostUnregister(address)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # bindings of the CUDA torch uses
