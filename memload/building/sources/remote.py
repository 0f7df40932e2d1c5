"""Images on a server as a source: every URL that fsspec knows."""

import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, unquote

import numpy as np

from memload.building.sources.columns import ColumnCollector
from memload.building.sources.listed import ListedSource, add_folder_labels, is_hidden
from memload.building.sources.record import EXTENSIONS, FileState, Record
from memload.errors import BuildError, DependencyError, SourceError, describe_error
from memload.storage.keys import Keys

Result = TypeVar("Result")

#: How many seconds are waited before a file is asked for again, each time.
_WAITS = (0.5, 1.0, 2.0)

#: After so many files in a row have failed, the server is taken for gone.
_MAX_FAILURES = 32

#: Files that are fetched at a time.
_AT_A_TIME = 32

#: An HTTP server has so many seconds to send anything. Four times that is below the default of
#: ``timeout``, so that a file that hangs costs itself alone.
_HTTP_SECONDS = 10

#: What stays as it is in the path of an HTTP URL: names may have been quoted before.
_UNQUOTED = "/%?=&+"


class RemoteFiles(ListedSource):
    """Image files below a URL, such as ``s3://bucket/train``.

    Workers fetch 32 files at a time. A file that cannot be fetched is tried three times more, and
    then rejected. One that does not exist is rejected at once. If 32 files in a row fail, the build
    stops, and goes on when it is started again. Needs fsspec, and its library for the protocol,
    such as s3fs. Access keys are found as that library does.
    """

    def __init__(
        self,
        root: str,
        names: Sequence[str],
        columns: ColumnCollector,
        states: Sequence[tuple[int, int] | None] | None = None,
        paths: Sequence[str] | None = None,
    ) -> None:
        super().__init__(names, columns)
        self.root = root
        #: as the server lists them, if they are not made of the names
        self._paths = None if paths is None else Keys.of(paths)
        #: (N, 2), of size and time of each file; -1 if the server does not tell them
        self._states = None if states is None else np.array([state or (-1, -1) for state in states])
        self._failures = 0  # in a row

    def __getitem__(self, index: int) -> Record:
        record = self.__getitems__([index])[0]
        if isinstance(record, Exception):
            raise record
        return record

    def __getitems__(self, indices: Sequence[int]) -> list[Record | Exception]:
        """Fetch several images at once. An exception stands for a file that cannot be fetched."""
        return [
            content
            if isinstance(content, Exception)
            else self.without_image(index)._replace(image=content)
            for index, content in zip(indices, self._fetch(indices), strict=True)
        ]

    def _state(self, index: int) -> FileState | None:
        if self._states is None or self._states[index, 0] < 0:
            return None
        return FileState(*self._states[index].tolist())

    def _fetch(self, indices: Sequence[int]) -> list[bytes | Exception]:
        """Return the content of each file, or why it cannot be fetched. Raises BuildError."""
        # fsspec keeps one object for each process: one from before a fork does not work.
        file_system, root = _file_system(self.root)
        paths = {
            index: _join(root, self.names[index]) if self._paths is None else self._paths[index]
            for index in indices
        }
        contents: dict[int, bytes | Exception] = {}
        missing = list(indices)
        for wait in (*_WAITS, None):
            found = _read_files(file_system, [paths[index] for index in missing])
            contents |= dict(zip(missing, found, strict=True))
            missing = [index for index in missing if _may_be_there(contents[index])]
            if not missing or wait is None:
                break
            time.sleep(wait)
        self._failures = self._failures + len(missing) if len(missing) == len(indices) else 0
        if self._failures >= _MAX_FAILURES:
            reason = describe_error(contents[missing[0]])  # type: ignore[arg-type]  # it has failed
            raise BuildError(
                f"{self.root}: {self._failures} files in a row cannot be fetched: {reason}. Check "
                "the connection, then run the same command again: it goes on where it stopped.",
                path=self.root,
            )
        return [contents[index] for index in indices]


