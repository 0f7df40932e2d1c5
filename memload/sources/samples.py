"""The samples of a source: their names, their columns, and where their images are."""

import copy
import os
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from PIL import Image

from memload.errors import BuildError, DecodeError, SourceError
from memload.sources.columns import Column, Columns, are_splits
from memload.sources.contents import EXTENSIONS_OF_KIND, Contents, Files, walk
from memload.sources.matching import match
from memload.sources.reading import Kind
from memload.storage.keys import Keys
from memload.wording import counted, listed

#: Samples that are fetched from a server at a time.
_AT_A_TIME = 32


class Sample(NamedTuple):
    """One image, its name, and what belongs to it.

    Args:
        key: The name of the sample.
        image: The path of a file, the bytes of one, a PIL image, or an array ``(H, W)`` or
            ``(H, W, C)``.
        columns: The values of the columns, by name.
        arrays: The masks and other arrays, by name, each in one of the forms of an image. A name
            that is missing, or None, means that the sample lacks it.
    """

    key: str
    image: Path | bytes | Image.Image | np.ndarray
    columns: Mapping[str, Any]
    arrays: Mapping[str, Path | bytes | Image.Image | np.ndarray | None] = {}


class Extra(NamedTuple):
    """A mask or another array of each sample. Without contents, it comes with the image."""

    kind: Kind
    contents: Contents | None


@dataclass(kw_only=True)
class Source(Columns):
    """The samples that a build reads, and their columns. All but pixels is in memory.

    It can be pickled. Methods return other sources, and none of them reads a picture.

    Args:
        keys: The names of the samples.
        images: Their images.
        extras: Their masks and other arrays, by name.
        options: How the source was read, as JSON has it, such as the name of its image column.
        group_starts: The first rows of groups that one worker reads best, as those of Parquet.
        are_numbered: Whether the names only count the samples.

    >>> source = open_source("pets.csv", label="breed")  # doctest: +SKIP
    >>> source.new_to(["cat/1.jpg"])[0].key  # doctest: +SKIP
    'cat/2.jpg'
    """

    keys: Keys
    images: Contents
    extras: Mapping[str, Extra] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    group_starts: Sequence[int] = ()
    are_numbered: bool = False

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, row: int) -> Sample:
        """Return one sample. An exception rejects this one sample."""
        image = self.images[row]
        if image is None:
            raise DecodeError("the image is missing")
        columns = {name: values[row] for name, values in self.values.items()}
        return Sample(self.keys[row], image, columns, self._arrays(row))

    def _arrays(self, row: int) -> dict[str, Any]:
        return {name: each.contents[row] for name, each in self.extras.items() if each.contents}

    def several(self, rows: Sequence[int]) -> list[Sample | Exception]:
        """Return several samples, with errors for bad ones; nothing unless they are on a server.

        Raises BuildError if the server is gone.
        """
        if not self.images.is_remote:
            return []
        with ThreadPoolExecutor(_AT_A_TIME) as threads:
            return list(threads.map(self._sample_or_error, rows))

    def _sample_or_error(self, row: int) -> Sample | Exception:
        try:
            return self[row]
        except BuildError:
            raise
        except Exception as error:  # noqa: BLE001  # each protocol's library has its own errors
            return error

    # ------------------------------------------------------------------------- what is in memory

    @property
    def arrays(self) -> Mapping[str, Kind]:
        """The kinds of the masks and other arrays, by name."""
        return {name: extra.kind for name, extra in self.extras.items()}

    @property
    def identity(self) -> Any:
        """What else decides the samples, as JSON has it: options, and a checksum of columns."""
        checksum = 0
        for name in sorted(self.values):
            content = np.ascontiguousarray(self.values[name])
            checksum = zlib.crc32(content.reshape(-1).view(np.uint8).data, checksum)
        return [dict(self.options), checksum]

    # ---------------------------------------------------------------------------- other sources

    def changed(self, **fields: Any) -> Self:
        """Return the same source with other fields."""
        other = copy.copy(self)
        vars(other).update(fields)
        return other

    def take(self, rows: np.ndarray) -> Self:
        """Return some samples, int64, in the order given."""
        values = {name: each[rows] for name, each in self.values.items()}
        is_sorted = bool((rows[1:] > rows[:-1]).all())
        starts = np.searchsorted(rows, self.group_starts if is_sorted else [])
        return self.changed(
            keys=self.keys.take(rows),
            images=self.images.take(rows),
            values=values,
            extras={
                name: Extra(kind, contents and contents.take(rows))
                for name, (kind, contents) in self.extras.items()
            },
            group_starts=np.unique(starts).tolist(),
        )

    def new_to(self, known: Sequence[str]) -> Self:
        """Return the samples whose names are not among those that are known."""
        names = set(known)
        return self.take(np.flatnonzero([key not in names for key in self.keys]))

    def with_note(self, *notes: str) -> Self:
        """Return the same source with further notes."""
        return self.changed(notes=[*self.notes, *notes])

    def with_classes(self, classes: Sequence[str]) -> Self:
        """Return the same source with labels that count into these classes.

        Labels that are names of classes are numbered anew. Other numbers stay, and get the names.
        If names are numbers themselves, such as "2", then a number means the name.

        Raises SourceError for a class that is not among them, and if there are no labels.
        """
        if self.schema.get("label") != Column("<i8"):
            raise SourceError(
                "A list of classes is given, but there are no labels that count into it. Name the "
                "labels with --label (label=… in Python)."
            )
        values = dict(self.values)
        if self.classes is not None:
            numbers = _translation(self.classes, classes)
            if "label" in values:
                labels = values["label"]
                is_known = (labels >= 0) & (labels < len(numbers))
                values["label"] = np.where(is_known, numbers[np.where(is_known, labels, 0)], labels)
        elif "label" in values and any(name.isdigit() for name in classes):
            own, positions = np.unique(values["label"], return_inverse=True)
            values["label"] = _translation([*map(str, own.tolist())], classes)[positions]
        return self.changed(classes=[*classes], values=values)

    def with_files(self, name: str, kind: Kind, folder: str | Path) -> Self:
        """Return the same source with masks or other arrays from a folder, by their names.

        The file of the image ``cat/1.jpg`` is ``cat/1.png`` there. See `match` for the rules.
        Raises SourceError if there is no folder, or no file of any image.

        >>> source.with_files("mask", "mask", "masks/")[0].arrays  # doctest: +SKIP
        {'mask': PosixPath('masks/cat/1.png')}
        """
        folder = Path(folder)
        if self.are_numbered:
            raise SourceError(
                f"{folder}: files are found by the names of samples, but these have only numbers. "
                "Name them (DatasetSource(dataset, key=[…])), or build the files and add them "
                "with 'memload join'.",
                path=folder,
            )
        endings = EXTENSIONS_OF_KIND[kind]
        paths = (f"{inner}/{file}".lstrip("/") for inner, names in walk(folder) for file in names)
        files = sorted(path for path in paths if path.lower().endswith(endings))
        keys = self.keys
        if isinstance(self.images, Files):
            names, rows = self.images.names, self.images.rows
            keys = names if rows is None else names.take(rows)
            _check_not_images(self.images, folder, files)
        try:
            positions = match(keys, files)
        except ValueError as error:
            raise SourceError(
                f"{folder}: {error}. Sort these files into folders as the images are.", path=folder
            ) from None
        if not (positions >= 0).any():
            raise SourceError(
                f"{folder} has no file of any image: the first image is {keys[0]}, and its first "
                f"file of {' '.join(endings)} is {listed(files[:1]) or 'missing'}. The file of an "
                "image has its name and another extension. If names differ otherwise, list both "
                f"in a table (--{kind} {name}=COLUMN).",
                path=folder,
            )
        unused = np.setdiff1d(np.arange(len(files)), positions).tolist()
        shown = listed((files[position] for position in unused), 3)
        note = f"{name}: {len(unused):,} of {len(files):,} files in {folder} belong to no image"
        found = Keys.of([files[p] if p >= 0 else "" for p in positions.tolist()])
        return self.with_extra(name, kind, Files(folder, found)).with_note(
            *[f"{note}: {shown}"] * bool(unused)
        )

    def with_extra(self, name: str, kind: Kind, contents: Contents) -> Self:
        """Return the same source with masks or other arrays."""
        return self.changed(extras={**self.extras, name: Extra(kind, contents)})


