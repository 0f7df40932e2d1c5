"""What the disk that a data set will lie on writes and reads."""

import mmap
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from memload.storage.shards import open_direct

#: The file that is written and read, and how much of it at a time, at most.
_FILE_BYTES: Final = 64 << 20
_BLOCK_BYTES: Final = 1 << 20
#: So many threads read so many rows.
_THREADS: Final = 8
_READS: Final = 2000
#: The share of the free space that the file may take: others write to the disk, too.
_SHARE_OF_FREE: Final = 0.1


class DiskRates(NamedTuple):
    """Bytes a second. None: not known, since the disk is nearly full or cannot be read directly."""

    write: float | None
    read: float | None
    is_direct: bool  #: whether files there can be read past the page cache


def measure_disk(folder: Path, row_bytes: int) -> DiskRates:
    """Write a file of 64 MiB to the disk of a folder, and read from it as a shuffled epoch does.

    ``row_bytes`` are read at a time, as small reads are slower. The file takes a tenth of the free
    space at most. If that is less than 1 MiB, nothing is measured. Raises OSError if nothing can be
    written there.
    """
    # The file has no name, so it is gone as soon as it is closed.
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        descriptor = file.fileno()
        status = os.fstatvfs(descriptor)
        room = int(_SHARE_OF_FREE * status.f_bavail * status.f_frsize)
        size = min(_FILE_BYTES, room) // _BLOCK_BYTES * _BLOCK_BYTES
        write = _write_rate(descriptor, size) if size else None
        direct = open_direct(descriptor)
        if direct is None:
            return DiskRates(write, None, is_direct=False)
        try:
            read = _read_rate(direct, size, row_bytes) if size else None
            return DiskRates(write, read, is_direct=True)
        finally:
            os.close(direct)


def _write_rate(descriptor: int, size: int) -> float:
    block = os.urandom(_BLOCK_BYTES)  # which no disk can compress
    started = time.perf_counter()
    for offset in range(0, size, _BLOCK_BYTES):
        os.pwrite(descriptor, block, offset)
    os.fsync(descriptor)
    return size / (time.perf_counter() - started)


def _read_rate(direct: int, size: int, row_bytes: int) -> float:
    block = min(-(-row_bytes // mmap.PAGESIZE) * mmap.PAGESIZE, _BLOCK_BYTES)
    starts = np.random.default_rng(0).permutation(size // block)[:_READS] * block
    memory = memoryview(mmap.mmap(-1, block))  # aligned, and for all threads: nobody looks at it

    def read(start: int) -> int:
        return min(row_bytes, os.preadv(direct, [memory], start))

    with ThreadPoolExecutor(_THREADS) as pool:
        started = time.perf_counter()
        read_bytes = sum(pool.map(read, starts.tolist()))
        return read_bytes / (time.perf_counter() - started)
