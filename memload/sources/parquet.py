"""Parquet files and Hugging Face's data sets, which are both columns of Arrow."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from memload.errors import DecodeError, DependencyError, SourceError
from memload.sources.columns import IMAGE_NAMES, MAX_CATEGORIES, label_among
from memload.sources.contents import Contents, Files, image_of
from memload.sources.samples import Reading, Samples
from memload.sources.tables import file_names, table_samples
from memload.storage.keys import Keys
from memload.wording import listed

#: How many images are decoded from a file at a time, so that memory stays flat.
_ROWS_AT_A_TIME = 32


class _Arrow(NamedTuple):
    """Columns of Arrow, which are read when they are asked for."""

    place: Any
    schema: Any
    parts: Callable[[str], Iterable[Any]]  #: the values of a column, in parts
    contents: Callable[[str], Contents]  #: the images in a column
    keys: Callable[[str], Sequence[str]]  #: the names of samples, by the column of images
    group_starts: Sequence[int] = ()
    are_numbered: bool = False


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
    _check_columns(files)
    groups = _groups(files)
    folder = Path(reading.root) if reading.root else None
    arrow = _Arrow(
        paths[0],
        files[0][1].schema_arrow,
        lambda name: _parts(files, name),
        lambda name: ParquetRows(paths, name, groups, folder),
        lambda image: _keys(files, image),
        [group.first for group in groups],
    )
    return _open_table(arrow, reading, folder or paths[0].parent)


def open_hugging_face(dataset: Any, reading: Reading) -> Samples:
    """Open a data set of Hugging Face's as it is stored, like Parquet: no picture is decoded."""
    arrow = _Arrow(
        "The data set",
        dataset.features.arrow_schema,
        lambda name: [dataset.select_columns([name]).with_format("arrow")[:].column(name)],
        lambda name: HuggingFaceRows(dataset, name),
        lambda name: [*map(str, range(len(dataset)))],
        are_numbered="{" not in (reading.image or ""),
    )
    return _open_table(arrow, reading, Path(reading.root or ""))


def is_hugging_face(dataset: Any) -> bool:
    """Return whether a data set is Hugging Face's, without a transform of the user's."""
    form = getattr(dataset, "format", None)
    has_features = isinstance(getattr(dataset, "features", None), Mapping)
    return has_features and isinstance(form, Mapping) and form.get("type") != "custom"


def _open_table(arrow: _Arrow, reading: Reading, folder: Path) -> Samples:
    """Return the samples of a table. Paths are relative to ``folder``."""
    columns, texts = arrow.schema.names, [text for _, text in reading.entries.values()]
    features = _features(arrow.schema)
    image = reading.image or _image_column(arrow, features, texts)
    pictures = [text for text in (image, *texts) if "{" not in text]
    if lost := [name for name in pictures if name not in columns]:
        raise SourceError(f"{arrow.place} has no column {lost[0]!r:.80}, only {listed(columns)}.")
    in_templates = [name for name in columns if f"{{{name}}}" in " ".join([image, *texts])]
    needed = [reading.label or label_among(columns), *reading.where, *in_templates]
    names = [name for name in columns if name not in pictures]
    table, skipped = _read_columns(arrow, names, needed)

    def contents(text: str) -> Contents:
        if "{" not in text:
            return arrow.contents(text)
        return Files(folder, Keys.of(file_names(table, text, arrow.place)))

    images = contents(image)
    keys = images.names if isinstance(images, Files) else Keys.of(arrow.keys(image))
    return table_samples(
        Samples(keys, images, group_starts=arrow.group_starts, are_numbered=arrow.are_numbered),
        table,
        contents,
        reading,
        arrow.place,
        class_names={name: _class_names(features, name) for name in table},
        skipped=skipped,
    )


# ----------------------------------------------------------------------------------------- columns


