"""Several arrays of the same samples, such as images and masks, each through a feed of its own."""

import contextlib
from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from memload.feeds.interface import Feed, Fetch, Samples


class JoinedFeed:
    """Fetches the rows of every array with a feed for it, one array after another.

    The first feed, that of the images, also brings the columns. It gives the joined feed its name.
    """

    def __init__(self, feeds: Sequence[Feed]) -> None:
        self._feeds = feeds
        self.name, self.device = feeds[0].name, feeds[0].device

    def prepare(self, samples: np.ndarray) -> Fetch:
        """See `Feed.prepare`."""
        fetch_first, *fetch_others = [feed.prepare(samples) for feed in self._feeds]

        def fetch(start: int, stop: int) -> list[Tensor]:
            pixels, *columns = fetch_first(start, stop)
            others = [fetch_rows(start, stop)[0] for fetch_rows in fetch_others]
            return [pixels, *others, *columns]

        return fetch

    def close(self) -> None:
        """See `Feed.close`."""
        for feed in self._feeds:
            feed.close()


def feed_of_all(
    feed_names: Sequence[str], samples: Samples, create: Callable[[str, Samples], Feed]
) -> Feed:
    """Return a feed of all arrays of the samples, which has one feed for each.

    ``feed_names`` are the names of these feeds, such as ``"pinned"``. If one cannot be
    created, the others are closed.
    """
    with contextlib.ExitStack() as opened:
        feeds = []
        for name, array in zip(feed_names, samples.arrays, strict=True):
            feeds.append(create(name, array))
            opened.callback(feeds[-1].close)
        opened.pop_all()
    return JoinedFeed(feeds) if len(feeds) > 1 else feeds[0]
