"""Describe and verify a finished data set."""

import functools
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from memload.building.status import build_status
from memload.errors import ChecksumError, FormatError, MissingError
from memload.machine import available_cores
from memload.storage.format import FLAG_FALLBACK, FLAG_ORIENTED, FLAG_OUTSIDE
from memload.storage.index import Array, Index, Shard
from memload.storage.shards import check_header, check_shard

#: Bytes that a thread of `verify` reads at a time: enough for the full speed of any disk.
_READ = 8 << 20


def info(path: str | Path) -> dict[str, Any]:
    """Return a description of a data set that can be written as JSON.

    ``"index"`` is the index file. ``"rows"``, ``"shape"`` and ``"dtype"`` are those of the images,
    and ``"arrays"`` has them for every array. ``"bytes"`` and ``"shards"`` are of all arrays
    together. The files of pixels have to exist and to have the right sizes, but they are not read:
    see `verify`.

    Args:
        path: The data set, such as ``"out.bin"``, or an index.

    Raises FormatError if a file is missing or damaged, and MissingError while the data set is being
    built: see `build_status`.

    >>> memload.info("out.bin")["samples"]
    1281167
    >>> memload.info("out.bin")["arrays"]["mask"]["shape"]
    [256, 256]
    """
    try:
        index = Index.open(path)
    except MissingError as error:
        status = build_status(path)
        raise MissingError(str(status or error), path=path) from None
    image = index.image
    for array in index.arrays:
        for shard in array.shards:
            check_shard(index.path.parent / shard.file, shard, array)
    categories = {name: list(texts) for name, texts in index.categories.items()}
    counts = {
        name: np.bincount(index.columns[name], minlength=len(texts)).tolist()
        for name, texts in categories.items()
    }
    flags = {"oriented": FLAG_ORIENTED, "fallback": FLAG_FALLBACK, "points_outside": FLAG_OUTSIDE}
    return {
        "path": str(path),
        "index": str(index.path),
        "format_version": index.format_version,
        "fingerprint": index.fingerprint,
        "samples": len(index),
        "rows": image.rows,
        "rejected": index.build.get("rejected", 0),
        "shape": list(image.shape),
        "dtype": np.dtype(image.descr).name,
        "bytes": index.data_bytes,
        "shards": [shard.file for shard in index.shards],
        "arrays": {array.name: _array_facts(array) for array in index.arrays},
        "columns": {name: _column_facts(index, name) for name in index.columns},
        "classes": None if index.classes is None else list(index.classes),
        **({"categories": categories, "category_counts": counts} if categories else {}),
        "flags": {name: int(np.count_nonzero(index.flags & bit)) for name, bit in flags.items()},
        "statistics": dict(index.statistics),
        "build": dict(index.build),
    }


def _column_facts(index: Index, name: str) -> dict[str, Any]:
    column = index.columns[name]
    return {
        "dtype": column.dtype.name,
        "shape": list(column.shape),
        "points": name in index.points,
        "boxes": name in index.boxes,
    }


def _array_facts(array: Array) -> dict[str, Any]:
    return {
        "kind": array.kind,
        "shape": list(array.shape),
        "dtype": np.dtype(array.descr).name,
        "rows": array.rows,
        "bytes": array.data_bytes,
        "files": [shard.file for shard in array.shards],
    }


@dataclass(frozen=True)
class DamagedFile:
    """A file some of whose rows differ from their checksums."""

    array: str  #: the name of the array, such as ``mask``
    file: str  #: such as ``out.mask.bin``, in the folder of the index
    rows: int  #: all rows of the file
    bad_rows: Sequence[int]  #: their numbers in the array, which go through all of its files
    bad_keys: Sequence[str]  #: the samples that use these rows


