"""Map a whole file into memory, copy-on-write."""

import ctypes
import errno
import mmap
import os
import stat
import sys
from pathlib import Path
from typing import Any

import numpy as np

# Without it Linux refuses to map a file that is larger than RAM and swap together, since a private
# writable mapping could come to need that much. The constant is in `mmap` from Python 3.13 on.
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


def map_file(path: Path) -> np.ndarray:
    """Return the bytes of a file as a uint8 array ``(size,)``, mapped, not copied.

    The array can be written to: what is written stays in this process and never reaches the file. All
    processes share one copy of what is only read. The mapping ends with the last reference to the array.
    Raises OSError, at once where it is a pipe or a device, and ValueError where the file is empty.
    """
    flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(
        path, flags | getattr(os, "O_NONBLOCK", 0)
    )  # not waiting for somebody to write into a pipe
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is a folder, a pipe or a device")
        if sys.platform == "win32":
            mapped = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
        else:
            flags = mmap.MAP_PRIVATE | _NORESERVE
            mapped = mmap.mmap(descriptor, 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(descriptor)
    return np.frombuffer(mapped, np.uint8)


def identity(file: Path | str | int) -> tuple[int, ...] | None:
    """Return numbers that another file, or this one once it was written to, does not have; None if there is none."""
    try:
        found = os.stat(file)  # noqa: PTH116  # half the time of a Path's own, before every batch
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def forget(mapped: np.ndarray) -> None:
    """Let go of a mapped file's pages in this process; they stay in the page cache, and come back when touched.

    Only for a map that has not been written to: what was written would be gone.
    """
    found = find_map(mapped)
    if found is not None and hasattr(mmap, "MADV_DONTNEED"):
        found.madvise(mmap.MADV_DONTNEED)


def will_need(mapped: np.ndarray, start: int, size: int) -> None:
    """Ask for bytes of the file to be read into the page cache, without waiting; nothing where that cannot be."""
    found = find_map(mapped)
    if found is not None and hasattr(mmap, "MADV_WILLNEED"):
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        found.madvise(mmap.MADV_WILLNEED, first, start + size - first)


#: MADV_POPULATE_READ, Linux 5.14. Python's mmap does not have it, nor lets other threads run meanwhile.
_POPULATE_READ = 22
_madvise: Any = None
if sys.platform == "linux":
    _madvise = ctypes.CDLL(None, use_errno=True).madvise
    _madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
#: What the kernel says of a page that cannot be had: not in the file any more, not given by the disk, broken memory.
_NOT_THERE = (errno.EFAULT, errno.EIO, getattr(errno, "EHWPOISON", errno.EIO))


def fault_in(address: int, size: int) -> None:
    """Wait until mapped pages are in RAM. Raises OSError where they cannot be: touching them would be a bus error.

    Some 2 µs where they are there. Nothing is done on systems without such a call. Other threads run meanwhile.
    """
    first = address // mmap.PAGESIZE * mmap.PAGESIZE
    failed = _madvise is not None and _madvise(first, address + size - first, _POPULATE_READ)
    if failed and ctypes.get_errno() in _NOT_THERE:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def address_of(array: np.ndarray) -> int:
    """Return where an array lies in memory."""
    return int(array.__array_interface__["data"][0])


def find_map(array: np.ndarray) -> mmap.mmap | None:
    """Return the map that an array lies in, if it does in one."""
    base: object = array
    while isinstance(base, np.ndarray):
        base = base.base
    base = base.obj if isinstance(base, memoryview) else base
    return base if isinstance(base, mmap.mmap) else None
