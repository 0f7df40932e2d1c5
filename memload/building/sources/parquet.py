"""Parquet files as a source, such as those of Hugging Face data sets."""

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from memload.building.sources.columns import MAX_CATEGORIES, ColumnCollector
from memload.building.sources.entries import ArrayEntries
from memload.building.sources.listed import ListedSource, names_of
from memload.building.sources.names import IMAGE_NAMES, LABEL_NAMES
from memload.building.sources.record import FileState, Record
from memload.errors import DecodeError, DependencyError, SourceError
from memload.storage.format import RESERVED
from memload.wording import listed

#: How many images are decoded from a file at a time, so that memory stays flat.
_ROWS_AT_A_TIME = 32


class _RowGroup(NamedTuple):
    """A part of a file that is read by itself."""

    file: int
    number: int


class _OpenFile(NamedTuple):
    path: Path
    content: Any  #: a pyarrow.parquet.ParquetFile


class ParquetFiles(ListedSource):
    """The images of Parquet files: their bytes, or a column of paths.

    ``image_column`` is the name of the column with the images. Its entries are bytes, Hugging
    Face's struct of ``bytes`` and ``path``, or paths relative to the folder of the file. The
    default is the column that Hugging Face marks as an image, else one named ``image``, ``img``,
    ``jpg``, ``png`` or ``webp``, else the only column of bytes. ``label_column`` is the name of
    the column with the labels, by default ``label``, ``labels``, ``fine_label``, ``cls`` or
    ``target``. Names of classes are taken from Hugging Face's ClassLabel. Columns of numbers are
    kept. Columns of text with few values and of type ClassLabel become categories.

    ``masks`` and ``arrays`` are the names of columns with masks and other arrays, or mappings from
    their names in the data set to those of columns. Their entries are as those of images, or lists
    of numbers. A sample may lack one.

    All files need the same columns. A key is the path in the struct if all images have one, else
    the file and the number of the row, such as ``train.parquet/17``.

    Opening reads all columns but the images. Images are read one row group after another, 32 rows
    at a time. A build gives each row group to one worker, if there are enough of them; of row
    groups with more than 4,096 rows, every worker reads all. Needs pyarrow. Raises SourceError and
    DependencyError.

    >>> from memload.building.sources.parquet import ParquetFiles
    >>> source = ParquetFiles(["train-0.parquet", "train-1.parquet"])  # doctest: +SKIP
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        *,
        image_column: str | None = None,
        label_column: str | None = None,
        masks: Sequence[str] | Mapping[str, str] = (),
        arrays: Sequence[str] | Mapping[str, str] = (),
    ) -> None:
        self._arrays = ArrayEntries(masks, arrays)
        #: the names and the kinds of the records' arrays
        self.arrays = self._arrays.kinds
        self._paths = [Path(path) for path in paths]
        files = [_OpenFile(path, _open(path)) for path in self._paths]
        schema = files[0].content.schema_arrow
        _check_columns(files)
        self._states = [_state(path) for path in self._paths]
        features = _features(schema)
        used = self._arrays.entry_of.values()
        for name in used:
            _require_column(schema, name, self._paths[0])
        self._image_name = image_column or _find_image(schema, features, used, self._paths[0])
        _require_column(schema, self._image_name, self._paths[0])
        kinds = [_general(str(schema.field(name).type)) for name in (self._image_name, *used)]
        #: whether images are files besides, and never in the column itself
        self.lists_paths = "string" in kinds
        self.identity = f"images in {self._image_name!r}"
        if self.arrays:
            self.identity += f", arrays {self.arrays!r} in {self._arrays.entry_of!r}"
        self._list_row_groups(files)
        columns = self._read_columns(files, label_column)
        self._cursor: _Cursor | None = None
        super().__init__(self._keys(files), columns)

    def _read_columns(
        self, files: Sequence["_OpenFile"], label_column: str | None
    ) -> ColumnCollector:
        """Read the labels, and all columns but those of images and arrays."""
        columns, schema = ColumnCollector(), files[0].content.schema_arrow
        label = label_column or next((name for name in LABEL_NAMES if name in schema.names), None)
        if label is not None:
            _require_column(schema, label, self._paths[0])
            _add_labels(columns, files, label)
        else:
            columns.notes.append("no labels: name their column with --label-column")
        for name in schema.names:
            if name not in (self._image_name, label, *self._arrays.entry_of.values()):
                _add_column(columns, files, name)
        return columns.finish()

    def _list_row_groups(self, files: Sequence["_OpenFile"]) -> None:
        self._groups: list[_RowGroup] = []
        starts = [0]
        for number, (_, file) in enumerate(files):
            for group in range(file.num_row_groups):
                self._groups.append(_RowGroup(number, group))
                starts.append(starts[-1] + file.metadata.row_group(group).num_rows)
        self._starts = np.array(starts)
        #: The first row of each row group, and the number of all rows: a build reads by groups.
        self.group_starts = starts
        if not starts[-1]:
            raise SourceError(f"{self._paths[0]} has no rows. Check the path.", path=self._paths[0])

    def _keys(self, files: Sequence["_OpenFile"]) -> list[str]:
        field = files[0].content.schema_arrow.field(self._image_name).type
        if _is_struct(field) and "path" in [field.field(i).name for i in range(field.num_fields)]:
            leaf = f"{self._image_name}.path"
            parts = _parts(files, leaf)
            paths = [entry and entry["path"] for part in parts for entry in part.to_pylist()]
            if all(paths) and len(set(paths)) == len(paths):
                return paths
        self.has_numbers_as_keys = True
        return [
            f"{name}/{row}"
            for name, (_, file) in zip(names_of(self._paths), files, strict=True)
            for row in range(file.metadata.num_rows)
        ]

    def __getitem__(self, index: int) -> Record:
        record, (image, *others) = self.without_image(index), self._read(index)
        if image is None:
            raise DecodeError("the image is missing")
        image = image if isinstance(image, Path) else bytes(image)
        arrays = dict(zip(self._arrays.entry_of.values(), others, strict=True))
        return record._replace(image=image, arrays=self._arrays.values(arrays))

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the file that was read last."""
        return {**vars(self), "_cursor": None}

    def _read(self, index: int) -> list[Any]:
        """Return the image of a sample, and its arrays: paths, bytes, lists, or None."""
        group = int(np.searchsorted(self._starts, index, side="right")) - 1
        place = self._groups[group]
        row, folder = index - int(self._starts[group]), self._paths[place.file].parent
        if self._cursor is None or not self._cursor.can_reach(place, row):
            names = [self._image_name, *self._arrays.entry_of.values()]
            self._cursor = _Cursor(self._paths[place.file], place, names, self._cursor)
        values = [
            value.get("bytes") or value.get("path") if isinstance(value, dict) else value
            for value in self._cursor.read(row)
        ]
        return [folder / value if isinstance(value, str) else value for value in values]

    def _state(self, index: int) -> FileState:
        group = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self._states[self._groups[group].file]


