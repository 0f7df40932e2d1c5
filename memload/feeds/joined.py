"""Several arrays, such as images and masks: a feed for each of them."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from memload.feeds.feed import BeginRows, Counts, Feed, PendingRows


class JoinedFeed:
    """Fetches the rows of every array with a feed for it, one array after another.

    The first feed, that of the images, gives the joined feed its name.
    """

    def __init__(self, feeds: Sequence[Feed]) -> None:
        self._feeds, self.device = feeds, feeds[0].device

    @property
    def name(self) -> str:
        """The name of the feed of the images."""
        return self._feeds[0].name

    def prepare(self, samples: np.ndarray) -> BeginRows:
        """See `Feed.prepare`."""
        begin_each = [feed.prepare(samples) for feed in self._feeds]

        def begin(start: int, stop: int) -> PendingRows:
            pending = [begin_one(start, stop) for begin_one in begin_each]

            def fetch() -> list[Tensor]:
                return [array for rows in pending for array in rows.fetch()]

            return PendingRows(fetch, lambda: all(rows.is_ready() for rows in pending))

        return begin

    def counts(self) -> Counts | None:
        """See `Feed.counts`. The rows of all arrays count."""
        counts = [found for feed in self._feeds if (found := feed.counts()) is not None]
        if not counts:
            return None
        *numbers, problems = zip(*counts, strict=True)
        problem = "; ".join(dict.fromkeys(filter(None, problems)))
        return Counts._make([*map(sum, numbers), problem])

    def close(self) -> None:
        """See `Feed.close`."""
        for feed in self._feeds:
            feed.close()