@dataclass(frozen=True)
class VerifyReport:
    """What `verify` found."""

    path: Path  #: the index
    rows: int  #: of all arrays together
    bytes: int  #: read and compared
    problems: Sequence[str]  #: files that are missing, unreadable or of the wrong size
    bad_rows: Sequence[int]  #: rows, of any array, whose bytes differ from their checksums
    bad_keys: Sequence[str]  #: the samples that use these rows
    damaged: Sequence[DamagedFile] = ()  #: the files with these rows

    @property
    def ok(self) -> bool:
        """Whether all files are as they were written."""
        return not self.problems and not self.bad_rows

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON has it, with the path as ``"index"``."""
        damaged = [vars(file) for file in self.damaged]
        facts = {"ok": self.ok, **vars(self), "damaged": damaged, "index": str(self.path)}
        del facts["path"]
        return facts

    def __repr__(self) -> str:
        found = "all as they were written"
        if not self.ok:
            changed = sum(len(file.bad_rows) for file in self.damaged)
            found = f"{changed:,} of them changed, {len(self.problems):,} problems"
        return f"VerifyReport({self.path}: {self.rows:,} rows, {self.bytes:,} bytes, {found})"


class _RowRange(NamedTuple):
    """Some consecutive rows of a shard."""

    array: Array
    shard: Shard
    start: int  #: number of the first row within the shard
    first: int  #: number of the same row within the array
    checksums: np.ndarray  #: what the index says of these rows

    @property
    def bytes(self) -> int:
        """The size of the rows."""
        return len(self.checksums) * self.array.row_bytes


def verify(path: str | Path, *, num_threads: int | None = None) -> VerifyReport:
    """Read all files of a data set and compare them with the checksums in its index.

    These are the files of all arrays. Does not stop at the first error.

    Args:
        path: The data set, such as ``"out.bin"``, or an index.
        num_threads: How many threads read, by default one for each core. Each takes 8 MB of memory,
            or one row if that is larger.

    Returns a report: ``ok``, ``problems`` with files, ``bad_rows``, and ``bad_keys``, the samples
    of these rows. Raises FormatError if the index itself is unusable.

    >>> memload.verify("out.bin").ok
    True
    """
    index = Index.open(path)
    index.keys.pack()  # which reads and checks the names
    problems: list[str] = []
    ranges = [rows for array in index.arrays for rows in _row_ranges(index, array, problems)]
    bad: dict[tuple[str, Shard], list[int]] = {}
    with ThreadPoolExecutor(num_threads or available_cores()) as pool:
        compared = pool.map(functools.partial(_bad_rows, index.path.parent), ranges)
        for compared_range, (rows, problem) in zip(ranges, compared, strict=True):
            problems += problem
            if rows:
                file = compared_range.array.name, compared_range.shard
                bad.setdefault(file, []).extend(rows)
    damaged, samples = [], set[int]()
    for (name, shard), rows in bad.items():
        using = np.flatnonzero(np.isin(index.rows_of(name), rows)).tolist()
        keys = [index.keys[sample] for sample in using]
        damaged.append(DamagedFile(name, shard.file, shard.rows, rows, keys))
        samples.update(using)
    return VerifyReport(
        path=index.path,
        rows=sum(array.rows for array in index.arrays),
        bytes=sum(rows.bytes for rows in ranges),
        problems=problems,
        bad_rows=sorted({row for file in damaged for row in file.bad_rows}),
        bad_keys=[index.keys[sample] for sample in sorted(samples)],
        damaged=damaged,
    )


def _row_ranges(index: Index, array: Array, problems: list[str]) -> Iterator[_RowRange]:
    """Yield the rows of an array to compare. Adds what is wrong with its files to ``problems``."""
    first, step = 0, max(1, _READ // array.row_bytes)
    for shard in array.shards:
        checksums = index.crc32[array.name][first : first + shard.rows]
        starts = range(0, shard.rows, step)
        try:
            _check_file(index.path.parent / shard.file, shard, array, checksums, index.path.name)
        except FormatError as error:
            problems.append(str(error))
            if not isinstance(error, ChecksumError):
                starts = range(0)
            # Otherwise it is a shard of another build: its rows are compared all the same.
        for start in starts:
            yield _RowRange(array, shard, start, first + start, checksums[start : start + step])
        first += shard.rows


def _check_file(
    file: Path, shard: Shard, array: Array, checksums: np.ndarray, index_name: str
) -> None:
    check_shard(file, shard, array)
    try:
        with file.open("rb") as opened:
            header = opened.read(array.header_bytes)
    except OSError as error:
        raise FormatError(f"{file} cannot be read: {error.strerror}", path=file) from error
    check_header(file, header, shard, array, checksums, index_name)


def _bad_rows(folder: Path, compared: _RowRange) -> tuple[list[int], list[str]]:
    """Return the rows of a range that differ from their checksums, and why any cannot be read."""
    path, row_bytes = folder / compared.shard.file, compared.array.row_bytes
    rows = range(compared.first, compared.first + len(compared.checksums))
    try:
        with path.open("rb") as file:  # not a map: there, a disk error would be a SIGBUS
            file.seek(int(compared.array.locate(np.array([rows[0]]))[1][0]))
            block = memoryview(file.read(compared.bytes))
        if len(block) < compared.bytes:
            raise OSError("the file ends too early")
    except OSError as error:
        reason = error.strerror or str(error)
        return list(rows), [f"{path}: rows {rows[0]} to {rows[-1]} cannot be read: {reason}"]
    found = [zlib.crc32(block[at : at + row_bytes]) for at in range(0, len(block), row_bytes)]
    return [rows[at] for at in np.flatnonzero(found != compared.checksums).tolist()], []
