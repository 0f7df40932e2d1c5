"""Which rows lie in memory, and at which addresses.

    file     │ header │ row 0 │ row 1 │ row 2 │ row 3 │ row 4 │ row 5 │ …
    pieces   ├────────── in RAM ──────────┤   ├── on the device ──┤
    ranges            ├── rows 0 and 1 ───┤   ├─── rows 3 and 4 ──┤

A piece is a part of a file that lies in memory without gaps. All rows of a range lie in one piece,
so their addresses follow from that of the first one.
"""

import numpy as np

from memload.feeds import windows
from memload.storage.shards import Shards

#: Columns of pieces, int64 ``(n, 4)``: the file, the offsets there, and the address.
_FILE, _START, _STOP, _ADDRESS = range(4)
NO_PIECES = np.empty((0, 4), np.int64)


class RowRanges:
    """Ranges of rows in memory, in ascending order. They never change.

    ``pieces`` are int64 ``(n, 4)``, in any order: the number of the file, the offsets in it where
    the piece begins and ends, and the address where it begins.
    """

    def __init__(self, shards: Shards, pieces: np.ndarray) -> None:
        header_bytes, row_bytes = shards.array.header_bytes, shards.array.row_bytes
        self.pieces, self._row_bytes = _join(pieces), row_bytes
        file, start, stop, address = self.pieces.T
        first = np.maximum(0, -((header_bytes - start) // row_bytes))
        stop = (stop - header_bytes) // row_bytes
        has_rows = stop > first
        first_of_file = np.array(shards.starts)[file]
        #: The rows of each range: from ``first`` to ``stop``. In front is one without rows, so that
        #: every row has a range that begins before it.
        self.first = np.append(-1, (first_of_file + first)[has_rows])
        self.stop = np.append(-1, (first_of_file + stop)[has_rows])
        # Where row 0 would be, by the rows of each range: in memory, and in the file.
        in_file = np.append(0, (header_bytes - first_of_file * row_bytes)[has_rows])
        self._file_origin = in_file
        self._origin = in_file + np.append(0, (address - start)[has_rows])

    def __len__(self) -> int:
        """Return how many rows there are in all ranges together."""
        return int((self.stop - self.first).sum())

    def find(self, rows: np.ndarray) -> "FoundRows":
        """Look up rows (int64, ``(n,)``), in any order."""
        return FoundRows(self, rows)

    def count(self, rows: np.ndarray | None) -> int:
        """Return how many of some rows, ascending, are in the ranges. None: of all rows."""
        if rows is None:
            return len(self)
        found = np.searchsorted(rows, self.stop) - np.searchsorted(rows, self.first)
        return int(found.sum())

    def without(self, other: "RowRanges") -> np.ndarray:
        """Return the rows that are in these ranges and not in others: (n, 2), first and stop."""
        bounds = np.unique(np.concatenate([self.first, self.stop, other.first, other.stop]))
        first, stop = bounds[:-1], bounds[1:]
        some = self.find(first).are_held & ~other.find(first).are_held
        return np.stack([first[some], stop[some]], 1)


class FoundRows:
    """Some rows, and where they lie in memory."""

    def __init__(self, ranges: RowRanges, rows: np.ndarray) -> None:
        self._ranges, self._rows = ranges, rows
        self._range = np.searchsorted(ranges.first, rows, side="right") - 1
        #: Which of the rows are in memory: bool ``(n,)``.
        self.are_held: np.ndarray = rows < ranges.stop[self._range]

    def addresses(self) -> np.ndarray:
        """Return the address of each row, int64 ``(n,)``; only of those that are held."""
        ranges = self._ranges
        return np.asarray(ranges._origin[self._range] + self._rows * ranges._row_bytes)

    def before_boundary(self) -> np.ndarray:
        """Return how many bytes of a row lie in its first window if it has two, else 0."""
        ranges = self._ranges
        offset = ranges._file_origin[self._range] + self._rows * ranges._row_bytes
        in_window = windows.WINDOW_BYTES - offset % windows.WINDOW_BYTES
        crosses = self.are_held & (in_window < ranges._row_bytes)
        return np.asarray(np.where(crosses, in_window, 0))


def pieces_of_rows(shards: Shards, ranges: np.ndarray, address: int) -> np.ndarray:
    """Return ranges of rows as pieces that lie in memory one behind the other, from an address on.

    ``ranges`` are int64 ``(n, 2)``: the first row of each, and the row behind the last. Each lies
    in one file.
    """
    file, start = shards.offsets_of(ranges[:, 0])
    size = (ranges[:, 1] - ranges[:, 0]) * shards.array.row_bytes
    return np.stack([file, start, start + size, address + np.cumsum(size) - size], 1)


def _join(pieces: np.ndarray) -> np.ndarray:
    """Return pieces in the order of files, as one where they follow one another in memory too."""
    if not len(pieces):
        return pieces
    pieces = pieces[np.lexsort((pieces[:, _START], pieces[:, _FILE]))]
    before, after = pieces[:-1], pieces[1:]
    follows = (before[:, _FILE] == after[:, _FILE]) & (before[:, _STOP] == after[:, _START])
    follows &= before[:, _ADDRESS] - before[:, _START] == after[:, _ADDRESS] - after[:, _START]
    joined: np.ndarray = pieces[np.append(True, ~follows)]
    joined[:, _STOP] = pieces[np.append(~follows, True), _STOP]
    return joined


class RowTable:
    """The rows that are in memory by now. One thread adds pieces; others look rows up."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        #: What is in memory now. Replaced as a whole when a piece is added.
        self.ranges = RowRanges(shards, NO_PIECES)

    def add(self, file: int, start: int, stop: int, address: int) -> None:
        """Say that a part of a file lies in memory at an address."""
        piece = np.array([[file, start, stop, address]], np.int64)
        self.ranges = RowRanges(self._shards, np.concatenate([self.ranges.pieces, piece]))
