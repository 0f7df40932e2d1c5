"""Several arrays, such as images and masks: a feed for each of them."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from memload.feeds.feed import Counts, Feed, PendingRows, PreparedSamples


class JoinedFeed:
    """Fetches the rows of every array with a feed for it, one array after another.

    The first feed, that of the images, also brings the columns. It gives the joined feed its name.
    A batch is ``[pixels, *other arrays, *columns]``.
    """

    def __init__(self, feeds: Sequence[Feed]) -> None:
        self._feeds, self.device = feeds, feeds[0].device

    @property
    def name(self) -> str:
        """The name of the feed of the images."""
        return self._feeds[0].name

    def prepare(self, samples: np.ndarray) -> PreparedSamples:
        """See `Feed.prepare`."""
        prepared = [feed.prepare(samples) for feed in self._feeds]

        def begin(start: int, stop: int) -> PendingRows:
            pending = [of_array.begin(start, stop) for of_array in prepared]

            def fetch() -> list[Tensor]:
                (pixels, *columns), *others = [rows.fetch() for rows in pending]
                return [pixels, *(array for (array,) in others), *columns]

            return PendingRows(fetch, lambda: all(rows.is_ready() for rows in pending))

        return PreparedSamples(begin)

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
