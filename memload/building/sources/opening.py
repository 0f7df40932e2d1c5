"""Opens what the user names: a folder, files of some kind, a URL, or a data set."""

import glob
import os
import re
import shutil
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

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
from memload.wording import listed

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

#: The options that name what a sample has beside its image.
_PARTS = ("masks", "arrays", "points", "boxes")


class _Kind(NamedTuple):
    """What messages call a kind of source, which options it has, and how its parts are named.

    Masks and arrays in folders go with every source. ``arrays`` says what they may be otherwise,
    besides folders. ``points`` and ``boxes`` are forms as they are typed. Empty: it has none.
    """

    description: str
    options: tuple[str, ...] = ()
    arrays: str = ""
    points: str = ""
    boxes: str = ""

    def known_options(self) -> tuple[str, ...]:
        """Return the names of all options that such a source has."""
        parts = {"masks": self.arrays, "arrays": self.arrays}
        parts |= {"points": self.points, "boxes": self.boxes}
        return (*(name for name, form in parts.items() if form), *self.options)


_TABLE_OPTIONS = ("root", "path_column", "label_column", "extension", "where")
#: All kinds of sources. What is no folder, as `_is_folder` says, is a part of the source itself: a
#: column of a table, which has paths, or a pattern for columns of numbers, as `Manifest` finds out;
#: a column of Parquet files; the extension of files in tars; an entry of a data set's samples.
_SOURCES: Mapping[type, _Kind] = {
    ImageFolder: _Kind("a folder of images", ("extensions",)),
    RemoteFolder: _Kind("a folder of images on a server", ("extensions",)),
    ZipArchive: _Kind("a zip archive", ("extensions",)),
    Manifest: _Kind(
        "a table", _TABLE_OPTIONS, "columns or patterns", "NAME=x*,y*", "NAME=x1*,y1*,x2*,y2*"
    ),
    ParquetFiles: _Kind("Parquet", ("image_column", "label_column"), "columns"),
    TarShards: _Kind("tar shards", (), "extensions", "NAME", "NAME=100"),
    ArrayFile: _Kind("an array", ("labels",)),
    ExistingDataset: _Kind("a memload data set"),
    DatasetSource: _Kind("a data set", (), "entries", "NAME", "NAME=100"),
}

_MAX_FILES = 1_000_000
_NUMBERS = re.compile(r"\{(\d+)\.\.(\d+)\}")


class UsageError(ValueError):
    """Sources that cannot be built together, or an option that a source does not have."""


@dataclass(frozen=True)
class FilesToOpen:
    """Paths or URLs that together are one source, and how they are read: see `open_files`."""

    names: tuple[str, ...]
    is_table: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, source: Any) -> "FilesToOpen | None":
        """Return what is to be opened if ``source`` names files, and None for anything else."""
        if isinstance(source, FilesToOpen):
            return source
        if isinstance(source, (str, os.PathLike)):
            return cls((os.fspath(source),))
        if _is_list_of_files(source):
            return cls(tuple(map(os.fspath, source)))
        return None

    @property
    def have_settings(self) -> bool:
        """Whether the size and mode that are stored depend on the files, by default."""
        kinds = (ArrayFile, ExistingDataset)
        return any(_KINDS.get(Path(name).suffix.lower()) in kinds for name in self.names)

    def paths(self) -> Iterator[Path]:
        """Yield the files that exist, after patterns are resolved.

        Folders and what is on a server are left out. Of a data set, it is the index.
        """
        for name in (path for pattern in self.names for path in _expand(pattern)):
            path = Path(name)
            if _kind_of(name) is ExistingDataset:
                path = path.with_suffix(".idx")
            if not is_url(name) and path.is_file():
                yield path

    def absolute(self) -> "FilesToOpen":
        """Return the same with paths from the root."""
        names = tuple(
            name if is_url(name) else os.path.abspath(name)  # noqa: PTH100  # it may be a pattern
            for name in self.names
        )
        return replace(self, names=names)


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
    files = FilesToOpen.of(source)
    if files is not None:
        parts = {"masks": masks, "arrays": arrays, "points": points, "boxes": boxes}
        given = {name: value for name, value in parts.items() if _is_given(value)}
        opened = open_files(
            files.names, is_table=files.is_table, **{**given, **options, **files.options}
        )
        return opened if new_to is None else NewSamples(opened, new_to)
    is_entry = not isinstance(source, Source)
    mask_folders, masks = _split("masks", masks, has_entries=is_entry)
    array_folders, arrays = _split("arrays", arrays, has_entries=is_entry)
    options |= {"masks": masks, "arrays": arrays, "points": points, "boxes": boxes}
    given = {name: value for name, value in options.items() if _is_given(value)}
    opened = _open_object(source, given, classes, num_workers, timeout)
    opened = _with_folders(opened, mask_folders, array_folders)
    return opened if new_to is None else NewSamples(opened, new_to)


