"""Names of files for samples. Keys may come from anywhere, and are not trusted."""

import hashlib
import os
from collections.abc import Collection, Iterable, Sequence

from memload.editing.cells import TABLE
from memload.sources.matching import stem_of

#: The limit of file systems for the name of a file or a folder.
_MAX_NAME_BYTES = 255
#: Longer paths lose their folders. The limit of Linux, 4,096, counts the folders above, too.
_MAX_PATH_BYTES = 2048
#: The digits of a hash that shortened names end in.
_HASH_DIGITS = 8


def file_stems(
    keys: Iterable[str],
    folders: Iterable[str | None],
    *,
    endings: Collection[str],
    dots: bool = True,
) -> list[str]:
    """Return a relative path for each key, without the extension of its file.

    The path is the key without the extension of an image, in the folder that is named for it,
    unless the key begins with that folder. All paths are different. Where two would be the same,
    the later one gets a number, such as ``cat/1-2``. They lie below the folder that they are used
    in, and no name in them is too long or that of a hidden file.

    ``endings`` are those that will be added; for folders, ``[""]``. Without ``dots``, the names of
    files have none, but those of folders may.

    >>> file_stems(["cat/1.jpg", "cat/1.png", "../2.jpg"], ["cat", "cat", "dog"], endings=[".png"])
    ['cat/1', 'cat/1-2', 'dog/2']
    """
    max_bytes = _MAX_NAME_BYTES - max(map(len, endings))
    paths = [
        _safe_path(key, folder, max_bytes, dots) for key, folder in zip(keys, folders, strict=True)
    ]
    return _distinct(paths, endings)


def folder_names(names: Sequence[str]) -> list[str]:
    """Return a name for the folder of each class. All are different."""
    return _distinct([safe_name(name) for name in names], [""])


def safe_name(name: str, max_bytes: int = _MAX_NAME_BYTES) -> str:
    """Return a name for a file or a folder, the same one if it can have it.

    The names of hidden files change, since programs that read folders skip them. So does that of
    the table.
    """
    safe = name.replace("/", "_").replace("\0", "_") or "_"
    safe = f"_{safe[1:]}" if safe.startswith(".") else safe
    safe = f"{safe}_" if safe == TABLE else safe
    encoded = os.fsencode(safe)
    if len(encoded) <= max_bytes:
        return safe
    digits = hashlib.sha256(encoded).hexdigest()[:_HASH_DIGITS]
    return encoded[: max_bytes - _HASH_DIGITS - 1].decode("utf-8", "ignore") + f"~{digits}"


def _safe_path(key: str, folder: str | None, max_bytes: int, dots: bool) -> str:
    parts = [part for part in key.split("/") if part not in ("", ".", "..")] or ["_"]
    stem = stem_of(parts[-1])
    stem = safe_name(stem if dots else stem.replace(".", "_"), max_bytes)
    folders = [safe_name(part) for part in parts[:-1]]
    first = [] if folder is None or folders[:1] == [folder] else [folder]
    path = "/".join([*first, *folders, stem])
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        path = "/".join([*([] if folder is None else [folder]), stem])
    return path


def _distinct(paths: Sequence[str], endings: Collection[str]) -> list[str]:
    """Number the paths that come again, and files that have the name of a folder."""
    max_bytes = _MAX_NAME_BYTES - max(map(len, endings))
    folders = {folder for path in set(map(_folder, paths)) for folder in _with_parents(path)}
    taken, wanted = set[str](), set(paths)
    numbers: dict[str, int] = {}
    distinct = []
    for path in paths:
        chosen = path
        while (
            chosen in taken
            or any(f"{chosen}{ending}" in folders for ending in endings)
            or (chosen != path and chosen in wanted)
        ):
            numbers[path] = numbers.get(path, 1) + 1
            chosen = _numbered(path, numbers[path], max_bytes)
        taken.add(chosen)
        distinct.append(chosen)
    return distinct


def _numbered(path: str, number: int, max_bytes: int) -> str:
    folder, slash, name = path.rpartition("/")
    suffix = f"-{number}"
    return folder + slash + safe_name(name, max_bytes - len(suffix)) + suffix


def _folder(path: str) -> str:
    return path.rpartition("/")[0]


def _with_parents(folder: str) -> Iterable[str]:
    while folder:
        yield folder
        folder = _folder(folder)
