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

from memload.errors import FeedError
from memload.feeds.budget import identity_of
from memload.feeds.page_locked import register, unregister
from memload.feeds.windows import WINDOW_BYTES

_PORTABLE, _READ_ONLY = 1, 8  # cudaHostRegisterPortable (for all devices), cudaHostRegisterReadOnly


class RegisteredFile:
    """One shard, mapped shared and read-only, and how much of each window is registered."""

    def __init__(self, path: Path, descriptor: int, size: int) -> None:
        self.path = path
        mapped = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        self.bytes = np.frombuffer(mapped, np.uint8)
        self.address = self.bytes.ctypes.data
        #: How many bytes of each window are registered, by the window.
        self.registered: dict[int, int] = {}
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

    def register(self, window: int, size: int, device: torch.device) -> int:
        """Register the first bytes of a window, whose pages are in RAM. Returns how many are.

        A window that is registered already stays as it is. Raises FeedError.
        """
        with self._lock, torch.cuda.device(device):
            if window not in self.registered:
                self._register(window * WINDOW_BYTES, size)
                self.registered[window] = size
        return min(size, self.registered[window])

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
            try:
                file = RegisteredFile(path, descriptor, size)
            except OSError as error:
                raise FeedError(f"{path} cannot be mapped: {error.strerror}.") from error
            _files[identity] = file
        return file


def registered_bytes() -> int:
    """Return how many bytes of RAM this process has registered, which the system cannot reclaim."""
    return sum(sum(file.registered.values()) for file in list(_files.values()))


def _unregister_all(
    mapped: np.ndarray, registered: dict[int, int], readers: set[torch.cuda.Stream], process: int
) -> None:
    if os.getpid() != process:
        return
    for stream in readers:
        stream.synchronize()
    for window in registered:
        unregister(mapped.ctypes.data + window * WINDOW_BYTES)
