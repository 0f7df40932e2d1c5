"""Map files into memory, and tell the kernel which pages are needed."""

import ctypes
import errno
import math
import mmap
import os
import resource
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
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)

#: Without it, Linux refuses to map a writable file larger than RAM and swap. In mmap from 3.13 on.
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0
_MAP_FIXED = 0x10
#: Linux 5.14 and later.
_MADV_POPULATE_READ = 22
#: The unit of ``ru_inblock``, whatever the blocks of the disk are.
_BLOCK_BYTES = 512
#: Why the kernel cannot provide a page: the file has shrunk, or the disk fails.
_UNAVAILABLE = (errno.EFAULT, errno.EIO)


def map_side_by_side(
    descriptors: Sequence[int], sizes: Sequence[int], unit: int
) -> tuple[np.ndarray, list[int]]:
    """Map the first ``sizes[i]`` bytes of each file, all files into one range of addresses.

    Returns the range as a uint8 array, and the offset of each file in it, a multiple of ``unit``.
    The gaps between files take addresses, up to ``unit`` pages a file, but no memory.

    The files are mapped copy-on-write: writing to the array changes neither the files nor what
    other processes see. The mapping ends with the last reference to the array; the descriptors may
    be closed before that. Raises OSError or OverflowError if the range cannot be mapped.
    """
    step = math.lcm(mmap.PAGESIZE, unit)
    offsets, end = [], 0
    for size in sizes:
        offsets.append((end + step - 1) // step * step)
        end = offsets[-1] + size
    flags, protection = mmap.MAP_PRIVATE | _MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
    # Reserve the range first. The files then replace parts of it, and all of it ends with this map.
    addresses = mmap.mmap(-1, end, flags=flags | mmap.MAP_ANONYMOUS, prot=protection)
    mapped = np.frombuffer(addresses, np.uint8)
    for descriptor, size, offset in zip(descriptors, sizes, offsets, strict=True):
        wanted = address_of(mapped) + offset
        if _libc.mmap(wanted, size, protection, flags | _MAP_FIXED, descriptor, 0) != wanted:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return mapped, offsets


def map_shared(descriptor: int, size: int) -> np.ndarray:
    """Map the first bytes of a file, read-only, as a uint8 array. Keeps no descriptor.

    Raises OSError.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    mapped = np.frombuffer(mmap.mmap(-1, size, flags=flags, prot=mmap.PROT_READ), np.uint8)
    wanted, flags = address_of(mapped), mmap.MAP_SHARED | _MAP_FIXED
    if _libc.mmap(wanted, size, mmap.PROT_READ, flags, descriptor, 0) != wanted:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return mapped


def address_of(array: np.ndarray) -> int:
    """Return the address of the first byte of an array."""
    return int(array.__array_interface__["data"][0])


def fault_in(address: int, size: int) -> None:
    """Read mapped pages from the disk, and wait for them. Releases the GIL; 2 µs if all are in RAM.

    Raises OSError if the kernel cannot provide a page. Touching it would end the process with
    SIGBUS. Does nothing on systems other than Linux.
    """
    if sys.platform != "linux" or _advise(address, size, _MADV_POPULATE_READ):
        return
    if ctypes.get_errno() in _UNAVAILABLE:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def share_in_ram(address: int, size: int) -> float:
    """Return which share of the pages of some mapped memory is in RAM, without reading any.

    For files of others that this process may not write, Linux says that all pages are (see
    mincore(2)). Raises OSError if the system does not tell.
    """
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    length = address + size - start
    states = np.zeros(-(-length // mmap.PAGESIZE), np.uint8)
    if _libc.mincore(start, length, states.ctypes.data):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return float(np.mean(states & 1))


def disk_reads() -> int:
    """Return a count that grows when this thread reads from the disk. Linux only, else 0.

    It counts blocks read, including those that were asked for, and waits for pages, since network
    file systems do not count blocks.
    """
    if sys.platform != "linux":
        return 0
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return usage.ru_inblock + usage.ru_majflt


def bytes_read() -> int:
    """Return how many bytes this thread has read from disks. Linux only, else 0.

    It counts what was asked for, too, and is 0 for some network file systems.
    """
    if sys.platform != "linux":
        return 0
    return resource.getrusage(resource.RUSAGE_THREAD).ru_inblock * _BLOCK_BYTES


def forget(mapped: np.ndarray) -> None:
    """Drop the pages of a mapped file from this process. They stay in the page cache.

    They come back when they are touched, without what was written to them.
    """
    _advise(address_of(mapped), mapped.nbytes, mmap.MADV_DONTNEED)


def _advise(address: int, size: int, advice: int) -> bool:
    """Call madvise for all pages that hold some of these bytes. Returns whether it succeeded."""
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    return bool(_libc.madvise(start, address + size - start, advice) == 0)
