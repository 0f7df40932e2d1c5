"""Finds out what a source is, and opens it."""

import glob
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from memload.errors import SourceError
from memload.sources.archives import open_folder, open_zip
from memload.sources.existing import new_samples, open_array, open_existing
from memload.sources.mapped import DatasetSource, first_usable_here
from memload.sources.parquet import is_hugging_face, open_hugging_face, open_parquet
from memload.sources.reading import Reading
from memload.sources.remote import is_url, open_url
from memload.sources.samples import Source, check_labels, refuse_splits
from memload.sources.tables import open_table
from memload.sources.tars import open_tars
from memload.storage.index import Index
from memload.wording import listed


class _Kind(NamedTuple):
    """A kind of source: what opens it, what messages call it, and the options that it has."""

    open: Callable[[Any, Reading], Source]
    description: str
    options: tuple[str, ...] = ()
    takes_several: bool = False


_ENTRIES = ("image", "label", "masks", "arrays", "points", "boxes")
_FOLDER = _Kind(open_folder, "a folder of images", ("extensions",))
_URL = _Kind(open_url, "a folder of images at a URL", ("extensions",))
_TABLE = _Kind(open_table, "a table", (*_ENTRIES, "where", "root"))
_EXISTING = _Kind(open_existing, "a memload data set", ("where",))
_HUGGING_FACE = _Kind(open_hugging_face, "a data set of Hugging Face's", _TABLE.options)
_MAPPED = _Kind(lambda dataset, _: DatasetSource(dataset), "a data set", _ENTRIES)
_OPENED = _Kind(lambda source, _: source, "opened already")
#: The kinds of files, by their ending.
_KINDS: Mapping[str, _Kind] = {
    **dict.fromkeys((".csv", ".tsv", ".txt", ".jsonl", ".ndjson"), _TABLE),
    ".parquet": _Kind(open_parquet, "Parquet", _TABLE.options, takes_several=True),
    ".tar": _Kind(open_tars, "tar files", (*_ENTRIES, "where"), takes_several=True),
    ".zip": _Kind(open_zip, "a zip", ("extensions",)),
    ".npy": _Kind(open_array, "an array", ("label",)),
    **dict.fromkeys((".bin", ".idx"), _EXISTING),
}
_NUMBERS = re.compile(r"\{(\d+)\.\.(\d+)\}")


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
    place, kind, what = _kind_of(source)
    reading = Reading.of(**options)
    has_entries = "masks" in kind.options
    entries, folders = dict(reading.entries), []
    for name, (_, value) in reading.entries.items():
        is_text = has_entries and isinstance(value, str) and not value.endswith("/")
        if not is_text or ("{" not in value and Path(value).is_dir()):
            folders.append((name, *entries.pop(name)))
    reading = replace(reading, entries=entries)
    _check_options(options, reading, kind, place)
    if kind is _MAPPED:
        given: dict[str, Any] = {name: options.get(name) for name in _ENTRIES}
        for each in ("mask", "array"):
            given[f"{each}s"] = {name: text for name, (own, text) in entries.items() if own == each}
        own_names = names if getattr(what, "classes", None) is None else None
        opened: Source = DatasetSource(what, classes=own_names, first_usable=first_usable, **given)
    else:
        opened = kind.open(what, reading)
    # Without paths: files may be moved while a build is interrupted.
    read = {"reading": repr(replace(reading, root=None))}
    for name, array_kind, folder in folders:
        opened = opened.with_files(name, array_kind, folder)
        read[name] = Path(folder).absolute().name
    opened = opened.changed(options={**read, **opened.options})
    check_labels(opened)
    if names is None:
        refuse_splits(opened, place)
    else:
        opened = opened.with_classes(names)
    return opened if new_to is None else new_samples(opened, new_to)


