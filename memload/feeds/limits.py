"""How much memory rows may take, in RAM and on the device, and whether samples fit in that."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from memload.feeds.budget import Claim, claim_all, claimed_bytes, reserve_bytes
from memload.feeds.interface import Samples
from memload.feeds.windows import plan_for_rows
from memload.machine import available_memory
from memload.wording import parse_size, size_text

#: The part of the device's free memory that samples may take. The rest is for the model.
RESIDENT_SHARE = 0.25
#: The part of the available RAM that may be registered with CUDA. The system cannot reclaim that.
REGISTERED_SHARE = 0.5
#: The part of the available RAM in which rows may stay as ordinary page cache, which it can.
PAGE_CACHE_SHARE = 0.8

#: The feeds on which each argument of a Loader has an effect.
_FEEDS_WITH = {
    "cache_bytes": ("auto", "dma", "uva", "disk", "pinned", "cpu"),
    "resident_bytes": ("auto", "resident", "disk"),
}


class Limit(NamedTuple):
    """A limit in bytes, and how a sentence names it."""

    size: float
    text: str


class MemoryLimits(NamedTuple):
    """The limits that a Loader was given, in bytes. None: the default."""

    cache: int | None = None
    resident: int | None = None

    @classmethod
    def of(cls, cache_bytes: int | str | None, resident_bytes: int | str | None) -> "MemoryLimits":
        """Return the limits that the arguments of a Loader set, such as ``"64GB"``.

        Raises TypeError or ValueError for what is no size.
        """
        given = {"cache_bytes": cache_bytes, "resident_bytes": resident_bytes}
        sizes = [None if size is None else _bytes_of(name, size) for name, size in given.items()]
        return cls(*sizes)

    def as_arguments(self) -> str:
        """Return what was given, such as ``, cache_bytes=64_000_000_000``."""
        given = zip(_FEEDS_WITH, self, strict=True)
        return "".join(f", {name}={size:_}" for name, size in given if size is not None)

    def check_effect(self, feed: str) -> None:
        """Raise ValueError if a limit was given that has no effect on a feed."""
        for (name, feeds), size in zip(_FEEDS_WITH.items(), self, strict=True):
            if size is not None and feed not in feeds:
                advice = f"Leave it out, or use one of the feeds {', '.join(feeds)}."
                if feed == "cpu":
                    advice = "Leave it out on the CPU: it is about the memory of a GPU."
                raise ValueError(f"{name} has no effect on feed={feed!r}. {advice}")

    def in_ram(self, feed: str) -> Limit:
        """Return the limit of rows that a feed holds in RAM.

        By default, ``dma`` and ``uva`` have none: they hold all rows, and ``"auto"`` has looked
        before whether these fit. A given limit is cut down to the available RAM less
        `reserve_bytes`, so that the system does not run out of RAM, but not below the feed's
        default (that of ``disk`` for ``dma`` and ``uva``).
        """
        if self.cache is None:
            return _default_in_ram(feed)
        available = available_memory()
        if available is not None:
            largest = max(available - reserve_bytes(available), int(_share(feed) * available))
            if largest < self.cache:
                return Limit(largest, f"the {size_text(largest)} to which cache_bytes was cut down")
        return Limit(self.cache, f"the {size_text(self.cache)} of cache_bytes")

    def cut_down(self, feed: str) -> str:
        """Return why less RAM may be taken than was given; empty if that is not so."""
        limit = self.in_ram(feed).size
        if self.cache is None or limit == self.cache:
            return ""
        return (
            f"cache_bytes={self.cache:_} was cut down to {size_text(int(limit))}, so that enough "
            f"of the {size_text(available_memory() or 0)} of available RAM is left to other uses"
        )

    def on_device(self, device: torch.device) -> Limit:
        """Return the limit of samples in the memory of a CUDA device."""
        if self.resident is not None:
            return Limit(self.resident, f"the {size_text(self.resident)} of resident_bytes")
        free = free_memory(device)
        return Limit(
            RESIDENT_SHARE * free, f"{RESIDENT_SHARE:.0%} of the {size_text(free)} free on {device}"
        )


def _default_in_ram(feed: str) -> Limit:
    """Return the limit of rows in RAM if none was given."""
    if feed in ("dma", "uva"):
        return Limit(math.inf, "the available RAM")
    available = available_memory()
    if available is None:
        size = 0 if feed == "disk" else math.inf
        return Limit(size, "the available RAM, which the system does not report")
    share = _share(feed)
    return Limit(share * available, f"{share:.0%} of the {size_text(available)} of available RAM")


def _share(feed: str) -> float:
    """Return which part of the available RAM the rows of a feed may take by default."""
    return PAGE_CACHE_SHARE if feed in ("pinned", "cpu") else REGISTERED_SHARE


#: Nothing was given.
NO_LIMITS = MemoryLimits()


class Room(NamedTuple):
    """How many bytes some samples need, how many of them a limit allows, and a sentence on it."""

    needed: int
    held: int
    text: str

    @property
    def is_enough(self) -> bool:
        """Whether all of it is allowed."""
        return self.held == self.needed


def room_on_device(samples: Samples, limit: Limit) -> Room:
    """Return the room in the device's memory, where all samples are held or none."""
    needed = sum(column.nbytes for column in samples.columns)
    for array in samples.arrays:
        needed += len(array.used_rows()) * array.shards.array.row_bytes
    held = needed if needed <= limit.size else 0
    verb = "fits" if held else "does not fit"
    return Room(needed, held, f"{size_text(needed)} {verb} in {limit.text}")


def room_in_ram(claims: Sequence[Claim], limit: Limit) -> Room:
    """Return the room in RAM for what was claimed within a limit that all Loaders share."""
    needed, held = sum(claim.wanted for claim in claims), sum(claim.size for claim in claims)
    verb = "fits" if held == needed else "does not fit"
    text = f"{size_text(needed)} {verb} in {limit.text}"
    if held > limit.size:  # more than it allows: others have claimed the same
        text = (
            f"other Loaders hold {size_text(held)} of the {size_text(needed)} already, beyond "
            f"{limit.text}"
        )
    elif others := claimed_bytes() - held:
        text += f" beside the {size_text(others)} of other Loaders"
    return Room(needed, held, text)


def claim_ram(samples: Samples, limit: Limit) -> list[Claim]:
    """Claim RAM for the used rows of every array. It is free again when the claims are dropped."""
    shards = [array.shards for array in samples.arrays]
    plans = [plan_for_rows(array.shards, array.used_rows()) for array in samples.arrays]
    return claim_all(list(zip(shards, plans, strict=True)), limit.size)


def _bytes_of(name: str, size: Any) -> int:
    """Return a number of bytes. Raises TypeError or ValueError that names the argument."""
    if isinstance(size, bool) or not isinstance(size, int | np.integer | str):
        raise TypeError(
            f"{name} must be a whole number of bytes or a text such as '64GB', not {size!r}."
        )
    try:
        found = parse_size(size if isinstance(size, str) else int(size))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if found < 0:
        raise ValueError(f"{name} must be at least 0, not {size!r}.")
    return found


def free_memory(device: torch.device) -> int:
    """Return the bytes of the device's memory that torch can still hand out."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
