"""Threads that read rows from files into page-locked memory, from which the device copies them."""

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator
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
from memload.profiling import profiled
from memload.storage.file_reads import bytes_of, drop_behind, open_direct, ranges_of, read_ahead
from memload.storage.read_queue import give_back, has_queues, take_queue
from memload.storage.shards import Shards

#: How many threads read past the page cache with a `ReadQueue` each. While one of them is between
#: two batches, the other keeps the disk busy. One thread reached 0.90 of the speed of two.
_NUM_QUEUES = 2
#: How many threads read past the page cache where there are no queues, and at most through it. Of
#: 8, 16, 32 and 64, this was within 5 % of the best for rows of 3 and 27 KB (8: 0.80 and 0.68; 64:
#: 0.57 and 0.98); for larger rows the differences were within the noise.
MAX_THREADS = 32
#: The most reads of a batch that one of these threads does at a time.
_READS_PER_PART = 8
_THREAD_NAME = "memload-read"

#: What one thread does of a reading. Returns how many bytes were read.
_Part = Callable[[], int]

logger = logging.getLogger("memload")


class _Reads(NamedTuple):
    """Parts of files to read; each array has an entry for each part."""

    file: np.ndarray  #: number of the file
    offset: np.ndarray  #: in the file, in bytes
    position: np.ndarray  #: in the memory, in bytes
    size: np.ndarray  #: in bytes
    needed: np.ndarray  #: how many of these the rows need; behind them, the file may end
    are_kept: np.ndarray  #: whether they stay in the page cache, bool

    @property
    def number(self) -> int:
        return len(self.file)

    def some(self, which: slice | np.ndarray) -> "_Reads":
        """Return the reads of a slice or a mask."""
        return _Reads(*(column[which] for column in self))

    def divided(self, number: int) -> list["_Reads"]:
        """Return this many parts of much the same size."""
        return [self.some(slice(first, None, number)) for first in range(number)]


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
        """Return whether all reads have ended, so that `wait` does not block."""
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
    """Threads and memory. Both are taken with the first read."""

    direct: ThreadPoolExecutor  #: reads past the page cache
    cached: ThreadPoolExecutor  #: reads through it
    staging: Staging  #: page-locked memory to read into

    def end_threads(self, *, wait: bool) -> None:
        for pool in (self.direct, self.cached):
            pool.shutdown(wait)


class _DirectFiles(NamedTuple):
    """Files opened for reading past the page cache."""

    descriptors: list[int | None]  #: of each file; None where that cannot be done
    descriptor_array: np.ndarray  #: the same, int64 (files), with -1 in place of None
    are_direct: np.ndarray  #: where it can be done, bool (files)
    alignment: int  #: the largest one, in bytes; all are powers of two


