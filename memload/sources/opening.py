"""Finds out what a source is, and opens it."""

import functools
import glob
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from memload.errors import SourceError
from memload.sources.archives import open_folder, open_zip
from memload.sources.existing import new_samples, open_array, open_existing
from memload.sources.mapped import DatasetSource, first_usable_here
from memload.sources.parquet import is_hugging_face, open_hugging_face, open_parquet
from memload.sources.remote import is_url, open_url
from memload.sources.samples import (
    Kind,
    Reading,
    Samples,
    Source,
    check_labels,
    named,
    refuse_splits,
)
from memload.sources.tables import open_table
from memload.sources.tars import open_tars
from memload.storage.index import Index
from memload.wording import listed


class _Kind(NamedTuple):
    """A kind of source: what opens it, what messages call it, and the options that it has."""

    open: Callable[[Any, Reading], Any]
    description: str
    options: tuple[str, ...] = ()
    takes_several: bool = False


_FOLDER = _Kind(open_folder, "a folder of images", ("extensions",))
_URL = _Kind(open_url, "a folder of images at a URL", ("extensions",))
_ENTRIES = ("image", "label", "masks", "arrays", "points", "boxes")
_TABLE = _Kind(open_table, "a table", (*_ENTRIES, "where", "root"))
_ARRAY = _Kind(open_array, "an array", ("label",))  # which says what to do with an .npz
_EXISTING = _Kind(open_existing, "a memload data set", ("where",))
_MAPPED = "a data set"
_HUGGING_FACE = _Kind(open_hugging_face, "a data set of Hugging Face's", _TABLE.options)
#: The kinds of files, by their ending.
_KINDS: Mapping[str, _Kind] = {
    **dict.fromkeys((".csv", ".tsv", ".txt", ".jsonl", ".ndjson"), _TABLE),
    ".parquet": _Kind(open_parquet, "Parquet", _TABLE.options, takes_several=True),
    ".tar": _Kind(open_tars, "tar files", (*_ENTRIES, "where"), takes_several=True),
    ".zip": _Kind(open_zip, "a zip", ("extensions",)),
    **dict.fromkeys((".npy", ".npz"), _ARRAY),
    **dict.fromkeys((".bin", ".idx"), _EXISTING),
}
_ARGUMENTS: Sequence[tuple[str, Kind]] = (("masks", "mask"), ("arrays", "array"))
_NUMBERS = re.compile(r"\{(\d+)\.\.(\d+)\}")


class UsageError(ValueError):
    """Sources that cannot be built together, or an option that a source does not have."""


def open_source(
    source: Any,
    *,
    classes: Any = None,
    new_to: str | Path | None = None,
    first_usable: Callable[[Callable[[int], Any], Sequence[str]], Any] = first_usable_here,
    **options: Any,
) -> Source:
    """Open what `memload.build` reads. No picture is read.

    Args:
        source: A folder, a table (``.csv``, ``.tsv``, ``.txt``, ``.jsonl``), a ``.zip``, one or
            several ``.parquet`` or ``.tar`` files, an array (``.npy``), a data set of memload's, a
            URL of a folder or a table, a data set of Hugging Face's, or any map-style data set.
            ``shards/{000..123}.tar`` and ``shards/*.tar`` stand for all of these files.
        classes: The names of the classes: a list, a data set, its path, or a text file.
        new_to: A data set of memload's. Samples whose names it has are left out.
        first_usable: Looks at samples of a data set in Python, perhaps in another process: see
            `memload.sources.mapped.first_usable_here`.
        options: How the source is read, as listed below.

    These options say how the source is read:

    - ``image``: The column of the images, or a template for a table's, such as
      ``"train_images/{image_id}.jpg"``. For a data set in Python, an entry.
    - ``label``: The column or entry of the labels. For an array, an NPY file.
    - ``where``: Reads only the rows of a table, Parquet, tars, Hugging Face's or a memload data set
      with these values, such as ``{"split": "train"}``. A list means any of its values, and
      so does a text such as ``"train,val"``, unless it is a value itself.
    - ``root``: The folder or URL that the paths of a table are relative to.
    - ``extensions``: The extensions of images in a folder or a zip, such as ``[".jpg", ".gif"]``.
    - ``masks``: A folder of masks, which are called as the images are; or, by the names of masks,
      folders, columns, templates, or entries. ``masks=["seg"]`` is short for
      ``{"seg": "seg"}``.
    - ``arrays``: The same for other arrays, which are stored as they are.
    - ``points``: Columns or entries of points x, y, by name; for a table also patterns for columns
      of numbers, such as ``{"marks": "x*,y*"}``.
    - ``boxes``: The same for boxes x1, y1, x2, y2. For a data set in Python, the most that a sample
      has, such as ``{"boxes": 100}``.

    Raises SourceError, DependencyError, TypeError for what is no source, and ValueError for options
    that the source does not have. NothingNewError, a SourceError, says that ``new_to`` has all
    samples.

    >>> source = memload.open_source("pets.csv", label="breed")  # doctest: +SKIP
    >>> source.classes, source.notes  # doctest: +SKIP
    (['beagle', 'pug'], [])
    """
    names = None if classes is None else read_classes(classes)
    opened = _open(source, options, functools.partial(_open_mapped, names, first_usable))
    if not isinstance(opened, Samples):
        return opened
    check_labels(opened)
    if names is None:
        refuse_splits(opened)
    else:
        opened = opened.with_classes(names)
    return opened if new_to is None else new_samples(opened, new_to)


