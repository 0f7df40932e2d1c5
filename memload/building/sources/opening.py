"""Opens what the user names: a folder, files of some kind, a URL, or a data set."""

import os
import re
import shutil
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from memload.building.sources.arrays import ArrayFile
from memload.building.sources.dataset import DatasetSource
from memload.building.sources.existing import ExistingDataset
from memload.building.sources.folder import ImageFolder
from memload.building.sources.parquet import ParquetFiles
from memload.building.sources.record import Source
from memload.building.sources.remote import RemoteFiles, RemoteFolder, download, is_url
from memload.building.sources.table import Manifest, list_images
from memload.building.sources.tar import TarShards
from memload.building.sources.zip import ZipArchive

#: What opens a file, by its ending.
_KINDS: Mapping[str, type] = {
    ".csv": Manifest,
    ".tsv": Manifest,
    ".txt": Manifest,
    ".parquet": ParquetFiles,
    ".tar": TarShards,
    ".zip": ZipArchive,
    ".npy": ArrayFile,
    ".bin": ExistingDataset,
    ".idx": ExistingDataset,
}
#: The kinds that consist of several files.
_SEVERAL = (ParquetFiles, TarShards)

_TABLE = ("points", "arrays", "path_column", "label_column", "extension", "where")
_OPTIONS: Mapping[type, tuple[str, ...]] = {
    ImageFolder: ("extensions",),
    RemoteFolder: ("extensions",),
    ZipArchive: ("extensions",),
    Manifest: ("root", *_TABLE),
    ParquetFiles: ("image_column", "label_column"),
    ArrayFile: ("labels",),
}

#: What messages call a source that is opened by a class.
_DESCRIPTIONS: Mapping[type, str] = {
    ImageFolder: "a folder of images",
    RemoteFolder: "a folder of images on a server",
    ZipArchive: "a zip archive",
    Manifest: "a table",
    ParquetFiles: "Parquet",
    TarShards: "tar shards",
    ArrayFile: "an array",
    ExistingDataset: "a memload data set",
}

_NUMBERS = re.compile(r"\{(\d+)\.\.(\d+)\}")


class UsageError(ValueError):
    """Sources that cannot be built together, or an option that a source does not have."""


def open_source(
    source: Any, *, num_workers: int = 0, timeout: float = 60.0, **options: Any
) -> Source:
    """Open what `memload.build` reads.

    ``source`` is a path or a URL, a list of paths of tar or Parquet files, a `Source`, or a
    map-style data set. A path is opened by its ending: a table (``.csv``, ``.tsv``, ``.txt``),
    ``.parquet``, ``.tar``, ``.zip``, ``.npy``, a data set of memload's (``.bin``, ``.idx``), or a
    folder. A name such as ``shards/{000..123}.tar`` stands for all of these files. Tables, archives
    and arrays at a URL are copied into a temporary folder first.

    ``options`` are those of the class that opens the kind of file. One that is None or empty counts
    as not given. ``num_workers`` and ``timeout`` are for `DatasetSource`.

    Raises SourceError, DependencyError, TypeError for what is no source, and ValueError for options
    that the source does not have.
    """
    given = {name: value for name, value in options.items() if value not in (None, (), "", {})}
    if isinstance(source, (str, os.PathLike)):
        return open_paths([os.fspath(source)], given)
    if _is_list_of_files(source):
        return open_paths([os.fspath(path) for path in source], given)
    if given:
        raise ValueError(f"{', '.join(given)}: only for files and folders. Leave it out.")
    if isinstance(source, Source):
        return source
    if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        return DatasetSource(source, num_workers=num_workers, timeout=timeout)
    remedy = ""
    if hasattr(source, "__iter__"):
        remedy = (
            " It can only be read from its start to its end, but workers read samples by their "
            "number. Pass list(source) if it fits into memory. A streaming data set of Hugging "
            "Face is loaded with streaming=False; a WebDataset is given as its tar files."
        )
    raise TypeError(
        f"source: {type(source).__name__} is neither a path nor a Source nor a map-style data "
        f"set.{remedy}"
    )


