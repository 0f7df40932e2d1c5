"""Copies a data set between machines and stores.

::

    s3://bucket/out.idx ─▶ which files there are, and the checksum of each row
    s3://bucket/out*.bin ── ranges of rows, checked ─▶ out.copying/out*.bin ─▶ out*.bin
                                                       out.idx is renamed into place last

There is no list of what is done. What is done has the right checksums.
"""

import fcntl
import logging
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from memload.building.progress import progress as progress_of
from memload.errors import BuildError, ChecksumError, FormatError, SourceError
from memload.sources.remote import file_system, is_url, retried, url_errors
from memload.storage.format import index_path
from memload.storage.index import Array, Index, Shard, moved_name, sync
from memload.storage.shards import check_files, check_header

logger = logging.getLogger("memload")

#: Rows are read in ranges of about so many bytes.
_RANGE_BYTES = 8 << 20
#: Files that are looked at, or uploaded, at a time. An upload has several requests of its own.
_LOOKS, _UPLOADS = 16, 4
_MEGABYTE = 10**6


def copy(
    source: str | Path,
    destination: str | Path,
    *,
    num_threads: int = 16,
    overwrite: bool = False,
    progress: bool | None = None,
) -> str:
    """Copy a data set to this machine, or from it to a store. Returns where it is then.

    Call it at the top of a training script, on all ranks. The first process of a machine copies,
    and the others wait. If the data set is there already, nothing is copied. If a copy was stopped,
    the same call goes on: only what is missing is read.

    Each row that arrives is compared with its checksum in the index. Files are copied into
    ``out.copying`` and renamed when all are there, the index last. A store gets the index last,
    too. So a data set that can be opened is complete.

    URLs are opened by fsspec. Install its package for the protocol: s3fs for ``s3://``, gcsfs for
    ``gs://``, adlfs for ``az://``, huggingface_hub for ``hf://``, ``memload[remote]`` for
    ``https://``.

    Args:
        source: A data set on this machine, or the URL of one.
        destination: A folder, or a path in it that ends as ``source`` does. One of the two is on
            this machine.
        num_threads: How many ranges of 8 MiB are read at a time.
        overwrite: Replace another data set of the same name, or an older state of this one. Files
            that have the same rows stay.
        progress: As in `memload.build`.

    Raises SourceError if the store cannot be read or written, FormatError if the data set is
    incomplete, ChecksumError if rows differ from their checksums, FileExistsError if another data
    set is at the destination, BuildError if the disk has no room, ValueError, and OSError.

    >>> path = memload.copy("s3://bucket/sets/out.bin", "/nvme/")  # doctest: +SKIP
    >>> loader = memload.Loader(path, 256, shuffle=True)  # doctest: +SKIP
    """
    folder, name = os.path.split(os.fspath(source))
    name = index_path(name).name
    target, last = os.path.split(os.fspath(destination))
    if not last.endswith((".bin", ".idx")):
        target = os.fspath(destination).rstrip("/") or "/"
    elif index_path(last).name != name:
        raise ValueError(
            f"{destination} has another name than {source}. Copy it under its own name, and rename "
            "all of its files afterwards."
        )
    if is_url(folder) and is_url(target):
        raise ValueError(f"{source} and {destination} are URLs. Copy to this machine first.")
    store = _Store(folder or ".")
    if is_url(target):
        _upload(Index.open(source), store, _Store(target), overwrite)
    else:
        _download(store, Path(target, name), num_threads, overwrite, progress)
    return f"{target or '.'}/{name.removesuffix('.idx')}.bin"


