"""Which feed serves some samples on some device, and why."""

import logging
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import torch

from memload.errors import FeedError
from memload.feeds.cpu import CpuFeed
from memload.feeds.dma import DmaFeed
from memload.feeds.interface import Feed, Samples
from memload.feeds.pinned import PinnedFeed
from memload.feeds.resident import ResidentFeed
from memload.feeds.uva import UvaFeed
from memload.machine import available_memory

FeedName = Literal["auto", "resident", "dma", "uva", "pinned", "cpu"]
FEEDS: tuple[str, ...] = get_args(FeedName)

#: The part of the device's free memory that rows and columns may take: the rest is for the model.
RESIDENT_SHARE = 0.25
#: The part of available RAM that may be registered, and so kept in the page cache.
REGISTERED_SHARE = 0.5
#: Bytes of a row from which on the copy engines are as fast as a kernel (44.9 against 46.8 GB/s at 27 KiB, one H200).
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
    """Return the feed, made, with what was chosen and why.

    ``auto`` is, on CUDA, the first that serves of: ``resident`` if rows and columns fit in a quarter of the
    device's free memory; ``dma``, or ``uva`` for rows below 28 KiB, if all rows fit in half of the available RAM
    (also of a container's); ``pinned``. Raises FeedError if the one that was named cannot serve.
    """
    ahead = num_threads * prefetch_factor

    def make(which: str) -> Feed:
        if which == "cpu":
            return CpuFeed(samples, device, keep=ahead + 2)
        if which == "resident":
            return ResidentFeed(samples, device)
        if which == "dma":
            return DmaFeed(samples, device, num_threads=num_threads)
        if which == "uva":
            return UvaFeed(samples, device, num_threads=num_threads)
        callers = pinned_callers(num_threads, prefetch_factor)
        return PinnedFeed(
            samples, device, num_threads=num_threads, callers=callers, most=callers + 2
        )

    if name != "auto":
        feed, choice = make(name), Choice(name, "asked for")
    elif device.type != "cuda":
        feed, choice = make("cpu"), Choice("cpu", f"the device is {device}")
    else:
        feed, choice = first_that_serves(make, samples, device)
    logging.getLogger("memload").info("feed of %s: %s", samples.shards.paths[0], choice)
    return feed, choice


def pinned_callers(num_threads: int, prefetch_factor: int) -> int:
    """Return how many threads fetch batches from `PinnedFeed` at once; the others help them.

    On an H200's host 8 threads brought 274,000 images/s with 5 batches at once, 198,000 with 3.
    """
    return max(1, min(num_threads, 3 * prefetch_factor))


def first_that_serves(
    make: Callable[[str], Feed], samples: Samples, device: torch.device
) -> tuple[Feed, Choice]:
    """Return the fastest feed that there is room for and that can be made, and why it was chosen."""
    row_bytes = samples.shards.array.row_bytes
    rows = len(samples.shards) * row_bytes
    all_bytes = rows + sum(column.nbytes for column in samples.columns)
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(
        device
    )  # held by torch, used by nobody
    ram = available_memory()
    on_device = f"{RESIDENT_SHARE:.0%} of {_gigabytes(free)} free on {device}"
    in_ram = f"{REGISTERED_SHARE:.0%} of {_gigabytes(ram)} available RAM"
    candidates = [("resident", all_bytes, RESIDENT_SHARE * free, on_device)]
    for way in ("dma", "uva") if row_bytes >= DMA_ROW_BYTES else ("uva", "dma"):
        candidates.append((way, rows, REGISTERED_SHARE * ram, in_ram))
    refused = []
    for way, size, room, where in candidates:
        if size > room:
            refused.append(f"{way}: {_gigabytes(size)} do not fit in {where}")
            continue
        try:
            return make(way), Choice(
                way, "; ".join([f"{_gigabytes(size)} fit in {where}", *refused])
            )
        except FeedError as error:
            refused.append(f"{way}: {error}")
    return make("pinned"), Choice("pinned", "; ".join(refused))


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.3g} GB"