class _Cursor:
    """Reads some columns of one row group in one process, forwards."""

    def __init__(
        self, path: Path, group: _RowGroup, names: Sequence[str], previous: "_Cursor | None"
    ) -> None:
        self._process, self._group, self._path = os.getpid(), group, path
        is_open = previous is not None and previous.has_opened(path)
        self._file: Any = previous._file if previous and is_open else _open(path)
        self._batches = self._file.iter_batches(
            _ROWS_AT_A_TIME, row_groups=[group.number], columns=list(names), use_threads=False
        )
        self._names = names
        self._start, self._rows, self._damage = 0, None, ""

    def has_opened(self, path: Path) -> bool:
        """Return whether this process has opened a file: reading its metadata takes long."""
        return self._process == os.getpid() and self._path == path

    def can_reach(self, group: _RowGroup, row: int) -> bool:
        """Return whether this process can read a row without going back."""
        return self._process == os.getpid() and self._group == group and row >= self._start

    def read(self, row: int) -> list[Any]:
        """Return a row, counted from the first row of the group. Raises DecodeError."""
        while self._rows is None or row >= self._start + len(self._rows):
            if self._damage:
                raise DecodeError(f"{self._path.name} is damaged: {self._damage}")
            try:
                batch = next(self._batches)
            except (OSError, ValueError, StopIteration) as error:  # pyarrow's errors are of these
                self._damage = str(error) or "rows are missing"
                continue
            self._start += 0 if self._rows is None else len(self._rows)
            self._rows = batch
        return [self._rows.column(name)[row - self._start].as_py() for name in self._names]


