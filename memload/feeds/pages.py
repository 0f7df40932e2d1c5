"""The feed dma: the device copies rows from the page cache, and others are read from the files.

    rows of a batch ─┬─ held: at the beginning of each file, in registered page cache ─┬─▶ one
                     └─ others: threads read them into page-locked memory ─────────────┘   copy

If only a part of the files is planned to be held, the name of the feed is ``disk``. A row that will
be held, but is not yet, is read like the others, but through the page cache, where it stays.
"""

import os
import threading
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from memload.feeds.copies import RowCopies
from memload.feeds.feed import BeginRows, Counts, PendingRows, SampleArray
from memload.feeds.held import WINDOW_BYTES, Filler, HeldFile
from memload.feeds.reader import Reading, RowReader


class PagesFeed:
    """Brings rows to the device from registered page cache, or from the files.

    ``files`` are those of the array, with what is planned to be held.
    """

    def __init__(
        self,
        array: SampleArray,
        device: torch.device,
        files: Sequence[HeldFile],
        copy_rows: RowCopies,
    ) -> None:
        self.array, self.device = array, device
        self._files, self._copy_rows = files, copy_rows
        self._file_addresses = np.array([file.address for file in files])
        self._reader = RowReader(array.shards)
        self._filler = Filler(files, device, self._reader.is_busy)
        self._process = os.getpid()
        self._served = self._hits = 0
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """``"dma"``, or ``"disk"`` if not all of the files with used rows will be held."""
        used = [self._files[number] for number in self.array.used_shards]
        return "dma" if all(file.planned == file.size for file in used) else "disk"

    def prepare(self, samples: np.ndarray) -> BeginRows:
        """See `Feed.prepare`."""
        shard, offset = self.array.shards.array.locate(self.array.row[samples])
        return partial(self._begin, shard, offset)

    def _begin(self, shard: np.ndarray, offset: np.ndarray, start: int, stop: int) -> PendingRows:
        """Find the rows that are held, and begin to read the others."""
        shard, offset = shard[start:stop], offset[start:stop]
        addresses = self._file_addresses[shard] + offset
        # What is left of the row's window. Windows begin at multiples of their size.
        bytes_in_window = WINDOW_BYTES - offset % WINDOW_BYTES
        end = offset + self.array.row_bytes
        missing = end > np.array([file.held for file in self._files])[shard]
        fetch = partial(self._fetch, shard, addresses, bytes_in_window)
        if not missing.any():
            return PendingRows(fetch)
        stays = end <= np.array([file.planned for file in self._files])[shard]
        reading = self._reader.begin(shard[missing], offset[missing], stays[missing])
        addresses[missing], bytes_in_window[missing] = reading.addresses, self.array.row_bytes
        return PendingRows(partial(fetch, reading), reading.is_done)

    def _fetch(
        self,
        shard: np.ndarray,
        addresses: np.ndarray,
        bytes_in_window: np.ndarray,
        reading: Reading | None = None,
    ) -> list[Tensor]:
        """Copy the rows of a batch to the device, from wherever they are."""
        self.array.shards.check_sizes(set(shard.tolist()))
        if reading is not None:
            reading.wait()
        pixels = self.array.empty(len(shard), self.device)
        self._copy_rows(addresses, bytes_in_window, pixels)
        if reading is not None:
            self._reader.give_back(reading.buffer)
        with self._lock:
            self._served += len(shard)
            self._hits += len(shard) - (0 if reading is None else len(reading.addresses))
        return [pixels]

    def counts(self) -> Counts:
        """See `Feed.counts`."""
        array = self.array.shards.array
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
        torch.cuda.synchronize(self.device)  # it may still copy out of their memory
        self._files = ()  # the last Loader of a file lets go of its pages
