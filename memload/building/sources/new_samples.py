"""Only those samples of a source that a data set does not have."""

from pathlib import Path

import numpy as np

from memload.building.sources.record import Source
from memload.building.sources.wrapped import WrappedSource
from memload.errors import NothingNewError
from memload.storage.index import Index
from memload.storage.keys import Keys


class NewSamples(WrappedSource):
    """Those samples of a source whose keys a data set of memload's does not have.

    ``dataset`` is the path of the data set. Only keys are compared: a file that has changed is not
    new, and an image that was rejected is. Classes and categories are those of the whole source.
    Raises FormatError, and NothingNewError if no sample is new.

    >>> more = NewSamples(memload.ImageFolder("images"), "out.bin")  # doctest: +SKIP
    """

    def __init__(self, source: Source, dataset: str | Path) -> None:
        super().__init__(source)
        known = set(Index.open(dataset).keys)
        self._positions = np.flatnonzero([key not in known for key in source.keys])
        if not len(self._positions):
            raise NothingNewError(
                f"Nothing is new: {dataset} has all {len(source):,} samples of the source, so "
                "nothing was built.",
                path=dataset,
            )
        keys = source.keys if isinstance(source.keys, Keys) else Keys.of(list(source.keys))
        self.keys = keys.take(self._positions)
        if self.group_starts is not None:
            starts = np.searchsorted(self._positions, self.group_starts)
            self.group_starts = np.unique(starts).tolist()
        known_samples = len(source) - len(self._positions)
        self.notes = [
            *source.notes,
            f"{known_samples:,} of {len(source):,} samples are left out: {dataset} has them",
        ]

    def __len__(self) -> int:
        return len(self._positions)

    def _position(self, index: int) -> int:
        return int(self._positions[index])
