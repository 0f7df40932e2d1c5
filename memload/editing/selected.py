"""The samples to export or to copy, and their rows, which are compared with their checksums."""

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from memload.errors import ChecksumError
from memload.storage.index import Index
from memload.storage.shards import Shards
from memload.storage.where import matching


def select(dataset: Any, where: Mapping[str, Any] | None) -> Index:
    """Return the index of a data set, or of those of its samples for which conditions hold.

    ``dataset`` is a path, an `Index`, or a `MemmapDataset`, which may be a view. Raises FormatError
    as `Index.open` does, ValueError and TypeError as `MemmapDataset.where` does, ValueError if
    there is no such sample, and TypeError for what is no data set.
    """
    if isinstance(dataset, str | Path):
        dataset = Index.open(dataset)
    index = dataset if isinstance(dataset, Index) else getattr(dataset, "index", None)
    if not isinstance(index, Index):
        raise TypeError(
            f"The data set is a {type(dataset).__name__}. Give a path such as 'out.bin', or a "
            "memload.MemmapDataset."
        )
    if where:
        index = index.subset(matching(index, where))
    if not len(index):
        conditions = " and ".join(f"{name}={value}" for name, value in (where or {}).items())
        chosen = f"no sample with {conditions}" if where else "no samples"
        raise ValueError(f"{index.path} has {chosen}.")
    return index


class CheckedRows:
    """The rows of one array of a data set. Reading is thread-safe.

    Opens the shards, and raises FormatError as `Shards` does.
    """

    def __init__(self, index: Index, name: str) -> None:
        self.array, self._index = index.array(name), index
        self._shards, self._crc32 = Shards(index, name), index.crc32[name]

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Return rows, ``(n, …)``. ``rows`` is int64 ``(n,)``.

        Raises ChecksumError for a row that has changed since it was written, and FormatError if a
        shard has been truncated.
        """
        values = np.empty((len(rows), *self.array.shape), self.array.descr)
        self._shards.gather(rows, values)
        for row, value in zip(rows.tolist(), values, strict=True):
            if zlib.crc32(value.data) != self._crc32[row]:
                raise self._error(row)
        return values

    def _error(self, row: int) -> ChecksumError:
        index = self._index
        sample = int(np.flatnonzero(index.rows_of(self.array.name) == row)[0])
        path = self._shards.paths[int(self.array.locate(np.array([row]))[0][0])]
        return ChecksumError(
            f"{path} is damaged: row {row} ({index.keys[sample]}) has changed since it was "
            f"written. Run 'memload verify {index.path}' to see the extent. Then restore the file, "
            "or run 'memload build' again.",
            path=path,
            rows=[row],
        )
