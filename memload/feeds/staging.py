"""Page-locked memory that rows pass on their way to the device."""

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


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch's own binding of the CUDA that it runs on


def register(address: int, size: int, flags: int) -> None:
    """Make memory known to CUDA on torch's current device. Raises FeedError where that is refused."""
    status = _runtime().cudaHostRegister(address, size, flags)
    if int(status):
        # The error would stay, and be raised by whatever CUDA call of torch's comes next: a kernel takes it away.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")
        raise FeedError(f"CUDA: expected to register {size:,} bytes of memory, found {status}")


def unregister(address: int) -> None:
    """Undo `register`."""
    _runtime().cudaHostUnregister(address)


class Staging:
    """Buffers that rows are gathered into and copied from. One is used again when its copy was seen to finish.

    ``most`` of them exist at a time: `take` waits for the oldest copy then. Memory is given back by `close`, or
    with the last reference. Thread-safe.
    """

    def __init__(self, size: int, device: torch.device, *, most: int) -> None:
        self.size, self.device, self._most = size, device, most
        self._lock = threading.Lock()
        self._free: deque[tuple[Tensor, Any]] = deque()
        self._made = 0

    def take(self) -> Tensor:
        """Return a uint8 tensor ``(size,)`` that nothing reads any more, for `give` later."""
        with self._lock:
            if self._free and (self._made >= self._most or self._free[0][1].query()):
                buffer, copied = self._free.popleft()
            else:
                self._made += 1
                buffer, copied = self._make(), None
        if copied is not None:
            copied.synchronize()
        return buffer

    def give(self, buffer: Tensor) -> None:
        """Say that the last copy from a buffer has been put on the current stream."""
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # waits without keeping a core busy
        copied.record(torch.cuda.current_stream(self.device))
        with self._lock:
            self._free.append((buffer, copied))

    def close(self) -> None:
        """Wait for the copies under way and give the memory back."""
        with self._lock:
            while self._free:
                self._free.popleft()[1].synchronize()
                self._made -= 1

    def _make(self) -> Tensor:
        pages = mmap.mmap(-1, max(self.size, 1))
        memory = np.frombuffer(pages, np.uint8)
        with torch.cuda.device(self.device):
            register(memory.ctypes.data, memory.size, 0)
        weakref.finalize(memory, _release, memory.ctypes.data, self.device, os.getpid())
        return torch.from_numpy(memory)


def _release(address: int, device: torch.device, process: int) -> None:
    if os.getpid() == process:
        torch.cuda.synchronize(device)  # at the end of the process, copies may be under way
        unregister(address)
