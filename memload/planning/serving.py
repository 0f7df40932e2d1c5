"""Which feed will serve a data set that is not built yet, and what training will wait for.

The rules are those of `memload.feeds.choose_feed`, for files that need not be there, on a machine
that need not be this one. It is assumed that what a feed needs is installed, such as
``cuda-bindings``.
"""

from typing import Final, NamedTuple

import torch

from memload.feeds.factory import DMA_ROW_BYTES
from memload.feeds.limits import PAGE_CACHE_SHARE, REGISTERED_SHARE, RESIDENT_SHARE
from memload.planning.disk import DiskRates
from memload.planning.report import Bound, Serving
from memload.wording import size_text

#: What is said of epochs that need not read the disk.
_IN_MEMORY: Final[dict[Bound, str]] = {
    "bus": "the bus to the GPU, since all rows are in RAM",
    "cpu": "the CPU that copies rows, since all are in RAM",
    "gpu": "nothing but the GPU, which holds all rows",
}


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
    if not torch.cuda.is_available():
        return None
    free, _ = torch.cuda.mem_get_info()
    return free


def serve(needed: int, row_bytes: int, memory: Memory, disk: DiskRates) -> Serving:
    """Return how ``needed`` bytes on a disk will be served, with images of ``row_bytes`` each."""
    chosen = _choose(needed, row_bytes, memory, is_direct=disk.read is not None)
    first = f"the disk{_rate(disk.read, row_bytes)}"
    if chosen.held >= 1:
        first += ", unless the file is still in RAM from the build"
        in_memory = _IN_MEMORY[chosen.bound]
        return Serving(chosen.feed, chosen.reason, "disk", first, chosen.bound, in_memory)
    later = f"the disk{_rate(disk.read, row_bytes * (1 - chosen.held))}"
    later += f", since only {chosen.held:.0%} of the rows stay in RAM"
    return Serving(chosen.feed, chosen.reason, "disk", first, "disk", later)


def _rate(bytes_per_second: float | None, bytes_per_image: float) -> str:
    """Return how many images a disk reads, in two digits; nothing if that is not known."""
    if bytes_per_second is None:
        return ""
    rate = float(f"{bytes_per_second / bytes_per_image:.2g}")
    return f", about {rate:,.0f} images/s here"


def _choose(needed: int, row_bytes: int, memory: Memory, *, is_direct: bool) -> _Choice:
    """Return the first feed that has enough memory."""
    size, ram = size_text(needed), memory.ram
    of_ram = "the available RAM, whose size is not known"
    if ram is not None:
        of_ram = f"the {size_text(ram)} of available RAM"

    def share_held(share: float) -> float:
        return 1.0 if ram is None else min(1.0, share * ram / needed)

    if memory.gpu is None:
        return _Choice("cpu", "there is no GPU", "cpu", share_held(PAGE_CACHE_SHARE))
    if needed <= RESIDENT_SHARE * memory.gpu:
        free = f"the {size_text(memory.gpu)} that are free on the GPU"
        return _Choice("resident", f"{size} fit in {RESIDENT_SHARE:.0%} of {free}", "gpu")
    if share_held(REGISTERED_SHARE) == 1:
        name = "dma" if row_bytes >= DMA_ROW_BYTES else "uva"
        return _Choice(name, f"{size} fit in {REGISTERED_SHARE:.0%} of {of_ram}", "bus")
    too_large = f"{size} do not fit in {REGISTERED_SHARE:.0%} of {of_ram}"
    if is_direct:
        return _Choice("disk", too_large, "bus", share_held(REGISTERED_SHARE))
    reason = f"{too_large}, and files there cannot be read past the page cache"
    return _Choice("pinned", reason, "cpu", share_held(PAGE_CACHE_SHARE))
