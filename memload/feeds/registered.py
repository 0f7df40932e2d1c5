"""Files whose pages are registered with CUDA, so that the device reads the page cache by itself.

Each file is mapped once more, shared and read-only, as CUDA cannot register the private maps of
`Shards`. All Loaders of a process share the registration of a file; processes share the pages.
"""

import mmap
import os
import threading
import weakref
from pathlib import Path

import numpy as np
import torch

from memload.errors import FeedError, FormatError
from memload.feeds import windows
from memload.feeds.budget import claim_registered, identity_of
from memload.feeds.page_locked import register, unregister
from memload.storage.mapping import fault_in, map_shared

_PORTABLE, _READ_ONLY = 1, 8  # cudaHostRegisterPortable (for all devices), cudaHostRegisterReadOnly


class RegisteredFile:
    """One shard, mapped shared and read-only, and how much of each window is registered.

    Raises FeedError if the file cannot be mapped.
    """

    def __init__(self, path: Path, descriptor: int, size: int) -> None:
        self.path = path
        try:
            self.bytes = map_shared(descriptor, size)
        except OSError as error:
            raise FeedError(f"{path} cannot be mapped: {error.strerror}.") from error
        self.address = self.bytes.ctypes.data
        #: How many bytes are registered of each window, by where it begins in the file.
        self.registered: dict[int, int] = {}
        #: Counts what is registered, which stays so until the last Loader of the file is closed.
        self._claim = claim_registered(identity_of(descriptor), size)
        #: The streams that may be reading the pages.
        self.readers: set[torch.cuda.Stream] = set()
        self._lock = threading.Lock()
        weakref.finalize(
            self, _unregister_all, self.bytes, self.registered, self.readers, os.getpid()
        )

    def probe(self, device: torch.device) -> None:
        """Raise FeedError if a page cannot be registered, as on some file systems."""
        with self._lock, torch.cuda.device(device):
            if not self.registered:
                self._register(0, min(mmap.PAGESIZE, len(self.bytes)))
                unregister(self.address)

    def fault_in(self, start: int, size: int) -> None:
        """Read a part of the file into the page cache. Raises FormatError.

        The pages are read now, as CUDA would read them while it holds a lock that kernels need.
        """
        try:
            fault_in(self.address + start, size)
        except OSError as error:  # touching the pages would end the process
            raise FormatError(
                f"{self.path} cannot be read: {error.strerror}. Check the disk, then restore the "
                "file or run 'memload build' again.",
                path=self.path,
            ) from error

    def register(self, window: int, size: int, device: torch.device) -> int:
        """Register the first bytes of a window, whose pages are in RAM. Returns how many are.

        A window that is registered already is not registered again, even if it was with fewer
        bytes. Raises FeedError.
        """
        start = window * windows.WINDOW_BYTES
        with self._lock, torch.cuda.device(device):
            if start not in self.registered:
                self._register(start, size)
                self.registered[start] = self._claim.plan[0, window] = size
        return min(size, self.registered[start])

    def unregister(self, window: int) -> None:
        """Undo `register`. Nobody else uses the file, and no copy from the window is under way."""
        with self._lock:
            if self.registered.pop(window * windows.WINDOW_BYTES, 0):
                unregister(self.address + window * windows.WINDOW_BYTES)
                self._claim.plan[0, window] = 0

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


def shared_file(path: Path, descriptor: int, size: int) -> RegisteredFile:
    """Return the file that other Loaders of this process read already, or map it."""
    identity = identity_of(descriptor)
    with _files_lock:
        file = _files.get(identity)
        if file is None:
            file = _files[identity] = RegisteredFile(path, descriptor, size)
        return file


def registered_bytes() -> int:
    """Return how many bytes of RAM this process has registered, which the system cannot reclaim."""
    # Unlike an iteration, a list of references cannot be disturbed by other threads.
    files = [reference() for reference in _files.valuerefs()]
    return sum(sum(file.registered.values()) for file in files if file is not None)


def _unregister_all(
    mapped: np.ndarray, registered: dict[int, int], readers: set[torch.cuda.Stream], process: int
) -> None:
    if os.getpid() != process:
        return
    for stream in readers:
        stream.synchronize()
    for start in registered:
        unregister(mapped.ctypes.data + start)
