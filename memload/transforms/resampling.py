"""Weights of a resize in fixed point, in a table for the kernel: bicubic ones, or of both kinds.

The kernel computes bilinear weights by itself, since integers are enough for these.
"""

import functools
from typing import NamedTuple

import numpy as np

from memload.transforms.geometry import Axis, Plan, bits_for, first_pixels, weights

#: torch's coefficients of the cubic: with antialias that of Pillow (Keys, "Cubic Convolution
#: Interpolation for Digital Image Processing", 1981), and otherwise that of OpenCV.
_ANTIALIASED_COEFFICIENT, _INTERPOLATING_COEFFICIENT = -0.5, -0.75
#: The kernel has no loop over so many taps, so that each filter has to have them.
_UNROLLED_TAPS = 4


class Filter(NamedTuple):
    """What the output pixels of an axis are made of.

    ``rows`` is int32 ``(1 + taps, resized)``: the first source pixel of each output pixel, then the
    weights of it and of those that follow. Pixels beyond the last have a weight of 0, and there are
    at least four rows of weights; only the first ``taps`` matter. ``bits`` of a weight are after
    the binary point.
    """

    rows: np.ndarray
    taps: int
    bits: int


class Filters(NamedTuple):
    """The filters of all samples of a plan.

    ``bits`` are those of height and width, ``(2, N)``. ``places`` has where the rows of height and
    width begin in the table, and then the numbers of their taps, ``(4, N)``. ``tables`` are the
    parts of the table, one behind the other. All are int32.
    """

    bits: np.ndarray
    places: np.ndarray
    tables: list[np.ndarray]


def filters_of(plan: Plan) -> Filters:
    """Return the filters of a plan that resizes. Each filter is in the table once."""
    bits, offsets, taps = np.empty((3, 2, len(plan.bicubic)), np.int32)
    tables: list[np.ndarray] = []
    end = 0
    for row, axis in enumerate((plan.height, plan.width)):
        filters, which = _filters_of_axis(axis, plan)
        sizes = np.array([filter_.rows.size for filter_ in filters], np.int64)
        starts = end + np.cumsum(sizes) - sizes
        end += int(sizes.sum())
        bits[row] = np.array([filter_.bits for filter_ in filters])[which]
        offsets[row] = starts[which]
        taps[row] = np.array([filter_.taps for filter_ in filters])[which]
        tables += [filter_.rows.ravel() for filter_ in filters]
    return Filters(bits, np.concatenate([offsets, taps]), tables)


def _filters_of_axis(axis: Axis, plan: Plan) -> tuple[list[Filter], np.ndarray]:
    """Return the different filters of an axis, and the index of each sample's."""
    keys_of_samples = 2 * axis.length + plan.bicubic
    keys = np.flatnonzero(
        np.bincount(keys_of_samples)
    )  # np.unique sorts, which takes 8 times as long
    index_of_key = np.zeros(int(keys_of_samples.max(initial=0)) + 1, np.int64)
    index_of_key[keys] = np.arange(len(keys))
    assert axis.resized is not None
    filters = [
        filter_of(key >> 1, axis.resized, plan.antialias, bool(key & 1)) for key in keys.tolist()
    ]
    return filters, index_of_key[keys_of_samples]


@functools.lru_cache(maxsize=1024)
def filter_of(length: int, resized: int, antialias: bool, bicubic: bool) -> Filter:
    """Return the filter that resizes ``length`` pixels to ``resized`` as torch does for uint8.

    See ``_compute_index_ranges_int16_weights`` in ATen's ``UpSampleKernel.cpp``.
    """
    if bicubic:
        first, exact, largest = (_antialiased if antialias else _interpolating)(length, resized)
    else:
        first, exact = first_pixels(length, resized, antialias), weights(length, resized, antialias)
        largest = float(exact.max())
    bits = bits_for(largest)
    taps = exact.shape[1]
    rows = np.zeros((1 + max(taps, _UNROLLED_TAPS), resized), np.int32)
    rows[0] = first
    # Half of a unit is rounded away from 0.
    rows[1 : 1 + taps] = np.trunc(exact * (1 << bits) + np.copysign(0.5, exact)).T
    return Filter(rows, taps, bits)


def _antialiased(length: int, resized: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Return first pixels ``(resized,)``, weights ``(resized, taps)`` and the largest of these.

    The cubic reaches over four source pixels or, if those are larger, output pixels. Weights of
    pixels beyond the border are given to the others in proportion. The order of operations is
    torch's, so that weights which are halfway between two integers are rounded alike.
    """
    scale = length / resized
    reach = 2 * max(scale, 1.0)
    centre = scale * (np.arange(resized) + 0.5)
    first = np.maximum((centre - reach + 0.5).astype(np.int64), 0)
    end = np.minimum((centre + reach + 0.5).astype(np.int64), length)
    pixels = first[:, np.newaxis] + np.arange((end - first).max())
    distance = np.abs(pixels - centre[:, np.newaxis] + 0.5)
    weight = _cubic(distance * (1 / scale if scale >= 1 else 1.0), _ANTIALIASED_COEFFICIENT)
    weight *= pixels < end[:, np.newaxis]
    weight /= weight.sum(1, keepdims=True)
    return first, weight, float(weight.max())


def _interpolating(length: int, resized: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Return what `_antialiased` does, for four source pixels and a border that is repeated.

    The largest is that of the sums as they grow: a weight may count that becomes smaller when those
    of pixels beyond the border are added to it.
    """
    centre = length / resized * (np.arange(resized) + 0.5) - 0.5
    before = np.floor(centre).astype(np.int64) - 1
    first, each = np.maximum(before, 0), np.arange(resized)
    summed, largest = np.zeros((resized, 4)), 0.0
    for tap in range(4):
        weight = _cubic(np.abs(before + tap - centre), _INTERPOLATING_COEFFICIENT)
        summed[each, np.clip(before + tap, 0, length - 1) - first] += weight
        largest = max(largest, float(summed.max()))
    return first, summed, largest


def _cubic(distance: np.ndarray, coefficient: float) -> np.ndarray:
    """Return the cubic convolution at distances of at least 0."""
    a, x = coefficient, distance
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((x - 5) * x + 8) * x * a - 4 * a
    cubic: np.ndarray = np.where(x < 1, near, np.where(x < 2, far, 0.0))
    return cubic
