"""All samples in the device's memory, where each batch is gathered."""

import contextlib
import ctypes
import hashlib
import threading
import weakref
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from memload.errors import FeedError
from memload.feeds import windows
from memload.feeds.budget import identity_of
from memload.feeds.interface import Begin, ReadCounts, Samples, require_cuda, widest_word
from memload.feeds.pinned import PinnedFeed
from memload.feeds.registered import RegisteredFile
from memload.feeds.windows import window_sizes
from memload.jobs import Job
from memload.profiling import profiled
from memload.storage.shards import Shards
from memload.upload import upload

#: Types of the same size for those that `torch.index_select` does not take on CUDA.
_INDEXABLE = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
#: The size of a staging buffer, of which there are three, for the rows of a subset.
_STAGING_BYTES = 32 << 20


class ResidentFeed:
    """Copies the rows and columns of all samples to the device when it is created.

    Afterwards nothing crosses the bus but the numbers of samples and rows. Rows that no sample uses
    are left out. A whole data set is copied at the speed of the bus; a subset is gathered by
    ``num_threads`` threads. Feeds of one process that use the same rows of the same files on one
    device share them.
    """

    name: ClassVar[str] = "resident"

    def __init__(self, samples: Samples, device: torch.device, *, num_threads: int) -> None:
        require_cuda(self.name, device)
        self._samples, self.device = samples, device
        used_rows = samples.used_rows()
        #: Where the row of each sample lies in `_rows`.
        self._position = np.searchsorted(used_rows, samples.row)
        self._one_to_one = np.array_equal(self._position, np.arange(len(samples.row)))
        try:
            self._rows: Tensor | None = _shared_rows(samples, used_rows, device, num_threads)
            columns = [torch.from_numpy(column).to(device) for column in samples.columns]
        except torch.OutOfMemoryError as error:
            free, _ = torch.cuda.mem_get_info(device)
            needed = len(used_rows) * samples.shards.array.row_bytes
            raise FeedError(
                f"feed='resident' needs {needed:,} bytes of memory on {device}, which has {free:,} "
                "bytes free. Use feed='auto', or fewer samples."
            ) from error
        self._dtypes = [column.dtype for column in columns]
        self._columns = [
            column.view(_INDEXABLE.get(column.dtype, column.dtype)) for column in columns
        ]

    def prepare(self, samples: np.ndarray) -> Begin:
        """See `Feed.prepare`."""
        if self._rows is None:
            raise RuntimeError("feed='resident' is closed")
        stored, dtype, shape = self._rows, self._samples.dtype, self._samples.shape(-1)
        on_device = upload(samples, self.device)
        rows = on_device if self._one_to_one else upload(self._position[samples], self.device)
        columns = [
            torch.index_select(column, 0, on_device).view(dtype)
            for column, dtype in zip(self._columns, self._dtypes, strict=True)
        ]

        def fetch(start: int, stop: int) -> list[Tensor]:
            with profiled("copy"):
                pixels = torch.index_select(stored, 0, rows[start:stop])
            return [pixels.view(dtype).view(shape), *(column[start:stop] for column in columns)]

        return lambda start, stop: Job(partial(fetch, start, stop))

    def counts(self) -> ReadCounts | None:
        """See `Feed.counts`."""
        return None

    def close(self) -> None:
        """See `Feed.close`."""
        self._rows = None
        self._columns = []


#: The rows on devices, by device, files and used rows.
_shared: weakref.WeakValueDictionary[tuple[object, ...], Tensor] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def _shared_rows(
    samples: Samples, used_rows: np.ndarray, device: torch.device, num_threads: int
) -> Tensor:
    """Return the used rows on the device, ``(rows, words)`` of the widest type that fits."""
    files = [identity_of(descriptor) for descriptor in samples.shards.descriptors]
    key = (device, *files, hashlib.sha256(used_rows.data).digest())
    with _lock:
        rows = _shared.get(key)
        if rows is None:
            rows = _shared[key] = _load(samples, used_rows, device, num_threads)
        return rows


def _load(
    samples: Samples, used_rows: np.ndarray, device: torch.device, num_threads: int
) -> Tensor:
    shards = samples.shards
    row_bytes = shards.array.row_bytes
    word = widest_word(row_bytes)
    rows = torch.empty((len(used_rows), row_bytes // word.itemsize), dtype=word, device=device)
    rows_as_bytes = rows.view(torch.uint8).view(len(used_rows), row_bytes)
    is_copied = False
    if len(used_rows) == len(shards):
        with contextlib.suppress(FeedError):  # if the pages cannot be registered
            _copy_files(shards, rows_as_bytes.view(-1))
            is_copied = True
    if not is_copied:
        _gather(samples, used_rows, rows_as_bytes, num_threads)
    torch.cuda.current_stream(device).synchronize()
    return rows


def _copy_files(shards: Shards, out: Tensor) -> None:
    """Copy all rows of all files, as bytes, into ``out`` (uint8), on the current stream.

    Each window is registered while it is copied, and the next one is read meanwhile. So little RAM
    is page-locked, also if the files are larger than RAM. Raises FeedError if no page can be.
    """
    stream, copied = torch.cuda.current_stream(out.device), 0
    header_bytes = shards.array.header_bytes
    expected = zip(shards.paths, shards.descriptors, window_sizes(shards), strict=True)
    for path, descriptor, sizes in expected:
        file = RegisteredFile(path, descriptor, int(sizes.sum()))
        file.probe(out.device)
        file.readers.add(stream)
        for window, size in enumerate(sizes[sizes > 0].tolist()):
            start = window * windows.WINDOW_BYTES
            file.fault_in(start, size)
            with contextlib.suppress(FeedError):  # then it is copied more slowly
                file.register(window, size, out.device)
            stream.synchronize()
            file.unregister(window - 1)
            first = max(start, header_bytes)
            # Made from the address, as torch warns of arrays that cannot be written to.
            window_bytes = (ctypes.c_uint8 * (start + size - first)).from_address(
                file.address + first
            )
            pixels = torch.from_numpy(np.ctypeslib.as_array(window_bytes))
            out[copied : copied + len(pixels)].copy_(pixels, non_blocking=True)
            copied += len(pixels)


def _gather(samples: Samples, rows: np.ndarray, out: Tensor, num_threads: int) -> None:
    """Copy some rows through page-locked memory."""
    pinned = PinnedFeed(samples, out.device, num_threads=num_threads, callers=1)
    rows_per_buffer = max(1, _STAGING_BYTES // samples.shards.array.row_bytes)
    with contextlib.closing(pinned):
        for start in range(0, len(rows), rows_per_buffer):
            some = slice(start, start + rows_per_buffer)
            pixels = pinned.fetch_rows(rows[some])
            out[some].copy_(pixels.view(torch.uint8).view(len(pixels), -1))
