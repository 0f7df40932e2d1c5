"""Parquet files and Hugging Face's data sets, which are both columns of Arrow."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from memload.errors import DecodeError, DependencyError, SourceError
from memload.sources.columns import IMAGE_NAMES, MAX_CATEGORIES, label_among
from memload.sources.contents import Contents, Files, file_labels, plain
from memload.sources.reading import Reading
from memload.sources.samples import Source
from memload.sources.tables import FIELD, file_names, table_source
from memload.storage.keys import Keys
from memload.wording import listed

#: How many images are decoded from a file at a time, so that memory stays flat.
_ROWS_AT_A_TIME = 32
#: What the types of columns begin with that may hold images, and that hold numbers.
_BYTES = ("struct", "binary", "large_binary")
_NUMBERS = ("int", "uint", "float", "double", "halffloat")


def open_parquet(paths: Sequence[Path], reading: Reading) -> Source:
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
    folder = Path(reading.root) if reading.root else paths[0].parent
    return _open_table(
        paths[0],
        files[0][1].schema_arrow,
        reading,
        folder,
        lambda name: _parts(files, name),
        lambda name: ParquetRows(name, groups, folder),
        lambda image: _keys(files, image),
        [group.first for group in groups],
    )


def open_hugging_face(dataset: Any, reading: Reading) -> Source:
    """Open a data set of Hugging Face's as it is stored, like Parquet: no picture is decoded."""
    source = _open_table(
        "The data set",
        dataset.features.arrow_schema,
        reading,
        Path(reading.root or ""),
        lambda name: [dataset.select_columns([name]).with_format("arrow")[:].column(name)],
        lambda name: HuggingFaceRows(dataset, name),
        lambda image: [*map(str, range(len(dataset)))],
    )
    return source.changed(are_numbered=not isinstance(source.images, Files))


def is_hugging_face(dataset: Any) -> bool:
    """Return whether a data set is Hugging Face's, without a transform of the user's."""
    form = getattr(dataset, "format", None)
    has_features = isinstance(getattr(dataset, "features", None), Mapping)
    return has_features and isinstance(form, Mapping) and form.get("type") != "custom"


def _open_table(
    place: object,
    schema: Any,
    reading: Reading,
    folder: Path,
    parts: Callable[[str], Iterable[Any]],
    rows: Callable[[str], Contents],
    keys: Callable[[str], Sequence[str]],
    group_starts: Sequence[int] = (),
) -> Source:
    """Return the samples of a table.

    Args:
        place: What it is called in messages.
        schema: That of Arrow.
        reading: How it is read.
        folder: What paths are relative to.
        parts: Returns the values of a column, in parts.
        rows: Returns the images in a column.
        keys: Returns the names of samples, by the column of images.
        group_starts: The first rows of groups that are read together.
    """
    texts, features = [text for _, text in reading.entries.values()], _features(schema)
    image = reading.image or _image_column(place, schema, features, texts)
    pictures = [text for text in (image, *texts) if not FIELD.search(text)]
    if lost := [name for name in pictures if name not in schema.names]:
        raise SourceError(f"{place} has no column {lost[0]!r:.80}, only {listed(schema.names)}.")
    needed = {*FIELD.findall(" ".join([image, *texts])), *reading.where}
    needed.add(reading.label or label_among(schema.names) or "")
    table: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    for field in schema:
        if field.name in pictures:
            continue
        if str(field.type).startswith(_BYTES):
            skipped[field.name] = f"bytes or a struct; --mask {field.name}={field.name} stores it"
        elif (values := _values(parts(field.name), place, field.name in needed)) is None:
            skipped[field.name] = f"more than {MAX_CATEGORIES:,} texts"
        else:
            table[field.name] = values

    def contents(text: str) -> Contents:
        return rows(text) if text in pictures else Files(folder, Keys.of(names(text)))

    def names(text: str) -> list[str]:
        return file_names(table, text, place)

    own_keys = keys(image) if image in pictures else names(image)
    return table_source(
        Source(keys=Keys.of(own_keys), images=contents(image), group_starts=group_starts),
        table,
        lambda text, _: contents(text),
        reading,
        place,
        class_names={name: _class_names(features, name) for name in table},
        skipped=skipped,
    )


# ----------------------------------------------------------------------------------------- columns


