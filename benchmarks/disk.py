"""A file on its disk: how much of it is in RAM, and what the disk gives at most."""

import ctypes
import functools
import math
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

#: The offset of the first row in a file of `data.py`.
HEADER_BYTES = 4096
#: O_DIRECT wants offsets and memory at multiples of this on all known disks.
ALIGNMENT = 4096
#: Reads that have memory of their own, as in four batches of 256.
SLOTS = 1024
#: The share of a cold file that may be in RAM.
COLD = 0.001

_libc = ctypes.CDLL(None, use_errno=True)


def drop_from_page_cache(path: Path) -> None:
    """Remove a file, and no other, from the page cache. Raises RuntimeError if some of it stays."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    left = share_in_ram(path)
    if left > COLD:
        raise RuntimeError(
            f"{left:.1%} of {path.name} stays in RAM, so it cannot be read cold. Put --data on a "
            "disk, and let no other process map the file."
        )


def share_in_ram(path: Path) -> float:
    """Return the share of a file's pages that are in the page cache, as mincore() says."""
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    start = np.frombuffer(mapped, np.uint8).ctypes.data
    pages = np.empty(math.ceil(len(mapped) / mmap.PAGESIZE), np.uint8)
    arguments = ctypes.c_void_p(start), ctypes.c_size_t(len(mapped))
    if _libc.mincore(*arguments, ctypes.c_void_p(pages.ctypes.data)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path.name)
    return float((pages & 1).mean())


@functools.cache
def memory_for_reads(slot_bytes: int) -> memoryview:
    """Return memory for `SLOTS` reads, used again and again as a reader of batches does.

    On one virtual disk, reads into such memory were 1.3 times as fast as into 16 small buffers that
    were new each time: it is made of large pages.
    """
    memory = mmap.mmap(-1, SLOTS * slot_bytes)  # of mmap, as it has to begin at a page
    np.frombuffer(memory, np.uint8)[:] = 1  # so that no read has to find pages for it
    return memoryview(memory)


def read_directly(path: Path, rows: np.ndarray, row_bytes: int, threads: int) -> int:
    """Read rows past the page cache with so many threads; return how many.

    Each read begins and ends at multiples of `ALIGNMENT`. What is read is kept nowhere. Raises
    OSError on file systems without O_DIRECT.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    offsets = HEADER_BYTES + rows.astype(np.int64) * row_bytes
    starts = offsets // ALIGNMENT * ALIGNMENT
    sizes = -(-(offsets + row_bytes) // ALIGNMENT) * ALIGNMENT - starts
    slot_bytes = (row_bytes // ALIGNMENT + 2) * ALIGNMENT
    memory, targets = memory_for_reads(slot_bytes), np.arange(len(rows)) % SLOTS * slot_bytes

    def read(part: np.ndarray) -> None:
        for start, size, target in part.tolist():
            os.preadv(descriptor, [memory[target : target + size]], start)

    try:
        # parts of many rows, and enough of them that all threads end at about the same time
        reads = np.stack([starts, sizes, targets], 1)
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(read, np.array_split(reads, min(len(rows), 8 * threads))))
    finally:
        os.close(descriptor)
    return len(rows)


def read_from_start_to_end(path: Path) -> None:
    """Read a file through the page cache, 8 MiB at a time."""
    memory = bytearray(8 << 20)
    with path.open("rb", buffering=0) as file:
        while file.readinto(memory):
            pass
