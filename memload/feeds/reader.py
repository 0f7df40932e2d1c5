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
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memload.feeds.feed import page_locked
from memload.machine import starting_threads
from memload.storage.shards import Shards, open_direct

_PAGE = mmap.PAGESIZE
#: Of 8, 16, 32 and 64 threads, 32 were within 5 % of the best for rows of 3 and 27 KB.
_THREADS = 32
_POOL_NAME = "memload-read"

logger = logging.getLogger("memload")


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

    def is_busy(self) -> bool:
        """Return whether rows are being read."""
        return not all(part.done() for part in self._newest)

    def begin(self, shard: np.ndarray, offset: np.ndarray, stays: np.ndarray) -> "Reading":
        """Begin to read the rows at these offsets of shards, each array ``(n,)``.

        ``stays`` marks rows to keep in the page cache, which are read through it.
        """
        buffer = self._take(len(shard) * self._slot_bytes + _PAGE)
        slots = buffer.numpy()[-buffer.data_ptr() % _PAGE :][: len(shard) * self._slot_bytes]
        slots = slots.reshape(len(shard), self._slot_bytes)
        addresses = slots.ctypes.data + np.arange(len(shard)) * self._slot_bytes + offset % _PAGE
        with self._lock:  # the first time, this opens files
            direct = [None] * len(self._shards.paths) if stays.all() else self._direct
        parts = []
        with starting_threads("use feed='pinned' with num_threads=0"):
            for first in range(min(_THREADS, len(shard))):
                some = slice(first, None, _THREADS)
                rows = (shard[some].tolist(), offset[some].tolist(), stays[some].tolist())
                parts.append(self._pool.submit(self._read, *rows, slots[some], direct))
        self._newest = parts
        return Reading(self, buffer, addresses, parts)

    def _read(
        self,
        shards: list[int],
        offsets: list[int],
        stays: list[bool],
        slots: np.ndarray,
        direct: Sequence[int | None],
    ) -> None:
        """Read some rows into their slots, one after another."""
        row_bytes = self._shards.array.row_bytes
        for shard, offset, row_stays, slot in zip(shards, offsets, stays, slots, strict=True):
            begin, descriptor = offset % _PAGE, None if row_stays else direct[shard]
            done = 0
            if descriptor is not None:
                whole_pages = -(-(begin + row_bytes) // _PAGE) * _PAGE
                try:
                    done = os.preadv(descriptor, [slot[:whole_pages].data], offset - begin)
                except OSError:  # read once more below, which says what is wrong
                    done = 0
            if done < begin + row_bytes:
                self._shards.read(shard, offset, slot[begin : begin + row_bytes].data)

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
        return page_locked((size + size // 8,), torch.uint8)

    def give_back(self, buffer: Tensor) -> None:
        """Use a buffer again, once the copies on the current stream are over."""
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's
        copied.record()
        self._free.append((buffer, copied))

    def close(self) -> None:
        """Wait for what is being read and copied, then end the threads and close the files."""
        # A thread of the pool may happen to collect the Loader. It must not wait for itself.
        is_own = threading.current_thread().name.startswith(_POOL_NAME)
        self._pool.shutdown(wait=not is_own, cancel_futures=True)
        for _, copied in self._free:
            copied.synchronize()
        self._free.clear()
        for descriptor in self.__dict__.pop("_direct", ()):
            if descriptor is not None:
                os.close(descriptor)


class Reading:
    """Rows on their way from the disk into page-locked memory, at ``addresses`` ``(n,)``."""

    def __init__(
        self,
        reader: RowReader,
        buffer: Tensor,
        addresses: np.ndarray,
        parts: Sequence[Future[None]],
    ) -> None:
        self.addresses = addresses
        self._reader, self._buffer, self._parts = reader, buffer, parts

    def is_done(self) -> bool:
        """Return whether all rows are there, or cannot be read."""
        return all(part.done() for part in self._parts)

    def wait(self) -> None:
        """Block until all rows are there. Raises FormatError."""
        wait(self._parts)  # all of them: nobody may write to the buffer once it is given back
        for part in self._parts:
            part.result()

    def give_back(self) -> None:
        """Let the memory be used again, once the last copy out of it is on the current stream."""
        self._reader.give_back(self._buffer)
