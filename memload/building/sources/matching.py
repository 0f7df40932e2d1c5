"""Which files, samples and lines of tables stand for the same picture, by their names."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from memload.building.sources.record import EXTENSIONS

#: The extensions that do not count when names are compared. What else follows a dot, as in
#: ``frame_0.25``, is part of the name.
IGNORED_EXTENSIONS = (
    *EXTENSIONS,
    *[".gif", ".avif", ".jp2", ".jpe", ".jfif", ".jxl", ".heic", ".heif", ".dcm", ".exr", ".npy"],
)
#: Begins the end of a longer path. No path has this character.
_SHORTENED = "\0"


class Conflict(NamedTuple):
    """Two names that fit one key, one name that fits two keys, or two of each.

    Two of each have names in different folders, while the keys have no such folders.
    """

    keys: tuple[str, ...]
    names: tuple[str, ...]


def match(
    keys: Sequence[str], names: Sequence[str], *, are_files: bool = False
) -> tuple[np.ndarray, Conflict | None]:
    """Return for each key the position of its name, int64 ``(n,)``; -1 for a key without one.

    Keys and names may have extensions or not. A key's name is the key itself, or else the key with
    an extension, or else what differs in the extension. A name that is a key itself belongs to no
    other key. With ``are_files``, all names have an extension, and it never counts: ``1.png`` and
    ``1.npy`` both fit ``1.png``.

    Folders count. If no name fits with all of them, a key and a name also fit if the one is the end
    of the other: ``train/cat/1.jpg`` and ``cat/1.png``, or ``cat/1.jpg`` and ``1.png``.

    Also returns the first conflict, if there is one: two names for a key, two keys for a name, or
    names in different folders that the keys do not have, such as ``a/1.png`` and ``b/2.png`` for
    ``1.jpg`` and ``2.jpg``. Those of ``b`` may belong to other pictures.

    >>> match(["a/1.jpg", "b/2.jpg"], ["b/2.png"])
    (array([-1,  0]), None)
    """
    deepest = max((name.count("/") for name in chain(keys, names)), default=0)
    for folders in range(deepest, -1, -1):
        whole = _Positions.of(() if are_files else (_end_of(name, folders) for name in names))
        stems = _Positions.of(_end_of(stem_of(name), folders) for name in names)
        found = [_find(key, folders, whole, stems) for key in keys]
        positions, seconds, is_exact = np.array(found, np.int64).reshape(-1, 3).T
        if (positions >= 0).any():
            positions[np.isin(positions, positions[is_exact == 1]) & (is_exact == 0)] = -1
            return positions, _find_conflict(keys, names, positions, seconds)
    return np.full(len(keys), -1), None


class _Positions(NamedTuple):
    """The position of each name and, of a name that occurs again, that of the second one."""

    first: Mapping[str, int]
    second: Mapping[str, int]

    @classmethod
    def of(cls, names: Iterable[str]) -> "_Positions":
        first: dict[str, int] = {}
        second: dict[str, int] = {}
        for position, name in enumerate(names):
            if first.setdefault(name, position) != position:
                second.setdefault(name, position)
        return cls(first, second)


def _find(key: str, folders: int, whole: _Positions, stems: _Positions) -> tuple[int, int, bool]:
    """Return the position of a key's name, that of a second one, and whether it is the key itself.

    A position is -1 if there is none. ``folders`` is how many folders are compared.
    """
    for positions, name in ((whole, key), (stems, key), (stems, stem_of(key))):
        end = _end_of(name, folders)
        # A shortened key fits only names that are not shortened.
        fitting = (end[1:],) if end.startswith(_SHORTENED) else (end, f"{_SHORTENED}{end}")
        for other in fitting:
            if other in positions.first:
                return positions.first[other], positions.second.get(other, -1), positions is whole
    return -1, -1, False


def _find_conflict(
    keys: Sequence[str], names: Sequence[str], positions: np.ndarray, seconds: np.ndarray
) -> Conflict | None:
    """Return the first conflict, if there is one. ``seconds`` are the positions of other names."""
    owners: dict[int, str] = {}
    first: tuple[str, str] | None = None  # the first name with more folders than its key
    for key, position, second in zip(keys, positions.tolist(), seconds.tolist(), strict=True):
        if position < 0:
            continue
        if second >= 0:
            return Conflict((key,), (names[position], names[second]))
        if owners.setdefault(position, key) != key:
            return Conflict((owners[position], key), (names[position],))
        name = names[position]
        if above := _folders_above(name, key):
            first_key, first_name = first = first or (key, name)
            if above != _folders_above(first_name, first_key):
                return Conflict((first_key, key), (first_name, name))
    return None


def _folders_above(name: str, key: str) -> str:
    """Return the folders that a name has above those that its key also has."""
    more = name.count("/") - key.count("/")
    return "/".join(name.split("/", more)[:more]) if more > 0 else ""


def _end_of(name: str, folders: int) -> str:
    """Return a name with at most so many of its last folders, and marked if it has more."""
    if name.count("/") <= folders:
        return name
    return _SHORTENED + "/".join(name.rsplit("/", folders + 1)[-folders - 1 :])


def stem_of(name: str) -> str:
    """Return a name or a path without the extension of an image or of NumPy.

    >>> stem_of("v1.0/cat.1.jpg"), stem_of("v1.0/cat.1")
    ('v1.0/cat.1', 'v1.0/cat.1')
    """
    stem, dot, extension = name.rpartition(".")
    is_ending = f"{dot}{extension}".lower() in IGNORED_EXTENSIONS
    return stem if is_ending and stem and not stem.endswith("/") else name
