"""RandomErasing and Cutout: a box of each image is painted over."""

import functools
from collections.abc import Sequence
from typing import Literal

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
from memload.transforms.boxes import NUMBERS_OF_A_BOX, each_box, random_boxes
from memload.transforms.draws import Draws, numbers_at
from memload.transforms.following import TensorsByName
from memload.transforms.geometry import HAS_TRITON
from memload.transforms.transform import Transform

#: p and recount have a number each after those of the first box.
_NUMBER_OF_P, _NUMBER_OF_RECOUNT = NUMBERS_OF_A_BOX, NUMBERS_OF_A_BOX + 1
_LARGEST_RECOUNT = 100
#: Noise takes the numbers of the draws from here on; those before belong to boxes.
_FIRST_NOISE_NUMBER = 1 << 20


class RandomErasing(Transform):
    """Paint over a random box of each image with share ``p``, like torchvision's.

    The area of the box is uniform between ``scale[0]`` and ``scale[1]`` times that of the image,
    and the logarithm of height / width is uniform over ``ratio``. If ten attempts do not fit,
    nothing is erased. ``value`` is one number or one for each channel, in the units of the images
    (for uint8, fractions are cut off), or ``"random"``: then pixels are normally distributed, and
    images must be floats, so put it after Normalize. Images ``(N, C, H, W)`` keep their shape and
    dtype. Masks stay as they are. (Zhong et al., https://arxiv.org/abs/1708.04896)

    ``recount`` is how many boxes an image has that is erased: a number or, to draw it for each
    image, (lowest, highest). If there are n, each area is drawn as above and divided by n. Boxes
    may overlap. That is not torchvision's but timm's, whose ``--recount 3`` is ``recount=(1, 3)``.

    >>> images = RandomErasing(p=0.25, value="random")(images, samples=samples)
    """

    def __init__(
        self,
        p: float = 0.5,
        scale: Sequence[float] = (0.02, 0.33),
        ratio: Sequence[float] = (0.3, 3.3),
        value: float | Sequence[float] | Literal["random"] = 0,
        inplace: bool = False,
        recount: int | Sequence[int] = 1,
    ) -> None:
        not_inplace(self, inplace)
        self.p = share(self, "p", p)
        self.scale = interval(self, "scale", scale, 0, 1)
        self.ratio = interval(self, "ratio", ratio, 1e-6)
        ends = tuple(recount) if isinstance(recount, Sequence) else (recount, recount)
        are_integers = all(isinstance(end, int | np.integer) for end in ends)
        if len(ends) != 2 or not are_integers or not 1 <= ends[0] <= ends[1] <= _LARGEST_RECOUNT:
            expected = f"an integer from 1 to {_LARGEST_RECOUNT}, or (lowest, highest) of these"
            raise wrong(self, "recount", expected, repr(recount))
        self.recount = (int(ends[0]), int(ends[1]))
        is_random = isinstance(value, str) and value == "random"
        self.value = value if is_random else numbers(self, "value", value)

    def apply(
        self, images: Tensor, columns: TensorsByName, draws: Draws
    ) -> tuple[Tensor, TensorsByName]:
        """Erase boxes of the drawn samples."""
        boxes = self._boxes(images.shape[-2], images.shape[-1], draws)
        if self.value != "random":
            value = per_channel(self, "value", self.value, images.shape[1], images.dtype)
            return _paint(images, boxes, value), columns
        if not images.is_floating_point():
            advice = "Put it after Normalize."
            raise wrong(self, "images", "floating for value='random'", images.dtype, advice)
        return _add_noise(images, boxes, draws), columns

    def _boxes(self, height: int, width: int, draws: Draws) -> np.ndarray:
        """Return top, left, height and width, int64 ``(4, number, N)``. Some heights are 0."""
        lowest, highest = self.recount
        chosen = draws.uniform(1, _NUMBER_OF_P)[0] < self.p
        drawn = draws.uniform(1, _NUMBER_OF_RECOUNT)[0]
        counts = lowest + (drawn * (highest - lowest + 1)).astype(np.int64)
        boxes = []
        for number in range(highest):
            # The width comes first, since the ratio of a box is its second axis over its first.
            start, length, fits = random_boxes(
                draws, (width, height), self.scale, self.ratio, 0, parts=counts,
                first=number and _NUMBER_OF_RECOUNT + 1 + (number - 1) * NUMBERS_OF_A_BOX,
            )  # fmt: skip
            erased = fits & chosen & (number < counts)
            boxes.append([start[1], start[0], np.where(erased, length[1], 0), length[0]])
        return np.moveaxis(np.array(boxes), 0, 1)


class Cutout(Transform):
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

    def apply(
        self, images: Tensor, columns: TensorsByName, draws: Draws
    ) -> tuple[Tensor, TensorsByName]:
        """Cut a box out of the drawn samples."""
        drawn = draws.uniform(3)
        height, width = images.shape[-2:]
        top = (drawn[0] * height).astype(np.int64) - self.size[0] // 2
        left = (drawn[1] * width).astype(np.int64) - self.size[1] // 2
        heights = np.where(drawn[2] < self.p, self.size[0], 0)
        boxes = np.array([top, left, heights, np.full_like(left, self.size[1])])[:, np.newaxis]
        fill = per_channel(self, "fill", self.fill, images.shape[1], images.dtype)
        return _paint(images, boxes, fill), columns


def _paint(images: Tensor, boxes: np.ndarray, value: tuple[float, ...]) -> Tensor:
    """Return images whose boxes ``(4, number, N)`` have a value for each channel."""
    colour = torch.tensor(value, dtype=torch.float64).to(images.dtype)
    if images.is_cuda and HAS_TRITON:
        from memload.transforms import painting_kernel

        return painting_kernel.paint(images, boxes, colour)
    painted, colour = images.clone(), colour.to(images.device)[:, None, None]
    # With one operation for all boxes, 64 images of 224×224 take 54 ms on the CPU instead of 11.
    for index, rows, columns in each_box(boxes):
        painted[index, :, rows, columns] = colour
    return painted


def _add_noise(images: Tensor, boxes: np.ndarray, draws: Draws) -> Tensor:
    """Return images whose boxes ``(4, number, N)`` are normal noise.

    It depends on the sample and the pixel alone, so overlapping boxes agree.
    """
    if images.is_cuda and HAS_TRITON:
        from memload.transforms import painting_kernel

        quantiles = _normal_quantiles(images.dtype, images.device)
        return painting_kernel.paint_noise(
            images, boxes, draws.streams, _FIRST_NOISE_NUMBER, quantiles
        )
    noisy, (_, channels, height, width) = images.clone(), images.shape
    in_order = np.arange(height * width * channels).reshape(height, width, channels)
    numbers = _FIRST_NOISE_NUMBER + in_order.transpose(2, 0, 1)
    quantiles = _normal_quantiles(images.dtype, torch.device("cpu"))
    for index, rows, columns in each_box(boxes):
        drawn = numbers_at(draws.streams[index : index + 1], numbers[:, rows, columns])
        noisy[index, :, rows, columns] = quantiles[torch.from_numpy(drawn)].to(images.device)
    return noisy


@functools.cache
def _normal_quantiles(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return 2¹⁶ quantiles of the normal distribution, with the precision of float32 at most.

    They are a table, since devices differ in their mathematical functions.
    """
    probabilities = (torch.arange(1 << 16, dtype=torch.float64) + 0.5) / (1 << 16)
    quantiles: Tensor = torch.special.ndtri(probabilities)
    return quantiles.float().to(dtype).to(device)
