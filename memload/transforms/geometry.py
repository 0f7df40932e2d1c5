"""Where the pixels of an output come from, one axis at a time, and the plan for many samples."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

#: Without it, GPUs compute in torch's own operations, as the CPU does.
HAS_TRITON = find_spec("triton") is not None
#: Kernels take images whose sides have at most this many pixels, before and after.
LARGEST_SIDE = 16_384
#: Of two equally near pixels, the one to the right or below is taken, however positions are
#: rounded. No others of a resize are as near: images have at most 16,384 pixels on a side.
TIE = 2e-5
#: What is outside of an image: a fill, the pixel at the edge, or the mirrored image, without
#: ("reflect") or with ("symmetric") the pixel at the edge itself. The kernels know their numbers.
PADDING_MODES = ("constant", "edge", "reflect", "symmetric")


class Axis:
    """Height or width of a batch: for each sample, which source pixels make up the output.

    Per sample: crop a box from the source, resize it, crop a window from the result, and optionally
    flip that. All numbers are in pixels and in the direction of the source:

    - ``source``: the extent of the source images.
    - ``start``, ``length``: the box, int64 ``(N,)``. It may reach beyond the source.
    - ``resized``: the extent that the box is resized to, or None.
    - ``shift``: where the window begins in the resized box, int64 ``(N,)``.
    - ``flipped``: bool ``(N,)``.
    - ``extent``: the extent of the output so far.
    - ``inside``: whether the output has no margins, so that all of it comes from source pixels.
    - ``padding_mode``: what is outside of the image that was cropped, one of `PADDING_MODES`.
    - ``unchanged``: whether nothing was cropped or resized.

    Each call of `crop`, and each change of ``flipped``, applies to the output of those before it.
    """

    def __init__(self, source: int, count: int) -> None:
        self.source = self.extent = source
        self.start, self.shift = np.zeros((2, count), np.int64)
        self.length = np.full(count, source)
        self.flipped = np.zeros(count, bool)
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
        what there is. Of an axis, only one crop may reach outside; behind a resize, only with
        "constant".
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
        self.unchanged = False

    def factor_and_offset(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the line, float64 ``(N,)`` each, by which places in the output map to the source.

        0 and the extent are the edges of the image.
        """
        scale = 1.0 if self.resized is None else self.length / self.resized
        offset = self.start + (self.shift + np.where(self.flipped, self.extent, 0)) * scale
        return np.where(self.flipped, -scale, scale), offset

    def shown(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the first source pixel that may be shown, and the one after the last."""
        if self.resized is None:
            return np.zeros_like(self.start), np.full_like(self.start, self.source)
        return self.start.clip(0), (self.start + self.length).clip(None, self.source)


def pixels_shown(pixels: Any, extent: int, padding_mode: str) -> Any:
    """Return which pixels of an axis are shown at places that may be outside of it.

    For "constant" these are the places themselves. The others are within 0 and ``extent`` - 1,
    where the padding is less than ``extent``, or for "symmetric" at most that. The pixels are
    integers, of NumPy or torch.
    """
    last = extent - 1
    if padding_mode == "reflect":
        pixels = last - abs(last - abs(pixels))
    if padding_mode == "symmetric":
        pixels = (2 * extent - abs(2 * extent - abs(2 * pixels + 1)) - 1) // 2
    return pixels if padding_mode == "constant" else pixels.clip(0, last)


@dataclass
class Plan:
    """What the crops, resizes, flips and maps of pixels in one pass do with each image.

    Its pixels come from where ``height`` and ``width`` say. Outside of the source they have the
    value ``fill``, one for each channel, if ``padding_mode`` is "constant". If ``maps_pixels``,
    each pixel then becomes ``factor · pixel + offset``, float64 ``(C,)`` each. Transforms add
    themselves to a plan, whose ``dtype`` is that of the output so far.
    """

    height: Axis
    width: Axis
    fill: tuple[float, ...]
    factor: np.ndarray
    offset: np.ndarray
    dtype: torch.dtype
    bicubic: bool = False
    antialias: bool = True
    maps_pixels: bool = False

    @classmethod
    def unchanged(cls, images: Tensor, count: int) -> "Plan":
        """Return a plan that does nothing to ``count`` images like these."""
        _, channels, height, width = images.shape
        axes = Axis(height, count), Axis(width, count)
        return cls(
            *axes, (0.0,) * channels, np.ones(channels), np.zeros(channels), dtype=images.dtype
        )

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the output."""
        return self.height.extent, self.width.extent

    @property
    def resizes(self) -> bool:
        """Whether pixels are interpolated."""
        return self.height.resized is not None

    @property
    def padding_mode(self) -> str:
        """What is outside of the images, one of `PADDING_MODES`."""
        return self.height.padding_mode

    def boxes(self) -> np.ndarray:
        """Return start, length, shift and flipped of height, then of width, int32 ``(N, 8)``."""
        columns = [
            column
            for axis in (self.height, self.width)
            for column in (axis.start, axis.length, axis.shift, axis.flipped)
        ]
        return np.stack(columns, 1, dtype=np.int32, casting="unsafe")  # they fit

    def maps(self) -> np.ndarray:
        """Return factor, offset and fill of each channel, float32 ``(3, C)``."""
        return np.array([self.factor, self.offset, self.fill], np.float32)

    def matrices(self) -> np.ndarray:
        """Return where the pixels come from, float64 ``(N, 3, 3)``; see `Batch.follow`."""
        matrices = np.zeros((len(self.height.start), 3, 3))
        for row, axis in enumerate((self.width, self.height)):
            matrices[:, row, row], matrices[:, row, 2] = axis.factor_and_offset()
        matrices[:, 2, 2] = 1
        return matrices

    def shown(self) -> np.ndarray:
        """Return the part of the source that is shown, int64 ``(N, 4)``; see `Batch.follow`."""
        return np.stack([*self.height.shown(), *self.width.shown()], 1)


def fits_kernels(images: Tensor, *sides: int) -> bool:
    """Return whether kernels can make images with these sides of uint8 images."""
    is_small = max(*images.shape[2:], *sides) <= LARGEST_SIDE
    return images.is_cuda and images.dtype == torch.uint8 and HAS_TRITON and is_small