def _open(
    source: Any, options: Mapping[str, Any], open_mapped: Callable[[Any, Reading], Any]
) -> Source:
    """Open a source, and masks and arrays in folders."""
    place, kind, source = _kind_of(source, open_mapped)
    given = _by_name(options)
    folders = _without_folders(given, kind)
    _check_options(given, kind, place)
    samples: Any = kind.open(source, Reading(**given))
    for name, array_kind, folder in folders:
        samples = samples.with_files(name, array_kind, folder)
    read = {name: repr(value) for name, value in given.items() if value and name != "root"}
    if read or folders:  # without paths: files may be moved while a build is interrupted
        read |= {name: Path(folder).absolute().name for name, _, folder in folders}
        samples = samples.changed(options={**read, **samples.options})
    opened: Source = samples
    return opened


def _kind_of(source: Any, open_mapped: Callable[[Any, Reading], Any]) -> tuple[str, _Kind, Any]:
    """Return what messages call a source, its kind, and what that opens."""
    paths = paths_of(source)
    if paths is not None:
        return paths[0], *_kind_of_paths(paths)
    place = type(source).__name__
    if isinstance(source, Source):
        return place, _Kind(lambda opened, _: opened, "opened already"), source
    if is_hugging_face(source):
        return place, _HUGGING_FACE, source
    _check_map_style(source)
    return place, _Kind(open_mapped, _MAPPED, _ENTRIES), source


