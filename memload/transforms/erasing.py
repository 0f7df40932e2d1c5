"""RandomErasing and Cutout: a box of each image is painted over."""

import functools
from collections.abc import Iterator, Sequence
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
from memload.transforms.boxes import NUMBERS_OF_A_BOX, random_boxes
from memload.transforms.draws import Draws, numbers_at
from memload.transforms.following import TensorsByName
from memload.transforms.transform import Transform
from memload.upload import upload

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
        noise = _noise_each if images.device.type == "cpu" else _noise_all
        return noise(images, boxes, draws), columns

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


def inside(images: Tensor, boxes: np.ndarray) -> Tensor:
    """Return which pixels are in the box of their sample, bool ``(N, 1, H, W)``.

    ``boxes`` ``(4, N)`` are top, left, height and width in pixels. They may reach beyond the image.
    """
    top, left, height, width = boxes
    edges = upload(np.array([top, top + height, left, left + width]), images.device)
    first_row, end_row, first_column, end_column = edges[..., None]
    rows, columns = (torch.arange(extent, device=images.device) for extent in images.shape[-2:])
    in_rows = (rows >= first_row) & (rows < end_row)
    in_columns = (columns >= first_column) & (columns < end_column)
    in_both: Tensor = in_rows[:, :, None] & in_columns[:, None, :]
    return in_both[:, None]


def _paint(images: Tensor, boxes: np.ndarray, value: tuple[float, ...]) -> Tensor:
    """Return images whose boxes ``(4, number, N)`` have a value for each channel."""
    colour = upload(np.array(value), images.device).to(images.dtype)[:, None, None]
    paint = _paint_each if images.device.type == "cpu" else _paint_all
    return paint(images, boxes, colour)


def _paint_each(images: Tensor, boxes: np.ndarray, colour: Tensor) -> Tensor:
    """Paint one box after another. On the CPU, 64 images of 224×224 take 11 ms instead of 54."""
    painted = images.clone()
    for index, rows, columns in _each(boxes):
        painted[index, :, rows, columns] = colour
    return painted


def _each(boxes: np.ndarray) -> Iterator[tuple[int, slice, slice]]:
    """Yield the sample, rows and columns of each of the boxes ``(4, number, N)``."""
    number, sample = np.nonzero(boxes[2])
    starts, lengths = boxes[:2, number, sample], boxes[2:, number, sample]
    edges = *starts.clip(0).tolist(), *(starts + lengths).clip(0).tolist()
    for index, top, left, bottom, right in zip(sample.tolist(), *edges, strict=True):
        yield index, slice(top, bottom), slice(left, right)


def _paint_all(images: Tensor, boxes: np.ndarray, colour: Tensor) -> Tensor:
    """Paint all boxes at once."""
    insides = (inside(images, boxes_of_number) for boxes_of_number in boxes.transpose(1, 0, 2))
    return torch.where(functools.reduce(torch.logical_or, insides), colour, images)


def _noise_each(images: Tensor, boxes: np.ndarray, draws: Draws) -> Tensor:
    """Return what `_noise_all` does, one box after another: on the CPU 78 ms instead of 109."""
    noisy, (_, channels, height, width) = images.clone(), images.shape
    in_order = np.arange(height * width * channels).reshape(height, width, channels)
    numbers = _FIRST_NOISE_NUMBER + in_order.transpose(2, 0, 1)
    quantiles = _normal_quantiles(images.device)
    for index, rows, columns in _each(boxes):
        drawn = numbers_at(draws.streams[index : index + 1], numbers[:, rows, columns])
        noisy[index, :, rows, columns] = quantiles[torch.from_numpy(drawn)].to(images.dtype)
    return noisy


def _noise_all(images: Tensor, boxes: np.ndarray, draws: Draws) -> Tensor:
    """Return images whose boxes ``(4, number, N)`` are normal noise.

    It depends on the sample and the pixel alone, so overlapping boxes agree.
    """
    device, (count, channels, _, width) = images.device, images.shape
    top, left, height, box_width = boxes.reshape(4, -1)
    areas = height * box_width
    # One row for each pixel of all boxes: its box, and its index within the box.
    box = np.repeat(np.arange(len(areas)), areas)
    within = np.arange(areas.sum()) - np.repeat(np.cumsum(areas) - areas, areas)
    rows, columns = np.divmod(within, box_width[box])
    pixels = np.array([box % max(1, count), top[box] + rows, left[box] + columns])
    sample, y, x = upload(pixels, device)
    pixel_number = (y * width + x)[:, None] * channels + torch.arange(channels, device=device)
    streams = upload(draws.streams, device)[sample][:, None]
    drawn = numbers_at(streams, pixel_number + _FIRST_NOISE_NUMBER)
    noisy = images.clone()
    noisy[sample, :, y, x] = _normal_quantiles(device)[drawn].to(images.dtype)
    return noisy


@functools.cache
def _normal_quantiles(device: torch.device) -> Tensor:
    """Return 2¹⁶ quantiles of the normal distribution, float32.

    They are a table, since devices differ in their mathematical functions.
    """
    probabilities = (torch.arange(1 << 16, dtype=torch.float64) + 0.5) / (1 << 16)
    quantiles: Tensor = torch.special.ndtri(probabilities)
    return quantiles.float().to(device)
