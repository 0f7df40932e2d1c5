"""Where the pixels of an output come from, one axis at a time, and the plan for a whole batch."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memload.upload import Parameters

#: Without it, GPUs compute in torch's own operations, as the CPU does.
HAS_TRITON = find_spec("triton") is not None
#: The kernel takes images whose sides have at most this many pixels, before and after.
LARGEST_SIDE = 16_384
#: torch keeps the weights of uint8 images in 16 bits, with at most this many after the point.
_MAX_PRECISION = 22
#: What is outside of an image: a fill, the pixel at the edge, or the mirrored image, without
#: ("reflect") or with ("symmetric") the pixel at the edge itself. The kernels know their numbers.
PADDING_MODES = ("constant", "edge", "reflect", "symmetric")


def runs_in_operations_kernel(images: Tensor) -> bool:
    """Return whether `operations_kernel` can change these images."""
    channels, *sides = images.shape[1:]
    fits = channels in (1, 3) and max(sides) <= LARGEST_SIDE
    return images.is_cuda and images.dtype == torch.uint8 and fits and HAS_TRITON


class Axis:
    """Height or width of a batch: for each sample, which source pixels make up the output.

    Per sample: crop a box from the source, resize it, crop a window from the result, and optionally
    flip that. All numbers are in pixels and in the direction of the source:

    - ``source``: the extent of the source images.
    - ``start``, ``length``: the box, int64 ``(N,)``. It may reach beyond the source.
    - ``resized``: the extent that the box is resized to, or None.
    - ``shift``: where the window begins in the resized box, int64 ``(N,)``.
    - ``flipped``: bool ``(N,)``.
    - ``mirrored``: whether the box was flipped when it was resized, bool ``(N,)``.
    - ``extent``: the extent of the output so far.
    - ``inside``: whether the output has no margins, so that all of it comes from source pixels.
    - ``padding_mode``: what is outside of the image that was cropped, one of `PADDING_MODES`.
    - ``unchanged``: whether nothing was cropped or resized.

    `crop` and changes of ``flipped`` add a step behind those that the axis has already.
    """

    def __init__(self, source: int, count: int) -> None:
        self.source = self.extent = source
        self.start, self.shift = np.zeros((2, count), np.int64)
        self.length = np.full(count, source)
        self.flipped = self.mirrored = np.zeros(count, bool)
        self.resized: int | None = None
        self.inside = self.unchanged = True
        self.padding_mode = "constant"

    def crop(
        self,
        start: np.ndarray | int,
        length: np.ndarray | int,
        resized: int | None = None,
        padding_mode: str = "constant",
    ) -> None:
        """Take ``length`` pixels of the output from ``start``, and resize them if asked to.

        What is resized lies inside of the output, and may have another length for each sample. An
        axis can be resized once. What is not resized may reach outside, where ``padding_mode`` says
        what there is. Only one crop of an axis does so.
        """
        first = np.where(self.flipped, self.extent - length - start, start)
        if self.resized is None:
            self.start = self.start + first
            self.length = np.full_like(self.length, length)
        else:
            self.shift = self.shift + first
        if resized is None:
            self.inside &= bool(np.all((start >= 0) & (start <= self.extent - length)))
            self.extent = int(length)
            self.padding_mode = padding_mode
        else:
            self.extent = self.resized = resized
            self.mirrored = self.flipped
        self.unchanged = False

    def affine(self) -> tuple[np.ndarray, np.ndarray]:
        """Return factor and offset, float64 ``(N,)``, from source to output coordinates.

        The centres of the pixels have integer coordinates.
        """
        factor = (self.extent if self.resized is None else self.resized) / self.length
        offset = (0.5 - self.start) * factor - 0.5 - self.shift
        direction = np.where(self.flipped, -1.0, 1.0)
        return direction * factor, np.where(self.flipped, self.extent - 1 - offset, offset)

    def nearest(self, samples: slice) -> np.ndarray:
        """Return the source pixel nearest to each output pixel, int64 ``(N, extent)``.

        Pixel ``i`` of a box that is resized is its pixel ``((2·i + 1)·length) // (2·resized)``: of
        two equally near ones the second, in the direction that the box had when it was resized.
        Pixels in margins of "constant" padding are outside of the source: below 0, or not below
        ``source``.
        """
        start, length, shift, flipped, mirrored = (
            values[samples, np.newaxis]
            for values in (self.start, self.length, self.shift, self.flipped, self.mirrored)
        )
        output = np.arange(self.extent)
        pixel = np.where(flipped, self.extent - 1 - output, output) + shift
        if self.resized is None:
            return pixels_shown(start + pixel, self.source, self.padding_mode)
        pixel = pixels_shown(pixel, self.resized, self.padding_mode)
        in_box = ((2 * pixel + 1) * length - mirrored) // (2 * self.resized)
        in_source = pixels_shown(start + in_box, self.source, self.padding_mode)
        return np.where((pixel >= 0) & (pixel < self.resized), in_source, -1)

    def edge_map(self) -> np.ndarray:
        """Return how edges of boxes move: start, factor, divisor, offset and extent, ``(5, N)``.

        ``x`` becomes ``(x - start) · factor / divisor + offset``, where 0 and the extent are the
        edges of the image. This is `affine` for coordinates that are larger by 0.5, in a form that
        is exact where edges meet: a box that only touches a crop has nothing left in it.
        """
        resized = self.length if self.resized is None else self.resized
        factor = np.where(self.flipped, -resized, resized)
        offset = np.where(self.flipped, self.extent + self.shift, -self.shift)
        extent = np.full_like(self.start, self.extent)
        return np.array([self.start, factor, self.length, offset, extent], np.float64)


def pixels_shown(pixels: np.ndarray, extent: int, padding_mode: str) -> np.ndarray:
    """Return which pixels of an axis are shown at places that may be outside of it, int64.

    For "constant" these are the places themselves. The others are within 0 and ``extent`` - 1,
    where the padding is less than ``extent``, or for "symmetric" at most that.
    """
    last = extent - 1
    if padding_mode == "reflect":
        pixels = last - np.abs(last - np.abs(pixels))
    if padding_mode == "symmetric":
        pixels = np.where(pixels < 0, -1 - pixels, pixels)
        pixels = np.where(pixels > last, 2 * last + 1 - pixels, pixels)
    return np.asarray(pixels if padding_mode == "constant" else pixels.clip(0, last))


@dataclass
class Plan:
    """What the fused steps do with each image of a batch.

    Its pixels come from where ``height`` and ``width`` say. Outside of the source they have the
    value ``fill``, one for each channel, if ``padding_mode`` is "constant". If ``maps_pixels``,
    each pixel then becomes ``factor · pixel + offset``, float64 ``(C,)`` each. Samples that are
    ``bicubic``, bool ``(N,)``, are resized so, and the others bilinearly. Transforms add themselves
    to a plan, whose ``dtype`` is that of the output so far.
    """

    height: Axis
    width: Axis
    fill: tuple[float, ...]
    factor: np.ndarray
    offset: np.ndarray
    dtype: torch.dtype
    memory_format: torch.memory_format
    bicubic: np.ndarray
    antialias: bool = True
    maps_pixels: bool = False
    #: What functions given to `uploaded` returned.
    _computed: dict[Any, Parameters] = field(default_factory=dict)

    @property
    def resizes(self) -> bool:
        """Whether pixels are interpolated."""
        return self.height.resized is not None

    @property
    def padding_mode(self) -> str:
        """What is outside of the images, one of `PADDING_MODES`."""
        return self.height.padding_mode

    @functools.cached_property
    def resizes_bicubically(self) -> bool:
        """Whether pixels of any sample are interpolated bicubically."""
        return self.resizes and bool(self.bicubic.any())

    def table(self) -> np.ndarray:
        """Return start, length, shift and flipped of height, then of width, int32 ``(8, N)``."""
        table = np.empty((8, len(self.height.start)), np.int32)
        for row, axis in ((0, self.height), (4, self.width)):
            table[row], table[row + 1] = axis.start, axis.length
            table[row + 2], table[row + 3] = axis.shift, axis.flipped
        return table

    def uploaded(self, compute: Callable[["Plan"], np.ndarray], device: torch.device) -> Tensor:
        """Return ``compute(plan)`` on a device. Each function is called once."""
        if compute not in self._computed:
            self._computed[compute] = Parameters(compute(self))
        return self._computed[compute].on(device)

    def runs_in_kernel(self, tensor: Tensor) -> bool:
        """Return whether a kernel can carry out the plan for this tensor."""
        return tensor.is_cuda and self.fits_kernel and HAS_TRITON

    @functools.cached_property
    def fits_kernel(self) -> bool:
        """Whether no side has more than `LARGEST_SIDE` pixels."""
        axes = self.height, self.width
        return all(
            max(axis.source, axis.resized or 0, axis.extent) <= LARGEST_SIDE for axis in axes
        )


def weights(length: int, resized: int, antialias: bool) -> np.ndarray:
    """Return the bilinear weights of the source pixels, float64 ``(resized, taps)``.

    The first tap of an output pixel is that of `first_pixels`. This is the triangle filter of
    Pillow and torch. It is two source pixels wide or, with ``antialias``, two output pixels if
    those are larger. Distances are in units of 1/(2·resized) of a source pixel, so they are
    integers; ``half`` is half the width of the filter.
    """
    half = 2 * max(length, resized) if antialias else 2 * resized
    centre = (2 * np.arange(resized) + 1)[:, np.newaxis] * length
    first = first_pixels(length, resized, antialias)[:, np.newaxis]
    pixels = first + np.arange(-(-half // resized) + 1)
    distance = np.maximum(half - np.abs((2 * pixels + 1) * resized - centre), 0)
    distance = distance * (pixels < length)
    normalised: np.ndarray = distance / distance.sum(1, keepdims=True)
    return normalised


def first_pixels(length: int, resized: int, antialias: bool) -> np.ndarray:
    """Return the first source pixel with a bilinear weight above 0 in each output pixel.

    For output pixel ``i`` that is ``max(((2·i + 1)·length - half + resized) // (2·resized), 0)``,
    with the ``half`` of `weights`.
    """
    half = 2 * max(length, resized) if antialias else 2 * resized
    centre = (2 * np.arange(resized) + 1) * length
    return np.maximum((centre - half + resized) // (2 * resized), 0)


def precision(axis: Axis, antialias: bool) -> np.ndarray:
    """Return the bits after the binary point of each sample's bilinear weights, ``(N,)``."""
    if axis.resized is None:
        return np.zeros_like(axis.length, np.int8)
    table = _precision_table(axis.resized, antialias)
    missing = axis.length[table[axis.length] < 0]
    for length in np.unique(missing).tolist():
        table[length] = precision_of(length, axis.resized, antialias)
    bits: np.ndarray = table[axis.length]
    return bits


@functools.lru_cache(maxsize=64)
def _precision_table(resized: int, antialias: bool) -> np.ndarray:
    """Return a cache of `precision_of` by length, -1 where it is not known yet.

    Computing one takes 46 µs.
    """
    return np.full(LARGEST_SIDE + 1, -1, np.int8)


def precision_of(length: int, resized: int, antialias: bool) -> int:
    """Return how many bits after the binary point torch keeps of bilinear weights."""
    return bits_for(float(weights(length, resized, antialias).max()))


def bits_for(largest: float) -> int:
    """Return how many bits after the binary point torch keeps of the weights of uint8 images.

    torch rounds them to 16 bits, and shifts them as far as the largest weight allows (see
    ``compute_index_ranges_int16_weights`` in ATen's ``UpSampleKernel.cpp``).
    """
    for bits in range(_MAX_PRECISION):
        if int(0.5 + largest * (1 << bits + 1)) >= 1 << 15:
            return bits
    return _MAX_PRECISION
