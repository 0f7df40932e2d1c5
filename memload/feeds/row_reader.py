"""Threads that read rows from files into page-locked memory, from which the device copies them."""

import os
import threading
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
import torch
from torch import Tensor

from memload.feeds.page_locked import Staging
from memload.machine import starting_threads
from memload.storage.file_reads import bytes_of, open_direct, ranges_of, read_ahead
from memload.storage.shards import Shards

#: How many reads are under way at a time.
READS_IN_FLIGHT = 32
#: Columns of the table that plans reads.
_TARGET, _SIZE = 2, 3


class Reading:
    """Rows on their way from the disk into a page-locked buffer. See `RowReader.begin`."""

    def __init__(
        self, buffer: Tensor, addresses: np.ndarray, parts: list[Future[None]], staging: Staging
    ) -> None:
        #: Where each row begins in page-locked memory, int64 ``(n,)``.
        self.addresses = addresses
        self._buffer, self._parts, self._staging = buffer, parts, staging

    def wait(self) -> None:
        """Block until all rows are there. Raises FormatError if one cannot be read."""
        wait(self._parts)
        for part in self._parts:
            part.result()

    def give_back(self) -> None:
        """Let the buffer be used again, once the last copy out of it was put on the current stream.

        Without this call, the buffer is freed with the reading.
        """
        self._staging.give_back(self._buffer)


class RowReader:
    """Reads rows past the page cache, or through it, with many reads in flight.

    A direct read begins and ends at multiples of the file's alignment. A row therefore begins
    anywhere in the memory that is read into, and the device copies it from there:

        file    ──┬────────────┬────────────┬────────────┬──
                  │      ██████│████████████│███ a row   │
                  └ read from here ──────────── to here ─┘

    Threads start with the first read. Rows are only read if `begin` was called for them.
    """

    def __init__(self, shards: Shards, device: torch.device, *, buffers: int) -> None:
        self._shards = shards
        self._direct = [open_direct(descriptor) for descriptor in shards.descriptors]
        opened = [file.descriptor for file in self._direct if file is not None]
        weakref.finalize(self, _close, opened)
        alignments = [file.alignment for file in self._direct if file is not None]
        self._alignment = max(alignments, default=1)
        self._device, self._buffers = device, buffers
        self._threads, self._staging = self._new_resources()
        #: Set while nobody waits for the disk.
        self.idle = threading.Event()
        self.idle.set()
        self._lock = threading.Lock()
        self._begun = 0
        self._busy_since = 0.0
        #: What was read from the files, in bytes, and in how many seconds.
        self.bytes_read, self.seconds_read = 0, 0.0

    @property
    def is_direct(self) -> bool:
        """Whether all files can be read past the page cache."""
        return all(file is not None for file in self._direct)

    def begin(self, rows: np.ndarray, kept: np.ndarray, room_for: int) -> Reading:
        """Begin to read rows (int64, ``(n,)``), in any order, into a buffer for ``room_for`` rows.

        ``kept`` (bool) tells which rows are read through the page cache, to stay there. Does not
        block, except for the copy out of a buffer that is used again.
        """
        slot_bytes = self._shards.array.row_bytes + 2 * self._alignment
        threads, staging = self._threads, self._staging
        buffer = staging.take(room_for * slot_bytes)
        memory = bytes_of(buffer.numpy())
        addresses = np.empty(len(rows), np.int64)
        parts: list[Future[None]] = []
        position = 0
        for through_cache in (True, False):
            chosen = np.flatnonzero(kept == through_cache)
            if chosen.size:
                starts, reads = self._plan(rows[chosen], position)
                addresses[chosen] = buffer.data_ptr() + starts
                position = int(reads[-1, _TARGET] + reads[-1, _SIZE])
                for some in np.array_split(reads, min(READS_IN_FLIGHT, len(reads))):
                    self._note_begin()
                    with starting_threads("use feed='pinned' with num_threads=0"):
                        part = threads.submit(self._read, some.tolist(), through_cache, memory)
                    parts.append(part)
        return Reading(buffer, addresses, parts, staging)

    def _plan(self, rows: np.ndarray, position: int) -> tuple[np.ndarray, np.ndarray]:
        """Plan the reads of some rows into memory, from a position there on.

        Returns where each row begins in the memory; and for each read the file, the offset there,
        the position in the memory, the size, and how much of it the rows need.
        """
        alignment = self._alignment
        unique, inverse = np.unique(rows, return_inverse=True)
        shard, offset = self._shards.offsets_of(unique)
        ranges = ranges_of(shard, offset, self._shards.array.row_bytes)
        start = ranges.offset // alignment * alignment
        size = -(-(ranges.offset + ranges.size) // alignment) * alignment - start
        target = position + np.cumsum(size) - size
        rows_in_range = np.diff(ranges.first, append=len(unique))
        begins = np.repeat(target - start, rows_in_range) + offset
        needed = ranges.offset + ranges.size - start
        reads = np.stack([ranges.file, start, target, size, needed], 1)
        return begins[inverse.reshape(-1)], reads

    def _read(self, reads: list[list[int]], through_cache: bool, memory: memoryview) -> None:
        bytes_read = 0
        try:
            descriptors = [self._descriptor(read[0], through_cache) for read in reads]
            if through_cache:
                for (_, offset, _, size, _), descriptor in zip(reads, descriptors, strict=True):
                    read_ahead(descriptor, offset, size)
            for (file, offset, target, size, needed), descriptor in zip(
                reads, descriptors, strict=True
            ):
                part = memory[target : target + size]
                self._shards.read(file, offset, part, needed, descriptor)
                bytes_read += size
        finally:
            self._note_end(bytes_read)

    def _descriptor(self, file: int, through_cache: bool) -> int:
        direct = self._direct[file]
        if through_cache or direct is None:
            return self._shards.descriptors[file]
        return direct.descriptor

    def _note_begin(self) -> None:
        with self._lock:
            if not self._begun:
                self._busy_since = time.monotonic()
                self.idle.clear()
            self._begun += 1

    def _note_end(self, bytes_read: int) -> None:
        with self._lock:
            self._begun -= 1
            self.bytes_read += bytes_read
            if not self._begun:
                self.seconds_read += time.monotonic() - self._busy_since
                self.idle.set()

    def release(self) -> None:
        """Let the threads end, and the buffers be freed, once what was begun is done.

        Later reading makes new ones.
        """
        threads = self._threads
        self._threads, self._staging = self._new_resources()
        threads.shutdown(wait=False)

    def close(self) -> None:
        """Let the threads end, after the read that each is at. What was not read yet is dropped."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _new_resources(self) -> tuple[ThreadPoolExecutor, Staging]:
        """Return what starts threads and allocates page-locked memory when it is first used."""
        pool = ThreadPoolExecutor(READS_IN_FLIGHT, "memload-read")
        return pool, Staging(self._device, soft_limit=self._buffers)


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
