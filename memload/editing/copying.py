"""Writes samples anew as one data set: those of a subset, or what was put together.

``memload build all.idx packed.bin`` is to replace this module. So it stands by itself: nothing else
in this folder is used by it, but `where`.
"""

import contextlib
import os
import shutil
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from memload.building.conversion import stored_sums
from memload.building.progress import Show
from memload.building.progress import progress as progress_of
from memload.building.summary import moments
from memload.editing.columns import where as where_of
from memload.editing.destination import (
    check_not_read,
    check_output,
    is_partly_published,
    publish,
    publish_before_another,
)
from memload.editing.lock import locked
from memload.editing.writer import ShardWriter, parse_shard_size, rows_per_shard, with_shards
from memload.errors import BuildError, ChecksumError, MemloadError
from memload.machine import available_cores
from memload.storage.format import output_paths
from memload.storage.index import Array, Index, class_counts, sync
from memload.storage.shards import Shards
from memload.wording import counted, size_text

#: About how many bytes a thread reads at once.
_CHUNK_BYTES = 4 << 20
_LOCK = "lock"
#: The statistics that are computed anew.
_COMPUTED = ("mean", "std", "left_out", "mask_ids", "class_counts")

_Sums = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class EditReport:
    """The data set that was made: its index, how many samples and classes it has, and notes.

    ``classes`` is None if labels have no names. ``notes`` say what the user should know, such as
    which samples were left out. ``str(report)`` is one line.
    """

    path: Path
    samples: int
    classes: int | None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        facts = [counted(self.samples, "sample")]
        if self.classes is not None:
            facts.append(counted(self.classes, "class", "classes"))
        return f"{self.path}: {', '.join(facts)}"


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
    index = where_of(dataset, **(where or {}))
    if not len(index):
        raise ValueError(f"{index.path} has no samples that fit.")
    path = Path(output).absolute()
    index_path, _, _ = output_paths(path)
    shard_bytes = parse_shard_size(shard_size)
    copies = [_CopiedArray.of(index, array, path, shard_bytes) for array in index.arrays]
    arrays = [copied.array for copied in copies]
    check_not_read(index, path, arrays)
    pending = _index_of_copy(index, copies)
    with _temporary_folder(path.with_suffix(".copying"), path, index_path.name) as folder:
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
    classes = None if written.classes is None else len(written.classes)
    return EditReport(Path(output), len(written), classes)


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
    _clear(folder)
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
    array, rows = copied.array, _CheckedRows(index, copied.array.name)
    writer = ShardWriter(folder, array)
    writer.create(index.crc32[array.name][copied.kept])

    def read(kept: np.ndarray) -> tuple[np.ndarray, _Sums]:
        values = rows.read(kept)
        return values, _sums_of(array, values)

    chunks = min(len(copied.kept), 1 + array.rows * array.row_bytes // _CHUNK_BYTES)
    sums, rows_written = [], 0
    with contextlib.closing(writer):
        for values, sums_of_chunk in _in_order(read, np.array_split(copied.kept, chunks)):
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


class _CheckedRows:
    """The rows of one array of a data set. Reading is thread-safe.

    Opens the shards, and raises FormatError as `Shards` does.
    """

    def __init__(self, index: Index, name: str) -> None:
        self.array, self._index = index.array(name), index
        self._shards, self._crc32 = Shards(index, name), index.crc32[name]

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Return rows, ``(n, …)``. ``rows`` is int64 ``(n,)``.

        Raises ChecksumError for a row that has changed since it was written, and FormatError if a
        shard has been truncated.
        """
        values = np.empty((len(rows), *self.array.shape), self.array.descr)
        self._shards.gather(rows, values)
        for row, value in zip(rows.tolist(), values, strict=True):
            if zlib.crc32(value.data) != self._crc32[row]:
                raise self._error(row)
        return values

    def _error(self, row: int) -> ChecksumError:
        index = self._index
        sample = int(np.flatnonzero(index.rows_of(self.array.name) == row)[0])
        path = self._shards.paths[int(self.array.locate(np.array([row]))[0][0])]
        return ChecksumError(
            f"{path} is damaged: row {row} ({index.keys[sample]}) has changed since it was "
            f"written. Run 'memload verify {index.path}' to see the extent. Then restore the file, "
            "or run 'memload build' again.",
            path=path,
            rows=[row],
        )


def _in_order(function: Any, items: Any) -> Iterator[Any]:
    """Yield the results of a function in the order of the items. Threads compute a few ahead."""
    threads = available_cores()
    waiting = deque[Future[Any]]()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) > 4 * threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _temporary_folder(folder: Path, output: Path, last: str) -> Iterator[Path]:
    """Make a folder for the files of an output, yield it, and remove it with all that it holds.

    It is removed after an error, too. If the process is killed, it stays, and the next one clears
    it. ``last`` is the name of the file that is written last into the folder, and moved last out of
    it. While there is such a file, the folder stays whatever happens, so that the next process can
    move what is left. Two processes are kept apart by a lock.

    Raises FileNotFoundError if its parent is missing, FileExistsError if there is such a folder
    with other content, and BuildError if another process has it now. Any other OSError, also one of
    the body, becomes a BuildError that names the output.
    """
    if not folder.parent.is_dir():
        raise FileNotFoundError(f"{folder.parent}: there is no such folder. Make it first.")
    is_ours = (folder / _LOCK).exists() or _is_empty_folder(folder)
    if os.path.lexists(folder) and not is_ours:
        raise FileExistsError(f"{folder} is in the way. Move it, or choose another output.")
    try:
        with locked(folder):
            if not _is_complete(folder, last):
                _clear(folder)  # after a process that was killed
            try:
                yield folder
            finally:
                if not _is_complete(folder, last):
                    _clear(folder)
                    (folder / _LOCK).unlink()  # last: until then no other process begins
                    folder.rmdir()
    except MemloadError:  # some are OSErrors, too
        raise
    except OSError as error:
        raise BuildError(
            f"{output} cannot be written: {error}. Make room or mend that, then run the same "
            "command again.",
            path=output,
        ) from error


def _is_empty_folder(path: Path) -> bool:
    """Return whether a path is a folder, and no link to one, with nothing in it."""
    return path.is_dir() and not path.is_symlink() and not any(path.iterdir())


def _is_complete(folder: Path, last: str | None) -> bool:
    return last is not None and (folder / last).exists()


def _clear(folder: Path) -> None:
    """Remove all that a temporary folder holds but its lock."""
    for path in folder.iterdir():
        if path.name == _LOCK:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
