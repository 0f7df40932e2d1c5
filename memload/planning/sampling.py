"""Which records of a source are converted to predict the others."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from memload.building.pool import Chunk
from memload.building.sources.record import Source, optional
from memload.building.sources.wrapped import WrappedSource
from memload.storage.keys import Keys

#: The sample is the same each time.
SEED: Final = 0
#: How many records are converted. If there are many workers, each is to have some after its first,
#: which take longer.
_RECORDS, _RECORDS_PER_WORKER = 200, 16
#: Of a group that is read together, such as a row group of Parquet, so many are taken in a row.
_RUN_ROWS = 100


class Sample(WrappedSource):
    """Random records of a source, in random order, so that the first of them are random, too.

    ``num_workers`` are to convert them. Of groups that are best read in a row, the first records
    are taken, because reading a later one would read all records before it. ``runs`` are the rows
    of the sample that a worker is to read in a row, if there are such groups.
    """

    def __init__(self, source: Source, num_workers: int) -> None:
        super().__init__(source)
        count = min(len(source), max(_RECORDS, _RECORDS_PER_WORKER * num_workers))
        generator = np.random.default_rng(SEED)
        starts = optional(source).group_starts
        if starts is None:
            self._positions = generator.choice(len(source), count, replace=False)
            self.runs: Sequence[Chunk] | None = None
        else:
            self._positions, self.runs = _first_of_groups(starts, len(source), count, generator)
        self.group_starts = None
        keys = source.keys if isinstance(source.keys, Keys) else Keys.of(list(source.keys))
        self.keys = keys.take(self._positions)

    def __len__(self) -> int:
        return len(self._positions)

    def _position(self, index: int) -> int:
        return int(self._positions[index])


def _first_of_groups(
    starts: Sequence[int], records: int, count: int, generator: np.random.Generator
) -> tuple[np.ndarray, list[Chunk]]:
    """Return the positions of the first records of random groups, and the runs that they form."""
    edges = np.unique([0, *starts, records])
    groups = generator.permutation(len(edges) - 1)
    run_rows = max(_RUN_ROWS, -(-count // len(groups)))
    positions: list[int] = []
    runs: list[Chunk] = []
    for group in groups.tolist():
        start = int(edges[group])
        rows = min(int(edges[group + 1]) - start, run_rows, count - len(positions))
        runs.append(Chunk(len(positions), len(positions) + rows))
        positions += range(start, start + rows)
        if len(positions) == count:
            break
    return np.array(positions), runs