class RowReader:
    """Reads rows past the page cache, or through it, with many reads in flight. Thread-safe.

    Past it, two threads each hand the kernel all reads of a batch (see `ReadQueue`). On a system
    without such queues, 32 threads share the reads, and each does one after another.

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
        #: How much was read from the files, and for how long.
        self.busy_time = BusyTime()
        #: Set while nobody waits for the disk.
        self.idle = self.busy_time.idle
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
        array = np.array([-1 if descriptor is None else descriptor for descriptor in direct])
        return _DirectFiles(direct, array, array >= 0, alignment)

    @property
    def alignment(self) -> int:
        """Offsets and sizes of direct reads, and addresses in memory, are multiples of this."""
        return self._files.alignment

    @property
    def is_direct(self) -> bool:
        """Whether all files can be read past the page cache."""
        return bool(self._files.are_direct.all())

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
        size += alignment  # the memory used begins at an aligned address in the buffer
        buffer = resources.staging.take(size, room=size // 8)  # batches differ a little
        padding = -buffer.data_ptr() % alignment
        memory = bytes_of(buffer.numpy())[padding:]
        reading = Reading(buffer, buffer.data_ptr() + padding + begins, resources.staging)
        known = weakref.ref(reading)
        tasks = [(resources.direct, part) for part in self._divide_direct(direct, memory)]
        tasks += [(resources.cached, part) for part in self._divide_cached(cached, memory)]
        parts = [part for _, part in tasks]
        self.busy_time.begin(parts)
        try:
            with starting_threads("use feed='pinned' with num_threads=0"):
                for pool, part in tasks:
                    reading.parts.append(pool.submit(self._run, part, known))
        except MemloadError:
            # The first of these may end twice: a thread that runs already may still take it.
            self.busy_time.end(parts[len(reading.parts) :])
            raise
        return reading

    def _plan(
        self, rows: np.ndarray, kept: np.ndarray, alignment: int
    ) -> tuple[np.ndarray, _Reads, _Reads, int]:
        """Plan the reads of rows into memory.

        Returns where each row begins in the memory, int64 ``(n,)``, the direct reads, those through
        the page cache, and how many bytes of memory they take.
        """
        file, offset = self._shards.offsets_of(rows)
        # If all are kept, no file is opened for direct reads.
        is_cached = kept if kept.all() else kept | ~self._files.are_direct[file]
        order = np.lexsort((rows, kept, is_cached))
        file, offset, kept = file[order], offset[order], kept[order]
        start, end = offset // alignment * alignment, offset + self._shards.array.row_bytes
        stop = -(-end // alignment) * alignment
        # In one file, rows that are alike in `kept` are also read the same way.
        touches = (start[1:] <= stop[:-1]) & (kept[1:] == kept[:-1])
        ranges = ranges_of(file, start, stop, touches)
        rows_in_range = ranges.last - ranges.first + 1
        begins = np.empty_like(offset)
        begins[order] = offset + np.repeat(ranges.position - ranges.offset, rows_in_range)
        needed = end[ranges.last] - ranges.offset
        where = (ranges.file, ranges.offset, ranges.position, ranges.size)
        reads = _Reads(*where, needed, kept[ranges.first])
        are_cached = is_cached[order[ranges.first]]
        return begins, reads.some(~are_cached), reads.some(are_cached), int(ranges.size.sum())

    def _divide_direct(self, reads: _Reads, memory: memoryview) -> list[_Part]:
        """Divide the reads of a batch past the page cache among threads.

        A queue takes all of them. Without queues, they are as few parts as keep the disk busy.
        """
        if reads.number and has_queues():
            return [partial(self._read_with_queue, reads, memory)]
        free_threads = MAX_THREADS - len(self.busy_time.under_way)
        number = min(reads.number, max(free_threads, -(-reads.number // _READS_PER_PART)))
        return [partial(self._read_direct, part, memory) for part in reads.divided(number)]

    def _divide_cached(self, reads: _Reads, memory: memoryview) -> list[_Part]:
        """Divide the reads of a batch through the page cache among threads: a part for each.

        There is a thread for each core, as a read of 150 KB takes up to 250 µs of CPU time.
        """
        number = min(reads.number, _num_cached_threads())
        return [partial(self._read_cached, part, memory) for part in reads.divided(number)]

    def _run(self, part: _Part, reading: "weakref.ref[Reading]") -> None:
        """Do a part of a reading on a thread, unless nobody waits for it any more."""
        bytes_read = 0
        try:
            if reading() is None:
                return
            if self._is_closed:
                raise RuntimeError("The feed was closed before these rows were read.")
            with profiled("read"):
                bytes_read = part()
        finally:
            self.busy_time.end([part], bytes_read)

    def _read_with_queue(self, reads: _Reads, memory: memoryview) -> int:
        """Read past the page cache with a queue. Returns how many bytes the rows needed."""
        address = reads.position + np.frombuffer(memory, np.uint8).ctypes.data
        count = np.zeros_like(reads.size)
        if (queue := take_queue()) is not None:  # None: other readers have taken all there may be
            descriptors = self._files.descriptor_array[reads.file]
            count = queue.read(descriptors, reads.offset, reads.size, address)
            give_back(queue)
        # What the queue has not read is read again, one after another. That raises its errors.
        self._read_direct(reads.some(count < reads.needed), memory)
        return int(reads.needed.sum())

    def _read_direct(self, reads: _Reads, memory: memoryview) -> int:
        """Read past the page cache, one after another. Returns how many bytes the rows needed."""
        descriptors = self._files.descriptors
        for file, offset, position, size, needed, _ in _each(*reads):
            part = memory[position : position + size]
            self._shards.read(file, offset, part, needed, descriptors[file])
        return int(reads.needed.sum())

    def _read_cached(self, reads: _Reads, memory: memoryview) -> int:
        """Read through the page cache, of which the kernel is asked for all parts first.

        Returns how many bytes the rows needed.
        """
        descriptors = self._shards.descriptors
        for file, offset, needed in _each(reads.file, reads.offset, reads.needed):
            read_ahead(descriptors[file], offset, needed)
        for file, offset, position, needed in _each(
            reads.file, reads.offset, reads.position, reads.needed
        ):
            self._shards.read(file, offset, memory[position : position + needed], needed)
        dropped = reads.some(~reads.are_kept)
        for file, offset, needed in _each(dropped.file, dropped.offset, dropped.needed):
            drop_behind(descriptors[file], offset, needed)
        return int(reads.needed.sum())

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
        self._resources.end_threads(wait=is_outside)

    def _new_resources(self) -> _Resources:
        num_direct = _NUM_QUEUES if has_queues() else MAX_THREADS
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


def _each(*columns: np.ndarray) -> Iterator[tuple[int, ...]]:
    """Return an entry of each column at a time, as Python's integers."""
    return zip(*(column.tolist() for column in columns), strict=True)


def _num_cached_threads() -> int:
    """Return how many threads read through the page cache: one for each core, at least 2."""
    return min(MAX_THREADS, max(2, available_cores()))


#: The devices (``st_dev``) of file systems of which this process has warned.
_file_systems_warned_of: set[int] = set()
