"""Which feed serves some samples on some device, and why."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

import torch

from memload.errors import FeedError
from memload.feeds.cpu import CpuFeed
from memload.feeds.dma import DmaFeed
from memload.feeds.interface import Feed, Samples
from memload.feeds.joined import feed_of_all
from memload.feeds.pages import bytes_to_register
from memload.feeds.pinned import PinnedFeed
from memload.feeds.resident import ResidentFeed
from memload.feeds.uva import UvaFeed
from memload.machine import available_memory
from memload.wording import size_text

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

    Several arrays count together. Each is then read by ``dma`` or ``uva`` as its own rows are large
    or small. A feed that was asked for by name serves all of them.

    Raises FeedError if the named feed cannot serve these samples on this device.
    """

    def create(name: str, array: Samples) -> Feed:
        if name == "cpu":
            return CpuFeed(array, device, keep=num_threads * prefetch_factor + 2)
        if name == "pinned":
            callers = max(1, pinned_callers(num_threads, prefetch_factor))
            return PinnedFeed(array, device, num_threads=num_threads, callers=callers)
        return _ON_DEVICE[name](array, device, num_threads=num_threads)

    def create_all(names: Sequence[str]) -> Feed:
        return feed_of_all(names, samples, create)

    if name == "auto" and device.type == "cuda":
        feed, choice = first_that_serves(create_all, samples, device)
    else:
        asked_for = Choice(name, "asked for")
        choice = Choice("cpu", f"the device is {device}") if name == "auto" else asked_for
        feed = create_all([choice.name] * len(samples.arrays))
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
    create: Callable[[Sequence[str]], Feed], samples: Samples, device: torch.device
) -> tuple[Feed, Choice]:
    """Return the fastest feed that has enough memory and can be created, and the reason.

    ``create`` takes the name of a feed for each array. The choice has that of the images, and the
    reason tells which arrays have another.
    """
    free = _free_memory(device)
    memory = available_memory()
    used = [(array, array.used_rows()) for array in samples.arrays]
    to_copy = sum(len(rows) * array.shards.array.row_bytes for array, rows in used)
    to_copy += sum(column.nbytes for column in samples.columns)
    to_register = sum(bytes_to_register(array.shards, rows) for array, rows in used)
    on_device = f"{RESIDENT_SHARE:.0%} of the {size_text(free)} free on {device}"
    in_memory = f"{REGISTERED_SHARE:.0%} of the {size_text(memory)} of available RAM"
    candidates = [(("resident",) * len(used), to_copy, RESIDENT_SHARE * free, on_device)]
    for names in _from_page_cache(samples):
        candidates.append((names, to_register, REGISTERED_SHARE * memory, in_memory))
    refusals: list[str] = []
    for names, size, limit, limit_in_words in candidates:
        described = _describe(names, samples)
        if size > limit:
            refusals.append(f"{described}: {size_text(size)} does not fit in {limit_in_words}")
            continue
        try:
            feed = create(names)
        except FeedError as error:
            refusals.append(f"{described}: {str(error).removesuffix('.')}")
            continue
        others = [described.removeprefix(f"{names[0]} with ")] if described != names[0] else []
        reasons = [f"{size_text(size)} fits in {limit_in_words}", *others, *refusals]
        return feed, Choice(names[0], "; ".join(reasons))
    return create(["pinned"] * len(used)), Choice("pinned", "; ".join(refusals))


def _from_page_cache(samples: Samples) -> list[tuple[str, ...]]:
    """Return which feeds may read the page cache, one for each array; the fastest first.

    If one of the two cannot be created, the other serves all arrays.
    """
    fastest = tuple(
        "dma" if array.shards.array.row_bytes >= DMA_ROW_BYTES else "uva"
        for array in samples.arrays
    )
    one_for_all = [(name,) * len(fastest) for name in ("dma", "uva")]
    if fastest[0] == "uva":
        one_for_all.reverse()
    return list(dict.fromkeys([fastest, *one_for_all]))


def _describe(names: Sequence[str], samples: Samples) -> str:
    """Return, for example, ``dma with uva for mask``."""
    arrays = [array.shards.array.name for array in samples.arrays]
    others = [array for array, name in zip(arrays, names, strict=True) if name != names[0]]
    if not others:
        return names[0]
    return f"{names[0]} with {names[arrays.index(others[0])]} for {', '.join(others)}"


def _free_memory(device: torch.device) -> int:
    """Return the bytes of the device's memory that torch can still hand out."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
