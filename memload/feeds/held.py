"""The beginning of each file, held in page cache that the device reads.

    plan_files: how much of each file ─▶ Filler: threads ─▶ HeldFile: pages read, then registered

A row is in memory that the device reads if ``offset + row_bytes <= file.held``.
"""

import contextlib
import logging
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from memload.errors import FeedError
from memload.feeds.copies import register, unregister
from memload.feeds.feed import SampleArray
from memload.machine import available_memory, starting_threads
from memload.storage.mapping import disk_reads, fault_in
from memload.storage.shards import Shards
from memload.wording import size_text

#: Bytes registered at a time, which takes 3 to 17 ms.
WINDOW_BYTES = 256 << 20
#: Size of one read while pages come from the disk.
_STEP_BYTES = 4 << 20
#: If batches wait for rows, the disk is left to them for so many times as long as a read took. With
#: 0, the first rows of a cold file came 7 times as slowly; with 9, the file was not held after two
#: epochs.
_PAUSE = 2
#: Threads that map pages which are in RAM already, and register them. With 4 in place of one, the
#: second epoch of a cold file was 1.8 times as fast, and 1.8 times again when a window was
#: registered while the next one was mapped.
_THREADS = 4
#: A new Loader's first batch allocates page-locked memory, which is slow while pages are mapped.
#: On an H100 it took 52 ms with this pause before they are, and 100 ms without.
_START_SECONDS = 0.05
_THREAD_NAME = "memload-fill"
#: How long `Filler.close` waits for the thread.
_CLOSE_SECONDS = 5.0
#: RAM that is left to everything else. With less, a host's OOM killer struck.
_RESERVE_BYTES = 3 << 30

logger = logging.getLogger("memload")


class HeldFile:
    """A file whose first ``held`` bytes are registered with CUDA, and ``planned`` will be.

    It is mapped once more, shared and read-only, from ``address`` on, as CUDA cannot register the
    private maps of `Shards`. All Loaders of a process share it; processes share the pages. Once
    nobody refers to it any more, its memory is let go. Raises FeedError if it cannot be mapped.
    """

    def __init__(self, path: Path, descriptor: int, size: int) -> None:
        self.path, self.size = path, size
        self.held = self.planned = 0
        #: ``held`` and the window that is being registered: what counts as used RAM.
        self.mapped = 0
        try:
            memory = mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ)
        except OSError as error:
            raise FeedError(f"{path} cannot be mapped: {error.strerror}.") from error
        self.address = int(np.frombuffer(memory, np.uint8).ctypes.data)
        self._lock = threading.Lock()
        self._windows: list[int] = []
        weakref.finalize(self, _unregister, memory, self._windows, os.getpid())

    def probe(self, device: torch.device) -> None:
        """Register a page as a trial. Raises FeedError, since some file systems refuse."""
        with self._lock, torch.cuda.device(device):
            if self.planned and not self.held:
                register(self.address, min(mmap.PAGESIZE, self.size))
                unregister(self.address)

    def hold(self, start: int, size: int, device: torch.device) -> None:
        """Register pages from byte ``start`` on, which are in RAM. Raises FeedError."""
        with self._lock, torch.cuda.device(device):
            if self.held == start:  # the thread of another Loader may have been faster
                try:
                    register(self.address + start, size)
                except FeedError as error:
                    raise FeedError(f"{self.path}: {error}") from None
                self._windows.append(self.address + start)
                self.held += size


def _unregister(_memory: mmap.mmap, windows: Sequence[int], process: int) -> None:
    """Let go of registered pages. ``_memory`` keeps them mapped until then."""
    for address in windows if os.getpid() == process else ():
        unregister(address)


#: The files that Loaders of this process hold, by identity.
_files: weakref.WeakValueDictionary[tuple[int, ...], HeldFile] = weakref.WeakValueDictionary()
_files_lock = threading.Lock()


def _held_files() -> list[HeldFile]:
    # Unlike an iteration, a list of references cannot be disturbed by other threads.
    return [file for reference in _files.valuerefs() if (file := reference()) is not None]


