"""Opens what the user names: a folder, files of some kind, a URL, or a data set."""

import glob
import os
import re
import shutil
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from memload.building.sources.arrays import ArrayFile
from memload.building.sources.beside import FilesBeside
from memload.building.sources.dataset import DatasetSource, has_classes
from memload.building.sources.existing import ExistingDataset
from memload.building.sources.folder import ImageFolder
from memload.building.sources.listed import ListedSource
from memload.building.sources.new_samples import NewSamples
from memload.building.sources.parquet import ParquetFiles
from memload.building.sources.record import EXTENSIONS, Source
from memload.building.sources.remote import (
    RemoteFiles,
    RemoteFolder,
    download,
    file_name,
    is_url,
    matching_urls,
)
from memload.building.sources.table import Manifest, list_images
from memload.building.sources.tar import TarShards
from memload.building.sources.zip import ZipArchive
from memload.errors import SourceError

#: What opens a file, by its ending.
_KINDS: Mapping[str, type] = {
    ".csv": Manifest,
    ".tsv": Manifest,
    ".txt": Manifest,
    ".parquet": ParquetFiles,
    ".tar": TarShards,
    ".zip": ZipArchive,
    ".npy": ArrayFile,
    ".npz": ArrayFile,  # which says what to do with it
    ".bin": ExistingDataset,
    ".idx": ExistingDataset,
}
#: The kinds that consist of several files.
_SEVERAL = (ParquetFiles, TarShards)

_TABLE = ("points", "boxes", "masks", "arrays", "path_column", "label_column", "extension", "where")
_OPTIONS: Mapping[type, tuple[str, ...]] = {
    ImageFolder: ("extensions",),
    RemoteFolder: ("extensions",),
    ZipArchive: ("extensions",),
    Manifest: ("root", *_TABLE),
    ParquetFiles: ("image_column", "label_column", "masks", "arrays"),
    TarShards: ("masks", "arrays", "points", "boxes"),
    ArrayFile: ("labels",),
}

#: The options of a map-style data set: names of entries of its samples.
_ENTRIES = ("masks", "arrays", "points", "boxes")

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

#: How points and boxes are given for the kinds that have them.
_FORMS: Mapping[tuple[type, str], str] = {
    (Manifest, "points"): "NAME=x*,y*",
    (Manifest, "boxes"): "NAME=x1*,y1*,x2*,y2*",
    (TarShards, "points"): "NAME",
    (TarShards, "boxes"): "NAME=100",
}

_MAX_FILES = 1_000_000
_NUMBERS = re.compile(r"\{(\d+)\.\.(\d+)\}")


class UsageError(ValueError):
    """Sources that cannot be built together, or an option that a source does not have."""


def open_source(
    source: Any,
    *,
    masks: str | Path | Sequence[str] | Mapping[str, str | Path] | None = None,
    arrays: Sequence[str] | Mapping[str, str | Path] | None = None,
    points: Sequence[str] | Mapping[str, str | int] | None = None,
    boxes: Mapping[str, int | str] | None = None,
    new_to: str | Path | None = None,
    classes: Sequence[str] | None = None,
    num_workers: int = 0,
    timeout: float = 60.0,
    **options: Any,
) -> Source:
    """Open what `memload.build` reads.

    ``source`` is a path or a URL, a list of paths of tar or Parquet files, a `Source`, or a
    map-style data set. A path is opened by its ending:

    ==========================  =================================================================
    ending                      options
    ==========================  =================================================================
    ``.csv .tsv .txt``          ``root``, ``path_column``, ``label_column``, ``extension``,
                                ``where``, see `Manifest`
    ``.parquet``                ``image_column``, ``label_column``
    ``.tar``                    none
    ``.zip``                    ``extensions``
    ``.npy``                    ``labels``, the path of another NPY file
    ``.bin .idx``               none; a data set of memload's
    a folder                    ``extensions``, see `ImageFolder`
    ==========================  =================================================================

    An option that is None, or an empty text, tuple or dict, counts as not given. A name such as
    ``shards/{000..123}.tar`` or ``shards/*.tar`` stands for all of these files. Tables, archives
    and arrays at a URL are copied into a temporary folder first, which is removed when the source
    is gone.

    ``masks`` and ``arrays`` are further arrays of each sample:

    - ``masks={"mask": "masks/"}`` and ``arrays={"depth": "depth/"}`` are files named as the images
      are (see `FilesBeside`), beside any source. ``masks="masks/"`` is short for a mask named
      ``mask``.
    - ``masks=["mask"]`` and ``arrays=["depth"]``, or ``{"mask": "segmentation"}`` where that is no
      folder, name entries of the source itself: of the samples of a map-style data set, columns of
      Parquet files, columns of a table with paths, and files in tars, such as ``000123.mask.png``.
      Other texts in ``arrays`` are patterns for the columns of numbers of a table, see `Manifest`.
    - ``points=["landmarks"]`` and ``boxes={"boxes": 100}`` name entries of a map-style data set,
      see `DatasetSource`, or of the JSON files in tars. For a table they are patterns for columns.

    ``new_to`` is the path of a data set of memload's. Samples whose keys it has are left out.

    The other arguments are for a map-style data set. ``classes`` are names for labels that are
    texts, if the data set has no list of its own. ``num_workers`` and ``timeout`` are those of the
    build: unless ``num_workers`` is 0, a worker reads the first sample.

    Raises SourceError, DependencyError, TypeError for what is no source, and ValueError for options
    that the source does not have. NothingNewError, a SourceError, says that ``new_to`` has all
    samples.

    >>> source = memload.open_source("pets.csv", label_column="breed")  # doctest: +SKIP
    >>> source.classes, source.notes  # doctest: +SKIP
    (['beagle', 'pug'], [])
    """
    if isinstance(masks, (str, os.PathLike)):
        masks = {"mask": masks}
    with_entries = has_entries(source)
    for folder in (*_values(masks), *_values(arrays)):
        if is_url(folder):
            raise SourceError(
                f"{folder}: masks and arrays beside the images are read from this machine. Copy "
                "the folder.",
                path=folder,
            )
    mask_folders, mask_entries = split_folders(masks, with_entries=with_entries)
    array_folders, array_entries = split_folders(arrays, with_entries=with_entries)
    options |= {"masks": mask_entries, "arrays": array_entries, "points": points, "boxes": boxes}
    given = {name: value for name, value in options.items() if _is_given(value)}
    opened = _open(source, given, classes=classes, num_workers=num_workers, timeout=timeout)
    if mask_folders or array_folders:
        opened = FilesBeside(opened, masks=mask_folders, arrays=array_folders)
    return opened if new_to is None else NewSamples(opened, new_to)


