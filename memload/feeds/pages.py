"""A data set's pages in the page cache, made known to CUDA so that the device can read them by itself.

Each shard is mapped once more, shared and read-only, and registered window by window from a thread. All Loaders of
a process that read the same file share its registration; processes share the pages themselves.
"""

import contextlib
import ctypes
import logging
import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from memload.errors import FeedError, FormatError
from memload.feeds.staging import register, unregister
from memload.storage.format import HEADER_BYTES
from memload.storage.mapping import fault_in, identity
from memload.storage.shards import Shards

#: Bytes registered at a time: 3 ms where they are in RAM (12.5 ms a gigabyte in all, one H200's host).
WINDOW_BYTES = 256 << 20
_PORTABLE, _READ_ONLY = 1, 8  # cudaHostRegisterPortable (for all devices), cudaHostRegisterReadOnly
#: How long closing waits for the thread, which may be reading a window from a slow disk.
_GRACE = 30.0


@dataclass(frozen=True)
class Places:
    """Where rows are: address, whether the device can read it, and the bytes before a boundary between windows.

    ``split`` is 0 for a row within one window. Arrays ``(N,)``.
    """

    address: np.ndarray
    ready: np.ndarray
    split: np.ndarray


class Pages:
    """The pages of some shards. Raises FeedError where they cannot be registered."""

    def __init__(self, shards: Shards, device: torch.device) -> None:
        row_bytes = shards.array.row_bytes
        if row_bytes > WINDOW_BYTES:
            raise FeedError(
                f"rows: expected at most {WINDOW_BYTES:,} bytes each to register pages, found {row_bytes:,}"
            )
        if not hasattr(mmap, "MAP_SHARED"):
            raise FeedError("registering pages: expected a system with shared maps, such as Linux")
        self._row_bytes, self._device = row_bytes, device
        self._files = [
            _open(path, known) for path, known in zip(shards.paths, shards.identities, strict=True)
        ]
        self._starts = np.array(shards.starts[:-1], np.int64)
        self._bases = np.array([file.address for file in self._files], np.int64)
        windows = [len(file.registered) for file in self._files]
        self._first_window = np.concatenate([[0], np.cumsum(windows)[:-1]]).astype(np.int64)
        self._complete = False
        for file in self._files[:1]:  # one page tells whether this filesystem's can be registered
            file.probe(device)
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=_register_all,
            args=(self._files, device, self._stop),
            name="memload-register",
            daemon=True,
        )
        self._thread.start()
        self._end = weakref.finalize(self, _end, self._stop, self._thread, os.getpid())

    def locate(self, rows: np.ndarray) -> Places:
        """Return where rows (int64) are, and note that the current stream reads them from now on."""
        shard = np.searchsorted(self._starts, rows, side="right") - 1 if len(self._files) > 1 else 0
        offset = HEADER_BYTES + (rows - self._starts[shard]) * self._row_bytes
        window, last = offset // WINDOW_BYTES, (offset + self._row_bytes - 1) // WINDOW_BYTES
        split = np.where(window == last, 0, last * WINDOW_BYTES - offset)
        registered = np.concatenate([file.registered for file in self._files])
        first = self._first_window[shard]
        ready = registered[first + window] & registered[first + last]
        self._note_reader()
        return Places(self._bases[shard] + offset, ready, split)

    def addresses(self, rows: np.ndarray) -> np.ndarray:
        """Return the addresses of rows alone, once all of them can be read by the device."""
        shard = np.searchsorted(self._starts, rows, side="right") - 1 if len(self._files) > 1 else 0
        self._note_reader()
        base = (self._bases + HEADER_BYTES - self._starts * self._row_bytes)[shard]
        return np.asarray(base + rows * self._row_bytes)

    def _note_reader(self) -> None:
        stream = torch.cuda.current_stream(self._device)
        for file in self._files:
            file.readers.add(stream)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all that can be registered is; return whether that is all there is."""
        self._thread.join(timeout)
        return all(file.registered.all() for file in self._files)

    @property
    def complete(self) -> bool:
        """Whether every row can be read by the device."""
        if not self._complete:
            self._complete = all(file.registered.all() for file in self._files)
        return self._complete

    def copy_all(self, out: torch.Tensor) -> None:
        """Copy the bytes of all rows, one shard after the other, into ``out`` (uint8), on the current stream."""
        for file, start in zip(self._files, self._starts.tolist(), strict=True):
            for window in range(len(file.registered)):
                with contextlib.suppress(
                    FeedError
                ):  # such a window is copied all the same, only more slowly
                    file.register(window, self._device)
                first = max(window * WINDOW_BYTES, HEADER_BYTES)
                size = min((window + 1) * WINDOW_BYTES, len(file.bytes)) - first
                # an array made of the address, since torch warns of one that must not be written to
                pages = np.ctypeslib.as_array(
                    (ctypes.c_uint8 * size).from_address(file.address + first)
                )
                at = start * self._row_bytes + first - HEADER_BYTES
                out[at : at + size].copy_(torch.from_numpy(pages), non_blocking=True)
            file.readers.add(torch.cuda.current_stream(self._device))

    def close(self) -> None:
        """Stop registering, and let go of the files: what no other Loader reads is unregistered."""
        self._end()
        self._files = []


class _File:
    """One shard's map, and which of its windows are registered."""

    def __init__(self, path: Path, known: tuple[int, ...] | None) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if identity(descriptor) != known:
                raise FeedError(
                    f"{path}: expected the file that was opened with the data set, found another one or one that was "
                    "written to since. Open the data set again"
                )
            mapped = mmap.mmap(descriptor, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        self.path = path
        self.bytes = np.frombuffer(mapped, np.uint8)
        self.address = self.bytes.ctypes.data
        self.registered = np.zeros(-(-len(self.bytes) // WINDOW_BYTES), bool)
        self.readers: set[torch.cuda.Stream] = set()  # that copies may be under way on
        self._lock = threading.Lock()
        weakref.finalize(self, _release, self.bytes, self.registered, self.readers, os.getpid())

    def probe(self, device: torch.device) -> None:
        with self._lock, torch.cuda.device(device):
            if not self.registered.any():
                _try(self.path, self.address, min(mmap.PAGESIZE, len(self.bytes)))
                unregister(self.address)

    def register(self, window: int, device: torch.device) -> None:
        if self.registered[window]:
            return
        start = window * WINDOW_BYTES
        pages = self.bytes[start : start + WINDOW_BYTES]
        # Pages are read from the disk here, not while CUDA holds locks that every kernel's launch needs too.
        try:
            fault_in(self.address + start, len(pages))
        except OSError as error:  # touching them would end the process
            raise FormatError(
                f"{self.path}: cannot be read: {error.strerror}", path=self.path
            ) from error
        np.add.reduce(pages[:: mmap.PAGESIZE], dtype=np.int64)  # on systems where that did nothing
        with self._lock, torch.cuda.device(device):
            if not self.registered[window]:
                _try(self.path, self.address + start, len(pages))
                self.registered[window] = True


_files: weakref.WeakValueDictionary[tuple[int, ...], _File] = weakref.WeakValueDictionary()
_files_lock = threading.Lock()


def _open(path: Path, known: tuple[int, ...] | None) -> _File:
    """Return the map of a file, that which another Loader has already if there is one."""
    with _files_lock:
        file = None if known is None else _files.get((os.getpid(), *known))
        if file is None:
            try:
                file = _File(path, known)
            except OSError as error:
                raise FeedError(f"{path}: cannot be mapped: {error}") from error
            if known is not None:
                _files[os.getpid(), *known] = file
        return file


def _try(path: Path, address: int, size: int) -> None:
    try:
        register(address, size, _PORTABLE | _READ_ONLY)
    except FeedError as error:
        raise FeedError(
            f"{path}: its pages cannot be registered, as its filesystem or CUDA refuses: {error}"
        ) from None


def _register_all(files: Sequence[_File], device: torch.device, stop: threading.Event) -> None:
    for file in files:
        for window in range(len(file.registered)):
            if stop.is_set():
                return
            try:
                file.register(window, device)
            except (
                FeedError,
                FormatError,
            ) as error:  # its rows go on coming by way of the CPU, which tells which fail
                logging.getLogger("memload").warning("%s", error)
                break


def _end(stop: threading.Event, thread: threading.Thread, process: int) -> None:
    stop.set()
    if os.getpid() == process and thread is not threading.current_thread():
        thread.join(_GRACE)


def _release(
    mapped: np.ndarray, registered: np.ndarray, readers: set[torch.cuda.Stream], process: int
) -> None:
    if os.getpid() != process:
        return
    for stream in readers:
        stream.synchronize()
    for window in np.flatnonzero(registered).tolist():
        unregister(mapped.ctypes.data + window * WINDOW_BYTES)
    registered[:] = False
