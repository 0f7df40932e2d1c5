"""Parquet files and Hugging Face's data sets, which are both columns of Arrow."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from memload.errors import DecodeError, DependencyError, SourceError
from memload.sources.columns import IMAGE_NAMES, LABEL_NAMES, MAX_CATEGORIES
from memload.sources.contents import Contents, Files, image_of
from memload.sources.samples import Reading, Samples
from memload.sources.tables import file_names, table_samples
from memload.storage.keys import Keys
from memload.wording import listed

#: How many images are decoded from a file at a time, so that memory stays flat.
_ROWS_AT_A_TIME = 32


def open_parquet(paths: Sequence[Path], reading: Reading) -> Samples:
    """Open Parquet files with the same columns. Opening reads all columns but those of images.

    The images are bytes, paths, or Hugging Face's structs of both. They are in the column that is
    named, else in the one that Hugging Face marks, else in one of `IMAGE_NAMES`, else in the only
    column of bytes. Paths are relative to the folder of the files.

    Raises SourceError and DependencyError.

    >>> open_parquet([Path("0.parquet"), Path("1.parquet")], Reading()).classes  # doctest: +SKIP
    ['cat', 'dog']
    """
    files = [(path, _open(path)) for path in paths]
    schema, features = _checked_schema(files)
    groups = _groups(files)
    folder = Path(reading.root) if reading.root else None

    def keys(image: str) -> Sequence[str]:
        return _paths_in(files, image) or [
            f"{name}/{row}" for name, rows in _rows_of(files) for row in range(rows)
        ]

    arrow = _Arrow(
        schema,
        features,
        lambda name: _parts(files, name),
        lambda name: ParquetRows(paths, name, groups, folder),
        keys,
        paths[0],
    )
    samples = _open_table(arrow, reading, folder or paths[0].parent)
    samples.group_starts = [group.first for group in groups]
    return samples


def open_hugging_face(dataset: Any, reading: Reading) -> Samples:
    """Open a data set of Hugging Face's as it is stored, like Parquet: no picture is decoded."""
    schema = dataset.features.arrow_schema

    def parts(name: str) -> Iterator[Any]:
        yield dataset.select_columns([name]).with_format("arrow")[:].column(name)

    arrow = _Arrow(
        schema,
        _features(schema),
        parts,
        lambda name: HuggingFaceRows(dataset, name),
        lambda name: [*map(str, range(len(dataset)))],
    )
    samples = _open_table(arrow, reading, Path(reading.root or ""))
    samples.are_numbered = "{" not in (reading.image or "")
    return samples


def is_hugging_face(dataset: Any) -> bool:
    """Return whether a data set is Hugging Face's, without a transform of the user's."""
    form = getattr(dataset, "format", None)
    has_features = isinstance(getattr(dataset, "features", None), Mapping)
    return has_features and isinstance(form, Mapping) and form.get("type") != "custom"


class _Arrow(NamedTuple):
    """Columns of Arrow, which are read when they are asked for."""

    schema: Any
    features: Mapping[str, Any]  #: what Hugging Face's library says about the columns
    parts: Callable[[str], Iterable[Any]]  #: the values of a column, in parts
    contents: Callable[[str], Contents]  #: the images in a column
    keys: Callable[[str], Sequence[str]]  #: the names of samples, by the column of images
    place: Any = "the data set"


def _open_table(arrow: _Arrow, reading: Reading, folder: Path) -> Samples:
    """Return the samples of a table. Paths are relative to ``folder``."""
    columns = arrow.schema.names
    pictures = {text for text in reading.entries.values() if "{" not in text}
    image = reading.image or _image_column(arrow, pictures)
    for name in (*pictures, image):
        if "{" not in name and name not in columns:
            raise SourceError(f"{arrow.place} has no column {name!r:.80}, only {listed(columns)}.")
    templates = " ".join([image, *reading.entries.values()])
    label = reading.label or next((name for name in LABEL_NAMES if name in columns), None)
    needed = {label, *(name for name in columns if f"{{{name}}}" in templates)}
    names = [name for name in columns if name not in (image, *pictures)]
    table, skipped = _read_columns(arrow, names, needed)

    def contents(text: str) -> Contents:
        if "{" not in text:
            return arrow.contents(text)
        return Files(folder, Keys.of(file_names(table, text, arrow.place)))

    images = contents(image)
    return table_samples(
        table,
        images.names if isinstance(images, Files) else arrow.keys(image),
        images,
        contents,
        reading,
        arrow.place,
        class_names={name: _class_names(arrow.features, name) for name in table},
        skipped=skipped,
    )


# ----------------------------------------------------------------------------------------- columns


