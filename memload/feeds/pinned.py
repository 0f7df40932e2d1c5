"""Rows gathered into page-locked memory by threads, and copied to the device from there."""

import contextlib
import itertools
import math
import mmap
import os
import threading
import weakref
from collections import deque
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from memload.errors import FeedError
from memload.feeds.interface import Fetch, Samples, require_cuda
from memload.machine import starting_threads
from memload.upload import upload

#: Each thread gathers at least this much of a batch, which takes half a millisecond.
_BYTES_PER_THREAD = 2 << 20


class PinnedFeed:
    """Works with any file, even one larger than RAM, for the price of one copy by the CPU.

    ``callers`` is how many threads of the caller fetch batches at once, at least 1. The feed adds
    ``num_threads - callers`` helper threads, and divides them evenly among the callers. Threads
    start, and page-locked memory is allocated, with the first batch.
    """

    name: ClassVar[str] = "pinned"

    def __init__(
        self, samples: Samples, device: torch.device, *, num_threads: int, callers: int
    ) -> None:
        require_cuda(self.name, device)
        self._samples, self.device, self._callers = samples, device, callers
        self._helpers = max(0, num_threads - callers)
        self._pool, self._staging = self._new_resources()

    def prepare(self, samples: np.ndarray) -> Fetch:
        """See `Feed.prepare`. Fetching blocks while rows are gathered."""
        rows = self._samples.row[samples]
        columns = [upload(column[samples], self.device) for column in self._samples.columns]

        def fetch(start: int, stop: int) -> list[Tensor]:
            pixels = self.fetch_rows(rows[start:stop])
            return [pixels, *(column[start:stop] for column in columns)]

        return fetch

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

    def _new_resources(self) -> tuple[ThreadPoolExecutor, "Staging"]:
        """Return what starts threads and allocates page-locked memory when it is first used."""
        pool = ThreadPoolExecutor(max(1, self._helpers), "memload-gather")
        return pool, Staging(self.device, soft_limit=self._callers + 2)

    def _gather(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Gather rows on this thread and on helpers."""
        gather, pool = self._samples.shards.gather, self._pool
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


class Staging:
    """Page-locked buffers. Each is used again when the copy out of it has finished. Thread-safe.

    Once ``soft_limit`` buffers exist, `take` waits for the oldest copy instead of allocating
    another. There are more only if more threads than that hold one at the same time. The memory is
    freed with the last reference to it, when the device has finished its work.
    """

    def __init__(self, device: torch.device, *, soft_limit: int) -> None:
        self._device, self._soft_limit = device, soft_limit
        self._size = self._allocated = 0
        self._lock = threading.Lock()
        #: Buffers to use again, oldest first, and the CUDA event after the copy out of each.
        self._free: deque[tuple[Tensor, Any]] = deque()

    def take(self, size: int) -> Tensor:
        """Return at least ``size`` bytes, uint8, that no copy reads any more. Give them back later.

        All buffers have the size of the largest batch so far. That is the first one, except with a
        batch_sampler of the user's own.
        """
        with self._lock:
            if size > self._size:
                self._free.clear()
                self._size, self._allocated = size, 0
            at_limit = self._allocated >= self._soft_limit
            if not self._free or not (at_limit or self._free[0][1].query()):
                buffer = self._allocate()
                self._allocated += 1
                return buffer
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
        with torch.cuda.device(self._device):
            register(memory.ctypes.data, memory.size, 0)
        weakref.finalize(memory, _free, memory.ctypes.data, self._device, os.getpid())
        return torch.from_numpy(memory)


def _free(address: int, device: torch.device, process: int) -> None:
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
        raise FeedError(f"CUDA cannot page-lock {size:,} bytes of memory: {status}")


def unregister(address: int) -> None:
    """Undo `register`."""
    _runtime().cudaHostUnregister(address)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # bindings of the CUDA torch uses
