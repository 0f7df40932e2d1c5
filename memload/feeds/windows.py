"""Which parts of an array's files are held in memory, in windows of 256 MiB.

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


class WindowTable:
    """Where the windows of an array's files are held, as addresses that the device can read."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        shape = window_sizes(shards).shape
        #: The address of the first byte of each window; and how many bytes from there are held.
        self._address = np.zeros(shape, np.int64)
        self._held = np.zeros(shape, np.int64)

    def add(self, file: int, window: int, address: int, size: int) -> None:
        """Say that the first ``size`` bytes of a window are held from an address on."""
        self._address[file, window] = address
        self._held[file, window] = size  # last: other threads may be looking

    def look_up(self, rows: np.ndarray) -> "WindowRows":
        """Return where rows (int64) lie in the windows."""
        shard, offset = self._shards.offsets_of(rows)
        return WindowRows(self, shard, offset, self._shards.array.row_bytes)


class WindowRows:
    """Some rows, and where they lie in the windows of a table."""

    def __init__(
        self, table: WindowTable, shard: np.ndarray, offset: np.ndarray, row_bytes: int
    ) -> None:
        self._table, self._shard, self._offset = table, shard, offset
        last = offset + row_bytes - 1
        self._first_window, self._last_window = offset // WINDOW_BYTES, last // WINDOW_BYTES
        self._end = last + 1 - self._last_window * WINDOW_BYTES
        #: How many bytes of each row lie in its first window if it has two, else 0.
        self.before_boundary = np.where(
            self._last_window > self._first_window, self._last_window * WINDOW_BYTES - offset, 0
        )

    def __len__(self) -> int:
        return len(self._shard)

    def __getitem__(self, rows: "slice | np.ndarray") -> "WindowRows":
        some = object.__new__(WindowRows)
        some._table = self._table
        for name in ("_shard", "_offset", "_first_window", "_last_window", "_end"):
            setattr(some, name, getattr(self, name)[rows])
        some.before_boundary = self.before_boundary[rows]
        return some

    def are_held(self) -> np.ndarray:
        """Return which rows can be read from memory now: bool ``(n,)``."""
        address, held = self._table._address, self._table._held
        first, last = (self._shard, self._first_window), (self._shard, self._last_window)
        crosses = self._last_window > self._first_window
        follows = (held[first] == WINDOW_BYTES) & (
            address[last]
            == address[first] + (self._last_window - self._first_window) * WINDOW_BYTES
        )
        return np.asarray((self._end <= held[last]) & (~crosses | follows))

    def addresses(self) -> np.ndarray:
        """Return the address of each row, int64 ``(n,)``; only of those that are held."""
        address = self._table._address[self._shard, self._first_window]
        return np.asarray(address + self._offset - self._first_window * WINDOW_BYTES)


def rows_inside(shards: Shards, plan: np.ndarray) -> np.ndarray:
    """Return which rows lie inside of what a plan holds: bool (rows of the array)."""
    table = WindowTable(shards)
    for file, window in np.argwhere(plan).tolist():
        table.add(file, window, window * WINDOW_BYTES, int(plan[file, window]))
    return table.look_up(np.arange(len(shards))).are_held()
