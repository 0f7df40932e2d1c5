"""The page cache registered with CUDA, so that the device reads the pages of files by itself.

    shards ─▶ shared, read-only maps ─▶ windows, registered by a thread ─▶ addresses for the GPU

Each file is mapped once more, shared and read-only, as CUDA cannot register the private maps of
`Shards`. It is registered in windows of 256 MiB, and only those windows that hold rows in use. All
Loaders of a process share the registration of a file; processes share the pages themselves.
"""

import contextlib
import ctypes
import itertools
import logging
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from memload.errors import FeedError, FormatError
from memload.feeds.interface import Fetch, Samples, require_cuda
from memload.feeds.pinned import PinnedFeed, register, unregister
from memload.storage.format import HEADER_BYTES
from memload.storage.mapping import fault_in
from memload.storage.shards import Shards
from memload.upload import upload

#: Bytes registered at a time: 3 ms if they are in RAM (12.5 ms a gigabyte on one H200's host).
WINDOW_BYTES = 256 << 20
_PORTABLE, _READ_ONLY = 1, 8  # cudaHostRegisterPortable (for all devices), cudaHostRegisterReadOnly
#: How long `Pages.close` waits for the thread, which may be reading a window from a slow disk.
_CLOSE_SECONDS = 30.0
#: The size of a staging buffer, of which there are two, for rows that are not registered yet.
_STAGING_BYTES = 8 << 20

#: ``copy_batch(start, stop, out)`` copies rows ``start`` to ``stop`` of a chunk into ``out``
#: ``(stop - start, H, W, C)``, on the current stream.
CopyBatch = Callable[[int, int, Tensor], None]


