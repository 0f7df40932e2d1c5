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

#: What batches wait for where training could take more of them, in the words of `memload.doctor`.
Bound = Literal["disk", "gathering", "bus", "model"]

_NAMES: Final[dict[Bound, str]] = {
    "disk": "the disk",
    "gathering": "gathering rows on the CPU",
    "bus": "the bus to the GPU",
    "model": "the model",
}
#: The bytes a second of PCIe 5 ×16. Slower buses are not known here, so they have no rate.
_FASTEST_BUS: Final = 55e9


class Epoch(NamedTuple):
    """What an epoch is bound by unless the model is slower, and how fast that is, if known."""

    bound: Bound
    images_per_second: float | None
    reason: str = ""

    def __str__(self) -> str:
        rate = ""
        if self.images_per_second is not None:
            rate = f", up to about {float(f'{self.images_per_second:.2g}'):,.0f} images/s here"
        return f"{_NAMES[self.bound]}{rate}{self.reason}"


class Serving(NamedTuple):
    """Which feed will serve, why, and what its epochs will be bound by."""

    feed: str
    reason: str
    first_epoch: Epoch
    later_epochs: Epoch
    share_in_memory: float  #: of the rows, in later epochs


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
    data_bytes: int,
    *,
    image_bytes: int,
    sample_bytes: int,
    memory: Memory,
    disk: DiskRates,
    gathering: float,
) -> Serving:
    """Return how a data set of ``data_bytes`` on a disk will be served.

    A sample has ``sample_bytes``: an image of ``image_bytes``, with its mask and other arrays.
    Threads gather so many bytes a second.
    """
    chosen = _choose(data_bytes, image_bytes, memory, is_direct=disk.is_direct)
    first = _epoch(0, chosen.bound, sample_bytes, disk, gathering)
    later = _epoch(chosen.held, chosen.bound, sample_bytes, disk, gathering)
    if chosen.held == 1 and first.bound == "disk":
        first = first._replace(reason=", unless the file is still in RAM from the build")
    later = later._replace(reason=f", since {_held_text(chosen, later.bound)}")
    return Serving(chosen.feed, chosen.reason, first, later, chosen.held)


def _epoch(
    held: float, bound: Bound, sample_bytes: int, disk: DiskRates, gathering: float
) -> Epoch:
    """Return what an epoch waits for: the disk, if a share is held, or else ``bound``."""
    from_memory = gathering if bound == "gathering" else _FASTEST_BUS
    from_disk = math.inf if held == 1 else (disk.read or 0.0) / (1 - held)
    if from_disk < from_memory:
        return Epoch("disk", from_disk / sample_bytes or None)
    return Epoch(bound, gathering / sample_bytes if bound == "gathering" else None)


def _held_text(chosen: _Choice, bound: Bound) -> str:
    if chosen.held == 1:
        return "the GPU holds all rows" if bound == "model" else "all rows are in RAM"
    only = "only " * (bound == "disk")
    return f"{only}{math.floor(100 * chosen.held)}% of the rows stay in RAM"


def _choose(data_bytes: int, image_bytes: int, memory: Memory, *, is_direct: bool) -> _Choice:
    """Return the first feed that has enough memory."""
    if memory.gpu is None:
        reason = "there is no GPU. Transforms take time of the CPU, which is not counted below"
        return _Choice("cpu", reason, "gathering", _in_page_cache(data_bytes, memory))
    size = size_text(data_bytes)
    if data_bytes <= RESIDENT_SHARE * memory.gpu:
        free = f"the {size_text(memory.gpu)} that are free on the GPU"
        return _Choice("resident", f"{size} fit in {RESIDENT_SHARE:.0%} of {free}", "model")
    if memory.ram is None:  # a Loader registers nothing then
        registered, limit = 0.0, "the available RAM, whose size is not known"
    else:
        registered = min(1.0, REGISTERED_SHARE * memory.ram / data_bytes)
        limit = f"{REGISTERED_SHARE:.0%} of the {size_text(memory.ram)} of available RAM"
    if registered == 1:
        name = "dma" if image_bytes >= DMA_ROW_BYTES else "uva"
        return _Choice(name, f"{size} fit in {limit}", "bus")
    too_large = f"{size} do not fit in {limit}"
    if is_direct:
        return _Choice("disk", too_large, "bus", registered)
    reason = f"{too_large}, and files there cannot be read past the page cache"
    return _Choice("pinned", reason, "gathering", _in_page_cache(data_bytes, memory))


def _in_page_cache(data_bytes: int, memory: Memory) -> float:
    """Return the share of the rows that stays in RAM as page cache."""
    ram = math.inf if memory.ram is None else memory.ram
    return min(1.0, PAGE_CACHE_SHARE * ram / data_bytes)
