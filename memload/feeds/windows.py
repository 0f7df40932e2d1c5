"""Which parts of an array's files are held in RAM, in windows of 256 MiB.

A plan says how many bytes of each window are held, from its beginning: int64 (files, windows of the
largest file). The same budget gives the same plan in every process, so the ranks of a host hold the
same pages, and the same rows are found in every epoch.
"""

import math
import mmap

import numpy as np

from memload.storage.shards import Shards

#: Bytes registered at a time: 3 ms if they are in RAM (12.5 ms a gigabyte on one H200's host).
WINDOW_BYTES = 256 << 20


def window_sizes(shards: Shards) -> np.ndarray:
    """Return the bytes of each window: int64 (files, windows of the largest file)."""
    file_sizes = np.array([[shard.bytes] for shard in shards.array.shards], np.int64)
    starts = np.arange(math.ceil(file_sizes.max() / WINDOW_BYTES)) * WINDOW_BYTES
    return np.asarray(np.clip(file_sizes - starts, 0, WINDOW_BYTES))


def plan_for_rows(shards: Shards, rows: np.ndarray) -> np.ndarray:
    """Return the plan that holds every window with bytes of some rows, int64 in ascending order."""
    header_bytes, row_bytes = shards.array.header_bytes, shards.array.row_bytes
    sizes = window_sizes(shards)
    start = np.arange(sizes.shape[1]) * WINDOW_BYTES
    first_row, rows_in_file = np.array(shards.starts)[:-1, None], np.diff(shards.starts)[:, None]
    # The rows that have bytes in a window: from the one in which it begins, to its last byte.
    first = np.clip((start - header_bytes) // row_bytes, 0, rows_in_file)
    stop = np.clip(-((header_bytes - start - sizes) // row_bytes), 0, rows_in_file)
    before, until = (np.searchsorted(rows, first_row + number) for number in (first, stop))
    return np.where(until > before, sizes, 0)


def plan_within(plan: np.ndarray, held: np.ndarray, budget: float) -> np.ndarray:
    """Return the part of a plan that fits a budget in bytes, the first windows first.

    ``held`` are the bytes of each window that are held in any case, and cost nothing.
    """
    free = np.minimum(plan, held)
    cost = plan - free
    before = np.cumsum(cost).reshape(cost.shape) - cost
    granted = np.clip(budget - before, 0, cost)
    whole_pages = np.where(granted == cost, cost, granted // mmap.PAGESIZE * mmap.PAGESIZE)
    return np.asarray(free + whole_pages, np.int64)


def pieces_of(plan: np.ndarray) -> np.ndarray:
    """Return what a plan holds as pieces of files, see `RowRanges`, with offsets as addresses."""
    file, window = np.nonzero(plan)
    start = window * WINDOW_BYTES
    return np.stack([file, start, start + plan[file, window], start], 1)
