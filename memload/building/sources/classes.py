"""Labels that mean the same in several data sets: a list of classes from elsewhere."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from memload.building.sources.folder import ImageFolder
from memload.building.sources.names import are_splits
from memload.building.sources.record import Column, Record, Source, optional
from memload.building.sources.remote import RemoteFolder
from memload.building.sources.table import Manifest
from memload.building.sources.tar import TarShards
from memload.building.sources.wrapped import WrappedSource, unwrapped
from memload.building.sources.zip import ZipArchive
from memload.errors import DecodeError, SourceError
from memload.storage.index import Index
from memload.wording import listed


class PinnedClasses(WrappedSource):
    """A source whose labels count into a given list of classes.

    If the source has classes, its labels are translated by their names. So are numbers that were
    read from texts, as in a table, if all of these texts are names of classes. Other numbers are
    kept, and get the names. Raises SourceError for a class that is not in the list, and if there
    are no labels.
    """

    def __init__(self, source: Source, classes: Sequence[str]) -> None:
        super().__init__(source)
        self.classes: Sequence[str] = tuple(classes)
        self.identity = [optional(source).identity, *classes]
        self._number_of = _translation(source, self.classes)

    def renumbered(self, labels: np.ndarray) -> np.ndarray:
        """Return labels of the other source as this one has them. Raises DecodeError."""
        found, positions = np.unique(labels, return_inverse=True)
        return np.array([self._number(label) for label in found.tolist()], np.int64)[positions]

    def _changed(self, index: int, record: Record) -> Record:
        label = self._number(int(record.columns["label"]))
        return record._replace(columns={**record.columns, "label": label})

    def _number(self, label: int) -> int:
        if self._number_of is None:
            return label
        if label not in self._number_of:
            raise DecodeError(f"label {label} is not within 0 to {len(self._number_of) - 1}")
        return self._number_of[label]


def _translation(source: Source, classes: Sequence[str]) -> dict[int, int] | None:
    """Return the new number for each label of a source, or None if its labels stay."""
    if source.schema.get("label") != Column("<i8"):
        raise SourceError(
            "A list of classes is given, but the source has no labels that count into it. Name the "
            "labels: with --label-column, or in Python with "
            "DatasetSource(dataset, columns={'label': '…'}, classes=[…])."
        )
    number = {name: position for position, name in enumerate(classes)}
    if source.classes is None:
        return _translation_of_texts(optional(source).label_texts, number)
    if tuple(source.classes) == tuple(classes):
        return None
    unknown = [name for name in source.classes if name not in number]
    if unknown:
        raise SourceError(
            f"The source has classes that are not among the {len(classes):,} given: "
            f"{listed(unknown, 3)}. "
            "Add them to the list, remove them from the source, or leave out the list."
        )
    return {label: number[name] for label, name in enumerate(source.classes)}


def _translation_of_texts(
    texts: Mapping[int, str], number: Mapping[str, int]
) -> dict[int, int] | None:
    """Return the new number for each label that is a number, or None if its labels stay.

    They are names if all are among those of the classes, which ``number`` numbers.
    """
    names = [text for text in texts.values() if text in number]
    if not names:
        return None
    if len(names) == len(texts):
        return {label: number[text] for label, text in texts.items()}
    if all(0 <= label < len(number) for label in texts):
        return None
    other = next(text for text in texts.values() if text not in number)
    raise SourceError(
        f"The labels are names of classes, such as {names[0]!r}, but {other!r:.40} is none of the "
        f"{len(number):,} given. Add it to the list, or leave these samples out."
    )


def read_classes(classes: Any) -> list[str]:
    """Return names of classes from a list, a data set, its path, or a text file with one a line.

    Raises ValueError and SourceError.
    """
    if isinstance(classes, (str, Path)):
        path = Path(classes)
        if path.suffix in (".bin", ".idx"):
            names: Any = Index.open(path).classes
        else:
            try:
                lines = path.read_text(encoding="utf-8-sig").splitlines()
                names = [line.strip() for line in lines if line.strip()]
            except (OSError, UnicodeDecodeError) as error:
                raise SourceError(f"{path} cannot be read: {error}.", path=path) from error
    else:
        names = getattr(classes, "classes", classes)
    if isinstance(names, Mapping) or not isinstance(names, Sequence) or not names:
        raise ValueError(f"classes: {classes!r:.200} has no names of classes.")
    if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise ValueError("classes: the names are not all different texts.")
    return list(names)


def refuse_splits(source: Source) -> None:
    """Raise SourceError if the classes are parts of a data set, such as ``train`` and ``val``."""
    if not source.classes or not are_splits(source.classes):
        return
    names, first = list(source.classes), source.classes[0]
    source = unwrapped(source)
    where, remedy = "The source", "Build each of them by itself."
    if isinstance(source, (ImageFolder, RemoteFolder)):
        where = str(source.root).rstrip("/")
        remedy = f"Build each of them, such as {where}/{first}."
    elif isinstance(source, Manifest):
        where = str(source.path)
        remedy = "Name the column of the classes with --label-column, and build each part with "
        remedy += f"--where, such as --where split={first}."
    elif isinstance(source, (TarShards, ZipArchive)):
        where = str(source.path)
        remedy = "Unpack it, and build each of its folders by itself."
    raise SourceError(
        f"{where} holds the parts of a data set ({', '.join(names)}), not classes. {remedy} If "
        f"they are classes, say --classes {','.join(names)}."
    )