class RemoteFolder(RemoteFiles):
    """The images below a URL, with one folder for each class, as in `memload.ImageFolder`.

    A flat folder has no labels. Hidden files, other files, and images beside the class folders are
    left out, which ``notes`` reports. Opening lists the files and reads none. See `RemoteFiles` for
    what is fetched when.

    Raises SourceError if the URL cannot be listed or has no images, and DependencyError.

    >>> source = memload.RemoteFolder("s3://bucket/train")  # doctest: +SKIP
    """

    def __init__(self, url: str, *, extensions: Sequence[str] = EXTENSIONS) -> None:
        file_system, root = _file_system(url)
        found = _retried(lambda: _list(file_system, root), f"{url} cannot be listed")
        endings = tuple(extension.lower() for extension in extensions)
        prefix = root.rstrip("/") + "/"
        files = {_name(path.removeprefix(prefix), root): path for path in found}
        images = [name for name in files if name.lower().endswith(endings) and not is_hidden(name)]
        if not images:
            raise SourceError(
                f"{url} has no image files ({' '.join(extensions)}), but {len(found):,} other "
                "files. Check the URL."
                if found
                else f"{url} does not exist, or is an empty folder. Check the URL."
            )
        columns = ColumnCollector()
        if len(images) < len(found):
            columns.notes.append(f"skipped {len(found) - len(images):,} other files below {url}")
        names = [images[position] for position in add_folder_labels(columns, images)]
        states = [_state(found[files[name]]) for name in names]
        # A name with %20 or ? in it is quoted in the path, and one with a space too.
        paths = [files[name] for name in names] if root.startswith("http") else None
        super().__init__(url, names, columns.finish(), states, paths)


def is_url(text: object) -> bool:
    """Return whether a source is a URL, such as ``s3://bucket/train``."""
    return isinstance(text, str) and "://" in text


def file_name(url: str) -> str:
    """Return the name of the file at a URL, without what may follow its ``?``."""
    path = url.partition("?")[0] if url.startswith("http") else url
    return unquote(path.rstrip("/").rpartition("/")[2])


def matching_urls(pattern: str) -> list[str]:
    """Return the URLs of the files that a URL with ``*`` stands for. Raises SourceError."""
    file_system, path = _file_system(pattern)
    found = _retried(lambda: sorted(file_system.glob(path)), f"{pattern} cannot be listed")
    if not found:
        raise SourceError(f"{pattern}: no file has such a name. Check the pattern.", path=pattern)
    return [file_system.unstrip_protocol(name) for name in found]


def download(urls: Sequence[str]) -> tuple[Path, list[str]]:
    """Copy files into a temporary folder. Returns the folder and the paths. Raises SourceError."""
    folder = Path(tempfile.mkdtemp(prefix="memload-"))
    names = [file_name(url) for url in urls]
    if len(set(names)) < len(names):
        names = [f"{number}-{name}" for number, name in enumerate(names)]
    paths = [str(folder / name) for name in names]
    try:
        for url, path in zip(urls, paths, strict=True):
            _download_one(url, path)
    except BaseException:  # a Ctrl-C, too, is to leave no copies behind
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder, paths


def _download_one(url: str, path: str) -> None:
    file_system, remote = _file_system(url)

    _retried(lambda: file_system.get_file(remote, path), f"{url} cannot be copied")
    # The time stands for the content, so that a build continues after a second copy of the same.
    os.utime(path, ns=(0, _checksum(path)))


