"""Rows that are held in the device's own memory: those for which there is no room in RAM.

    file ─▶ page-locked memory (past the page cache) ─▶ one tensor on the device

The device reads them there by the same batched copy, or kernel, as rows in RAM.
"""

import os
import threading
import weakref
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from memload.feeds.budget import DeviceClaim
from memload.feeds.page_locked import Staging
from memload.feeds.row_ranges import RowRanges, pieces_of_rows
from memload.feeds.row_reader import RowReader
from memload.storage.file_reads import bytes_of
from memload.storage.shards import Shards

#: What is read and copied at a time, if a row is not larger: 20 ms at 1.5 GB/s.
_STEP_BYTES = 32 << 20


class Step(NamedTuple):
    """Rows that are brought in together: a part of a file, and where it lies on the device."""

    file: int
    start: int
    stop: int
    address: int


class DeviceRows:
    """Some rows of an array in one tensor on the device. Feeds that hold the same rows share it.

    Its memory is freed with the last reference, when the streams that read it have finished. Raises
    torch.OutOfMemoryError.
    """

    def __init__(self, shards: Shards, ranges: np.ndarray, device: torch.device) -> None:
        self._row_bytes = shards.array.row_bytes
        num_rows = int((ranges[:, 1] - ranges[:, 0]).sum())
        self._memory = _allocate(num_rows * self._row_bytes, device)
        self._origin = self._memory.data_ptr()
        #: Where the rows lie, once they are brought in.
        self.ranges = RowRanges(shards, pieces_of_rows(shards, ranges, self._origin))
        #: The streams that may be reading the memory.
        self.readers: set[torch.cuda.Stream] = set()
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's own
        # The memory may have been freed by work that the current stream has not done yet.
        self._stream.wait_stream(torch.cuda.current_stream(device))
        #: How many bytes are brought in, from the beginning on.
        self._filled = 0
        self._lock = threading.Lock()
        weakref.finalize(self, _finish_reading, self.readers, self._memory, os.getpid())

    def steps(self) -> Iterator[Step]:
        """Yield the parts in which the rows are brought in, in this order."""
        step_bytes = max(1, _STEP_BYTES // self._row_bytes) * self._row_bytes
        for file, first, last, address in self.ranges.pieces.tolist():
            for start in range(first, last, step_bytes):
                yield Step(file, start, min(start + step_bytes, last), address + start - first)

    def allocate_buffer(self, reader: RowReader) -> Tensor:
        """Return page-locked memory for `bring_in`. Raises FeedError."""
        size = max(_STEP_BYTES, self._row_bytes) + 3 * reader.alignment
        return Staging(self._device, soft_limit=1).take(size)

    def bring_in(self, step: Step, reader: RowReader, buffer: Tensor) -> None:
        """Read rows past the page cache, and copy them to the device. Blocks until they are there.

        Does nothing if the thread of another feed has done so already. Raises FormatError.
        """
        position, size = step.address - self._origin, step.stop - step.start
        with self._lock:
            if position + size <= self._filled:
                return
            aligned = buffer[-buffer.data_ptr() % reader.alignment :]
            begin = reader.read_range(step.file, step.start, size, bytes_of(aligned.numpy()))
            with torch.cuda.stream(self._stream):
                out = self._memory[position : position + size]
                out.copy_(aligned[begin : begin + size], non_blocking=True)
            self._stream.synchronize()
            self._filled = position + size


#: What feeds of this process hold on devices, by the key of the claim.
_shared: weakref.WeakValueDictionary[tuple[object, ...], DeviceRows] = weakref.WeakValueDictionary()
_shared_lock = threading.Lock()


def shared_rows(shards: Shards, claim: DeviceClaim) -> DeviceRows:
    """Return the rows that another feed holds already, or allocate memory for them."""
    with _shared_lock:
        rows = _shared.get(claim.key)
        if rows is None:
            rows = _shared[claim.key] = DeviceRows(shards, claim.ranges, claim.device)
        return rows


def _allocate(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


def _finish_reading(readers: set[torch.cuda.Stream], memory: Tensor, process: int) -> None:
    """Wait for copies out of the memory, which is freed after that."""
    if os.getpid() == process:
        for stream in readers:
            stream.synchronize()