def open_files(
    names: Sequence[str],
    *,
    is_table: bool = False,
    masks: Any = None,
    arrays: Any = None,
    points: Any = None,
    boxes: Any = None,
    **options: Any,
) -> Source:
    """Open paths or URLs that together are one source. Raises as `open_source` does.

    With ``is_table`` it is a table whatever its name is, such as that of a pipe. What is named may
    be as it is typed: ``masks`` and ``arrays`` as pairs of a name, or "", and a text; ``points`` as
    a mapping to empty texts; and the numbers of ``boxes`` as texts.
    """
    kind, paths = (Manifest, names) if is_table else _kind_and_paths(names)
    opener = kind or (RemoteFolder if is_url(paths[0]) else ImageFolder)
    has_entries = bool(_SOURCES[opener].arrays)
    mask_folders, masks = _split("masks", masks, has_entries=has_entries)
    array_folders, arrays = _split("arrays", arrays, has_entries=has_entries)
    if isinstance(points, Mapping) and not any(points.values()):
        points = list(points)
    if opener is not Manifest and isinstance(boxes, Mapping):
        boxes = {
            name: int(value) if isinstance(value, str) and value.isdecimal() else value
            for name, value in boxes.items()
        }
    options |= {"masks": masks, "arrays": arrays, "points": points, "boxes": boxes}
    given = {name: value for name, value in options.items() if _is_given(value)}
    return _with_folders(_open_as(kind, paths, given), mask_folders, array_folders)


def _is_given(value: Any) -> bool:
    return value is not None and not (isinstance(value, (str, Sequence, Mapping)) and not value)


def _split(
    argument: str, given: Any, *, has_entries: bool
) -> tuple[dict[str, str | Path], Sequence[str] | dict[str, str]]:
    """Return what is named as ``masks`` or ``arrays``: folders and entries, each by its name."""
    if argument == "masks" and isinstance(given, (str, os.PathLike)):
        return {"mask": os.fspath(given)}, ()
    if not isinstance(given, Mapping) and all(isinstance(each, str) for each in given or ()):
        return {}, given or ()
    folders: dict[str, str | Path] = {}
    entries: dict[str, str] = {}
    for name, value in given.items() if isinstance(given, Mapping) else given:
        is_folder = _is_folder(value, has_entries=has_entries)
        # An entry such as seg.png, which means files such as 1.seg.png in a tar, has the name seg.
        own_name = name or ("mask" if is_folder else value.partition(".")[0])
        if own_name in folders or own_name in entries:
            raise UsageError(f"{_as_typed(argument)} has {own_name!r} twice. Give each name once.")
        if is_folder:
            folders[own_name] = value
        else:
            entries[own_name] = value
    return folders, entries


def _is_folder(value: str | Path, *, has_entries: bool) -> bool:
    """Return whether a value of ``masks`` or ``arrays`` is a folder, and no part of the source."""
    if isinstance(value, Path) or value.endswith("/") or Path(value).is_dir():
        return True
    return (not has_entries and not any(mark in value for mark in "*?[:,")) or is_url(value)


