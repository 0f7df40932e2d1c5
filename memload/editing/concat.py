"""The samples of several data sets, one after another, under one index."""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from memload.editing.report import EditReport, check_index_output, link_command, report_on
from memload.editing.selected import select
from memload.editing.statistics import combined_statistics
from memload.storage.index import Array, Index, Shard, class_counts
from memload.storage.keys import Keys
from memload.storage.shards import check_files
from memload.wording import listed, shape_text

#: What becomes of columns that differ: an error, or they are left out.
ColumnPolicy = Literal["same", "common"]


def concat(
    output: str | Path,
    *paths: Any,
    columns: ColumnPolicy = "same",
    overwrite: bool = False,
) -> EditReport:
    """Write an index of the samples of several data sets, one after another.

    Pixels are neither read nor copied: the new index, ``output``, names the files that there are.
    All of them must lie in its folder. ``paths`` are data sets such as ``out.bin``, indexes, or
    `MemmapDataset` objects, which may be views. They may share pixels, as two subsets of one do.

    Classes are united by name, in the order in which they appear first, and so are the texts of
    other columns. Labels follow. Labels without names stay as they are. Columns must have the same
    names, types and shapes; with ``columns="common"``, those that differ are left out. All arrays
    must agree in shape and type. Mean and standard deviation are combined; a subset counts with
    those of the data set that it was taken from.

    Returns a report whose ``notes`` tell, for example, of names that occur twice. Raises ValueError
    for data sets that do not fit together, FileExistsError, FormatError and OSError.

    >>> memload.concat("all.idx", "out.bin", "more.bin")  # doctest: +SKIP
    """
    if not paths:
        raise ValueError("paths: there is no data set to put together. Name at least one.")
    indexes = [select(path, None) for path in paths]
    _check_folders(indexes)
    target = check_index_output(output, indexes[0].path.parent, overwrite)
    index = concatenate(indexes, columns=columns)
    check_files(index)
    index.write(target)
    return report_on(target, index, list(_notes(indexes, index)))


def concatenate(
    indexes: Sequence[Index], *, columns: ColumnPolicy = "same", required: Collection[str] = ()
) -> Index:
    """Return the index of the samples of several data sets, one after another. Nothing is written.

    See `concat`. Columns that are ``required`` must not differ, even if others may. Files outside
    the folder of the first index are named by their absolute paths. Such an index can be read from,
    but not written.
    """
    if columns not in ("same", "common"):
        raise ValueError(f"columns: {columns!r} is neither 'same' nor 'common'.")
    first = indexes[0]
    _check_arrays(indexes)
    _check_classes(indexes)
    names = _common_columns(indexes, columns, required)
    united = {array.name: _unite_array(array.name, indexes) for array in first.arrays}
    values, classes, categories = _unite_columns(indexes, names)
    statistics = combined_statistics(indexes)
    if classes is not None:
        statistics["class_counts"] = class_counts(values["label"], len(classes))
    row = united["image"].rows
    return Index(
        path=first.path,
        arrays=tuple(array for array, _, _ in united.values()),
        row=row,
        other_rows={
            name: rows for name, (_, rows, _) in united.items() if not np.array_equal(rows, row)
        },
        flags=np.concatenate([index.flags for index in indexes]),
        keys=_unite_keys(indexes),
        columns=values,
        crc32={name: crc32 for name, (_, _, crc32) in united.items()},
        classes=classes,
        points=tuple(name for name in first.points if name in names),
        boxes=tuple(name for name in first.boxes if name in names),
        categories=categories,
        build=_unite_build(indexes),
        statistics=statistics,
    )


# ---------------------------------------------------------------------------------- what must agree


def _check_folders(indexes: Sequence[Index]) -> None:
    folder = indexes[0].path.parent
    for index in indexes[1:]:
        if index.path.parent.resolve() != folder.resolve():
            first = indexes[0].path.name
            raise ValueError(
                f"{index.path} is not in {folder.resolve()}, as {first} is. All files of an index "
                "must lie in one folder. Move the pixels and the index there, or make "
                f"hard links: '{link_command(index, folder.resolve())}'."
            )


def _check_arrays(indexes: Sequence[Index]) -> None:
    """Raise ValueError unless all data sets have the same arrays."""
    first = indexes[0]
    for index in indexes[1:]:
        found, expected = ({array.name: array for array in one.arrays} for one in (index, first))
        for name in found.keys() ^ expected.keys():
            has, lacks = (index, first) if name in found else (first, index)
            raise ValueError(
                f"{lacks.path} has no array {name!r}, which {has.path.name} has. Add it with "
                "'memload join', or leave it out: MemmapDataset([…], columns=['label']) reads both "
                "without it, and its method save() writes an index."
            )
        for name, array in found.items():
            if _facts_of(array) != _facts_of(expected[name]):
                raise ValueError(_different_arrays(index, array, first, expected[name]))


