"""Writes samples anew as one data set: those of a subset, or what was put together."""

import contextlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from memload.building.conversion import stored_sums
from memload.building.destination import check_output, publish
from memload.building.progress import Show
from memload.building.progress import progress as progress_of
from memload.building.statistics import moments
from memload.building.writer import ShardWriter, rows_per_shard, with_shards
from memload.editing.aside import temporary_folder
from memload.editing.report import EditReport, report_on
from memload.editing.selected import CheckedRows, select
from memload.editing.threads import in_order
from memload.errors import BuildError
from memload.storage.format import output_paths
from memload.storage.index import Array, Index, class_counts, sync
from memload.wording import size_text

#: About how many bytes a thread reads at once.
_CHUNK_BYTES = 4 << 20
#: The statistics that are computed anew.
_COMPUTED = ("mean", "std", "left_out", "mask_ids", "class_counts")

_Sums = tuple[np.ndarray, ...]


def copy(
    dataset: Any,
    output: str | Path,
    *,
    where: Mapping[str, Any] | None = None,
    shard_size: int | None = None,
    overwrite: bool = False,
    progress: bool | None = None,
) -> EditReport:
    """Write the samples of a data set anew as one data set, ``output`` and its index.

    ``dataset`` is a path such as ``"all.idx"``, or a `memload.MemmapDataset`, which may be a view.
    ``where`` takes only some of its samples, as `MemmapDataset.where` does. So a subset, or what
    `memload.concat` and `memload.join` have put together, gets files of its own, without the rows
    of others.

    Rows are written in the order of the samples. Samples that share a row share its copy. Keys,
    labels, columns and classes stay, and so do arrays: ``mask`` becomes ``output.mask.bin``. Mean
    and standard deviation are computed over the rows that are copied; the sizes of the sources
    stay those of the whole data set. ``shard_size`` and ``progress`` are those of `memload.build`.

    Each row is compared with its checksum. Files are written into a temporary folder beside the
    output, and renamed, the index last, so that what is cut short passes for nothing. With
    ``overwrite``, an existing ``output`` is replaced in the end.

    Returns an `EditReport`. Raises ValueError, FormatError, ChecksumError for a row that has
    changed since it was written, BuildError if the output exists already, or is read from, or does
    not fit on the disk, and OSError. The temporary folder is removed then.

    >>> memload.copy("all.idx", "packed.bin")  # doctest: +SKIP
    >>> memload.copy("out.bin", "cats.bin", where={"label": "cat"})  # doctest: +SKIP
    """
    index = select(dataset, where)
    path = Path(output).absolute()
    index_path, _, _ = output_paths(path)
    parts = [_Part.of(index, array, path, shard_size) for array in index.arrays]
    _check_not_read(index, index_path, parts)
    arrays = [part.array for part in parts]
    with temporary_folder(path.with_suffix(".copying")) as folder:
        check_output(path, arrays, overwrite)
        _check_space(path, arrays)
        total = sum(len(part.kept) for part in parts)
        with progress_of(path.name, total, progress, "rows") as show:
            statistics = {part.array.name: _copy_rows(part, index, folder, show) for part in parts}
        copied = _copied(index, parts, statistics).write(folder / index_path.name)
        publish(copied, folder, path, overwrite)
    return report_on(Path(output), copied, ())


class _Part(NamedTuple):
    """An array of the copy: which rows it keeps, and which of them each sample uses."""

    source: Array
    array: Array
    kept: np.ndarray  #: rows of the source, int64 ``(rows,)``, in the order of their first use
    rows: np.ndarray  #: the row of each sample in the copy, int64 ``(n,)``

    @classmethod
    def of(cls, index: Index, source: Array, output: Path, shard_size: int | None) -> "_Part":
        """Raises ValueError if a shard has no room for a row."""
        used, first, position = np.unique(
            index.rows_of(source.name), return_index=True, return_inverse=True
        )
        order = np.argsort(first)
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        limit = rows_per_shard(source, shard_size)
        array = with_shards(source, output, len(used), limit)
        return cls(source, array, used[order], rank[position])


