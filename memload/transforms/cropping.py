"""Crops, resizes and flips: the steps that move pixels."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from memload.transforms.boxes import random_boxes
from memload.transforms.draws import Draws
from memload.transforms.geometry import Axis
from memload.transforms.transform import Geometric, is_integer


class RandomHorizontalFlip(Geometric):
    """Left for right, with probability ``p``."""

    def __init__(self, p: float = 0.5) -> None:
        self.p = self._probability(p)

    def place(self, height: Axis, width: Axis, draws: Draws) -> None:
        """Flip the width."""
        width.flip(draws.uniform(1)[0] < self.p)


class RandomVerticalFlip(RandomHorizontalFlip):
    """Top for bottom, with probability ``p``."""

    def place(self, height: Axis, width: Axis, draws: Draws) -> None:
        """Flip the height."""
        height.flip(draws.uniform(1)[0] < self.p)


class CenterCrop(Geometric):
    """The middle of the image, ``size`` pixels or (height, width); an image that is smaller gets a margin of 0."""

    def __init__(self, size: int | Sequence[int]) -> None:
        self.size = self._pair("size", size)

    def place(self, height: Axis, width: Axis, draws: Draws) -> None:
        """Crop both axes."""
        for axis, size in zip((height, width), self.size, strict=True):
            # torchvision rounds half to even, but the larger half of a margin comes behind the image
            missing = size - axis.extent
            axis.crop(-(missing // 2) if missing > 0 else round(-missing / 2), size)


class RandomCrop(Geometric):
    """A window of ``size`` pixels or (height, width), anywhere in the image with its ``padding``.

    ``padding`` is as wide as one number says, or two (left and right, top and bottom), or four (left, top, right,
    bottom). It has the value ``fill``, one number or one for each channel. ``pad_if_needed`` widens what is still
    too small, on both sides.
    """

    def __init__(
        self,
        size: int | Sequence[int],
        padding: int | Sequence[int] | None = None,
        pad_if_needed: bool = False,
        fill: float | Sequence[float] = 0,
        padding_mode: str = "constant",
    ) -> None:
        self.size, self.pad_if_needed, self.fill = (
            self._pair("size", size),
            self._flag("pad_if_needed", pad_if_needed),
            self._numbers("fill", fill),
        )
        sides = (
            tuple(padding)
            if isinstance(padding, Sequence)
            else (0 if padding is None else padding,)
        )
        if len(sides) not in (1, 2, 4) or not all(is_integer(side) and side >= 0 for side in sides):
            raise self._wrong("padding", "1, 2 or 4 integers of at least 0", repr(padding))
        if padding_mode != "constant":
            raise self._wrong("padding_mode", "'constant'", repr(padding_mode))
        self.padding = sides * (4 // len(sides))  # (l,) → llll, (l, t) → ltlt

    def place(self, height: Axis, width: Axis, draws: Draws) -> None:
        """Crop both axes."""
        left, top, right, bottom = self.padding
        for axis, size, before, behind, drawn in zip(
            (height, width), self.size, (top, left), (bottom, right), draws.uniform(2), strict=True
        ):
            padded = axis.extent + before + behind
            if padded < size and self.pad_if_needed:
                before, padded = before + size - padded, 2 * size - padded
            if padded < size:
                found = f"{size} of {padded} pixels"
                raise self._wrong(
                    "size",
                    "no more than the padded image",
                    found,
                    ". Give padding or pad_if_needed",
                )
            axis.crop((drawn * (padded - size + 1)).astype(np.int64) - before, size)


class Resize(Geometric):
    """The whole image at another size, by the triangle filter ("bilinear").

    ``size`` is (height, width), or one number: then the shorter side becomes that, and the longer one is truncated
    to what the ratio gives, and to at most ``max_size``; or None: then the longer side becomes ``max_size``.
    ``antialias`` widens the filter where the image becomes smaller, as Pillow does. uint8 comes out as uint8, rounded
    as `torch.nn.functional.interpolate` rounds it.
    """

    def __init__(
        self,
        size: int | Sequence[int] | None,
        interpolation: Any = "bilinear",
        max_size: int | None = None,
        antialias: bool = True,
    ) -> None:
        self.size: int | tuple[int, int] | None = None
        if size is not None:
            pair = self._pair("size", size)
            self.size = pair[0] if not isinstance(size, Sequence) or len(size) == 1 else pair
        self.max_size, self.antialias = max_size, _check(self, interpolation, antialias)
        least = self.size if isinstance(self.size, int) else 0
        if max_size is not None and (
            isinstance(self.size, tuple) or not is_integer(max_size) or max_size <= least
        ):
            raise self._wrong(
                "max_size", "more than size, which is one number or None", f"{max_size} and {size}"
            )
        if max_size is None and size is None:
            raise self._wrong("size and max_size", "one of them at least", "neither")

    def place(self, height: Axis, width: Axis, draws: Draws) -> None:
        """Resize both axes."""
        if not isinstance(self.size, tuple):
            short, long = sorted((height.extent, width.extent))
            small, large = (
                (short, long) if self.size is None else (self.size, int(self.size * long / short))
            )
            if self.max_size is not None and (self.size is None or large > self.max_size):
                small, large = max(1, int(self.max_size * small / large)), self.max_size
            sizes = (large, small) if height.extent > width.extent else (small, large)
        else:
            sizes = self.size
        height.resize(sizes[0])
        width.resize(sizes[1])


class RandomResizedCrop(Geometric):
    """A part of the image, of random area and aspect ratio, at the fixed ``size``.

    ``scale`` bounds the part's share of the area, ``ratio`` its width over height. If ten tries do not fit, it is
    as much of the middle as ``ratio`` allows: torchvision's algorithm. ``size`` is one number or (height, width);
    see `Resize` for ``antialias`` and for how it rounds.
    """

    def __init__(
        self,
        size: int | Sequence[int],
        scale: Sequence[float] = (0.08, 1.0),
        ratio: Sequence[float] = (3 / 4, 4 / 3),
        interpolation: Any = "bilinear",
        antialias: bool = True,
    ) -> None:
        self.size = self._pair("size", size)
        self.scale = self._range("scale", scale, 0)
        self.ratio = self._range("ratio", ratio, 1e-6)
        self.antialias = _check(self, interpolation, antialias)

    def place(self, height: Axis, width: Axis, draws: Draws) -> None:
        """Resize a box of both axes."""
        extents = h, w = height.extent, width.extent
        start, length, found = random_boxes(draws, extents, self.scale, self.ratio, 1)
        if not found.all():
            # a pixel at least, where torchvision's formula gives none
            whole = (
                max(1, min(h, round(w / self.ratio[0]))),
                max(1, min(w, round(h * self.ratio[1]))),
            )
            for axis in (0, 1):
                length[axis] = np.where(found, length[axis], whole[axis])
                start[axis] = np.where(found, start[axis], (extents[axis] - whole[axis]) // 2)
        height.resize(self.size[0], start[0], length[0])
        width.resize(self.size[1], start[1], length[1])


def _check(owner: Geometric, interpolation: Any, antialias: Any) -> bool:
    # torchvision's enumeration has values; 2 is Pillow's number for it
    if getattr(interpolation, "value", interpolation) not in ("bilinear", 2):
        raise owner._wrong("interpolation", "'bilinear'", repr(interpolation))
    return owner._flag("antialias", antialias)
