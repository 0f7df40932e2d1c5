"""Feeds whose device reads the page cache by itself, and the files where it cannot: dma, uva, disk.

    rows of a batch ─┬─ held: registered page cache ──────────────────────┬─▶ one batched copy
                     └─ others: threads read them into page-locked memory ─┘   or kernel

``dma`` and ``uva`` hold all rows that are used. ``disk`` holds as many as fit a budget. What is not
there yet is read through the page cache, to stay; what will never be held is read past it.
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from memload.feeds.budget import Claim
from memload.feeds.held import HeldRows
from memload.feeds.interface import Begin, Fetch, HitCounter, ReadCounts, Samples
from memload.feeds.row_reader import Reading, RowReader
from memload.feeds.windows import WindowRows, rows_inside
from memload.upload import upload

#: ``copy_rows(start, stop, out)`` copies rows ``start`` to ``stop`` of those that it was made for
#: into ``out`` ``(stop - start, …)``, on the current stream.
CopyRows = Callable[[int, int, Tensor], None]


class Copier(Protocol):
    """Copies rows from addresses that the device can read: `BatchedCopies` or `Kernel`."""

    def prepare(self, addresses: np.ndarray, before_boundary: np.ndarray) -> CopyRows:
        """Return a function that copies some of the rows at these addresses.

        ``before_boundary`` says how many bytes of each row lie in one registration if it lies in
        two, else 0.
        """


class PageCacheFeed:
    """Brings rows to the device from registered page cache, or from the files.

    ``claim`` says which rows are to be held in RAM.
    """

    def __init__(
        self,
        name: str,
        samples: Samples,
        device: torch.device,
        copier: Copier,
        *,
        claim: Claim,
        buffers: int,
    ) -> None:
        self.name, self.device = name, device
        self._samples, self._copier = samples, copier
        used_rows = samples.used_rows()
        self._reader = RowReader(samples.shards, device, buffers=buffers)
        self._claim: Claim | None = claim
        self._held = HeldRows(samples.shards, claim, device, self._reader.idle)
        self._is_kept = rows_inside(samples.shards, claim.plan)
        self._holds_all = bool(self._is_kept[used_rows].all())
        self._num_rows, self._num_kept = len(used_rows), int(self._is_kept[used_rows].sum())
        self._counter = HitCounter()

    def prepare(self, samples: np.ndarray) -> Begin:
        """See `Feed.prepare`. Threads read the rows that are not held; fetching waits for them."""
        rows = self._samples.row[samples]
        columns = [upload(column[samples], self.device) for column in self._samples.columns]
        looked_up = self._held.look_up(rows)
        copy_held: CopyRows | None = None  # once all rows are held

        def begin(start: int, stop: int) -> Fetch:
            if self._holds_all and self._held.complete.is_set():
                fetch_rows: Callable[[], Tensor] = partial(fetch_held, start, stop)
            else:
                some = slice(start, stop)
                fetch_rows = self._begin_reading(rows[some], looked_up[some])
            return lambda: [fetch_rows(), *(column[start:stop] for column in columns)]

        def fetch_held(start: int, stop: int) -> Tensor:
            nonlocal copy_held
            if copy_held is None:
                copy_held = self._copier.prepare(looked_up.addresses(), looked_up.before_boundary)
                self._reader.release()  # what other threads have begun goes on
            self._counter.add(stop - start, stop - start)
            return self._copy(copy_held, start, stop)

        return begin

    def _begin_reading(self, rows: np.ndarray, looked_up: WindowRows) -> Callable[[], Tensor]:
        """Begin to read the rows that are not held; return what fetches all of them."""
        held = looked_up.are_held()
        self._counter.add(len(rows), int(held.sum()))
        reading = None
        if not held.all():
            missing = rows[~held]
            reading = self._reader.begin(missing, self._is_kept[missing])
        return partial(self._fetch, looked_up, held, reading)

    def _fetch(self, looked_up: WindowRows, held: np.ndarray, reading: Reading | None) -> Tensor:
        addresses, before_boundary = looked_up.addresses(), looked_up.before_boundary
        if reading is not None:
            reading.wait()
            addresses[~held] = reading.addresses
            before_boundary = np.where(held, before_boundary, 0)
        copy_rows = self._copier.prepare(addresses, before_boundary)
        pixels = self._copy(copy_rows, 0, len(held))
        if reading is not None:
            reading.give_back()
        return pixels

    def _copy(self, copy_rows: CopyRows, start: int, stop: int) -> Tensor:
        shards = self._samples.shards
        shards.check_sizes(range(len(shards.maps)))
        shape, dtype = self._samples.shape(stop - start), self._samples.dtype
        pixels = torch.empty(shape, dtype=dtype, device=self.device)
        copy_rows(start, stop, pixels)
        return pixels

    def counts(self) -> ReadCounts:
        """See `Feed.counts`."""
        return ReadCounts(
            self._num_rows,
            rows_held=self._num_kept,
            rows_to_hold=self._num_kept,
            served=self._counter.served,
            hits=self._counter.hits,
            bytes_read=self._reader.bytes_read,
            seconds_reading=self._reader.seconds_read,
        )

    def close(self) -> None:
        """See `Feed.close`."""
        self._held.close()
        self._reader.close()
        self._claim = None  # what was claimed is left to other Loaders
