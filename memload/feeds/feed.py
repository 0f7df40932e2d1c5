"""What a feed is given, and what it promises."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from memload.storage.shards import Shards
from memload.upload import upload


@dataclass(frozen=True)
class SampleArray:
    """One array of the data set, such as the images: the row of each sample there, and columns.

    ``row`` is int64 ``(n,)``. Samples may share rows, and rows may be unused. ``columns`` are
    arrays ``(n, …)``. Only the images have columns.
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

    @cached_property
    def used_shards(self) -> list[int]:
        """The numbers of the shards with these rows."""
        numbers: list[int] = np.unique(self.shards.array.shard_of(self.used_rows)).tolist()
        return numbers

    def empty(self, count: int, device: torch.device | str, *, pin_memory: bool = False) -> Tensor:
        """Return uninitialised memory for some rows: for images ``(count, H, W, C)``."""
        shape = (count, *self.shards.array.shape)
        return torch.empty(shape, dtype=self.dtype, device=device, pin_memory=pin_memory)

    def upload_columns(self, samples: np.ndarray, device: torch.device) -> list[Tensor]:
        """Return the columns of some samples (int64) on a device."""
        return [upload(column[samples], device) for column in self.columns]


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


class PendingRows(NamedTuple):
    """The rows and columns of one batch, on their way to the device.

    ``fetch()`` returns ``[pixels, *columns]``: pixels ``(N, H, W, C)`` and columns ``(N, …)``.
    Nobody else writes to these tensors. It is called once, on any thread, and blocks until the rows
    are in memory. On CUDA, the tensors are then ordered on torch's current stream, which has to be
    the one on which `Feed.prepare` was called. It raises FormatError if a file was truncated since,
    or cannot be read.

    ``is_ready()`` returns whether `fetch` would not wait for the disk. It never blocks.
    """

    fetch: Callable[[], list[Tensor]]
    is_ready: Callable[[], bool] = lambda: True


class PreparedSamples(NamedTuple):
    """The samples of many batches, for which shared work is done once.

    ``begin(start, stop)`` begins to bring ``samples[start:stop]``: it asks the disk for rows that
    are not in RAM.
    """

    begin: Callable[[int, int], PendingRows]

    @classmethod
    def of(
        cls, fetch: Callable[..., list[Tensor]], *values: np.ndarray | Tensor
    ) -> "PreparedSamples":
        """Return samples that need not be begun. ``fetch`` gets the batch's part of ``values``."""

        def begin(start: int, stop: int) -> PendingRows:
            return PendingRows(partial(fetch, *(value[start:stop] for value in values)))

        return cls(begin)


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
        """Wait for copies under way, then end threads. Memory goes with the feed; batches stay."""
