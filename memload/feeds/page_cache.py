"""The feeds dma, uva and disk: the device copies rows from the page cache, others from the files.

    rows of a batch ─┬─ held: registered page cache, or on the device ────┬─▶ one batched copy
                     └─ others: threads read them into page-locked memory ─┘   or kernel

``dma`` and ``uva`` hold all rows that the samples use. ``disk`` holds as many as fit a budget. A
row that is to be held, but is not there yet, is read through the page cache, where it stays. A row
that will never be held is read past the page cache.
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
from memload.feeds.row_ranges import FoundRows
from memload.feeds.row_reader import Reading, RowReader
from memload.jobs import Job
from memload.profiling import profiled
from memload.upload import upload

#: ``copy_rows(start, stop, out)`` copies rows ``start`` to ``stop`` of those that it was made for
#: into ``out`` ``(stop - start, …)``, on the current stream.
CopyRows = Callable[[int, int, Tensor], None]


class Copier(Protocol):
    """Copies rows from addresses that the device can read: `BatchedCopies` or `Kernel`."""

    def prepare(self, addresses: np.ndarray, before_boundary: Callable[[], np.ndarray]) -> CopyRows:
        """Return a function that copies some of the rows at these addresses, int64 ``(n,)``.

        A row may begin in one registered window and end in the next. ``before_boundary()`` is how
        many of its bytes lie in the first, or 0 if it lies in one window: int64 ``(n,)``.
        """


class PageCacheFeed:
    """Brings rows to the device from memory that it reads by itself, or from the files.

    ``claim`` says which rows are to be held. If pages cannot be registered, that raises FeedError.
    With ``may_hold_nothing``, no row is held then, and `counts` has the reason.
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
        may_hold_nothing: bool = False,
    ) -> None:
        self.name, self.device = name, device
        self._samples, self._copier = samples, copier
        used_rows = samples.used_rows()
        self._num_rows = len(used_rows)
        self._used_rows = None if self._num_rows == len(samples.shards) else used_rows
        self._reader = RowReader(samples.shards, device, buffers=buffers)
        self._claim: Claim | None = claim
        self._held = HeldRows(
            samples.shards, claim, device, self._reader, may_hold_nothing=may_hold_nothing
        )
        self._is_filled = self._holds_all = False
        self._counter = HitCounter()

    def prepare(self, samples: np.ndarray) -> Begin:
        """See `Feed.prepare`. Threads read the rows that are not held; fetching waits for them."""
        self._held.read_on_current_stream()
        rows = self._samples.row[samples]
        columns = [upload(column[samples], self.device) for column in self._samples.columns]
        copy_held = self._prepare_copies(rows) if self._all_are_held() else None

        def begin(start: int, stop: int) -> Fetch:
            if self._all_are_held():
                fetch_rows = Job(partial(fetch_held, start, stop))
            else:
                fetch_rows = self._begin_reading(rows[start:stop])
            values = [column[start:stop] for column in columns]
            return Job(lambda: [fetch_rows(), *values], fetch_rows.is_ready)

        def fetch_held(start: int, stop: int) -> Tensor:
            nonlocal copy_held
            if copy_held is None:  # since `prepare`, the last rows were brought in
                copy_held = self._prepare_copies(rows)
            self._counter.add(stop - start, stop - start)
            return self._copy(copy_held, start, stop)

        return begin

    def _all_are_held(self) -> bool:
        """Return whether all rows that the samples use are held, so that none is read any more."""
        if not self._is_filled and self._held.is_complete():
            self._holds_all = self._held.count(self._used_rows).now == self._num_rows
            self._is_filled = True
            self._reader.release()  # buffers for whole batches; what was begun goes on
        return self._holds_all

    def _prepare_copies(self, rows: np.ndarray) -> CopyRows:
        found = self._held.find(rows)
        return self._copier.prepare(found.addresses(), found.before_boundary)

    def _begin_reading(self, rows: np.ndarray) -> Job[Tensor]:
        """Begin to read the rows that are not held; return what fetches all of them."""
        found = self._held.find(rows)
        is_missing = ~found.are_held
        if not is_missing.any():
            return Job(partial(self._fetch, found, None))
        missing = rows[is_missing]
        reading = self._reader.begin(missing, self._held.are_kept(missing))
        return Job(partial(self._fetch, found, reading), reading.is_done)

    def _fetch(self, found: FoundRows, reading: Reading | None) -> Tensor:
        addresses = found.addresses()
        self._counter.add(len(addresses), int(found.are_held.sum()))
        if reading is not None:
            with profiled("read"):
                reading.wait()
            addresses[~found.are_held] = reading.addresses
        copy_rows = self._copier.prepare(addresses, found.before_boundary)
        pixels = self._copy(copy_rows, 0, len(addresses))
        if reading is not None:
            reading.give_back()
        return pixels

    def _copy(self, copy_rows: CopyRows, start: int, stop: int) -> Tensor:
        shards = self._samples.shards
        shards.check_sizes(range(len(shards.maps)))
        shape, dtype = self._samples.shape(stop - start), self._samples.dtype
        pixels = torch.empty(shape, dtype=dtype, device=self.device)
        with profiled("copy"):
            copy_rows(start, stop, pixels)
        return pixels

    def counts(self) -> ReadCounts:
        """See `Feed.counts`."""
        held = self._held.count(self._used_rows)
        bytes_read, seconds = self._reader.busy_time.so_far()
        return ReadCounts(
            self._num_rows,
            rows_held=held.now,
            rows_to_hold=held.planned,
            rows_on_device=held.on_device,
            served=self._counter.served,
            hits=self._counter.hits,
            bytes_read=bytes_read,
            seconds_reading=seconds,
            problem=self._held.problem,
        )

    def close(self) -> None:
        """See `Feed.close`."""
        self._held.close()
        self._reader.close()
        self._reader.release()
        self._claim = None  # what was claimed is left to other Loaders
