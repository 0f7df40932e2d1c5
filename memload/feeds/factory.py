"""Creates feeds by their names, within the limits of memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from memload.errors import FeedError
from memload.feeds.budget import Claim, hold_on_device
from memload.feeds.cpu import CpuFeed
from memload.feeds.dma import BatchedCopies
from memload.feeds.gathered import claim_pages
from memload.feeds.interface import Feed, Samples, require_cuda
from memload.feeds.joined import feed_of_all
from memload.feeds.limits import MemoryLimits, claim_ram, room_in_ram, room_on_device
from memload.feeds.page_cache import Copier, PageCacheFeed
from memload.feeds.pinned import PinnedFeed
from memload.feeds.resident import ResidentFeed
from memload.feeds.uva import Kernel

#: From rows of this size on, the copy engines are about as fast as a kernel (44.9 against 46.8 GB/s
#: at 27 KiB on one H200).
DMA_ROW_BYTES = 28 << 10


class Claimed(NamedTuple):
    """The RAM that a feed may take for each array."""

    claims: Sequence[Claim | None]
    #: Why not all rows stay there, or why more do than the limit allows; empty if neither is so.
    reason: str = ""


@dataclass(frozen=True)
class FeedFactory:
    """Creates feeds by their names. Its fields are the arguments of `choose_feed`."""

    samples: Samples
    device: torch.device
    limits: MemoryLimits
    num_threads: int
    prefetch_factor: int
    buffers: int
    #: Whether a feed may serve without what makes it fast: if it was asked for by name.
    by_name: bool

    def create(self, names: Sequence[str], claimed: Claimed | None = None) -> Feed:
        """Create a feed that serves each array by the feed of that name. Raises FeedError.

        ``claimed`` is what `claim` returned for the first name. By default, it is called here.
        """
        claims = (claimed or self.claim(names[0])).claims
        creators = [
            partial(self._create_one, *one)
            for one in zip(names, self.samples.arrays, claims, strict=True)
        ]
        return feed_of_all(creators)

    def claim(self, name: str) -> Claimed:
        """Claim RAM for a feed. Raises FeedError if it needs more than a limit that was given."""
        if name != "cpu":
            require_cuda(name, self.device)
        if name == "resident":
            self._check_room_on_device()
            return Claimed([None] * len(self.samples.arrays))
        limit = self.limits.in_ram(name)
        keeps_pages = name in ("cpu", "pinned")  # and not whole windows
        claims = (
            claim_pages(self.samples, limit.size) if keeps_pages else claim_ram(self.samples, limit)
        )
        room = room_in_ram(claims, limit)
        if name in ("dma", "uva") and not room.is_enough:
            raise FeedError(
                f"feed={name!r} holds all rows in RAM, but {room.text}. Use feed='disk'."
            )
        if name == "disk" and self.limits.resident is not None:
            hold_on_device(claims, self.limits.resident, self.device)
        is_expected = room.is_enough and room.held <= limit.size
        return Claimed(claims, "" if is_expected else room.text)

    def _check_room_on_device(self) -> None:
        """Raise FeedError if ``resident_bytes`` was given and the samples need more."""
        room = room_on_device(self.samples, self.limits.on_device(self.device))
        if self.limits.resident is not None and not room.is_enough:
            raise FeedError(f"feed='resident': {room.text}. Use feed='auto' or fewer samples.")

    def _create_one(self, name: str, array: Samples, claim: Claim | None) -> Feed:
        """Create the feed of one array. Only ``resident`` needs no claim."""
        device, num_threads = self.device, self.num_threads
        if claim is None:
            return ResidentFeed(array, device, num_threads=num_threads)
        if name == "cpu":
            keep = num_threads * self.prefetch_factor + 2
            return CpuFeed(array, device, keep=keep, claim=claim)
        if name == "pinned":
            callers = max(1, pinned_callers(num_threads, self.prefetch_factor))
            return PinnedFeed(array, device, num_threads=num_threads, callers=callers, claim=claim)
        copier = _copier(name, array, device)
        return PageCacheFeed(
            name,
            array,
            device,
            copier,
            claim=claim,
            buffers=self.buffers,
            may_hold_nothing=self.by_name and name == "disk",
        )


def pinned_callers(num_threads: int, prefetch_factor: int) -> int:
    """Return how many of ``num_threads`` threads fetch batches of `PinnedFeed` at once.

    The other threads help them. 0 means that the consumer's own thread fetches, if
    ``num_threads=0``. On an H200's host, 8 threads reached 274,000 images/s with 5 batches at once,
    and 198,000 with 3.
    """
    return min(num_threads, 3 * prefetch_factor)


def _copier(name: str, samples: Samples, device: torch.device) -> Copier:
    """Return what copies rows for a feed. For "disk" it is the faster one that there is.

    Raises FeedError that says what all of them lack.
    """
    array = samples.shards.array
    make_dma: Callable[[], Copier] = partial(BatchedCopies, device, array.row_bytes)
    make_uva: Callable[[], Copier] = partial(Kernel, device, array.row_bytes, array.header_bytes)
    is_large = array.row_bytes >= DMA_ROW_BYTES
    fastest_first = [make_dma, make_uva] if is_large else [make_uva, make_dma]
    usable = {"dma": [make_dma], "uva": [make_uva], "disk": fastest_first}
    reasons = []
    for create in usable[name]:
        try:
            return create()
        except FeedError as error:
            reasons.append(str(error))
    raise FeedError(f"feed={name!r}: {' Or: '.join(reasons)}")
