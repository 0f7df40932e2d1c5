"""The samples of a source: their names, their columns, and where their images are."""

import copy
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np
from PIL import Image

from memload.errors import DecodeError, SourceError
from memload.sources.columns import Column, Columns, are_splits
from memload.sources.contents import EXTENSIONS, EXTENSIONS_OF_KIND, Contents, Files, walk
from memload.sources.matching import match
from memload.storage.keys import Keys
from memload.wording import counted, listed

Kind = Literal["mask", "array"]


class Record(NamedTuple):
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


@runtime_checkable
class Source(Protocol):
    """What a build reads: `Samples`, or anything with these attributes."""

    @property
    def classes(self) -> Sequence[str] | None:
        """The names of the classes that the column ``label`` counts into, or None."""

    @property
    def schema(self) -> Mapping[str, Column]:
        """The columns that every record has."""

    @property
    def keys(self) -> Sequence[str]:
        """The names of the records."""

    @property
    def notes(self) -> Sequence[str]:
        """What the user should know, such as what was skipped and why."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> Record:
        """Return one record. An exception rejects this one record."""


class Extra(NamedTuple):
    """A mask or another array of each sample."""

    kind: Kind
    contents: Contents


@dataclass(frozen=True)
class Reading:
    """How a source is read. `memload.open_source` explains the options."""

    image: str | None = None
    label: str | None = None
    where: Mapping[str, Any] = field(default_factory=dict)
    root: str | None = None
    extensions: Sequence[str] = EXTENSIONS
    masks: Mapping[str, str] = field(default_factory=dict)
    arrays: Mapping[str, str] = field(default_factory=dict)
    points: Mapping[str, str] = field(default_factory=dict)
    boxes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def entries(self) -> dict[str, tuple[Kind, str]]:
        """The kinds of masks and other arrays, and what in the source they are, by name."""
        masks: dict[str, tuple[Kind, str]] = {name: ("mask", m) for name, m in self.masks.items()}
        return masks | {name: ("array", text) for name, text in self.arrays.items()}

    @property
    def moving(self) -> list[str]:
        """The names of points and boxes, which move with the image."""
        return [*self.points, *self.boxes]


def named(argument: str, given: Any) -> dict[str, Any]:
    """Return what is given by name: a mapping, or a list of names. Raises TypeError for a text.

    >>> named("masks", ["seg"]), named("points", {"marks": "x*,y*", "nose": ""})
    ({'seg': 'seg'}, {'marks': 'x*,y*', 'nose': 'nose'})
    """
    if isinstance(given, (str, os.PathLike)):
        raise TypeError(f"{argument} must be a list, or a mapping such as {{'name': {given!r}}}.")
    pairs = given if isinstance(given, Mapping) else dict.fromkeys(given, "")
    return {name: name if value == "" else value for name, value in pairs.items()}


@dataclass
class Samples:
    """The samples of a source. All but pixels is in memory. It can be pickled.

    Methods return other samples, and none of them reads a picture.

    Args:
        keys: The names of the samples.
        images: Their images.
        columns: Their columns.
        extras: Their masks and other arrays, by name.
        options: How the source was read, as JSON has it, such as the name of its image column.
        group_starts: The first rows of groups that one worker reads best, as those of Parquet.
        are_numbered: Whether the names only count the samples.

    >>> samples = open_source("pets.csv", label="breed")  # doctest: +SKIP
    >>> samples.new_to(["cat/1.jpg"])[0].key  # doctest: +SKIP
    'cat/2.jpg'
    """

    keys: Keys
    images: Contents
    columns: Columns = field(default_factory=Columns)
    extras: Mapping[str, Extra] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    group_starts: Sequence[int] = ()
    are_numbered: bool = False

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def root(self) -> Path | str | None:
        """The folder or URL of the images, for messages."""
        return getattr(self.images, "root", None)

    def __getitem__(self, row: int) -> Record:
        return self._record(row, self.images[row])

    def _record(self, row: int, image: Any) -> Record:
        if image is None:
            raise DecodeError("the image is missing")
        columns = {name: values[row] for name, values in self.columns.values.items()}
        return Record(self.keys[row], image, columns, self._arrays(row))

    def _arrays(self, row: int) -> dict[str, Any]:
        return {name: extra.contents[row] for name, extra in self.extras.items()}

    @property
    def __getitems__(self) -> Callable[[Sequence[int]], list[Record | Exception]]:
        """A function that reads several records. Sources have it only if that is faster.

        An exception in place of a record rejects that record.
        """
        if not self.images.reads_together:
            raise AttributeError(f"{type(self).__name__} is read one by one")
        return self._several

    def _several(self, rows: Sequence[int]) -> list[Record | Exception]:
        images = self.images.several(rows)
        return [*map(self._record_or_error, rows, images)]

    def _record_or_error(self, row: int, image: Any) -> Record | Exception:
        try:
            return image if isinstance(image, Exception) else self._record(row, image)
        except Exception as error:  # noqa: BLE001  # it may come from code of the user's
            return error

    # ------------------------------------------------------------------------- what is in memory

    @property
    def schema(self) -> Mapping[str, Column]:
        """The columns that every record has."""
        return self.columns.schema

    @property
    def classes(self) -> Sequence[str] | None:
        """The names of the classes that the column ``label`` counts into, or None."""
        return self.columns.classes

    @property
    def categories(self) -> Mapping[str, Sequence[str]]:
        """The texts that other columns count into, by the names of these columns."""
        return self.columns.categories

    @property
    def notes(self) -> Sequence[str]:
        """What the user should know, such as what was skipped and why."""
        return self.columns.notes

    @property
    def arrays(self) -> Mapping[str, Kind]:
        """The kinds of the masks and other arrays, by name."""
        return {name: extra.kind for name, extra in self.extras.items()}

    @property
    def identity(self) -> Any:
        """What else decides the records, as JSON has it: options, and a checksum of columns."""
        checksum = 0
        for name in sorted(self.columns.values):
            content = np.ascontiguousarray(self.columns.values[name])
            checksum = zlib.crc32(content.reshape(-1).view(np.uint8).data, checksum)
        return [dict(self.options), checksum]

    # ---------------------------------------------------------------------------- other samples

    def changed(self, **fields: Any) -> Self:
        """Return the same samples with other fields."""
        other = copy.copy(self)
        vars(other).update(fields)
        return other

    def take(self, rows: np.ndarray) -> Self:
        """Return some samples, int64, in the order given."""
        values = {name: each[rows] for name, each in self.columns.values.items()}
        is_sorted = bool((rows[1:] > rows[:-1]).all())
        starts = np.unique(np.searchsorted(rows, self.group_starts)).tolist() if is_sorted else []
        return self.changed(
            keys=self.keys.take(rows),
            images=self.images.take(rows),
            columns=replace(self.columns, values=values),
            extras={
                name: Extra(extra.kind, extra.contents.take(rows))
                for name, extra in self.extras.items()
            },
            group_starts=starts if len(self.group_starts) else (),
        )

    def new_to(self, known: Sequence[str]) -> Self:
        """Return the samples whose names are not among those that are known."""
        names = set(known)
        return self.take(np.flatnonzero([key not in names for key in self.keys]))

    def with_note(self, *notes: str) -> Self:
        """Return the same samples with further notes."""
        return self.changed(columns=replace(self.columns, notes=[*self.notes, *notes]))

    def with_classes(self, classes: Sequence[str]) -> Self:
        """Return the same samples with labels that count into these classes.

        Labels that are names of classes are numbered anew. Other numbers stay, and get the names.
        Raises SourceError for a class that is not among them, and if there are no labels.
        """
        if self.schema.get("label") != Column("<i8"):
            raise SourceError(
                "A list of classes is given, but there are no labels that count into it. Name the "
                "labels with --label (label=… in Python)."
            )
        columns, values = replace(self.columns, classes=list(classes)), dict(self.columns.values)
        if self.classes is not None and "label" in values:
            labels, numbers = values["label"], translation(self.classes, classes)
            is_known = (labels >= 0) & (labels < len(numbers))
            values["label"] = np.where(is_known, numbers[np.where(is_known, labels, 0)], labels)
        return self.changed(columns=replace(columns, values=values))

    def with_files(self, name: str, kind: Kind, folder: str | Path) -> Self:
        """Return the same samples with masks or other arrays from a folder, by their names.

        The file of the image ``cat/1.jpg`` is ``cat/1.png`` there. See `match` for the rules.
        Raises SourceError if there is no folder, or no file of any image.

        >>> samples.with_files("mask", "mask", "masks/")[0].arrays  # doctest: +SKIP
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
        own_names = self.images.names if isinstance(self.images, Files) else self.keys
        files, notes = _found_files(folder, name, kind, own_names)
        if isinstance(self.images, Files):
            _check_not_images(self.images, folder)
        return self.with_extra(name, kind, Files(folder, Keys.of(files))).with_note(*notes)

    def with_extra(self, name: str, kind: Kind, contents: Contents) -> Self:
        """Return the same samples with masks or other arrays."""
        return self.changed(extras={**self.extras, name: Extra(kind, contents)})


