"""Writes samples anew as one data set: those of a subset, or what was put together."""

import contextlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from memload.building.conversion import stored_sums
from memload.building.progress import Show
from memload.building.progress import progress as progress_of
from memload.building.summary import moments
from memload.editing.aside import clear, temporary_folder
from memload.editing.destination import (
    check_not_read,
    check_output,
    is_partly_published,
    publish,
    publish_before_another,
)
from memload.editing.report import EditReport, report_on
from memload.editing.selected import CheckedRows, select
from memload.editing.threads import in_order
from memload.editing.writer import ShardWriter, parse_shard_size, rows_per_shard, with_shards
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
    shard_size: int | str | None = None,
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
    output, ``output.copying``, and renamed once all are complete, the index last. A copy that was
    stopped does not open. Run it again: it goes on if it was renaming files, and begins anew
    otherwise. With ``overwrite``, an existing ``output`` stays until the copy is complete.

    Returns an `EditReport`. Raises ValueError, FormatError, ChecksumError for a row that has
    changed since it was written, and BuildError if the output exists already, is read from, or
    cannot be written, for example because the disk is full. The temporary folder is removed then,
    unless it holds a complete copy.

    >>> memload.copy("all.idx", "packed.bin")  # doctest: +SKIP
    >>> memload.copy("out.bin", "cats.bin", where={"label": "cat"})  # doctest: +SKIP
    """
    index = select(dataset, where)
    path = Path(output).absolute()
    index_path, _, _ = output_paths(path)
    shard_bytes = parse_shard_size(shard_size)
    copies = [_CopiedArray.of(index, array, path, shard_bytes) for array in index.arrays]
    arrays = [copied.array for copied in copies]
    check_not_read(index, path, arrays)
    pending = _index_of_copy(index, copies)
    with temporary_folder(path.with_suffix(".copying"), path, index_path.name) as folder:
        written = _written_before(pending, folder, path, overwrite)
        if written is None or not is_partly_published(written, folder):
            check_output(path, arrays, overwrite)
        if written is None:
            _check_space(path, arrays)
            total = sum(len(copied.kept) for copied in copies)
            with progress_of(path.name, total, progress, "rows") as show:
                statistics = {
                    copied.array.name: _copy_rows(copied, index, folder, show) for copied in copies
                }
            written = _with_statistics(pending, statistics).write(folder / index_path.name)
        publish(written, folder, path, overwrite)
    return report_on(Path(output), written, ())


def _written_before(pending: Index, folder: Path, output: Path, overwrite: bool) -> Index | None:
    """Return the index of this copy if it is complete in the folder, and was not published.

    If another copy lies there, finish publishing it if that had begun, then clear the folder.
    """
    path = folder / output_paths(output)[0].name
    if not path.exists():
        return None
    written = Index.read(path)
    same = replace(pending, statistics=written.statistics).identified()
    if same.fingerprint == written.fingerprint:
        return written
    publish_before_another(written, folder, output, overwrite)
    clear(folder)
    return None


class _CopiedArray(NamedTuple):
    """An array of the copy, and which rows of the source it has."""

    array: Array
    kept: np.ndarray  #: rows of the source, int64 ``(rows,)``, in the order of their first use
    rows: np.ndarray  #: the row of each sample in the copy, int64 ``(n,)``

    @classmethod
    def of(
        cls, index: Index, source: Array, output: Path, shard_size: int | None
    ) -> "_CopiedArray":
        """Raises ValueError if a shard has no room for a row."""
        used, first, position = np.unique(
            index.rows_of(source.name), return_index=True, return_inverse=True
        )
        order = np.argsort(first)
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        limit = rows_per_shard([source], shard_size)
        array = with_shards(source, output, len(used), limit)
        return cls(array, used[order], rank[position])


def _check_space(output: Path, arrays: Sequence[Array]) -> None:
    needed = sum(shard.bytes for array in arrays for shard in array.shards)
    free = shutil.disk_usage(output.parent).free
    if needed > free:
        raise BuildError(
            f"{output.name} needs {size_text(needed)}, but the disk has {size_text(free)} free. "
            "Make room, or choose another disk.",
            path=output,
        )


def _copy_rows(copied: _CopiedArray, index: Index, folder: Path, show: Show) -> dict[str, Any]:
    """Write the shards of an array into a folder. Returns the statistics of its values."""
    array, rows = copied.array, CheckedRows(index, copied.array.name)
    writer = ShardWriter(folder, array)
    writer.create(index.crc32[array.name][copied.kept])

    def read(kept: np.ndarray) -> tuple[np.ndarray, _Sums]:
        values = rows.read(kept)
        return values, _sums_of(array, values)

    chunks = min(len(copied.kept), 1 + array.rows * array.row_bytes // _CHUNK_BYTES)
    sums, rows_written = [], 0
    with contextlib.closing(writer):
        for values, sums_of_chunk in in_order(read, np.array_split(copied.kept, chunks)):
            for row, value in enumerate(values, rows_written):
                writer.write(row, value.tobytes())
            rows_written += len(values)
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


def _index_of_copy(index: Index, copies: Sequence[_CopiedArray]) -> Index:
    """Return the index of the copy, with those statistics that are not computed from its rows."""
    rows = {copied.array.name: copied.rows for copied in copies}
    statistics = {name: value for name, value in index.statistics.items() if name not in _COMPUTED}
    if index.classes is not None:
        statistics["class_counts"] = class_counts(index.columns["label"], len(index.classes))
    return replace(
        index,
        arrays=tuple(copied.array for copied in copies),
        row=rows["image"],
        other_rows={
            name: row for name, row in rows.items() if not np.array_equal(row, rows["image"])
        },
        crc32={copied.array.name: index.crc32[copied.array.name][copied.kept] for copied in copies},
        build={**index.build, "rejected": 0},
        statistics=statistics,
    )


def _with_statistics(index: Index, statistics: Mapping[str, Any]) -> Index:
    """Return the index with the statistics of the rows of each array."""
    ids = {name: entry["ids"] for name, entry in statistics.items() if "ids" in entry}
    computed = statistics["image"] | ({"mask_ids": ids} if ids else {})
    return replace(index, statistics=index.statistics | computed)
