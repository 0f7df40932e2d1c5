"""The samples of several data sets, one after another, under one index."""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np

from memload.editing.columns import replace_columns
from memload.editing.index_files import index_of
from memload.storage.index import Array, Index, Shard
from memload.storage.keys import Keys
from memload.wording import counted, listed, shape_text

logger = logging.getLogger("memload")


def concat(*datasets: Any, columns: Literal["same", "common"] = "same") -> Index:
    """Return an index of the samples of several data sets, one after another.

    Pixels are neither read nor copied: the index names the files that there are, each once. It can
    be written if all of them lie in the folder of the first.

    Classes are united by name, in the order in which they appear first, and so are the texts of
    other columns. Labels follow. Labels without names stay as they are. All arrays must agree in
    shape and type. Mean and standard deviation are combined; a subset counts with those of the data
    set that it was taken from. The logger ``memload`` warns of names that occur twice.

    Args:
        datasets: Paths such as ``"out.bin"``, `MemmapDataset` objects, which may be views, or
            indexes.
        columns: ``"same"``: the columns must have the same names, types and shapes. ``"common"``:
            those that differ are left out.

    Raises ValueError for data sets that do not fit together, and FormatError.

    >>> memload.concat("out.bin", "more.bin").write("all.idx")  # doctest: +SKIP
    """
    if not datasets:
        raise ValueError("datasets: there is none to put together. Name at least one.")
    if columns not in ("same", "common"):
        raise ValueError(f"columns: {columns!r} is neither 'same' nor 'common'.")
    indexes = [index_of(dataset) for dataset in datasets]
    united = concatenate(indexes, () if columns == "common" else None)
    left_out = sorted({name for index in indexes for name in index.columns} - {*united.columns})
    if left_out:
        logger.warning(f"columns that differ are left out: {listed(left_out)}")
    if united.classes is None and "label" in united.columns:
        logger.warning("labels have no names of classes, so their numbers stay as they are")
    counts = Counter(united.keys)
    if twice := len(united) - len(counts):
        examples = listed((key for key, count in counts.items() if count > 1), 3)
        logger.warning(f"{counted(twice, 'name')} had a sample before: {examples}")
    return united


def concatenate(indexes: Sequence[Index], required: Sequence[str] | None = None) -> Index:
    """Return the index of the samples of several indexes, one after another. See `concat`.

    Files outside the folder of the first index are named by their absolute paths. Such an index can
    be read from, but not written.

    Args:
        indexes: The indexes.
        required: The columns that must be the same, by default all. Others that differ are left
            out.

    Raises ValueError.
    """
    first, names = indexes[0], _common_columns(indexes, required)
    values, texts = {}, {}
    for name in names:
        if name in first.texts:
            texts[name], values[name] = _unite_texts(name, indexes)
        else:
            values[name] = np.concatenate([index.columns[name] for index in indexes])
    arrays = [_unite_array(array.name, indexes) for array in first.arrays]
    rows = {array.name: rows for array, rows, _ in arrays}
    images = rows["image"]
    united = replace(
        first,
        arrays=tuple(array for array, _, _ in arrays),
        row=images,
        other_rows={name: own for name, own in rows.items() if not np.array_equal(own, images)},
        flags=np.concatenate([index.flags for index in indexes]),
        keys=_unite_keys(indexes),
        crc32={array.name: crc32 for array, _, crc32 in arrays},
        build={"settings": _common_settings(indexes)},
        statistics=_unite_statistics(indexes),
    )
    return replace_columns(united, values, texts, names)


# ---------------------------------------------------------------------------------- what must agree


def _common_columns(indexes: Sequence[Index], required: Sequence[str] | None) -> list[str]:
    """Return the columns that are the same everywhere.

    Raises ValueError if arrays differ, or columns that must not.
    """
    facts = [_facts(index) for index in indexes]
    names = dict.fromkeys(chain(*facts))
    arrays = {array.name for index in indexes for array in index.arrays}
    found = {name: [each.get(name, "missing") for each in facts] for name in names}
    differing = [name for name in names if len({*found[name]}) > 1]
    common = [name for name in names if name not in {*arrays, *differing}]
    for name in differing:
        if required is None or name in {*arrays, *required}:
            files = (
                f"{what} in {i.path.name}" for what, i in zip(found[name], indexes, strict=True)
            )
            raise ValueError(
                f"The data sets differ in {name!r}: {listed(files)}. Build or relabel them alike, "
                "or leave out columns that differ: --columns common (columns='common'); of a "
                f"Loader or a MemmapDataset, columns={common!r:.200}."
            )
    return common


