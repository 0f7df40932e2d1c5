"""The statistics of data sets together, from those of each."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from memload.storage.index import Index


def combined_statistics(indexes: Sequence[Index]) -> dict[str, Any]:
    """Return the statistics of the pixels of several data sets, without reading a pixel.

    They are exact for whole data sets. A subset has the mean, variance and sizes of the data set
    that it was taken from; they count with the number of rows that its samples use.
    """
    statistics = [index.statistics for index in indexes]
    combined = _moments(statistics, [len(np.unique(index.row)) for index in indexes], indexes)
    for name in ("source_width", "source_height"):
        ranges = [entry.get(name) for entry in statistics]
        if all(map(_is_range, ranges)):
            lows, highs = zip(*ranges, strict=True)
            combined[name] = [min(lows), max(highs)]
    return combined | _shorter_sides(indexes) | _mask_ids(indexes)


def _moments(
    statistics: Sequence[Mapping[str, Any]], weights: Sequence[int], indexes: Sequence[Index]
) -> dict[str, Any]:
    """Return mean and standard deviation for each channel."""
    channels = indexes[0].image.shape[2]
    for index, entry in zip(indexes, statistics, strict=True):
        if not (
            _are_numbers(entry.get("mean"), channels) and _are_numbers(entry.get("std"), channels)
        ):
            return (
                {"left_out": f"mean and std: {index.path.name} has none"} if any(statistics) else {}
            )
    means = np.array([entry["mean"] for entry in statistics])
    variances = np.array([entry["std"] for entry in statistics]) ** 2
    shares = np.array(weights)[:, None] / max(1, sum(weights))
    mean = (shares * means).sum(axis=0)
    variance = (shares * (variances + (means - mean) ** 2)).sum(axis=0)
    return {"mean": mean.tolist(), "std": np.sqrt(variance).tolist()}


def _shorter_sides(indexes: Sequence[Index]) -> dict[str, Any]:
    """Return the histogram of the sources' shorter sides.

    A data set is left out only if all of its files belong to those before it.
    """
    name, counts, seen = "source_shorter_side", dict[str, int](), set[str]()
    for index in indexes:
        sides = index.statistics.get(name)
        if not isinstance(sides, dict) or not all(type(n) is int for n in sides.values()):
            return {}
        files = {str(index.path.parent / shard.file) for shard in index.image.shards}
        if not files <= seen:
            for side, count in sides.items():
                counts[side] = counts.get(side, 0) + count
        seen |= files
    return {name: dict(sorted(counts.items(), key=lambda item: (len(item[0]), item[0])))}


def _mask_ids(indexes: Sequence[Index]) -> dict[str, Any]:
    """Return the ids that occur in each mask, if they are known of all data sets."""
    known = [ids_of_masks(index) for index in indexes]
    united = {
        name: sorted({number for ids in known for number in ids[name]})
        for name in known[0]
        if all(name in ids for ids in known)
    }
    return {"mask_ids": united} if united else {}


def ids_of_masks(index: Index) -> dict[str, list[int]]:
    """Return the ids that occur in each mask of a data set, by the name of the mask."""
    ids = index.statistics.get("mask_ids")
    if not isinstance(ids, dict):
        return {}
    names = {array.name for array in index.arrays if array.kind == "mask"}
    return {
        name: numbers
        for name, numbers in ids.items()
        if name in names and isinstance(numbers, list) and all(type(n) is int for n in numbers)
    }


# An index that memload did not write may hold anything in its statistics.
def _are_numbers(value: Any, count: int) -> bool:
    is_list = isinstance(value, list) and len(value) == count
    return is_list and all(type(number) in (int, float) for number in value)


def _is_range(value: Any) -> bool:
    return _are_numbers(value, 2)
