"""Files at URLs that fsspec knows, such as ``s3://bucket/train``."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from memload.errors import BuildError, DependencyError, SourceError, describe_error
from memload.sources.archives import by_folder, labelled
from memload.sources.contents import Contents, Files
from memload.sources.reading import Reading
from memload.sources.samples import Source
from memload.storage.keys import Keys

#: How many seconds are waited before a file is asked for again, each time.
_WAITS = (0.5, 1.0, 2.0)
#: After so many files in a row have failed, the server is taken for gone.
_MAX_FAILURES = 32
#: Files that are fetched at a time.
_AT_A_TIME = 32


def is_url(place: object) -> bool:
    """Return whether this is a URL, such as ``s3://bucket/train``."""
    return isinstance(place, str) and "://" in place


def open_url(url: str, reading: Reading) -> Source:
    """Open a folder at a URL, which is read as a folder of this machine is.

    Opening lists the files. Needs fsspec, and its library for the protocol, such as s3fs.

    Raises SourceError and DependencyError.

    >>> open_url("s3://bucket/train", Reading())[0].key  # doctest: +SKIP
    'cat/1.jpg'
    """
    found = _list(url)
    names, columns = labelled(by_folder(found), reading, url)
    images = Urls(url, Keys.of([found[name] for name in names]))
    return Source(keys=Keys.of(names), images=images, **vars(columns))


def files_below(root: str | Path, names: Keys) -> Contents:
    """Return the files of these names below a folder or a URL. An empty one is missing."""
    if not is_url(root):
        return Files(Path(root), names)
    url = str(root)
    _, path = _file_system(url)
    return Urls(url, Keys.of([name and f"{path.rstrip('/')}/{name}" for name in names]))


class Urls(Contents):
    """Files of a server, by their paths on it. An empty path stands for a missing one.

    Several are fetched at once. A file that cannot be fetched is tried three times more. If 32
    files in a row fail, the server is gone: BuildError is raised.
    """

    reads_together = True

    def __init__(self, url: str, paths: Keys) -> None:
        self._url, self._paths = url, paths
        self._failures = 0  # in a row

    def read(self, row: int) -> Any:
        """Return the content of one file, or raise why it cannot be fetched."""
        content = self.read_several([row])[0]
        if isinstance(content, Exception):
            raise content
        return content

    def read_several(self, rows: Sequence[int]) -> list[Any]:
        """Return the content of each file, or why it cannot be fetched. Raises BuildError."""
        # fsspec keeps one object for each process: one from before a fork does not work.
        system, _ = _file_system(self._url)
        contents: dict[int, Any] = {row: None for row in rows if not self._paths[row]}
        missing = [row for row in rows if row not in contents]
        for wait in (*_WAITS, None):
            found = _read_files(system, [self._paths[row] for row in missing])
            contents |= dict(zip(missing, found, strict=True))
            errors = {row for row in missing if isinstance(contents[row], Exception)}
            missing = [r for r in errors if not isinstance(contents[r], FileNotFoundError)]
            if not missing or wait is None:
                break
            time.sleep(wait)
        self._failures = self._failures + len(missing) if len(missing) == len(rows) else 0
        if self._failures >= _MAX_FAILURES:
            raise BuildError(
                f"{self._url}: {self._failures} files in a row cannot be fetched: "
                f"{describe_error(contents[missing[0]])}. Check the connection, then run the same "
                "command again: it goes on where it stopped.",
                path=self._url,
            )
        return [contents[row] for row in rows]


def read_url(url: str) -> bytes:
    """Return the content of the file at a URL. Raises SourceError and DependencyError."""
    system, path = _file_system(url)
    (content,) = _read_files(system, [path])
    if isinstance(content, Exception):
        raise SourceError(f"{url} cannot be read: {describe_error(content)}.") from content
    return bytes(content)


def _list(url: str) -> dict[str, str]:
    """Return the paths of all files below a URL, by their names below it. Raises SourceError."""
    from fsspec.asyn import AsyncFileSystem
    from fsspec.spec import AbstractFileSystem

    system, root = _file_system(url)
    # By default, fsspec leaves out a folder that cannot be listed. Some protocols list in a way of
    # their own, which has no such option and raises.
    kind = type(system)
    is_usual = getattr(kind, "_find", None) is AsyncFileSystem._find
    is_usual = is_usual or (kind.find is AbstractFileSystem.find and not kind.async_impl)
    try:
        found = system.find(root, **({"on_error": "raise"} if is_usual else {}))
    except Exception as error:  # each protocol's library has its own errors
        raise SourceError(f"{url} cannot be listed: {describe_error(error)}.") from error
    if not found:
        raise SourceError(f"{url} does not exist, or has no files. Check the URL.")
    prefix = root.rstrip("/") + "/"
    names = [path.removeprefix(prefix) for path in found]
    if root.startswith("http"):  # it quotes names, and not always in one way
        names = [unquote(name, errors="surrogateescape") for name in names]
    return dict(zip(names, found, strict=True))


def _read_files(system: Any, paths: Sequence[str]) -> list[Any]:
    """Return the contents of files, or errors in their place."""
    with ThreadPoolExecutor(_AT_A_TIME) as threads:
        return list(threads.map(lambda path: _read_file(system, path), paths))


def _read_file(system: Any, path: str) -> Any:
    try:
        return system.cat_file(path)
    except Exception as error:  # noqa: BLE001  # each protocol's library has its own errors
        return error


def _file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the path in it. Raises DependencyError."""
    try:
        import fsspec

        system, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        name = error.name or url.partition("://")[0]
        raise DependencyError(
            f"{url} needs {name}: {error}. Install it: 'pip install memload[remote]' for HTTP, or "
            "the package of fsspec for other protocols.",
            name=name,
        ) from error
    except ValueError as error:
        raise SourceError(f"{url} cannot be opened: {error}.") from error
    return system, path