def _facts(index: Index) -> dict[str, str]:
    """Return what each array and column holds, in words, such as ``float32 5×2 points``."""
    facts = {}
    for array in index.arrays:
        numbers = f"{np.dtype(array.descr).name} {shape_text(array.shape)}"
        facts[array.name] = f"{array.kind} {numbers} behind {array.header_bytes:,} bytes"
    for name, column in index.columns.items():
        kind = "points" * (name in index.points) + "boxes" * (name in index.boxes)
        numbers = f"{column.dtype.name} {shape_text(column.shape[1:])} {kind}"
        facts[name] = "text" if name in index.texts else numbers.strip()
    return facts


# -------------------------------------------------------------------------------------- what unites


def _unite_array(name: str, indexes: Sequence[Index]) -> tuple[Array, np.ndarray, np.ndarray]:
    """Return an array of all data sets, the row of each sample in it, and the CRC-32 of each row.

    The files follow one after another, each once. If two data sets have rows in ``a`` and ``b``,
    and in ``b`` and ``c``, those of ``c`` move::

        first data set    a: 0 1 2   b: 3 4
        second data set              b: 0 1   c: 2 3 4
        united            a: 0 1 2   b: 3 4   c: 5 6 7
    """
    folder = indexes[0].path.parent.resolve()
    placed: dict[Path, tuple[int, Shard, np.ndarray]] = {}
    rows, total = [], 0
    for index in indexes:
        array, old_rows, moves = index.array(name), index.rows_of(name), []
        parts = np.split(index.crc32[name], array.starts[1:-1])
        for shard, start, crc32 in zip(array.shards, array.starts.tolist(), parts, strict=False):
            path = index.path.parent.resolve() / shard.file
            # A file in another folder is named with its folder.
            named = replace(shard, file=path.name if path.parent == folder else str(path))
            first_row, known, known_crc32 = placed.setdefault(path, (total, named, crc32))
            if known != named or not np.array_equal(known_crc32, crc32):
                raise ValueError(
                    f"{index.path} names {path.name} with other rows than an index before it. One "
                    "of them is of a former build. Open each, and leave out the outdated one."
                )
            total = max(total, first_row + shard.rows)
            moves.append(first_row - start)
        rows.append(old_rows + np.array(moves)[array.shard_of(old_rows)])
    _, shards, checksums = zip(*placed.values(), strict=True)
    array = replace(indexes[0].array(name), shards=shards)
    return array, np.concatenate(rows), np.concatenate(checksums)


def _unite_texts(name: str, indexes: Sequence[Index]) -> tuple[tuple[str, ...], np.ndarray]:
    """Return all texts in the order of their first appearance, and the samples' numbers of them."""
    number: dict[str, int] = {}
    columns = []
    for index in indexes:
        numbers = [number.setdefault(text, len(number)) for text in index.texts[name]]
        columns.append(np.array(numbers, np.int64)[index.columns[name]])
    return tuple(number), np.concatenate(columns)


def _unite_keys(indexes: Sequence[Index]) -> Keys:
    offsets, data = zip(*(index.keys.pack() for index in indexes), strict=True)
    sizes = np.concatenate([np.diff(part) for part in offsets])
    return Keys(np.cumsum([0, *sizes], dtype=np.int64), np.concatenate(data))


def _common_settings(indexes: Sequence[Index]) -> dict[str, Any]:
    """Return the settings that all builds had. What else is noted of a build is of one alone."""
    settings = indexes[0].build.get("settings", {})
    return {
        name: value
        for name, value in settings.items()
        if all(index.setting(name) == value for index in indexes)
    }


def _unite_statistics(indexes: Sequence[Index]) -> dict[str, Any]:
    """Return mean and standard deviation of each channel. No row is read.

    They are exact for whole data sets. A subset has those of the data set that it was taken from;
    they count with the number of rows that its samples use.
    """
    statistics, united = [index.statistics for index in indexes], dict[str, Any]()
    rows = [len(np.unique(index.row)) for index in indexes]
    if any(rows) and all("std" in each for each in statistics):
        means, deviations = (np.array([each[n] for each in statistics]) for n in ("mean", "std"))
        mean = np.average(means, axis=0, weights=rows)
        variance = np.average(deviations**2 + (means - mean) ** 2, axis=0, weights=rows)
        united |= {"mean": mean.tolist(), "std": np.sqrt(variance).tolist()}
    return united
