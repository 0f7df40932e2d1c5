"""Which samples, files and lines of tables stand for the same picture, by their names."""

from collections.abc import Iterable, Sequence

import numpy as np

from memload.building.sources.beside import end_of, stem_of


def match(keys: Sequence[str], names: Sequence[str], owner: str) -> np.ndarray:
    """Return for each key the position of its name, int64 ``(n,)``; -1 for a key without one.

    A key's name is the key itself, or else the only name that differs only in its extension. If
    none fits, fewer folders are compared, as for the folders of masks in a build. ``owner`` is what
    has the names, for messages. Raises ValueError if a key has two names, or a name two keys.

    >>> match(["a/1.jpg", "b/2.jpg"], ["b/2.png"], "masks.bin")
    array([-1,  0])
    """
    keys, names = list(keys), list(names)
    deepest = max((name.count("/") for name in (*keys, *names)), default=0)
    for folders in range(deepest, -1, -1):
        found = _find_all(
            [end_of(key, folders) for key in keys], [end_of(name, folders) for name in names]
        )
        numbers = np.array([number for number, _ in found], np.int64)
        if (numbers >= 0).any():
            _check_unique(keys, names, found, owner)
            return numbers
    return np.full(len(keys), -1)


def _find_all(keys: Sequence[str], names: Sequence[str]) -> list[tuple[int, int]]:
    """Return for each key the position of its name and that of a second one, or -1."""
    whole = _positions(names)
    stems = whole if whole.keys() >= {*keys} else _positions(map(stem_of, names))
    none = (-1, -1)
    return [
        whole.get(key) or whole.get(stem := stem_of(key)) or stems.get(stem, none) for key in keys
    ]


def _positions(names: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Return the first and the second position of each name; -1 if there is no second."""
    positions: dict[str, tuple[int, int]] = {}
    for position, name in enumerate(names):
        first, second = positions.get(name, (position, -1))
        positions[name] = first, position if second < 0 and first != position else second
    return positions


def _check_unique(
    keys: Sequence[str], names: Sequence[str], found: Sequence[tuple[int, int]], owner: str
) -> None:
    owners: dict[int, str] = {}
    for key, (number, second) in zip(keys, found, strict=True):
        if second >= 0:
            raise ValueError(
                f"{owner} has {names[number]!r:.200} and {names[second]!r:.200}, which both fit "
                f"{key!r:.200}. Rename or remove one of them."
            )
        if number >= 0 and stem_of(owners.setdefault(number, key)) != stem_of(key):
            raise ValueError(
                f"{names[number]!r:.200} in {owner} fits both {owners[number]!r:.200} and "
                f"{key!r:.200}. Name it with its folder, as the samples are."
            )