def _values(parts: Iterable[Any], place: object, is_needed: bool) -> Any:
    """Return the values of a column, or None for more texts than categories may have."""
    import pyarrow as pa
    import pyarrow.compute as pc

    tables, texts = [], set[Any]()
    for part in parts:
        tables.append(pa.table([part], ["column"]))
        if not is_needed and str(part.type).endswith("string"):
            texts.update(part.unique().to_pylist())
        if len(texts) > MAX_CATEGORIES:
            return None
    try:
        column = pa.concat_tables(tables, promote_options="permissive").column(0)
    except pa.ArrowException as error:
        raise SourceError(f"{place}: the files do not fit: {error}.") from error
    is_list = "list" in str(column.type)
    inner = pc.list_flatten(column) if is_list else column
    are_numbers = str(inner.type).startswith(_NUMBERS)
    if not are_numbers or column.null_count or inner.null_count:
        return column.to_pylist()
    return [*column.to_numpy()] if is_list else column.to_numpy()


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
    place: object, schema: Any, features: Mapping[str, Mapping[str, Any]], used: Sequence[str]
) -> str:
    """Return the column with the images, which is none of those that are used otherwise."""
    kinds = {field.name: str(field.type) for field in schema if field.name not in used}
    marked = [name for name in kinds if features.get(name, {}).get("_type") == "Image"]
    named = [name for name in IMAGE_NAMES if name in kinds]
    holds_bytes = [name for name, kind in kinds.items() if kind.startswith(_BYTES)]
    for found in (marked, named[:1], holds_bytes):
        if len(found) == 1:
            return str(found[0])
    raise SourceError(
        f"{place}: the column with the images is not clear among {listed(schema.names)}. Name it "
        "with --image (image=… in Python)."
    )


# ------------------------------------------------------------------------------------------- files


class _RowGroup(NamedTuple):
    """A part of a file that is read by itself."""

    first: int  #: its first row, counted over all files
    path: Path
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
    columns = []
    for path, file in files:
        features = _features(file.schema_arrow)
        columns.append({name: _class_names(features, name) for name in file.schema_arrow.names})
        first, own = columns[0], columns[-1]
        if names := [name for name in first | own if first.get(name) != own.get(name)]:
            raise SourceError(
                f"{path} and {files[0][0]} differ in the column {names[0]!r:.80}: one lacks it, or "
                "its numbers count into other classes. Build them one by one, each with the same "
                "list of --classes.",
                path=path,
            )


def _groups(files: Sequence[tuple[Path, Any]]) -> list[_RowGroup]:
    groups, first = [], 0
    for path, file in files:
        for group in range(file.num_row_groups):
            groups.append(_RowGroup(first, path, group))
            first += file.metadata.row_group(group).num_rows
    return groups


def _keys(files: Sequence[tuple[Path, Any]], image: str) -> list[str]:
    """Return the paths beside the bytes of images if all have one of their own, else numbers."""
    kind = str(files[0][1].schema_arrow.field(image).type)
    if kind.startswith("struct<") and "path: " in kind:
        parts = _parts(files, f"{image}.path")
        paths: list[Any] = [(each or {}).get("path") for part in parts for each in part.to_pylist()]
        if all(paths) and len({*paths}) == len(paths):
            return paths
    labels = file_labels([path for path, _ in files])
    return [
        f"{label}/{row}"
        for label, (_, file) in zip(labels, files, strict=True)
        for row in range(file.metadata.num_rows)
    ]


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

    def __init__(self, column: str, groups: Sequence[_RowGroup], folder: Path) -> None:
        self._column, self._groups, self._folder = column, groups, folder
        self._firsts = np.array([group.first for group in groups])

    def read(self, row: int) -> Any:
        """Return a value. Raises DecodeError."""
        group = self._groups[int(np.searchsorted(self._firsts, row, side="right")) - 1]
        now = os.getpid(), group
        # which process reads which row group, the rows last read, and an iterator over the next
        before, start, rows, batches = self._opened or (None, 0, (), iter(()))
        if before != now or row < start:
            start, rows, batches = group.first, (), self._batches(group)
        while row >= start + len(rows):
            start, rows = start + len(rows), next(batches, ())
            if not len(rows):
                raise DecodeError(f"{group.path.name} is damaged: rows are missing")
        self._opened = now, start, rows, batches
        return plain(rows[row - start].as_py(), self._folder)

    def _batches(self, group: _RowGroup) -> Iterator[Any]:
        try:
            for batch in _open(group.path).iter_batches(
                _ROWS_AT_A_TIME,
                row_groups=[group.number],
                columns=[self._column],
                use_threads=False,
            ):
                yield batch.column(0)
        except (OSError, ValueError) as error:  # pyarrow's errors are of these
            raise DecodeError(f"{group.path.name} is damaged: {error}") from error


class HuggingFaceRows(Contents):
    """A column of a data set of Hugging Face's, as it is stored."""

    def __init__(self, dataset: Any, column: str) -> None:
        dataset = dataset.select_columns([column])
        kind = str(dataset.features.arrow_schema.field(column).type)
        self._is_encoded = kind.startswith((*_BYTES, "string"))
        self._rows = dataset.with_format("arrow" if self._is_encoded else "numpy")
        self._column = column

    def read(self, row: int) -> Any:
        """Return a value."""
        if not self._is_encoded:
            return self._rows[row][self._column]
        return plain(self._rows[row : row + 1].column(0)[0].as_py())