def _facts_of(array: Array) -> tuple[Any, ...]:
    return array.kind, array.descr, array.shape, array.header_bytes


def _different_arrays(index: Index, array: Array, first: Index, expected: Array) -> str:
    sizes = [f"{shape_text(a.shape)} {np.dtype(a.descr).name}" for a in (array, expected)]
    difference = (
        f"{index.path} has {sizes[0]} as {array.name!r}, but {first.path.name} has {sizes[1]}."
    )
    if sizes[0] == sizes[1]:
        if array.kind != expected.kind:
            return f"{difference[:-1]}, and one is a {array.kind}, the other a {expected.kind}."
        return (
            f"The files of {array.name!r} in {index.path} and {first.path.name} have headers of "
            f"{array.header_bytes:,} and {expected.header_bytes:,} bytes. Copy both with 'memload "
            "copy', and put the copies together."
        )
    if expected.name != "image":
        return (
            f"{difference} Build both from files of one size and type, or leave it out: "
            "MemmapDataset([…], columns=['label']) reads both without it, and its method save() "
            "writes an index."
        )
    height, width, channels = expected.shape
    mode = "" if (array.shape[2], array.descr) == (channels, expected.descr) else " --mode …"
    return f"{difference} Build it alike: 'memload build … --size {height}x{width}{mode}'."


def _check_classes(indexes: Sequence[Index]) -> None:
    """Raise ValueError if some labels have names and others do not."""
    labelled = [index for index in indexes if "label" in index.columns]
    named = [index for index in labelled if index.classes is not None]
    if named and len(named) < len(labelled):
        other = next(index for index in labelled if index.classes is None)
        raise ValueError(
            f"The labels of {other.path} are numbers without names of classes, but those of "
            f"{named[0].path.name} have names. Build it with '--classes "
            f"{named[0].path.name}', or give it names with 'memload relabel'."
        )


def _common_columns(
    indexes: Sequence[Index], columns: ColumnPolicy, required: Collection[str]
) -> list[str]:
    """Return the columns that are the same everywhere.

    Raises ValueError if there are others and ``columns`` is "same", or if they are required.
    """
    facts = [_facts_of_columns(index) for index in indexes]
    names = list(dict.fromkeys(name for found in facts for name in found))
    common = [name for name in names if len({found.get(name) for found in facts}) == 1]
    wrong = [n for n in names if n not in common and (columns == "same" or n in required)]
    if wrong:
        differences = (_difference(name, indexes, facts) for name in wrong)
        raise ValueError(
            f"The data sets differ in columns: {'; '.join(differences)}. Leave out what differs "
            "with --columns common (columns='common' in Python; of a Loader or a MemmapDataset, "
            f"columns={common!r:.200}), or give them the same columns with 'memload relabel'."
        )
    return common


def _difference(name: str, indexes: Sequence[Index], facts: Sequence[Mapping[str, str]]) -> str:
    """Return what a column is, with the first data set of each kind."""
    examples: dict[str, str] = {}
    for index, found in zip(indexes, facts, strict=True):
        examples.setdefault(found.get(name, "missing"), index.path.name)
    return f"{name!r} ({', '.join(f'{fact} in {file}' for fact, file in examples.items())})"


def _facts_of_columns(index: Index) -> dict[str, str]:
    """Return what each column is in words, such as ``float32 5×2, points``."""
    facts = {}
    for name, column in index.columns.items():
        is_text = name in index.categories or (name == "label" and index.classes is not None)
        words = [column.dtype.name, *[shape_text(column.shape[1:])] * (column.ndim > 1)]
        kinds = ["points"] * (name in index.points) + ["boxes"] * (name in index.boxes)
        facts[name] = "text" if is_text else ", ".join([" ".join(words), *kinds])
    return facts


# -------------------------------------------------------------------------------------- what unites


class _UnitedArray(NamedTuple):
    """An array of all data sets, the row of each sample in it, and the checksum of each row."""

    array: Array
    rows: np.ndarray
    crc32: np.ndarray


class _PlacedFile(NamedTuple):
    """A file of an array, and the number of its first row among those of all files."""

    first_row: int
    shard: Shard
    crc32: np.ndarray


