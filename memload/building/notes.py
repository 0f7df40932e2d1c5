"""What a build says about its pictures in the end, such as how many of them were enlarged.

Each record of the journal has ``remarks``, so the notes are the same after an interruption.
"""

from collections.abc import Iterator

import numpy as np

from memload.building.journal import DONE

#: Bits of a record's ``remarks``: the picture grew in width or in height; the background shows
#: through its transparent pixels; it had more than 8 bits a pixel, which were reduced to 8.
ENLARGED, FLATTENED, REDUCED = 1, 2, 4


def picture_notes(records: np.ndarray, size: tuple[int, int], background: str) -> Iterator[str]:
    """Yield the notes on the records of a build that stores pictures of ``size`` (H, W)."""
    used = records["status"] == DONE
    remarks = records["remarks"]
    total = np.count_nonzero(used)

    if count := np.count_nonzero(used & (remarks & ENLARGED > 0)):
        height, width = size
        yield (
            f"{count:,} of {total:,} pictures were smaller than {height}×{width} and were enlarged "
            "(--size sets the stored size)"
        )
    if count := np.count_nonzero(used & (remarks & FLATTENED > 0)):
        yield f"{count:,} of {total:,} pictures have transparent pixels, which are {background} now"
    ranges = records["value_range"][used & (remarks & REDUCED > 0)]
    if len(ranges):
        yield (
            f"{len(ranges):,} of {total:,} pictures have more than 8 bits a pixel, which were "
            f"reduced to 8. Their values range from {ranges[:, 0].min():,} to "
            f"{ranges[:, 1].max():,}"
        )
