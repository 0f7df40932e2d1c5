"""The feed resident: all samples in the device's memory, where each batch is gathered."""

import hashlib
import math
import threading
import weakref
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from memload.errors import FeedError
from memload.feeds.feed import Counts, Samples
from memload.upload import upload

#: Bytes that are copied to the device at a time when the feed is made.
_STAGING_BYTES = 32 << 20


class ResidentFeed:
    """Copies the rows and columns of all samples to the device when it is created.

    Afterwards nothing crosses the bus but the numbers of samples and rows. Rows that no sample uses
    are left out. Feeds of one process that use the same rows of the same files on one device share
    them. Raises FeedError if the device has too little memory.
    """

    name = "resident"

    def __init__(self, samples: Samples, device: torch.device) -> None:
        self.samples, self.device = samples, device
        position = np.searchsorted(samples.used_rows, samples.row)
        #: Where the row of each sample lies in `rows`; None if at the number of the sample.
        self.position = None if np.array_equal(position, np.arange(len(position))) else position
        try:
            self.rows = _shared_rows(samples, device)
            columns = [torch.from_numpy(column).to(device) for column in samples.columns]
        except torch.OutOfMemoryError as error:
            raise FeedError(
                f"feed='resident' needs {len(samples.used_rows) * samples.row_bytes:,} bytes of "
                f"memory on {device}, which has fewer. Use feed='auto', or fewer samples."
            ) from error
        self._table = _Table(self.rows)
        self._columns = [_Table(column) for column in columns]

    def prepare(self, samples: np.ndarray) -> "_ResidentSamples":
        """See `Feed.prepare`. On CUDA, batches may also be fetched on other streams."""
        numbers = upload(samples, self.device)
        rows = numbers if self.position is None else upload(self.position[samples], self.device)
        columns = [column.take(numbers) for column in self._columns]
        return _ResidentSamples(self._table, rows, columns, _current_stream(self.device))

    def counts(self) -> Counts | None:
        """See `Feed.counts`."""
        return None

    def close(self) -> None:
        """See `Feed.close`. The memory is freed with the feed."""
        if self.device.type == "cuda":  # batches may not be gathered yet, on any stream
            torch.cuda.synchronize(self.device)


class _Table:
    """Rows on the device, seen as the widest integers that a row consists of.

    So they are copied fast, and torch's ``index_select`` takes all of their types.
    """

    def __init__(self, values: Tensor) -> None:
        numbers_per_row = math.prod(values.shape[1:])
        row_bytes = numbers_per_row * values.itemsize
        words = (torch.int64, torch.int32, torch.int16, torch.int8)
        word = next(word for word in words if row_bytes % word.itemsize == 0)
        flat = values.view(len(values), numbers_per_row)
        self._words = flat.view(word) if row_bytes else flat
        self._dtype, self._shape = values.dtype, values.shape[1:]

    def take(self, rows: Tensor) -> Tensor:
        """Return a copy of some rows (int64), in their order."""
        return (
            torch.index_select(self._words, 0, rows).view(self._dtype).view(len(rows), *self._shape)
        )


class _ResidentSamples(NamedTuple):
    table: _Table
    rows: Tensor
    columns: list[Tensor]
    stream: Any  #: on which they were prepared; None on the CPU

    def begin(self, start: int, stop: int) -> "_ResidentRows":
        """See `PreparedSamples.begin`."""
        return _ResidentRows(self, start, stop)


class _ResidentRows(NamedTuple):
    prepared: _ResidentSamples
    start: int
    stop: int

    def is_ready(self) -> bool:
        """See `PendingRows.is_ready`."""
        return True

    def fetch(self) -> list[Tensor]:
        """See `PendingRows.fetch`."""
        table, rows, columns, prepared_on = self.prepared
        stream = _current_stream(rows.device)
        if stream is not None and stream != prepared_on:  # the user's loop has changed its stream
            stream.wait_stream(prepared_on)
            for tensor in (rows, *columns):
                tensor.record_stream(stream)
        pixels = table.take(rows[self.start : self.stop])
        return [pixels, *(column[self.start : self.stop] for column in columns)]


def _current_stream(device: torch.device) -> Any:
    return torch.cuda.current_stream(device.index) if device.type == "cuda" else None


#: The rows on devices, by device, files and used rows.
_shared: weakref.WeakValueDictionary[tuple[object, ...], Tensor] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def _shared_rows(samples: Samples, device: torch.device) -> Tensor:
    """Return the used rows on the device, ``(rows, …)``."""
    digest = hashlib.sha256(np.ascontiguousarray(samples.used_rows).data).digest()
    key = (device, *samples.shards.identities, digest)
    with _lock:
        rows = _shared.get(key)
        if rows is None:
            rows = _shared[key] = _load(samples, device)
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # they are used on any stream
        return rows


def _load(samples: Samples, device: torch.device) -> Tensor:
    """Copy the used rows to the device, through page-locked memory."""
    used_rows = samples.used_rows
    table = samples.empty(len(used_rows), device)
    step = max(1, _STAGING_BYTES // samples.row_bytes)
    for start in range(0, len(used_rows), step):
        some = used_rows[start : start + step]
        staging = samples.empty_page_locked(len(some))
        samples.shards.gather(some, staging.numpy())
        table[start : start + step].copy_(staging, non_blocking=True)
    return table
