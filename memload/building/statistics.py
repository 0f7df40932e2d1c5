"""Mean and standard deviation of the pixels, and the sizes of the sources."""

from typing import Any

import numpy as np

from memload.storage.index import Array

#: Edges of the histogram of the sources' shorter sides, in pixels.
_SIDES = (0, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512, 768, 1024, 1536, 2048, 4096, 8192)


def statistics(records: np.ndarray, used: np.ndarray, array: Array) -> dict[str, Any]:
    """Return mean and standard deviation a channel, and the sizes of the sources."""
    sizes = records["size"][used]
    shorter = np.searchsorted(_SIDES, sizes.min(axis=1), side="right") - 1
    counts = np.bincount(shorter, minlength=len(_SIDES))
    return moments(records["total"][used], records["squares"][used], array) | {
        "source_width": [int(sizes[:, 0].min()), int(sizes[:, 0].max())],
        "source_height": [int(sizes[:, 1].min()), int(sizes[:, 1].max())],
        "source_shorter_side": {
            str(side): int(count) for side, count in zip(_SIDES, counts, strict=True) if count
        },
    }


def moments(totals: np.ndarray, squares: np.ndarray, array: Array) -> dict[str, Any]:
    """Return mean and standard deviation a channel, from the sums of each row ``(rows, C)``.

    Unsigned integers count as a share of their type's largest value, from 0 to 1. Signed integers
    are measurements, such as Hounsfield units, and count as they are. So do floats.
    """
    pixels, dtype = array.shape[0] * array.shape[1], np.dtype(array.descr)
    if dtype.kind == "u":
        return _moments_of_pixels(totals, squares, pixels, int(np.iinfo(dtype).max))
    return _moments_of_measurements(totals, squares, pixels)


def mask_ids(records: np.ndarray, used: np.ndarray, name: str) -> list[int]:
    """Return the ids that occur in a mask of uint8, sorted. ``name`` is that of its array."""
    bits = np.bitwise_or.reduce(records[f"ids/{name}"][used], axis=0)
    ids: list[int] = np.flatnonzero(np.unpackbits(bits)).tolist()
    return ids


def _moments_of_pixels(
    totals: np.ndarray, squares: np.ndarray, pixels: int, largest: int
) -> dict[str, Any]:
    # Python's integers are exact, so that no order of summing shows in the result, and hold the
    # squares of 16 bits, whose sum exceeds 64 bits.
    count = pixels * len(totals)
    sums = [column.sum(axis=0, dtype=object).tolist() for column in (totals, squares)]
    variances = [
        (count * square - total * total) / (count * count)
        for total, square in zip(*sums, strict=True)
    ]
    return {
        "mean": [total / count / largest for total in sums[0]],
        "std": [variance**0.5 / largest for variance in variances],
    }


def _moments_of_measurements(
    totals: np.ndarray, squares: np.ndarray, pixels: int
) -> dict[str, Any]:
    broken = int(np.count_nonzero(~np.isfinite(totals).all(axis=1)))
    if broken:  # JSON has no such numbers, and nobody could normalise with them
        return {
            "left_out": (
                f"mean and std: NaN or infinite values in {broken:,} of {len(totals):,} samples"
            )
        }
    # Always of all rows in their order, so that the result is the same whoever converted them and
    # when.
    means = totals / pixels
    variances = squares.mean(axis=0) / pixels + means.var(axis=0)
    return {"mean": means.mean(axis=0).tolist(), "std": np.sqrt(variances).tolist()}
