"""Which feed serves some samples on some device, and why."""

import logging
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, get_args

import torch

from memload.errors import FeedError
from memload.feeds.cpu import CpuFeed
from memload.feeds.dma import DmaFeed
from memload.feeds.interface import Feed, Samples
from memload.feeds.pages import bytes_to_register
from memload.feeds.pinned import PinnedFeed
from memload.feeds.resident import ResidentFeed
from memload.feeds.uva import UvaFeed
from memload.machine import available_memory

FeedName = Literal["auto", "resident", "dma", "uva", "pinned", "cpu"]
FEEDS: tuple[str, ...] = get_args(FeedName)

#: Feeds whose device does the copying.
_ON_DEVICE: Mapping[str, Callable[..., Feed]] = {
    "resident": ResidentFeed,
    "dma": DmaFeed,
    "uva": UvaFeed,
}
#: The part of the device's free memory that samples may take. The rest is for the model.
RESIDENT_SHARE = 0.25
#: The part of the available RAM that may be registered, and so kept in the page cache.
REGISTERED_SHARE = 0.5
#: From rows of this size on, the copy engines are about as fast as a kernel (44.9 against 46.8 GB/s
#: at 27 KiB on one H200).
DMA_ROW_BYTES = 28 << 10


class Choice(NamedTuple):
    """A feed's name, and why it was chosen."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def choose_feed(
    name: FeedName,
    samples: Samples,
    device: torch.device,
    *,
    num_threads: int,
    prefetch_factor: int,
) -> tuple[Feed, Choice]:
    """Create the feed with this name, or choose one; return it with the reason.

    On CUDA, ``"auto"`` is the first of these that can serve:

    - ``resident``, if the used rows and the columns fit in a quarter of the device's free memory;
    - ``dma``, or ``uva`` for rows below 28 KiB, if the windows of the files that hold used rows fit
      in half of the available RAM (of the container's, if it has a limit);
    - ``pinned``.

    Raises FeedError if the named feed cannot serve these samples on this device.
    """

    def create(name: str) -> Feed:
        if name == "cpu":
            return CpuFeed(samples, device, keep=num_threads * prefetch_factor + 2)
        if name == "pinned":
            callers = max(1, pinned_callers(num_threads, prefetch_factor))
            return PinnedFeed(samples, device, num_threads=num_threads, callers=callers)
        return _ON_DEVICE[name](samples, device, num_threads=num_threads)

    if name != "auto":
        feed, choice = create(name), Choice(name, "asked for")
    elif device.type != "cuda":
        feed, choice = create("cpu"), Choice("cpu", f"the device is {device}")
    else:
        feed, choice = first_that_serves(create, samples, device)
    logging.getLogger("memload").info("feed of %s: %s", samples.shards.paths[0], choice)
    return feed, choice


def pinned_callers(num_threads: int, prefetch_factor: int) -> int:
    """Return how many of ``num_threads`` threads fetch batches of `PinnedFeed` at once.

    The other threads help them. 0 means that the consumer's own thread fetches, if
    ``num_threads=0``. On an H200's host, 8 threads reached 274,000 images/s with 5 batches at once,
    and 198,000 with 3.
    """
    return min(num_threads, 3 * prefetch_factor)


def first_that_serves(
    create: Callable[[str], Feed], samples: Samples, device: torch.device
) -> tuple[Feed, Choice]:
    """Return the fastest feed that has enough memory and can be created, and the reason."""
    shards, rows = samples.shards, samples.used_rows()
    row_bytes = shards.array.row_bytes
    free = _free_memory(device)
    memory = available_memory()
    to_copy = len(rows) * row_bytes + sum(column.nbytes for column in samples.columns)
    to_register = bytes_to_register(shards, rows)
    on_device = f"{RESIDENT_SHARE:.0%} of the {_gigabytes(free)} free on {device}"
    in_memory = f"{REGISTERED_SHARE:.0%} of the {_gigabytes(memory)} of available RAM"
    candidates = [("resident", to_copy, RESIDENT_SHARE * free, on_device)]
    for name in ("dma", "uva") if row_bytes >= DMA_ROW_BYTES else ("uva", "dma"):
        candidates.append((name, to_register, REGISTERED_SHARE * memory, in_memory))
    refusals: list[str] = []
    for name, size, limit, limit_in_words in candidates:
        if size > limit:
            refusals.append(f"{name}: {_gigabytes(size)} does not fit in {limit_in_words}")
            continue
        try:
            feed = create(name)
        except FeedError as error:
            refusals.append(f"{name}: {str(error).removesuffix('.')}")
            continue
        reasons = [f"{_gigabytes(size)} fits in {limit_in_words}", *refusals]
        return feed, Choice(name, "; ".join(reasons))
    return create("pinned"), Choice("pinned", "; ".join(refusals))


def _free_memory(device: torch.device) -> int:
    """Return the bytes of the device's memory that torch can still hand out."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.3g} GB"
