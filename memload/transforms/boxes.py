"""Boxes of images: those of random area and ratio, and what is inside of many."""

import math
from collections.abc import Iterator

import numpy as np

from memload.transforms.draws import Draws

_ATTEMPTS = 10
#: How many numbers of a sample's stream `random_boxes` may use, beginning with the first.
NUMBERS_OF_A_BOX = 2 + 2 * _ATTEMPTS


def random_boxes(
    draws: Draws,
    size: tuple[int, int],
    scale: tuple[float, float],
    ratio: tuple[float, float],
    smallest: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw a box within ``size`` for each sample.

    Returns the starts and the lengths of the boxes on two axes, int64 ``(2, N)`` each, and whether
    one of ten attempts found a box that fits, bool ``(N,)``.

    The area of a box is uniform between ``scale[0]`` and ``scale[1]`` times the area of ``size``.
    The logarithm of (length on the second axis / length on the first) is uniform over ``ratio``. A
    box fits if ``smallest <= length < size + smallest`` on both axes. This is the algorithm of
    torchvision's ``RandomResizedCrop.get_params`` and ``RandomErasing.get_params``. It uses the
    first `NUMBERS_OF_A_BOX` numbers of the draws.
    """
    sizes = np.array(size)[:, np.newaxis]

    def attempt(uniform: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return lengths ``(2, N)`` from two uniform numbers each, and whether they fit."""
        area = (scale[0] + (scale[1] - scale[0]) * uniform[0]) * (size[0] * size[1])
        low, high = math.log(ratio[0]), math.log(ratio[1])
        log_ratio = low + (high - low) * uniform[1]
        exponents = np.array([[-0.5], [0.5]])  # each axis takes half of the ratio
        length = np.rint(np.sqrt(area) * np.exp(exponents * log_ratio)).astype(np.int64)
        fits = (length >= smallest) & (length < sizes + smallest)
        return length, fits[0] & fits[1]

    uniform = draws.uniform(4)
    length, fits = attempt(uniform[2:])
    retried = np.flatnonzero(~fits)
    # All other attempts are made at once: one loop of NumPy calls instead of up to nine.
    if retried.size:
        # By attempt, then by sample.
        of_attempts = draws.uniform(2 * (_ATTEMPTS - 1), 4, retried).reshape(2, -1)
        lengths, found = attempt(of_attempts)
        found = found.reshape(_ATTEMPTS - 1, -1)
        lengths = lengths.reshape(2, *found.shape)
        length[:, retried] = lengths[:, found.argmax(0), np.arange(retried.size)]
        fits[retried] = found.any(0)
    start = (uniform[:2] * (sizes - length + 1)).astype(np.int64)
    return start, length, fits


def edges_of(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Return the edges of boxes, int32 ``(N, 4)``, from their starts and ends, ``(2, N)`` each.

    They are the first row, the row after the last, and the same of columns. The first axis of
    starts and ends is the height.
    """
    return np.stack([start, end], 1).reshape(4, -1).T.astype(np.int32, order="C")


def each_box(edges: np.ndarray) -> Iterator[tuple[int, slice, slice]]:
    """Yield the sample, rows and columns of each of the boxes with these edges ``(N, …, 4)``.

    Boxes without rows are left out.
    """
    has_rows = edges[..., 0] < edges[..., 1]
    for index, (top, bottom, left, right) in zip(
        np.nonzero(has_rows)[0].tolist(), edges[has_rows].tolist(), strict=True
    ):
        yield index, slice(top, bottom), slice(left, right)
