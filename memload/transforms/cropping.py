"""Crops, resizes and flips: the transforms that move pixels."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from memload.transforms.arguments import (
    flag,
    interval,
    is_integer,
    numbers,
    pair,
    probability,
    wrong,
)
from memload.transforms.boxes import random_boxes
from memload.transforms.draws import Draws
from memload.transforms.fused import MovesPixels
from memload.transforms.geometry import Axis
from memload.transforms.transform import Transform


class RandomHorizontalFlip(MovesPixels, Transform):
    """Flip each image left to right with probability ``p``, like torchvision's.

    Images ``(N, C, H, W)`` keep their shape and dtype.

    >>> flipped = RandomHorizontalFlip(p=0.5)(images, samples=samples)
    """

    fuses_as = "flip"

    def __init__(self, p: float = 0.5) -> None:
        self.p = probability(self, p)

    def add_to(self, height: Axis, width: Axis, draws: Draws) -> None:
        """Flip the width."""
        width.flip(draws.uniform(1)[0] < self.p)


class RandomVerticalFlip(RandomHorizontalFlip):
    """Flip each image top to bottom with probability ``p``, like torchvision's.

    Images ``(N, C, H, W)`` keep their shape and dtype.

    >>> flipped = RandomVerticalFlip(p=0.5)(images, samples=samples)
    """

    def add_to(self, height: Axis, width: Axis, draws: Draws) -> None:
        """Flip the height."""
        height.flip(draws.uniform(1)[0] < self.p)


class CenterCrop(MovesPixels, Transform):
    """Crop the middle of each image, like torchvision's.

    ``size`` is a number of pixels or (height, width). Smaller images get a margin of 0. Images
    ``(N, C, H, W)`` keep their dtype.

    >>> CenterCrop(224)(images).shape[2:]
    torch.Size([224, 224])
    """

    fuses_as = "crop"

    def __init__(self, size: int | Sequence[int]) -> None:
        self.size = pair(self, "size", size)

    def add_to(self, height: Axis, width: Axis, draws: Draws) -> None:
        """Crop both axes."""
        for axis, size in zip((height, width), self.size, strict=True):
            missing = size - axis.extent
            # As in torchvision: a crop's start is rounded half to even, but the smaller half of a
            # margin comes first.
            start = -(missing // 2) if missing > 0 else round(-missing / 2)
            axis.crop(start, size)


class RandomCrop(MovesPixels, Transform):
    """Crop a random window of each image and its padding, like torchvision's.

    ``size`` is a number of pixels or (height, width). ``padding`` is the width of the padding: one
    number, two (left and right, top and bottom), or four (left, top, right, bottom). Padding has
    the value ``fill``, one number or one for each channel, in the units of the images.
    ``pad_if_needed`` pads images that are still too small on both sides. Images ``(N, C, H, W)``
    keep their dtype.

    >>> crops = RandomCrop(32, padding=4)(images, samples=samples)
    """

    fuses_as = "crop"

    def __init__(
        self,
        size: int | Sequence[int],
        padding: int | Sequence[int] | None = None,
        pad_if_needed: bool = False,
        fill: float | Sequence[float] = 0,
        padding_mode: str = "constant",
    ) -> None:
        self.size = pair(self, "size", size)
        self.pad_if_needed = flag(self, "pad_if_needed", pad_if_needed)
        self.fill = numbers(self, "fill", fill)
        sides: Any = (
            padding if isinstance(padding, Sequence) else (0 if padding is None else padding,)
        )
        if len(sides) not in (1, 2, 4) or not all(is_integer(side) and side >= 0 for side in sides):
            raise wrong(self, "padding", "1, 2 or 4 integers of at least 0", repr(padding))
        if padding_mode != "constant":
            raise wrong(self, "padding_mode", "'constant'", repr(padding_mode))
        # (a,) becomes (a, a, a, a), and (a, b) becomes (a, b, a, b).
        self.padding: tuple[int, ...] = tuple(sides) * (4 // len(sides))

    def add_to(self, height: Axis, width: Axis, draws: Draws) -> None:
        """Crop both axes."""
        left, top, right, bottom = self.padding
        drawn = draws.uniform(2)
        self._crop(height, self.size[0], top, bottom, drawn[0])
        self._crop(width, self.size[1], left, right, drawn[1])

    def _crop(self, axis: Axis, size: int, before: int, after: int, drawn: np.ndarray) -> None:
        """Crop an axis with padding before and after it."""
        padded = axis.extent + before + after
        if padded < size and self.pad_if_needed:
            missing = size - padded
            before, padded = before + missing, padded + 2 * missing
        if padded < size:
            expected = f"at most the {padded} pixels of the padded image"
            raise wrong(self, "size", expected, size, "Give padding or pad_if_needed.")
        axis.crop((drawn * (padded - size + 1)).astype(np.int64) - before, size)


class Resize(MovesPixels, Transform):
    """Resize each image with bilinear interpolation, like torchvision's.

    ``size`` is (height, width), or one number for the shorter side: then the longer side keeps the
    aspect ratio, rounded down, and has at most ``max_size`` pixels. With ``size=None`` the longer
    side becomes ``max_size``. ``antialias`` widens the filter where images become smaller, as
    Pillow does.

    Images ``(N, C, H, W)`` keep their dtype. uint8 is rounded as `torch.nn.functional.interpolate`
    rounds it on the CPU, also on CUDA. There, sides of more than 16,384 pixels and a width of 1
    pixel may differ by 1.

    >>> Resize(256)(torch.zeros(1, 3, 512, 1024)).shape
    torch.Size([1, 3, 256, 512])
    """

    fuses_as = "resize"

    def __init__(
        self,
        size: int | Sequence[int] | None,
        interpolation: Any = "bilinear",
        max_size: int | None = None,
        antialias: bool = True,
    ) -> None:
        self.size: int | tuple[int, int] | None = None
        if size is not None:
            both = pair(self, "size", size)
            self.size = both if isinstance(size, Sequence) and len(size) == 2 else both[0]
        self.max_size = max_size
        self.antialias = _check_interpolation(self, interpolation, antialias)
        if max_size is not None:
            shorter = self.size if isinstance(self.size, int) else 0
            if isinstance(self.size, tuple) or not is_integer(max_size) or max_size <= shorter:
                expected = "an integer above size, which is then one number or None"
                raise wrong(self, "max_size", expected, f"{max_size} with size {size}")
        elif size is None:
            raise ValueError("Resize: neither size nor max_size was given. Give one of them.")

    def add_to(self, height: Axis, width: Axis, draws: Draws) -> None:
        """Resize both axes."""
        new_height, new_width = self._output_size(height.extent, width.extent)
        height.resize(new_height)
        width.resize(new_width)

    def _output_size(self, height: int, width: int) -> tuple[int, int]:
        if isinstance(self.size, tuple):
            return self.size
        shorter, longer = sorted((height, width))
        if self.size is not None:
            shorter, longer = self.size, int(self.size * longer / shorter)
        if self.max_size is not None and (self.size is None or longer > self.max_size):
            shorter, longer = max(1, int(self.max_size * shorter / longer)), self.max_size
        return (longer, shorter) if height > width else (shorter, longer)


class RandomResizedCrop(MovesPixels, Transform):
    """Crop a box of random area and aspect ratio from each image, and resize it to ``size``.

    The algorithm is torchvision's: the area is uniform between ``scale[0]`` and ``scale[1]`` times
    that of the image, and the logarithm of width / height is uniform over ``ratio``. If ten
    attempts do not fit, the box is as much of the middle as ``ratio`` allows.

    ``size`` is a number of pixels or (height, width). Images ``(N, C, H, W)`` keep their dtype. For
    ``antialias`` and rounding see `Resize`.

    >>> RandomResizedCrop(224)(images, samples=samples).shape[2:]
    torch.Size([224, 224])
    """

    fuses_as = "resize"

    def __init__(
        self,
        size: int | Sequence[int],
        scale: Sequence[float] = (0.08, 1.0),
        ratio: Sequence[float] = (3 / 4, 4 / 3),
        interpolation: Any = "bilinear",
        antialias: bool = True,
    ) -> None:
        self.size = pair(self, "size", size)
        self.scale = interval(self, "scale", scale, 0)
        self.ratio = interval(self, "ratio", ratio, 1e-6)
        self.antialias = _check_interpolation(self, interpolation, antialias)

    def add_to(self, height: Axis, width: Axis, draws: Draws) -> None:
        """Resize a box of both axes."""
        extents = height.extent, width.extent
        start, length, fits = random_boxes(draws, extents, self.scale, self.ratio, smallest=1)
        if not fits.all():
            for axis, (extent, middle) in enumerate(
                zip(extents, self._middle(*extents), strict=True)
            ):
                length[axis] = np.where(fits, length[axis], middle)
                start[axis] = np.where(fits, start[axis], (extent - middle) // 2)
        height.resize(self.size[0], start[0], length[0])
        width.resize(self.size[1], start[1], length[1])

    def _middle(self, height: int, width: int) -> tuple[int, int]:
        """Return the size of the box that is used when no attempt fits: a pixel at least."""
        return (
            max(1, min(height, round(width / self.ratio[0]))),
            max(1, min(width, round(height * self.ratio[1]))),
        )


def _check_interpolation(owner: Transform, interpolation: Any, antialias: Any) -> bool:
    """Return ``antialias``. The interpolation is bilinear; torchvision and Pillow call it 2."""
    if getattr(interpolation, "value", interpolation) not in ("bilinear", 2):
        raise wrong(owner, "interpolation", "'bilinear'", repr(interpolation))
    return flag(owner, "antialias", antialias)
