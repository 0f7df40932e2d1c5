"""How batches get to the device: the feed, their stream, and how many are in flight."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from memload.feeds.choice import Choice, FeedName, choose_feed
from memload.feeds.factory import pinned_callers
from memload.feeds.interface import Feed, Samples
from memload.feeds.limits import MemoryLimits
from memload.reading.columns import column_values, split_names
from memload.reading.dataset import MemmapDataset
from memload.reading.streams import SideStream

#: Bytes to read from the disk ahead: several times what a fast disk reads in one of its seeks.
_READ_AHEAD_BYTES = 128 << 20
_MIN_READS_AHEAD, _MAX_READS_AHEAD = 2, 32


class Pipeline(NamedTuple):
    """What a Loader uses on its device.

    It is made for the first batch, or at once if a device or a feed is given. It is never pickled.
    """

    feed: Feed
    choice: Choice
    #: Where batches are made on CUDA. None: on the caller's current stream, or on the CPU.
    side_stream: SideStream | None
    #: Threads that make batches; with 0 the caller's thread does.
    num_threads: int
    #: Batches that are begun at a time, counting the one that is handed out next.
    in_flight: int
    #: Batches before those for which the disk is asked, counting the one that is begun next.
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

    ============================ ============= =================================== =======
    feed                         num_threads   in_flight                           stream
    ============================ ============= =================================== =======
    cpu                          num_threads   num_threads × prefetch_factor       current
    cpu, num_threads=0           0             1                                   current
    resident, no transform       0             1                                   current
    resident, dma, uva           0             1 + prefetch_factor                 side
    pinned                       callers       1 + max(callers, prefetch_factor)   side
    pinned, num_threads=0        0             1                                   side
    ============================ ============= =================================== =======

    ``callers`` are the threads that fetch from the feed "pinned"; others help them to gather.
    """
    reads_ahead = _batches_to_read_ahead(samples, batch_size)
    feed, choice = choose_feed(
        feed_name,
        samples,
        device,
        num_threads=num_threads,
        prefetch_factor=prefetch_factor,
        buffers=reads_ahead + prefetch_factor + 1,
        limits=limits,
    )
    if feed.name == "cpu":
        in_flight = max(1, num_threads * prefetch_factor)
        return Pipeline(feed, choice, None, num_threads, in_flight)
    if feed.name == "resident" and transform is None:
        # Its one kernel takes less time than a handover between streams.
        return Pipeline(feed, choice, None, 0, 1)
    side = SideStream(device, prefetch_factor, waits=not _uses_only_own_tensors(transform))
    if feed.name != "pinned":
        return Pipeline(feed, choice, side, 0, 1 + prefetch_factor, reads_ahead)
    if num_threads == 0:
        return Pipeline(feed, choice, side, 0, 1)
    callers = pinned_callers(num_threads, prefetch_factor)
    return Pipeline(feed, choice, side, callers, 1 + max(callers, prefetch_factor))


def _batches_to_read_ahead(samples: Samples, batch_size: int | None) -> int:
    """Return for how many batches rows are read from the disk before they are copied.

    ``batch_size`` is None if it is not known.
    """
    if batch_size is None:
        return _MIN_READS_AHEAD
    batch_bytes = batch_size * sum(array.shards.array.row_bytes for array in samples.arrays)
    wanted = -(-_READ_AHEAD_BYTES // max(1, batch_bytes))
    return min(max(wanted, _MIN_READS_AHEAD), _MAX_READS_AHEAD)


def _uses_only_own_tensors(transform: Any) -> bool:
    """Return whether a transform needs no tensors of the user's: all of its steps are memload's."""
    steps = (transform, *getattr(transform, "transforms", ()))
    return transform is None or all(type(step).__module__.startswith("memload.") for step in steps)
