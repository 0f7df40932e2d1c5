"""A memload data set as a source, to store it in another size, or to store a subset by itself."""

import zlib
from pathlib import Path

import numpy as np

from memload.building.sources.columns import Columns
from memload.building.sources.listed import ListedSource
from memload.building.sources.record import Column, FileState
from memload.errors import DecodeError
from memload.storage.index import Index
from memload.storage.shards import Shards


class ExistingDataset(ListedSource):
    """The samples of a data set that memload has built. Its names, columns and classes are kept.

    ``path`` is ``out.bin``, or the index of a subset. Points are moved when images are resized. A
    row that has changed since it was written is rejected. Raises FormatError.

    >>> source = memload.ExistingDataset("photos.bin")  # doctest: +SKIP
    >>> memload.build(source, "small.bin", size=128)  # doctest: +SKIP
    """

    def __init__(self, path: str | Path) -> None:
        index = Index.open(path)
        self.path = index.path
        self._shards = Shards(index)
        self._row, self._crc32 = index.row, index.crc32["image"]
        self._states = []
        for shard in self._shards.paths:
            status = shard.stat()
            self._states.append(FileState(status.st_size, status.st_mtime_ns))
        #: element type and shape (H, W, C) of the images
        self.descr, self.shape = index.image.descr, index.image.shape
        columns = Columns()
        for name, values in index.columns.items():
            columns.values[name] = values
            points = name in index.points
            columns.schema[name] = Column(values.dtype.str, values.shape[1:], points)
        columns.categories = {name: list(texts) for name, texts in index.categories.items()}
        columns.classes = None if index.classes is None else list(index.classes)
        super().__init__(index.keys, columns)

    @property
    def mode(self) -> str:
        """How images are stored by default: as pictures where that is possible."""
        modes = {("|u1", 1): "L", ("|u1", 3): "RGB", ("<u2", 1): "I;16"}
        return modes.get((self.descr, self.shape[2]), "array")

    def _image(self, index: int) -> np.ndarray:
        row = int(self._row[index])
        shard = int(self._shards.shard_of(np.array([row]))[0])
        image: np.ndarray = self._shards.maps[shard][row - self._shards.starts[shard]]
        if zlib.crc32(image.data) != self._crc32[row]:
            raise DecodeError(f"row {row} of {self.path} has changed since it was written")
        return image

    def _state(self, index: int) -> FileState:
        return self._states[int(self._shards.shard_of(self._row[index : index + 1])[0])]
