"""Map files into memory side by side, so that one array has the rows of all of them."""

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
#: Without it, Linux refuses to map a writable file larger than RAM and swap. In mmap from 3.13 on.
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0
_MAP_FIXED = 0x10
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
#: Linux 5.14 and later.
_MADV_POPULATE_READ = 22
#: Why the kernel cannot provide a page: the file has shrunk, or the disk fails.
_UNAVAILABLE = (errno.EFAULT, errno.EIO)


def map_side_by_side(
    descriptors: Sequence[int], sizes: Sequence[int], unit: int
) -> tuple[np.ndarray, list[int]]:
    """Map the first ``sizes[i]`` bytes of each file, all files into one range of addresses.

    Returns the range as a uint8 array, and the offset of each file in it, a multiple of ``unit``.
    The gaps between files take addresses, up to ``unit`` pages for each file, but no memory.

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
    # Python's own maps could not: each of them would also keep a descriptor open.
    addresses = mmap.mmap(-1, end, flags=flags | mmap.MAP_ANONYMOUS, prot=protection)
    mapped = np.frombuffer(addresses, np.uint8)
    for descriptor, size, offset in zip(descriptors, sizes, offsets, strict=True):
        wanted = mapped.ctypes.data + offset
        if _libc.mmap(wanted, size, protection, flags | _MAP_FIXED, descriptor, 0) != wanted:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return mapped, offsets


def fault_in(address: int, size: int) -> None:
    """Read mapped pages from the disk, and wait for them. ``address`` is that of a page.

    Releases the GIL, which Python's own ``mmap.madvise`` does not. Raises OSError if the kernel
    cannot provide a page. Does nothing on systems that cannot do it.
    """
    if _libc.madvise(address, size, _MADV_POPULATE_READ) and ctypes.get_errno() in _UNAVAILABLE:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def disk_reads() -> int:
    """Return a count that grows when this thread reads from the disk. Linux only, else 0.

    It counts blocks read, including those that were asked for, and waits for pages, since network
    file systems do not count blocks.
    """
    if sys.platform != "linux":
        return 0
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return usage.ru_inblock + usage.ru_majflt
