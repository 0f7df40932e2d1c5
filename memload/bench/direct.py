"""The limit of the disk: rows in random order, read past the page cache by many threads."""

import mmap
import os
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import NamedTuple

import numpy as np

from memload.bench import stages
from memload.bench.setting import Setting
from memload.bench.stages import Measurement, rate
from memload.errors import MemloadError
from memload.reading.dataset import MemmapDataset
from memload.storage.file_reads import DirectFile, open_direct

#: Numbers of threads to try. The fastest one is the limit.
_THREADS = (8, 32, 64)
#: Rows that a thread reads before it takes others.
_ROWS_AT_ONCE = 16


class _Part(NamedTuple):
    """A part of a file that holds a row, for a direct read."""

    descriptor: int
    offset: int
    size: int


def is_direct(sample: MemmapDataset) -> bool:
    """Return whether the files of a sample can be read past the page cache."""
    with ExitStack() as opened:
        return all(file is not None for file in _open_directly(sample, opened))


def _open_directly(sample: MemmapDataset, opened: ExitStack) -> list[DirectFile | None]:
    """Open the files of a sample for reading past the page cache, until ``opened`` is closed."""
    files = [open_direct(descriptor) for descriptor in sample.shards.descriptors]
    for file in files:
        if file is not None:
            opened.callback(os.close, file.descriptor)
    return files


def read_past_cache(setting: Setting) -> Measurement:
    """Return what measures reading random rows past the page cache, with the best of _THREADS."""

    def measurement(threads: int, seconds: float) -> float:
        with ExitStack() as opened:
            parts = _parts(setting.cold_sample, _open_directly(setting.cold_sample, opened))
            with closing(_read_directly(parts, threads)) as reads:
                return rate(reads, seconds)

    trial_seconds = stages.SLOW_SECONDS / 4
    rates = {threads: measurement(threads, trial_seconds) for threads in _THREADS}
    best = max(rates, key=rates.__getitem__)
    return lambda: measurement(best, stages.SLOW_SECONDS)


def _parts(sample: MemmapDataset, files: Sequence[DirectFile | None]) -> list[_Part]:
    """Return the parts that hold the rows of a sample, in random order."""
    order = np.random.default_rng(0).permutation(sample.index.row)
    numbers, offsets = sample.shards.offsets_of(order)
    parts = []
    for number, offset in zip(numbers.tolist(), offsets.tolist(), strict=True):
        file = files[number]
        if file is None:
            raise MemloadError(f"{sample.shards.paths[number]} cannot be read past the page cache")
        start = offset // file.alignment * file.alignment
        end = -(-(offset + sample.shards.array.row_bytes) // file.alignment) * file.alignment
        parts.append(_Part(file.descriptor, start, end - start))
    return parts


def _read_directly(parts: Sequence[_Part], threads: int) -> Generator[float, None, None]:
    """Read parts of files, and yield how many were read each time."""
    size = max(part.size for part in parts)
    buffers = deque(mmap.mmap(-1, size) for _ in range(threads))  # each begins at a page

    def read(some: Sequence[_Part]) -> float:
        buffer = buffers.pop()
        with memoryview(buffer) as memory:
            for part in some:
                os.preadv(part.descriptor, [memory[: part.size]], part.offset)
        buffers.append(buffer)
        return len(some)

    starts = range(0, len(parts), _ROWS_AT_ONCE)
    with ThreadPoolExecutor(threads) as pool:
        yield from pool.map(read, (parts[start : start + _ROWS_AT_ONCE] for start in starts))