def _values(named: Any) -> list[Any]:
    return list(named.values()) if isinstance(named, Mapping) else list(named or ())


def _is_given(value: Any) -> bool:
    return value is not None and not (isinstance(value, (str, Sequence, Mapping)) and not value)


def has_entries(source: Any) -> bool:
    """Return whether masks and arrays may be parts of a source, and not only files beside it."""
    if _is_list_of_files(source):
        source = source[0]
    if isinstance(source, (str, os.PathLike)):
        return _kind_of(os.fspath(source)) in (Manifest, ParquetFiles, TarShards)
    return not isinstance(source, Source)


def is_entry(value: str | Path, *, with_entries: bool) -> bool:
    """Return whether a value of ``masks`` or ``arrays`` is no folder, but an entry or a pattern.

    ``with_entries`` says whether the source has any, see `has_entries`.
    """
    if isinstance(value, Path) or value.endswith("/") or Path(value).is_dir():
        return False
    return with_entries or any(mark in value for mark in "*?[:,")


def split_folders(
    named: Sequence[str] | Mapping[str, str | Path] | None, *, with_entries: bool
) -> tuple[dict[str, str | Path], Sequence[str] | dict[str, str]]:
    """Return those of ``masks`` or ``arrays`` that are folders, and those that are entries."""
    if not isinstance(named, Mapping):
        return {}, named or ()
    entries = {
        name: str(value)
        for name, value in named.items()
        if is_entry(value, with_entries=with_entries)
    }
    return {name: value for name, value in named.items() if name not in entries}, entries


def _open(
    source: Any,
    given: dict[str, Any],
    *,
    classes: Sequence[str] | None,
    num_workers: int,
    timeout: float,
) -> Source:
    """Open what is named, without files beside it."""
    if isinstance(source, (str, os.PathLike)):
        return open_paths([os.fspath(source)], given)
    if _is_list_of_files(source):
        return open_paths([os.fspath(path) for path in source], given)
    if isinstance(source, Source):
        if given:
            raise ValueError(
                f"{', '.join(map(_as_typed, given))}: the source is opened already. Give "
                f"{'this' if len(given) == 1 else 'these'} to {type(source).__name__} itself."
            )
        return source
    others = [name for name in given if name not in _ENTRIES]
    if others:
        raise ValueError(
            f"{', '.join(map(_as_typed, others))}: only for files and folders. Leave it out."
        )
    _check_map_style(source)
    own = classes is None or has_classes(source)
    return DatasetSource(
        source,
        classes=None if own else classes,
        num_workers=num_workers,
        timeout=timeout,
        **given,
    )