def _read_columns(
    arrow: _Arrow, names: Sequence[str], needed: Sequence[str | None]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values of columns, and why others are not read to their end."""
    import pyarrow as pa

    table: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    for name in names:
        kind = str(arrow.schema.field(name).type)
        if kind.startswith(("struct", "binary", "large_binary")):
            skipped[name] = f"of type {kind:.40}; --mask {name}={name} stores it"
            continue
        parts, texts = [], set[Any]()
        for part in arrow.parts(name):
            parts.append(pa.table({name: part}))
            if name not in needed and kind in ("string", "large_string"):
                texts.update(part.unique().to_pylist())
            if len(texts) > MAX_CATEGORIES:
                skipped[name] = f"more than {MAX_CATEGORIES:,} texts"
                break
        else:
            try:
                whole = pa.concat_tables(parts, promote_options="permissive")
            except pa.ArrowException as error:
                raise SourceError(f"{arrow.place}: the files do not fit: {error}.") from error
            table[name] = _plain(whole.column(name))
    return table, skipped


def _plain(column: Any) -> Sequence[Any] | np.ndarray:
    """Return the values of a column as an array, if they are numbers or lists of one length."""
    import pyarrow.compute as pc

    inner, shape = column, [len(column)]
    if "list" in str(column.type) and column.null_count == 0 and len(column):
        lengths = pc.min_max(pc.list_value_length(column))
        if lengths["min"] == lengths["max"]:
            inner, shape = pc.list_flatten(column), [len(column), lengths["max"].as_py()]
    are_numbers = str(inner.type).startswith(("int", "uint", "float", "double", "halffloat"))
    if are_numbers and inner.null_count == 0 and all(shape):
        return np.asarray(inner.to_numpy()).reshape(shape)
    return list(column.to_pylist())


def _features(schema: Any) -> Mapping[str, Mapping[str, Any]]:
    """Return what Hugging Face's library wrote about the columns, or nothing."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {name: each for name, each in features.items() if isinstance(each, dict)}
    except (KeyError, ValueError, TypeError, AttributeError):
        return {}


def _class_names(features: Mapping[str, Mapping[str, Any]], name: str) -> list[str]:
    """Return the texts that a column of type ClassLabel counts into, or nothing."""
    feature = features.get(name, {})
    is_label = feature.get("_type") == "ClassLabel"
    return [*map(str, feature.get("names") or ())] if is_label else []


def _image_column(
    arrow: _Arrow, features: Mapping[str, Mapping[str, Any]], used: Sequence[str]
) -> str:
    """Return the column with the images, which is none of those that are used otherwise."""
    kinds = {field.name: str(field.type) for field in arrow.schema if field.name not in used}
    marked = [name for name in kinds if features.get(name, {}).get("_type") == "Image"]
    named = [name for name in IMAGE_NAMES if name in kinds]
    holds_bytes = [name for name, kind in kinds.items() if kind in ("binary", "large_binary")]
    structs = [name for name, kind in kinds.items() if kind.startswith("struct<")]
    for found in (marked, named[:1], holds_bytes, structs):
        if len(found) == 1:
            return str(found[0])
    raise SourceError(
        f"{arrow.place}: the column with the images is not clear among "
        f"{listed(arrow.schema.names)}. Name it with --image (image=… in Python)."
    )


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


def _check_columns(files: Sequence[tuple[Path, Any]]) -> None:
    """Raise SourceError if files have other columns than the first, or other names of classes."""
    expected = None
    for path, file in files:
        schema = file.schema_arrow
        features = _features(schema)
        found = {name: _class_names(features, name) for name in schema.names}
        expected = found if expected is None else expected
        for name in dict.fromkeys([*expected, *found]):
            if found.get(name) != expected.get(name):
                raise SourceError(
                    f"{path} and {files[0][0]} differ in the column {name!r:.80}: one lacks it, or "
                    "its numbers count into other classes. Build them one by one, each with the "
                    "same list of --classes.",
                    path=path,
                )


def _groups(files: Sequence[tuple[Path, Any]]) -> list[_RowGroup]:
    groups, first = [], 0
    for number, (_, file) in enumerate(files):
        for group in range(file.num_row_groups):
            groups.append(_RowGroup(first, number, group))
            first += file.metadata.row_group(group).num_rows
    if not first:
        raise SourceError(f"{files[0][0]} has no rows. Check the path.", path=files[0][0])
    return groups


def _keys(files: Sequence[tuple[Path, Any]], image: str) -> list[str]:
    """Return the paths beside the bytes of images if all have one of their own, else numbers."""
    kind = str(files[0][1].schema_arrow.field(image).type)
    if kind.startswith("struct<") and "path: " in kind:
        parts = _parts(files, f"{image}.path")
        paths = [path["path"] for part in parts for path in part.to_pylist()]
        if all(paths) and len({*paths}) == len(paths):
            return paths
    names = [path.name for path, _ in files]
    names = names if len({*names}) == len(names) else [str(path) for path, _ in files]
    rows = [range(file.metadata.num_rows) for _, file in files]
    return [f"{name}/{row}" for name, numbers in zip(names, rows, strict=True) for row in numbers]


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
        # Reading the metadata of a file takes long. A file from before a fork is not shared.
        is_open = previous and (previous._process, previous._path) == (self._process, path)
        self._file: Any = previous._file if previous and is_open else _open(path)
        self._batches = self._file.iter_batches(
            _ROWS_AT_A_TIME, row_groups=[group.number], columns=[column], use_threads=False
        )
        self._start, self._damage = group.first, ""
        self._rows: Any = ()

    def can_reach(self, group: _RowGroup, row: int) -> bool:
        """Return whether this process can read a row without going back."""
        return (self._process, self._group) == (os.getpid(), group) and row >= self._start

    def read(self, row: int) -> Any:
        """Return a value. Raises DecodeError."""
        while row >= self._start + len(self._rows):
            if self._damage:
                raise DecodeError(f"{self._path.name} is damaged: {self._damage}")
            try:
                rows = next(self._batches).column(0)
            except (OSError, ValueError, StopIteration) as error:  # pyarrow's errors are of these
                self._damage = str(error) or "rows are missing"
                continue
            self._start += len(self._rows)
            self._rows = rows
        return self._rows[row - self._start].as_py()


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
