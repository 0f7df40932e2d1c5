"""Which files, samples and lines of tables stand for the same picture, by their names."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np


class Conflict(NamedTuple):
    """Two names that fit one key, or one name that fits two keys."""

    keys: tuple[str, ...]
    names: tuple[str, ...]


def match(
    keys: Sequence[str], names: Sequence[str], *, are_files: bool = False
) -> tuple[np.ndarray, Conflict | None]:
    """Return for each key the position of its name, int64 ``(n,)``; -1 for a key without one.

    Keys and names may have extensions or not. A key's name is the key itself, or else the key with
    an extension, or else the key without its own extension, or else what differs in the extension.
    With ``are_files``, all names have an extension, and it never counts: ``1.png`` and ``1.npy``
    both fit ``1.png``. As many folders are compared as possible: all of them if any name fits then,
    or else fewer.

    Also returns the first conflict, if there is one: a key must not have two names, and a name must
    not have two keys, unless these differ in the extension alone.

    >>> match(["a/1.jpg", "b/2.jpg"], ["b/2.png"])
    (array([-1,  0]), None)
    """
    deepest = max((name.count("/") for name in chain(keys, names)), default=0)
    for folders in range(deepest, -1, -1):
        whole = _Positions.of(() if are_files else (end_of(name, folders) for name in names))
        stems = _Positions.of(stem_of(end_of(name, folders)) for name in names)
        found = [_find(end_of(key, folders), whole, stems) for key in keys]
        positions, seconds = np.array(found, np.int64).reshape(-1, 2).T
        if (positions >= 0).any():
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


def _find(key: str, whole: _Positions, stems: _Positions) -> tuple[int, int]:
    """Return the position of a key's name, and that of a second one; -1 if there is none."""
    stem = stem_of(key)
    for positions, name in ((whole, key), (stems, key), (whole, stem), (stems, stem)):
        if name in positions.first:
            return positions.first[name], positions.second.get(name, -1)
    return -1, -1


def _find_conflict(
    keys: Sequence[str], names: Sequence[str], positions: np.ndarray, seconds: np.ndarray
) -> Conflict | None:
    """Return the first conflict, if there is one. ``seconds`` are the positions of other names."""
    owners: dict[int, str] = {}
    for key, position, second in zip(keys, positions.tolist(), seconds.tolist(), strict=True):
        if second >= 0:
            return Conflict((key,), (names[position], names[second]))
        if position >= 0 and stem_of(owners.setdefault(position, key)) != stem_of(key):
            return Conflict((owners[position], key), (names[position],))
    return None


def end_of(name: str, folders: int) -> str:
    """Return a name with at most so many of its last folders.

    >>> end_of("train/cat/1", 1)
    'cat/1'
    """
    return "/".join(name.rsplit("/", folders + 1)[-folders - 1 :])


def stem_of(name: str) -> str:
    """Return a name without its last extension.

    >>> stem_of("v1.0/cat.1.jpg"), stem_of("v1.0/cat")
    ('v1.0/cat.1', 'v1.0/cat')
    """
    folder, slash, file = name.rpartition("/")
    stem, dot, _ = file.rpartition(".")
    return f"{folder}{slash}{stem if dot else file}"
