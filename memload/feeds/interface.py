"""What a feed is given, and what it promises."""

import functools
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from memload.errors import FeedError
from memload.jobs import Job
from memload.storage.shards import Shards
from memload.wording import size_text

#: ``fetch()`` returns a batch: ``[pixels, *others, *columns]``. ``fetch.is_ready()`` says whether
#: its rows are in memory.
Fetch = Job[list[Tensor]]
#: ``begin(start, stop)`` begins to read a batch, and returns what fetches it. See `Feed.prepare`.
Begin = Callable[[int, int], Fetch]


class ReadCounts(NamedTuple):
    """Where a feed has found the rows that it served so far.

    >>> print(ReadCounts(2000, rows_held=1000, rows_to_hold=1000, served=50, hits=24))
    1,000 of 2,000 rows are held; of 50 rows so far, 24 came from memory and 26 from the files
    """

    #: How many rows the samples use.
    rows: int
    #: How many of them are held in memory now, and how many will be. For the feeds "cpu" and
    #: "pinned", both are how many stay in the page cache once they were read.
    rows_held: int
    rows_to_hold: int
    #: How many of those that are held are in the memory of the device.
    rows_on_device: int = 0
    #: Rows of the batches that were fetched so far, and how many of them were in memory already.
    #: None: that is not known.
    served: int = 0
    hits: int | None = 0
    #: Bytes read from the files, and the seconds during which that went on.
    bytes_read: int = 0
    seconds_reading: float = 0.0
    #: Why fewer rows are held than was planned; empty if nothing is wrong.
    problem: str = ""

    def __str__(self) -> str:
        place = "are held" if self.hits is not None else "stay in the page cache"
        text = f"{self.rows_held:,} of {self.rows:,} rows {place}"
        if self.rows_on_device:
            text += f", {self.rows_on_device:,} of them on the device"
        if self.rows_to_hold > self.rows_held:
            text += f", and {self.rows_to_hold - self.rows_held:,} more will be"
        if self.served and self.hits is None:
            text += f"; {self.served:,} rows so far"
        elif self.served:
            text += (
                f"; of {self.served:,} rows so far, {self.hits:,} came from memory and "
                f"{self.served - (self.hits or 0):,} from the files"
            )
        if self.seconds_reading:
            rate = size_text(int(self.bytes_read / self.seconds_reading))
            text += f"; {size_text(self.bytes_read)} read at {rate}/s"
        return f"{text}; {self.problem}" if self.problem else text

    @classmethod
    def of_all(cls, counts: "Sequence[ReadCounts]") -> "ReadCounts":
        """Return the counts of several feeds, which read at the same time, as those of one."""
        hits = [one.hits for one in counts if one.hits is not None]
        return cls(
            rows=sum(one.rows for one in counts),
            rows_held=sum(one.rows_held for one in counts),
            rows_to_hold=sum(one.rows_to_hold for one in counts),
            rows_on_device=sum(one.rows_on_device for one in counts),
            served=sum(one.served for one in counts),
            hits=sum(hits) if len(hits) == len(counts) else None,
            bytes_read=sum(one.bytes_read for one in counts),
            seconds_reading=max(one.seconds_reading for one in counts),
            problem="; ".join(dict.fromkeys(one.problem for one in counts if one.problem)),
        )


class HitCounter:
    """Counts the rows of batches, on any number of threads."""

    def __init__(self) -> None:
        #: How many rows were served, and how many of them were in memory already.
        self.served = self.hits = 0
        self._lock = threading.Lock()

    def add(self, served: int, hits: int) -> None:
        """Count the rows of a batch."""
        with self._lock:
            self.served += served
            self.hits += hits


@dataclass(frozen=True)
class Samples:
    """The samples that a feed serves: all of a data set, or those of a subset."""

    #: The array that holds their rows: pixels, or with `others` anything else.
    shards: Shards
    #: The row of each sample, int64 ``(n,)``. Samples may share rows, and rows may be unused.
    row: np.ndarray
    #: The other values of each sample, arrays ``(n, …)``.
    columns: Sequence[np.ndarray]
    #: The same samples in further arrays, such as masks. These have no columns and no others.
    others: Sequence["Samples"] = ()

    @property
    def arrays(self) -> "tuple[Samples, ...]":
        """The samples in each array: in that of the pixels, then in the others."""
        return self, *self.others

    @property
    def dtype(self) -> torch.dtype:
        """The type of the pixels."""
        return torch.from_numpy(np.empty(0, self.shards.array.descr)).dtype

    def shape(self, count: int) -> tuple[int, ...]:
        """Return the shape of the rows of some samples: for pixels ``(count, H, W, C)``."""
        return (count, *self.shards.array.shape)

    def used_rows(self) -> np.ndarray:
        """Return the rows that the samples use: each once, in ascending order, int64.

        Do not change them. They are computed once.
        """
        return self._used_rows

    @functools.cached_property
    def _used_rows(self) -> np.ndarray:
        if (self.row[1:] > self.row[:-1]).all():  # as of most data sets: takes no memory then
            return self.row
        used = np.zeros(len(self.shards), bool)
        used[self.row] = True
        return np.flatnonzero(used)


class Feed(Protocol):
    """Brings samples to the device on which the model wants them.

    Creating a feed raises FeedError if it cannot serve these samples on this device, and
    FormatError if a file is damaged.
    """

    @property
    def name(self) -> str:
        """The name of the feed, such as ``"dma"``."""

    @property
    def device(self) -> torch.device:
        """Where batches are."""

    def prepare(self, samples: np.ndarray) -> Begin:
        """Prepare to fetch a chunk of samples: many batches, whose shared work is done once.

        ``samples`` are numbers of samples in `Samples`, int64 ``(M,)``, in range. The result,
        ``begin(start, stop)``, returns ``fetch`` for ``samples[start:stop]``. A feed whose own
        threads read from the disk lets them begin with that, and does not wait for them. So begin
        batches early.

        ``fetch()`` returns the batch: pixels ``(N, H, W, C)``, the rows of other arrays ``(N, …)``,
        and columns ``(N, …)``, as tensors that nobody else will write to. It is called once.

        ``fetch`` blocks until the rows are in memory. On CUDA, the batch is then ordered on torch's
        current stream. Call `prepare` and ``fetch`` on one stream. CUDA refuses batched copies on
        the default stream, so only `ResidentFeed` may use that.

        ``fetch`` is thread-safe. It raises FormatError if a file was truncated since, or cannot be
        read.
        """

    def counts(self) -> ReadCounts | None:
        """Return where rows were found so far; None if the feed does not count them."""

    def close(self) -> None:
        """Wait for copies under way, then free memory and threads. Batches stay valid."""


def require_cuda(feed: str, device: torch.device) -> None:
    """Raise FeedError unless the device is a CUDA device."""
    if device.type != "cuda":
        raise FeedError(
            f"feed={feed!r} needs a CUDA device, but the device is {device}. Use feed='cpu'."
        )


def widest_word(*sizes: int) -> torch.dtype:
    """Return the widest integer type whose size divides all of these sizes in bytes.

    If it divides the size of a row and the offset of the first one, all rows begin at a multiple.
    """
    words = (torch.int64, torch.int32, torch.int16, torch.int8)
    return next(word for word in words if math.gcd(*sizes) % word.itemsize == 0)