def _unite_array(name: str, indexes: Sequence[Index]) -> _UnitedArray:
    """Put the files of an array of all data sets one after another, each file once.

    If two data sets have rows in ``a`` and ``b``, and in ``b`` and ``c``, those of ``c`` move::

        first data set    a: 0 1 2   b: 3 4
        second data set              b: 0 1   c: 2 3 4
        united            a: 0 1 2   b: 3 4   c: 5 6 7
    """
    folder = indexes[0].path.parent.resolve()
    placed: dict[Path, _PlacedFile] = {}
    rows, total = [], 0
    for index in indexes:
        starts, moves = [], []  # the first row of each file, and by how much its rows move
        for path, start, shard, crc32 in _files(index, name):
            if path not in placed:
                placed[path] = _PlacedFile(total, shard, crc32)
                total += shard.rows
            elif placed[path].shard != shard or not np.array_equal(placed[path].crc32, crc32):
                raise ValueError(
                    f"{index.path} names {path.name} with other rows than an index before it. One "
                    "of them is of a former build. Open each, and leave out the outdated one."
                )
            starts.append(start)
            moves.append(placed[path].first_row - start)
        old_rows = index.rows_of(name)
        rows.append(old_rows + np.array(moves)[np.searchsorted(starts, old_rows, "right") - 1])
    shards = tuple(
        # A file in another folder is named with its folder.
        replace(file.shard, file=path.name if path.parent == folder else str(path.resolve()))
        for path, file in placed.items()
    )
    crc32 = np.concatenate([file.crc32 for file in placed.values()])
    array = replace(indexes[0].array(name), shards=shards)
    return _UnitedArray(array, np.concatenate(rows), crc32)


def _files(index: Index, name: str) -> Iterator[tuple[Path, int, Shard, np.ndarray]]:
    """Yield path, first row, shard and checksums of each file of an array."""
    start, folder = 0, index.path.parent.resolve()
    for shard in index.array(name).shards:
        checksums = index.crc32[name][start : start + shard.rows]
        yield folder / shard.file, start, replace(shard, file=Path(shard.file).name), checksums
        start += shard.rows


def _unite_columns(
    indexes: Sequence[Index], names: Sequence[str]
) -> tuple[dict[str, np.ndarray], tuple[str, ...] | None, dict[str, tuple[str, ...]]]:
    """Return the values of columns of all data sets, the classes, and the other texts."""
    values = {name: np.concatenate([index.columns[name] for index in indexes]) for name in names}
    classes, categories = None, {}
    if "label" in names and indexes[0].classes is not None:
        classes, values["label"] = _unite_texts(
            "label", indexes, [index.classes for index in indexes]
        )
    for name in indexes[0].categories:
        if name in names:
            texts = [index.categories[name] for index in indexes]
            categories[name], values[name] = _unite_texts(name, indexes, texts)
    return values, classes, categories


def _unite_texts(
    name: str, indexes: Sequence[Index], texts: Sequence[Sequence[str] | None]
) -> tuple[tuple[str, ...], np.ndarray]:
    """Return all texts in the order of their first appearance, and the samples' numbers of them."""
    united = {text: None for texts_of_one in texts for text in texts_of_one or ()}
    number = {text: position for position, text in enumerate(united)}
    numbers = [
        np.array([number[text] for text in texts_of_one or ()], np.int64)[index.columns[name]]
        for index, texts_of_one in zip(indexes, texts, strict=True)
    ]
    return tuple(united), np.concatenate(numbers)


def _unite_keys(indexes: Sequence[Index]) -> Keys:
    packed = [index.keys.pack() for index in indexes]
    ends = np.cumsum([0, *(len(data) for _, data in packed)])
    starts = [offsets[:-1] + end for (offsets, _), end in zip(packed, ends, strict=False)]
    offsets = np.concatenate([*starts, ends[-1:]]).astype(np.int64)
    return Keys(offsets, np.concatenate([data for _, data in packed]))


def _unite_build(indexes: Sequence[Index]) -> Mapping[str, Any]:
    """Return what is the same of all builds, how many samples they had, and their names."""
    builds = [index.build for index in indexes]
    united = {
        name: value
        for name, value in builds[0].items()
        if all(name in build and build[name] == value for build in builds)
    }
    for name in ("records", "rejected"):
        counts = [build.get(name) for build in builds]
        united.pop(name, None)
        if all(type(count) is int for count in counts):
            united[name] = sum(count for count in counts if count is not None)
    return united | {"parts": [index.path.name for index in indexes]}


def _notes(indexes: Sequence[Index], united: Index) -> Iterator[str]:
    """Yield what the user should know of a concatenation."""
    names = dict.fromkeys(name for index in indexes for name in index.columns)
    if left_out := [name for name in names if name not in united.columns]:
        yield f"columns that differ are left out: {', '.join(left_out)}"
    if united.classes is None and "label" in united.columns:
        yield "labels have no names of classes, so their numbers stay as they are"
    offsets, data = united.keys.pack()
    content, ends = data.tobytes(), offsets.tolist()
    seen, twice = set[bytes](), []
    for start, end in pairwise(ends):
        key = content[start:end]
        if key in seen:
            twice.append(os.fsdecode(key))
        seen.add(key)
    if len(twice) == 1:
        yield f"1 sample has the name of one before it: {listed(twice)}"
    elif twice:
        yield f"{len(twice):,} samples have the name of one before them: {listed(twice, 3)}"
