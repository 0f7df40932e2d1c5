"""Threads that read rows from files into page-locked memory, from which the device copies them."""

import logging
import os
import threading
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from memload.feeds.page_locked import Staging
from memload.machine import starting_threads
from memload.storage.file_reads import bytes_of, drop_behind, open_direct, read_ahead
from memload.storage.shards import Shards

#: How many reads are under way at a time.
READS_IN_FLIGHT = 32
#: Rows are read together if they begin in the same part of a file, of this size, and touch.
_MAX_READ_BYTES = 1 << 20
_THREAD_NAME = "memload-read"

logger = logging.getLogger("memload")


class Reading:
    """Rows on their way from the disk into a page-locked buffer. See `RowReader.begin`.

    What was not read yet when the last reference to the reading ends is never read.
    """

    def __init__(self, buffer: Tensor, addresses: np.ndarray, staging: Staging) -> None:
        #: Where each row begins in page-locked memory, int64 ``(n,)``.
        self.addresses = addresses
        #: What threads read, each for itself.
        self.parts: list[Future[None]] = []
        self._buffer, self._staging = buffer, staging

    def wait(self) -> None:
        """Block until all rows are there. Call it once.

        Raises FormatError if a row cannot be read, and RuntimeError if the reader was closed before
        all were.
        """
        parts, self.parts = self.parts, []
        wait(parts)
        try:
            while parts:
                parts.pop(0).result()
        finally:
            parts.clear()  # the traceback of an error holds this frame, and a part holds the error

    def give_back(self) -> None:
        """Let the buffer be used again, once the last copy out of it was put on the current stream.

        Call it after `wait`. Without this call, the buffer is freed with the reading.
        """
        self._staging.give_back(self._buffer)


class _Read(NamedTuple):
    """A part of a file to read."""

    file: int
    is_kept: bool  #: whether it stays in the page cache
    offset: int  #: in the file
    position: int  #: in the memory
    size: int
    needed: int  #: how much of ``size`` the rows need; the file may end behind that


