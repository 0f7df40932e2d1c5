"""Sources that list all of their samples when they are opened."""

import posixpath
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from memload.building.sources.columns import ColumnCollector
from memload.building.sources.record import FileState, Record
from memload.errors import DecodeError, SourceError
from memload.storage.keys import Keys
from memload.wording import counted, listed


class ListedSource:
    """A source whose names and columns are all in memory. A subclass finds the image.

    ``names`` are those of the images, such as paths. They are the keys, unless ``columns``, the
    values of all samples (see `memload.building.sources.columns.ColumnCollector`), have others.
    """

    def __init__(self, names: Sequence[str] | Keys, columns: ColumnCollector) -> None:
        self.names = names if isinstance(names, Keys) else Keys.of(names)
        self.keys = self.names if columns.keys is None else Keys.of(columns.keys)
        self.columns, self.schema = columns.values, columns.schema
        self.classes, self.categories = columns.classes, columns.categories
        self._unusable = columns.unusable
        self.label_texts = columns.label_texts
        self.notes: list[str] = columns.notes
        _check_labels(self.keys, columns)

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> Record:
        return self.without_image(index)._replace(image=self._image(index))

    def without_image(self, index: int) -> Record:
        """Return a record whose image is left out. Nothing is read. Raises DecodeError."""
        if index in self._unusable:
            raise DecodeError(self._unusable[index])
        columns = {name: values[index] for name, values in self.columns.items()}
        return Record(self.keys[index], b"", columns, self._state(index))

    def _image(self, index: int) -> Path | bytes | np.ndarray:
        """Return the image of a sample."""
        raise NotImplementedError

    def _state(self, index: int) -> FileState | None:
        """Return the state of the larger file that the image is taken from, if there is one."""
        return None


def _check_labels(keys: Sequence[str], columns: ColumnCollector) -> None:
    """Raise SourceError if a label is NaN or an empty text."""
    labels = columns.values.get("label", np.zeros(0))
    missing = np.flatnonzero(np.isnan(labels)) if labels.ndim == 1 else np.zeros(0)
    if columns.classes is not None and "" in columns.classes:
        missing = np.flatnonzero(labels == columns.classes.index(""))
    if len(missing):
        count = counted(len(missing), "label is", "labels are")
        raise SourceError(
            f"{count} missing, the first one that of {keys[int(missing[0])]}. Fill them in, or "
            "leave these samples out."
        )


class Files(ListedSource):
    """Image files below ``root``, and those of their masks and arrays. No file is looked at."""

    def __init__(self, root: Path, names: Sequence[str], columns: ColumnCollector) -> None:
        super().__init__(names, columns)
        self.root = root
        self._files = {name: Keys.of(names) for name, names in columns.files.items()}

    def without_image(self, index: int) -> Record:
        """Return a record. Its image is a path, and is not read here."""
        return self[index]

    def __getitem__(self, index: int) -> Record:
        columns = {name: values[index] for name, values in self.columns.items()}
        files = {name: names[index] for name, names in self._files.items()}
        arrays = {name: self.root / file for name, file in files.items() if file}
        name = self.names[index]
        key = name if self.keys is self.names else self.keys[index]
        return Record(key, self.root / name, columns, arrays=arrays)


def without_shared_folders(names: Sequence[str]) -> list[str]:
    """Return names without the folders that all of them share, as archives often have one.

    The last folder before a file stays, since it may be a class.
    """
    parts = [name.split("/") for name in names]
    while len({part[0] for part in parts}) == 1 and all(len(part) > 2 for part in parts):
        parts = [part[1:] for part in parts]
    return ["/".join(part) for part in parts]


def add_folder_labels(columns: ColumnCollector, names: Sequence[str]) -> list[int]:
    """Take the first folder of each name for its class, and add the labels.

    Returns the positions of the names that are kept, in the order of `memload.ImageFolder`. If no
    image lies in a folder, there are no labels. If some do not, they are left out, and noted.
    """
    parts = [name.split("/") for name in names]
    kept = [position for position, part in enumerate(parts) if len(part) > 1]
    if not kept:
        columns.notes.append("no labels: the images lie in no folders")
        return sorted(range(len(names)), key=names.__getitem__)
    flat = sorted(names[position] for position, part in enumerate(parts) if len(part) == 1)
    if flat:
        columns.notes.append(
            f"skipped images outside the class folders ({len(flat):,}): {listed(flat, 3)}"
        )
    kept.sort(key=lambda position: (parts[position][0], *names[position].rpartition("/")))
    columns.add_labels([parts[position][0] for position in kept])
    return kept


def relative_name(name: str) -> str:
    """Return the name of a file in an archive without ``./``, ``../`` and a leading ``/``."""
    return posixpath.normpath("/" + name).lstrip("/")


def is_hidden(name: str) -> bool:
    """Return whether a file in an archive is hidden, or was added by macOS."""
    return any(part.startswith(".") or part == "__MACOSX" for part in name.split("/"))


def names_of(paths: Sequence[Path]) -> list[str]:
    """Return what keys call files: their names, or their paths if two have the same name."""
    names = [path.name for path in paths]
    return names if len(set(names)) == len(names) else [str(path) for path in paths]
