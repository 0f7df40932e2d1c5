"""RandomErasing and Cutout: a box of each image is painted over."""

import functools
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from memload.transforms.arguments import (
    interval,
    not_inplace,
    numbers,
    pair,
    per_channel,
    share,
    wrong,
)
from memload.transforms.batch import Batch
from memload.transforms.boxes import NUMBERS_OF_A_BOX, each_box, edges_of, random_boxes
from memload.transforms.draws import Drawn, Draws
from memload.transforms.geometry import HAS_TRITON
from memload.transforms.transform import Transform

#: Noise is a window of one fixed field of so many numbers: a power of two.
_NOISE = 1 << 18


class _Painting(Transform):
    """The base of transforms that paint over a box of images.

    What is drawn are the edges of boxes by the name "boxes", int32 ``(N, 4)``; some may be empty.
    For noise, "offsets", int64 ``(N,)``, are where in the field a sample's noise begins.
    """

    def colour(self, images: Tensor) -> tuple[float, ...] | None:
        """Return a value for each channel of images like these, or None for noise.

        Raises ValueError if they cannot be painted so.
        """
        raise NotImplementedError

    def apply(self, batch: Batch, drawn: Drawn) -> Batch:
        """See `Transform.apply`."""
        images, colour = batch.images, self.colour(batch.images)
        table = _table(colour, images.dtype, images.device)
        if images.is_cuda and HAS_TRITON:
            from memload.transforms.kernels import painting

            offsets = drawn["offsets"] if colour is None else None
            return batch.with_images(painting.paint(images, drawn["boxes"], table, offsets))
        painted = images.clone()
        # With one operation for all boxes, 64 images of 224×224 take 54 ms on the CPU, not 11.
        for index, rows, columns in each_box(drawn.on_host("boxes")):
            value = table[:, None, None]
            if colour is None:
                channels, height, width = images.shape[1:]
                entries = np.arange(height * width * channels).reshape(height, width, channels)
                window = entries[rows, columns] + drawn.on_host("offsets")[index]
                value = table[torch.from_numpy(window % _NOISE).to(table.device)].permute(2, 0, 1)
            painted[index, :, rows, columns] = value
        return batch.with_images(painted)


class RandomErasing(_Painting):
    """Paint over a random box of each image with share ``p``, like torchvision's.

    The area of the box is uniform between ``scale[0]`` and ``scale[1]`` times that of the image,
    and the logarithm of height / width is uniform over ``ratio``. If ten attempts do not fit,
    nothing is erased. ``value`` is one number or one for each channel, in the units of the images
    (for uint8, fractions are cut off), or ``"random"``: then pixels are normally distributed, and
    images must be floats, so put it after Normalize. The noise of a sample is a random window of
    one fixed field, the same on every device. Images ``(N, C, H, W)`` keep their shape and dtype.
    Masks stay as they are. (Zhong et al., https://arxiv.org/abs/1708.04896)

    >>> images = RandomErasing(p=0.25, value="random")(images, samples=samples)
    """

    def __init__(
        self,
        p: float = 0.5,
        scale: Sequence[float] = (0.02, 0.33),
        ratio: Sequence[float] = (0.3, 3.3),
        value: float | Sequence[float] | Literal["random"] = 0,
        inplace: bool = False,
    ) -> None:
        not_inplace(self, inplace)
        self.p = share(self, "p", p)
        self.scale = interval(self, "scale", scale, 0, 1)
        self.ratio = interval(self, "ratio", ratio, 1e-6)
        is_random = isinstance(value, str) and value == "random"
        self.value = value if is_random else numbers(self, "value", value)

    def colour(self, images: Tensor) -> tuple[float, ...] | None:
        """See `_Painting.colour`."""
        if self.value != "random":
            return per_channel(self, "value", self.value, images.shape[1], images.dtype)
        if not images.is_floating_point():
            advice = "Put it after Normalize."
            raise wrong(self, "images", "floating for value='random'", images.dtype, advice)
        return None

    def draw(self, draws: Draws, images: Tensor) -> dict[str, Any]:
        """See `Transform.draw`. The numbers of a box come first."""
        self.colour(images)
        chosen, offset = draws.uniform(2, NUMBERS_OF_A_BOX)
        erased = np.flatnonzero(chosen < self.p)
        height, width = images.shape[2:]
        # The width comes first, since the ratio of a box is its second axis over its first.
        start, length, fits = random_boxes(
            draws.of_samples(erased), (width, height), self.scale, self.ratio, 0
        )
        boxes = np.zeros((len(draws), 4), np.int32)
        boxes[erased] = edges_of(start[::-1], (start + length * fits)[::-1])
        return {"boxes": boxes, "offsets": (offset * _NOISE).astype(np.int64)}


class Cutout(_Painting):
    """Paint over a square of each image with share ``p``.

    ``size`` is the number of pixels, or (height, width). The centre is anywhere in the image, so a
    part of the square may be outside. ``fill`` is one number or one for each channel, in the units
    of the images. Images ``(N, C, H, W)`` keep their shape and dtype. Masks stay as they are.
    (DeVries and Taylor, https://arxiv.org/abs/1708.04552)

    >>> images = Cutout(8)(images, samples=samples)
    """

    def __init__(
        self, size: int | Sequence[int], fill: float | Sequence[float] = 0, p: float = 1.0
    ) -> None:
        self.size = pair(self, "size", size)
        self.fill = numbers(self, "fill", fill)
        self.p = share(self, "p", p)

    def colour(self, images: Tensor) -> tuple[float, ...]:
        """See `_Painting.colour`."""
        return per_channel(self, "fill", self.fill, images.shape[1], images.dtype)

    def draw(self, draws: Draws, images: Tensor) -> dict[str, Any]:
        """See `Transform.draw`."""
        self.colour(images)
        uniform = draws.uniform(3)
        size, extents = np.array([self.size, images.shape[2:]])[:, :, np.newaxis]
        start = (uniform[:2] * extents).astype(np.int64) - size // 2
        end = start + np.where(uniform[2] < self.p, size, 0)
        return {"boxes": edges_of(start.clip(0, extents), end.clip(0, extents))}


@functools.lru_cache(maxsize=64)
def _table(colour: tuple[float, ...] | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a colour, or if it is None the field of noise, on a device.

    The field is computed on the CPU, since devices differ in their mathematical functions.
    """
    if colour is not None:
        values = torch.tensor(colour, dtype=torch.float64, device="cpu")
    else:
        uniform = Draws(np.arange(_NOISE), seed=0, epoch=0, position="noise").uniform(1)[0]
        values = torch.special.ndtri(torch.from_numpy(uniform)).float()
    return values.to(dtype).to(device)
