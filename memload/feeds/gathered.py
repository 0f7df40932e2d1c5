"""Rows gathered through the page cache: which of them stay there, and what was read.

If the rows that the samples use fit a budget of RAM, all of them stay. If not, the first ones stay,
and the others are dropped behind the read. A row that stays is found in RAM in every epoch. The
kernel alone would keep what was used last, of which a new order finds little: with room for half of
the rows 15 %, where rows that stay are found 50 %.

    samples ─▶ claim_pages: a claim for each array ─▶ rows_of_claim: which of its rows stay
                                                      ─▶ StayingRows: drops the others
"""

import hashlib
import itertools
import mmap
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property

import numpy as np

from memload.feeds.budget import Claim, claim_all, claimed_bytes, identity_of
from memload.feeds.busy_time import BusyTime
from memload.feeds.interface import ReadCounts, Samples
from memload.feeds.windows import WINDOW_BYTES, plan_for_rows, window_sizes
from memload.profiling import profiled
from memload.storage.file_reads import drop_behind
from memload.storage.mapping import bytes_read
from memload.storage.shards import Shards

#: Files are numbered one behind another, each as long as the largest one of ext4.
_MAX_FILE_BYTES = 1 << 44
_file_numbers: dict[tuple[int, ...], int] = {}
_next_number = itertools.count()


def claim_pages(samples: Samples, budget: float) -> list[Claim]:
    """Claim page cache for the used rows of every array, as far as a budget in bytes allows.

    See `claim_all`. If whole windows fit, they are claimed, which takes 1 ms for 1.28 million rows.
    If not, single pages are, which takes 130 ms. Only Loaders of the same rows share these.
    """
    used = [(array.shards, array.used_rows()) for array in samples.arrays]
    plans = [plan_for_rows(shards, rows) for shards, rows in used]
    contents = None
    if sum(int(plan.sum()) for plan in plans) > budget - claimed_bytes():
        plans = [pages_of_rows(shards, rows) for shards, rows in used]
        contents = [(_digest(rows),) for _, rows in used]
    arrays = [(shards, plan) for (shards, _), plan in zip(used, plans, strict=True)]
    return claim_all(arrays, budget, contents)


def _digest(rows: np.ndarray) -> int:
    """Return a number that identifies some rows."""
    return int.from_bytes(hashlib.blake2b(rows.tobytes(), digest_size=8).digest())


def pages_of_rows(shards: Shards, rows: np.ndarray) -> np.ndarray:
    """Return the plan that keeps some rows in the page cache: int64, each once, in ascending order.

    Unlike `plan_for_rows`, it counts the pages with bytes of these rows, not whole windows.
    """
    plan = np.zeros_like(window_sizes(shards))
    window, size = _new_pages(shards, rows, plan.shape[1])
    if len(rows):
        first = np.flatnonzero(np.diff(window, prepend=-1))
        plan.reshape(-1)[window[first]] = np.add.reduceat(size, first)
    return plan


