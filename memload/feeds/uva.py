"""Rows read by a kernel, straight from the page cache over the bus."""

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from memload.errors import FeedError
from memload.feeds.dma import Copy, PageCacheFeed
from memload.feeds.interface import upload, widest_word

#: Programs that copy: enough to fill the bus, while most of the device is left to the model.
_PROGRAMS = 64
_MOST_LANES = 2048


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

    def _prepare(self, rows: np.ndarray) -> Copy:
        addresses = upload(self._pages.addresses(rows), self.device)
        word = widest_word(self._row_bytes)
        words = self._row_bytes // word.itemsize
        block = min(_MOST_LANES, 1 << (words - 1).bit_length())

        def copy(start: int, stop: int, out: Tensor) -> None:
            if stop > start:
                self._kernel[(_PROGRAMS,)](
                    addresses[start:stop], out.view(-1).view(word), words, stop - start, block
                )

        return copy
