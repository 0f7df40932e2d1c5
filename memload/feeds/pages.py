"""The page cache registered with CUDA, so that the device reads the pages of files by itself.

    shards ─▶ shared, read-only maps ─▶ windows, registered by a thread ─▶ addresses for the GPU

Each file is mapped once more, shared and read-only, as CUDA cannot register the private maps of
`Shards`. It is registered in windows of 256 MiB, and only those windows that hold rows in use. All
Loaders of a process share the registration of a file; processes share the pages themselves.
"""

import contextlib
import ctypes
import logging
import math
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
from memload.machine import starting_threads
from memload.storage.mapping import fault_in
from memload.storage.shards import Shards
from memload.upload import upload

#: Bytes registered at a time: 3 ms if they are in RAM (12.5 ms a gigabyte on one H200's host).
WINDOW_BYTES = 256 << 20
_PORTABLE, _READ_ONLY = 1, 8  # cudaHostRegisterPortable (for all devices), cudaHostRegisterReadOnly
#: How long `Pages.close` waits for the thread, which may be reading a window from a slow disk.
_CLOSE_SECONDS = 30.0

#: ``copy_batch(start, stop, out)`` copies rows ``start`` to ``stop`` of a chunk into ``out``
#: ``(stop - start, …)``, on the current stream.
CopyBatch = Callable[[int, int, Tensor], None]


class PageCacheFeed:
    """The common part of the feeds whose device reads the page cache: `DmaFeed` and `UvaFeed`.

    They differ in who copies; see `_prepare_copies`. While a thread registers the windows, batches
    come through `PinnedFeed`. Once all windows are registered, the device reads every row, and
    `PinnedFeed` is closed. If a window cannot be registered, a warning says so, and all batches
    come through `PinnedFeed`.
    """

    name: ClassVar[str]

    def __init__(self, samples: Samples, device: torch.device, *, num_threads: int) -> None:
        require_cuda(self.name, device)
        self._load_library()
        self._samples, self.device = samples, device
        self._row_bytes = samples.shards.array.row_bytes
        self._pinned = PinnedFeed(samples, device, num_threads=num_threads, callers=1)
        self._pages = Pages(samples.shards, samples.used_rows(), device)

    def prepare(self, samples: np.ndarray) -> Fetch:
        """See `Feed.prepare`. Until all pages are registered, batches come through `PinnedFeed`."""
        rows = self._samples.row[samples]
        columns = [upload(column[samples], self.device) for column in self._samples.columns]
        shards, shape, dtype = self._samples.shards, self._samples.shape, self._samples.dtype
        copy_batch: CopyBatch | None = None

        def fetch(start: int, stop: int) -> list[Tensor]:
            nonlocal copy_batch
            if copy_batch is None and self._pages.complete.is_set():
                copy_batch = self._prepare_copies(rows)
                # Other threads may still be fetching from it. close() does not interrupt them.
                self._pinned.close()
            if copy_batch is None:
                pixels = self._pinned.fetch_rows(rows[start:stop])
            else:
                shards.check_sizes(range(len(shards.maps)))
                pixels = torch.empty(shape(stop - start), dtype=dtype, device=self.device)
                copy_batch(start, stop, pixels)
            return [pixels, *(column[start:stop] for column in columns)]

        return fetch

    def close(self) -> None:
        """See `Feed.close`."""
        self._pages.close()
        self._pinned.close()

    def _load_library(self) -> None:
        """Load what copies. Raises FeedError if a library or driver for it is missing."""
        raise NotImplementedError

    def _prepare_copies(self, rows: np.ndarray) -> CopyBatch:
        """Return a function that copies some of these rows, all of them registered."""
        raise NotImplementedError


