"""Rows copied by the device's own copy engines, straight from the page cache."""

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from memload.errors import FeedError
from memload.feeds.interface import Fetch, Samples, upload
from memload.feeds.pages import Pages
from memload.feeds.pinned import PinnedFeed

#: Copies rows ``start`` to ``stop`` of some into a tensor ``(stop - start, H, W, C)``.
Copy = Callable[[int, int, Tensor], None]

#: Rows whose pages are not registered yet are staged in pieces of so many bytes, since staging memory is page-locked.
_PIECE_BYTES = 8 << 20


class PageCacheFeed:
    """What the two feeds that read the page cache have in common; they differ in who copies: `_prepare`.

    Rows whose window is not registered yet come by way of the CPU: `PinnedFeed`.
    """

    name: ClassVar[str]

    def __init__(self, samples: Samples, device: torch.device, *, num_threads: int) -> None:
        if device.type != "cuda":
            raise FeedError(
                f"feed {self.name!r}: expected a CUDA device, found {device}. Use feed='cpu'"
            )
        self._check(device)
        self._samples, self.device = samples, device
        self._row_bytes = samples.shards.array.row_bytes
        self._rest = PinnedFeed(samples, device, num_threads=num_threads, callers=1, most=2)
        self._pages = Pages(samples.shards, device)

    def prepare(self, samples: np.ndarray) -> Fetch:
        """See `Feed.prepare`. Fetching blocks for the rows whose pages are not registered yet."""
        rows = self._samples.row[samples]
        columns = [upload(column[samples], self.device) for column in self._samples.columns]
        shape, dtype = self._samples.shape, self._samples.dtype
        copy: Copy | None = None

        def fetch(start: int, stop: int) -> list[Tensor]:
            nonlocal copy
            if copy is None and self._pages.complete:
                copy = self._prepare(rows)
                self._rest.close()  # its page-locked memory is not needed any more
            out = torch.empty(shape(stop - start), dtype=dtype, device=self.device)
            if copy is None:
                self._fetch_ready(rows[start:stop], out)
            else:
                copy(start, stop, out)
            return [out, *[column[start:stop] for column in columns]]

        return fetch

    def close(self) -> None:
        """See `Feed.close`."""
        self._pages.close()
        self._rest.close()

    def _fetch_ready(self, rows: np.ndarray, out: Tensor) -> None:
        """Copy rows into ``out``, those that the device can read yet and the others."""
        is_ready = self._pages.locate(rows).ready
        ready = np.flatnonzero(is_ready)
        if len(ready) == len(rows):
            self._prepare(rows)(0, len(rows), out)
            return
        some = torch.empty(
            self._samples.shape(len(ready)), dtype=self._samples.dtype, device=self.device
        )
        self._prepare(rows[ready])(0, len(ready), some)
        flat, width = out.view(torch.uint8).view(len(rows), -1), self._row_bytes
        flat.index_copy_(
            0, upload(ready, self.device), some.view(torch.uint8).view(len(ready), width)
        )
        self._fill(rows, np.flatnonzero(~is_ready), out)

    def _fill(self, rows: np.ndarray, missing: np.ndarray, out: Tensor) -> None:
        each = max(1, _PIECE_BYTES // self._row_bytes)
        for start in range(0, len(missing), each):
            part = missing[start : start + each]
            staged = self._rest.fetch_rows(rows[part])
            out.view(torch.uint8).view(len(rows), -1).index_copy_(
                0, upload(part, self.device), staged.view(torch.uint8).view(len(part), -1)
            )

    def _check(self, device: torch.device) -> None:
        """Raise FeedError where this way of copying is missing."""
        raise NotImplementedError

    def _prepare(self, rows: np.ndarray) -> Copy:
        """Return a function that copies some of these rows, all ready, into a tensor, on the current stream."""
        raise NotImplementedError


class DmaFeed(PageCacheFeed):
    """One batched copy a batch (``cuMemcpyBatchAsync``, CUDA 12.8): no kernel, no memory, next to no CPU time.

    55.1 GB/s from a page cache against 55.3 from page-locked memory, on one H200; 130 µs of the caller's time for
    256 rows. It is an ordinary row's size that makes it so: rows below 28 KiB go faster through `UvaFeed`.
    """

    name: ClassVar[str] = "dma"

    def _check(self, device: torch.device) -> None:
        self._driver = _driver()
        self._attributes = self._driver.CUmemcpyAttributes()
        order = self._driver.CUmemcpySrcAccessOrder
        self._attributes.srcAccessOrder = order.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM

    def _prepare(self, rows: np.ndarray) -> Copy:
        places = self._pages.locate(rows)
        return lambda start, stop, out: self._copy(
            places.address[start:stop], places.split[start:stop], out
        )

    def _copy(self, address: np.ndarray, split: np.ndarray, out: Tensor) -> None:
        if not len(address):
            return
        size = np.full(len(address), self._row_bytes, np.int64)
        target = out.data_ptr() + np.arange(len(address)) * self._row_bytes
        across = np.flatnonzero(split)
        if across.size:  # one copy may not cross from one registration to the next
            first = split[across]
            size[across] = first
            address = np.concatenate([address, address[across] + first])
            target = np.concatenate([target, target[across] + first])
            size = np.concatenate([size, self._row_bytes - first])
        driver = self._driver
        stream = torch.cuda.current_stream(self.device.index).cuda_stream
        (status,) = driver.cuMemcpyBatchAsync(
            [driver.CUdeviceptr(value) for value in target.tolist()],
            [driver.CUdeviceptr(value) for value in address.tolist()],
            size.tolist(),
            len(size),
            [self._attributes],
            [0],
            1,
            driver.CUstream(stream),
        )
        if int(status):
            raise FeedError(
                f"feed 'dma': expected {len(size)} copies to start, found {status.name}. Use feed='pinned'"
            )


def _driver() -> Any:
    """Return NVIDIA's bindings of the driver. Raises FeedError where they or the driver are too old."""
    try:
        from cuda.bindings import driver
    except ImportError:
        raise FeedError(
            "feed 'dma': expected NVIDIA's bindings, found none: pip install cuda-bindings"
        ) from None
    status, version = driver.cuDriverGetVersion()
    if not hasattr(driver, "cuMemcpyBatchAsync") or int(status) or version < 12080:
        raise FeedError(
            f"feed 'dma': expected a driver and cuda-bindings of CUDA 12.8 or later, found a driver of {version}"
        )
    return driver
