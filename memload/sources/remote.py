"""Files at URLs that fsspec knows, such as ``s3://bucket/train``."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from urllib.parse import quote, unquote

import numpy as np

from memload.errors import BuildError, DependencyError, SourceError, describe_error
from memload.sources.archives import arranged, by_folder, images_in
from memload.sources.columns import Columns
from memload.sources.contents import Contents
from memload.sources.samples import Reading, Samples
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


def is_url(place: object) -> bool:
    """Return whether this is a URL, such as ``s3://bucket/train``."""
    return isinstance(place, str) and "://" in place


def open_url(url: str, reading: Reading) -> Samples:
    """Open a folder at a URL, which is read as a folder of this machine is.

    Opening lists the files. Needs fsspec, and its library for the protocol, such as s3fs.

    Raises SourceError and DependencyError.

    >>> open_url("s3://bucket/train", Reading())[0].key  # doctest: +SKIP
    'cat/1.jpg'
    """
    found = retried(lambda: _list(url), f"{url} cannot be listed")
    columns = Columns()
    names = arranged(images_in(by_folder(found), reading, columns, url), columns, url)
    keys = Keys.of(names)
    # HTTP quotes names, and not always in one way: the paths are those that the server lists.
    paths = Keys.of([found[name] for name in names]) if url.startswith("http") else None
    return Samples(keys, Urls(url.rstrip("/"), keys, paths), columns)


class Urls(Contents):
    """Files below a URL. An empty name stands for a missing one.

    They are fetched 32 at a time. A file that cannot be fetched is tried three times more. If 32
    files in a row fail, the server is gone: BuildError is raised.

    Args:
        root: The URL.
        names: The names of files below it.
        paths: As the server lists them, if they are not made of the names.
    """

    reads_together = True

    def __init__(self, root: str, names: Keys, paths: Keys | None = None) -> None:
        self.root, self.names, self._paths = root, names, paths
        self._failures = 0  # in a row

    def __getitem__(self, row: int) -> Any:
        content = self.several([row])[0]
        if isinstance(content, Exception):
            raise content
        return content

    def take(self, rows: np.ndarray) -> "Urls":
        """Return the files of some rows."""
        paths = None if self._paths is None else self._paths.take(rows)
        return Urls(self.root, self.names.take(rows), paths)

    def several(self, rows: Sequence[int]) -> list[Any]:
        """Return the content of each file, or why it cannot be fetched. Raises BuildError."""
        # fsspec keeps one object for each process: one from before a fork does not work.
        system, root = file_system(self.root)
        contents: dict[int, Any] = {row: None for row in rows if not self.names[row]}
        missing = [row for row in rows if row not in contents]
        for wait in (*_WAITS, None):
            for start in range(0, len(missing), _AT_A_TIME):
                part = missing[start : start + _AT_A_TIME]
                found = _read_files(system, [self._path(root, row) for row in part])
                contents |= dict(zip(part, found, strict=True))
            missing = [row for row in missing if _may_be_there(contents[row])]
            if not missing or wait is None:
                break
            time.sleep(wait)
        self._failures = self._failures + len(missing) if len(missing) == len(rows) else 0
        if self._failures >= _MAX_FAILURES:
            raise BuildError(
                f"{self.root}: {self._failures} files in a row cannot be fetched: "
                f"{describe_error(contents[missing[0]])}. Check the connection, then run the same "
                "command again: it goes on where it stopped.",
                path=self.root,
            )
        return [contents[row] for row in rows]

    def _path(self, root: str, row: int) -> str:
        if self._paths is not None:
            return self._paths[row]
        name = self.names[row]
        if root.startswith("http"):
            name = quote(name, _UNQUOTED, errors="surrogateescape")
        return f"{root.rstrip('/')}/{name}"


def read_url(url: str) -> bytes:
    """Return the content of the file at a URL. Raises SourceError and DependencyError."""
    system, path = file_system(url)
    content: bytes = retried(lambda: system.cat_file(path), f"{url} cannot be read")
    return content


def _list(url: str) -> dict[str, str]:
    """Return the paths of all files below a URL, by their names below it."""
    from fsspec.asyn import AsyncFileSystem
    from fsspec.spec import AbstractFileSystem

    system, root = file_system(url)
    # By default, fsspec leaves out a folder that cannot be listed. Some protocols list in a way of
    # their own, which has no such option and raises.
    kind = type(system)
    is_usual = getattr(kind, "_find", None) is AsyncFileSystem._find
    is_usual = is_usual or (kind.find is AbstractFileSystem.find and not kind.async_impl)
    found = system.find(root, **({"on_error": "raise"} if is_usual else {}))
    if not found:
        raise FileNotFoundError(url)
    prefix = root.rstrip("/") + "/"
    names = [path.removeprefix(prefix) for path in found]
    if root.startswith("http"):
        names = [unquote(name, errors="surrogateescape") for name in names]
    return dict(zip(names, found, strict=True))


def retried(call: Callable[[], Result], problem: str) -> Result:
    """Return what ``call`` returns, at the fourth attempt at the latest. Raises SourceError."""
    for wait in (*_WAITS, None):
        try:
            return call()
        except (SourceError, DependencyError):
            raise
        except Exception as error:  # each protocol's library has its own errors
            if isinstance(error, FileNotFoundError):
                raise SourceError(f"{problem}: it does not exist. Check the URL.") from error
            if wait is None or not _may_be_there(error):
                raise SourceError(
                    f"{problem}: {describe_error(error)}. Check the URL and the connection."
                ) from error
            time.sleep(wait)
    raise AssertionError("the last attempt returns or raises")


def _may_be_there(outcome: object) -> bool:
    """Return whether it is an error that another attempt may avoid."""
    lasting = (FileNotFoundError, IsADirectoryError, PermissionError)
    return isinstance(outcome, Exception) and not isinstance(outcome, lasting)


def _read_files(system: Any, paths: Sequence[str]) -> list[Any]:
    """Return the contents of files, or errors in their place."""
    if system.async_impl:
        # Unlike cat(), cat_ranges() does not take [ and * in a name for a pattern.
        return list(system.cat_ranges(list(paths), None, None, on_error="return"))
    with ThreadPoolExecutor(_AT_A_TIME) as threads:
        return list(threads.map(lambda path: _read_file(system, path), paths))


def _read_file(system: Any, path: str) -> Any:
    try:
        return system.cat_file(path)
    except Exception as error:  # noqa: BLE001  # each protocol's library has its own errors
        return error


def file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the path in it. Raises DependencyError."""
    protocol, options = url.partition("://")[0], {}
    try:
        import fsspec

        if protocol in ("http", "https"):
            from aiohttp import ClientTimeout

            timeout = ClientTimeout(None, sock_connect=_HTTP_SECONDS, sock_read=_HTTP_SECONDS)
            options["client_kwargs"] = {"timeout": timeout}
        system, path = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        raise DependencyError(
            f"{url} needs {error.name or protocol}: {error}. Install it: 'pip install "
            "memload[remote]' for HTTP, or the package of fsspec for other protocols.",
            name=error.name or protocol,
        ) from error
    except ValueError as error:
        raise SourceError(f"{url} cannot be opened: {error}.") from error
    return system, path
