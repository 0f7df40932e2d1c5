"""What a build tells of its samples: statistics for the index, notes, and reasons of rejects.

Everything comes from the records, so it is the same after an interruption.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from memload.building.record import DONE, ENLARGED, FLATTENED, REDUCED, REJECTED
from memload.building.settings import Settings
from memload.sources.columns import Column
from memload.storage.index import Array
from memload.storage.keys import Keys
from memload.wording import listed

#: If no box has a side of more than this share of the picture's, they are no boxes in pixels.
_LEAST_SHARE = 0.02


def statistics(records: np.ndarray, used: np.ndarray, array: Array) -> dict[str, Any]:
    """Return mean and standard deviation per channel, and the sizes of the sources."""
    width, height = records["size"][used].T
    return moments(records["total"][used], records["squares"][used], array) | {
        "source_width": [int(width.min()), int(width.max())],
        "source_height": [int(height.min()), int(height.max())],
    }


def moments(totals: np.ndarray, squares: np.ndarray, array: Array) -> dict[str, Any]:
    """Return mean and standard deviation per channel, from the sums of each row ``(rows, C)``.

    Unsigned integers count as a share of their type's largest value, from 0 to 1. Signed integers
    are measurements, such as Hounsfield units, and count as they are. So do floats.
    """
    pixels, dtype = array.shape[0] * array.shape[1], np.dtype(array.descr)
    if dtype.kind == "u":
        return _moments_of_pixels(totals, squares, pixels, int(np.iinfo(dtype).max))
    return _moments_of_measurements(totals, squares, pixels)


def _moments_of_pixels(
    totals: np.ndarray, squares: np.ndarray, pixels: int, largest: int
) -> dict[str, Any]:
    count = pixels * len(totals)
    sums = [_exact_sums(column) for column in (totals, squares)]
    variances = [
        (count * square - total * total) / (count * count)
        for total, square in zip(*sums, strict=True)
    ]
    return {
        "mean": [total / count / largest for total in sums[0]],
        "std": [variance**0.5 / largest for variance in variances],
    }


def _exact_sums(column: np.ndarray) -> list[int]:
    """Return the sums over the rows of uint64 ``(rows, C)``, which may exceed 64 bits."""
    high, low = (column >> 32).sum(axis=0).tolist(), (column & 0xFFFFFFFF).sum(axis=0).tolist()
    return [(upper << 32) + lower for upper, lower in zip(high, low, strict=True)]


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


# ------------------------------------------------------------------------------------------- notes


def notes_on(
    records: np.ndarray, settings: Settings, schema: Mapping[str, Column], keys: Keys
) -> Iterator[str]:
    """Yield notes on what was done to pictures, on boxes and masks that look wrong, and on gaps."""
    used = records["status"] == DONE
    height, width = settings.size
    texts = {
        ENLARGED: f"were smaller than {height}×{width} and were enlarged (--size sets the stored "
        "size)",
        FLATTENED: f"have transparent pixels, which are {settings.background} now",
        REDUCED: "have up to 16 bits and were reduced to 8. Use --mode 'I;16' to keep gray ones",
    }
    for bit, text in texts.items():
        if count := np.count_nonzero(records["remarks"][used] & bit):
            yield f"{count:,} of {np.count_nonzero(used):,} pictures {text}"
    for name in (name for name, column in schema.items() if column.boxes):
        boxes = records[f"column/{name}"][used].reshape(-1, 4)
        sides = (boxes[:, 2:] - boxes[:, :2])[~np.isnan(boxes).any(axis=1)]
        if len(boxes) and (sides <= _LEAST_SHARE * np.array([width, height])).all():
            yield (
                f"no box of {name!r} is larger than {_LEAST_SHARE:.0%} of its picture. Boxes are "
                "in pixels of the image's file: multiply fractions by its width and height"
            )
    for array in settings.extra_arrays:
        if array.is_black_and_white:
            yield (
                f"the first {array.name} has only the ids 0 and 255, and 255 usually does not "
                "count (ignore_index=255). If it is the foreground, store 1 instead"
            )
        outcomes = {DONE: f"now {array.missing_id} everywhere", REJECTED: "left out"}
        for status, outcome in outcomes.items():
            is_missing = records[f"is_missing/{array.name}"] & (records["status"] == status)
            rows = np.flatnonzero(is_missing)
            if len(rows):
                shown = listed(keys.take(rows[:4]), 3)
                share = f"{len(rows):,} of {len(records):,} samples"
                yield f"{share} have no {array.name} ({outcome}): {shown}"


# ----------------------------------------------------------------------------------------- rejects

#: Parts of a reason that differ from sample to sample: numbers, and what is in quotes.
_VARYING = re.compile(r"\d[\d,.]*|'[^']*'|\"[^\"]*\"")


def allowed_rejects(limit: int | float | str, total: int) -> int:
    """Return how many of ``total`` samples may be rejected: a share of them, or a count.

    A share is such as ``"10%"`` or ``0.1``, and an integer is a count. Raises ValueError for
    anything else.

    >>> allowed_rejects("10%", 200), allowed_rejects(0.5, 200), allowed_rejects(7, 200)
    (20, 100, 7)
    """
    text = str(limit).strip()
    try:
        if text.endswith("%") or isinstance(limit, float):
            share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
            if 0 <= share <= 1:
                return int(round(share * total, 6))  # 29 % of 100 are not 28.999…
        elif int(text) >= 0:
            return int(text)
    except ValueError:
        pass
    raise ValueError(
        f"max_rejects: {limit!r} is neither a share such as '10%', up to '100%', nor a count such "
        "as 20."
    )


def frequent_reasons(reasons: Mapping[int, str], keys: Sequence[str]) -> str:
    """Return the three most frequent reasons, each with its count and the name of a sample.

    ``reasons`` say why rows were rejected. Those that differ only in numbers and in quoted texts
    count as one.
    """
    rows_of: dict[str, list[int]] = {}
    for row, reason in reasons.items():
        rows_of.setdefault(_VARYING.sub("…", reason), []).append(row)
    frequent = sorted(rows_of.values(), key=len, reverse=True)[:3]
    return "; ".join(
        f"{len(rows):,} × {reasons[rows[0]].removesuffix('.'):.200} (such as {keys[rows[0]]})"
        for rows in frequent
    )
