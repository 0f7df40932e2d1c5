"""The statistics of data sets together, from those of each. No pixel is read."""

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from memload.storage.index import Index


def united_statistics(indexes: Sequence[Index]) -> dict[str, Any]:
    """Return the statistics of several data sets together: those that all of them have.

    They are exact for whole data sets. A subset has the mean, variance and sizes of the data set
    that it was taken from; they count with the number of rows that its samples use.
    """
    statistics = [index.statistics for index in indexes]
    common = [name for name in statistics[0] if all(name in entry for entry in statistics)]
    united: dict[str, Any] = {}
    if "mean" in common and "std" in common:
        united |= _moments(indexes)
    for name in ("source_width", "source_height"):
        if name in common:
            lows, highs = zip(*(entry[name] for entry in statistics), strict=True)
            united[name] = [min(lows), max(highs)]
    if "source_shorter_side" in common:
        united["source_shorter_side"] = _shorter_sides(indexes)
    if "mask_ids" in common:
        ids = [entry["mask_ids"] for entry in statistics]
        names = [array.name for array in indexes[0].arrays if all(array.name in i for i in ids)]
        found = {name: sorted({*chain(*(i[name] for i in ids))}) for name in names}
        united |= {"mask_ids": found} if found else {}
    return united


def _moments(indexes: Sequence[Index]) -> dict[str, Any]:
    """Return mean and standard deviation for each channel."""
    means = np.array([index.statistics["mean"] for index in indexes])
    variances = np.array([index.statistics["std"] for index in indexes]) ** 2
    weights = np.array([len(np.unique(index.row)) for index in indexes])
    shares = weights[:, None] / max(1, weights.sum())
    mean = (shares * means).sum(axis=0)
    variance = (shares * (variances + (means - mean) ** 2)).sum(axis=0)
    return {"mean": mean.tolist(), "std": np.sqrt(variance).tolist()}


def _shorter_sides(indexes: Sequence[Index]) -> dict[str, Any]:
    """Return the histogram of the sources' shorter sides, each file counted once."""
    counts, seen = Counter[str](), set[str]()
    for index in indexes:
        files = {str(index.path.parent / shard.file) for shard in index.image.shards}
        if not files <= seen:
            counts.update(index.statistics["source_shorter_side"])
        seen |= files
    return dict(sorted(counts.items(), key=lambda item: int(item[0])))
