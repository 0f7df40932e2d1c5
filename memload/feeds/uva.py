"""Rows read by a kernel over the bus, straight from the page cache."""

from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from memload.errors import FeedError
from memload.feeds.interface import widest_word
from memload.feeds.pages import CopyBatch, PageCacheFeed
from memload.upload import upload

#: Programs of the kernel: enough to fill the bus, and few enough to leave the device to the model.
_PROGRAMS = 64
#: The most words that one program copies at a time.
_MAX_BLOCK = 2048


class UvaFeed(PageCacheFeed):
    """A kernel gathers each batch: for rows below 28 KiB, or if CUDA has no batched copies.

    On one H200 it reaches 50 GB/s, and 49 GB/s with rows of 3 KiB, where the copy engines reach 5.
    """

    name: ClassVar[str] = "uva"

    def _load_library(self) -> None:
        try:
            from memload.feeds.uva_kernel import gather_rows
        except ImportError:
            raise FeedError(
                "feed='uva' needs Triton, which is not installed. Run 'pip install triton'."
            ) from None
        self._kernel: Any = gather_rows

    def _prepare_copies(self, rows: np.ndarray) -> CopyBatch:
        addresses = upload(self._pages.addresses(rows), self.device)
        word = widest_word(self._row_bytes, self._samples.shards.array.header_bytes)
        words = self._row_bytes // word.itemsize
        block = min(_MAX_BLOCK, 1 << (words - 1).bit_length())

        def copy_batch(start: int, stop: int, out: Tensor) -> None:
            if stop > start:
                self._kernel[(_PROGRAMS,)](
                    addresses[start:stop], out.view(-1).view(word), words, stop - start, block
                )

        return copy_batch