def _check_map_style(source: Any) -> None:
    """Raise TypeError for what cannot be read by number, with what to do instead."""
    name = type(source).__name__
    if isinstance(source, Mapping):
        parts = ", ".join(map(str, list(source)[:5])) or "none"
        raise TypeError(
            f"source: {name} holds several data sets ({parts}). Build them one by one, such as "
            f"source[{next(iter(source), 'train')!r}]."
        )
    is_iterable = any(kind.__name__ == "IterableDataset" for kind in type(source).__mro__)
    if not is_iterable and hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        return
    remedy = ""
    if is_iterable or hasattr(source, "__iter__"):
        remedy = (
            " It can only be read from its start to its end, but workers read samples by their "
            "number. Pass list(source) if it fits into memory. A streaming data set of Hugging "
            "Face is loaded with streaming=False; a WebDataset is given as its tar files."
        )
    raise TypeError(
        f"source: {name} is neither a path nor a Source nor a map-style data set.{remedy}"
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
    """Return what opens a file of this name. None for a folder, and for an unknown ending."""
    name = file_name(path) if is_url(path) else path.rstrip("/")
    return _KINDS.get(os.path.splitext(name)[1].lower())  # noqa: PTH122  # or a URL


def open_paths(given: Sequence[str], options: dict[str, Any]) -> Source:
    """Open paths or URLs that together are one source. Raises as `open_source` does."""
    paths = [path for name in given for path in _expand(name)]
    kinds = [None if Path(path).is_dir() else _kind_of(path) for path in paths]
    is_one_source = kinds[0] in _SEVERAL and len(set(kinds)) == 1
    if len(paths) > 1 and not is_one_source:
        names = ", ".join([*paths[:3], *["…"] * (len(paths) > 3)])
        raise UsageError(
            f"{len(paths)} sources are given: {names}. Several files of one kind can be built "
            "together if they are tar or Parquet files. Build others one by one."
        )
    return _open_as(kinds[0], paths, options)


def _open_as(kind: type | None, paths: Sequence[str], options: dict[str, Any]) -> Source:
    """Open paths as files of this kind, or as a folder if it is None."""
    if is_url(paths[0]):
        return _open_urls(paths, kind, options)
    opener = kind or ImageFolder
    _check_options(opener, options, paths[0])
    if opener is Manifest and is_url(options.get("root")):
        return _remote_table(paths[0], options)
    if kind is None:
        _check_folder(paths[0])
    opened: Source = opener(paths if opener in _SEVERAL else paths[0], **options)
    return opened


def _check_folder(path: str) -> None:
    """Raise SourceError for a file or folder of a kind that memload does not read."""
    loaded = _hugging_face_call(Path(path))
    if loaded:
        raise SourceError(
            f"{path} was saved by Hugging Face's datasets. Build it in Python: "
            f"memload.build({loaded}, …).",
            path=path,
        )
    if not Path(path).is_file():
        return  # a folder, or nothing, as ImageFolder says
    if path.lower().endswith((".gz", ".tgz", ".bz2", ".xz", ".zst")):
        remedy = "Unpack it first"
    else:
        remedy = "In Python, any map-style data set that reads it can be built"
    raise SourceError(
        f"{path} is neither a folder nor a file of a kind that memload reads: "
        f"{' '.join(kind for kind in _KINDS if kind != '.npz')}. {remedy}.",
        path=path,
    )


def _hugging_face_call(path: Path) -> str:
    """Return the call that loads what Hugging Face's datasets has saved; "" for anything else."""
    if (path / "dataset_dict.json").is_file():
        return f"datasets.load_from_disk({str(path)!r})['train']"
    if (path / "dataset_info.json").is_file():
        if (path / "state.json").is_file():
            return f"datasets.load_from_disk({str(path)!r})"
        path = min(path.glob("*.arrow"), default=path)  # a folder of its cache
    return f"datasets.Dataset.from_file({str(path)!r})" if path.suffix == ".arrow" else ""


def _open_urls(urls: Sequence[str], kind: type | None, options: dict[str, Any]) -> Source:
    """Open what lies on a server. Single files are copied."""
    _check_options(kind or RemoteFolder, options, urls[0])
    if kind is None:
        if file_name(urls[0]).lower().endswith(EXTENSIONS):
            raise SourceError(
                f"{urls[0]} is a single image. Give the URL of its folder, "
                f"{urls[0].rpartition('/')[0]}.",
                path=urls[0],
            )
        return RemoteFolder(urls[0], **options)
    folder, paths = download(urls)
    try:
        source = _open_copies(urls, paths, kind, options)
    except BaseException:  # a Ctrl-C, too, is to leave no copies behind
        _remove(folder, os.getpid())
        raise
    weakref.finalize(source, _remove, folder, os.getpid())
    return source


def _open_copies(
    urls: Sequence[str], paths: Sequence[str], kind: type, options: dict[str, Any]
) -> Source:
    """Open copies of files. Messages about them name the URLs."""

    def named(text: str) -> str:
        for url, path in zip(urls, paths, strict=True):
            text = text.replace(path, url)
        return text

    source: Source
    try:
        if kind is Manifest:
            source = _remote_table(paths[0], {"root": urls[0].rpartition("/")[0]} | options)
        else:
            source = kind(paths if kind in _SEVERAL else paths[0], **options)
    except SourceError as error:
        raise SourceError(named(str(error)), path=urls[0]) from error
    if isinstance(source, ParquetFiles) and source.lists_paths:
        raise SourceError(
            f"{urls[0]} holds the paths of images, and no images. Copy it and them to this "
            "machine, or list the images in a CSV file, which may lie beside them on the server.",
            path=urls[0],
        )
    if isinstance(source, ListedSource):
        source.notes = [named(note) for note in source.notes]
    return source


def _remote_table(path: str, options: dict[str, Any]) -> Source:
    """Open a table of this machine that lists images on a server."""
    root = options.pop("root").rstrip("/")
    names, columns = list_images(Path(path), **options)
    if columns.files:
        raise SourceError(
            f"{path} names {next(iter(columns.files))} files on a server, but masks and arrays are "
            "read from this machine. Copy them, and name their folder in place of the column.",
            path=path,
        )
    return RemoteFiles(root, names, columns)


def _check_options(kind: type, options: Mapping[str, Any], path: str) -> None:
    known = _OPTIONS.get(kind, ())
    unknown_names = [name for name in options if name not in known]
    unknown = [_as_typed(name) for name in unknown_names]
    _check_patterns(kind, options, path)
    for name in ("masks", "arrays"):
        if name in unknown_names and not isinstance(options[name], Mapping):
            entry = next(iter(options[name]))
            raise UsageError(
                f"{name}: {path} is read as {_DESCRIPTIONS[kind]}, which has no entries such as "
                f"{entry!r}. Name a folder of files: {name}={{{entry!r}: 'folder/'}}."
            )
    if unknown:
        if known == ("extensions",) and unknown != ["--extension"]:
            known = ()  # it would not be what was meant
        names = ", ".join(map(_as_typed, known))
        raise UsageError(
            f"{', '.join(unknown)}: {path} is read as {_DESCRIPTIONS[kind]}, to which this does "
            f"not apply. Leave it out{f', or use {names}' if names else ''}."
        )


def _check_patterns(kind: type, options: Mapping[str, Any], path: str) -> None:
    """Raise UsageError for points and boxes of a table without patterns, and of tars with them."""
    for name in ("points", "boxes"):
        value = options.get(name)
        if not value or (kind, name) not in _FORMS:
            continue
        values = value.values() if isinstance(value, Mapping) else [None]
        has_patterns = all(
            isinstance(each, str) or (name, each) == ("points", 2) for each in values
        )
        if has_patterns != (kind is Manifest):
            raise UsageError(
                f"--{name}: {path} is read as {_DESCRIPTIONS[kind]}, where this has the form "
                f"{_FORMS[kind, name]}."
            )


def _as_typed(option: str) -> str:
    """Return the name of an option on the command line."""
    return "--array" if option == "arrays" else f"--{option.replace('_', '-')}"


def _expand(path: str) -> list[str]:
    """Return what ``shards/{000..123}.tar`` or ``shards/*.tar`` stands for, as in a shell."""
    match = _NUMBERS.search(path)
    if not (match or any(mark in path for mark in "*?[")) or Path(path).exists():
        return [path]
    if match is None:
        return _matching(path)
    first, last = match.groups()
    numbers = range(int(first), int(last) + 1)
    if not 0 < len(numbers) <= _MAX_FILES:
        raise SourceError(
            f"{path}: {match[0]} does not stand for 1 to {_MAX_FILES:,} files. Write the lower "
            "number first, such as {000..123}."
        )
    return [
        name
        for number in numbers
        for name in _expand(f"{path[: match.start()]}{number:0{len(first)}}{path[match.end() :]}")
    ]


def _matching(pattern: str) -> list[str]:
    """Return the files of a pattern, sorted. In URLs only * counts."""
    if is_url(pattern):
        return matching_urls(pattern) if "*" in pattern else [pattern]
    found = sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207  # it may be absolute
    if not found:
        raise SourceError(f"{pattern}: no file has such a name. Check the pattern.", path=pattern)
    return found


def _remove(folder: Path, process: int) -> None:
    """Remove a temporary folder, but not at the end of a worker that was forked."""
    if process == os.getpid():
        shutil.rmtree(folder, ignore_errors=True)
