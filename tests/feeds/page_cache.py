"""Which pages of a file are in the page cache."""

import ctypes
import mmap
import os

import numpy as np
import pytest

PAGE = mmap.PAGESIZE


def look_for_pages(path):
    """Return which pages of a file are in the page cache. Unlike a read, mincore brings none in."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        found = np.zeros(-(-len(mapped) // PAGE), np.uint8)
        memory = np.frombuffer(mapped, np.uint8)
        address, size = ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(len(memory))
        del memory  # or the map cannot be closed
        if ctypes.CDLL(None).mincore(address, size, ctypes.c_void_p(found.ctypes.data)):
            pytest.skip("the system does not tell what it caches")
    return (found & 1).astype(bool).tolist()


def drop_pages(path):
    """Remove a file from the page cache."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