def _with_folders(
    source: Source, masks: Mapping[str, str | Path], arrays: Mapping[str, str | Path]
) -> Source:
    """Return a source with masks and arrays that lie in folders."""
    for folder in (*masks.values(), *arrays.values()):
        if is_url(folder):
            raise SourceError(
                f"{folder}: masks and arrays beside the images are read from this machine. Copy "
                "the folder.",
                path=folder,
            )
    return FilesBeside(source, masks=masks, arrays=arrays) if masks or arrays else source


def _open_object(
    source: Any,
    given: dict[str, Any],
    classes: Sequence[str] | None,
    num_workers: int,
    timeout: float,
) -> Source:
    """Open what is no file, without files beside it."""
    if isinstance(source, Source):
        if given:
            raise ValueError(
                f"{', '.join(given)}: the source is opened already. Give "
                f"{'this' if len(given) == 1 else 'these'} to {type(source).__name__} itself."
            )
        return source
    others = [name for name in given if name not in _PARTS]
    if others:
        raise ValueError(f"{', '.join(others)}: only for files and folders. Leave it out.")
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


def _kind_and_paths(given: Sequence[str]) -> tuple[type | None, list[str]]:
    """Return what opens paths or URLs, or None for a folder, and what their patterns stand for."""
    paths = [path for name in given for path in _expand(name)]
    kinds = [None if Path(path).is_dir() else _kind_of(path) for path in paths]
    is_one_source = kinds[0] in _SEVERAL and len(set(kinds)) == 1
    if len(paths) > 1 and not is_one_source:
        raise UsageError(
            f"{len(paths)} sources are given: {listed(paths, 3)}. Several files of one kind can be "
            "built together if they are tar or Parquet files. Build others one by one."
        )
    return kinds[0], paths


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
    """Raise SourceError for a file or folder that may not be read, or of an unknown kind."""
    if not path:
        raise SourceError("The path of the source is empty. Name a folder or a file.")
    if Path(path).is_dir() and not os.access(path, os.R_OK | os.X_OK):
        raise SourceError(f"{path} cannot be read: Permission denied.", path=path)
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
    source.is_portable = False  # type: ignore[attr-defined]  # these copies are on this machine
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
    known, description = _SOURCES[kind].known_options(), _SOURCES[kind].description
    unknown_names = [name for name in options if name not in known]
    unknown = [_as_typed(name) for name in unknown_names]
    _check_patterns(kind, options, path)
    for name in ("masks", "arrays"):
        if name in unknown_names and not isinstance(options[name], Mapping):
            entry = next(iter(options[name]))
            raise UsageError(
                f"{name}: {path} is read as {description}, which has no entries such as "
                f"{entry!r}. Name a folder of files: {name}={{{entry!r}: 'folder/'}}."
            )
    if unknown:
        if known == ("extensions",) and unknown != ["--extension"]:
            known = ()  # it would not be what was meant
        names = ", ".join(map(_as_typed, known))
        raise UsageError(
            f"{', '.join(unknown)}: {path} is read as {description}, to which this does "
            f"not apply. Leave it out{f', or use {names}' if names else ''}."
        )


def _check_patterns(kind: type, options: Mapping[str, Any], path: str) -> None:
    """Raise UsageError for points and boxes of a table without patterns, and of tars with them."""
    for name in ("points", "boxes"):
        value, form = options.get(name), getattr(_SOURCES[kind], name)
        if not value or not form:
            continue
        values = value.values() if isinstance(value, Mapping) else [None]
        has_patterns = all(
            isinstance(each, str) or (name, each) == ("points", 2) for each in values
        )
        if has_patterns != (kind is Manifest):
            raise UsageError(
                f"--{name}: {path} is read as {_SOURCES[kind].description}, where this has the "
                f"form {form}."
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
