"""Describe and verify a finished data set."""

import functools
import zlib
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from memload.errors import ChecksumError, FormatError
from memload.machine import available_cores
from memload.storage.format import FLAG_FALLBACK, FLAG_ORIENTED, FLAG_OUTSIDE
from memload.storage.index import Array, Index, class_counts
from memload.storage.shards import check_header, check_shard

#: Bytes that a thread of `verify` reads at a time: enough for the full speed of any disk.
_READ = 8 << 20


def info(path: str | Path) -> dict[str, Any]:
    """Return a description of a data set that can be written as JSON.

    ``"index"`` is the index file. ``"rows"``, ``"shape"`` and ``"dtype"`` are those of the images,
    and ``"arrays"`` has them for every array, with its files. ``"bytes"`` are those of all arrays
    together. The files of pixels have to exist and to have the right sizes, but they are not read:
    see `verify`.

    Args:
        path: The data set, such as ``"out.bin"``, or an index.

    Raises FormatError if a file is damaged, and MissingError if one is missing, as while the data
    set is being built: see `build_status`.

    >>> memload.info("out.bin")["samples"]
    1281167
    >>> memload.info("out.bin")["arrays"]["mask"]["shape"]
    [256, 256]
    """
    index = Index.open(path)
    image = index.image
    for array in index.arrays:
        for shard in array.shards:
            check_shard(index.path.parent / shard.file, shard, array)
    categories = {name: list(texts) for name, texts in index.categories.items()}
    counts = {
        name: class_counts(index.columns[name], len(texts)) for name, texts in categories.items()
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
        "arrays": {array.name: _array_facts(array) for array in index.arrays},
        "columns": {
            name: {
                "dtype": column.dtype.name,
                "shape": list(column.shape),
                "points": name in index.points,
                "boxes": name in index.boxes,
            }
            for name, column in index.columns.items()
        },
        "classes": None if index.classes is None else list(index.classes),
        **({"categories": categories, "category_counts": counts} if categories else {}),
        "flags": {name: int(np.count_nonzero(index.flags & bit)) for name, bit in flags.items()},
        "statistics": dict(index.statistics),
        "build": dict(index.build),
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
    bytes: int  #: of these rows
    problems: Sequence[str]  #: files that are missing, unreadable or of the wrong size
    damaged: Sequence[DamagedFile]  #: the files with rows that differ from their checksums

    @property
    def ok(self) -> bool:
        """Whether all files are as they were written."""
        return not self.problems and not self.damaged

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON has it, with the path as ``"index"``."""
        facts = asdict(self)
        return {"ok": self.ok, "index": str(facts.pop("path")), **facts}


def verify(path: str | Path, *, num_threads: int | None = None) -> VerifyReport:
    """Read all files of a data set and compare them with the checksums in its index.

    These are the files of all arrays. Does not stop at the first error.

    Args:
        path: The data set, such as ``"out.bin"``, or an index.
        num_threads: How many threads read, by default one for each core. Each takes 8 MB of memory,
            or one row if that is larger.

    Returns a report: ``ok``, ``problems`` with files, and ``damaged``, the files with their
    ``bad_rows`` and ``bad_keys``, the samples of these rows. Raises FormatError if the index itself
    is unusable.

    >>> memload.verify("out.bin").ok
    True
    """
    index = Index.open(path)
    index.keys.pack()  # which reads and checks the names
    problems: list[str] = []
    damaged = []
    with ThreadPoolExecutor(num_threads or available_cores()) as pool:
        for array in index.arrays:
            for number, shard in enumerate(array.shards):
                found, rows = _verify_shard(index, array, number, pool)
                problems += found
                if rows:
                    using = np.flatnonzero(np.isin(index.rows_of(array.name), rows))
                    keys = list(index.keys.take(using))
                    damaged.append(DamagedFile(array.name, shard.file, shard.rows, rows, keys))
    return VerifyReport(
        path=index.path,
        rows=sum(array.rows for array in index.arrays),
        bytes=sum(array.rows * array.row_bytes for array in index.arrays),
        problems=problems,
        damaged=damaged,
    )


def _verify_shard(
    index: Index, array: Array, number: int, pool: Executor
) -> tuple[list[str], list[int]]:
    """Return what is wrong with a file, and which rows of the array differ from their checksums."""
    shard, (first, stop) = array.shards[number], array.starts[number : number + 2].tolist()
    file, checksums = index.path.parent / shard.file, index.crc32[array.name][first:stop]
    problems: list[str] = []
    bad_rows: list[int] = []
    try:
        check_shard(file, shard, array)
        with file.open("rb") as opened:
            header = opened.read(array.header_bytes)
        check_header(file, header, shard, array, checksums, index.path.name)
    except ChecksumError as error:
        problems.append(str(error))  # a shard of another build: its rows are compared all the same
    except FormatError as error:
        return [str(error)], []
    except OSError as error:
        return [f"{file} cannot be read: {error.strerror}"], []
    step = max(1, _READ // array.row_bytes)
    pieces = [range(start, min(start + step, stop)) for start in range(first, stop, step)]
    read = functools.partial(_bad_rows, file, array, index.crc32[array.name])
    for piece, found in zip(pieces, pool.map(read, pieces), strict=True):
        bad_rows += piece if isinstance(found, str) else found
        if isinstance(found, str):
            problems.append(f"{file}: rows {piece[0]} to {piece[-1]} cannot be read: {found}")
    return problems, bad_rows


def _bad_rows(path: Path, array: Array, checksums: np.ndarray, rows: range) -> list[int] | str:
    """Return which rows of a file differ from their checksums, or why they cannot be read."""
    (offset,), size = array.locate(np.array([rows[0]]))[1].tolist(), array.row_bytes
    try:
        with path.open("rb") as file:  # not a map: there, a disk error would be a SIGBUS
            file.seek(offset)
            block = memoryview(file.read(len(rows) * size))
    except OSError as error:
        return error.strerror or str(error)
    found = (zlib.crc32(block[at * size : (at + 1) * size]) for at in range(len(rows)))
    return [row for row, crc32 in zip(rows, found, strict=True) if crc32 != checksums[row]]