class Pages:
    """The registered windows that hold some rows (int64).

    Registering goes on in a thread, which sets ``complete`` once the device can read every row.
    Raises FeedError if the pages cannot be registered.
    """

    def __init__(self, shards: Shards, rows: np.ndarray, device: torch.device) -> None:
        shards.check_sizes(range(len(shards.maps)))
        row_bytes = shards.array.row_bytes
        if row_bytes > WINDOW_BYTES:
            raise FeedError(
                f"rows of {row_bytes:,} bytes are too large to register: the limit is "
                f"{WINDOW_BYTES:,} bytes. Use feed='pinned'."
            )
        self.complete = threading.Event()
        self._shards, self._device = shards, device
        expected = zip(shards.paths, shards.descriptors, shards.array.shards, strict=True)
        self._files = [
            _shared_file(path, descriptor, shard.bytes) for path, descriptor, shard in expected
        ]
        self._addresses = np.array([file.address for file in self._files], np.int64)
        self._files[0].probe(device)
        stop = threading.Event()
        self._thread = threading.Thread(
            target=_register_windows,
            args=(self._files, windows_used(shards, rows), device, stop, self.complete),
            name="memload-register",
            daemon=True,
        )
        with starting_threads("use feed='pinned' with num_threads=0"):
            self._thread.start()
        self._stop_thread = weakref.finalize(self, _stop, stop, self._thread)

    def addresses(self, rows: np.ndarray) -> np.ndarray:
        """Return the address of each row, int64 ``(N,)``, for reading on the current stream.

        Before the pages are unregistered, `close` waits for that stream.
        """
        stream = torch.cuda.current_stream(self._device)
        for file in self._files:
            file.readers.add(stream)
        shard, offset = _shard_and_offset(self._shards, rows)
        return np.asarray(self._addresses[shard] + offset)

    def copy_all(self, out: Tensor) -> None:
        """Copy all rows of all files, as bytes, into ``out`` (uint8), on the current stream."""
        stream, copied = torch.cuda.current_stream(self._device), 0
        header_bytes = self._shards.array.header_bytes
        for file in self._files:
            file.readers.add(stream)
            for window in range(len(file.registered)):
                with contextlib.suppress(FeedError):  # then it is copied more slowly
                    file.register(window, self._device)
                first = max(window * WINDOW_BYTES, header_bytes)
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


def windows_used(shards: Shards, rows: np.ndarray) -> np.ndarray:
    """Return which windows hold bytes of some rows: bool (files, windows of the largest file)."""
    largest = max(shard.bytes for shard in shards.array.shards)
    used = np.zeros((len(shards.maps), math.ceil(largest / WINDOW_BYTES)), bool)
    shard, offset = _shard_and_offset(shards, rows)
    used[shard, offset // WINDOW_BYTES] = True
    used[shard, (offset + shards.array.row_bytes - 1) // WINDOW_BYTES] = True
    return used


def bytes_to_register(shards: Shards, rows: np.ndarray) -> int:
    """Return the size of the windows that hold some rows, which `Pages` would register."""
    used = windows_used(shards, rows)
    file_sizes = np.array([[shard.bytes] for shard in shards.array.shards])
    window_sizes = np.minimum(file_sizes - np.arange(used.shape[1]) * WINDOW_BYTES, WINDOW_BYTES)
    return int(window_sizes[used].sum())


def bytes_before_boundary(shards: Shards, rows: np.ndarray) -> np.ndarray:
    """Return how many bytes of each row lie in its first window if it has two, else 0."""
    _, offset = _shard_and_offset(shards, rows)
    boundary = (offset + shards.array.row_bytes - 1) // WINDOW_BYTES * WINDOW_BYTES
    return np.asarray(np.maximum(boundary - offset, 0))


def _shard_and_offset(shards: Shards, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the shard of each row (int64), and the offset of the row in its file in bytes."""
    shard = shards.shard_of(rows)
    row_in_shard = rows - np.array(shards.starts)[shard]
    return shard, shards.array.header_bytes + row_in_shard * shards.array.row_bytes


class RegisteredFile:
    """One shard, mapped shared and read-only, and which of its windows are registered."""

    def __init__(self, path: Path, descriptor: int, size: int) -> None:
        self.path = path
        mapped = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        self.bytes = np.frombuffer(mapped, np.uint8)
        self.address = self.bytes.ctypes.data
        self.registered = np.zeros(math.ceil(size / WINDOW_BYTES), bool)
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
    used: np.ndarray,
    device: torch.device,
    stop: threading.Event,
    complete: threading.Event,
) -> None:
    try:
        for file, windows in zip(files, used, strict=True):
            for window in np.flatnonzero(windows).tolist():
                if stop.is_set():
                    return
                file.register(window, device)
        complete.set()
    except (FeedError, FormatError) as error:
        # The CPU copies the rows, and raises an error for those that it cannot read.
        # As text: a log record may be kept, and the traceback would keep the files.
        logging.getLogger("memload").warning("%s", str(error))


def _stop(stop: threading.Event, thread: threading.Thread) -> None:
    stop.set()
    if thread is not threading.current_thread():
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
