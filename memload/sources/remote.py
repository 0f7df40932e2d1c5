"""Files at URLs that fsspec knows, such as ``s3://bucket/train``."""

import functools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

from memload.errors import (
    BuildError,
    DependencyError,
    MemloadError,
    SourceError,
    describe_error,
)
from memload.sources.archives import by_folder, labelled
from memload.sources.contents import Contents, Files
from memload.sources.reading import Reading
from memload.sources.samples import Source
from memload.storage.keys import Keys

Result = TypeVar("Result")

#: How many seconds are waited before a file is asked for again, each time.
_WAITS = (0.5, 1.0, 2.0)
#: After so many files in a row have failed, the server is taken for gone.
_MAX_FAILURES = 32
#: An HTTP server has so many seconds to send anything. Four times that is below the default of
#: ``timeout``, so that a file that hangs costs itself alone.
_HTTP_SECONDS = 10


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
    _, path = file_system(url)
    return Urls(url, Keys.of([name and f"{path.rstrip('/')}/{name}" for name in names]))


class Urls(Contents):
    """Files of a server, by their paths on it. An empty path stands for a missing one.

    A file that cannot be fetched is tried three times more. If 32 files in a row fail, the server
    is gone: BuildError is raised.
    """

    is_remote = True

    def __init__(self, url: str, paths: Keys) -> None:
        self._url, self._paths = url, paths
        self._failures = 0  # in a row

    def read(self, row: int) -> bytes | None:
        """Return the content of one file, or raise why it cannot be fetched."""
        path = self._paths[row]
        if not path:
            return None
        try:
            content: bytes = retried(lambda: _system(self._url, os.getpid()).cat_file(path))
        except Exception as error:  # each protocol's library has its own errors
            self._failures = self._failures + 1 if _may_pass(error) else 0
            if self._failures < _MAX_FAILURES:
                raise
            raise BuildError(
                f"{self._url}: {self._failures} files in a row cannot be fetched: "
                f"{describe_error(error)}. Check the connection, then run the same command "
                "again: it goes on where it stopped.",
                path=self._url,
            ) from error
        self._failures = 0
        return content


@functools.cache
def _system(url: str, process: int) -> Any:
    """Return the file system for a URL, one for all threads of a process."""
    # fsspec would make one for each thread. One from before a fork does not work.
    return file_system(url)[0]


def read_url(url: str) -> bytes:
    """Return the content of the file at a URL. Raises SourceError and DependencyError."""
    system, path = file_system(url)
    with url_errors(f"{url} cannot be read"):
        content: bytes = retried(lambda: system.cat_file(path))
    return content


def retried(call: Callable[[], Result]) -> Result:
    """Return what ``call`` returns. Errors that may pass are waited for, three times."""
    for wait in _WAITS:
        try:
            return call()
        except Exception as error:  # each protocol's library has its own errors
            if not _may_pass(error):
                raise
        time.sleep(wait)
    return call()


def _may_pass(error: Exception) -> bool:
    lasting = (FileNotFoundError, IsADirectoryError, PermissionError, NotImplementedError)
    return not isinstance(error, lasting)


@contextmanager
def url_errors(problem: str) -> Iterator[None]:
    """Turn any error of a store into SourceError, which begins with ``problem``."""
    try:
        yield
    except MemloadError:
        raise
    except FileNotFoundError as error:
        raise SourceError(f"{problem}: it does not exist. Check the path or URL.") from error
    except Exception as error:
        raise SourceError(
            f"{problem}: {describe_error(error)}. Check the path or URL, and the connection."
        ) from error


def _list(url: str) -> dict[str, str]:
    """Return the paths of all files below a URL, by their names below it. Raises SourceError."""
    from fsspec.asyn import AsyncFileSystem
    from fsspec.spec import AbstractFileSystem

    system, root = file_system(url)
    # By default, fsspec leaves out a folder that cannot be listed. Some protocols list in a way of
    # their own, which has no such option and raises.
    kind = type(system)
    is_usual = getattr(kind, "_find", None) is AsyncFileSystem._find
    is_usual = is_usual or (kind.find is AbstractFileSystem.find and not kind.async_impl)
    with url_errors(f"{url} cannot be listed"):
        found = retried(lambda: system.find(root, **({"on_error": "raise"} if is_usual else {})))
        if not found:
            raise FileNotFoundError(url)
    prefix = root.rstrip("/") + "/"
    names = [path.removeprefix(prefix) for path in found]
    if root.startswith("http"):  # it quotes names, and not always in one way
        names = [unquote(name, errors="surrogateescape") for name in names]
    return dict(zip(names, found, strict=True))


def file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the path in it. Raises DependencyError."""
    options: dict[str, Any] = {}
    try:
        import fsspec

        if url.startswith("http"):
            from aiohttp import ClientTimeout

            timeout = ClientTimeout(None, sock_connect=_HTTP_SECONDS, sock_read=_HTTP_SECONDS)
            options["client_kwargs"] = {"timeout": timeout}
        system, path = fsspec.core.url_to_fs(url, **options)
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
