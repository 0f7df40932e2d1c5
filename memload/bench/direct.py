"""The limit of the disk: rows in random order, read past the page cache by many threads."""

import mmap
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np

from memload.bench import stages
from memload.bench.setting import Setting
from memload.bench.stages import Measurement
from memload.reading.dataset import MemmapDataset
from memload.storage.shards import open_direct

#: Numbers of threads to try. The fastest one is the limit.
_THREADS = (8, 32, 64)
#: Rows to read, at most: more than Python reads in the time of a measurement.
_MAX_ROWS = 200_000


class _Part(NamedTuple):
    """A part of a file that holds a row, for a direct read."""

    file: int
    offset: int
    size: int


def is_direct(sample: MemmapDataset) -> bool:
    """Return whether the files of a sample can be read past the page cache."""
    with ExitStack() as opened:
        return len(_open_directly(sample, opened)) == len(_files_of(sample))


def read_past_cache(setting: Setting) -> Measurement:
    """Return what measures reading random rows past the page cache, with the best of _THREADS."""
    sample = setting.cold_sample
    trial_seconds = stages.SLOW_SECONDS / 4
    rates = {threads: random_reads(sample, threads, trial_seconds) for threads in _THREADS}
    best = max(rates, key=rates.__getitem__)
    return lambda: random_reads(sample, best, stages.SLOW_SECONDS)


def random_reads(sample: MemmapDataset, threads: int, seconds: float) -> float:
    """Read random rows past the page cache for so many seconds, and return how many a second."""
    with ExitStack() as opened:
        files = _open_directly(sample, opened)
        parts = _parts(sample)
        start = time.perf_counter()
        rows = _read_directly(files, parts, threads, start + seconds)
        return rows / (time.perf_counter() - start)


def _files_of(sample: MemmapDataset) -> list[int]:
    """Return the numbers of the files that hold rows of a sample."""
    numbers: list[int] = np.unique(sample.shards.array.locate(sample.index.row)[0]).tolist()
    return numbers


def _open_directly(sample: MemmapDataset, opened: ExitStack) -> dict[int, int]:
    """Open those files of a sample that can be read past the page cache, until the stack closes.

    Returns them by their numbers.
    """
    files = {number: open_direct(sample.shards.descriptors[number]) for number in _files_of(sample)}
    direct = {number: file for number, file in files.items() if file is not None}
    for file in direct.values():
        opened.callback(os.close, file)
    return direct


def _parts(sample: MemmapDataset) -> list[_Part]:
    """Return the parts of the files that hold rows of a sample, in random order."""
    rows = np.random.default_rng(0).permutation(sample.index.row)[:_MAX_ROWS]
    file, offset = sample.shards.array.locate(rows)
    start = offset // mmap.PAGESIZE * mmap.PAGESIZE
    end = -(-(offset + sample.shards.array.row_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    columns = (file.tolist(), start.tolist(), (end - start).tolist())
    return [_Part(*part) for part in zip(*columns, strict=True)]


def _read_directly(
    files: Mapping[int, int], parts: Sequence[_Part], threads: int, end: float
) -> int:
    """Read parts of files until a time of ``perf_counter``, and return how many were read.

    Each thread reads one part at least. A slow disk is done with those soon.
    """
    size = max(part.size for part in parts)

    def read(thread: int) -> int:
        done = 0
        with mmap.mmap(-1, size) as buffer, memoryview(buffer) as memory:  # begins at a page
            for part in parts[thread::threads]:
                with memory[: part.size] as piece:
                    os.preadv(files[part.file], [piece], part.offset)
                done += 1
                if time.perf_counter() > end:
                    break
        return done

    threads = min(threads, len(parts))
    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(read, range(threads)))
