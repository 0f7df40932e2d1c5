"""Rows that are held in memory: in registered page cache, and in the device's own memory.

    claim: which windows ─▶ a thread reads and registers them ─▶ table: addresses for the device

Until a window is there, its rows are read from the file like all others. The thread leaves the disk
to rows that are waited for, so that the first batches are not slower than the disk.
"""

import contextlib
import ctypes
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from memload.errors import FeedError, FormatError
from memload.feeds.budget import Claim
from memload.feeds.registered import RegisteredFile, registered_bytes, shared_file
from memload.feeds.windows import WINDOW_BYTES, WindowRows, WindowTable, window_sizes
from memload.machine import available_memory, starting_threads
from memload.storage.mapping import disk_reads, fault_in
from memload.storage.shards import Shards
from memload.wording import size_text

#: What the thread reads before it looks whether rows are waited for: 20 ms at 1.5 GB/s.
_STEP_BYTES = 32 << 20
#: While rows are waited for, the thread reads for this share of the time.
_BUSY_SHARE = 0.05
#: RAM that is left to everything else. With 3 GB left beside what was held, a host kept running;
#: with less, its OOM killer struck.
RESERVE_BYTES = 3 << 30
#: How long `HeldRows.close` waits for the thread, which may be reading from a slow disk.
_CLOSE_SECONDS = 30.0

logger = logging.getLogger("memload")


class HeldRows:
    """The windows of an array that a claim names, held in registered page cache.

    A thread brings them in, one after another. ``complete`` is set once all are there. If one
    cannot be registered, or RAM runs short, the thread ends with a warning. The rows of the windows
    that are missing are then read from the files.

    ``idle`` is set while nobody waits for the disk. Raises FeedError if pages cannot be registered.
    """

    def __init__(
        self, shards: Shards, claim: Claim, device: torch.device, idle: threading.Event
    ) -> None:
        shards.check_sizes(range(len(shards.maps)))
        if shards.array.row_bytes > WINDOW_BYTES:
            raise FeedError(
                f"rows of {shards.array.row_bytes:,} bytes are too large to register: the limit is "
                f"{WINDOW_BYTES:,} bytes. Use feed='pinned'."
            )
        self.complete = threading.Event()
        self.table = WindowTable(shards)
        self._shards, self._device = shards, device
        expected = zip(shards.paths, shards.descriptors, shards.array.shards, strict=True)
        self._files = [
            shared_file(path, descriptor, shard.bytes) for path, descriptor, shard in expected
        ]
        self._files[0].probe(device)
        stop = threading.Event()
        filler = _Filler(self._files, claim.plan, device, self.table, idle, stop, self.complete)
        self._thread = threading.Thread(target=filler.run, name="memload-register", daemon=True)
        with starting_threads("use feed='pinned' with num_threads=0"):
            self._thread.start()
        self._stop_thread = weakref.finalize(self, _stop, stop, self._thread)

    def look_up(self, rows: np.ndarray) -> WindowRows:
        """Return where rows (int64) lie, for reading on the current stream.

        Before the pages are unregistered, `close` waits for that stream.
        """
        stream = torch.cuda.current_stream(self._device)
        for file in self._files:
            file.readers.add(stream)
        return self.table.look_up(rows)

    def copy_all(self, out: Tensor) -> None:
        """Copy all rows of all files, as bytes, into ``out`` (uint8), on the current stream."""
        stream, copied = torch.cuda.current_stream(self._device), 0
        header_bytes = self._shards.array.header_bytes
        for file, sizes in zip(self._files, window_sizes(self._shards), strict=True):
            file.readers.add(stream)
            for window in np.flatnonzero(sizes).tolist():
                with contextlib.suppress(FeedError):  # then it is copied more slowly
                    _fault_in(file, window * WINDOW_BYTES, int(sizes[window]))
                    file.register(window, int(sizes[window]), self._device)
                first = max(window * WINDOW_BYTES, header_bytes)
                size = window * WINDOW_BYTES + int(sizes[window]) - first
                # Made from the address, as torch warns of arrays that cannot be written to.
                window_bytes = (ctypes.c_uint8 * size).from_address(file.address + first)
                pixels = torch.from_numpy(np.ctypeslib.as_array(window_bytes))
                out[copied : copied + size].copy_(pixels, non_blocking=True)
                copied += size

    def close(self) -> None:
        """Stop the thread and drop the files. The last Loader of a file unregisters its pages."""
        self._stop_thread()
        self._files = []


class _Filler:
    """Reads windows from the disk, registers them, and adds them to a table."""

    def __init__(
        self,
        files: Sequence[RegisteredFile],
        plan: np.ndarray,
        device: torch.device,
        table: WindowTable,
        idle: threading.Event,
        stop: threading.Event,
        complete: threading.Event,
    ) -> None:
        self._files, self._plan, self._device, self._table = files, plan, device, table
        self._idle, self._stop, self._complete = idle, stop, complete
        self._reserve = min(RESERVE_BYTES, (available_memory() - registered_bytes()) // 2)

    def run(self) -> None:
        """Bring in all windows of the plan, unless stopped."""
        try:
            for number, window in np.argwhere(self._plan).tolist():
                size = int(self._plan[number, window])
                file = self._files[number]
                self._check_memory(size)
                for start in range(0, size, _STEP_BYTES):
                    step = min(_STEP_BYTES, size - start)
                    self._in_turn(_fault_in, file, window * WINDOW_BYTES + start, step)
                    if self._stop.is_set():
                        return
                held = file.register(window, size, self._device)
                self._table.add(number, window, file.address + window * WINDOW_BYTES, held)
            self._complete.set()
        except (FeedError, FormatError) as error:
            # The rows are read from the files, which raises an error for those that cannot be.
            # As text: a log record may be kept, and the traceback would keep the files.
            logger.warning("%s", str(error))

    def _in_turn(self, read: Callable[..., None], *arguments: object) -> None:
        """Read a part. If it came from the disk, leave the disk to rows that are waited for."""
        reads_before, begun = disk_reads(), time.monotonic()
        read(*arguments)
        if disk_reads() > reads_before:
            took = time.monotonic() - begun
            end = time.monotonic() + took * (1 / _BUSY_SHARE - 1)
            while not self._stop.is_set() and time.monotonic() < end:
                if self._idle.wait(min(0.1, took)):
                    return

    def _check_memory(self, size: int) -> None:
        """Raise FeedError if the system would be left with too little RAM."""
        left = available_memory() - registered_bytes()
        if left and left - size < self._reserve:
            raise FeedError(
                f"{size_text(registered_bytes())} of rows are held in RAM, and no more of them: "
                f"only {size_text(left)} of RAM are available, and {size_text(self._reserve)} are "
                "left to other uses. The other rows are read from the disk."
            )


def _fault_in(file: RegisteredFile, start: int, size: int) -> None:
    """Read a part of a file into the page cache. Raises FormatError.

    The pages are read now, as CUDA would read them while it holds a lock that kernels need.
    """
    try:
        fault_in(file.address + start, size)
    except OSError as error:  # touching the pages would end the process
        raise FormatError(
            f"{file.path} cannot be read: {error.strerror}. Check the disk, then restore the "
            "file or run 'memload build' again.",
            path=file.path,
        ) from error


def _stop(stop: threading.Event, thread: threading.Thread) -> None:
    stop.set()
    if thread is not threading.current_thread():
        thread.join(_CLOSE_SECONDS)
