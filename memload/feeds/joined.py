"""Several arrays, such as images and masks: a feed for each of them."""

from collections.abc import Sequence
from typing import NamedTuple

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

    def prepare(self, samples: np.ndarray) -> "_JoinedSamples":
        """See `Feed.prepare`."""
        return _JoinedSamples([feed.prepare(samples) for feed in self._feeds])

    def counts(self) -> Counts | None:
        """See `Feed.counts`. The rows of all arrays count."""
        counts = [found for feed in self._feeds if (found := feed.counts()) is not None]
        if not counts:
            return None
        problems = dict.fromkeys(found.problem for found in counts if found.problem)
        return Counts(
            rows=sum(found.rows for found in counts),
            rows_held=sum(found.rows_held for found in counts),
            rows_to_hold=sum(found.rows_to_hold for found in counts),
            served=sum(found.served for found in counts),
            hits=sum(found.hits for found in counts),
            problem="; ".join(problems),
        )

    def close(self) -> None:
        """See `Feed.close`."""
        for feed in self._feeds:
            feed.close()


class _JoinedSamples(NamedTuple):
    prepared: Sequence[PreparedSamples]

    def begin(self, start: int, stop: int) -> "_JoinedRows":
        """See `PreparedSamples.begin`."""
        return _JoinedRows([prepared.begin(start, stop) for prepared in self.prepared])


class _JoinedRows(NamedTuple):
    pending: Sequence[PendingRows]

    def is_ready(self) -> bool:
        """See `PendingRows.is_ready`."""
        return all(rows.is_ready() for rows in self.pending)

    def fetch(self) -> list[Tensor]:
        """See `PendingRows.fetch`."""
        (pixels, *columns), *others = [rows.fetch() for rows in self.pending]
        return [pixels, *(array for (array,) in others), *columns]
