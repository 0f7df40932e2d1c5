"""The feed dma: the device copies rows from the page cache, and others are read from the files.

    rows of a batch ─┬─ held: at the beginning of each file, in registered page cache ─┬─▶ one
                     └─ others: threads read them into page-locked memory ─────────────┘   copy

If only a part of the files is planned to be held, the name of the feed is ``disk``. A row that will
be held, but is not yet, is read like the others, but through the page cache, where it stays.
"""

import os
import threading
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from memload.feeds.copies import RowCopies
from memload.feeds.feed import Counts, Samples
from memload.feeds.held import WINDOW_BYTES, Filler, HeldFile
from memload.feeds.reader import Reading, RowReader

#: What reads rows that batches of this process wait for, by id.
_readers: weakref.WeakValueDictionary[int, RowReader] = weakref.WeakValueDictionary()


def _rows_are_waited_for() -> bool:
    # Unlike an iteration, a list of references cannot be disturbed by other threads.
    readers = (reference() for reference in _readers.valuerefs())
    return any(reader is not None and reader.is_busy() for reader in readers)


class PagesFeed:
    """Brings rows to the device from registered page cache, or from the files.

    ``files`` are those of the array, with what is planned to be held. Raises FeedError if pages
    cannot be registered.
    """

    def __init__(
        self,
        samples: Samples,
        device: torch.device,
        files: Sequence[HeldFile],
        copy_rows: RowCopies,
    ) -> None:
        self.samples, self.device = samples, device
        self._files, self._copy_rows = files, copy_rows
        for file in files:
            file.devices.add(device)
            if file.planned:
                file.probe(device)
        self._used = np.unique(samples.shards.array.shard_of(samples.used_rows)).tolist()
        self._addresses = np.array([file.address for file in files])
        self._reader = RowReader(samples.shards)
        _readers[id(self._reader)] = self._reader
        self._filler = Filler(files, device, _rows_are_waited_for)
        self._process = os.getpid()
        self._served = self._hits = 0
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """``"dma"``, or ``"disk"`` if not all of the files with used rows will be held."""
        is_whole = (
            self._files[number].planned == self._files[number].size for number in self._used
        )
        return "dma" if all(is_whole) else "disk"

    def prepare(self, samples: np.ndarray) -> "_LocatedSamples":
        """See `Feed.prepare`."""
        rows = self.samples.row[samples]
        columns = self.samples.upload_columns(samples, self.device)
        return _LocatedSamples(self, *self.samples.shards.array.locate(rows), columns)

    def begin(self, shard: np.ndarray, offset: np.ndarray, columns: list[Tensor]) -> "_LocatedRows":
        """Begin to read those rows that are not held, at offsets in shards."""
        end = offset + self.samples.row_bytes
        is_held = end <= np.array([file.held for file in self._files])[shard]
        reading = None
        if not is_held.all():
            missing = ~is_held
            stays = end <= np.array([file.planned for file in self._files])[shard]
            reading = self._reader.begin(shard[missing], offset[missing], stays[missing])
        return _LocatedRows(self, shard, offset, is_held, reading, columns)

    def copy(self, rows: "_LocatedRows") -> Tensor:
        """Copy the rows of a batch to the device, from wherever they are."""
        shard, offset, is_held, reading = rows.shard, rows.offset, rows.is_held, rows.reading
        self.samples.shards.check_sizes(set(shard.tolist()))
        addresses = self._addresses[shard] + offset
        in_window = WINDOW_BYTES - offset % WINDOW_BYTES
        if reading is not None:
            reading.wait()
            addresses[~is_held] = reading.addresses
            in_window[~is_held] = self.samples.row_bytes
        pixels = self.samples.empty(len(shard), self.device)
        self._copy_rows(addresses, in_window, pixels)
        if reading is not None:
            reading.give_back()
        with self._lock:
            self._served += len(shard)
            self._hits += int(is_held.sum())
        return pixels

    def counts(self) -> Counts:
        """See `Feed.counts`."""
        array = self.samples.shards.array
        return Counts(
            array.rows,
            array.rows_within([file.held for file in self._files]),
            array.rows_within([file.planned for file in self._files]),
            self._served,
            self._hits,
            self._filler.problem,
        )

    def close(self) -> None:
        """See `Feed.close`."""
        if os.getpid() != self._process:  # a forked child has no threads, and must not use CUDA
            return
        self._filler.close()
        self._reader.close()
        self._files = ()  # the last Loader of a file lets go of its pages


class _LocatedSamples(NamedTuple):
    feed: PagesFeed
    shard: np.ndarray
    offset: np.ndarray
    columns: list[Tensor]

    def begin(self, start: int, stop: int) -> "_LocatedRows":
        """See `PreparedSamples.begin`."""
        columns = [column[start:stop] for column in self.columns]
        return self.feed.begin(self.shard[start:stop], self.offset[start:stop], columns)


class _LocatedRows(NamedTuple):
    feed: PagesFeed
    shard: np.ndarray
    offset: np.ndarray
    is_held: np.ndarray
    reading: Reading | None  #: of the rows that are not held
    columns: list[Tensor]

    def is_ready(self) -> bool:
        """See `PendingRows.is_ready`."""
        return self.reading is None or self.reading.is_done()

    def fetch(self) -> list[Tensor]:
        """See `PendingRows.fetch`."""
        return [self.feed.copy(self), *self.columns]
