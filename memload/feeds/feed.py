"""What a feed is given, and what it promises."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from memload.errors import FeedError
from memload.storage.shards import Shards
from memload.upload import upload


@dataclass(frozen=True)
class Samples:
    """The samples that a feed serves: their rows in one array, and their columns.

    ``row`` is int64 ``(n,)``, the row of each sample. Samples may share rows, and rows may be
    unused. ``columns`` are arrays ``(n, …)``. Only the samples of the images have columns.
    """

    shards: Shards
    row: np.ndarray
    columns: Sequence[np.ndarray] = ()

    @property
    def row_bytes(self) -> int:
        """The size of a row in bytes."""
        return self.shards.array.row_bytes

    @cached_property
    def dtype(self) -> torch.dtype:
        """The type of the pixels."""
        return torch.from_numpy(np.empty(0, self.shards.array.descr)).dtype

    @cached_property
    def used_rows(self) -> np.ndarray:
        """The rows that the samples use: each once, in ascending order, int64. Read-only."""
        if (self.row[1:] > self.row[:-1]).all():  # as of most data sets: takes no memory then
            return self.row
        return np.unique(self.row)

    def empty(self, count: int, device: torch.device) -> Tensor:
        """Return uninitialised memory for some rows: for images ``(count, H, W, C)``."""
        return torch.empty((count, *self.shards.array.shape), dtype=self.dtype, device=device)

    def empty_page_locked(self, count: int) -> Tensor:
        """Return the same in memory that the device copies from by itself. Raises FeedError."""
        return page_locked((count, *self.shards.array.shape), self.dtype)

    def upload_columns(self, samples: np.ndarray, device: torch.device) -> list[Tensor]:
        """Return the columns of some samples (int64) on a device."""
        return [upload(column[samples], device) for column in self.columns]


def page_locked(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return uninitialised page-locked memory, which torch's own allocator uses again.

    Raises FeedError if there is none.
    """
    try:
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)
    except RuntimeError as error:
        raise FeedError(
            f"CUDA cannot page-lock memory for {shape[0]:,} rows: {str(error).splitlines()[0]}. "
            "Use a smaller batch_size, fewer num_threads, or free some RAM."
        ) from error


class Counts(NamedTuple):
    """Where a feed has found the rows that it served so far.

    >>> print(Counts(2000, rows_held=1000, rows_to_hold=1000, served=50, hits=24))
    1,000 of 2,000 rows are held; of 50 rows so far, 24 came from memory and 26 from the files
    """

    #: How many rows there are in the files.
    rows: int
    #: How many of them are held in memory that the device reads now, and how many will be.
    rows_held: int
    rows_to_hold: int
    #: Rows of the batches that were fetched so far, and how many of them were held.
    served: int = 0
    hits: int = 0
    #: Why fewer rows are held than was planned; empty if nothing is wrong.
    problem: str = ""

    def __str__(self) -> str:
        text = f"{self.rows_held:,} of {self.rows:,} rows are held"
        if self.rows_to_hold > self.rows_held:
            text += f", and {self.rows_to_hold - self.rows_held:,} more will be"
        if self.served:
            text += (
                f"; of {self.served:,} rows so far, {self.hits:,} came from memory and "
                f"{self.served - self.hits:,} from the files"
            )
        return f"{text}; {self.problem}" if self.problem else text


class PendingRows(Protocol):
    """The rows and columns of one batch, on their way to the device."""

    def is_ready(self) -> bool:
        """Return whether `fetch` would not wait for the disk. Never blocks."""

    def fetch(self) -> list[Tensor]:
        """Return ``[pixels, *columns]``: pixels ``(N, H, W, C)`` and columns ``(N, …)``.

        Nobody else writes to these tensors. Called once, on any thread. Blocks until the rows are
        in memory. On CUDA, the tensors are then ordered on torch's current stream, which has to be
        the one on which `Feed.prepare` was called. Raises FormatError if a file was truncated
        since, or cannot be read.
        """


class PreparedSamples(Protocol):
    """The samples of many batches, for which shared work is done once."""

    def begin(self, start: int, stop: int) -> PendingRows:
        """Begin to bring ``samples[start:stop]``: asks the disk for rows that are not in RAM."""


class Feed(Protocol):
    """Brings samples to the device on which the model wants them.

    Creating a feed raises FeedError if it cannot serve these samples on this device.
    """

    device: torch.device

    @property
    def name(self) -> str:
        """The name of the feed, such as ``"dma"``."""

    def prepare(self, samples: np.ndarray) -> PreparedSamples:
        """Prepare a chunk of samples. ``samples`` are numbers of samples, int64 ``(m,)``."""

    def counts(self) -> Counts | None:
        """Return where rows were found so far; None if the feed does not count them."""

    def close(self) -> None:
        """Wait for copies under way, then free memory and threads. Batches stay valid."""
