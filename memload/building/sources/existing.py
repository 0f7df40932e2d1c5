"""A memload data set as a source, to store it in another size, or to store a subset by itself."""

import zlib
from bisect import bisect_right
from pathlib import Path
from typing import Any

import numpy as np

from memload.building.decoders import MODE_OF_STORED
from memload.building.sources.columns import ColumnCollector
from memload.building.sources.listed import ListedSource
from memload.building.sources.record import Column, FileState, Record
from memload.errors import DecodeError
from memload.storage.format import DESCRS_OF_MASKS
from memload.storage.index import Index
from memload.storage.shards import Shards


class ExistingDataset(ListedSource):
    """The samples of a data set that memload has built. Its names, columns and classes are kept.

    ``path`` is ``out.bin``, or the index of a subset. Its masks and other arrays are kept, too.
    When images are resized, their masks, points and boxes move with them. A row that has changed
    since it was written is rejected. Raises FormatError.

    >>> source = memload.open_source("photos.bin")  # doctest: +SKIP
    >>> memload.build(source, "small.bin", size=128)  # doctest: +SKIP
    """

    def __init__(self, path: str | Path) -> None:
        index = Index.open(path)
        self.path = index.path
        self._rows = {array.name: _Rows(index, array.name) for array in index.arrays}
        #: the names and the kinds of the records' arrays
        self.arrays = {
            array.name: "mask" if array.kind == "mask" else "array"
            for array in index.arrays
            if array.name != "image"
        }
        #: element type and shape (H, W, C) of the images
        self.descr, self.shape = index.image.descr, index.image.shape
        self._holds_masks = index.setting("mode") == "mask"
        columns = ColumnCollector()
        for name, values in index.columns.items():
            columns.values[name] = values
            points, boxes = name in index.points, name in index.boxes
            columns.schema[name] = Column(values.dtype.str, values.shape[1:], points, boxes)
        columns.categories = {name: list(texts) for name, texts in index.categories.items()}
        columns.classes = None if index.classes is None else list(index.classes)
        super().__init__(index.keys, columns)

    @property
    def mode(self) -> str:
        """How images are stored by default: as pictures or masks where that is possible."""
        if self._holds_masks and self.descr in DESCRS_OF_MASKS and self.shape[2] == 1:
            return "mask"
        return MODE_OF_STORED.get((self.descr, self.shape[2]), "array")

    def __getitem__(self, index: int) -> Record:
        arrays = {name: self._rows[name].read(index) for name in self.arrays}
        return super().__getitem__(index)._replace(arrays=arrays)

    def _image(self, index: int) -> np.ndarray:
        return self._rows["image"].read(index)

    def _state(self, index: int) -> FileState:
        states = [rows.state(index) for rows in self._rows.values()]
        return FileState(sum(state.size for state in states), max(s.mtime_ns for s in states))


class _Rows:
    """The rows of one array, by sample."""

    def __init__(self, index: Index, name: str) -> None:
        self._index_path, self._name = index.path, name
        shards = Shards(index, name)
        #: None in a copy that was pickled, until a row is read
        self._shards: Shards | None = shards
        self._row, self._crc32 = index.rows_of(name), index.crc32[name]
        self._starts, self._states = shards.array.starts.tolist(), []
        for shard in shards.paths:
            status = shard.stat()
            self._states.append(FileState(status.st_size, status.st_mtime_ns))

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the maps, with which all rows would be pickled."""
        return {**vars(self), "_shards": None}

    def read(self, sample: int) -> np.ndarray:
        """Return the row of a sample. Raises DecodeError."""
        if self._shards is None:
            self._shards = Shards(Index.open(self._index_path), self._name)
        row = int(self._row[sample])
        content = self._shards.row(row)
        if zlib.crc32(content.data) != self._crc32[row]:
            path = self._index_path
            raise DecodeError(f"row {row} of {path} has changed since it was written")
        return content

    def state(self, sample: int) -> FileState:
        """Return the state of the file with the row of a sample."""
        return self._states[bisect_right(self._starts, int(self._row[sample])) - 1]