def plan_files(
    arrays: Sequence[SampleArray], budget: float, device: torch.device
) -> list[list[HeldFile]]:
    """Return the files of each array, and plan to hold as much of them as a budget of RAM allows.

    The budget, in bytes, is for all Loaders of the process: what is planned for one is not free for
    others. If it is not enough, the same share of each new file is planned. Files that others hold
    already stay as they are, and of files without used rows nothing is planned. Raises FeedError if
    pages cannot be registered.
    """
    with _files_lock:
        files = [_files_of(array.shards) for array in arrays]
        used = [
            of_array[number]
            for array, of_array in zip(arrays, files, strict=True)
            for number in array.used_shards
        ]
        new = [file for file in used if not file.planned]
        free = max(0.0, budget - sum(file.planned for file in _held_files()))
        share = min(1.0, free / max(1, sum(file.size for file in new)))
        for file in new:
            pages = int(share * file.size) // mmap.PAGESIZE
            file.planned = file.size if share == 1 else pages * mmap.PAGESIZE
    for file in used:
        file.probe(device)
    return files


def _files_of(shards: Shards) -> list[HeldFile]:
    """Return the files that other Loaders of this process read already, and map others."""
    files = []
    for path, descriptor, shard in zip(
        shards.paths, shards.descriptors, shards.array.shards, strict=True
    ):
        state = os.fstat(descriptor)
        identity = state.st_dev, state.st_ino, state.st_mtime_ns
        file = _files.get(identity)
        if file is None:
            file = _files[identity] = HeldFile(path, descriptor, shard.bytes)
        files.append(file)
    return files


