"""How batches get to the device: the feed, their stream, and how many are in flight."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from memload.feeds.choice import Choice, FeedName, choose_feed
from memload.feeds.factory import pinned_callers
from memload.feeds.interface import Feed, ReadCounts, Samples
from memload.feeds.limits import MemoryLimits
from memload.reading.columns import column_values, split_names
from memload.reading.dataset import MemmapDataset
from memload.reading.streams import SideStream

#: Bytes that are read from the disk ahead of the batch that is copied next. That gives a disk that
#: reads 2 GB/s work for 60 ms.
_READ_AHEAD_BYTES = 128 << 20
#: The most page-locked memory for the batches that are read ahead: as long as none of their rows is
#: held in RAM.
_PAGE_LOCKED_BYTES = 512 << 20
_MIN_READS_AHEAD, _MAX_READS_AHEAD = 2, 32


class Pipeline(NamedTuple):
    """What a Loader uses on its device.

    It is made for the first batch, or at once if a device or a feed is given. It is never pickled.
    """

    feed: Feed
    choice: Choice
    #: Bytes of a sample in the files: of its row in each array.
    row_bytes: int
    #: Where batches are made on CUDA. None: on the caller's current stream, or on the CPU.
    side_stream: SideStream | None
    #: Threads that make batches; with 0 the caller's thread does.
    num_threads: int
    #: Batches that are begun at a time, counting the one that is handed out next.
    in_flight: int
    #: Batches that are read from the disk ahead of those, counting the one that is begun next.
    reads_ahead: int = 1


def samples_of(dataset: MemmapDataset, names: Sequence[str]) -> Samples:
    """Return what a feed has to serve: images, the arrays among these names, then the columns."""
    index = dataset.index
    arrays, columns = split_names(names, dataset.arrays)
    return Samples(
        dataset.shards,
        index.row,
        [column_values(index, name) for name in columns],
        [Samples(dataset.shards_of(name), index.rows_of(name), ()) for name in arrays],
    )


def make_pipeline(
    samples: Samples,
    device: torch.device,
    feed_name: FeedName,
    transform: Callable[..., Any] | None,
    *,
    num_threads: int,
    prefetch_factor: int,
    batch_size: int | None,
    limits: MemoryLimits,
) -> Pipeline:
    """Choose the feed, and with it all else. Raises FeedError if a given feed cannot serve.

    ======================== =========== ================================= =========== =======
    feed                     num_threads in_flight                         reads_ahead stream
    ======================== =========== ================================= =========== =======
    cpu                      num_threads num_threads × prefetch_factor     1           current
    cpu, num_threads=0       0           1                                 1           current
    resident, no transform   0           1                                 1           current
    resident                 0           1 + prefetch_factor               1           side
    dma, uva, disk           0           1 + prefetch_factor               2 to 32     side
    pinned                   callers     1 + max(callers, prefetch_factor) 1           side
    pinned, num_threads=0    0           1                                 1           side
    ======================== =========== ================================= =========== =======

    ``callers`` are the threads that fetch from the feed "pinned"; others help them to gather.
    ``batch_size`` is None if it is not known. Then rows of 2 batches are read ahead.
    """
    row_bytes = sum(array.shards.array.row_bytes for array in samples.arrays)
    batch_bytes = row_bytes * (batch_size or 0)
    feed, choice = choose_feed(
        feed_name,
        samples,
        device,
        num_threads=num_threads,
        prefetch_factor=prefetch_factor,
        buffers=_max_reads_ahead(batch_bytes) + prefetch_factor + 1,
        limits=limits,
    )
    if feed.name == "cpu":
        in_flight = max(1, num_threads * prefetch_factor)
        return Pipeline(feed, choice, row_bytes, None, num_threads, in_flight)
    if feed.name == "resident" and transform is None:
        # Its one kernel takes less time than a handover between streams.
        return Pipeline(feed, choice, row_bytes, None, num_threads=0, in_flight=1)
    side = SideStream(device, prefetch_factor, waits=not _uses_only_own_tensors(transform))
    if feed.name == "pinned":
        callers = pinned_callers(num_threads, prefetch_factor)
        in_flight = 1 + max(callers, prefetch_factor) if callers else 1
        return Pipeline(feed, choice, row_bytes, side, callers, in_flight)
    reads_ahead = 1 if feed.name == "resident" else _reads_ahead(batch_bytes, feed.counts())
    return Pipeline(feed, choice, row_bytes, side, 0, 1 + prefetch_factor, reads_ahead)


def _reads_ahead(batch_bytes: int, counts: ReadCounts | None) -> int:
    """Return how many batches are read ahead: the more, the fewer of their rows have to be read.

    If all rows are to be held, batches are read ahead only until that is so, as if none were held.
    """
    share_to_read = 1.0
    if counts is not None and counts.rows_to_hold < counts.rows:
        share_to_read = 1 - counts.rows_to_hold / counts.rows
    wanted = math.ceil(_READ_AHEAD_BYTES / max(1, batch_bytes * share_to_read))
    return min(max(wanted, _MIN_READS_AHEAD), _max_reads_ahead(batch_bytes))


def _max_reads_ahead(batch_bytes: int) -> int:
    """Return for how many batches rows are read ahead at most. 0 bytes: they are not known."""
    if not batch_bytes:
        return _MIN_READS_AHEAD
    return min(max(_PAGE_LOCKED_BYTES // batch_bytes, _MIN_READS_AHEAD), _MAX_READS_AHEAD)


def _uses_only_own_tensors(transform: Any) -> bool:
    """Return whether a transform needs no tensors of the user's: all of its steps are memload's."""
    if transform is None or isinstance(transform, tuple):
        return all(map(_uses_only_own_tensors, transform or ()))
    inside = (getattr(transform, name, ()) for name in ("transforms", "views"))
    steps = [step for steps in inside if isinstance(steps, tuple) for step in steps]
    is_own = type(transform).__module__.startswith("memload.")
    return is_own and all(map(_uses_only_own_tensors, steps))
