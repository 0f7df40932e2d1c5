"""What a build says about its samples in the end, such as how many pictures were enlarged.

Each record of the journal has ``remarks``, so the notes are the same after an interruption.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from memload.building.extra_arrays import ExtraArray
from memload.building.files import MISSING
from memload.building.journal import DONE, REJECTED
from memload.storage.keys import Keys
from memload.wording import listed

#: Bits of a record's ``remarks``: the picture grew in width or in height; the background shows
#: through its transparent pixels; it was gray with more than 8 bits, which were reduced to 8; it
#: was in color, with more than 8 bits a channel; it is a TIFF with more bands, or more pages; it
#: has a mask and was turned, which did not change its size.
ENLARGED, FLATTENED, REDUCED, REDUCED_COLORS, MORE_BANDS, MORE_PAGES = 1, 2, 4, 8, 16, 32
TURNED_WITH_MASK = 64

#: Pictures whose largest value of 16 bits, and whose mean of 8 bits, are below these are dark. One
#: with 12 bits in a file of 16 is.
_DARK_16, _DARK_8 = 8192, 16


def size_notes(records: np.ndarray, size: tuple[int, int]) -> Iterator[str]:
    """Yield a note on pictures that grew to ``size`` (H, W)."""
    used = records["status"] == DONE
    if count := np.count_nonzero(used & (records["remarks"] & ENLARGED > 0)):
        height, width = size
        yield (
            f"{count:,} of {np.count_nonzero(used):,} pictures were smaller than {height}×{width} "
            "and were enlarged (--size sets the stored size)"
        )


def picture_notes(records: np.ndarray, size: tuple[int, int], background: str) -> Iterator[str]:
    """Yield the notes on what was lost in pictures that are stored with ``size`` (H, W)."""
    used = records["status"] == DONE
    remarks = records["remarks"]
    total = np.count_nonzero(used)
    if count := np.count_nonzero(used & (remarks & FLATTENED > 0)):
        yield f"{count:,} of {total:,} pictures have transparent pixels, which are {background} now"
    yield from _depth_notes(records, size)
    if count := np.count_nonzero(used & (remarks & MORE_BANDS > 0)):
        yield (
            f"{count:,} of {total:,} pictures have bands besides their colors, which were left out "
            "(mode='array' in Python stores all bands of arrays)"
        )
    if count := np.count_nonzero(used & (remarks & MORE_PAGES > 0)):
        yield (
            f"{count:,} of {total:,} pictures are TIFFs with several pages, of which the first was "
            "taken"
        )
    if count := np.count_nonzero(used & (remarks & TURNED_WITH_MASK > 0)):
        yield (
            f"{count:,} of {total:,} pictures were turned as their EXIF orientation says, and "
            "their masks with them. If these masks were drawn upright, turn the files of the "
            "pictures upright instead (mogrify -auto-orient)"
        )


def _depth_notes(records: np.ndarray, size: tuple[int, int]) -> Iterator[str]:
    """Yield the notes on pictures with more than 8 bits, which were reduced to 8."""
    used, remarks = records["status"] == DONE, records["remarks"]
    total = np.count_nonzero(used)
    reduced = used & (remarks & REDUCED > 0)
    ranges = records["value_range"][reduced]
    if len(ranges):
        low, high = ranges[:, 0].min(), ranges[:, 1].max()
        values = len(ranges) * size[0] * size[1] * records["total"].shape[1]
        is_dark = high < _DARK_16 and records["total"][reduced].sum() / values < _DARK_8
        dark = " of 65,535, so that they are nearly black now" if is_dark else ""
        yield (
            f"{len(ranges):,} of {total:,} pictures have up to 16 bits and were reduced to 8; "
            f"their values go from {low:,} to {high:,}{dark}. Use --mode 'I;16' to keep them"
        )
    ranges = records["value_range"][used & (remarks & REDUCED_COLORS > 0)]
    if len(ranges):
        low, high = ranges[:, 0].min(), ranges[:, 1].max()
        yield (
            f"{len(ranges):,} of {total:,} pictures have colors of up to 16 bits, which were "
            f"reduced to 8; their values go from about {low:,} to {high:,}. Only gray of 16 bits "
            "can be kept, with --mode 'I;16'"
        )


def box_notes(records: np.ndarray, names: Sequence[str]) -> Iterator[str]:
    """Yield the notes on boxes of which nothing is left. ``names`` are those of their columns."""
    used = records["status"] == DONE
    for name in names:
        given = int(records[f"boxes/{name}"][used].sum())
        kept = np.count_nonzero(~np.isnan(records[f"column/{name}"][used]).any(axis=2))
        if given > kept:
            yield (
                f"{given - kept:,} of {given:,} boxes of {name!r} are NaN now: they lie outside of "
                "the stored pictures, or have no area"
            )
        if 0 < records[f"largest_edge/{name}"][used].max(initial=0) <= 1:
            yield (
                f"all boxes of {name!r} have edges of at most 1, as fractions of the picture would "
                "have. Boxes are in pixels of the image's file: multiply fractions by its width "
                "and height"
            )


def missing_notes(records: np.ndarray, arrays: Sequence[ExtraArray], keys: Keys) -> Iterator[str]:
    """Yield the notes on samples without a mask or another array, which are filled or left out."""
    for array in arrays:
        is_missing = records[f"file_state/{array.name}"][:, 0] == MISSING.size
        outcomes = {DONE: f"now {array.fill} everywhere", REJECTED: "left out"}
        for status, outcome in outcomes.items():
            rows = np.flatnonzero(is_missing & (records["status"] == status))
            if len(rows):
                shown = listed(keys.take(rows[:4]), 3)
                count = f"{len(rows):,} of {len(records):,} samples"
                verb = "has" if len(rows) == 1 else "have"
                yield f"{count} {verb} no {array.name} ({outcome}): {shown}"
