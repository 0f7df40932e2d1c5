"""Which feed will serve a data set that is not built yet, and what training will wait for.

The rules are those of `memload.feeds.choice`, for files that need not be there, on a machine that
need not be this one.
"""

import math
from typing import Final, Literal, NamedTuple

import torch

from memload.feeds.choice import MIN_DMA_ROW_BYTES, RESIDENT_SHARE, free_memory
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
#: The part of the available RAM in which rows stay as page cache, if nothing holds them.
_PAGE_CACHE_SHARE: Final = 0.8


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


class PlannedFeed(NamedTuple):
    """Which feed will serve, and why."""

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
    chosen = _choose(data_bytes, image_bytes, memory)
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


def _held_text(chosen: PlannedFeed, bound: Bound) -> str:
    if chosen.held == 1:
        return "the GPU holds all rows" if bound == "model" else "all rows are in RAM"
    only = "only " * (bound == "disk")
    return f"{only}{math.floor(100 * chosen.held)}% of the rows stay in RAM"


def _choose(data_bytes: int, image_bytes: int, memory: Memory) -> PlannedFeed:
    """Return the first feed that can serve."""
    in_page_cache = share_in_page_cache(data_bytes, memory.ram)
    if memory.gpu is None:
        reason = "there is no GPU. Transforms take time of the CPU, which is not counted below"
        return PlannedFeed("cpu", reason, "gathering", in_page_cache)
    budget = (memory.ram or 0) // 2  # a Loader holds nothing if it is not known
    return choose_on_gpu(
        used_bytes=data_bytes,
        file_bytes=data_bytes,
        image_bytes=image_bytes,
        gpu_memory=memory.gpu,
        budget=budget,
        in_page_cache=in_page_cache,
    )


def choose_on_gpu(
    *,
    used_bytes: int,
    file_bytes: int,
    image_bytes: int,
    gpu_memory: int,
    budget: int,
    in_page_cache: float = 1.0,
) -> PlannedFeed:
    """Return the feed that ``feed="auto"`` takes on CUDA.

    Samples use so many bytes of the files. ``budget`` bytes of RAM may hold rows, and a share of
    the rows stays in the page cache.
    """
    if used_bytes <= RESIDENT_SHARE * gpu_memory:
        free = f"the {size_text(gpu_memory)} that are free on the GPU"
        reason = f"{size_text(used_bytes)} fit in {RESIDENT_SHARE:.0%} of {free}"
        return PlannedFeed("resident", reason, "model")
    size, limit = size_text(file_bytes), f"{size_text(budget)} of RAM may hold rows"
    if image_bytes < MIN_DMA_ROW_BYTES:
        reason = f"threads are faster for rows of {size_text(image_bytes)}"
        return PlannedFeed("pinned", reason, "gathering", in_page_cache)
    if file_bytes <= budget:
        return PlannedFeed("dma", f"all {size} will be held, as {limit}", "bus")
    reason = f"{size_text(budget)} of {size} will be held, as {limit}"
    return PlannedFeed("disk", reason, "bus", budget / file_bytes)


def share_in_page_cache(data_bytes: int, ram: int | None) -> float:
    """Return the share of rows that stays in so many bytes of RAM as page cache."""
    available = math.inf if ram is None else ram
    return min(1.0, _PAGE_CACHE_SHARE * available / data_bytes)
