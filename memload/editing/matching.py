"""Which samples of data sets and lines of tables stand for the same picture, by their names."""

from collections.abc import Sequence

import numpy as np

from memload.sources.matching import match
from memload.storage.index import Index


def match_samples(index: Index, names: Sequence[str], owner: str) -> np.ndarray:
    """Return the position of the name of each sample as `match_or_raise` does.

    Also raises ValueError if a name would belong to different pictures of the same name, as data
    sets that were put together may have. A sample that is there twice shares its name.
    """
    if not len(index):
        raise ValueError(f"{index.path} has no samples.")
    positions = match_or_raise(index.keys, names, owner)
    samples = np.flatnonzero(positions >= 0)
    samples = samples[np.argsort(positions[samples], kind="stable")]
    same_name = positions[samples[1:]] == positions[samples[:-1]]
    differ = np.flatnonzero(same_name & (index.row[samples[1:]] != index.row[samples[:-1]]))
    if len(differ):
        raise ValueError(
            f"{index.path.name} has several pictures named {index.keys[samples[differ[0]]]!r:.200},"
            f" and {owner} does not tell which of them it means. Do this with each of the data "
            "sets before you put them together."
        )
    return positions


def match_or_raise(keys: Sequence[str], names: Sequence[str], owner: str) -> np.ndarray:
    """Return for each key the position of its name, int64 ``(n,)``; -1 for a key without one.

    Names are found as a build finds the files of masks. ``owner`` is what has the names, for
    messages. Raises ValueError if a key has two names, or a name two keys.

    >>> match_or_raise(["a/1.jpg", "b/2.jpg"], ["b/2.png"], "masks.bin")
    array([-1,  0])
    """
    try:
        return match(keys, names)
    except ValueError as error:
        raise ValueError(
            f"{owner}: {error}. Give both the same folders, or rename or remove one of them."
        ) from None
