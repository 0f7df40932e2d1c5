"""Folders and zips: the images in them, and the classes that their folders are."""

import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from memload.errors import SourceError
from memload.sources.columns import Columns
from memload.sources.contents import Files, Ranges, walk
from memload.sources.samples import Reading, Samples
from memload.storage.keys import Keys
from memload.wording import listed

#: More folders than this with the same subfolders are rather classes than parts of a data set.
_MAX_PARTS = 10
_ENCRYPTED = 1  # bit of the flags of a zip


def open_folder(root: Path, reading: Reading) -> Samples:
    """Open a folder with one subfolder for each class, as torchvision's ImageFolder does.

    The images of a class are those in its folder and below. A flat folder has no labels. Nothing
    is read but the names.

    Raises SourceError if there is no image.
    """
    folders: dict[str, list[str]] = {}
    others: list[str] = []
    endings = reading.endings
    for folder, files in walk(root):
        folders[folder] = [file for file in files if file.lower().endswith(endings)]
        if len(folders[folder]) < len(files):
            others += [f"{folder}/{file}".lstrip("/") for file in {*files} - {*folders[folder]}]
    columns = Columns()
    if not any(folders.values()):
        kinds = (".parquet", ".tar", ".csv", ".jsonl", ".zip")
        found = min((name for name in others if name.endswith(kinds)), default=None)
        remedy = f"Build its files, such as {root / found}" if found else "Name their --extensions"
        raise SourceError(
            f"{root} has no image files ({' '.join(reading.endings)}), but {len(others):,} others. "
            f"{remedy}, or check the path.",
            path=root,
        )
    note_others(columns, others, root)
    names = arranged(folders, columns, str(root), [folder for folder in folders if folder])
    keys = Keys.of(names)
    return Samples(keys, Files(root, keys), columns)


def note_others(columns: Columns, names: Sequence[str], place: object) -> None:
    """Note that other files are skipped."""
    if names:
        shown = listed(sorted(names)[:4], 3)
        columns.notes.append(f"skipped other files in {place} ({len(names):,}): {shown}")


def chosen_images(names: Iterable[str], reading: Reading, place: object) -> list[str]:
    """Return those names that are images. Raises SourceError if there are none."""
    endings = reading.endings
    found = [name for name in names if name.lower().endswith(endings) and not is_hidden(name)]
    if not found:
        raise SourceError(
            f"{place} has no image files ({' '.join(reading.endings)}). Check it, or name their "
            "--extensions."
        )
    return found


def by_folder(names: Sequence[str]) -> dict[str, list[str]]:
    """Return the files of each folder."""
    folders: dict[str, list[str]] = {}
    for name in names:
        folder, _, file = name.rpartition("/")
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
    inner = [folder for folder, files in folders.items() if folder and files]
    flat = list(folders.get("", ()))
    if not inner:
        columns.notes.append(f"no labels: {place} has no class folders with images")
        return sorted(flat)
    if flat:
        shown = listed(sorted(flat)[:4], 3)
        columns.notes.append(f"skipped images outside the class folders ({len(flat):,}): {shown}")
    classes = sorted({folder.partition("/")[0] for folder in (*inner, *more_folders)})
    number = {name: position for position, name in enumerate(classes)}
    names: list[str] = []
    counts = np.zeros(len(classes), np.int64)
    for folder in sorted(inner, key=lambda folder: (folder.partition("/")[0], folder)):
        names += [f"{folder}/{file}" for file in sorted(folders[folder])]
        counts[number[folder.partition("/")[0]]] += len(folders[folder])
    columns.add("label", np.repeat(np.arange(len(classes)), counts))
    columns.classes = classes
    if empty := [name for name in classes if not counts[number[name]]]:
        columns.notes.append(f"class folders without images, which still count: {listed(empty, 3)}")
    _look_for_parts(inner, classes, columns, place)
    return names


def _look_for_parts(
    folders: Sequence[str], classes: Sequence[str], columns: Columns, place: str
) -> None:
    """See whether the classes are parts of a data set, as all have the same subfolders."""
    example = f"{place.rstrip('/')}/{classes[0]}"
    columns.part_remedy = f"Build each of them by itself: memload build {example} out.bin."
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
        f"as {folders[0]}. If those are the classes, build {example} instead"
    )


def without_shared_folders(names: Sequence[str]) -> list[str]:
    """Return names without the folders that all of them share, as archives often have one.

    The last folder before a file stays, since it may be a class.
    """
    parts = [name.split("/") for name in names]
    while len({part[0] for part in parts}) == 1 and all(len(part) > 2 for part in parts):
        parts = [part[1:] for part in parts]
    return ["/".join(part) for part in parts]


def is_hidden(name: str) -> bool:
    """Return whether a file in an archive is hidden, or was added by macOS."""
    parts = name.split("/")
    return any(
        (part[:1] == "." and part not in (".", "..")) or part == "__MACOSX" for part in parts
    )


def open_zip(path: Path, reading: Reading) -> Samples:
    """Open a zip, which is read like a folder, without unpacking it.

    A folder that all images share is ignored. Raises SourceError.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = {each.filename: each for each in archive.infolist() if not each.is_dir()}
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}.", path=path) from error
    except Exception as error:  # a damaged directory may raise anything
        raise SourceError(
            f"{path} is no zip file, or is truncated ({error}). Copy or download it again.",
            path=path,
        ) from error
    found = chosen_images(members, reading, path)
    is_usual = all(
        not members[name].flag_bits & _ENCRYPTED
        and members[name].compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
        for name in found
    )
    if not is_usual:
        raise SourceError(
            f"{path} is encrypted, or compressed in a rare way. Unpack it, and build the folder.",
            path=path,
        )
    columns = Columns()
    note_others(columns, [*({*members} - {*found})], path)
    short = dict(zip(without_shared_folders(found), found, strict=True))
    keys = arranged(by_folder([*short]), columns, str(path))
    columns.part_remedy = f"Unpack {path}, and build each of its folders by itself."
    return Samples(Keys.of(keys), _zip_ranges(path, [members[short[key]] for key in keys]), columns)


def _zip_ranges(path: Path, members: Sequence[zipfile.ZipInfo]) -> Ranges:
    return Ranges(
        [path],
        np.zeros(len(members), np.int32),
        np.array([member.header_offset for member in members], np.int64),
        np.array([member.compress_size for member in members], np.int64),
        np.array([member.file_size for member in members], np.uint64),
        np.array([member.CRC for member in members], np.uint32),
        np.array([member.compress_type == zipfile.ZIP_DEFLATED for member in members]),
    )
