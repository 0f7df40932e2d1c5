"""RandomErasing and Cutout: a part of the image is painted over."""

import functools
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from memload.transforms.boxes import random_boxes
from memload.transforms.draws import Draws, numbers_at
from memload.transforms.transform import Columns, Transform, to_device


class RandomErasing(Transform):
    """A box of the image gets a ``value``, with probability ``p`` (Zhong et al., https://arxiv.org/abs/1708.04896).

    ``scale`` bounds its share of the area, ``ratio`` its height over width; where ten tries do not fit, nothing is
    erased. ``value`` is a number, one for each channel, or "random": then each pixel is drawn from the normal
    distribution, so put it behind Normalize.
    """

    def __init__(
        self,
        p: float = 0.5,
        scale: Sequence[float] = (0.02, 0.33),
        ratio: Sequence[float] = (0.3, 3.3),
        value: float | Sequence[float] | Literal["random"] = 0,
        inplace: bool = False,
    ) -> None:
        if inplace is not False:
            raise self._wrong("inplace", "False", repr(inplace), ". Batches come out in new memory")
        self.p = self._probability(p)
        self.scale, self.ratio = (
            self._range("scale", scale, 0, 1),
            self._range("ratio", ratio, 1e-6),
        )
        self.value = (
            value if isinstance(value, str) and value == "random" else self._numbers("value", value)
        )

    def apply(self, images: Tensor, columns: Columns, draws: Draws) -> tuple[Tensor, Columns]:
        """Erase a box of those samples whose draw says so."""
        height, width = images.shape[-2:]
        # the ratio is that of the first axis to the second
        (left, top), (w, h), found = random_boxes(draws, (width, height), self.scale, self.ratio, 0)
        h = np.where(found & (draws.uniform(1, 22)[0] < self.p), h, 0)
        if self.value == "random":
            if not images.is_floating_point():
                advice = ". Put it behind Normalize"
                raise self._wrong(
                    "images", "a floating dtype, for value='random'", images.dtype, advice
                )
            return _noise(images, top, left, h, w, draws), columns
        value = self._per_channel("value", self.value, images.shape[1], images.dtype)
        return paint(images, top, left, h, w, value), columns


class Cutout(Transform):
    """A square of ``size`` pixels, or (height, width), gets the value ``fill``, with probability ``p``.

    Its middle lies anywhere in the image, so that a part of it may lie outside (DeVries and Taylor,
    https://arxiv.org/abs/1708.04552).
    """

    def __init__(
        self, size: int | Sequence[int], fill: float | Sequence[float] = 0, p: float = 1.0
    ) -> None:
        self.size, self.fill, self.p = (
            self._pair("size", size),
            self._numbers("fill", fill),
            self._probability(p),
        )

    def apply(self, images: Tensor, columns: Columns, draws: Draws) -> tuple[Tensor, Columns]:
        """Cut a box out of those samples whose draw says so."""
        drawn = draws.uniform(3)
        extents = images.shape[-2:]
        top, left = (
            (u * extent).astype(np.int64) - size // 2
            for u, extent, size in zip(drawn, extents, self.size, strict=False)
        )
        height = np.where(drawn[2] < self.p, self.size[0], 0)
        width = np.full_like(left, self.size[1])
        fill = self._per_channel("fill", self.fill, images.shape[1], images.dtype)
        return paint(images, top, left, height, width, fill), columns


def inside(
    images: Tensor, top: np.ndarray, left: np.ndarray, height: np.ndarray, width: np.ndarray
) -> Tensor:
    """Return which pixels lie in a box of each sample, bool ``(N, 1, H, W)``; boxes may stand over."""
    y0, y1, x0, x1 = to_device(np.stack([top, top + height, left, left + width]), images.device)[
        ..., None
    ]
    rows, columns = (torch.arange(extent, device=images.device) for extent in images.shape[-2:])
    y, x = (rows >= y0) & (rows < y1), (columns >= x0) & (columns < x1)
    both: Tensor = y[:, :, None] & x[:, None, :]
    return both[:, None]


def paint(
    images: Tensor,
    top: np.ndarray,
    left: np.ndarray,
    height: np.ndarray,
    width: np.ndarray,
    value: tuple[float, ...],
) -> Tensor:
    """Return images whose boxes have a value a channel."""
    colour = to_device(np.array(value), images.device).to(images.dtype)[:, None, None]
    return torch.where(inside(images, top, left, height, width), colour, images)


def _noise(
    images: Tensor,
    top: np.ndarray,
    left: np.ndarray,
    height: np.ndarray,
    width: np.ndarray,
    draws: Draws,
) -> Tensor:
    """Return images whose boxes are normal noise, drawn for each pixel and channel by its place in the image."""
    device, (_, channels, _, w) = images.device, images.shape
    areas = height * width
    total = int(areas.sum())
    sample = np.repeat(np.arange(len(areas)), areas)
    within = np.arange(total) - np.repeat(np.cumsum(areas) - areas, areas)
    rows, columns = np.divmod(within, width[sample])
    places = np.stack([sample, top[sample] + rows, left[sample] + columns])
    at, y, x = to_device(places, device)
    numbers = ((y * w + x)[:, None] * channels + torch.arange(channels, device=device)) + (
        1 << 20
    )  # others are boxes'
    drawn = numbers_at(to_device(draws.streams, device)[at][:, None], numbers)
    out = images.clone()
    out[at, :, y, x] = _normal(device)[drawn].to(images.dtype)
    return out


@functools.cache
def _normal(device: torch.device) -> Tensor:
    """The normal distribution's quantiles in 2¹⁶ steps, float32: a table, as devices differ in their functions."""
    quantiles: Tensor = torch.special.ndtri(
        (torch.arange(1 << 16, dtype=torch.float64) + 0.5) / (1 << 16)
    )
    return quantiles.float().to(device)
