"""Which feed serves some samples on some device, and why."""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch

from memload.errors import FeedError
from memload.feeds.factory import DMA_ROW_BYTES, FeedFactory
from memload.feeds.interface import Feed, ReadCounts, Samples
from memload.feeds.limits import NO_LIMITS, MemoryLimits, claim_ram, room_in_ram, room_on_device
from memload.storage.file_reads import open_direct
from memload.wording import size_text

FeedName = Literal["auto", "resident", "dma", "uva", "disk", "pinned", "cpu"]
FEEDS: tuple[str, ...] = get_args(FeedName)


class Choice(NamedTuple):
    """A feed's name, and why it was chosen."""

    name: str
    reason: str
    #: Where rows were found so far, if the feed counts that.
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

    - ``resident``, if the used rows and the columns fit in a quarter of the device's free memory,
      or in ``resident_bytes``;
    - ``dma``, or ``uva`` for rows below 28 KiB, if the windows of the files that hold used rows fit
      in half of the available RAM (of the container's, if it has a limit), or in ``cache_bytes``.
      RAM in which other Loaders of this process hold rows of other files does not count;
    - ``disk``, if they do not fit, and the files can be read past the page cache;
    - ``pinned``.

    Several arrays count together. Each is then read by ``dma`` or ``uva`` as its own rows are large
    or small. A feed that was asked for by name serves all of them.

    ``buffers`` is for how many batches rows may be on their way from the disk. Raises FeedError if
    the named feed cannot serve these samples on this device, and ValueError for a limit that has no
    effect.
    """
    factory = FeedFactory(
        samples, device, limits, num_threads, prefetch_factor, buffers, by_name=name != "auto"
    )
    if name == "auto" and device.type == "cuda":
        feed, choice = first_that_serves(factory.create, samples, device, limits)
    else:
        chosen = "cpu" if name == "auto" else name
        reason = f"the device is {device}" if name == "auto" else "asked for"
        limits.check_effect(chosen)
        claimed = factory.claim(chosen)
        feed = factory.create([chosen] * len(samples.arrays), claimed)
        reasons = [reason, limits.cut_down(chosen), claimed.reason]
        choice = Choice(chosen, "; ".join(filter(None, reasons)))
    logging.getLogger("memload").info("feed of %s: %s", samples.shards.paths[0], choice)
    return feed, choice


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
    refusals: list[str] = []
    for names, reason, refusal in _candidates(samples, device, limits):
        described = _describe(names, samples)
        if not refusal:
            try:
                feed = create(names)
            except FeedError as error:
                refusal = str(error).removesuffix(".")
            else:
                others = [described.removeprefix(f"{names[0]} with ")] * (described != names[0])
                return feed, Choice(names[0], "; ".join([reason, *others, *refusals]))
        refusals.append(f"{described}: {refusal}")
    feed = create(["pinned"] * len(samples.arrays))
    return feed, Choice("pinned", "; ".join(refusals))


class _Candidate(NamedTuple):
    """A feed for each array, why to take these, and why not. Without a refusal, they are tried."""

    names: Sequence[str]
    reason: str
    refusal: str = ""


def _candidates(
    samples: Samples, device: torch.device, limits: MemoryLimits
) -> Iterator[_Candidate]:
    """Yield the feeds that ``"auto"`` considers, the fastest first."""
    number = len(samples.arrays)
    on_device = room_on_device(samples, limits.on_device(device))
    refusal = "" if on_device.is_enough else on_device.text
    yield _Candidate(["resident"] * number, on_device.text, refusal)

    limit = limits.in_ram("disk")
    in_ram = room_in_ram(claim_ram(samples, limit), limit)
    from_page_cache = _from_page_cache(samples)
    if in_ram.is_enough:
        yield from (_Candidate(names, in_ram.text) for names in from_page_cache)
        return
    refusal = _why_not_direct(samples)
    if refusal:
        yield _Candidate(from_page_cache[0], "", in_ram.text)
    held = f"{size_text(in_ram.held)} of it are held there" if in_ram.held else ""
    if limits.resident:
        beyond = f"up to {size_text(limits.resident)} on {device}"
        held = f"{held}, {beyond}" if held else f"{beyond} are held"
    rest = f"{held}, and the rest is read" if held else "all of it is read"
    yield _Candidate(["disk"] * number, f"{in_ram.text}, so {rest} from the disk", refusal)


def _why_not_direct(samples: Samples) -> str:
    """Return why the used rows cannot be read past the page cache; empty if they can."""
    for array in samples.arrays:
        shards = array.shards
        rows_in_shards = np.diff(np.searchsorted(array.used_rows(), shards.starts))
        for number in np.flatnonzero(rows_in_shards).tolist():
            direct = open_direct(shards.descriptors[number])
            if direct is None:
                return f"{shards.paths[number]} cannot be read past the page cache (O_DIRECT)"
            os.close(direct.descriptor)
    return ""


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