class RowReader:
    """Reads rows past the page cache, or through it, with many reads in flight. Thread-safe.

    A direct read begins and ends at multiples of the file's alignment. A row therefore begins
    anywhere in the memory that is read into, and the device copies it from there:

        file    ──┬────────────┬────────────┬────────────┬──
                  │      ██████│████████████│███ a row   │
                  └ read from here ──────────── to here ─┘

    Threads start with the first read. In a forked child, make another reader.
    """

    def __init__(self, shards: Shards, device: torch.device, *, buffers: int) -> None:
        self._shards = shards
        self._direct: list[int | None] = []
        #: Offsets and sizes of direct reads, and addresses in memory, are multiples of this.
        self.alignment = 1
        opened: list[int] = []
        weakref.finalize(self, _close, opened)
        for descriptor in shards.descriptors:
            file = open_direct(descriptor)
            self._direct.append(None if file is None else file.descriptor)
            if file is not None:
                opened.append(file.descriptor)
                self.alignment = max(self.alignment, file.alignment)
        self._device, self._buffers = device, buffers
        self._threads, self._staging = self._new_resources()
        #: Set while nobody waits for the disk.
        self.idle = threading.Event()
        self.idle.set()
        #: How many bytes were read from the files.
        self.bytes_read = 0
        self._is_closed = False
        self._lock = threading.Lock()
        self._parts_begun = 0
        self._seconds_read = self._busy_since = 0.0

    @property
    def is_direct(self) -> bool:
        """Whether all files can be read past the page cache."""
        return None not in self._direct

    @property
    def seconds_read(self) -> float:
        """For how many seconds something was being read."""
        with self._lock:
            busy = time.monotonic() - self._busy_since if self._parts_begun else 0.0
            return self._seconds_read + busy

    def begin(self, rows: np.ndarray, kept: np.ndarray) -> Reading:
        """Begin to read rows (int64, ``(n,)``, at least one), in any order.

        ``kept``, bool ``(n,)``, marks rows that are read through the page cache, so that they stay
        there. Other rows are read past it. Where that cannot be done, they are removed from it
        behind the read, and a warning in the log says so once.

        Blocks only if all buffers are in use, until the device has copied out of the oldest one.
        """
        if not (self.is_direct or kept.all()):
            self._warn_of_page_cache()
        begins, reads = self._plan(rows, kept)
        threads, staging = self._threads, self._staging
        buffer = staging.take(reads[-1].position + reads[-1].size + self.alignment)
        first = -buffer.data_ptr() % self.alignment
        memory = bytes_of(buffer.numpy())[first:]
        reading = Reading(buffer, buffer.data_ptr() + first + begins, staging)
        count = min(READS_IN_FLIGHT, len(reads))
        self._note_begin(count)
        with starting_threads("use feed='pinned' with num_threads=0"):
            for number in range(count):
                some = reads[number::count]
                part = threads.submit(self._read, some, memory, weakref.ref(reading))
                reading.parts.append(part)
        return reading

    def _plan(self, rows: np.ndarray, kept: np.ndarray) -> tuple[np.ndarray, list[_Read]]:
        """Return where each row begins in the memory that is read into, and the reads."""
        alignment, row_bytes = self.alignment, self._shards.array.row_bytes
        unique, first_found, inverse = np.unique(rows, return_index=True, return_inverse=True)
        is_kept = kept[first_found]
        file, offset = self._shards.offsets_of(unique)
        start = offset // alignment * alignment
        stop = -(-(offset + row_bytes) // alignment) * alignment
        part = start // _MAX_READ_BYTES
        is_same = (file[1:] == file[:-1]) & (is_kept[1:] == is_kept[:-1]) & (part[1:] == part[:-1])
        together = is_same & (start[1:] <= stop[:-1])
        first = np.flatnonzero(np.concatenate([[True], ~together]))
        last = np.append(first[1:], len(unique)) - 1
        size = stop[last] - start[first]
        position = np.cumsum(size) - size
        begins = np.repeat(position - start[first], last - first + 1) + offset
        needed = offset[last] + row_bytes - start[first]
        columns = (file[first], is_kept[first], start[first], position, size, needed)
        reads = zip(*(column.tolist() for column in columns), strict=True)
        return begins[inverse], [_Read(*read) for read in reads]

    def _read(
        self, reads: list[_Read], memory: memoryview, reading: "weakref.ref[Reading]"
    ) -> None:
        """Read parts of files, unless nobody waits for the reading any more."""
        bytes_read = 0
        try:
            if reading() is None:
                return
            if self._is_closed:
                raise RuntimeError("The feed was closed before these rows were read.")
            cached = [read for read in reads if read.is_kept or self._direct[read.file] is None]
            for read in cached:
                read_ahead(self._shards.descriptors[read.file], read.offset, read.needed)
            for read in reads:
                direct = None if read.is_kept else self._direct[read.file]
                part = memory[read.position : read.position + read.size]
                self._shards.read(read.file, read.offset, part, read.needed, direct)
                bytes_read += read.needed
            for read in cached:
                if not read.is_kept:
                    drop_behind(self._shards.descriptors[read.file], read.offset, read.needed)
        finally:
            self._note_end(bytes_read)

    def read_range(self, file: int, offset: int, size: int, memory: memoryview) -> int:
        """Read a part of a file past the page cache, on this thread. Returns where it begins.

        ``memory`` has room for ``size + 2 * alignment`` bytes, at an address that is a multiple of
        `alignment`. Raises FormatError.
        """
        begin = offset % self.alignment
        whole = -(-(begin + size) // self.alignment) * self.alignment
        part = memory[:whole]
        self._shards.read(file, offset - begin, part, begin + size, self._direct[file])
        return begin

    def _note_begin(self, parts: int) -> None:
        with self._lock:
            if not self._parts_begun:
                self._busy_since = time.monotonic()
                self.idle.clear()
            self._parts_begun += parts

    def _note_end(self, bytes_read: int) -> None:
        with self._lock:
            self._parts_begun -= 1
            self.bytes_read += bytes_read
            if not self._parts_begun:
                self._seconds_read += time.monotonic() - self._busy_since
                self.idle.set()

    def release(self) -> None:
        """Let go of the threads and buffers. They end once all reads that were begun are done.

        A later `begin` makes new ones.
        """
        self._threads, self._staging = self._new_resources()

    def close(self) -> None:
        """Let the threads end, after the part of a batch that each is at.

        What no thread has begun is not read: waiting for it then raises RuntimeError, and so does
        `begin`.
        """
        self._is_closed = True
        # A thread of the pool may happen to collect a dropped Loader. It must not wait for itself.
        is_outside = not threading.current_thread().name.startswith(_THREAD_NAME)
        self._threads.shutdown(wait=is_outside)

    def _new_resources(self) -> tuple[ThreadPoolExecutor, Staging]:
        """Return what starts threads and allocates page-locked memory when it is first used."""
        pool = ThreadPoolExecutor(READS_IN_FLIGHT, _THREAD_NAME)
        return pool, Staging(self._device, soft_limit=self._buffers)

    def _warn_of_page_cache(self) -> None:
        """Say, once for each file system, that rows are read through the page cache."""
        number = self._direct.index(None)
        file_system = os.fstat(self._shards.descriptors[number]).st_dev
        if file_system not in _file_systems_warned_of:
            _file_systems_warned_of.add(file_system)
            logger.warning(
                "%s is on a file system that cannot read past the page cache (O_DIRECT). Rows that "
                "are not held in RAM are read through it and removed from it again, which takes "
                "more CPU time. Copy the data set to a local disk with ext4 or xfs.",
                self._shards.paths[number],
            )


#: The devices (``st_dev``) of file systems of which this process has warned.
_file_systems_warned_of: set[int] = set()


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
