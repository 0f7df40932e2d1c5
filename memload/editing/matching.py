"""Which samples of data sets and lines of tables stand for the same picture, by their names."""

from collections.abc import Sequence

import numpy as np

from memload.sources.matching import match
from memload.storage.index import Index


def match_samples(index: Index, names: Sequence[str], owner: str) -> np.ndarray:
    """Return the position of the name of each sample, int64 ``(n,)``; -1 for one without a name.

    Names are found as a build finds the files of masks. A sample that is there twice shares its
    name. ``owner`` is what has the names, for messages.

    Raises ValueError if no name fits, if a sample has two names, and if a name would belong to
    different pictures, as data sets that were put together may have.
    """
    try:
        positions = match(index.keys, names)
    except ValueError as error:
        raise ValueError(
            f"{index.path.name} and {owner} do not fit together by names: {error}, so they may "
            "stand for the same picture. Name both with the same folders, and each once."
        ) from None
    if not (positions >= 0).any():
        examples = [list(some[:1]) for some in (names, index.keys)]
        raise ValueError(
            f"{owner} names no sample of {index.path.name}: its first name is {examples[0]!r:.200},"
            f" and the first sample is {examples[1]!r:.200}. Check the names."
        )
    row_of: dict[int, int] = {}
    for position, row, key in zip(positions.tolist(), index.row.tolist(), index.keys, strict=True):
        if position >= 0 and row_of.setdefault(position, row) != row:
            raise ValueError(
                f"{index.path.name} has several pictures named {key!r:.200}, and {owner} does not "
                "tell which of them it means. Do this with each of the data sets before you put "
                "them together."
            )
    return positions