class _Store:
    """A folder at a URL or on this machine, as fsspec sees it."""

    def __init__(self, folder: str) -> None:
        self.folder = folder.rstrip("/")
        self._system, self._root = file_system(folder)

    def place(self, name: str) -> str:
        """Return the URL or path of a file."""
        return f"{self.folder}/{name}"

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes; None if there is none."""
        with url_errors(f"{self.place(name)} cannot be read"):
            try:
                facts = retried(lambda: self._system.info(self._path(name)))
            except FileNotFoundError:
                return None
            size: int | None = facts.get("size")
            return size

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> bytes:
        """Return bytes of a file."""
        path = self._path(name)
        with url_errors(f"{self.place(name)} cannot be read"):
            content: bytes = retried(lambda: self._system.cat_file(path, start=start, end=stop))
        if stop is not None and start is not None and len(content) > stop - start:
            raise SourceError(
                f"{self.place(name)}: the server sends whole files only, and no ranges of them. "
                "Download the index and all of its .bin files with another program."
            )
        return content

    def write(self, name: str, path: Path) -> None:
        """Write a file of this machine."""
        problem = f"{self.place(name)} cannot be written"
        with url_errors(problem):
            retried(lambda: self._system.put_file(str(path), self._path(name)))
        if self.size(name) != path.stat().st_size:  # such as a web server that takes anything
            raise SourceError(f"{problem}: it is not there afterwards. Choose another store.")


def _read_index(store: _Store, name: str) -> tuple[Index, bytes]:
    """Return an index in a store, and the content of its file."""
    store.read(name, 0, 8)  # a server without ranges is noticed here
    content = store.read(name)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        path.write_bytes(content)
        try:
            return Index.read(path), content
        except FormatError as error:
            place = store.place(name)
            raise FormatError(str(error).replace(str(path), place), path=place) from error


@dataclass(frozen=True)
class _File:
    """A shard, its name at both ends, and the checksums of its rows, uint32 ``(rows,)``."""

    array: Array
    shard: Shard
    name: str
    crc32: np.ndarray

    def check_header(self, header: bytes, place: str) -> None:
        """Raise FormatError unless this is the header of the shard."""
        check_header(place, header, self.shard, self.array, self.crc32, "its index")

    def is_in(self, store: _Store) -> bool:
        """Return whether a store has this file, to judge by its size, header and first row."""
        if store.size(self.name) != self.shard.bytes:
            return False
        header_bytes = self.array.header_bytes
        content = store.read(self.name, 0, header_bytes + self.array.row_bytes)
        try:
            self.check_header(content[:header_bytes], store.place(self.name))
        except FormatError:
            return False
        return not self.wrong_rows(0, content[header_bytes:])

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Yield the first row of each range, and the one after its last."""
        step = max(1, _RANGE_BYTES // self.array.row_bytes)
        for first in range(0, self.shard.rows, step):
            yield first, min(first + step, self.shard.rows)

    def wrong_rows(self, first: int, content: bytes) -> list[int]:
        """Return which rows from ``first`` on differ from their checksums."""
        starts, memory = range(0, len(content), self.array.row_bytes), memoryview(content)
        rows = (memory[start : start + self.array.row_bytes] for start in starts)
        return [
            number
            for number, row in enumerate(rows, first)
            if zlib.crc32(row) != self.crc32[number]
        ]


def _files(index: Index, store: _Store) -> list[_File]:
    """Return the files of a data set. Raises FormatError if one is missing or has another size."""

    def look(array: Array, shard: Shard, crc32: np.ndarray) -> _File:
        for name in (shard.file, moved_name(index.path, array, shard)):
            if store.size(name) == shard.bytes:
                return _File(array, shard, name, crc32)
        raise FormatError(
            f"{store.place(shard.file)} is missing or has another size than the {shard.bytes:,} "
            "bytes that the index says. Copy the data set there again.",
            path=store.place(shard.file),
        )

    shards = [
        (array, shard, crc32)
        for array in index.arrays
        for shard, crc32 in zip(
            array.shards, np.split(index.crc32[array.name], array.starts[1:-1]), strict=True
        )
    ]
    with ThreadPoolExecutor(_LOOKS) as threads:
        return list(threads.map(lambda shard: look(*shard), shards))


def _missing(
    files: Sequence[_File], store: _Store, name: str, content: bytes, overwrite: bool
) -> list[_File]:
    """Return the files that a destination lacks.

    Raises FileExistsError if files of another data set are there, without ``overwrite``.
    """
    missing = [file for file in files if not file.is_in(store)]
    others = [file.name for file in missing if store.size(file.name)]
    if store.size(name) is not None and store.read(name) != content:
        others.append(name)
    if others and not overwrite:
        raise FileExistsError(
            f"{store.place(others[0])} is there already, and is not that of this data set. Choose "
            "another destination, or say overwrite=True (--overwrite)."
        )
    return missing


def _upload(index: Index, store: _Store, target: _Store, overwrite: bool) -> None:
    """Write the files that a store lacks, the index last."""
    check_files(index)
    path, content = index.path, index.path.read_bytes()
    missing = _missing(_files(index, store), target, path.name, content, overwrite)
    with ThreadPoolExecutor(_UPLOADS) as threads:
        # After an error, map() cancels the files that have not begun.
        list(threads.map(lambda file: target.write(file.name, path.with_name(file.name)), missing))
    target.write(path.name, path)


def _download(
    store: _Store, goal: Path, num_threads: int, overwrite: bool, progress: bool | None
) -> None:
    """Copy what is missing into a folder, then rename it into place, the index last."""
    index, content = _read_index(store, goal.name)
    if _is_complete(goal, content):
        return
    with _locked(goal.with_suffix(".copying")) as work:
        if _is_complete(goal, content):  # by another process meanwhile
            return
        files, target = _files(index, store), _Store(str(goal.parent))
        missing = _missing(files, target, goal.name, content, overwrite)
        total = sum(file.shard.bytes for file in missing)
        _check_room(missing, work)
        with progress_of(goal.name, total // _MEGABYTE, progress, "MB") as show:
            done = 0
            for size in _fetched(missing, store, work, num_threads):
                show((done + size) // _MEGABYTE - done // _MEGABYTE, None)
                done += size
        (work / goal.name).write_bytes(content)
        goal.unlink(missing_ok=True)  # from here on until the end there is no data set
        for name in [file.name for file in missing] + [goal.name]:
            sync(work / name)
            (work / name).replace(goal.with_name(name))
            sync(goal.parent)


def _is_complete(goal: Path, content: bytes) -> bool:
    """Return whether this very data set is here, with all of its files."""
    if not goal.exists() or goal.read_bytes() != content:
        return False
    try:
        check_files(Index.read(goal))
    except FormatError:
        return False
    return True


@contextmanager
def _locked(work: Path) -> Iterator[Path]:
    """Make a folder, and wait until no other process copies into it."""
    while True:
        work.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(work / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                logger.info("%s: another process copies this data set; waiting for it", work)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink:  # else that process has removed the file
                try:
                    yield work
                finally:
                    (work / "lock").unlink(missing_ok=True)
                    with suppress(OSError):  # there are files to go on with
                        work.rmdir()
                return
        finally:
            os.close(descriptor)


def _check_room(missing: Sequence[_File], work: Path) -> None:
    """Raise BuildError if the disk has less room than is needed."""
    there = sum(path.stat().st_blocks * 512 for path in work.iterdir())
    needed, free = sum(file.shard.bytes for file in missing) - there, shutil.disk_usage(work).free
    if needed > free:
        raise BuildError(
            f"{work.parent} has {free / 1e9:.1f} GB free, but {needed / 1e9:.1f} GB are left to "
            "copy. Make room, or choose another destination.",
            path=work.parent,
        )


def _fetched(
    missing: Sequence[_File], store: _Store, work: Path, num_threads: int
) -> Iterator[int]:
    """Read files in ranges by several threads. Yield the bytes of each range that is here."""
    ranges = []
    for file in missing:
        path = work / file.name
        is_new = not path.exists()
        header = store.read(file.name, 0, file.array.header_bytes)
        file.check_header(header, store.place(file.name))
        with path.open("wb" if is_new else "r+b") as opened:
            opened.truncate(file.shard.bytes)
            opened.write(header)
        ranges += [(file, first, stop, path, is_new) for first, stop in file.ranges()]
    with ThreadPoolExecutor(num_threads) as threads:
        yield from threads.map(lambda part: _fetch(store, *part), ranges)


def _fetch(store: _Store, file: _File, first: int, stop: int, path: Path, is_new: bool) -> int:
    """Read some rows unless they are here, check them and write them. Returns their bytes."""
    size = (stop - first) * file.array.row_bytes
    offset = file.array.header_bytes + first * file.array.row_bytes
    with path.open("r+b", buffering=0) as opened:
        if not is_new:
            content = os.pread(opened.fileno(), size, offset)
            if not file.wrong_rows(first, content):
                return size
        content = store.read(file.name, offset, offset + size)
        wrong = file.wrong_rows(first, content)
        if wrong or len(content) < size:
            raise ChecksumError(
                f"{store.place(file.name)}: row {min(wrong, default=stop - 1)} differs from its "
                "checksum in the index. If the data set was replaced meanwhile, run the same "
                "command again. Otherwise it is damaged: copy it there again.",
                path=store.place(file.name),
                rows=wrong,
            )
        opened.seek(offset)
        opened.write(content)
    return size