def open_table(path: str | Path, **options: Any) -> Source:
    """Open a table whatever its name is, such as that of a pipe. See `Manifest` for ``options``."""
    return _open_as(Manifest, [os.fspath(path)], options)


def _is_list_of_files(source: Any) -> bool:
    """Return whether these are files that make up one source, and not a list of images."""
    return (
        isinstance(source, (list, tuple))
        and bool(source)
        and all(
            isinstance(path, (str, os.PathLike)) and _kind_of(os.fspath(path)) is not None
            for path in source
        )
    )


def _kind_of(path: str) -> type | None:
    """Return what opens a file of this name; None for a folder."""
    return _KINDS.get(os.path.splitext(path.rstrip("/"))[1].lower())  # noqa: PTH122  # or a URL


def open_paths(given: Sequence[str], options: dict[str, Any]) -> Source:
    """Open paths or URLs that together are one source. Raises as `open_source` does."""
    paths = [path for name in given for path in _expand(name)]
    kinds = {None if Path(path).is_dir() else _kind_of(path) for path in paths}
    kind = kinds.pop()
    if len(paths) > 1 and (kinds or kind not in _SEVERAL):
        names = ", ".join([*paths[:3], *["…"] * (len(paths) > 3)])
        raise UsageError(
            f"{len(paths)} sources are given: {names}. Several files of one kind can be built "
            "together if they are tar or Parquet files. Build others one by one."
        )
    return _open_as(kind, paths, options)


def _open_as(kind: type | None, paths: Sequence[str], options: dict[str, Any]) -> Source:
    """Open paths as files of this kind, or as a folder if it is None."""
    if is_url(paths[0]):
        return _open_urls(paths, kind, options)
    opener = kind or ImageFolder
    _check_options(opener, options, paths[0])
    if opener is Manifest and is_url(options.get("root")):
        return _remote_table(paths[0], options)
    opened: Source = opener(paths if opener in _SEVERAL else paths[0], **options)
    return opened


def _open_urls(urls: Sequence[str], kind: type | None, options: dict[str, Any]) -> Source:
    """Open what lies on a server. Single files are copied."""
    _check_options(kind or RemoteFolder, options, urls[0])
    if kind is None:
        return RemoteFolder(urls[0], **options)
    folder, paths = download(urls)
    source: Source
    if kind is Manifest:
        source = _remote_table(paths[0], {"root": urls[0].rpartition("/")[0]} | options)
    else:
        source = kind(paths if kind in _SEVERAL else paths[0], **options)
    weakref.finalize(source, _remove, folder, os.getpid())
    return source


def _remote_table(path: str, options: dict[str, Any]) -> Source:
    """Open a table of this machine that lists images on a server."""
    root = options.pop("root").rstrip("/")
    names, columns = list_images(Path(path), **options)
    return RemoteFiles(root, names, columns)


def _check_options(kind: type, options: Mapping[str, Any], path: str) -> None:
    known = _OPTIONS.get(kind, ())
    unknown = [_as_typed(name) for name in options if name not in known]
    if unknown:
        names = ", ".join(map(_as_typed, known))
        raise UsageError(
            f"{', '.join(unknown)}: {path} is read as {_DESCRIPTIONS[kind]}, to which this does "
            f"not apply. Leave it out{f', or use {names}' if names else ''}."
        )


def _as_typed(option: str) -> str:
    """Return the name of an option on the command line."""
    return "--array" if option == "arrays" else f"--{option.replace('_', '-')}"


def _expand(path: str) -> list[str]:
    """Return the names that ``shards/{000..123}.tar`` stands for, as in a shell."""
    match = _NUMBERS.search(path)
    if match is None:
        return [path]
    first, last = match.groups()
    return [
        f"{path[: match.start()]}{number:0{len(first)}}{path[match.end() :]}"
        for number in range(int(first), int(last) + 1)
    ]


def _remove(folder: Path, process: int) -> None:
    """Remove a temporary folder, but not at the end of a worker that was forked."""
    if process == os.getpid():
        shutil.rmtree(folder, ignore_errors=True)
