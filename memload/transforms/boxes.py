"""Boxes of random area and aspect ratio, as RandomResizedCrop and RandomErasing draw them."""

import math

import numpy as np

from memload.transforms.draws import Draws

_TRIES = 10


def random_boxes(
    draws: Draws,
    size: tuple[int, int],
    scale: tuple[float, float],
    ratio: tuple[float, float],
    least: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return starts and lengths on two axes, int64 ``(2, N)`` each, and which of ten tries found one, bool ``(N,)``.

    A box has ``scale`` of the area of ``size``, drawn evenly, and is ``ratio`` times as long on the second axis as
    on the first, drawn evenly in its logarithm. It fits with ``least`` pixels or more and fewer than ``least`` more
    than ``size``. torchvision's algorithm. Uses the numbers 0 to 21 of the draws.
    """
    sizes = np.array(size)[:, np.newaxis]
    drawn = draws.uniform(4)
    length, found = _attempt(drawn[2:], sizes, scale, ratio, least)
    again = np.flatnonzero(~found)
    if again.size:  # all other tries at once: NumPy's overhead is paid twice, not as often as the unluckiest needs
        tries = draws.uniform(2 * (_TRIES - 1), 4, again).reshape(
            2, -1
        )  # areas of all tries, then ratios
        lengths, fits = _attempt(tries, sizes, scale, ratio, least)
        fits = fits.reshape(_TRIES - 1, -1)
        length[:, again] = lengths.reshape(2, *fits.shape)[:, fits.argmax(0), np.arange(again.size)]
        found[again] = fits.any(0)
    return (drawn[:2] * (sizes - length + 1)).astype(np.int64), length, found


def _attempt(
    drawn: np.ndarray,
    sizes: np.ndarray,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    least: int,
) -> tuple[np.ndarray, np.ndarray]:
    area = (scale[0] + (scale[1] - scale[0]) * drawn[0]) * (sizes[0] * sizes[1])
    low, high = math.log(ratio[0]), math.log(ratio[1])
    half = np.array([[-0.5], [0.5]])  # of the ratio's logarithm goes to either length
    length = np.rint(np.sqrt(area) * np.exp(half * (low + (high - low) * drawn[1]))).astype(
        np.int64
    )
    fits = (length >= least) & (length < sizes + least)
    return length, fits[0] & fits[1]