def _check_not_images(images: Files, folder: Path, files: Sequence[str]) -> None:
    """Raise SourceError if files of a folder of masks are among the images."""
    place = os.path.relpath(folder.resolve(), images.root.resolve())
    found = {file if place == "." else f"{place}/{file}" for file in files}
    if name := next((name for name in images.names if name in found), None):
        raise SourceError(
            f"{folder} lies within the images, so that {name} would be an image. Move it out of "
            f"{images.root}, or name the extensions of the images, such as --extensions .jpg.",
            path=folder,
        )


def _translation(own: Sequence[str], classes: Sequence[str]) -> np.ndarray:
    """Return the new number for each label, int64. Raises SourceError."""
    number = {name: position for position, name in enumerate(classes)}
    if unknown := [name for name in own if name not in number]:
        raise SourceError(
            f"The source has classes that are not among the {len(classes):,} given: "
            f"{listed(unknown, 3)}. Add them to the list, remove them from the source, or leave "
            "out the list."
        )
    return np.array([number[name] for name in own], np.int64)


def check_labels(source: Source) -> None:
    """Raise SourceError if a label is missing: NaN, or an empty text."""
    labels = source.values.get("label", np.zeros(0))
    classes = source.classes or ()
    is_missing = labels == classes.index("") if "" in classes else np.isnan(labels)
    if is_missing.any():
        rows = np.unique(np.nonzero(is_missing)[0])
        raise SourceError(
            f"{counted(len(rows), 'label is', 'labels are')} missing, the first one that of "
            f"{source.keys[int(rows[0])]}. Fill them in, or leave these "
            "samples out."
        )


def refuse_splits(source: Source, place: str) -> None:
    """Raise SourceError if the classes are parts of a data set, such as ``train`` and ``val``."""
    if source.classes and are_splits(source.classes):
        first = max(source.classes, key=lambda name: "train" in name.lower())
        raise SourceError(
            f"The classes would be {listed(source.classes, 5)}: these look like parts of a data "
            f"set. Build folders one by one: 'memload build {place}/{first} {first}.bin', then the "
            f"others with --classes {first}.bin. Choose rows of a table with --where. If they are "
            f"classes, say --classes {','.join(source.classes)}."
        )