def translation(own: Sequence[str], classes: Sequence[str]) -> np.ndarray:
    """Return the new number for each label, int64. Raises SourceError."""
    number = {name: position for position, name in enumerate(classes)}
    if unknown := [name for name in own if name not in number]:
        raise SourceError(
            f"The source has classes that are not among the {len(classes):,} given: "
            f"{listed(unknown, 3)}. Add them to the list, remove them from the source, or leave "
            "out the list."
        )
    return np.array([number[name] for name in own], np.int64)


def _found_files(
    folder: Path, name: str, kind: Kind, keys: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Return the file of each key, or "", and notes. Raises SourceError."""
    if not folder.is_dir():
        raise SourceError(f"{folder} does not exist, or is no folder. Check it.", path=folder)
    endings = EXTENSIONS_OF_KIND[kind]
    paths = (f"{inner}/{file}".lstrip("/") for inner, names in walk(folder) for file in names)
    files = sorted(path for path in paths if path.lower().endswith(endings))
    try:
        positions = match(keys, files)
    except ValueError as error:
        raise SourceError(
            f"{folder}: {error}. Sort these files into folders as the images are.", path=folder
        ) from None
    if not (positions >= 0).any():
        raise SourceError(
            f"{folder} has no file of any image: the first image is {keys[0]}, and its first file "
            f"of {' '.join(endings)} is {listed(files[:1]) or 'missing'}. The file of an image has "
            "its name and another extension. If names differ otherwise, list both in a table "
            f"(--{kind} {name}=COLUMN).",
            path=folder,
        )
    unused = np.setdiff1d(np.arange(len(files)), positions).tolist()
    shown = listed((files[position] for position in unused), 3)
    note = (
        f"{name}: {len(unused):,} of {len(files):,} files in {folder} belong to no image: {shown}"
    )
    return [files[p] if p >= 0 else "" for p in positions.tolist()], [note] * bool(unused)


def _check_not_images(images: Files, folder: Path) -> None:
    """Raise SourceError if files of a folder of masks are among the images."""
    prefix = os.path.relpath(folder.resolve(), images.root.resolve())
    prefix = "" if prefix == "." else f"{prefix}/"
    endings = EXTENSIONS_OF_KIND["mask"]
    taken = (name for name in images.names if name.startswith(prefix))
    if name := next((name for name in taken if name.lower().endswith(endings)), None):
        raise SourceError(
            f"{folder} lies within the images, so that {name} would be an image. Move it out of "
            f"{images.root}, or name the extensions of the images, such as --extensions .jpg.",
            path=folder,
        )


def check_labels(samples: Samples) -> None:
    """Raise SourceError if a label is missing: NaN, or an empty text."""
    labels = samples.columns.values.get("label", np.zeros(0))
    missing = np.isnan(labels) if labels.dtype.kind == "f" else np.zeros(len(labels), bool)
    if "" in (samples.classes or ()):
        missing = labels == list(samples.classes or ()).index("")
    if missing.any():
        rows = np.flatnonzero(missing)
        raise SourceError(
            f"{counted(len(np.unique(rows)), 'label is', 'labels are')} missing, the first one "
            f"that of {samples.keys[int(rows[0])]}. Fill them in, or leave these samples out."
        )


def refuse_splits(samples: Samples) -> None:
    """Raise SourceError if the classes are parts of a data set, such as ``train`` and ``val``."""
    columns = samples.columns
    if columns.classes and (columns.are_parts or are_splits(columns.classes)):
        have = ", which have the same subfolders" if columns.are_parts else ""
        root = Path(samples.root or "")
        first, *others = sorted(columns.classes, key=lambda name: "train" not in name.lower())
        how = (
            "unpack an archive first; of a table, name the classes with --label, rows with --where"
        )
        if (root / first).is_dir():
            how = f"'memload build {root / first} {first}.bin', then "
            how += f"'memload build {root / others[0]} {others[0]}.bin --classes {first}.bin'"
        raise SourceError(
            f"The classes would be {listed(columns.classes, 5)}{have}: these look like parts of a "
            f"data set. Build each of them by itself: {how}. If they are classes, say --classes "
            f"{','.join(columns.classes)}."
        )
