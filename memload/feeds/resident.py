"""The feed resident: all samples in the device's memory, where each batch is gathered."""

import math
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memload.errors import FeedError
from memload.feeds.feed import BeginRows, Counts, PendingRows, SampleArray, current_stream
from memload.upload import upload

#: Bytes that are copied to the device at a time when the feed is made.
_STAGING_BYTES = 32 << 20


class ResidentFeed:
    """Copies the rows of all samples to the device when it is created.

    Afterwards only the numbers of rows cross the bus. Rows that no sample uses are left out. Raises
    FeedError if the device has too little memory.
    """

    name = "resident"

    def __init__(self, array: SampleArray, device: torch.device) -> None:
        self.device = device
        position = np.searchsorted(array.used_rows, array.row)
        #: Where the row of each sample lies in `rows`; None if at the number of the sample.
        self._position = None if np.array_equal(position, np.arange(len(position))) else position
        try:
            self.rows = _load(array, device)
        except torch.OutOfMemoryError as error:
            raise FeedError(
                f"feed='resident' needs {len(array.used_rows) * array.row_bytes:,} bytes of "
                f"memory on {device}, which has fewer. Use feed='auto', or fewer samples."
            ) from error
        self._table = _Table(self.rows)

    def prepare(self, samples: np.ndarray) -> BeginRows:
        """See `Feed.prepare`. On CUDA, batches may also be fetched on other streams."""
        position = self._position
        rows = upload(samples if position is None else position[samples], self.device)
        fetch = partial(self._fetch, current_stream(self.device))
        return lambda start, stop: PendingRows(partial(fetch, rows[start:stop]))

    def _fetch(self, prepared_on: Any, rows: Tensor) -> list[Tensor]:
        stream = current_stream(self.device)
        if stream != prepared_on:  # the user's loop has changed its stream
            stream.wait_stream(prepared_on)
            rows.record_stream(stream)
        return [self._table.take(rows)]

    def counts(self) -> Counts | None:
        """See `Feed.counts`."""
        return None

    def close(self) -> None:
        """See `Feed.close`."""
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
        words = torch.index_select(self._words, 0, rows)
        return words.view(self._dtype).view(len(rows), *self._shape)


def _load(array: SampleArray, device: torch.device) -> Tensor:
    """Copy the used rows to the device, through page-locked memory."""
    table = array.empty(len(array.used_rows), device)
    step = max(1, _STAGING_BYTES // array.row_bytes)
    for start in range(0, len(table), step):
        rows = array.used_rows[start : start + step]
        staging = array.empty(len(rows), "cpu", pin_memory=True)
        array.shards.gather(rows, staging.numpy())
        table[start : start + step].copy_(staging, non_blocking=True)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # they are used on any stream
    return table
