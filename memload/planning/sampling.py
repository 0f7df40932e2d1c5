"""Which records of a source are converted to predict the others."""

from typing import Final

import numpy as np

from memload.building.pool import Chunk
from memload.building.rows import chunks_of
from memload.building.sources.record import Source
from memload.building.sources.wrapped import WrappedSource
from memload.storage.keys import Keys

#: The sample is the same each time.
SEED: Final = 0
#: How many records are converted, and how many for each worker, whose first ones do not count.
_RECORDS, _RECORDS_PER_WORKER = 200, 16
#: Of a group that is read in a row, such as a row group of Parquet, the first records are taken,
#: because reading others would read these, too. With so many, at least four groups are sampled.
_GROUP_RECORDS = 50
#: Workers get few records at a time, so that all of them are busy until the end.
_CHUNK_RECORDS = 4


class Sample(WrappedSource):
    """Random records of a source, in random order: the first of them are random, too.

    Of a source whose records are read in groups, they are the first ones of random groups.
    ``num_workers`` are to convert them.
    """

    def __init__(self, source: Source, num_workers: int) -> None:
        super().__init__(source)
        count = min(len(source), max(_RECORDS, _RECORDS_PER_WORKER * num_workers))
        generator = np.random.default_rng(SEED)
        #: the groups, as rows of the sample, if a build leaves each of them to one worker
        self.groups: list[Chunk] | None = None
        if self.group_starts is None:
            self._positions = generator.choice(len(source), count, replace=False)
        else:
            self._take_groups(source, count, num_workers, generator)
            self.group_starts = None  # those of the whole source
        keys = source.keys if isinstance(source.keys, Keys) else Keys.of(list(source.keys))
        self.keys = keys.take(self._positions)

    def _take_groups(
        self, source: Source, count: int, num_workers: int, generator: np.random.Generator
    ) -> None:
        """Take the first records of random groups."""
        starts = set(self.group_starts or ())
        chunks = list(chunks_of(source, 0, len(source), num_workers))
        firsts = [chunk.start for chunk in chunks if chunk.start in starts]
        ends = [*firsts[1:], len(source)]
        size = max(_GROUP_RECORDS, -(-count // len(firsts)))
        positions: list[int] = []
        groups: list[Chunk] = []
        for group in generator.permutation(len(firsts)).tolist():
            rows = min(size, ends[group] - firsts[group], count - len(positions))
            groups.append(Chunk(len(positions), len(positions) + rows))
            positions += range(firsts[group], firsts[group] + rows)
            if len(positions) == count:
                break
        self._positions = np.array(positions)
        if len(firsts) == len(chunks):
            self.groups = groups

    def __len__(self) -> int:
        return len(self._positions)

    def _position(self, index: int) -> int:
        return int(self._positions[index])

    def first_chunks(self, num_workers: int) -> list[Chunk]:
        """Return all rows of the sample, in chunks that keep all workers busy until the end."""
        if self.groups is not None or hasattr(self, "__getitems__"):
            return self.chunks(num_workers)  # which are read together
        rows = len(self)
        starts = range(0, rows, _CHUNK_RECORDS)
        return [Chunk(start, min(start + _CHUNK_RECORDS, rows)) for start in starts]

    def chunks(self, num_workers: int) -> list[Chunk]:
        """Return all rows of the sample, in chunks about as large as those of a build."""
        return self.groups or list(chunks_of(self, 0, len(self), num_workers))
