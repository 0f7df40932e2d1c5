"""The whole data set in the device's memory, gathered there."""

import os
import threading
import weakref
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from memload.errors import FeedError
from memload.feeds.interface import Fetch, Samples, upload, widest_word
from memload.feeds.pages import Pages
from memload.storage.shards import Shards

#: What `torch.index_select` takes on CUDA in place of types that it does not.
_INDEXED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


class ResidentFeed:
    """Copies all rows and columns to the device when it is made, at the speed of the bus; then nothing crosses it.

    Feeds of a process that serve the same files on the same device share the rows.
    """

    name: ClassVar[str] = "resident"

    def __init__(self, samples: Samples, device: torch.device) -> None:
        if device.type != "cuda":
            raise FeedError(
                f"feed 'resident': expected a CUDA device, found {device}. Use feed='cpu'"
            )
        self._samples, self.device = samples, device
        self._one_to_one = np.array_equal(samples.row, np.arange(len(samples.row)))
        try:
            self._rows: Tensor | None = _rows_on(samples.shards, device)
            self._columns = [torch.from_numpy(column).to(device) for column in samples.columns]
            self._dtypes = [column.dtype for column in self._columns]
            self._columns = [
                column.view(_INDEXED.get(column.dtype, column.dtype)) for column in self._columns
            ]
        except torch.OutOfMemoryError as error:
            free, _ = torch.cuda.mem_get_info(device)
            needed = len(samples.shards) * samples.shards.array.row_bytes
            raise FeedError(
                f"feed 'resident': expected {needed:,} bytes of free memory on {device}, found {free:,}. "
                "Use feed='auto', or a smaller data set"
            ) from error

    def prepare(self, samples: np.ndarray) -> Fetch:
        """See `Feed.prepare`."""
        if self._rows is None:
            raise RuntimeError("feed 'resident': expected an open feed, found a closed one")
        stored, dtype, shape = self._rows, self._samples.dtype, self._samples.shape(-1)
        numbers = upload(samples, self.device)
        rows = numbers if self._one_to_one else upload(self._samples.row[samples], self.device)
        both = zip(self._columns, self._dtypes, strict=True)
        columns = [torch.index_select(column, 0, numbers).view(dtype) for column, dtype in both]

        def fetch(start: int, stop: int) -> list[Tensor]:
            pixels = torch.index_select(stored, 0, rows[start:stop])
            return [pixels.view(dtype).view(shape), *[column[start:stop] for column in columns]]

        return fetch

    def close(self) -> None:
        """See `Feed.close`."""
        self._rows = None
        self._columns = []


_shared: weakref.WeakValueDictionary[tuple[object, ...], Tensor] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def _rows_on(shards: Shards, device: torch.device) -> Tensor:
    """Return all rows on the device, ``(rows, words)`` of the widest type that fits."""
    key = (os.getpid(), device, *shards.identities)
    with _lock:
        rows = _shared.get(key)
        if rows is None:
            rows = _shared[key] = _load(shards, device)
        return rows


def _load(shards: Shards, device: torch.device) -> Tensor:
    row_bytes = shards.array.row_bytes
    word = widest_word(row_bytes)
    rows = torch.empty((len(shards), row_bytes // word.itemsize), dtype=word, device=device)
    flat = rows.view(torch.uint8).view(-1)
    try:
        pages = Pages(shards, device)
    except FeedError:  # then the driver copies by way of memory of its own, more slowly
        shards.secure(np.arange(len(shards)))
        for start, pixels in zip(shards.starts, shards.maps, strict=False):
            part = torch.from_numpy(pixels.reshape(-1).view(np.uint8))
            flat[start * row_bytes : start * row_bytes + len(part)].copy_(part)
    else:
        try:
            pages.copy_all(flat)
            torch.cuda.current_stream(device).synchronize()
        finally:
            pages.close()
    return rows
