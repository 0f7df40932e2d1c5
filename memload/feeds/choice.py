"""Which feed serves some samples on some device, and why."""

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, get_args

import torch

from memload.errors import FeedError
from memload.feeds.copies import RowCopies
from memload.feeds.feed import Counts, Feed, Samples
from memload.feeds.gather import GatherFeed
from memload.feeds.held import WINDOW_BYTES, plan_files, ram_budget
from memload.feeds.joined import JoinedFeed
from memload.feeds.pages import PagesFeed
from memload.feeds.resident import ResidentFeed
from memload.wording import size_text

#: What a Loader's argument ``feed`` may be. ``disk`` is another name of ``dma``.
FeedName = Literal["auto", "resident", "dma", "disk", "pinned", "cpu"]
FEEDS: tuple[str, ...] = get_args(FeedName)

#: The part of the device's free memory that samples may take. The rest is for the model.
RESIDENT_SHARE = 0.25
#: Below this size of a row, threads are faster than the copy engines.
MIN_DMA_ROW_BYTES = 8 << 10


class Choice(NamedTuple):
    """A feed's name, and why it was chosen."""

    name: str
    reason: str
    #: Where rows were found so far, if the feed counts that.
    counts: Counts | None = None

    def __str__(self) -> str:
        text = f"{self.name}: {self.reason}"
        return text if self.counts is None else f"{text}; {self.counts}"


def choose_feed(
    name: FeedName,
    arrays: Sequence[Samples],
    device: torch.device,
    *,
    cache_bytes: int | None = None,
    buffers: int = 8,
) -> tuple[Feed, Choice]:
    """Create the feed with this name, or choose one; return it with the reason.

    On CUDA, ``"auto"`` is the first of these that can serve:

    - ``resident``, if the used rows and the columns fit in a quarter of the device's free memory;
    - ``dma``, for rows of at least 8 KiB. It holds as much of the files as fits in half of the
      available RAM, or in ``cache_bytes``, and reads the rest;
    - ``pinned``.

    ``arrays`` are the samples in the array of the images, then in others. They count together.
    ``buffers`` is how many unused buffers of batches are kept on the CPU. Raises FeedError if the
    named feed cannot serve these samples on this device.
    """
    is_cpu = device.type == "cpu"
    if is_cpu != (name == "cpu") and name != "auto":
        needed = "a CUDA device" if is_cpu else "device='cpu'"
        raise FeedError(
            f"feed={name!r} needs {needed}, but the device is {device}. Use feed='auto'."
        )

    def gather() -> tuple[list[Feed], str]:
        feeds: list[Feed] = [GatherFeed(samples, device, keep=buffers) for samples in arrays]
        return feeds, f"the device is {device}" if is_cpu else "it serves any file"

    def pages() -> tuple[list[Feed], str]:
        return _pages(arrays, device, cache_bytes, by_name=name != "auto")

    def resident() -> tuple[list[Feed], str]:
        return _resident(arrays, device, by_name=name != "auto")

    ways: dict[str, Callable[[], tuple[list[Feed], str]]] = {
        "resident": resident, "dma": pages, "disk": pages, "pinned": gather, "cpu": gather
    }  # fmt: skip
    candidates = [name] if name != "auto" else ["cpu"] if is_cpu else ["resident", "dma", "pinned"]
    refusals: list[str] = []
    for candidate in candidates:
        try:
            feeds, reason = ways[candidate]()
        except FeedError as error:
            if candidate == candidates[-1]:
                raise
            refusals.append(f"{candidate}: {str(error).removesuffix('.')}")
        else:
            break
    feed = feeds[0] if len(feeds) == 1 else JoinedFeed(feeds)
    choice = Choice(feed.name, "; ".join([reason, *refusals]))
    logging.getLogger("memload").info("feed of %s: %s", arrays[0].shards.paths[0], choice)
    return feed, choice


def _resident(
    arrays: Sequence[Samples], device: torch.device, *, by_name: bool
) -> tuple[list[Feed], str]:
    needed = sum(column.nbytes for samples in arrays for column in samples.columns)
    needed += sum(len(samples.used_rows) * samples.row_bytes for samples in arrays)
    free = free_memory(device)
    text = f"in {RESIDENT_SHARE:.0%} of the {size_text(free)} free on {device}"
    fits = needed <= RESIDENT_SHARE * free
    if not fits and not by_name:
        raise FeedError(f"{size_text(needed)} does not fit {text}")
    reason = f"{size_text(needed)} fits {text}" if fits else "asked for"
    return [ResidentFeed(samples, device) for samples in arrays], reason


def _pages(
    arrays: Sequence[Samples], device: torch.device, cache_bytes: int | None, *, by_name: bool
) -> tuple[list[Feed], str]:
    row_bytes = [samples.row_bytes for samples in arrays]
    if row_bytes[0] < MIN_DMA_ROW_BYTES and not by_name:
        raise FeedError(f"threads are faster for rows of {size_text(row_bytes[0])}")
    if max(row_bytes) > WINDOW_BYTES:
        raise FeedError(f"rows of {size_text(max(row_bytes))} are too large. Use feed='pinned'.")
    copies = [RowCopies(device, size) for size in row_bytes]
    budget = ram_budget(cache_bytes)
    files = plan_files(arrays, budget)
    held = sum(file.planned for of_array in files for file in of_array)
    size = sum(file.size for of_array in files for file in of_array)
    limit = f"{size_text(budget)} of RAM may hold rows"
    reason = f"all {size_text(size)} will be held, as {limit}"
    if held < size:
        reason = f"{size_text(held)} of {size_text(size)} will be held, as {limit}"
    if not copies[0].is_batched:
        reason += "; the driver copies row by row, since it is older than CUDA 12.8"
    feeds: list[Feed] = []
    with contextlib.ExitStack() as opened:
        for arguments in zip(arrays, files, copies, strict=True):
            samples, of_array, copy_rows = arguments
            feeds.append(PagesFeed(samples, device, of_array, copy_rows))
            opened.callback(feeds[-1].close)  # if the next one cannot be created
        opened.pop_all()
    return feeds, reason


def free_memory(device: torch.device) -> int:
    """Return the bytes of the device's memory that torch can still hand out."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
