"""Map files into memory, and tell the kernel which pages are needed."""

import ctypes
import errno
import math
import mmap
import os
import sys
from collections.abc import Sequence

import numpy as np

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

# Without MAP_NORESERVE, Linux refuses to map a writable file that is larger than RAM and swap together.
# Python has the constant from 3.13 on.
_NORESERVE = 0x4000 if sys.platform == "linux" else 0
_MAP_FIXED = 0x10
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
#: Linux 5.14 and later. Python's mmap lacks it.
_MADV_POPULATE_READ = 22
#: The kernel cannot provide a page: the file has become shorter, the disk fails, or the memory is broken.
_UNAVAILABLE = (errno.EFAULT, errno.EIO, getattr(errno, "EHWPOISON", errno.EIO))


def map_side_by_side(
    descriptors: Sequence[int], sizes: Sequence[int], unit: int
) -> tuple[np.ndarray, list[int]]:
    """Map the first ``sizes[i]`` bytes of each file, all into one range of addresses.

    Returns the range as a uint8 array, and the offset of each file in it. Offsets are multiples of ``unit``, so that
    elements of ``unit`` bytes line up across files. The gaps between files take addresses, but no memory.

    The files are mapped copy-on-write: writing to the array changes neither the files nor what other processes see.
    The mapping ends with the last reference to the array; the descriptors may be closed before. Raises OSError or
    OverflowError if the range cannot be mapped.
    """
    step = math.lcm(mmap.PAGESIZE, unit)
    offsets, end = [], 0
    for size in sizes:
        offsets.append(-(-end // step) * step)
        end = offsets[-1] + size
    flags = mmap.MAP_PRIVATE | _NORESERVE
    addresses = mmap.mmap(-1, end, flags=flags | mmap.MAP_ANONYMOUS, prot=_READ_WRITE)
    mapped = np.frombuffer(addresses, np.uint8)
    start = address_of(mapped)
    for descriptor, size, offset in zip(descriptors, sizes, offsets, strict=True):
        wanted = start + offset
        if _libc.mmap(wanted, size, _READ_WRITE, flags | _MAP_FIXED, descriptor, 0) != wanted:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    return mapped, offsets


def address_of(array: np.ndarray) -> int:
    """Return the address of the first byte of an array."""
    return int(array.__array_interface__["data"][0])


def fault_in(address: int, size: int) -> None:
    """Read mapped pages from the disk and wait for them. Releases the GIL; 2 µs if they are in RAM already.

    Raises OSError if the kernel cannot provide a page; touching it would end the process with SIGBUS. Does nothing
    on systems other than Linux.
    """
    if sys.platform == "linux" and not _advise(address, size, _MADV_POPULATE_READ):
        if ctypes.get_errno() in _UNAVAILABLE:
            raise OSError(errno.EIO, os.strerror(errno.EIO))


def will_need(address: int, size: int) -> None:
    """Ask the kernel to read mapped pages from the disk, without waiting for them."""
    _advise(address, size, mmap.MADV_WILLNEED)


def forget(mapped: np.ndarray) -> None:
    """Drop the pages of a mapped array from this process. They stay in the page cache and come back when touched.

    Only for an array over a file. Whatever was written to the array is lost.
    """
    _advise(address_of(mapped), mapped.nbytes, mmap.MADV_DONTNEED)


def _advise(address: int, size: int, advice: int) -> bool:
    """Call madvise for all pages that hold some of these bytes. Returns whether it succeeded."""
    first = address // mmap.PAGESIZE * mmap.PAGESIZE
    return bool(_libc.madvise(first, address + size - first, advice) == 0)
