"""Rows read by a kernel, straight from the page cache over the bus."""

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from memload.errors import FeedError
from memload.feeds.dma import PageCacheFeed
from memload.feeds.interface import upload

#: Programs that copy: enough to fill the bus, while most of the device is left to the model.
_PROGRAMS = 64
_BLOCK = 2048


class UvaFeed(PageCacheFeed):
    """A kernel gathers a batch's rows: for rows below 28 KiB, or where CUDA has no batched copy.

    50 GB/s, and 49 GB/s with rows of 3 KiB where the copy engines reach 5, on one H200.
    """

    name: ClassVar[str] = "uva"

    def _check(self, device: torch.device) -> None:
        try:
            from memload.feeds.uva_kernel import gather_rows
        except ImportError:
            raise FeedError("feed 'uva': expected Triton, found none: pip install triton") from None
        self._kernel: Any = gather_rows

    def _copy(self, address: np.ndarray, split: np.ndarray, position: np.ndarray, out: Tensor) -> None:
        if not len(address):
            return
        table = upload(np.stack([address, position]), self._device)
        words = _words(self._row_bytes)
        self._kernel[(_PROGRAMS,)](
            table,
            out.view(torch.uint8).view(-1).view(words),
            self._row_bytes // words.itemsize,
            len(address),
            _BLOCK,
        )


def _words(row_bytes: int) -> torch.dtype:
    """Return the widest type that rows are whole numbers of; they begin at multiples of it, too."""
    return next(word for word in (torch.int64, torch.int32, torch.int16, torch.int8) if not row_bytes % word.itemsize)
