"""Rows gathered through the page cache: which of them stay there, and what was read.

If the rows that the samples use fit a budget of RAM, all of them stay. If not, the first ones stay,
and the others are dropped behind the read. A row that stays is found in RAM in every epoch. The
kernel alone would keep what was used last, of which a new order finds little: with room for half of
the rows 15 %, where rows that stay are found 50 %.

    used rows ─▶ pages_of_rows ─▶ a plan ─▶ claim_all ─▶ a claim ─▶ rows_of_claim
"""

import mmap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from memload.feeds.budget import Claim
from memload.feeds.interface import ReadCounts
from memload.feeds.windows import WINDOW_BYTES, window_sizes
from memload.storage.mapping import bytes_read
from memload.storage.shards import Shards


def pages_of_rows(shards: Shards, rows: np.ndarray) -> np.ndarray:
    """Return the plan that keeps some rows in the page cache: int64, each once, in ascending order.

    Unlike `plan_for_rows`, it counts the pages with bytes of these rows, not whole windows.
    """
    shard, window, size = _new_pages(shards, rows)
    plan = np.zeros_like(window_sizes(shards))
    np.add.at(plan, (shard, window), size)
    return plan


def _new_pages(shards: Shards, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return for each row its shard, the window in which it begins, and the bytes of its pages.

    A page that the row before it has as well does not count.
    """
    shard, offset = shards.offsets_of(rows)
    first = offset // mmap.PAGESIZE
    last = (offset + shards.array.row_bytes - 1) // mmap.PAGESIZE
    last_before = np.full(len(rows), -1)
    last_before[1:] = np.where(shard[1:] == shard[:-1], last[:-1], -1)
    pages = last - np.maximum(first, last_before + 1) + 1
    return shard, offset // WINDOW_BYTES, pages * mmap.PAGESIZE


def rows_of_claim(shards: Shards, used: np.ndarray, claim: Claim) -> np.ndarray | None:
    """Return which rows a claim keeps in the page cache: bool (rows of the array). None: all.

    ``used`` are the rows for which it was made: int64, each once, in ascending order. Its plan is
    one of `pages_of_rows`. Of each window, the first rows stay, as many as fit.
    """
    if claim.size >= claim.wanted:
        return None
    shard, window, size = _new_pages(shards, used)
    number = shard * claim.plan.shape[1] + window
    end = np.cumsum(size)
    first_of_window = np.searchsorted(number, number)
    end_in_window = end - (end - size)[first_of_window]
    stays = np.zeros(len(shards), bool)
    stays[used] = end_in_window <= claim.plan[shard, window]
    return stays


class GatheredRows:
    """Gathers the rows of an array, and keeps those of a claim in the page cache. Thread-safe.

    ``used`` are the rows that the samples use: int64, each once, in ascending order. Without a
    claim, all of them stay.
    """

    def __init__(self, shards: Shards, used: np.ndarray, claim: Claim | None) -> None:
        self._shards, self._claim = shards, claim
        self._stays = None if claim is None else rows_of_claim(shards, used, claim)
        self._rows = self._rows_to_stay = len(used)
        if self._stays is not None:
            self._rows_to_stay = int(self._stays.sum())
        self._lock = threading.Lock()
        self._served = self._bytes_read = 0
        self._seconds_reading = 0.0
        # Of the reads that are under way: how many, since when, and what was read since then.
        self._under_way, self._began, self._bytes_since = 0, 0.0, 0

    def gather(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Copy rows into ``out``. See `Shards.gather`."""
        self._shards.gather(rows, out, self)
        with self._lock:
            self._served += len(rows)

    def which_stay(self, rows: np.ndarray) -> np.ndarray | None:
        """See `PageCache.which_stay`."""
        return None if self._stays is None else self._stays[rows]

    @contextmanager
    def reading(self) -> Iterator[None]:
        """See `PageCache.reading`."""
        bytes_before = bytes_read()
        with self._lock:
            if not self._under_way:
                self._began, self._bytes_since = time.monotonic(), 0
            self._under_way += 1
        try:
            yield
        finally:
            with self._lock:
                self._under_way -= 1
                self._bytes_since += bytes_read() - bytes_before
                if not self._under_way and self._bytes_since:
                    self._bytes_read += self._bytes_since
                    self._seconds_reading += time.monotonic() - self._began

    def counts(self) -> ReadCounts:
        """Return what was gathered so far. It is not known which rows came from RAM."""
        with self._lock:
            return ReadCounts(
                rows=self._rows,
                rows_held=self._rows_to_stay,
                rows_to_hold=self._rows_to_stay,
                served=self._served,
                hits=None,
                bytes_read=self._bytes_read,
                seconds_reading=self._seconds_reading,
            )
