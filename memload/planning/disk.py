"""What the disk that a data set will lie on writes and reads."""

import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

from memload.storage.file_reads import DirectFile, open_direct, read_direct

#: The file that is written and read, and the size of one read. So many threads read at a time.
_FILE_BYTES: Final = 64 << 20
_BLOCK_BYTES: Final = 1 << 20
_THREADS: Final = 8


class DiskRates(NamedTuple):
    """Bytes a second. ``read`` is None if files cannot be read past the page cache there."""

    write: float
    read: float | None


def measure_disk(folder: Path) -> DiskRates:
    """Write a file of 64 MiB to the disk, read it back from there, and remove it."""
    path = folder / "disk"
    block = os.urandom(_BLOCK_BYTES)  # a disk may compress or leave out what is simpler
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        started = time.perf_counter()
        for offset in range(0, _FILE_BYTES, _BLOCK_BYTES):
            os.pwrite(descriptor, block, offset)
        os.fsync(descriptor)
        write = _FILE_BYTES / (time.perf_counter() - started)
        direct = open_direct(descriptor)
        if direct is None:
            return DiskRates(write, None)
        try:
            return DiskRates(write, _read_rate(direct))
        finally:
            os.close(direct.descriptor)
    finally:
        os.close(descriptor)
        path.unlink()


def _read_rate(direct: DirectFile) -> float:
    def read(offset: int) -> int:
        memory = memoryview(mmap.mmap(-1, _BLOCK_BYTES))  # aligned, as such reads have to be
        return read_direct(direct.descriptor, memory, offset)

    with ThreadPoolExecutor(_THREADS) as pool:
        started = time.perf_counter()
        read_bytes = sum(pool.map(read, range(0, _FILE_BYTES, _BLOCK_BYTES)))
        return read_bytes / (time.perf_counter() - started)
