"""Images on a server as a source: every URL that fsspec knows."""

import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memload.building.sources.columns import Columns
from memload.building.sources.listed import ListedSource, add_folder_labels
from memload.building.sources.record import EXTENSIONS, FileState, Record
from memload.errors import DependencyError, SourceError, describe_error

#: How often a file is asked for again, and how many seconds are waited before each time.
_WAITS = (0.5, 1.0, 2.0)


class RemoteFiles(ListedSource):
    """Image files below a URL, such as ``s3://bucket/train``.

    Workers fetch 32 files at a time. A file that cannot be fetched is tried three times more, and
    then rejected. Needs fsspec, and its library for the protocol, such as s3fs. Access keys are
    found as that library does.
    """

    def __init__(
        self,
        root: str,
        names: Sequence[str],
        columns: Columns,
        states: Sequence[FileState | None] | None = None,
    ) -> None:
        super().__init__(names, columns)
        self.root = root
        self._states = states

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
        return None if self._states is None else self._states[index]

    def _fetch(self, indices: Sequence[int]) -> list[bytes | Exception]:
        """Return the content of each file, or why it cannot be fetched."""
        # fsspec keeps one object for each process: one from before a fork does not work.
        file_system, root = _file_system(self.root)
        paths = {index: f"{root.rstrip('/')}/{self.keys[index]}" for index in indices}
        contents: dict[int, bytes | Exception] = {}
        missing = list(indices)
        for wait in (*_WAITS, None):
            found = _cat(file_system, [paths[index] for index in missing])
            contents |= {index: found[paths[index]] for index in missing}
            missing = [index for index in missing if isinstance(contents[index], Exception)]
            if not missing or wait is None:
                break
            time.sleep(wait)
        return [contents[index] for index in indices]


class RemoteFolder(RemoteFiles):
    """The images below a URL, with one folder for each class, as in `memload.ImageFolder`.

    Images in no folder have no labels. Other files are left out, which ``notes`` reports. Opening
    lists the files and reads none. See `RemoteFiles` for what is fetched when.

    Raises SourceError if the URL cannot be listed or has no images, and DependencyError.

    >>> source = memload.RemoteFolder("s3://bucket/train")  # doctest: +SKIP
    """

    def __init__(self, url: str, *, extensions: Sequence[str] = EXTENSIONS) -> None:
        file_system, root = _file_system(url)
        try:
            found = file_system.find(root, detail=True)
        except Exception as error:  # each protocol's library has its own errors
            raise SourceError(f"{url} cannot be listed: {describe_error(error)}.") from error
        images = sorted(path for path in found if path.lower().endswith(tuple(extensions)))
        if not images:
            raise SourceError(
                f"{url} has no image files ({' '.join(extensions)}), but {len(found):,} other "
                "files. Check the URL."
            )
        columns = Columns()
        if len(images) < len(found):
            columns.notes.append(f"skipped {len(found) - len(images):,} other files below {url}")
        prefix = root.rstrip("/") + "/"
        names = [path.removeprefix(prefix) for path in images]
        add_folder_labels(columns, names)
        super().__init__(url, names, columns.finish(), [_state(found[path]) for path in images])


def is_url(text: object) -> bool:
    """Return whether a source is a URL, such as ``s3://bucket/train``."""
    return isinstance(text, str) and "://" in text


def download(urls: Sequence[str]) -> tuple[Path, list[str]]:
    """Copy files into a temporary folder. Returns the folder and the paths. Raises SourceError."""
    folder = Path(tempfile.mkdtemp(prefix="memload-"))
    paths = [str(folder / url.rstrip("/").rpartition("/")[2]) for url in urls]
    try:
        for url, path in zip(urls, paths, strict=True):
            _download_one(url, path)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder, paths


def _download_one(url: str, path: str) -> None:
    file_system, remote = _file_system(url)
    for wait in (*_WAITS, None):
        try:
            file_system.get_file(remote, path)
            state = _state(file_system.info(remote))
        except Exception as error:  # each protocol's library has its own errors
            if wait is None:
                raise SourceError(f"{url} cannot be copied: {describe_error(error)}.") from error
            time.sleep(wait)
        else:
            # The same time as on the server lets a build continue after a second copy.
            os.utime(path, ns=(0, state.mtime_ns if state else 0))
            return


def _cat(file_system: Any, paths: Sequence[str]) -> dict[str, bytes | Exception]:
    found = file_system.cat(list(paths), on_error="return")
    # Of a single path, some file systems return the content itself.
    return found if isinstance(found, dict) else {paths[0]: found}


def _state(information: dict[str, Any]) -> FileState | None:
    """Return size and version of a remote file, or None if the server does not tell them.

    The version stands for the time of the last change, which each protocol calls otherwise.
    """
    names = ("ETag", "etag", "LastModified", "mtime", "updated", "last_modified", "created")
    version = next((information[name] for name in names if information.get(name)), None)
    size = information.get("size")
    if version is None or size is None:
        return None
    return FileState(size, zlib.crc32(str(version).encode()))


def _file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the path in it. Raises DependencyError."""
    protocol = url.partition("://")[0]
    try:
        import fsspec
    except ImportError as error:
        raise DependencyError(
            f"{url} needs fsspec. Install it with 'pip install memload[remote]'.", name="fsspec"
        ) from error
    try:
        file_system, path = fsspec.core.url_to_fs(url)
    except ImportError as error:  # its message names the package, such as s3fs
        raise DependencyError(f"{url}: {error}", name=protocol) from error
    except ValueError as error:
        raise SourceError(f"{url} cannot be opened: {error}.") from error
    return file_system, path