class PageCacheFeed:
    """The common part of the feeds whose device reads the page cache: `DmaFeed` and `UvaFeed`.

    They differ in who copies; see `_plan_chunk`. While a thread registers the windows, each batch
    is copied in both ways: the device reads the rows whose windows are registered, and the others
    come through `PinnedFeed`. Once all windows are registered, the device reads every row, and
    `PinnedFeed` is closed.
    """

    name: ClassVar[str]

    def __init__(self, samples: Samples, device: torch.device, *, num_threads: int) -> None:
        require_cuda(self.name, device)
        self._load_library()
        self._samples, self.device = samples, device
        self._row_bytes = samples.shards.array.row_bytes
        self._pinned = PinnedFeed(samples, device, num_threads=num_threads, callers=1, soft_limit=2)
        self._pages = Pages(samples.shards, samples.used_rows(), device)

    def prepare(self, samples: np.ndarray) -> Fetch:
        """See `Feed.prepare`. Fetching blocks for rows that are not registered yet."""
        rows = self._samples.row[samples]
        columns = [upload(column[samples], self.device) for column in self._samples.columns]
        shards, shape, dtype = self._samples.shards, self._samples.shape, self._samples.dtype
        copy_batch: CopyBatch | None = None

        def fetch(start: int, stop: int) -> list[Tensor]:
            nonlocal copy_batch
            shards.check_sizes(range(len(shards.maps)))
            if copy_batch is None and self._pages.complete:
                copy_batch = self._plan_chunk(rows)
                # Others may still fetch from it: close() only drops what it keeps.
                self._pinned.close()
            out = torch.empty(shape(stop - start), dtype=dtype, device=self.device)
            if copy_batch is not None:
                copy_batch(start, stop, out)
            else:
                self._copy_both_ways(rows[start:stop], out)
            return [out, *(column[start:stop] for column in columns)]

        return fetch

    def close(self) -> None:
        """See `Feed.close`."""
        self._pages.close()
        self._pinned.close()

    def _load_library(self) -> None:
        """Load what copies. Raises FeedError if a library or driver for it is missing."""
        raise NotImplementedError

    def _plan_chunk(self, rows: np.ndarray) -> CopyBatch:
        """Return a function that copies some of these rows, all of them registered."""
        raise NotImplementedError

    def _copy_both_ways(self, rows: np.ndarray, out: Tensor) -> None:
        """Copy one batch: registered rows from the page cache, the others through the CPU."""
        is_registered = self._pages.are_registered(rows)
        registered = np.flatnonzero(is_registered)
        if len(registered) == len(rows):
            self._plan_chunk(rows)(0, len(rows), out)
            return
        pixels = torch.empty(
            self._samples.shape(len(registered)), dtype=self._samples.dtype, device=self.device
        )
        self._plan_chunk(rows[registered])(0, len(registered), pixels)
        self._scatter(pixels, registered, out)
        missing = np.flatnonzero(~is_registered)
        rows_per_buffer = max(1, _STAGING_BYTES // self._row_bytes)
        for start in range(0, len(missing), rows_per_buffer):
            positions = missing[start : start + rows_per_buffer]
            self._scatter(self._pinned.fetch_rows(rows[positions]), positions, out)

    def _scatter(self, pixels: Tensor, positions: np.ndarray, out: Tensor) -> None:
        """Copy pixels to positions of a batch, on the device."""
        source = pixels.view(torch.uint8).view(len(positions), self._row_bytes)
        target = out.view(torch.uint8).view(len(out), self._row_bytes)
        target.index_copy_(0, upload(positions, self.device), source)


class Pages:
    """The registered windows that hold some rows (int64).

    Registering goes on in a thread. Raises FeedError if the pages cannot be registered.
    """

    def __init__(self, shards: Shards, rows: np.ndarray, device: torch.device) -> None:
        shards.check_sizes(range(len(shards.maps)))
        row_bytes = shards.array.row_bytes
        if row_bytes > WINDOW_BYTES:
            raise FeedError(
                f"rows of {row_bytes:,} bytes are too large to register: the limit is "
                f"{WINDOW_BYTES:,} bytes. Use feed='pinned'."
            )
        self.windows = Windows(shards)
        self._used = self.windows.used_by(rows)
        self._device = device
        expected = zip(shards.paths, shards.descriptors, shards.array.shards, strict=True)
        self._files = [
            _shared_file(path, descriptor, shard.bytes) for path, descriptor, shard in expected
        ]
        self._addresses = np.array([file.address for file in self._files], np.int64)
        self._complete = False
        self._files[0].probe(device)
        stop = threading.Event()
        self._thread = threading.Thread(
            target=_register_windows,
            args=(self._files, self.windows.by_file(self._used), device, stop),
            name="memload-register",
            daemon=True,
        )
        self._thread.start()
        self._stop_thread = weakref.finalize(self, _stop, stop, self._thread, os.getpid())

    @property
    def complete(self) -> bool:
        """Whether the device can read every window that is used."""
        if not self._complete:
            self._complete = bool(self._registered()[self._used].all())
        return self._complete

    def are_registered(self, rows: np.ndarray) -> np.ndarray:
        """Return whether the device can read each row: bool ``(N,)``."""
        first, last = self.windows.first_and_last(rows)
        registered = self._registered()
        return np.asarray(registered[first] & registered[last])

    def addresses(self, rows: np.ndarray) -> np.ndarray:
        """Return the address of each row, int64 ``(N,)``, for reading on the current stream.

        Before the pages are unregistered, `close` waits for that stream.
        """
        stream = torch.cuda.current_stream(self._device)
        for file in self._files:
            file.readers.add(stream)
        shard, offset = self.windows.shard_and_offset(rows)
        return np.asarray(self._addresses[shard] + offset)

    def copy_all(self, out: Tensor) -> None:
        """Copy all rows of all files, as bytes, into ``out`` (uint8), on the current stream."""
        stream, copied = torch.cuda.current_stream(self._device), 0
        for file in self._files:
            file.readers.add(stream)
            for window in range(len(file.registered)):
                with contextlib.suppress(FeedError):  # then it is copied more slowly
                    file.register(window, self._device)
                first = max(window * WINDOW_BYTES, HEADER_BYTES)
                size = min((window + 1) * WINDOW_BYTES, len(file.bytes)) - first
                # Made from the address, as torch warns of arrays that cannot be written to.
                window_bytes = (ctypes.c_uint8 * size).from_address(file.address + first)
                pixels = torch.from_numpy(np.ctypeslib.as_array(window_bytes))
                out[copied : copied + size].copy_(pixels, non_blocking=True)
                copied += size

    def close(self) -> None:
        """Stop registering and drop the files. The last Loader of a file unregisters its pages."""
        self._stop_thread()
        self._files = []

    def _registered(self) -> np.ndarray:
        return np.concatenate([file.registered for file in self._files])


class Windows:
    """Which windows of their files rows lie in. Windows are numbered through all files."""

    def __init__(self, shards: Shards) -> None:
        self._shards, self._row_bytes = shards, shards.array.row_bytes
        self._first_row = np.array(shards.starts[:-1])
        sizes = [
            np.diff([*range(0, shard.bytes, WINDOW_BYTES), shard.bytes])
            for shard in shards.array.shards
        ]
        #: The bytes of each window. The last one of a file is smaller than `WINDOW_BYTES`.
        self.sizes = np.concatenate(sizes)
        #: The first window of each file, and behind them the number of all windows.
        self._first_window = np.cumsum([0, *map(len, sizes)])

    def shard_and_offset(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the shard of each row (int64), and the offset of the row in its file in bytes."""
        shard = self._shards.shard_of(rows)
        return shard, HEADER_BYTES + (rows - self._first_row[shard]) * self._row_bytes

    def first_and_last(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the windows of the first and the last byte of each row, often the same."""
        shard, offset = self.shard_and_offset(rows)
        first_window, end = self._first_window[shard], offset + self._row_bytes - 1
        return first_window + offset // WINDOW_BYTES, first_window + end // WINDOW_BYTES

    def bytes_before_boundary(self, rows: np.ndarray) -> np.ndarray:
        """Return how many bytes of each row lie in its first window if it has two, else 0."""
        _, offset = self.shard_and_offset(rows)
        boundary = (offset + self._row_bytes - 1) // WINDOW_BYTES * WINDOW_BYTES
        return np.asarray(np.maximum(boundary - offset, 0))

    def used_by(self, rows: np.ndarray) -> np.ndarray:
        """Return whether each window holds bytes of the rows: bool, one for each window."""
        used = np.zeros(len(self.sizes), bool)
        for window in self.first_and_last(rows):
            used[window] = True
        return used

    def by_file(self, used: np.ndarray) -> list[list[int]]:
        """Return the numbers of the used windows of each file, counted from the file's first."""
        return [
            np.flatnonzero(used[first:stop]).tolist()
            for first, stop in itertools.pairwise(self._first_window.tolist())
        ]


def bytes_to_register(shards: Shards, rows: np.ndarray) -> int:
    """Return the size of the windows that hold some rows, which `Pages` would register."""
    windows = Windows(shards)
    return int(windows.sizes[windows.used_by(rows)].sum())


class RegisteredFile:
    """One shard, mapped shared and read-only, and which of its windows are registered."""

    def __init__(self, path: Path, descriptor: int, size: int) -> None:
        self.path = path
        mapped = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        self.bytes = np.frombuffer(mapped, np.uint8)
        self.address = self.bytes.ctypes.data
        self.registered = np.zeros(-(-size // WINDOW_BYTES), bool)
        #: The streams that may be reading the pages.
        self.readers: set[torch.cuda.Stream] = set()
        self._lock = threading.Lock()
        weakref.finalize(
            self, _unregister_all, self.bytes, self.registered, self.readers, os.getpid()
        )

    def probe(self, device: torch.device) -> None:
        """Raise FeedError if a page cannot be registered, as on some file systems."""
        with self._lock, torch.cuda.device(device):
            if not self.registered.any():
                self._register(0, min(mmap.PAGESIZE, len(self.bytes)))
                unregister(self.address)

    def register(self, window: int, device: torch.device) -> None:
        """Read a window from the disk and register it. Raises FeedError and FormatError."""
        if self.registered[window]:
            return
        start = window * WINDOW_BYTES
        pages = self.bytes[start : start + WINDOW_BYTES]
        # Read the pages now: CUDA would do so while it holds a lock that kernel launches need.
        try:
            fault_in(self.address + start, len(pages))
        except OSError as error:  # touching the pages would end the process
            raise FormatError(
                f"{self.path} cannot be read: {error.strerror}. Check the disk, then restore the "
                "file or run 'memload build' again.",
                path=self.path,
            ) from error
        with self._lock, torch.cuda.device(device):
            if not self.registered[window]:
                self._register(start, len(pages))
                self.registered[window] = True

    def _register(self, start: int, size: int) -> None:
        try:
            register(self.address + start, size, _PORTABLE | _READ_ONLY)
        except FeedError as error:
            raise FeedError(
                f"the pages of {self.path} cannot be registered with CUDA, perhaps because of its "
                f"file system ({error}). Use feed='pinned'."
            ) from None


#: The files that Loaders of this process read, by identity.
_files: weakref.WeakValueDictionary[tuple[int, ...], RegisteredFile] = weakref.WeakValueDictionary()
_files_lock = threading.Lock()


def identity_of(descriptor: int) -> tuple[int, ...]:
    """Return what tells an open file, in this process, from every other file."""
    status = os.fstat(descriptor)
    return os.getpid(), status.st_dev, status.st_ino, status.st_mtime_ns


def _shared_file(path: Path, descriptor: int, size: int) -> RegisteredFile:
    """Return the file that other Loaders of this process read already, or map it."""
    identity = identity_of(descriptor)
    with _files_lock:
        file = _files.get(identity)
        if file is None:
            try:
                file = RegisteredFile(path, descriptor, size)
            except OSError as error:
                raise FeedError(f"{path} cannot be mapped: {error.strerror}.") from error
            _files[identity] = file
        return file


def _register_windows(
    files: Sequence[RegisteredFile],
    windows_of_files: Sequence[list[int]],
    device: torch.device,
    stop: threading.Event,
) -> None:
    for file, windows in zip(files, windows_of_files, strict=True):
        for window in windows:
            if stop.is_set():
                return
            try:
                file.register(window, device)
            except (FeedError, FormatError) as error:
                # The CPU copies these rows, and raises an error for those that it cannot read.
                logging.getLogger("memload").warning("%s", error)
                break


def _stop(stop: threading.Event, thread: threading.Thread, process: int) -> None:
    stop.set()
    if os.getpid() == process and thread is not threading.current_thread():
        thread.join(_CLOSE_SECONDS)


def _unregister_all(
    mapped: np.ndarray, registered: np.ndarray, readers: set[torch.cuda.Stream], process: int
) -> None:
    if os.getpid() != process:
        return
    for stream in readers:
        stream.synchronize()
    for window in np.flatnonzero(registered).tolist():
        unregister(mapped.ctypes.data + window * WINDOW_BYTES)
    registered[:] = False
