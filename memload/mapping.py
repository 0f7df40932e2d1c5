"""Map a whole file into memory, copy-on-write."""

import mmap
import os
import sys
from pathlib import Path

import numpy as np

# Without it Linux refuses to map a file that is larger than RAM and swap together, since a private
# writable mapping could come to need that much. The constant is in `mmap` from Python 3.13 on.
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


def map_file(path: Path) -> np.ndarray:
    """Return the bytes of a file as a uint8 array ``(size,)``, mapped, not copied.

    The array can be written to: what is written stays in this process and never reaches the file. All
    processes share one copy of what is only read. The mapping ends with the last reference to the array.
    The file must not be empty. Raises OSError.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0))
    try:
        if sys.platform == "win32":
            mapped = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
        else:
            flags = mmap.MAP_PRIVATE | _NORESERVE
            mapped = mmap.mmap(descriptor, 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(descriptor)
    return np.frombuffer(mapped, np.uint8)


def identity(file: Path | int) -> tuple[int, ...] | None:
    """Return numbers that another file, or this one once it was written to, does not have; None if there is none."""
    try:
        found = os.fstat(file) if isinstance(file, int) else file.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def forget(mapped: np.ndarray) -> None:
    """Let go of a mapped file's pages in this process; they stay in the page cache, and come back when touched.

    Only for a map that has not been written to: what was written would be gone.
    """
    found = _mmap_of(mapped)
    if found is not None and hasattr(mmap, "MADV_DONTNEED"):
        found.madvise(mmap.MADV_DONTNEED)


def will_need(mapped: np.ndarray, start: int, size: int) -> None:
    """Ask for bytes of the file to be read into the page cache, without waiting; nothing where that cannot be."""
    found = _mmap_of(mapped)
    if found is not None and hasattr(mmap, "MADV_WILLNEED"):
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        found.madvise(mmap.MADV_WILLNEED, first, start + size - first)


def _mmap_of(array: np.ndarray) -> mmap.mmap | None:
    base: object = array
    while isinstance(base, np.ndarray):
        base = base.base
    base = base.obj if isinstance(base, memoryview) else base
    return base if isinstance(base, mmap.mmap) else None
