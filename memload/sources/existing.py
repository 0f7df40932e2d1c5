"""memload's own data sets, and .npy files: rows that are arrays already."""

import zlib
from pathlib import Path

import numpy as np

from memload.errors import DecodeError, NothingNewError, SourceError
from memload.sources.columns import Column, Columns
from memload.sources.contents import Contents
from memload.sources.reading import Reading
from memload.sources.samples import Extra, Source
from memload.storage.index import Index
from memload.storage.keys import Keys
from memload.storage.shards import Shards
from memload.storage.where import matching


def open_existing(path: str | Path, reading: Reading) -> Source:
    """Open a data set of memload's. Names, columns, classes, masks and other arrays are kept.

    It may be the index of a subset. ``where`` chooses samples by values of columns.

    Raises FormatError, and ValueError for a value that there is not.

    >>> open_existing("photos.bin", Reading(where={"split": "val"})).keys[0]  # doctest: +SKIP
    'cat/7.jpg'
    """
    index = Index.open(path)
    schema = {
        name: Column(values.dtype.str, values.shape[1:], name in index.points, name in index.boxes)
        for name, values in index.columns.items()
    }
    extras = {
        array.name: Extra("mask" if array.kind == "mask" else "array", IndexRows(index, array.name))
        for array in index.arrays
        if array.name != "image"
    }
    source = Source(
        keys=index.keys,
        images=IndexRows(index, "image"),
        values=dict(index.columns),
        schema=schema,
        classes=None if index.classes is None else [*index.classes],
        categories={name: [*texts] for name, texts in index.categories.items()},
        extras=extras,
    )
    if not reading.where:
        return source
    return source.take(matching(len(index), index.columns, index.texts, reading.where))


class IndexRows(Contents):
    """The rows of one array of a data set of memload's. A row that has changed is not returned."""

    def __init__(self, index: Index, name: str) -> None:
        self.path, self._name = index.path, name
        self._row, self._crc32 = index.rows_of(name), index.crc32[name]

    def read(self, row: int) -> np.ndarray:
        """Return one row. Raises DecodeError."""
        if self._opened is None:
            self._opened = Shards(Index.open(self.path), self._name)
        number = int(self._row[row])
        content: np.ndarray = self._opened.row(number)
        if zlib.crc32(content.data) != self._crc32[number]:
            raise DecodeError(f"row {number} of {self.path} has changed since it was written")
        return content


def new_samples(source: Source, path: str | Path) -> Source:
    """Return the samples whose names a data set of memload's does not have, with notes.

    Raises NothingNewError if there are none.
    """
    index = Index.open(path)
    new = source.new_to(index.keys)
    if not len(new) and source.are_numbered:
        raise SourceError(
            f"The samples have no names, only numbers, and {path} has as many, so whether they are "
            "new cannot be known. Build without --new-to, then 'memload concat'.",
            path=path,
        )
    if not len(new):
        raise NothingNewError(
            f"Nothing is new: {path} has all {len(source):,} samples of the source, so nothing "
            "was built.",
            path=path,
        )
    note = f"{len(source) - len(new):,} of {len(source):,} samples are left out: {path} has "
    if len(new) < len(source) or not len(index):
        return new.with_note(f"{note}them")
    # perhaps since one was built from a folder above or below
    return new.with_note(
        f"{note}none of their names. The first is {source.keys[0]!r:.200}, and that of {path} is "
        f"{index.keys[0]!r:.200}. If these are the same samples, build from the same folder as then"
    )


# ------------------------------------------------------------------------------------- .npy files


def open_array(path: Path, reading: Reading) -> Source:
    """Open an NPY file of images: an array ``(N, H, W)`` or ``(N, H, W, C)``.

    They are stored as they are. ``label`` is an NPY file of N numbers, or of names of classes.

    Raises SourceError.

    >>> open_array(Path("x_train.npy"), Reading(label="y_train.npy"))[7].columns  # doctest: +SKIP
    {'label': 3}
    """
    images, columns = _load(path), Columns()
    if images.ndim not in (3, 4) or not images.size:
        raise SourceError(
            f"{path} has the shape {images.shape}, which is neither (N, H, W) nor (N, H, W, C) "
            "with pixels. Reshape it.",
            path=path,
        )
    if images.ndim == 4 and images.shape[1] in (1, 3, 4) and images.shape[3] > 4:
        columns.notes.append(
            f"the shape {images.shape} looks like (N, C, H, W), channels first; save "
            "array.transpose(0, 2, 3, 1), which is (N, H, W, C)"
        )
    if reading.label is None:
        columns.notes.append(f"no labels: name an array of {len(images):,} with --label")
    else:
        labels = _load(Path(reading.label))
        if labels.size != len(images) or labels.dtype.kind not in "biufU":
            raise SourceError(
                f"{reading.label} has the shape {labels.shape} and type {labels.dtype}, but the "
                f"labels of {path} are {len(images):,} numbers or texts. Save them so.",
                path=reading.label,
            )
        flat = np.array(labels).reshape(len(images))
        columns.add_values("label", flat.tolist() if flat.dtype.kind == "U" else flat)
        if "label" in columns.skipped:
            raise SourceError(f"The labels in {reading.label} are {columns.skipped['label']}.")
    keys = Keys.of([*map(str, range(len(images)))])
    return Source(keys=keys, images=NpyRows(path), are_numbered=True, **vars(columns))


class NpyRows(Contents):
    """The images of an NPY file, which each process maps for itself."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, row: int) -> np.ndarray:
        """Return one image."""
        if self._opened is None:
            self._opened = _load(self._path)
        return np.asarray(self._opened[row])


def _load(path: Path) -> np.ndarray:
    try:
        array: np.ndarray = np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # a damaged header may raise anything
        raise SourceError(
            f"{path} is missing, is no .npy file, or is damaged ({error}). Save one array, with "
            "numpy.save.",
            path=path,
        ) from error
    return array