def ram_budget(cache_bytes: int | None) -> int:
    """Return how much RAM rows may take: half of what is available, or what was asked for.

    Never so much that less than 3 GiB, or half of the available RAM, would be left.
    """
    available = available_memory() or 0
    if cache_bytes is None:
        return available // 2
    return min(cache_bytes, available - min(_RESERVE_BYTES, available // 2))


class Filler:
    """A thread that brings in what is planned of some files, window by window, with helpers.

    The helpers map the pages of a window, and register the window before it meanwhile. While
    batches wait for rows, as ``is_waited_for()`` says, little is read at a time, by one helper, and
    then the disk is left to them. The thread ends early if RAM runs short, pages cannot be
    registered or a file cannot be read. Then a warning says why, and ``problem`` as well.
    """

    def __init__(
        self,
        files: Sequence[HeldFile],
        device: torch.device,
        is_waited_for: Callable[[], bool],
    ) -> None:
        self._files, self._device, self._is_waited_for = files, device, is_waited_for
        self.problem = ""
        # Less than the reserve where there is little RAM: batches use a part of the reserve, and a
        # budget of half of the RAM could never be used up.
        self._least_left = min(_RESERVE_BYTES, (available_memory() or 0) // 4)
        #: How much may be held, and until when, before the available RAM is looked at again.
        self._unchecked_bytes, self._next_check = 0, 0.0
        self._step = _STEP_BYTES
        self._stop = threading.Event()
        # Not an executor: its `submit` holds a lock of the whole process. A collection of garbage
        # may run inside of it and close another Filler, which would wait for the lock.
        self._tasks: SimpleQueue[Any] = SimpleQueue()
        self._registering: Future[None] | None = None
        self._thread = _new_thread(self._run)
        helpers = [_new_thread(_work, self._tasks) for _ in range(_THREADS)]
        with starting_threads("use feed='pinned' with num_threads=0"):
            for thread in (*helpers, self._thread):
                thread.start()

    def _submit(self, function: Callable[..., Any], *arguments: object) -> Future[Any]:
        """Let a helper call a function."""
        future: Future[Any] = Future()
        self._tasks.put((future, function, *arguments))
        return future

    def close(self) -> None:
        """End the thread after the step that it is at, which lets go of the files."""
        self._stop.set()
        if threading.current_thread().name != _THREAD_NAME:
            # A collection of garbage may call this while its thread has a lock that the other one
            # needs. So do not wait without end.
            self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            self._stop.wait(_START_SECONDS)
            for file in self._files:
                start = file.held
                # The thread of another Loader may make the plan smaller at any time.
                while start < (planned := file.planned) and not self._stop.is_set():
                    size = min(WINDOW_BYTES, planned - start)
                    self._hold_window(file, start, size)
                    start += size
            self._wait_for_registering()
        except (FeedError, OSError, RuntimeError) as error:  # torch raises RuntimeError
            with contextlib.suppress(FeedError, RuntimeError):
                self._wait_for_registering()
            self.problem = f"No more rows are held in RAM, and the others are read: {error}"
            logger.warning("%s", self.problem)
            for file in self._files:
                file.planned = file.mapped = file.held
        finally:
            self._files = ()
            for _ in range(_THREADS):
                self._tasks.put(None)

    def _hold_window(self, file: HeldFile, start: int, size: int) -> None:
        """Read a window of a file, and begin to register it."""
        self._check_memory(size)
        try:
            self._read(file.address + start, size)
        except OSError as error:
            raise FeedError(f"{file.path} cannot be read: {error.strerror}") from error
        self._wait_for_registering()
        if not self._stop.is_set():
            file.mapped = max(file.mapped, start + size)
            self._registering = self._submit(file.hold, start, size, self._device)

    def _wait_for_registering(self) -> None:
        """Wait for the window that is being registered, if there is one. Raises FeedError."""
        if self._registering is not None:
            try:
                self._registering.result()
            finally:
                self._registering = None  # its error refers to this frame

    def _check_memory(self, needed: int) -> None:
        """Raise FeedError if the system would be left with too little RAM.

        It looks once a second, or when half of what was left is used. Each look opens files, and
        waits for the GIL at each of them: 27 ms beside a thread that is busy in Python.
        """
        self._unchecked_bytes -= needed
        if self._unchecked_bytes >= 0 and time.perf_counter() < self._next_check:
            return
        held = sum(file.mapped for file in _held_files())
        left = max(0, (available_memory() or 0) - held)  # registered pages still count as available
        if left - needed < self._least_left:
            raise FeedError(
                f"{size_text(left)} of RAM are left beside the {size_text(held)} that are held, "
                f"and {size_text(self._least_left)} have to be. Free some RAM, or use cache_bytes "
                f"of at most {size_text(held)}."
            )
        self._unchecked_bytes = (left - needed - self._least_left) // 2
        self._next_check = time.perf_counter() + 1

    def _read(self, address: int, size: int) -> None:
        """Read pages of a mapped file. Ends early if the thread is to end."""
        stop = address + size
        while address < stop and not self._stop.is_set():
            began, end = time.perf_counter(), min(address + self._step, stop)
            was_on_disk = self._fault_in(address, end)
            address = end
            # After each step the thread waits for the GIL, so take more while all is in RAM.
            self._step = min(2 * self._step, WINDOW_BYTES)
            if was_on_disk:
                self._step = _STEP_BYTES
                if self._is_waited_for():
                    self._stop.wait(_PAUSE * (time.perf_counter() - began))

    def _fault_in(self, address: int, end: int) -> bool:
        """Read pages between two addresses on the threads for that. Raises OSError.

        Returns whether some of them were on the disk.
        """
        pieces = range(address, end, max(_STEP_BYTES, self._step // _THREADS))
        futures = [
            self._submit(_read_pages, start, min(pieces.step, end - start)) for start in pieces
        ]
        was_on_disk = False
        while futures:  # an error refers to this frame, which must not refer to the error
            was_on_disk |= futures.pop().result()
        return was_on_disk


def _new_thread(function: Callable[..., None], *arguments: object) -> threading.Thread:
    return threading.Thread(target=function, args=arguments, name=_THREAD_NAME, daemon=True)


def _work(tasks: SimpleQueue[Any]) -> None:
    """Carry out tasks until one is None: a future for the result, a function and its arguments."""
    while (task := tasks.get()) is not None:
        future, function, *arguments = task
        try:
            future.set_result(function(*arguments))
        except Exception as error:  # noqa: BLE001  # raised by whoever takes the result
            future.set_exception(error)
        del task, future, function, arguments  # they may hold a file


def _read_pages(address: int, size: int) -> bool:
    """Read pages, and return whether some of them were on the disk. Raises OSError."""
    reads_before = disk_reads()
    fault_in(address, size)
    return disk_reads() > reads_before
