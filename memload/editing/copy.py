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
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

import numpy as np

from memload.building.progress import progress as progress_of
from memload.building.publish import unused_files
from memload.errors import BuildError, ChecksumError, FormatError, SourceError
from memload.sources.remote import file_system, is_url, retried, url_errors
from memload.storage.format import index_path, shard_pattern
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
        overwrite: Replace another data set of the same name, an older state of this one, or files
            that are damaged. Files that have the same rows stay, for which those here are read.
            To a store that has this very data set, all files are written again.
        progress: As in `memload.build`.

    Raises SourceError if the store cannot be read or written, FormatError if the data set is
    incomplete, ChecksumError if rows differ from their checksums, FileExistsError if another data
    set is at the destination, BuildError if the disk has no room, ValueError, and OSError.

    >>> path = memload.copy("s3://bucket/sets/out.bin", "/nvme/")  # doctest: +SKIP
    >>> loader = memload.Loader(path, 256, shuffle=True)  # doctest: +SKIP
    """
    folder, last = os.path.split(_place(source))
    name = _index_name(unquote(last) if folder.startswith("http") else last)
    target = _place(destination)
    if target.endswith((".bin", ".idx")):
        target, last = os.path.split(target)
        if _index_name(last) != name:
            raise ValueError(
                f"{destination} has another name than {source}. Copy it under its own name, and "
                "rename all of its files afterwards."
            )
    if is_url(folder) and is_url(target):
        raise ValueError(f"{source} and {destination} are URLs. Copy to this machine first.")
    store, target_store = _Store(folder), _Store(target)
    if target_store.is_remote:
        files = _upload(Index.open(store.place(name)), store, target_store, overwrite)
    else:
        files = _download(store, Path(target, name), target_store, num_threads, overwrite, progress)
    own = shard_pattern(name)
    has_own = any(own.fullmatch(file.name) for file in files)
    return target_store.place(name.removesuffix(".idx") + ".bin" if has_own else name)


def _place(given: str | Path) -> str:
    """Return a URL as it is, and a path as an absolute one. Raises ValueError for neither."""
    text = os.fspath(given).removeprefix("file://")
    text = re.sub(r"^(\w{2,}):/(?=[^/])", r"\1://", text)  # a Path has lost a slash of the URL
    if not text or text.endswith("://"):
        raise ValueError(f"{given!r} is no place. Give a folder, a path, or a URL.")
    if is_url(text):
        return text.rstrip("/")
    return os.path.abspath(os.path.expanduser(text))  # noqa: PTH100, PTH111  # resolve() follows links


def _index_name(last: str) -> str:
    """Return the name of an index, given as ``out.bin``, ``out.idx``, ``out`` or a shard."""
    return index_path(last).name if last.endswith((".bin", ".idx")) else f"{last}.idx"


class _Store:
    """A folder at a URL or on this machine, whose files are read and written through fsspec."""

    def __init__(self, folder: str) -> None:
        from fsspec.implementations.local import LocalFileSystem

        self.folder, self.is_remote = folder.rstrip("/"), is_url(folder)
        # fsspec would take "::" in a path for a chain of URLs.
        here = LocalFileSystem(), folder
        self._system, self._root = file_system(folder) if self.is_remote else here

    def place(self, name: str) -> str:
        """Return the URL or path of a file."""
        return f"{self.folder}/{name}"

    def _path(self, name: str) -> str:
        is_quoted = self.folder.startswith("http")
        return f"{self._root.rstrip('/')}/{quote(name) if is_quoted else name}"

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes; None if there is none."""

        def look() -> int | None:
            try:
                size: int | None = self._system.info(self._path(name)).get("size")
            except FileNotFoundError as error:
                # fsspec says so whatever an HTTP server answers.
                if getattr(error.__cause__, "status", 404) != 404:
                    raise error.__cause__ from None  # type: ignore[misc]  # it has a status
                return None
            return size

        with url_errors(f"{self.place(name)} cannot be read"):
            return retried(look)

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
    """A shard of the data set that is copied.

    ``name`` is that of its file, in both places. ``crc32`` has the checksums of its rows, uint32
    ``(rows,)``.
    """

    array: Array
    shard: Shard
    name: str
    crc32: np.ndarray

    def check_header(self, header: bytes, place: str) -> None:
        """Raise FormatError unless this is the header of the shard."""
        check_header(place, header, self.shard, self.array, self.crc32, "its index")

    def is_in(self, store: _Store) -> bool:
        """Return whether a store has this file.

        On this machine, all rows are read. Elsewhere, a seal in the header speaks for them.
        """
        if store.size(self.name) != self.shard.bytes:
            return False
        header = store.read(self.name, 0, self.array.header_bytes)
        try:
            self.check_header(header, store.place(self.name))
        except FormatError:
            return False
        has_seal = b"# " in header
        ranges = [] if store.is_remote and has_seal else self.ranges()
        return not any(self.wrong_rows(rows, store.read(self.name, *span)) for rows, span in ranges)

    def ranges(self) -> Iterator[tuple[range, tuple[int, int]]]:
        """Yield the rows of each range, and where it begins and ends in the file."""
        row_bytes, header_bytes = self.array.row_bytes, self.array.header_bytes
        step = max(1, _RANGE_BYTES // max(1, row_bytes))
        for first in range(0, self.shard.rows, step):
            rows = range(first, min(first + step, self.shard.rows))
            yield rows, (header_bytes + first * row_bytes, header_bytes + rows.stop * row_bytes)

    def wrong_rows(self, rows: range, content: bytes) -> list[int]:
        """Return which of these rows differ from their checksums, or are missing."""
        size, memory = self.array.row_bytes, memoryview(content)
        parts = (memory[number * size : (number + 1) * size] for number in range(len(rows)))
        return [
            row
            for row, part in zip(rows, parts, strict=True)
            if len(part) < size or zlib.crc32(part) != self.crc32[row]
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
    for file in files:
        if file.name != file.shard.file and store.size(file.shard.file) is not None:
            raise FileExistsError(
                f"{store.place(file.shard.file)} is there already, and {name} would take it for "
                f"{file.name}. Choose another destination."
            )
    with ThreadPoolExecutor(_LOOKS) as threads:
        are_in = list(threads.map(lambda file: file.is_in(store), files))
    missing = [file for file, is_in in zip(files, are_in, strict=True) if not is_in]
    others = [file.name for file in missing if store.size(file.name)]
    if store.size(name) is not None and store.read(name) != content:
        others.append(name)
    if others and not overwrite:
        raise FileExistsError(
            f"{store.place(others[0])} is there already, and is not that of this data set. Choose "
            "another destination, or say overwrite=True (--overwrite)."
        )
    return missing


def _upload(index: Index, store: _Store, target: _Store, overwrite: bool) -> list[_File]:
    """Write the files that a store lacks, the index last."""
    check_files(index)
    path, content, files = index.path, index.path.read_bytes(), _files(index, store)

    def write(file: _File) -> None:
        if not file.is_in(store):
            raise ChecksumError(
                f"{store.place(file.name)} is damaged. Run 'memload verify' to see the extent.",
                path=store.place(file.name),
            )
        target.write(file.name, path.with_name(file.name))

    missing = _missing(files, target, path.name, content, overwrite)
    if overwrite and target.size(path.name) is not None and target.read(path.name) == content:
        missing = files  # of this very data set; seals do not tell whether rows are damaged
    with ThreadPoolExecutor(_UPLOADS) as threads:
        # After an error, map() cancels the files that have not begun.
        list(threads.map(write, missing))
    target.write(path.name, path)
    return files


def _download(
    store: _Store,
    goal: Path,
    target: _Store,
    num_threads: int,
    overwrite: bool,
    progress: bool | None,
) -> list[_File]:
    """Copy what is missing into a folder, then rename it into place, the index last."""
    index, content = _read_index(store, goal.name)
    if not overwrite and _is_complete(goal, content):
        return _files(Index.read(goal), target)
    work = goal.with_suffix(".copying")
    with _locked(goal):
        if not overwrite and _is_complete(goal, content):  # by another process meanwhile
            return _files(Index.read(goal), target)
        files = _files(index, store)
        missing = _missing(files, target, goal.name, content, overwrite)
        work.mkdir(exist_ok=True)
        _check_room(missing, work)
        total, done = sum(file.shard.bytes for file in missing), 0
        with progress_of(goal.name, total // _MEGABYTE, progress, "MB") as show:
            for size in _fetched(missing, store, work, num_threads):
                show((done + size) // _MEGABYTE - done // _MEGABYTE, None)
                done += size
        (work / goal.name).write_bytes(content)
        replaced = work / "replaced.idx"
        if goal.exists():  # from here on until the end there is no data set
            goal.replace(replaced)
        for name in [file.name for file in missing] + [goal.name]:
            sync(work / name)
            (work / name).replace(goal.with_name(name))
            sync(goal.parent)
        left = unused_files(replaced, goal.with_suffix(".bin")) - {file.name for file in files}
        for name in left:
            goal.with_name(name).unlink(missing_ok=True)
        shutil.rmtree(work)
    return files


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
def _locked(goal: Path) -> Iterator[None]:
    """Wait until no other process copies this data set. Makes its folder, and leaves a file."""
    goal.parent.mkdir(parents=True, exist_ok=True)
    path = goal.with_name(f".{goal.stem}.lock")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("%s: another process copies this data set; waiting for it", goal)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:  # this file system has no locks
            pass
        yield
    finally:
        os.close(descriptor)


def _check_room(missing: Sequence[_File], work: Path) -> None:
    """Raise BuildError if the disk has less room than is needed."""
    there = sum(path.stat().st_blocks * 512 for path in work.iterdir())
    needed, free = sum(file.shard.bytes for file in missing) - there, shutil.disk_usage(work).free
    if needed > free:
        raise BuildError(
            f"{work.parent} has {free // _MEGABYTE:,} MB free, but {needed // _MEGABYTE:,} MB are "
            "left to copy. Make room, or choose another destination.",
            path=work.parent,
        )


def _fetched(
    missing: Sequence[_File], store: _Store, work: Path, num_threads: int
) -> Iterator[int]:
    """Read the files that are missing, in ranges. Yield the size of each range that has arrived."""
    ranges = []
    for file in missing:
        path = work / file.name
        is_new = not path.exists()
        header = store.read(file.name, 0, file.array.header_bytes)
        file.check_header(header, store.place(file.name))
        with path.open("wb" if is_new else "r+b") as opened:
            opened.truncate(file.shard.bytes)
            opened.write(header)
        ranges += [(file, rows, span, path, is_new) for rows, span in file.ranges()]
    with ThreadPoolExecutor(num_threads) as threads:
        yield from threads.map(lambda part: _fetch(store, *part), ranges)


def _fetch(
    store: _Store, file: _File, rows: range, span: tuple[int, int], path: Path, is_new: bool
) -> int:
    """Read some rows unless they are here, check them and write them. Returns their size."""
    start, stop = span
    with path.open("r+b") as opened:
        opened.seek(start)
        if is_new or file.wrong_rows(rows, opened.read(stop - start)):
            content = store.read(file.name, start, stop)
            if wrong := file.wrong_rows(rows, content):
                raise ChecksumError(
                    f"{store.place(file.name)}: row {wrong[0]} differs from its checksum in the "
                    "index. If the data set was replaced meanwhile, run the same command again. "
                    "Otherwise it is damaged: copy it there again.",
                    path=store.place(file.name),
                    rows=wrong,
                )
            opened.seek(start)
            opened.write(content)
    return stop - start
