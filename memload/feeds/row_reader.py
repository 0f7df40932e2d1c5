"""Threads that read rows from files into page-locked memory, from which the device copies them."""

import logging
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from memload.errors import MemloadError
from memload.feeds.busy_time import BusyTime
from memload.feeds.page_locked import Staging
from memload.machine import available_cores, starting_threads
from memload.storage.file_reads import bytes_of, drop_behind, open_direct, ranges_of, read_ahead
from memload.storage.read_queue import give_back, has_queues, take_queue
from memload.storage.shards import Shards

#: How many threads read past the page cache with a `ReadQueue` each. While one goes over from a
#: batch to the next, the other keeps the disk busy: with one thread, 0.90 of the speed.
_NUM_QUEUES = 2
#: How many threads read past the page cache where there are no such queues. Of 8, 16, 32 and 64,
#: this was within 5 % of the best for rows of 3 and 27 KB (8: 0.80 and 0.68; 64: 0.57 and 0.98);
#: for larger rows the differences were within the noise.
READS_IN_FLIGHT = 32
#: What one of these threads reads of a batch, if enough of them read already.
_READS_PER_PART = 8
_THREAD_NAME = "memload-read"

#: A part of a file to read: the number of the file, the offset in it, the position in the memory,
#: the size, how much of that the rows need (behind it, the file may end), and whether it stays in
#: the page cache. It is a plain tuple, as there is one for each row.
_FilePart = tuple[int, int, int, int, int, bool]
#: What one thread does of a reading. Returns how many bytes were read.
_Part = Callable[[], int]

logger = logging.getLogger("memload")


class Reading:
    """Rows on their way from the disk into a page-locked buffer. See `RowReader.begin`.

    What no thread has begun when the last reference to the reading ends is not read.
    """

    def __init__(self, buffer: Tensor, addresses: np.ndarray, staging: Staging) -> None:
        #: Where each row begins in page-locked memory, int64 ``(n,)``.
        self.addresses = addresses
        #: What threads read, each for itself.
        self.parts: list[Future[None]] = []
        self._buffer, self._staging = buffer, staging

    def is_done(self) -> bool:
        """Return whether `wait` would not block."""
        return all(part.done() for part in self.parts)

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


class _Resources(NamedTuple):
    """Threads, which start with the first read, and memory, which is allocated with it."""

    direct: ThreadPoolExecutor  #: what reads past the page cache
    cached: ThreadPoolExecutor  #: what reads through it
    staging: Staging

    def close(self, wait: bool) -> None:
        for pool in (self.direct, self.cached):
            pool.shutdown(wait)


class _DirectFiles(NamedTuple):
    """Files opened for reading past the page cache."""

    descriptors: list[int | None]  #: None where that cannot be done
    numbers: np.ndarray  #: the same as an array, with -1 in place of None
    are_direct: np.ndarray  #: where it can be done, bool
    alignment: int  #: the largest one; all are powers of two