def _new_pages(
    shards: Shards, rows: np.ndarray, windows_per_file: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return for each row the window in which it begins, and the bytes of its pages.

    Windows are counted through all files. A page that the row before has as well does not count.
    """
    file, offset = shards.offsets_of(rows)
    first = offset // mmap.PAGESIZE
    stop = (offset + (shards.array.row_bytes - 1)) // mmap.PAGESIZE + 1
    stop_before = np.zeros_like(stop)
    stop_before[1:] = np.where(file[1:] == file[:-1], stop[:-1], 0)
    pages = stop - np.maximum(first, stop_before)
    return file * windows_per_file + offset // WINDOW_BYTES, pages * mmap.PAGESIZE


def rows_of_claim(shards: Shards, used: np.ndarray, claim: Claim) -> np.ndarray | None:
    """Return which rows a claim keeps in the page cache: bool (rows of the array). None: all.

    ``used`` are the rows for which it was made: int64, each once, in ascending order. Of each
    window, the first rows stay, as many as fit.
    """
    if claim.size >= claim.wanted:
        return None
    window, size = _new_pages(shards, used, claim.plan.shape[1])
    end = np.cumsum(size)
    first = np.searchsorted(window, window)  # the first row of each row's window
    end_in_window = end - (end - size)[first]
    stays = np.zeros(len(shards), bool)
    stays[used] = end_in_window <= claim.plan.reshape(-1)[window]
    return stays


class StayingRows:
    """Rows of an array that stay in the page cache, and drops others from it. Thread-safe.

    ``used`` and ``claim`` are those of `rows_of_claim`. Without a claim, all used rows stay.
    """

    def __init__(self, shards: Shards, used: np.ndarray, claim: Claim | None) -> None:
        stays = None if claim is None else rows_of_claim(shards, used, claim)
        self._shards, self._are_all = shards, stays is None
        self._rows = used if stays is None else np.flatnonzero(stays)

    def __len__(self) -> int:
        return len(self._rows)

    @cached_property
    def _file_starts(self) -> np.ndarray:
        """Where each file begins, in one numbering of the bytes of all files: int64."""
        files = [identity_of(descriptor) for descriptor in self._shards.descriptors]
        numbers = [_file_numbers.setdefault(file, next(_next_number)) for file in files]
        return np.array(numbers, np.int64) * _MAX_FILE_BYTES

    @cached_property
    def _begins(self) -> np.ndarray:
        """Where each row begins that stays, in the same numbering: int64, in ascending order."""
        file, offset = self._shards.offsets_of(self._rows)
        return np.sort(self._file_starts[file] + offset, kind="stable")

    def drop_others(self, rows: np.ndarray) -> None:
        """Drop rows from the page cache: int64 ``(n,)``. Those that stay are left there.

        A page is left, too, if it has bytes of a row that stays. So are the rows that stay for any
        Loader of the process.
        """
        if self._are_all:
            return
        page, row_bytes = mmap.PAGESIZE, self._shards.array.row_bytes
        file, offset = self._shards.offsets_of(rows)
        first, last = offset // page * page, (offset + row_bytes - 1) // page * page
        # Of each row, the first page, those in between, and the last one.
        begin = self._file_starts[file] + [first, first + page, last]
        end = self._file_starts[file] + [first + page, last, last + page]
        is_left = np.zeros(begin.shape, bool)
        for staying in [self, *_staying_in_loaders()]:
            begun = np.searchsorted(staying._begins, end)
            is_left |= begun > np.searchsorted(staying._begins, begin - row_bytes, side="right")
        start, stop = first + page * is_left[0], last + page * ~is_left[2]
        some = ~is_left[1] & (start < stop)
        for number, *part in np.stack([file, start, stop - start], 1)[some].tolist():
            drop_behind(self._shards.descriptors[number], *part)


class GatheredRows:
    """Gathers rows of samples, and keeps those of a claim in the page cache. Thread-safe.

    The claim is that of `claim_pages` for the array of the samples. It lasts as long as this.
    Without one, all rows stay.
    """

    def __init__(self, samples: Samples, claim: Claim | None) -> None:
        used = samples.used_rows()
        self._shards, self._claim, self._num_rows = samples.shards, claim, len(used)
        self._staying = StayingRows(samples.shards, used, claim)
        self._lock = threading.Lock()
        with _lock:
            _open_rows.add(self)
        self._served, self._busy_time = 0, BusyTime()

    def gather(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Copy rows into ``out``. See `Shards.gather`."""
        counted = self._reading() if self._shards.is_cold else nullcontext()
        with profiled("read"), counted:
            self._shards.gather(rows, out, self._staying.drop_others)
        with self._lock:
            self._served += len(rows)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Count what is read from the disk meanwhile, and for how long."""
        task, bytes_before = object(), bytes_read()
        self._busy_time.begin([task])
        try:
            yield
        finally:
            self._busy_time.end([task], bytes_read() - bytes_before)

    def counts(self) -> ReadCounts:
        """Return what was gathered so far. It is not known which rows came from RAM."""
        size, seconds = self._busy_time.so_far()
        return ReadCounts(
            rows=self._num_rows,
            rows_held=len(self._staying),
            rows_to_hold=len(self._staying),
            served=self._served,
            hits=None,
            bytes_read=size,
            seconds_reading=seconds,
        )


#: All that are open. Their rows stay, and a forked child begins anew.
_open_rows: weakref.WeakSet[GatheredRows] = weakref.WeakSet()
_lock = threading.Lock()


def _staying_in_loaders() -> list[StayingRows]:
    with _lock:
        return [rows._staying for rows in _open_rows]


def _begin_in_child() -> None:
    """Renew what the threads of the parent process held, which are not in the child."""
    global _lock  # noqa: PLW0603  # there is no other way to renew it
    _lock = threading.Lock()
    for rows in _open_rows:
        rows._lock = threading.Lock()
        rows._busy_time.forget_tasks()


os.register_at_fork(after_in_child=_begin_in_child)
