"""Threads that read rows from the files into page-locked memory, from which the device copies them.

file ─┬─ past the page cache (O_DIRECT) ─┬─▶ a slot of whole pages for each row ─▶ device
      └─ through it, where a row stays ──┘
"""

import contextlib
import logging
import mmap
import os
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from memload.machine import starting_threads
from memload.storage.shards import Shards, open_direct

_PAGE = mmap.PAGESIZE
#: Of 8, 16, 32 and 64 threads, 32 were within 5 % of the best for rows of 3 and 27 KB.
_THREADS = 32
_POOL_NAME = "memload-read"

logger = logging.getLogger("memload")


class Reading(NamedTuple):
    """Rows on their way from the disk into page-locked memory, at ``addresses`` ``(n,)``."""

    addresses: np.ndarray
    buffer: Tensor
    parts: Sequence[Future[None]]

    def is_done(self) -> bool:
        """Return whether all rows are there, or cannot be read."""
        return all(part.done() for part in self.parts)

    def wait(self) -> None:
        """Block until all rows are there. Raises FormatError."""
        wait(self.parts)  # all of them: nobody may write to the buffer once it is given back
        for part in self.parts:
            part.result()


class RowReader:
    """Reads rows past the page cache, or through it if they are to stay there. Thread-safe.

    Each row has a slot of whole pages. Read past the page cache, a row begins ``offset % 4096``
    bytes into its slot, so that no byte has to be moved.
    """

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._slot_bytes = (shards.array.row_bytes // _PAGE + 2) * _PAGE
        self._pool = ThreadPoolExecutor(_THREADS, _POOL_NAME)
        self._lock = threading.Lock()
        self._newest: Sequence[Future[None]] = ()
        #: Buffers to use again, oldest first, and the CUDA event after the copy out of each.
        self._free: deque[tuple[Tensor, Any]] = deque()

    @property
    def is_direct(self) -> bool:
        """Whether all files can be read past the page cache."""
        return None not in self._direct

    def is_busy(self) -> bool:
        """Return whether rows are being read, for which batches may wait."""
        return not all(part.done() for part in self._newest)

    def begin(self, shard: np.ndarray, offset: np.ndarray, stays: np.ndarray) -> Reading:
        """Begin to read the rows at these offsets of shards, each array ``(n,)``.

        ``stays`` marks rows to keep in the page cache, which are read through it. When the rows
        have been copied, the buffer is given back with `give_back`.
        """
        size = len(shard) * self._slot_bytes
        buffer = self._take(size + _PAGE)
        slots = buffer.numpy()[-buffer.data_ptr() % _PAGE :][:size].reshape(len(shard), -1)
        addresses = slots.ctypes.data + np.arange(len(shard)) * self._slot_bytes + offset % _PAGE
        with self._lock:  # the first time, this opens files
            direct = [None] * len(self._shards.paths) if stays.all() else self._direct
        rows = [*zip(shard.tolist(), offset.tolist(), stays.tolist(), slots, strict=True)]
        parts = []
        with starting_threads("use feed='pinned' with num_threads=0"):
            for first in range(min(_THREADS, len(rows))):
                parts.append(self._pool.submit(self._read, rows[first::_THREADS], direct))
        self._newest = parts
        return Reading(addresses, buffer, parts)

    def _read(
        self, rows: Iterable[tuple[int, int, bool, np.ndarray]], direct: Sequence[int | None]
    ) -> None:
        """Read some rows into their slots, one after another."""
        for shard, offset, stays, slot in rows:
            begin, descriptor, done = offset % _PAGE, None if stays else direct[shard], 0
            end = begin + self._shards.array.row_bytes
            if descriptor is not None:
                # If this fails, the row is read once more below, which says what is wrong.
                with contextlib.suppress(OSError):
                    pages = slot[: -(-end // _PAGE) * _PAGE]
                    done = os.preadv(descriptor, [pages.data], offset - begin)
            if done < end:
                self._shards.read(shard, offset, slot[begin:end].data)

    @cached_property
    def _direct(self) -> list[int | None]:
        """The files, opened to read past the page cache; None where that cannot be done."""
        direct = [open_direct(descriptor) for descriptor in self._shards.descriptors]
        if None in direct:
            logger.warning(
                "%s cannot be read past the page cache (O_DIRECT), so reading it pushes other "
                "things out of RAM. Copy the data set to a local disk with ext4 or xfs.",
                self._shards.paths[direct.index(None)],
            )
        return direct

    def _take(self, size: int) -> Tensor:
        """Return page-locked memory out of which no copy is under way any more."""
        with contextlib.suppress(IndexError):  # there is none, or other threads have taken it
            buffer, copied = self._free.popleft()
            if not copied.query():
                self._free.appendleft((buffer, copied))
            elif len(buffer) >= size:
                return buffer
        # Some room, so that a batch with a few more rows fits, too.
        size += size // 8
        is_pinned = torch.cuda.is_available()  # the doctor reads where there is no GPU, too
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)

    def give_back(self, buffer: Tensor) -> None:
        """Use a buffer again, once the copies on the current stream are over."""
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's
        copied.record()
        self._free.append((buffer, copied))

    def close(self) -> None:
        """Wait for what is being read, then end the threads and close the files."""
        # A thread of the pool may happen to collect the Loader. It must not wait for itself.
        is_own = threading.current_thread().name.startswith(_POOL_NAME)
        self._pool.shutdown(wait=not is_own, cancel_futures=True)
        for descriptor in self.__dict__.pop("_direct", ()):
            if descriptor is not None:
                os.close(descriptor)