def _by_name(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are given, with masks, arrays, points and boxes by name."""
    given = {name: value for name, value in options.items() if value}
    if isinstance(given.get("masks"), (str, os.PathLike)):
        given["masks"] = {"mask": given["masks"]}
    for name in ("masks", "arrays", "points", "boxes"):
        given[name] = named(name, given.get(name, ()))
    if isinstance(given.get("extensions"), str):  # each of its characters would count as one
        raise TypeError(f"extensions must be a list such as ['.jpg'], not {given['extensions']!r}")
    if twice := given["masks"].keys() & given["arrays"].keys():
        raise UsageError(f"--array: {min(twice)!r:.80} is a mask, too. Choose another name.")
    return given


def _without_folders(given: Mapping[str, Any], kind: _Kind) -> list[tuple[str, Kind, Any]]:
    """Take those masks and arrays out of the options that lie in folders, and return them."""
    return [
        (name, array_kind, given[argument].pop(name))
        for argument, array_kind in _ARGUMENTS
        for name, value in [*given[argument].items()]
        if _is_folder(value, argument in kind.options)
    ]


def _check_options(given: Mapping[str, Any], kind: _Kind, place: str) -> None:
    """Raise UsageError for options that a kind of source does not have."""
    names = {"masks": "--mask", "arrays": "--array"}
    if unknown := [name for name in given if given[name] and name not in kind.options]:
        raise UsageError(
            f"{', '.join(names.get(name, f'--{name}') for name in unknown)}: {place} is "
            f"{kind.description}, to which this does not apply. Leave it out."
        )
    has_most = any(isinstance(each, int) for each in given["boxes"].values())
    if has_most and kind.description != _MAPPED:
        raise UsageError(
            f"--boxes: the most is found in {place}. Give names: boxes={[*given['boxes']]}."
        )


def _open_mapped(
    classes: Sequence[str] | None, first_usable: Callable[..., Any], dataset: Any, reading: Reading
) -> DatasetSource:
    """Open a map-style data set. ``classes`` name its labels if it does not name them itself."""
    return DatasetSource(
        dataset,
        image=reading.image,
        label=reading.label,
        masks=reading.masks,
        arrays=reading.arrays,
        points=[*reading.points],
        boxes=reading.boxes,
        classes=classes if getattr(dataset, "classes", None) is None else None,
        first_usable=first_usable,
    )


def _is_folder(value: Any, has_entries: bool) -> bool:
    if not has_entries or not isinstance(value, str):
        return True
    return value.endswith("/") or ("{" not in value and Path(value).is_dir())


# ------------------------------------------------------------------------------- what opens what


def paths_of(source: Any) -> tuple[str, ...] | None:
    """Return the paths or URLs that a source names, and None for anything else."""
    if isinstance(source, (str, os.PathLike)):
        return (os.fspath(source),)
    if not isinstance(source, (list, tuple)) or not source:
        return None
    are_files = all(
        isinstance(each, (str, os.PathLike)) and _ending(each) in _KINDS for each in source
    )
    return tuple(map(os.fspath, source)) if are_files else None


def _ending(path: Any) -> str:
    name: str = os.fspath(path).rstrip("/")
    name = name.partition("?")[0] if name.startswith("http") else name
    return os.path.splitext(name)[1].lower()  # noqa: PTH122  # it may be a URL


def _kind_of_paths(names: Sequence[str]) -> tuple[_Kind, Any]:
    """Return the kind of a source, and its path or URL, or its paths if it may have several."""
    paths = [path for name in names for path in _expand(name)]
    if not paths[0]:
        raise SourceError("The path of the source is empty. Name a folder or a file.")
    kinds = {None if Path(path).is_dir() else _KINDS.get(_ending(path)) for path in paths}
    kind = kinds.pop()
    takes_several = kind is not None and kind.takes_several
    if kinds or (len(paths) > 1 and not takes_several):
        raise UsageError(
            f"{len(paths)} sources are given: {listed(paths, 3)}. Several files of one kind can be "
            "built together if they are tar or Parquet files. Build others one by one."
        )
    if is_url(paths[0]):
        return _kind_of_url(paths[0], kind), paths[0]
    if kind is None:
        _check_folder(Path(paths[0]))
        kind = _FOLDER
    return kind, [Path(path) for path in paths] if takes_several else Path(paths[0])


def _kind_of_url(url: str, kind: _Kind | None) -> _Kind:
    """Return the kind of a URL: a folder or a table. Raises SourceError for other files."""
    if kind is None or kind is _TABLE:
        return kind or _URL
    remedy = "Download it first (wget -c, aws s3 cp, hf download), and build the copy"
    if kind is _EXISTING:
        remedy = (
            "Download its index (.idx) and the files of its pixels (.bin) first. A data set of "
            "memload's is opened with memload.MemmapDataset"
        )
    raise SourceError(f"{url} is {kind.description}. {remedy}.")


def _check_folder(path: Path) -> None:
    """Raise SourceError for what is no folder."""
    if not path.is_dir():
        what = "is a file of another kind" if path.exists() else "does not exist. Check the path"
        raise SourceError(
            f"{path} {what}. memload reads folders and {' '.join(_KINDS)}. Compressed archives "
            "have to be unpacked first; in Python, any map-style data set can be built.",
            path=path,
        )


def _check_map_style(source: Any) -> None:
    """Raise TypeError for what cannot be read by number, with what to do instead."""
    name = type(source).__name__
    if isinstance(source, Mapping):
        raise TypeError(
            f"source: {name} holds several data sets ({listed(source, 5)}). Build them one by one, "
            f"such as source[{next(iter(source), 'train')!r}]."
        )
    is_iterable = any(kind.__name__ == "IterableDataset" for kind in type(source).__mro__)
    if is_iterable or not (hasattr(source, "__getitem__") and hasattr(source, "__len__")):
        raise TypeError(
            f"source: {name} is neither a path nor a map-style data set, with len() and [index]. "
            "Samples are read by their number: pass list(source) if it fits into memory. A data "
            "set of Hugging Face's is loaded with streaming=False; a WebDataset is given as its "
            "tar files."
        )


def _expand(path: str) -> list[str]:
    """Return what ``shards/{000..123}.tar`` or ``shards/*.tar`` stands for, as in a shell."""
    match = _NUMBERS.search(path)
    if is_url(path) or Path(path).exists() or not (match or any(mark in path for mark in "*?[")):
        return [path]
    if match is None:
        found = sorted(glob.glob(path, recursive=True))  # noqa: PTH207  # it may be absolute
    else:
        first, last = match.groups()
        parts = path[: match.start()], path[match.end() :]
        numbers = range(int(first), int(last) + 1)
        names = (f"{number:0{len(first)}}".join(parts) for number in numbers)
        found = [name for each in names for name in _expand(each)]
    if not found:
        raise SourceError(
            f"{path}: no file has such a name. Check the pattern, such as {{000..123}}.tar.",
            path=path,
        )
    return found


def read_classes(classes: Any) -> list[str]:
    """Return names of classes from a list, a data set, its path, or a text file with one a line.

    Raises ValueError and SourceError.
    """
    names = getattr(classes, "classes", classes)
    if isinstance(classes, (str, Path)):
        path = Path(classes)
        if path.suffix in (".bin", ".idx"):
            names = Index.open(path).classes
        else:
            try:
                lines = path.read_text(encoding="utf-8-sig").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise SourceError(f"{path} cannot be read: {error}.", path=path) from error
            names = [line.strip() for line in lines if line.strip()]
    if isinstance(names, Mapping) or not isinstance(names, Sequence) or not names:
        raise ValueError(f"classes: {classes!r:.200} has no names of classes.")
    if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise ValueError("classes: the names are not all different texts.")
    return list(names)
