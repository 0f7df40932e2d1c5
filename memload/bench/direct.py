"""The limit of the disk: rows in random order, read past the page cache by many threads."""

import mmap
import os
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import NamedTuple

import numpy as np

from memload.bench import stages
from memload.bench.setting import Setting
from memload.bench.stages import Measurement, rate
from memload.reading.dataset import MemmapDataset
from memload.storage.file_reads import DirectFile, open_direct

#: Numbers of threads to try. The fastest one is the limit.
_THREADS = (8, 32, 64)
#: Rows that a thread reads before it takes others.
_ROWS_AT_ONCE = 16
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


def random_reads(
    sample: MemmapDataset, threads: int, seconds: float, rows_at_once: int = _ROWS_AT_ONCE
) -> float:
    """Read random rows past the page cache, and return how many a second.

    Each thread reads ``rows_at_once`` before it takes others. It ends those after the time is over.
    """
    with ExitStack() as opened:
        files = _open_directly(sample, opened)
        parts = _parts(sample, files)
        with closing(_read_directly(files, parts, threads, rows_at_once)) as reads:
            return rate(reads, seconds)


def _files_of(sample: MemmapDataset) -> list[int]:
    """Return the numbers of the files that hold rows of a sample."""
    numbers: list[int] = np.unique(sample.shards.shard_of(sample.index.row)).tolist()
    return numbers


def _open_directly(sample: MemmapDataset, opened: ExitStack) -> dict[int, DirectFile]:
    """Open those files of a sample that can be read past the page cache, until the stack closes.

    Returns them by their numbers.
    """
    files = {number: open_direct(sample.shards.descriptors[number]) for number in _files_of(sample)}
    direct = {number: file for number, file in files.items() if file is not None}
    for file in direct.values():
        opened.callback(os.close, file.descriptor)
    return direct


def _parts(sample: MemmapDataset, files: Mapping[int, DirectFile]) -> list[_Part]:
    """Return the parts of the files that hold rows of a sample, in random order."""
    rows = np.random.default_rng(0).permutation(sample.index.row)[:_MAX_ROWS]
    file, offset = sample.shards.offsets_of(rows)
    alignment = np.array([files[number].alignment for number in file.tolist()])
    start = offset // alignment * alignment
    end = -(-(offset + sample.shards.array.row_bytes) // alignment) * alignment
    columns = (file.tolist(), start.tolist(), (end - start).tolist())
    return [_Part(*part) for part in zip(*columns, strict=True)]


def _read_directly(
    files: Mapping[int, DirectFile],
    parts: Sequence[_Part],
    threads: int,
    rows_at_once: int = _ROWS_AT_ONCE,
) -> Generator[float, None, None]:
    """Read parts of files, and yield how many were read each time."""
    size = max(part.size for part in parts)
    buffers = deque(mmap.mmap(-1, size) for _ in range(threads))  # each begins at a page

    def read(some: Sequence[_Part]) -> float:
        buffer = buffers.pop()
        with memoryview(buffer) as memory:
            for part in some:
                os.preadv(files[part.file].descriptor, [memory[: part.size]], part.offset)
        buffers.append(buffer)
        return len(some)

    starts = range(0, len(parts), rows_at_once)
    with ThreadPoolExecutor(threads) as pool:
        yield from pool.map(read, (parts[start : start + rows_at_once] for start in starts))
