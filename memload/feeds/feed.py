"""What a feed is given, and what it promises."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from memload.storage.shards import Shards


@dataclass(frozen=True)
class SampleArray:
    """One array of the data set, such as the images, and the row of each sample there.

    ``row`` is int64 ``(n,)``. Samples may share rows, and rows may be unused.
    """

    shards: Shards
    row: np.ndarray

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


def current_stream(device: torch.device) -> Any:
    """Return the CUDA stream that is current for the caller; None on the CPU."""
    if device.type == "cpu":
        return None
    return torch.cuda.current_stream(device.index)  # by index it takes 1 µs, by device 3


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
    """The rows of one batch, on their way to the device.

    ``fetch()`` returns those of each array: of the images, ``(N, H, W, C)``, then of others.
    Nobody else writes to these tensors. It is called once, on any thread, and blocks until the rows
    are in memory. On CUDA, the tensors are then ordered on torch's current stream, which has to be
    the one on which `Feed.prepare` was called. It raises FormatError if a file was truncated since,
    or cannot be read.

    ``is_ready()`` returns whether `fetch` would not wait for the disk. It never blocks.
    """

    fetch: Callable[[], list[Tensor]]
    is_ready: Callable[[], bool] = lambda: True


#: Begins to bring the samples from ``start`` up to ``stop`` of a chunk: it asks the disk for rows
#: that are not in RAM.
BeginRows = Callable[[int, int], PendingRows]


class Feed(Protocol):
    """Brings samples to the device on which the model wants them.

    Creating a feed raises FeedError if it cannot serve these samples on this device.
    """

    device: torch.device

    @property
    def name(self) -> str:
        """The name of the feed, such as ``"dma"``."""

    def prepare(self, samples: np.ndarray) -> BeginRows:
        """Do once what the batches of a chunk share. ``samples`` are their numbers, int64 ``(m,)``.

        Returns the function that begins a batch of them.
        """

    def counts(self) -> Counts | None:
        """Return where rows were found so far; None if the feed does not count them."""

    def close(self) -> None:
        """Wait for copies under way, then end threads. Memory goes with the feed; batches stay."""
