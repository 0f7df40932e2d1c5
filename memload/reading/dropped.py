"""Say that `fast_collate` drops samples: once for a data set, and with a count after each epoch.

A collate function is told neither which loader calls it nor when an epoch ends. But torch makes a
new fetcher for each epoch, in the process that collates, and calls the function from it. The
fetcher knows the data set, and it is deleted when the epoch ends or is left.
"""

import logging
import mmap
import sys
import threading
import weakref
from types import FrameType
from typing import Any

import numpy as np

logger = logging.getLogger("memload")

#: The module of torch's fetchers.
_FETCHERS = "torch.utils.data._utils.fetch"
#: The data sets of which it was said, as their `id`. Forked workers share this memory, and have
#: their data set at the same address. Two things are said again: what a spawned worker drops, since
#: its memory is its own, and what two workers drop first at the same moment. Only a lock made at
#: import could prevent that. It is not said of a data set that takes the address of a deleted one.
_reported = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.int64)
#: How many samples were dropped in the epoch of each fetcher, as a list of one number.
_counts: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def report_dropped(dropped: int, samples: int) -> None:
    """Count samples that were dropped from a batch; log a warning if these are the first."""
    fetcher = _calling_fetcher()
    with _lock:
        is_first = _is_first(id(getattr(fetcher, "dataset", None)))
        if fetcher is not None and fetcher not in _counts:
            _counts[fetcher] = [0]
            weakref.finalize(fetcher, _log_count, _counts[fetcher])
        if fetcher is not None:
            _counts[fetcher][0] += dropped
    if is_first:
        logger.warning(
            f"fast_collate drops samples that are None, or whose image is None: {dropped} of the "
            f"{samples} in this batch, and any that follow, which are not reported. For a count "
            "after each epoch, log 'memload' at the level DEBUG."
        )


def _calling_fetcher() -> Any:
    """Return the fetcher from which this was called, or None if no DataLoader collates."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != _FETCHERS:
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get("self")


def _is_first(number: int) -> bool:
    """Note a data set. Return whether it is new; once the table is full, none is."""
    free = np.flatnonzero(_reported == 0)
    if number in _reported or not free.size:
        return False
    _reported[free[0]] = number
    return True


def _log_count(count: list[int]) -> None:
    logger.debug(f"fast_collate has dropped {count[0]:,} samples of this epoch in this process")