def _read_columns(
    arrow: _Arrow, names: Sequence[str], needed: set[str | None]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values of columns, and why others are not read to their end."""
    import pyarrow as pa

    table: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    for name in names:
        kind = arrow.schema.field(name).type
        if pa.types.is_struct(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
            skipped[name] = f"of type {kind!s:.40}; --mask {name}={name} stores it"
            continue
        parts, texts = [], set[Any]()
        is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
        for part in arrow.parts(name):
            parts.append(pa.table({name: part}))
            if is_text and name not in needed:
                texts.update(part.unique().to_pylist())
            if len(texts) > MAX_CATEGORIES:
                skipped[name] = f"more than {MAX_CATEGORIES:,} texts"
                break
        else:
            try:
                column = pa.concat_tables(parts, promote_options="permissive").column(name)
            except pa.ArrowException as error:
                raise SourceError(
                    f"{arrow.place} and others have different types in column {name!r:.80}: "
                    f"{error}. Build them one by one."
                ) from error
            table[name] = _plain(column)
    return table, skipped


def _plain(column: Any) -> Sequence[Any] | np.ndarray:
    """Return the values of a column as an array, if they are numbers or lists of one length."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = column.type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if column.null_count == 0 and (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        return np.asarray(column.to_numpy())
    if is_list and column.null_count == 0 and len(column):
        inner, lengths = pc.list_flatten(column), pc.list_value_length(column)
        is_even = pc.min(lengths).as_py() == pc.max(lengths).as_py() != 0
        is_plain = pa.types.is_integer(inner.type) or pa.types.is_floating(inner.type)
        if is_even and is_plain and inner.null_count == 0:
            return np.asarray(inner.to_numpy()).reshape(len(column), -1)
    return list(column.to_pylist())


def _features(schema: Any) -> Mapping[str, Any]:
    """Return what Hugging Face's library wrote about the columns, or nothing."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, ValueError, TypeError):
        return {}
    return features if isinstance(features, dict) else {}


def _class_names(features: Mapping[str, Any], name: str) -> list[str]:
    """Return the texts that a column of type ClassLabel counts into, or nothing."""
    feature = features.get(name)
    names = feature.get("names") if isinstance(feature, dict) else None
    is_label = isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
    return [str(text) for text in names] if is_label and isinstance(names, list) else []


def _image_column(arrow: _Arrow, used: set[str]) -> str:
    """Return the column with the images, which is none of those that are used otherwise."""
    fields = {field.name: str(field.type) for field in arrow.schema if field.name not in used}
    marked = [
        name
        for name, feature in arrow.features.items()
        if isinstance(feature, dict) and feature.get("_type") == "Image" and name in fields
    ]
    named = [name for name in IMAGE_NAMES if name in fields]
    holds_bytes = [name for name, kind in fields.items() if kind in ("binary", "large_binary")]
    structs = [name for name, kind in fields.items() if kind.startswith("struct<")]
    if len(marked) == 1 or named:
        return str(marked[0] if len(marked) == 1 else named[0])
    found = next((each for each in (holds_bytes, structs) if len(each) == 1), [])
    if not found:
        raise SourceError(
            f"{arrow.place}: the column with the images is not clear among "
            f"{listed(arrow.schema.names)}. Name it with --image (image=… in Python)."
        )
    return str(found[0])


def _paths_in(files: Sequence[tuple[Path, Any]], image: str) -> list[str] | None:
    """Return the paths beside the bytes of images, if all have one of their own."""
    import pyarrow.compute as pc

    kind = files[0][1].schema_arrow.field(image).type
    if not str(kind).startswith("struct<") or "path" not in [field.name for field in kind]:
        return None
    parts = _parts(files, f"{image}.path")
    paths = [path for part in parts for path in pc.struct_field(part, "path").to_pylist()]
    return paths if all(paths) and len({*paths}) == len(paths) else None


# ------------------------------------------------------------------------------------------- files


class _RowGroup(NamedTuple):
    """A part of a file that is read by itself."""

    first: int  #: its first row, counted over all files
    file: int
    number: int


def _open(path: Path) -> Any:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise DependencyError(
            f"{path} needs pyarrow. Install it with 'pip install memload[parquet]'.", name="pyarrow"
        ) from error
    try:
        return parquet.ParquetFile(path, page_checksum_verification=True)
    except (OSError, pyarrow.ArrowException) as error:
        raise SourceError(
            f"{path} is missing, is no Parquet file, or is truncated ({error}). Check the path.",
            path=path,
        ) from error


def _checked_schema(files: Sequence[tuple[Path, Any]]) -> tuple[Any, Mapping[str, Any]]:
    """Return the schema of all files. Raises SourceError if their columns or classes differ."""
    first_path, first = files[0]
    features = _features(first.schema_arrow)
    for path, file in files:
        names, expected = file.schema_arrow.names, first.schema_arrow.names
        if names != expected:
            raise SourceError(
                f"{path} has the columns {listed(names)}, but {first_path} has {listed(expected)}. "
                "Build them one by one.",
                path=path,
            )
        for name in names:
            other, own = (_class_names(_features(f.schema_arrow), name) for f in (file, first))
            if other != own:
                raise SourceError(
                    f"{path}: {name!r:.80} counts into {listed(other, 5)}, but in {first_path} "
                    f"into {listed(own, 5)}, so the same numbers mean others. Build them one by "
                    "one, each with the same list of --classes.",
                    path=path,
                )
    return first.schema_arrow, features


def _groups(files: Sequence[tuple[Path, Any]]) -> list[_RowGroup]:
    groups, first = [], 0
    for number, (_, file) in enumerate(files):
        for group in range(file.num_row_groups):
            groups.append(_RowGroup(first, number, group))
            first += file.metadata.row_group(group).num_rows
    if not first:
        raise SourceError(f"{files[0][0]} has no rows. Check the path.", path=files[0][0])
    return groups


def _rows_of(files: Sequence[tuple[Path, Any]]) -> list[tuple[str, int]]:
    """Return what keys call the files, and how many rows they have."""
    names = [path.name for path, _ in files]
    names = names if len({*names}) == len(names) else [str(path) for path, _ in files]
    return [(name, file.metadata.num_rows) for name, (_, file) in zip(names, files, strict=True)]


def _parts(files: Sequence[tuple[Path, Any]], name: str) -> Iterator[Any]:
    """Yield a column, one row group after another. Raises SourceError."""
    for path, file in files:
        for group in range(file.num_row_groups):
            try:
                yield file.read_row_group(group, columns=[name], use_threads=False).column(0)
            except (OSError, ValueError) as error:  # pyarrow's errors are of these
                raise SourceError(
                    f"{path}: row group {group} of column {name!r} is damaged ({error}). Copy or "
                    "download the file again.",
                    path=path,
                ) from error


class ParquetRows(Contents):
    """A column of Parquet files: bytes, paths, lists of numbers, or structs of bytes and paths.

    Row groups are read forwards, 32 rows at a time, by each process for itself.
    """

    def __init__(
        self, paths: Sequence[Path], column: str, groups: Sequence[_RowGroup], folder: Path | None
    ) -> None:
        self._paths, self._column, self._groups, self._folder = paths, column, groups, folder
        self._firsts = np.array([group.first for group in groups])
        self._cursor: _Cursor | None = None

    def __getitem__(self, row: int) -> Any:
        group = self._groups[int(np.searchsorted(self._firsts, row, side="right")) - 1]
        path = self._paths[group.file]
        if self._cursor is None or not self._cursor.can_reach(group, row):
            self._cursor = _Cursor(path, group, self._column, self._cursor)
        return image_of(self._cursor.read(row), self._folder or path.parent)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the file that was read last."""
        return {**vars(self), "_cursor": None}


class _Cursor:
    """Reads a column of one row group in one process, forwards."""

    def __init__(
        self, path: Path, group: _RowGroup, column: str, previous: "_Cursor | None"
    ) -> None:
        self._process, self._group, self._path = os.getpid(), group, path
        is_open = previous is not None and previous._is_of(path)
        self._file: Any = previous._file if previous and is_open else _open(path)
        self._batches = self._file.iter_batches(
            _ROWS_AT_A_TIME, row_groups=[group.number], columns=[column], use_threads=False
        )
        self._start, self._rows, self._damage = group.first, None, ""

    def _is_of(self, path: Path) -> bool:
        """Return whether this process has opened a file: reading its metadata takes long."""
        return self._process == os.getpid() and self._path == path

    def can_reach(self, group: _RowGroup, row: int) -> bool:
        """Return whether this process can read a row without going back."""
        return self._process == os.getpid() and self._group == group and row >= self._start

    def read(self, row: int) -> Any:
        """Return a value. Raises DecodeError."""
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
        return self._rows.column(0)[row - self._start].as_py()


class HuggingFaceRows(Contents):
    """A column of a data set of Hugging Face's, as it is stored."""

    def __init__(self, dataset: Any, column: str) -> None:
        dataset = dataset.select_columns([column])
        kind = str(dataset.features.arrow_schema.field(column).type)
        self._is_encoded = kind.startswith(("struct", "binary", "large_binary", "string"))
        self._rows = dataset.with_format("arrow" if self._is_encoded else "numpy")
        self._column = column

    def __getitem__(self, row: int) -> Any:
        if not self._is_encoded:
            return self._rows[row][self._column]
        return image_of(self._rows[row : row + 1].column(0)[0].as_py(), Path())