def _check_options(options: Mapping[str, Any], reading: Reading, kind: _Kind, place: str) -> None:
    """Raise ValueError for options that a kind of source does not have."""
    given = [name for name in options if options[name] and name not in ("masks", "arrays")]
    if unknown := [f"--{name}" for name in given if name not in kind.options]:
        raise ValueError(
            f"{', '.join(unknown)}: {place} is {kind.description}, to which this does not apply. "
            "Leave it out."
        )
    if kind is not _MAPPED and any(isinstance(most, int) for most in reading.boxes.values()):
        raise ValueError(
            f"--boxes: the most is found in {place}. Give names: boxes={[*reading.boxes]}."
        )


# ------------------------------------------------------------------------------- what opens what


def _kind_of(source: Any) -> tuple[str, _Kind, Any]:
    """Return what messages call a source, its kind, and what that opens. Raises TypeError."""
    paths, name = paths_of(source), type(source).__name__
    if paths is not None:
        return paths[0], *_kind_of_paths([path for each in paths for path in _expand(each)])
    if isinstance(source, Source):
        return name, _OPENED, source
    if is_hugging_face(source):
        return name, _HUGGING_FACE, source
    if isinstance(source, Mapping):
        raise TypeError(
            f"source: {name} holds several data sets ({listed(source, 5)}). Build them one by one, "
            f"such as source[{next(iter(source), 'train')!r}]."
        )
    if not (hasattr(source, "__getitem__") and hasattr(source, "__len__")):
        raise TypeError(
            f"source: {name} is neither a path nor a map-style data set, with len() and [index]. "
            "Samples are read by their number: pass list(source) if it fits into memory. A data "
            "set of Hugging Face's is loaded with streaming=False; a WebDataset is given as its "
            "tar files."
        )
    return name, _MAPPED, source


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


def _kind_of_paths(paths: Sequence[str]) -> tuple[_Kind, Any]:
    """Return the kind of a source, and its path or URL, or its paths if it may have several."""
    path = paths[0]
    kinds = {_FOLDER if Path(each).is_dir() else _KINDS.get(_ending(each)) for each in paths}
    kind = kinds.pop()
    takes_several = kind is not None and kind.takes_several
    if kinds or (len(paths) > 1 and not takes_several):
        raise ValueError(
            f"{len(paths)} sources are given: {listed(paths, 3)}. Several files of one kind can be "
            "built together if they are tar or Parquet files. Build others one by one."
        )
    if is_url(path):
        if kind not in (None, _TABLE):
            raise SourceError(
                f"{path} is neither a folder nor a table. Download it first (wget -c, aws s3 cp, "
                "hf download; memload copy for its own data sets), and build the copy."
            )
        return kind or _URL, path
    if kind is None or not path:
        what = "is a file of another kind" if Path(path).is_file() else "does not exist"
        raise SourceError(
            f"{path!r} {what}. memload reads folders and {' '.join(_KINDS)}. Compressed archives "
            "have to be unpacked first; in Python, any map-style data set can be built.",
            path=path,
        )
    return kind, [Path(each) for each in paths] if takes_several else Path(path)


def _expand(path: str) -> list[str]:
    """Return what ``shards/{000..123}.tar`` or ``shards/*.tar`` stands for, as in a shell."""
    match = _NUMBERS.search(path)
    if is_url(path) or Path(path).exists() or not (match or any(mark in path for mark in "*?[")):
        return [path]
    if match is None:
        found = sorted(glob.glob(path, recursive=True))  # noqa: PTH207  # it may be absolute
    else:
        first, last = match.groups()
        numbers = range(int(first), int(last) + 1)
        names = (path.replace(match[0], f"{each:0{len(first)}}", 1) for each in numbers)
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
            if names is None:
                raise ValueError(
                    f"classes: {path} has no names of classes. Its labels are numbers, which mean "
                    "the same in each data set: leave out --classes."
                )
        else:
            try:
                lines = path.read_text(encoding="utf-8-sig").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise SourceError(f"{path} cannot be read: {error}.", path=path) from error
            names = [line.strip() for line in lines if line.strip()]
    is_list = isinstance(names, Sequence) and all(isinstance(name, str) for name in names)
    if not is_list or not names or len({*names}) < len(names):
        raise ValueError(f"classes: {classes!r:.200} has no names of classes, different texts.")
    return list(names)