def _open(path: Path) -> Any:
    """Return a file, opened. Its metadata are read."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise DependencyError(
            f"{path} needs pyarrow. Install it with 'pip install memload[parquet]'.", name="pyarrow"
        ) from error
    try:
        return parquet.ParquetFile(path, page_checksum_verification=True)
    except FileNotFoundError as error:
        raise SourceError(f"{path} does not exist. Check the path.", path=path) from error
    except (OSError, pyarrow.ArrowException) as error:
        raise SourceError(
            f"{path} is no Parquet file, or is truncated ({error}). Copy or download it again.",
            path=path,
        ) from error


def _state(path: Path) -> FileState:
    status = path.stat()
    return FileState(status.st_size, status.st_mtime_ns)


def _features(schema: Any) -> dict[str, Any]:
    """Return what Hugging Face's library wrote about the columns, or nothing."""
    try:
        text = (schema.metadata or {})[b"huggingface"]
        features = json.loads(text)["info"]["features"]
    except (KeyError, ValueError, TypeError):
        return {}
    return features if isinstance(features, dict) else {}


def _check_columns(files: Sequence[_OpenFile]) -> None:
    """Raise SourceError if a file has other columns than the first."""
    first_path, first = files[0].path, files[0].content.schema_arrow
    for path, file in files:
        if file.schema_arrow.names != first.names:
            raise SourceError(
                f"{path} has the columns {', '.join(file.schema_arrow.names)}, but {first_path} "
                f"has {', '.join(first.names)}. Build them one by one.",
                path=path,
            )
        _check_types(file.schema_arrow, first, path, first_path)


def _check_types(schema: Any, first: Any, path: Path, first_path: Path) -> None:
    """Raise SourceError if a column holds something else than that of the first file."""
    for field, expected in zip(schema, first, strict=True):
        kinds = {_general(str(field.type)), _general(str(expected.type))} - {"null"}
        if len(kinds) > 1:
            raise SourceError(
                f"{path}: column {field.name!r} is of type {field.type!s:.60}, but in "
                f"{first_path} of {expected.type!s:.60}. Build them one by one.",
                path=path,
            )


def _general(kind: str) -> str:
    """Return a type without how wide its numbers are and how its texts are kept."""
    kind = re.sub(r"dictionary<values=(\w+),[^>]*>|large_", r"\1", kind)
    return re.sub(r"halffloat|double", "float", re.sub(r"u?int\d+", "int", kind))


def _find_image(schema: Any, features: dict[str, Any], used: Collection[str], path: Path) -> str:
    """Return the column with the images. It is none of those that are ``used`` otherwise."""
    fields = [field for field in schema if field.name not in used]
    names = [field.name for field in fields]
    marked = [
        name
        for name, feature in features.items()
        if isinstance(feature, dict) and feature.get("_type") == "Image" and name in names
    ]
    if len(marked) == 1:
        return marked[0]
    named = [name for name in IMAGE_NAMES if name in names]
    if named:
        return named[0]
    holds_bytes = [field.name for field in fields if str(field.type) in ("binary", "large_binary")]
    structs = [field.name for field in fields if _is_struct(field.type)]
    for candidates in (holds_bytes, structs):
        if len(candidates) == 1:
            return str(candidates[0])
    raise SourceError(
        f"{path}: the column with the images is not clear among {', '.join(schema.names)}. Name it "
        "with --image-column.",
        path=path,
    )