class RowReader:
    """Reads rows past the page cache, or through it, with many reads in flight. Thread-safe.

    Past it, two threads let the kernel read all rows of a batch at once (see `ReadQueue`). Where
    that cannot be done, each of 32 threads reads one row after another.

    A direct read begins and ends at multiples of the file's alignment. A row therefore begins
    anywhere in the memory that is read into, and the device copies it from there:

        file    ──┬────────────┬────────────┬────────────┬──
                  │      ██████│████████████│███ a row   │
                  └ read from here ──────────── to here ─┘

    Threads start with the first read. In a forked child, make another reader.
    """

    def __init__(self, shards: Shards, device: torch.device, *, buffers: int) -> None:
        self._shards = shards
        self._device, self._buffers = device, buffers
        self._resources = self._new_resources()
        self._busy_time = BusyTime()
        #: Set while nobody waits for the disk.
        self.idle = self._busy_time.idle
        self._is_closed = False

    @cached_property
    def _files(self) -> _DirectFiles:
        """The files, opened for direct reads. `dma` and `uva` mostly need none."""
        with ExitStack() as opened:
            files = []
            for descriptor in self._shards.descriptors:
                files.append(open_direct(descriptor))
                if files[-1] is not None:
                    opened.callback(os.close, files[-1].descriptor)
            weakref.finalize(self, opened.pop_all().close)
        direct = [None if file is None else file.descriptor for file in files]
        alignment = max((file.alignment for file in files if file is not None), default=1)
        numbers = np.array([-1 if number is None else number for number in direct])
        return _DirectFiles(direct, numbers, numbers >= 0, alignment)

    @property
    def alignment(self) -> int:
        """Offsets and sizes of direct reads, and addresses in memory, are multiples of this."""
        return self._files.alignment

    @property
    def is_direct(self) -> bool:
        """Whether all files can be read past the page cache."""
        return bool(self._files.are_direct.all())

    @property
    def bytes_read(self) -> int:
        """How many bytes were read from the files."""
        return self._busy_time.so_far()[0]

    @property
    def seconds_read(self) -> float:
        """For how many seconds something was being read."""
        return self._busy_time.so_far()[1]

    def begin(self, rows: np.ndarray, kept: np.ndarray) -> Reading:
        """Begin to read rows (int64, ``(n,)``, at least one), in any order.

        ``kept``, bool ``(n,)``, marks rows that are read through the page cache, so that they stay
        there. Other rows are read past it. Where that cannot be done, they are removed from it
        behind the read, and a warning in the log says so once.

        Blocks only at the limit of buffers, until the device has copied out of the one that was
        given back first. Raises FormatError if too many files are open.
        """
        alignment = 1
        if not kept.all():
            alignment = self.alignment
            if not self.is_direct:
                self._warn_of_page_cache()
        begins, direct, cached, size = self._plan(rows, kept, alignment)
        resources = self._resources
        size += alignment
        buffer = resources.staging.take(size, room=size // 8)  # batches differ a little
        first = -buffer.data_ptr() % alignment
        memory = bytes_of(buffer.numpy())[first:]
        reading = Reading(buffer, buffer.data_ptr() + first + begins, resources.staging)
        known = weakref.ref(reading)
        direct_parts = self._divide_direct(direct, memory)
        parts = direct_parts + self._divide_cached(cached, memory)
        self._busy_time.begin(parts)
        try:
            with starting_threads("use feed='pinned' with num_threads=0"):
                for number, part in enumerate(parts):
                    is_direct = number < len(direct_parts)
                    pool = resources.direct if is_direct else resources.cached
                    reading.parts.append(pool.submit(self._run, part, known))
        except MemloadError:
            self._busy_time.end(parts[len(reading.parts) :])
            raise
        return reading

    def _plan(
        self, rows: np.ndarray, kept: np.ndarray, alignment: int
    ) -> tuple[np.ndarray, list[_FilePart], list[_FilePart], int]:
        """Plan the reads of rows into memory.

        Returns where each row begins in the memory, the direct reads, those through the page cache,
        and how much memory they take.
        """
        file, offset = self._shards.offsets_of(rows)
        is_cached = kept if kept.all() else kept | ~self._files.are_direct[file]
        order = np.lexsort((rows, kept, is_cached))  # direct reads first
        file, offset, kept = file[order], offset[order], kept[order]
        start, end = offset // alignment * alignment, offset + self._shards.array.row_bytes
        stop = -(-end // alignment) * alignment
        touches = (start[1:] <= stop[:-1]) & (kept[1:] == kept[:-1])
        ranges = ranges_of(file, start, stop, touches)
        rows_in_range = ranges.last - ranges.first + 1
        begins = np.empty_like(offset)
        begins[order] = offset + np.repeat(ranges.position - ranges.offset, rows_in_range)
        needed = end[ranges.last] - ranges.offset
        columns = (*ranges[:4], needed, kept[ranges.first])
        reads = list(zip(*(column.tolist() for column in columns), strict=True))
        num_direct = np.count_nonzero(~is_cached[order[ranges.first]])
        return begins, reads[:num_direct], reads[num_direct:], int(ranges.size.sum())

    def _divide_direct(self, reads: list[_FilePart], memory: memoryview) -> list[_Part]:
        """Divide the reads of a batch past the page cache: as few parts as keep the disk busy."""
        if reads and has_queues():
            return [partial(self._read_at_once, reads, memory)]
        free_threads = READS_IN_FLIGHT - len(self._busy_time.under_way)
        number = min(len(reads), max(free_threads, -(-len(reads) // _READS_PER_PART)))
        return [partial(self._read_direct, reads[n::number], memory) for n in range(number)]

    def _divide_cached(self, reads: list[_FilePart], memory: memoryview) -> list[_Part]:
        """Divide the reads of a batch through the page cache: a part for each core.

        A read of 150 KB costs up to 250 µs of CPU time.
        """
        number = min(len(reads), _num_cached_threads())
        return [partial(self._read_cached, reads[n::number], memory) for n in range(number)]

    def _run(self, part: _Part, reading: "weakref.ref[Reading]") -> None:
        """Do a part of a reading on a thread, unless nobody waits for it any more."""
        bytes_read = 0
        try:
            if reading() is None:
                return
            if self._is_closed:
                raise RuntimeError("The feed was closed before these rows were read.")
            bytes_read = part()
        finally:
            self._busy_time.end([part], bytes_read)

    def _read_at_once(self, reads: list[_FilePart], memory: memoryview) -> int:
        """Read past the page cache, all at once. Returns how many bytes."""
        file, offset, position, size, needed, _ = np.array(reads, np.int64).T
        address = position + np.frombuffer(memory, np.uint8).ctypes.data
        count = np.zeros_like(size)
        if (queue := take_queue()) is not None:
            count = queue.read(self._files.numbers[file], offset, size, address)
            give_back(queue)
        # What the kernel did not read is read on its own. That raises errors.
        self._read_direct([reads[one] for one in np.flatnonzero(count < needed)], memory)
        return int(needed.sum())

    def _read_direct(self, reads: list[_FilePart], memory: memoryview) -> int:
        """Read past the page cache, one after another. Returns how many bytes."""
        descriptors = self._files.descriptors
        for file, offset, position, size, needed, _ in reads:
            part = memory[position : position + size]
            self._shards.read(file, offset, part, needed, descriptors[file])
        return sum(needed for *_, needed, _ in reads)

    def _read_cached(self, reads: list[_FilePart], memory: memoryview) -> int:
        """Read through the page cache: the kernel is asked for all of it first."""
        descriptors = self._shards.descriptors
        for file, offset, _, _, needed, _ in reads:
            read_ahead(descriptors[file], offset, needed)
        for file, offset, position, _, needed, _ in reads:
            self._shards.read(file, offset, memory[position : position + needed], needed)
        for file, offset, _, _, needed, is_kept in reads:
            if not is_kept:
                drop_behind(descriptors[file], offset, needed)
        return sum(needed for *_, needed, _ in reads)

    def read_range(self, file: int, offset: int, size: int, memory: memoryview) -> int:
        """Read a part of a file past the page cache, on this thread. Returns where it begins.

        ``memory`` has room for ``size + 2 * alignment`` bytes, at an address that is a multiple of
        `alignment`. Raises FormatError.
        """
        begin = offset % self.alignment
        whole = -(-(begin + size) // self.alignment) * self.alignment
        direct = self._files.descriptors[file]
        self._shards.read(file, offset - begin, memory[:whole], begin + size, direct)
        if direct is None:
            drop_behind(self._shards.descriptors[file], offset, size)
        return begin

    def release(self) -> None:
        """Let go of the threads and buffers. They end once all reads that were begun are done.

        A later `begin` makes new ones.
        """
        self._resources = self._new_resources()

    def close(self) -> None:
        """Let the threads end, after the part of a batch that each is at. The last call.

        Waiting for what no thread has begun raises RuntimeError then.
        """
        self._is_closed = True
        # A thread of the pool may happen to collect a dropped Loader. It must not wait for itself.
        is_outside = not threading.current_thread().name.startswith(_THREAD_NAME)
        self._resources.close(wait=is_outside)

    def _new_resources(self) -> _Resources:
        num_direct = _NUM_QUEUES if has_queues() else READS_IN_FLIGHT
        return _Resources(
            ThreadPoolExecutor(num_direct, _THREAD_NAME),
            ThreadPoolExecutor(_num_cached_threads(), _THREAD_NAME),
            Staging(self._device, soft_limit=self._buffers),
        )

    def _warn_of_page_cache(self) -> None:
        """Say, once for each file system, that rows are read through the page cache."""
        number = self._files.descriptors.index(None)
        file_system = os.fstat(self._shards.descriptors[number]).st_dev
        if file_system not in _file_systems_warned_of:
            _file_systems_warned_of.add(file_system)
            logger.warning(
                "%s is on a file system that cannot read past the page cache (O_DIRECT). Rows that "
                "are not held in RAM are read through it and removed from it again, which takes "
                "more CPU time. Copy the data set to a local disk with ext4 or xfs.",
                self._shards.paths[number],
            )


def _num_cached_threads() -> int:
    return min(READS_IN_FLIGHT, max(2, available_cores()))


#: The devices (``st_dev``) of file systems of which this process has warned.
_file_systems_warned_of: set[int] = set()
