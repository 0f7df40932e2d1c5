"""How batches get to the device: the feed, their stream, and how many are in flight."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from memload.feeds.choice import Choice, FeedName, choose_feed
from memload.feeds.feed import Feed, SampleArray
from memload.reading.dataset import MemmapDataset
from memload.reading.streams import SideStream

#: Bytes that are read from the disk ahead of the batch that is made next, if its feed reads by
#: itself. They are read into page-locked memory. A disk that reads 2 GB/s has work for 130 ms.
_READ_AHEAD_BYTES = 256 << 20
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
    side: SideStream | None
    #: Threads that make batches; with 0 the caller's thread does.
    num_threads: int
    #: Batches that are made at a time, counting the one that is handed out next.
    in_flight: int
    #: Batches that are read from the disk ahead of those.
    reads_ahead: int = 0


def samples_of(dataset: MemmapDataset, names: Sequence[str]) -> list[SampleArray]:
    """Return what a feed has to serve: the images, and the arrays among these names."""
    arrays = ["image", *(name for name in names if name in dataset.arrays)]
    return [SampleArray(dataset.shards_of(name), dataset.index.rows_of(name)) for name in arrays]


def make_pipeline(
    arrays: Sequence[SampleArray],
    device: torch.device,
    feed_name: FeedName,
    transform: Callable[..., Any] | None,
    *,
    num_threads: int,
    prefetch_factor: int,
    batch_size: int | None,
    cache_bytes: int | None,
) -> Pipeline:
    """Choose the feed, and with it all else. Raises FeedError if a given feed cannot serve.

    ====================== =========== ============================= =========== =======
    feed                   num_threads in_flight                     reads_ahead stream
    ====================== =========== ============================= =========== =======
    cpu                    num_threads num_threads × prefetch_factor 0           current
    cpu, num_threads=0     0           1                             0           current
    resident, no transform 0           1                             0           current
    resident               0           1 + prefetch_factor           0           side
    dma, disk              0           1 + prefetch_factor           2 to 32     side
    pinned                 num_threads num_threads × prefetch_factor 0           side
    pinned, num_threads=0  0           1                             0           side
    ====================== =========== ============================= =========== =======

    ``batch_size`` is None if it is not known. Then rows of 2 batches are read ahead.
    """
    row_bytes = sum(array.row_bytes for array in arrays)
    on_threads = max(1, num_threads * prefetch_factor)
    feed, choice = choose_feed(
        feed_name, arrays, device, cache_bytes=cache_bytes, buffers=on_threads + 2
    )
    if feed.name == "cpu":
        return Pipeline(feed, choice, row_bytes, None, num_threads, on_threads)
    if feed.name == "resident" and transform is None:
        # Its one kernel takes less time than a handover between streams.
        return Pipeline(feed, choice, row_bytes, None, num_threads=0, in_flight=1)
    side = SideStream(device, prefetch_factor, waits=not _uses_only_own_tensors(transform))
    if feed.name == "pinned":
        return Pipeline(feed, choice, row_bytes, side, num_threads, on_threads)
    reads_ahead = 0 if feed.name == "resident" else _MIN_READS_AHEAD
    if feed.name != "resident" and batch_size is not None:
        of_batches = _READ_AHEAD_BYTES // (row_bytes * batch_size)
        reads_ahead = min(max(of_batches, _MIN_READS_AHEAD), _MAX_READS_AHEAD)
    return Pipeline(feed, choice, row_bytes, side, 0, 1 + prefetch_factor, reads_ahead)


def _uses_only_own_tensors(transform: Any) -> bool:
    """Return whether a transform needs no tensors of the user's: all of its steps are memload's."""
    if transform is None or isinstance(transform, tuple):
        return all(map(_uses_only_own_tensors, transform or ()))
    inside = (getattr(transform, name, ()) for name in ("transforms", "views"))
    steps = [step for steps in inside if isinstance(steps, tuple) for step in steps]
    is_own = type(transform).__module__.startswith("memload.")
    return is_own and all(map(_uses_only_own_tensors, steps))
