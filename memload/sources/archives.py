"""Folders and zips: the images in them, and the classes that their folders are."""

import posixpath
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from memload.errors import SourceError
from memload.sources.columns import Columns
from memload.sources.contents import ZIPPED, Files, Ranges, walk
from memload.sources.reading import Reading
from memload.sources.samples import Source
from memload.storage.keys import Keys
from memload.wording import listed

_HIDDEN = re.compile(r"(^|/)(\.|__MACOSX/)")


def open_folder(root: Path, reading: Reading) -> Source:
    """Open a folder with one subfolder for each class, as torchvision's ImageFolder does.

    The images of a class are those in its folder and below. A flat folder has no labels. Nothing
    is read but the names.

    Raises SourceError if there is no image.
    """
    names, columns = labelled(dict(walk(root)), reading, root)
    keys = Keys.of(names)
    return Source(keys=keys, images=Files(root, keys), **vars(columns))


def labelled(
    folders: Mapping[str, Sequence[str]], reading: Reading, place: object
) -> tuple[list[str], Columns]:
    """Return the names of images in the order of torchvision's ImageFolder, and their labels.

    Args:
        folders: The files in each folder. Images in "" have no class, and are left out if others
            have one.
        reading: Has the extensions of images.
        place: The folder or file that they are in, for messages.

    Raises SourceError without images.
    """
    columns = Columns()
    images = {folder: [*filter(reading.is_image, files)] for folder, files in folders.items()}
    others = [
        f"{folder}/{file}".lstrip("/")
        for folder, files in folders.items()
        for file in files
        if not reading.is_image(file)
    ]
    if not any(images.values()):
        raise SourceError(
            f"{place} has no image files ({' '.join(reading.extensions)}), but {len(others):,} "
            f"others: {listed(sorted(others), 3) or 'none'}. Name one of these files, or the "
            "--extensions of images, or check the path."
        )
    if others:
        shown = listed(sorted(others)[:4], 3)
        columns.notes.append(f"skipped other files in {place} ({len(others):,}): {shown}")
    flat = sorted(images.pop("", ()))
    inner = sorted((folder.partition("/")[0], folder) for folder in images if images[folder])
    if not inner:
        columns.notes.append(f"no labels: {place} has no class folders with images")
        return flat, columns
    if flat:
        shown = listed(flat, 3)
        columns.notes.append(f"skipped images outside the class folders ({len(flat):,}): {shown}")
    columns.classes = classes = sorted({folder.partition("/")[0] for folder in images})
    number = {name: position for position, name in enumerate(classes)}
    counts = [len(images[folder]) for _, folder in inner]
    columns.add("label", np.repeat([number[name] for name, _ in inner], counts))
    if empty := sorted({*classes} - {name for name, _ in inner}):
        columns.notes.append(f"class folders without images, which still count: {listed(empty, 3)}")
    if all("/" in folder for _, folder in inner):
        columns.notes.append(
            f"the class folders ({listed(classes, 3)}) have no images of their own, only folders, "
            f"such as {inner[0][1]}. If those are the classes, build {place}/{classes[0]} instead"
        )
    return [f"{folder}/{file}" for _, folder in inner for file in sorted(images[folder])], columns


def by_folder(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the files of each folder, but for those that are hidden."""
    folders: dict[str, list[str]] = {}
    for name in names:
        if not is_hidden(name):
            folder, _, file = name.rpartition("/")
            folders.setdefault(folder, []).append(file)
    return folders


def below_shared(names: Iterable[str], reading: Reading) -> tuple[str, dict[str, list[str]]]:
    """Return the folder, with a slash, that all images share, and the files of each folder in it.

    Archives often have such a folder. The last folder before a file is not part of it, since it may
    be a class.

    >>> below_shared(["photos/cat/1.jpg", "photos/dog/2.jpg", "README.md"], Reading())
    ('photos/', {'cat': ['1.jpg'], 'dog': ['2.jpg']})
    """
    folders = by_folder(names)
    having = [name for name, files in folders.items() if any(map(reading.is_image, files))] or [""]
    shared = posixpath.join(posixpath.commonpath(map(posixpath.dirname, having)), "")
    inner = {name: files for name, files in folders.items() if f"{name}/".startswith(shared)}
    return shared, {name[len(shared) :]: files for name, files in inner.items()}


def relative(name: str) -> str:
    """Return a name in an archive without ``./``, ``../`` and a leading ``/``."""
    return "/".join(part for part in name.split("/") if part not in ("", ".", ".."))


def is_hidden(name: str) -> bool:
    """Return whether a file in an archive is hidden, or was added by macOS."""
    return _HIDDEN.search(name) is not None


def open_zip(path: Path, reading: Reading) -> Source:
    """Open a zip, which is read like a folder, without unpacking it.

    A folder that all images share is ignored. Raises SourceError.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            files = [each for each in archive.infolist() if not each.is_dir()]
    except Exception as error:  # a damaged directory may raise anything
        raise SourceError(
            f"{path} is no zip file, cannot be read, or is truncated ({error}). Download it again.",
            path=path,
        ) from error
    members = {relative(each.filename): each for each in files}
    shared, folders = below_shared(members, reading)
    keys, columns = labelled(folders, reading, path)
    chosen = [members[shared + key] for key in keys]
    facts = [
        (each.file_size, each.CRC, each.compress_type != zipfile.ZIP_STORED) for each in chosen
    ]
    starts, sizes = np.array([(each.header_offset, each.compress_size) for each in chosen]).T
    ranges = Ranges([path], np.zeros(len(chosen), np.int32), starts, sizes, np.array(facts, ZIPPED))
    return Source(keys=Keys.of(keys), images=ranges, **vars(columns))
