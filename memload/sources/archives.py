"""Folders and zips: the images in them, and the classes that their folders are."""

import itertools
import re
import zipfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from memload.errors import SourceError
from memload.sources.columns import Columns
from memload.sources.contents import ZIPPED, Files, Ranges, walk
from memload.sources.samples import Reading, Samples
from memload.storage.keys import Keys
from memload.wording import listed

#: Up to so many folders with the same subfolders are parts of a data set. More are classes.
_MAX_PARTS = 10
_HIDDEN = re.compile(r"(^|/)(\.[^./]|__MACOSX/)")
_ENCRYPTED = 1  # bit of the flags of a zip


def open_folder(root: Path, reading: Reading) -> Samples:
    """Open a folder with one subfolder for each class, as torchvision's ImageFolder does.

    The images of a class are those in its folder and below. A flat folder has no labels. Nothing
    is read but the names.

    Raises SourceError if there is no image.
    """
    folders, columns = dict(walk(root)), Columns()
    images = images_in(folders, reading, columns, root)
    names = arranged(images, columns, str(root), [folder for folder in folders if folder])
    keys = Keys.of(names)
    return Samples(keys, Files(root, keys), columns)


def images_in(
    folders: Mapping[str, Sequence[str]], reading: Reading, columns: Columns, place: object
) -> dict[str, list[str]]:
    """Return the images in each folder, and note other files. Raises SourceError without images."""
    endings = tuple(extension.lower() for extension in reading.extensions)
    images, others = {}, []
    for folder, files in folders.items():
        images[folder] = [file for file in files if file.lower().endswith(endings)]
        if len(images[folder]) < len(files):
            others += [f"{folder}/{file}".lstrip("/") for file in {*files} - {*images[folder]}]
    if not any(images.values()):
        kinds = (".parquet", ".tar", ".csv", ".jsonl", ".zip")
        found = min((name for name in others if name.endswith(kinds)), default=None)
        remedy = f"Build its files, such as {place}/{found}" if found else "Name their --extensions"
        raise SourceError(
            f"{place} has no image files ({' '.join(endings)}), but {len(others):,} others. "
            f"{remedy}, or check the path."
        )
    if others:
        shown = listed(sorted(others)[:4], 3)
        columns.notes.append(f"skipped other files in {place} ({len(others):,}): {shown}")
    return images


def by_folder(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the files of each folder, but for those that are hidden."""
    folders: dict[str, list[str]] = {}
    for name in names:
        folder, _, file = name.rpartition("/")
        if not is_hidden(name):
            folders.setdefault(folder, []).append(file)
    return folders


def arranged(
    folders: Mapping[str, Sequence[str]],
    columns: Columns,
    place: str,
    more_folders: Sequence[str] = (),
) -> list[str]:
    """Return the names of images in the order of torchvision's ImageFolder, and add the labels.

    Args:
        folders: The images in each folder. Those in "" have no class, and are left out.
        columns: Gets the labels, and notes.
        place: The folder or file that they are in, for messages.
        more_folders: Folders without images, which count as classes nevertheless.
    """
    inner = sorted((folder.partition("/")[0], folder) for folder in folders if folder)
    inner = [(name, folder) for name, folder in inner if folders[folder]]
    flat = sorted(folders.get("", ()))
    if not inner:
        columns.notes.append(f"no labels: {place} has no class folders with images")
        return flat
    if flat:
        shown = listed(flat, 3)
        columns.notes.append(f"skipped images outside the class folders ({len(flat):,}): {shown}")
    having = {name for name, _ in inner}
    classes = sorted(having | {folder.partition("/")[0] for folder in more_folders})
    number = {name: position for position, name in enumerate(classes)}
    counts = [len(folders[folder]) for _, folder in inner]
    columns.add("label", np.repeat([number[name] for name, _ in inner], counts))
    columns.classes = classes
    if empty := [name for name in classes if name not in having]:
        columns.notes.append(f"class folders without images, which still count: {listed(empty, 3)}")
    _look_for_parts([folder for _, folder in inner], classes, columns, place)
    return [f"{folder}/{file}" for _, folder in inner for file in sorted(folders[folder])]


def _look_for_parts(
    folders: Sequence[str], classes: Sequence[str], columns: Columns, place: str
) -> None:
    """See whether the classes are parts of a data set, as all have the same subfolders."""
    if any("/" not in folder for folder in folders):
        return
    below: dict[str, set[str]] = {}
    for folder in folders:
        top, _, rest = folder.partition("/")
        below.setdefault(top, set()).add(rest.partition("/")[0])
    subfolders = next(iter(below.values()))
    columns.are_parts = (
        2 <= len(below) <= _MAX_PARTS
        and len(subfolders) > 1
        and all(each == subfolders for each in below.values())
    )
    columns.notes.append(
        f"the class folders ({listed(classes, 3)}) have no images of their own, only folders, such "
        f"as {folders[0]}. If those are the classes, build {place.rstrip('/')}/{classes[0]} instead"
    )


def shared_folder(names: Collection[str]) -> str:
    """Return the folder, with a slash, that all names share, as archives often have one.

    The last folder before a file is not part of it, since it may be a class.

    >>> shared_folder(["photos/cat/1.jpg", "photos/dog/2.jpg"])
    'photos/'
    """
    depth = min(name.count("/") for name in names) - 1
    first, last = (name.split("/")[: max(0, depth)] for name in (min(names), max(names)))
    shared = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=True))
    return "".join(f"{folder}/" for folder, _ in shared)


def is_hidden(name: str) -> bool:
    """Return whether a file in an archive is hidden, or was added by macOS."""
    return _HIDDEN.search(name) is not None


def open_zip(path: Path, reading: Reading) -> Samples:
    """Open a zip, which is read like a folder, without unpacking it.

    A folder that all images share is ignored. Raises SourceError.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = {each.filename: each for each in archive.infolist() if not each.is_dir()}
    except Exception as error:  # a damaged directory may raise anything
        raise SourceError(
            f"{path} is no zip file, cannot be read, or is truncated ({error}). Download it again.",
            path=path,
        ) from error
    columns = Columns()
    images = images_in(by_folder(members), reading, columns, path)
    shared = shared_folder([f"{folder}/x".lstrip("/") for folder, files in images.items() if files])
    inner = {folder[len(shared) :]: files for folder, files in images.items() if files}
    keys = arranged(inner, columns, str(path))
    chosen = [members[shared + key] for key in keys]
    is_usual = all(
        not each.flag_bits & _ENCRYPTED
        and each.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
        for each in chosen
    )
    if not is_usual:
        raise SourceError(
            f"{path} is encrypted, or compressed in a rare way. Unpack it, and build the folder.",
            path=path,
        )
    return Samples(Keys.of(keys), _zip_ranges(path, chosen), columns)


def _zip_ranges(path: Path, members: Sequence[zipfile.ZipInfo]) -> Ranges:
    facts = [
        (each.file_size, each.CRC, each.compress_type == zipfile.ZIP_DEFLATED) for each in members
    ]
    return Ranges(
        [path],
        np.zeros(len(members), np.int32),
        np.array([each.header_offset for each in members], np.int64),
        np.array([each.compress_size for each in members], np.int64),
        np.array(facts, ZIPPED),
    )
