"""Several arrays of the same samples, such as images and masks, each through a feed of its own."""

import contextlib
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from torch import Tensor

from memload.feeds.interface import Begin, Feed, Fetch, ReadCounts
from memload.jobs import Job


class JoinedFeed:
    """Fetches the rows of every array with a feed for it, one array after another.

    The first feed, that of the images, also brings the columns. It gives the joined feed its name.
    """

    def __init__(self, feeds: Sequence[Feed]) -> None:
        self._feeds = feeds
        self.name, self.device = feeds[0].name, feeds[0].device

    def prepare(self, samples: np.ndarray) -> Begin:
        """See `Feed.prepare`."""
        begins = [feed.prepare(samples) for feed in self._feeds]

        def begin(start: int, stop: int) -> Fetch:
            fetches = [begin_one(start, stop) for begin_one in begins]
            return Job(partial(_fetch_all, fetches), lambda: all(one.is_ready() for one in fetches))

        return begin

    def counts(self) -> ReadCounts | None:
        """See `Feed.counts`. The rows of all arrays count."""
        found = [counts for feed in self._feeds if (counts := feed.counts()) is not None]
        return ReadCounts.of_all(found) if found else None

    def close(self) -> None:
        """See `Feed.close`."""
        for feed in self._feeds:
            feed.close()


def _fetch_all(fetches: Sequence[Fetch]) -> list[Tensor]:
    fetch_first, *fetch_others = fetches
    pixels, *columns = fetch_first()
    return [pixels, *(fetch_rows()[0] for fetch_rows in fetch_others), *columns]


def feed_of_all(creators: Sequence[Callable[[], Feed]]) -> Feed:
    """Return a feed of all arrays of some samples, from functions that create a feed of each.

    If one cannot be created, the others are closed.
    """
    with contextlib.ExitStack() as opened:
        feeds = []
        for create in creators:
            feeds.append(create())
            opened.callback(feeds[-1].close)
        opened.pop_all()
    return JoinedFeed(feeds) if len(feeds) > 1 else feeds[0]
