"""Which feed will serve a data set that is not built yet, and what training will wait for.

The rules are those of `memload.feeds.choose_feed`, for files that need not be there, on a machine
that need not be this one. It is assumed that what a feed needs is installed, such as
``cuda-bindings``.
"""

import math
from typing import Final, Literal, NamedTuple

import torch

from memload.feeds.factory import DMA_ROW_BYTES
from memload.feeds.limits import PAGE_CACHE_SHARE, REGISTERED_SHARE, RESIDENT_SHARE, free_memory
from memload.planning.disk import DiskRates
from memload.wording import size_text

#: What batches wait for where training could take more of them.
Bound = Literal["disk", "bus", "cpu", "gpu"]

#: What is said of epochs that need not read the disk.
_IN_MEMORY: Final[dict[Bound, str]] = {
    "bus": "the bus to the GPU, since all rows are in RAM",
    "cpu": "the CPU that copies rows, since all are in RAM",
    "gpu": "nothing but the GPU, which holds all rows",
}


class Serving(NamedTuple):
    """Which feed will serve, why, and what its epochs will be bound by."""

    feed: str
    reason: str
    first_epoch: str  #: a text on what it is bound by
    later_epochs: str
    later_bound: Bound  #: the same in a word


class Memory(NamedTuple):
    """Bytes that can be used. ``ram`` is None if it is not known, ``gpu`` without a GPU."""

    ram: int | None
    gpu: int | None


class _Choice(NamedTuple):
    feed: str
    reason: str
    bound: Bound  #: of rows that are in memory
    held: float = 1.0  #: the share of the rows that stays there


def free_gpu_memory() -> int | None:
    """Return how many bytes of the GPU's memory are free, or None without a GPU."""
    return free_memory(torch.device("cuda")) if torch.cuda.is_available() else None


def serve(
    needed: int, *, image_bytes: int, sample_bytes: int, memory: Memory, disk: DiskRates
) -> Serving:
    """Return how ``needed`` bytes on a disk will be served.

    A sample has ``sample_bytes``: an image of ``image_bytes``, with its mask and other arrays.
    """
    chosen = _choose(needed, image_bytes, memory, is_direct=disk.read is not None)
    first = f"the disk{_rate(disk.read, sample_bytes)}"
    if chosen.held >= 1:
        first += ", unless the file is still in RAM from the build"
        later, bound = _IN_MEMORY[chosen.bound], chosen.bound
    else:
        rate = _rate(disk.read, sample_bytes * (1 - chosen.held))
        later = f"the disk{rate}, since only {chosen.held:.0%} of the rows stay in RAM"
        bound = "disk"
    return Serving(chosen.feed, chosen.reason, first, later, bound)


def _rate(bytes_per_second: float | None, bytes_per_sample: float) -> str:
    """Return how many images a disk reads, in two digits; nothing if that is not known."""
    if bytes_per_second is None:
        return ""
    rate = float(f"{bytes_per_second / bytes_per_sample:.2g}")
    return f", about {rate:,.0f} images/s here"


def _choose(needed: int, image_bytes: int, memory: Memory, *, is_direct: bool) -> _Choice:
    """Return the first feed that has enough memory."""
    if memory.gpu is None:
        return _Choice("cpu", "there is no GPU", "cpu", _in_page_cache(needed, memory))
    size = size_text(needed)
    if needed <= RESIDENT_SHARE * memory.gpu:
        free = f"the {size_text(memory.gpu)} that are free on the GPU"
        return _Choice("resident", f"{size} fit in {RESIDENT_SHARE:.0%} of {free}", "gpu")
    if memory.ram is None:  # a Loader registers nothing then
        registered, limit = 0.0, "the available RAM, whose size is not known"
    else:
        registered = min(1.0, REGISTERED_SHARE * memory.ram / needed)
        limit = f"{REGISTERED_SHARE:.0%} of the {size_text(memory.ram)} of available RAM"
    if registered == 1:
        name = "dma" if image_bytes >= DMA_ROW_BYTES else "uva"
        return _Choice(name, f"{size} fit in {limit}", "bus")
    too_large = f"{size} do not fit in {limit}"
    if is_direct:
        return _Choice("disk", too_large, "bus", registered)
    reason = f"{too_large}, and files there cannot be read past the page cache"
    return _Choice("pinned", reason, "cpu", _in_page_cache(needed, memory))


def _in_page_cache(needed: int, memory: Memory) -> float:
    """Return the share of the rows that stays in RAM as page cache."""
    ram = math.inf if memory.ram is None else memory.ram
    return min(1.0, PAGE_CACHE_SHARE * ram / needed)