def _require_column(schema: Any, name: str, path: Path) -> None:
    if name not in schema.names:
        raise SourceError(
            f"{path} has no column {name!r}, only {', '.join(schema.names)}. Name one of them.",
            path=path,
        )


def _is_struct(kind: Any) -> bool:
    return str(kind).startswith("struct<")


def _parts(files: Sequence[_OpenFile], name: str) -> Iterator[Any]:
    """Yield a column, one row group after another. Raises SourceError."""
    groups = [(path, file, n) for path, file in files for n in range(file.num_row_groups)]
    for path, file, group in groups:
        try:
            yield file.read_row_group(group, columns=[name], use_threads=False).column(0)
        except (OSError, ValueError) as error:  # pyarrow's errors are of these
            raise SourceError(
                f"{path}: row group {group} of column {name!r} is damaged ({error}). Copy or "
                "download the file again.",
                path=path,
            ) from error


def _add_labels(columns: ColumnCollector, files: Sequence[_OpenFile], name: str) -> None:
    parts = list(_parts(files, name))
    labels = [label for part in parts for label in part.to_pylist()]
    is_number = all(isinstance(label, (bool, int, float, type(None))) for label in labels)
    missing = np.nan if is_number else ""  # which is an error in the end, with the key
    flat = [missing if label is None else label for label in labels]
    lists = [_class_names(file.schema_arrow, name) for _, file in files]
    names = next(filter(None, lists), [])
    if not is_number:
        columns.add_labels(flat, names)
        return
    for (path, _), other in zip(files, lists, strict=True):
        if other and other != names:
            raise SourceError(
                f"{path} has the classes {listed(other, 5)}, but {files[0].path} has "
                f"{listed(names, 5)}, so the same numbers mean others. Build them one by one, "
                "each with the same list of --classes.",
                path=path,
            )
    is_whole = all(isinstance(label, int) for label in flat)
    try:
        columns.add_labels(np.array(flat, np.int64 if is_whole else np.float64))
    except OverflowError as error:
        raise SourceError(
            f"{files[0].path}: column {name!r} has labels above 2⁶³. Save them as int64.",
            path=files[0].path,
        ) from error
    if columns.schema["label"].dtype == "<i8":
        columns.classes = names or None


def _class_names(schema: Any, name: str) -> list[str]:
    """Return the names of the classes of a column, or nothing."""
    feature = _features(schema).get(name)
    if not isinstance(feature, dict) or feature.get("_type") != "ClassLabel":
        return []
    names = feature.get("names")
    return [str(text) for text in names] if isinstance(names, list) else []


def _add_column(columns: ColumnCollector, files: Sequence[_OpenFile], name: str) -> None:
    """Add a column of numbers or text. Text with too many values is not read to its end."""
    kind = str(files[0].content.schema_arrow.field(name).type)
    is_text = kind in ("string", "large_string") or kind.startswith("dictionary")
    is_number = kind in ("bool", "float", "double", "halffloat") or "int" in kind.split("<")[0]
    if name in columns.values or name in RESERVED or "/" in name:
        columns.skip(name, "its name is taken")
        return
    if not (is_text or is_number):
        option = f"; masks=[{name!r}] or arrays=[{name!r}] stores it"
        columns.skip(name, f"of type {kind:.40}{option * kind.startswith('struct<bytes')}")
        return
    values: list[Any] = []
    distinct = set[Any]()
    for part in _parts(files, name):
        if is_text:
            distinct.update(part.unique().to_pylist())
            if len(distinct) > MAX_CATEGORIES:
                columns.skip(name, f"{values[0] if values else part[0].as_py()!r:.20}")
                return
        values += part.to_pylist()
    if len(distinct - {None}) == 0 and is_text:
        columns.skip(name, "empty")
    else:
        columns.add_values(name, values)
        texts, *others = (_class_names(file.schema_arrow, name) for _, file in files)
        is_same = all(other == texts for other in others)
        if texts and is_same and set(values) <= set(range(len(texts))):
            columns.categories[name] = texts
