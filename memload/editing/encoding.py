"""The contents of files: rows as PNG, JPEG and NPY."""

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

from memload.editing.selected import CheckedRows
from memload.storage.index import Index

#: How Pillow writes them. For photos, PNGs of level 1 are written three times as fast as those of
#: the default, 6, and are 6 % larger.
_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "png": {"format": "PNG", "compress_level": 1},
    "jpg": {"format": "JPEG", "quality": 95, "subsampling": 0},
}


class Encoder:
    """Encodes the rows of samples. Encoding is thread-safe."""

    def __init__(self, index: Index, format: str) -> None:
        self._index = index
        self._rows = {array.name: CheckedRows(index, array.name) for array in index.arrays}
        kinds = {"image": format, "mask": "png", "array": "npy"}
        #: the format of each array, which is the extension of its files
        self.endings = {array.name: kinds[array.kind] for array in index.arrays}

    def encode(self, position: int) -> dict[str, bytes]:
        """Return the content of the file of each array. Raises ChecksumError and FormatError."""
        contents = {}
        for name, rows in self._rows.items():
            row = self._index.rows_of(name)[position : position + 1]
            contents[name] = _encoded(rows.read(row)[0], self.endings[name])
        return contents


def _encoded(values: np.ndarray, format: str) -> bytes:
    file = io.BytesIO()
    if format == "npy":
        np.save(file, values)
    else:
        is_gray = values.ndim == 3 and values.shape[2] == 1
        picture = Image.fromarray(values[:, :, 0] if is_gray else values)
        picture.save(file, **_OPTIONS[format])
    return file.getvalue()