def _check_not_read(index: Index, output: Path, parts: Sequence[_Part]) -> None:
    """Raise BuildError if the copy would replace files that it is read from.

    If it were stopped while files are renamed, neither data set would be whole.
    """
    read = {index.path.parent / shard.file for array in index.arrays for shard in array.shards}
    written = {output.parent / shard.file for part in parts for shard in part.array.shards}
    resolved = {path.resolve() for path in (*read, index.path)}
    if both := sorted(path for path in (*written, output) if path.resolve() in resolved):
        raise BuildError(
            f"{both[0]} is read from, and cannot be replaced. Choose another output, and use "
            "'memload rename' afterwards.",
            path=output,
        )


def _check_space(output: Path, arrays: Sequence[Array]) -> None:
    needed = sum(shard.bytes for array in arrays for shard in array.shards)
    free = shutil.disk_usage(output.parent).free
    if needed > free:
        raise BuildError(
            f"{output.name} needs {size_text(needed)}, but the disk has {size_text(free)} free. "
            "Make room, or choose another disk.",
            path=output,
        )


def _copy_rows(part: _Part, index: Index, folder: Path, show: Show) -> dict[str, Any]:
    """Write the shards of an array into a folder. Returns the statistics of its values."""
    array, rows = part.array, CheckedRows(index, part.array.name)
    writer = ShardWriter(folder, array)
    writer.create(index.crc32[array.name][part.kept])

    def read(kept: np.ndarray) -> tuple[np.ndarray, _Sums]:
        values = rows.read(kept)
        return values, _sums_of(array, values)

    chunks = min(len(part.kept), 1 + array.rows * array.row_bytes // _CHUNK_BYTES)
    sums, written = [], 0
    with contextlib.closing(writer):
        for values, sums_of_chunk in in_order(read, np.array_split(part.kept, chunks)):
            for row, value in enumerate(values, written):
                writer.write(row, value.tobytes())
            written += len(values)
            sums.append(sums_of_chunk)
            show(len(values), None)
    for shard in array.shards:
        sync(folder / shard.file)
    return _statistics_of(array, sums)


def _sums_of(array: Array, values: np.ndarray) -> _Sums:
    """Return the sums of some rows: two of each image, or which ids masks of uint8 have."""
    if array.kind == "image":
        total, squares = zip(*map(stored_sums, values), strict=True)
        return np.array(total), np.array(squares)
    if array.kind == "mask" and array.descr == "|u1":
        return (np.bincount(values.reshape(-1), minlength=256)[None] > 0,)
    return ()


def _statistics_of(array: Array, sums: Sequence[_Sums]) -> dict[str, Any]:
    columns = [np.concatenate(parts) for parts in zip(*sums, strict=True)]
    if array.kind == "image":
        return moments(columns[0], columns[1], array)
    return {"ids": np.flatnonzero(columns[0].any(axis=0)).tolist()} if columns else {}


def _copied(index: Index, parts: Sequence[_Part], statistics: Mapping[str, Any]) -> Index:
    """Return the index of the copy. ``statistics`` are those of each array."""
    rows = {part.array.name: part.rows for part in parts}
    kept = {name: value for name, value in index.statistics.items() if name not in _COMPUTED}
    ids = {name: entry["ids"] for name, entry in statistics.items() if "ids" in entry}
    if ids:
        kept["mask_ids"] = ids
    if index.classes is not None:
        kept["class_counts"] = class_counts(index.columns["label"], len(index.classes))
    return replace(
        index,
        arrays=tuple(part.array for part in parts),
        row=rows["image"],
        other_rows={
            name: row for name, row in rows.items() if not np.array_equal(row, rows["image"])
        },
        crc32={part.array.name: index.crc32[part.array.name][part.kept] for part in parts},
        build={**index.build, "rejected": 0},
        statistics=kept | statistics["image"],
    )
