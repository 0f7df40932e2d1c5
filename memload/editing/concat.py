"""The samples of several data sets, one after another, under one index."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from memload.editing.report import EditReport, check_output, link_command, report_on
from memload.editing.statistics import combined_statistics
from memload.storage.index import Array, Index, Shard, class_counts
from memload.storage.keys import Keys
from memload.storage.shards import check_files
from memload.wording import listed, shape_text

Columns = Literal["same", "common"]


def concat(
    output: str | Path,
    *paths: str | Path,
    columns: Columns = "same",
    overwrite: bool = False,
) -> EditReport:
    """Write an index of the samples of several data sets, one after another.

    Pixels are neither read nor copied: the new index, ``output``, names the files that there are.
    All of them must lie in its folder. ``paths`` are data sets such as ``out.bin``, or indexes.
    Data sets may share pixels, as two subsets of one do.

    Classes are united by name, in the order in which they appear first, and so are the texts of
    other columns. Labels follow. Labels without names stay as they are. Columns must have the same
    names, types and shapes; with ``columns="common"``, those that differ are left out. All arrays
    must agree in shape and type. Mean and standard deviation are those of all rows together.

    Returns a report whose ``notes`` tell, for example, of names that occur twice. Raises ValueError
    for data sets that do not fit together, FileExistsError, FormatError and OSError.

    >>> memload.concat("all.idx", "out.bin", "more.bin")  # doctest: +SKIP
    """
    if not paths:
        raise ValueError("paths: there is no data set to put together. Name at least one.")
    parts = [Index.open(path) for path in paths]
    _check_folders(parts)
    target = check_output(output, parts[0].path.parent, overwrite)
    index = concatenate(parts, columns=columns)
    check_files(index)
    index.write(target)
    return report_on(target, index, list(_notes(parts, index)))


def concatenate(indexes: Sequence[Index], *, columns: Columns = "same") -> Index:
    """Return the index of the samples of several data sets, one after another. Nothing is written.

    See `concat`. Files outside the folder of the first index are named by their absolute paths.
    Such an index can be read from, but not written.
    """
    if columns not in ("same", "common"):
        raise ValueError(f"columns: {columns!r} is neither 'same' nor 'common'.")
    first = indexes[0]
    _check_arrays(indexes)
    _check_classes(indexes)
    names = _common_columns(indexes, columns)
    united = {array.name: _unite_array(array.name, indexes) for array in first.arrays}
    values, classes, categories = _unite_columns(indexes, names)
    statistics = combined_statistics(indexes)
    if classes is not None:
        statistics["class_counts"] = class_counts(values["label"], len(classes))
    row = united["image"].rows
    return Index(
        path=first.path,
        arrays=tuple(part.array for part in united.values()),
        row=row,
        other_rows={
            name: part.rows for name, part in united.items() if not np.array_equal(part.rows, row)
        },
        flags=np.concatenate([part.flags for part in indexes]),
        keys=_unite_keys(indexes),
        columns=values,
        crc32={name: part.crc32 for name, part in united.items()},
        classes=classes,
        points=tuple(name for name in first.points if name in names),
        boxes=tuple(name for name in first.boxes if name in names),
        categories=categories,
        build=_unite_build(indexes),
        statistics=statistics,
    )


# ---------------------------------------------------------------------------------- what must agree


def _check_folders(parts: Sequence[Index]) -> None:
    folder = parts[0].path.parent
    for part in parts[1:]:
        if part.path.parent.resolve() != folder.resolve():
            raise ValueError(
                f"{part.path} is not in {folder.resolve()}, as {parts[0].path.name} is. All files "
                "of an index must lie in one folder. Move the pixels and the index there, or make "
                f"hard links: '{link_command(part, folder.resolve())}'."
            )


def _check_arrays(parts: Sequence[Index]) -> None:
    """Raise ValueError unless all data sets have the same arrays."""
    first = parts[0]
    for part in parts[1:]:
        found, expected = ({array.name: array for array in p.arrays} for p in (part, first))
        for name in found.keys() ^ expected.keys():
            has, lacks = (part, first) if name in found else (first, part)
            raise ValueError(
                f"{lacks.path} has no array {name!r}, which {has.path.name} has. Add it with "
                f"'memload join', or make an index of {has.path.name} without it: "
                f"MemmapDataset({str(has.path)!r}).with_columns({name}=None).save(…)."
            )
        for name, array in found.items():
            if _facts_of(array) != _facts_of(expected[name]):
                raise ValueError(_different_arrays(part, array, first, expected[name]))


def _facts_of(array: Array) -> tuple[Any, ...]:
    return array.kind, array.descr, array.shape, array.header_bytes


def _different_arrays(part: Index, array: Array, first: Index, expected: Array) -> str:
    sizes = [f"{shape_text(a.shape)} {np.dtype(a.descr).name}" for a in (array, expected)]
    difference = (
        f"{part.path} has {sizes[0]} as {array.name!r}, but {first.path.name} has {sizes[1]}."
    )
    if sizes[0] == sizes[1]:
        if array.kind != expected.kind:
            return f"{difference[:-1]}, and one is a {array.kind}, the other a {expected.kind}."
        return (
            f"The files of {array.name!r} in {part.path} and {first.path.name} have headers of "
            f"{array.header_bytes:,} and {expected.header_bytes:,} bytes. Copy both with 'memload "
            "copy', and put the copies together."
        )
    if expected.name != "image":
        return (
            f"{difference} Build both from files of one size and type, or leave it out of both: "
            f"MemmapDataset(…).with_columns({array.name}=None).save(…)."
        )
    height, width, channels = expected.shape
    mode = "" if (array.shape[2], array.descr) == (channels, expected.descr) else " --mode …"
    return f"{difference} Build it alike: 'memload build … --size {height}x{width}{mode}'."


def _check_classes(parts: Sequence[Index]) -> None:
    """Raise ValueError if some labels have names and others do not."""
    labelled = [part for part in parts if "label" in part.columns]
    named = [part for part in labelled if part.classes is not None]
    if named and len(named) < len(labelled):
        other = next(part for part in labelled if part.classes is None)
        raise ValueError(
            f"The labels of {other.path} are numbers without names of classes, but those of "
            f"{named[0].path.name} have names. Build it with '--classes-from "
            f"{named[0].path.name}', or give it names with 'memload relabel'."
        )


def _common_columns(parts: Sequence[Index], columns: Columns) -> list[str]:
    """Return the columns that are the same everywhere.

    Raises ValueError if there are others and ``columns`` is "same".
    """
    facts = [_facts_of_columns(part) for part in parts]
    names = list(dict.fromkeys(name for found in facts for name in found))
    common = [name for name in names if len({found.get(name) for found in facts}) == 1]
    if columns == "same" and len(common) < len(names):
        differences = []
        for name in names:
            if name not in common:
                kinds = dict.fromkeys(found.get(name, "missing") for found in facts)
                examples = [parts[[f.get(name, "missing") for f in facts].index(k)] for k in kinds]
                described = (f"{k} in {p.path.name}" for k, p in zip(kinds, examples, strict=True))
                differences.append(f"{name!r} ({', '.join(described)})")
        raise ValueError(
            f"The data sets differ in columns: {'; '.join(differences)}. Leave out what differs "
            "with --columns common (columns='common' in Python), or give them the same columns "
            "with 'memload relabel'."
        )
    return common


def _facts_of_columns(part: Index) -> dict[str, str]:
    """Return what each column is in words, such as ``float32 5×2, points``."""
    facts = {}
    for name, column in part.columns.items():
        is_text = name in part.categories or (name == "label" and part.classes is not None)
        words = [column.dtype.name, *[shape_text(column.shape[1:])] * (column.ndim > 1)]
        kinds = ["points"] * (name in part.points) + ["boxes"] * (name in part.boxes)
        facts[name] = "text" if is_text else ", ".join([" ".join(words), *kinds])
    return facts


# -------------------------------------------------------------------------------------- what unites


class _UnitedArray(NamedTuple):
    """An array of all data sets, the row of each sample in it, and the checksum of each row."""

    array: Array
    rows: np.ndarray
    crc32: np.ndarray


def _unite_array(name: str, parts: Sequence[Index]) -> _UnitedArray:
    """Put the files of an array of all data sets one after another, each file once."""
    folder = parts[0].path.parent.resolve()
    known: dict[Path, tuple[int, Shard, np.ndarray]] = {}  # first row, file, checksums
    rows, total = [], 0
    for part in parts:
        moved = []  # by how much the rows of each of its files move
        for path, start, shard, crc32 in _files(part, name):
            if path not in known:
                known[path] = total, shard, crc32
                total += shard.rows
            elif known[path][1] != shard or not np.array_equal(known[path][2], crc32):
                raise ValueError(
                    f"{part.path} names {path.name} with other rows than an index before it. One "
                    "of them is of a former build. Open each, and leave out the outdated one."
                )
            moved.append(known[path][0] - start)
        starts = np.cumsum([0, *(shard.rows for shard in part.array(name).shards)])
        part_rows = part.rows_of(name)
        rows.append(part_rows + np.array(moved)[np.searchsorted(starts, part_rows, "right") - 1])
    shards = tuple(
        # A link is followed: Shards accepts those in the folder of the index alone.
        replace(shard, file=path.name if path.parent == folder else str(path.resolve()))
        for path, (_, shard, _) in known.items()
    )
    crc32 = np.concatenate([checksums for _, _, checksums in known.values()])
    array = replace(parts[0].array(name), shards=shards)
    return _UnitedArray(array, np.concatenate(rows), crc32)


def _files(part: Index, name: str) -> Iterator[tuple[Path, int, Shard, np.ndarray]]:
    """Yield path, first row, shard and checksums of each file of an array."""
    start, folder = 0, part.path.parent.resolve()
    for shard in part.array(name).shards:
        checksums = part.crc32[name][start : start + shard.rows]
        yield folder / shard.file, start, replace(shard, file=Path(shard.file).name), checksums
        start += shard.rows


def _unite_columns(
    parts: Sequence[Index], names: Sequence[str]
) -> tuple[dict[str, np.ndarray], tuple[str, ...] | None, dict[str, tuple[str, ...]]]:
    """Return the values of columns of all data sets, the classes, and the other texts."""
    values = {name: np.concatenate([part.columns[name] for part in parts]) for name in names}
    classes, categories = None, {}
    if "label" in names and parts[0].classes is not None:
        classes, values["label"] = _unite_texts("label", parts, [p.classes for p in parts])
    for name in parts[0].categories:
        if name in names:
            texts = [part.categories[name] for part in parts]
            categories[name], values[name] = _unite_texts(name, parts, texts)
    return values, classes, categories


def _unite_texts(
    name: str, parts: Sequence[Index], texts: Sequence[Sequence[str] | None]
) -> tuple[tuple[str, ...], np.ndarray]:
    """Return all texts in the order of their first appearance, and the samples' numbers of them."""
    united = {text: None for part_texts in texts for text in part_texts or ()}
    number = {text: position for position, text in enumerate(united)}
    numbers = [
        np.array([number[text] for text in part_texts or ()], np.int64)[part.columns[name]]
        for part, part_texts in zip(parts, texts, strict=True)
    ]
    return tuple(united), np.concatenate(numbers)


def _unite_keys(parts: Sequence[Index]) -> Keys:
    packed = [part.keys.pack() for part in parts]
    ends = np.cumsum([0, *(len(data) for _, data in packed)])
    starts = [offsets[:-1] + end for (offsets, _), end in zip(packed, ends, strict=False)]
    offsets = np.concatenate([*starts, ends[-1:]]).astype(np.int64)
    return Keys(offsets, np.concatenate([data for _, data in packed]))


def _unite_build(parts: Sequence[Index]) -> Mapping[str, Any]:
    """Return what is the same of all builds, how many samples they had, and their names."""
    builds = [part.build for part in parts]
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
    return united | {"parts": [part.path.name for part in parts]}


def _notes(parts: Sequence[Index], index: Index) -> Iterator[str]:
    """Yield what the user should know of a concatenation."""
    names = dict.fromkeys(name for part in parts for name in part.columns)
    if left_out := [name for name in names if name not in index.columns]:
        yield f"columns that differ are left out: {', '.join(left_out)}"
    if index.classes is None and "label" in index.columns:
        yield "labels have no names of classes, so their numbers stay as they are"
    offsets, data = index.keys.pack()
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
