"""Which feed serves some samples on some device, and why."""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, get_args

import torch

from memload.errors import FeedError
from memload.feeds.budget import claim_all
from memload.feeds.cpu import CpuFeed
from memload.feeds.dma import BatchedCopies
from memload.feeds.interface import Feed, ReadCounts, Samples, require_cuda
from memload.feeds.joined import feed_of_all
from memload.feeds.limits import NO_LIMITS, MemoryLimits
from memload.feeds.page_cache import Copier, PageCacheFeed
from memload.feeds.pinned import PinnedFeed
from memload.feeds.resident import ResidentFeed
from memload.feeds.uva import Kernel
from memload.feeds.windows import plan_for_rows
from memload.wording import size_text

FeedName = Literal["auto", "resident", "dma", "uva", "disk", "pinned", "cpu"]
FEEDS: tuple[str, ...] = get_args(FeedName)

#: From rows of this size on, the copy engines are about as fast as a kernel (44.9 against 46.8 GB/s
#: at 27 KiB on one H200).
DMA_ROW_BYTES = 28 << 10


class Choice(NamedTuple):
    """A feed's name, and why it was chosen."""

    name: str
    reason: str
    #: Where rows were found so far, of feeds that read from the disk.
    counts: ReadCounts | None = None

    def __str__(self) -> str:
        text = f"{self.name}: {self.reason}"
        return text if self.counts is None else f"{text}; {self.counts}"


def choose_feed(
    name: FeedName,
    samples: Samples,
    device: torch.device,
    *,
    num_threads: int,
    prefetch_factor: int,
    buffers: int = 4,
    limits: MemoryLimits = NO_LIMITS,
) -> tuple[Feed, Choice]:
    """Create the feed with this name, or choose one; return it with the reason.

    On CUDA, ``"auto"`` is the first of these that can serve:

    - ``resident``, if the used rows and the columns fit in a quarter of the device's free memory;
    - ``dma``, or ``uva`` for rows below 28 KiB, if the windows of the files that hold used rows fit
      in half of the available RAM (of the container's, if it has a limit);
    - ``pinned``.

    Several arrays count together. Each is then read by ``dma`` or ``uva`` as its own rows are large
    or small. A feed that was asked for by name serves all of them.

    Raises FeedError if the named feed cannot serve these samples on this device, and ValueError
    for a limit without effect.
    """

    def create(name: str, array: Samples) -> Feed:
        if name == "cpu":
            return CpuFeed(array, device, keep=num_threads * prefetch_factor + 2)
        if name == "pinned":
            callers = max(1, pinned_callers(num_threads, prefetch_factor))
            return PinnedFeed(array, device, num_threads=num_threads, callers=callers)
        if name == "resident":
            return ResidentFeed(array, device, num_threads=num_threads)
        require_cuda(name, device)
        budget = limits.in_ram(name).size if name == "disk" else math.inf
        plan = plan_for_rows(array.shards, array.used_rows())
        (claim,) = claim_all([(array.shards, plan)], budget)
        copier = _copier(name, array, device)
        return PageCacheFeed(name, array, device, copier, claim=claim, buffers=buffers)

    def create_all(names: Sequence[str]) -> Feed:
        return feed_of_all(names, samples, create)

    if name == "auto" and device.type == "cuda":
        feed, choice = first_that_serves(create_all, samples, device, limits)
    else:
        asked_for = Choice(name, "asked for")
        choice = Choice("cpu", f"the device is {device}") if name == "auto" else asked_for
        limits.check_effect(choice.name)
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
    create: Callable[[Sequence[str]], Feed],
    samples: Samples,
    device: torch.device,
    limits: MemoryLimits = NO_LIMITS,
) -> tuple[Feed, Choice]:
    """Return the fastest feed that has enough memory and can be created, and the reason.

    ``create`` takes the name of a feed for each array. The choice has that of the images, and the
    reason tells which arrays have another.
    """
    used = [(array, array.used_rows()) for array in samples.arrays]
    to_copy = sum(len(rows) * array.shards.array.row_bytes for array, rows in used)
    to_copy += sum(column.nbytes for column in samples.columns)
    to_register = sum(int(plan_for_rows(array.shards, rows).sum()) for array, rows in used)
    on_device, ram = limits.on_device(device), limits.in_ram("disk")
    candidates = [(("resident",) * len(used), to_copy, on_device)]
    candidates += [(names, to_register, ram) for names in _from_page_cache(samples)]
    candidates.append((("disk",) * len(used), 0, ram))
    refusals: list[str] = []
    for names, size, limit in candidates:
        described = _describe(names, samples)
        if size > limit.size:
            refusals.append(f"{described}: {size_text(size)} does not fit in {limit.text}")
            continue
        try:
            feed = create(names)
        except FeedError as error:
            refusals.append(f"{described}: {str(error).removesuffix('.')}")
            continue
        others = [described.removeprefix(f"{names[0]} with ")] if described != names[0] else []
        reasons = [f"{size_text(size)} fits in {limit.text}", *others, *refusals]
        return feed, Choice(names[0], "; ".join(reasons))
    return create(["pinned"] * len(used)), Choice("pinned", "; ".join(refusals))


def _copier(name: str, samples: Samples, device: torch.device) -> Copier:
    """Return what copies rows for a feed. For "disk" it is the faster one that there is."""
    array = samples.shards.array

    def kernel() -> Copier:
        return Kernel(device, array.row_bytes, array.header_bytes)

    def copies() -> Copier:
        return BatchedCopies(device, array.row_bytes)

    if name != "disk":
        return kernel() if name == "uva" else copies()
    fast, slow = (copies, kernel) if array.row_bytes >= DMA_ROW_BYTES else (kernel, copies)
    try:
        return fast()
    except FeedError:
        return slow()


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
