"""Which names stand for the same picture: those of masks and images, or of lines and samples."""

from collections.abc import Iterable, Sequence

import numpy as np

from memload.sources.contents import EXTENSIONS

#: The extensions that do not count when names are compared. What else follows a dot, as in
#: ``frame_0.25``, is part of the name.
IGNORED_EXTENSIONS = (
    *EXTENSIONS,
    *[".gif", ".avif", ".jp2", ".jpe", ".jfif", ".jxl", ".heic", ".heif", ".dcm", ".exr", ".npy"],
)


def match(keys: Sequence[str], names: Sequence[str]) -> np.ndarray:
    """Return for each key the position of its name, int64 ``(n,)``; -1 for a key without one.

    A key's name is the key itself, or else the key with an extension, or else with another one.
    Folders count first: ``a/1.png`` is the name of ``a/1.jpg``. Only if no name fits so, shorter
    ones do: ``1.png`` fits ``a/1.jpg``, as if masks lie in one folder, and ``a/1.png`` fits
    ``1.jpg``. ``b/1.png`` never fits ``a/1.jpg``.

    Raises ValueError if two names fit a key, or two keys a name.

    >>> match(["a/1.jpg", "b/2.jpg"], ["b/2.png"])
    array([-1,  0])
    """
    keys, names = list(keys), list(names)
    positions = _match(keys, names, keys, names)
    if (positions >= 0).any():
        return positions
    short_keys, short_names = ([name.rpartition("/")[2] for name in each] for each in (keys, names))
    positions = _match(keys, names, short_keys, short_names)
    for row in np.flatnonzero(positions >= 0).tolist():
        end, path = sorted([stem_of(keys[row]), stem_of(names[positions[row]])], key=len)
        if not f"/{path}".endswith(f"/{end}"):
            positions[row] = -1  # in other folders are other pictures
    return positions


def _match(
    keys: Sequence[str], names: Sequence[str], compared: Sequence[str], with_: Sequence[str]
) -> np.ndarray:
    """Match as `match` does: the texts ``compared``, of the keys, with ``with_``, of the names."""
    whole, stems = _positions(with_), _positions(map(stem_of, with_))
    taken = {whole[text][0] for text in compared if text in whole}
    owner: dict[int, str] = {}
    result = np.full(len(keys), -1)
    for row, (key, text) in enumerate(zip(keys, compared, strict=True)):
        if text in whole:
            found = whole[text]
        else:
            found = stems.get(text) or stems.get(stem_of(text)) or [-1]
        if found[0] < 0 or (text not in whole and found[0] in taken):
            continue
        if len(found) > 1:
            raise ValueError(f"{names[found[0]]!r} and {names[found[-1]]!r} both fit {key!r}")
        if owner.setdefault(found[0], key) != key:
            raise ValueError(f"{names[found[0]]!r} fits both {owner[found[0]]!r} and {key!r}")
        result[row] = found[0]
    return result


def _positions(names: Iterable[str]) -> dict[str, list[int]]:
    """Return the positions of each name."""
    positions: dict[str, list[int]] = {}
    for position, name in enumerate(names):
        positions.setdefault(name, []).append(position)
    return positions


def stem_of(name: str) -> str:
    """Return a name or a path without the extension of an image or of NumPy.

    >>> stem_of("v1.0/cat.1.jpg"), stem_of("v1.0/cat.1")
    ('v1.0/cat.1', 'v1.0/cat.1')
    """
    stem, dot, extension = name.rpartition(".")
    is_ending = f"{dot}{extension}".lower() in IGNORED_EXTENSIONS
    return stem if is_ending and stem and not stem.endswith("/") else name
