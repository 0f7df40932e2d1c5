"""Which feed serves some samples on some device, and why."""

import contextlib
import logging
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch

from memload.errors import FeedError
from memload.feeds.copies import RowCopies
from memload.feeds.feed import Counts, Feed, SampleArray
from memload.feeds.gather import GatherFeed
from memload.feeds.held import WINDOW_BYTES, HeldFile, plan_files, ram_budget
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
    arrays: Sequence[SampleArray],
    device: torch.device,
    *,
    cache_bytes: int | None = None,
    buffers: int = 8,
) -> tuple[Feed, Choice]:
    """Create the feed with this name, or choose one; return it with the reason.

    On CUDA, ``"auto"`` is the first of these that can serve:

    - ``resident``, if the used rows fit in a quarter of the device's free memory;
    - ``dma``, for rows of at least 8 KiB. It holds as much of the files as fits in half of the
      available RAM, or in ``cache_bytes``, and reads the rest;
    - ``pinned``.

    ``arrays`` are the samples in the array of the images, then in others. They count together.
    ``buffers`` is how many unused buffers of batches are kept on the CPU. Raises FeedError if the
    named feed cannot serve these samples on this device.
    """
    is_cpu, by_name = device.type == "cpu", name != "auto"
    if by_name and is_cpu != (name == "cpu"):
        needed = "a CUDA device" if is_cpu else "device='cpu'"
        raise FeedError(
            f"feed={name!r} needs {needed}, but the device is {device}. Use feed='auto'."
        )
    candidates = [name] if by_name else ["cpu"] if is_cpu else ["resident", "dma", "pinned"]
    refusals: list[str] = []
    for candidate in candidates:
        try:
            feeds, reason = _make(candidate, arrays, device, cache_bytes, buffers, by_name=by_name)
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


def expected_feed(
    arrays: Sequence[SampleArray], device: torch.device, cache_bytes: int | None
) -> str:
    """Return the feed that ``"auto"`` takes, without its threads and without reading rows."""
    if device.type == "cpu":
        return "cpu"
    with contextlib.suppress(FeedError):
        _check_resident(arrays, device)
        return "resident"
    with contextlib.suppress(FeedError):
        _plan_pages(arrays, device, cache_bytes, by_name=False)
        return "dma"
    return "pinned"


def _make(
    name: str,
    arrays: Sequence[SampleArray],
    device: torch.device,
    cache_bytes: int | None,
    buffers: int,
    *,
    by_name: bool,
) -> tuple[list[Feed], str]:
    """Return a feed for each array, and why it can serve. Raises FeedError if it cannot."""
    if name == "resident":
        reason = "asked for" if by_name else _check_resident(arrays, device)
        return [ResidentFeed(array, device) for array in arrays], reason
    if name in ("dma", "disk"):
        return _pages(arrays, device, cache_bytes, by_name=by_name)
    reason = f"the device is {device}" if name == "cpu" else "it serves any file"
    return [GatherFeed(array, device, keep=buffers) for array in arrays], reason


def _check_resident(arrays: Sequence[SampleArray], device: torch.device) -> str:
    """Return why the device may keep all used rows. Raises FeedError if they take too much."""
    needed = sum(len(array.used_rows) * array.row_bytes for array in arrays)
    free = free_memory(device)
    text = f"in {RESIDENT_SHARE:.0%} of the {size_text(free)} free on {device}"
    if needed > RESIDENT_SHARE * free:
        raise FeedError(f"{size_text(needed)} does not fit {text}")
    return f"{size_text(needed)} fits {text}"


def _pages(
    arrays: Sequence[SampleArray], device: torch.device, cache_bytes: int | None, *, by_name: bool
) -> tuple[list[Feed], str]:
    copy_rows, files, budget = _plan_pages(arrays, device, cache_bytes, by_name=by_name)
    planned = sum(file.planned for of_array in files for file in of_array)
    size = sum(file.size for of_array in files for file in of_array)
    held = "all" if planned == size else f"{size_text(planned)} of"
    reason = f"{held} {size_text(size)} will be held, as {size_text(budget)} of RAM may hold rows"
    if not copy_rows.is_batched:
        reason += "; the driver copies row by row, since it is older than CUDA 12.8"
    given = zip(arrays, files, strict=True)
    return [PagesFeed(array, device, of_array, copy_rows) for array, of_array in given], reason


def _plan_pages(
    arrays: Sequence[SampleArray], device: torch.device, cache_bytes: int | None, *, by_name: bool
) -> tuple[RowCopies, list[list[HeldFile]], int]:
    """Return what the feed ``dma`` copies with, the files that it holds, and its budget of RAM.

    Raises FeedError if it cannot serve these samples, or threads are faster.
    """
    if arrays[0].row_bytes < MIN_DMA_ROW_BYTES and not by_name:
        raise FeedError(f"threads are faster for rows of {size_text(arrays[0].row_bytes)}")
    largest = max(array.row_bytes for array in arrays)
    if largest > WINDOW_BYTES:
        raise FeedError(f"rows of {size_text(largest)} are too large. Use feed='pinned'.")
    budget = ram_budget(cache_bytes)
    return RowCopies(device), plan_files(arrays, budget, device), budget


def free_memory(device: torch.device) -> int:
    """Return the bytes of the device's memory that torch can still hand out."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