def _checksum(path: str) -> int:
    """Return the CRC-32 of a file. Not every server tells when a file has changed."""
    checksum = 0
    with Path(path).open("rb") as file:
        while block := file.read(1 << 20):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _retried(call: Callable[[], Result], problem: str) -> Result:
    """Return what ``call`` returns, at the fourth attempt at the latest. Raises SourceError."""
    for wait in (*_WAITS, None):
        try:
            return call()
        except Exception as error:  # each protocol's library has its own errors
            if isinstance(error, FileNotFoundError):
                raise SourceError(f"{problem}: it does not exist. Check the URL.") from error
            if wait is None or not _may_be_there(error):
                raise SourceError(
                    f"{problem}: {describe_error(error)}. Check the URL and the connection."
                ) from error
            time.sleep(wait)
    raise AssertionError("the last attempt returns or raises")


def _list(file_system: Any, root: str) -> dict[str, Any]:
    """Return what is known of each file below a root, by its path."""
    from fsspec.asyn import AsyncFileSystem
    from fsspec.spec import AbstractFileSystem

    # By default, fsspec leaves out a folder that cannot be listed. Some protocols list in a way of
    # their own, which has no such option and raises.
    kind = type(file_system)
    is_usual = getattr(kind, "_find", None) is AsyncFileSystem._find
    is_usual = is_usual or (kind.find is AbstractFileSystem.find and not kind.async_impl)
    options = {"on_error": "raise"} if is_usual else {}
    found: dict[str, Any] = file_system.find(root, detail=True, **options)
    return found


def _may_be_there(outcome: object) -> bool:
    """Return whether it is an error that another attempt may avoid."""
    lasting = (FileNotFoundError, IsADirectoryError, PermissionError)
    return isinstance(outcome, Exception) and not isinstance(outcome, lasting)


def _read_files(file_system: Any, paths: Sequence[str]) -> list[bytes | Exception]:
    """Return the contents of files, or errors in their place."""
    if file_system.async_impl:
        # Unlike cat(), cat_ranges() does not take [ and * in a name for a pattern.
        found: list[bytes | Exception] = file_system.cat_ranges(
            list(paths), None, None, on_error="return"
        )
        return found
    with ThreadPoolExecutor(_AT_A_TIME) as threads:
        return list(threads.map(lambda path: _read_file(file_system, path), paths))


def _read_file(file_system: Any, path: str) -> bytes | Exception:
    try:
        content: bytes = file_system.cat_file(path)
    except Exception as error:  # noqa: BLE001  # each protocol's library has its own errors
        return error
    return content


def _join(root: str, name: str) -> str:
    """Return the path of a file below a root."""
    if root.startswith("http"):
        name = quote(name, _UNQUOTED, errors="surrogateescape")
    return f"{root.rstrip('/')}/{name}"


def _name(path: str, root: str) -> str:
    """Return a name as the server's files have it. In HTTP URLs it is quoted."""
    return unquote(path, errors="surrogateescape") if root.startswith("http") else path


def _state(information: dict[str, Any]) -> tuple[int, int] | None:
    """Return size and version of a remote file, or None if the server does not tell them.

    The version stands for the time of the last change, which each protocol calls otherwise.
    """
    names = ("ETag", "etag", "LastModified", "mtime", "updated", "last_modified", "created")
    version = next((information[name] for name in names if information.get(name)), None)
    size = information.get("size")
    if version is None or size is None:
        return None
    return size, zlib.crc32(str(version).encode())


def _file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the path in it. Raises DependencyError."""
    protocol = url.partition("://")[0]
    try:
        import fsspec

        options = {}
        if protocol in ("http", "https"):
            from aiohttp import ClientTimeout

            timeout = ClientTimeout(None, sock_connect=_HTTP_SECONDS, sock_read=_HTTP_SECONDS)
            options["client_kwargs"] = {"timeout": timeout}
    except ImportError as error:
        raise DependencyError(
            f"{url} needs {error.name}. Install it with 'pip install memload[remote]'.",
            name=error.name or "fsspec",
        ) from error
    try:
        file_system, path = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:  # its message names the package, such as s3fs
        raise DependencyError(f"{url}: {error}", name=protocol) from error
    except ValueError as error:
        raise SourceError(f"{url} cannot be opened: {error}.") from error
    return file_system, path
