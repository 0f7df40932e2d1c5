"""RandomErasing and Cutout: a box of each image is painted over."""

import functools
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

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
from memload.transforms.boxes import NUMBERS_OF_A_BOX, each_box, edges_of, random_boxes
from memload.transforms.draws import Draws, numbers_at
from memload.transforms.following import TensorsByName
from memload.transforms.fused import Fusion, PlannedSteps
from memload.transforms.geometry import HAS_TRITON
from memload.transforms.transform import Transform
from memload.upload import Parameters

#: p and recount have a number each after those of the first box.
_NUMBER_OF_P, _NUMBER_OF_RECOUNT = NUMBERS_OF_A_BOX, NUMBERS_OF_A_BOX + 1
_LARGEST_RECOUNT = 100
#: Noise takes the numbers of the draws from here on; those before belong to boxes.
_FIRST_NOISE_NUMBER = 1 << 20


class PaintingPlan(NamedTuple):
    """Boxes of samples, and what they are painted with: a colour or, if that is None, noise."""

    boxes: Parameters  #: their edges, int32 ``(N, number, 4)``; see `boxes.edges_of`
    colour_bytes: Parameters | None  #: a value of the images' dtype for each channel
    streams: Parameters  #: those of the samples' random numbers, int64 ``(N,)``


class PaintingTransform(Transform):
    """The base of transforms that paint over boxes of images.

    Subclasses define `boxes` and `colour`.
    """

    fuses_as: Fusion = "painting"

    def boxes(self, draws: Draws, height: int, width: int) -> np.ndarray:
        """Return the edges of boxes, int32 ``(N, number, 4)``. Some may be empty."""
        raise NotImplementedError

    def colour(self, images: Tensor) -> tuple[float, ...] | None:
        """Return a value for each channel, or None for noise.

        Only the shape ``(any, C, H, W)`` and the dtype of ``images`` matter. Raises ValueError if
        images like these cannot be painted so.
        """
        raise NotImplementedError

    def check(self, images: Tensor) -> None:
        """Raise ValueError for images that cannot be painted, whatever is drawn."""
        self.colour(images)

    def planned(self, position: int) -> PlannedSteps:
        """See `Transform.planned`."""
        return PlannedPainting([(position, self)])


class PlannedPainting(PlannedSteps):
    """A step that paints over boxes, planned by itself."""

    def plan(
        self,
        images: Tensor,
        count: int,
        draws: Callable[[int], Draws],
        memory_format: torch.memory_format,
    ) -> PaintingPlan:
        """See `PlannedSteps.plan`."""
        ((position, step),) = self.steps
        draws_of_step, colour = draws(position), step.colour(images)
        boxes = step.boxes(draws_of_step, *images.shape[2:])
        colour_bytes = None
        if colour is not None:
            values = torch.tensor(colour, dtype=torch.float64, device="cpu").to(images.dtype)
            colour_bytes = Parameters(values.view(torch.uint8).numpy())
        return PaintingPlan(Parameters(boxes), colour_bytes, Parameters(draws_of_step.streams))

    def run(
        self, images: Tensor, columns: TensorsByName, plan: PaintingPlan, first_in_plan: int
    ) -> tuple[Tensor, TensorsByName]:
        """See `PlannedSteps.run`."""
        if plan.colour_bytes is None:
            return _add_noise(images, plan.boxes, plan.streams, first_in_plan), columns
        return _paint(images, plan.boxes, plan.colour_bytes, first_in_plan), columns


class RandomErasing(PaintingTransform):
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

    def colour(self, images: Tensor) -> tuple[float, ...] | None:
        """See `PaintingTransform.colour`."""
        if self.value != "random":
            return per_channel(self, "value", self.value, images.shape[1], images.dtype)
        if not images.is_floating_point():
            advice = "Put it after Normalize."
            raise wrong(self, "images", "floating for value='random'", images.dtype, advice)
        return None

    def boxes(self, draws: Draws, height: int, width: int) -> np.ndarray:
        """See `PaintingTransform.boxes`."""
        lowest, highest = self.recount
        chosen = draws.uniform(1, _NUMBER_OF_P)[0] < self.p
        uniform = draws.uniform(1, _NUMBER_OF_RECOUNT)[0]
        counts = lowest + (uniform * (highest - lowest + 1)).astype(np.int64)
        edges = np.zeros((len(chosen), highest, 4), np.int32)
        for number in range(highest):
            erased = np.flatnonzero(chosen & (number < counts))
            # The width comes first, since the ratio of a box is its second axis over its first.
            start, length, fits = random_boxes(
                draws.at(erased), (width, height), self.scale, self.ratio, 0, parts=counts[erased],
                first=number and _NUMBER_OF_RECOUNT + 1 + (number - 1) * NUMBERS_OF_A_BOX,
            )  # fmt: skip
            edges[erased, number] = edges_of(start[::-1], (start + length * fits)[::-1])
        return edges


class Cutout(PaintingTransform):
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
        """See `PaintingTransform.colour`."""
        return per_channel(self, "fill", self.fill, images.shape[1], images.dtype)

    def boxes(self, draws: Draws, height: int, width: int) -> np.ndarray:
        """See `PaintingTransform.boxes`."""
        uniform = draws.uniform(3)
        size, extents = np.array([self.size, (height, width)])[:, :, np.newaxis]
        start = (uniform[:2] * extents).astype(np.int64) - size // 2
        end = start + np.where(uniform[2] < self.p, size, 0)
        return edges_of(start.clip(0, extents), end.clip(0, extents))[:, np.newaxis]


def _paint(
    images: Tensor, boxes: Parameters, colour_bytes: Parameters, first_in_plan: int
) -> Tensor:
    """Return images whose boxes have a colour. They are a plan's samples from ``first_in_plan``.

    For the other arguments see `PaintingPlan`.
    """
    colour = colour_bytes.on(images.device).view(images.dtype)
    if images.is_cuda and HAS_TRITON:
        from memload.transforms import painting_kernel

        return painting_kernel.paint(images, boxes, first_in_plan, colour)
    painted, colour = images.clone(), colour[:, None, None]
    # With one operation for all boxes, 64 images of 224×224 take 54 ms on the CPU instead of 11.
    for index, rows, columns in each_box(boxes.array[first_in_plan : first_in_plan + len(images)]):
        painted[index, :, rows, columns] = colour
    return painted


def _add_noise(
    images: Tensor, boxes: Parameters, streams: Parameters, first_in_plan: int
) -> Tensor:
    """Return images whose boxes are normal noise. For the arguments see `_paint`.

    The noise depends on the sample and the pixel alone, so overlapping boxes agree.
    """
    if images.is_cuda and HAS_TRITON:
        from memload.transforms import painting_kernel

        quantiles = _normal_quantiles(images.dtype, images.device)
        return painting_kernel.paint(
            images, boxes, first_in_plan, quantiles, streams, _FIRST_NOISE_NUMBER
        )
    noisy, (_, channels, height, width) = images.clone(), images.shape
    in_order = np.arange(height * width * channels).reshape(height, width, channels)
    numbers = _FIRST_NOISE_NUMBER + in_order.transpose(2, 0, 1)
    quantiles = _normal_quantiles(images.dtype, torch.device("cpu"))
    samples = slice(first_in_plan, first_in_plan + len(images))
    own_streams = streams.array[samples]
    for index, rows, columns in each_box(boxes.array[samples]):
        bits = numbers_at(own_streams[index : index + 1], numbers[:, rows, columns])
        noisy[index, :, rows, columns] = quantiles[torch.from_numpy(bits)].to(images.device)
    return noisy


@functools.cache
def _normal_quantiles(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return 2¹⁶ quantiles of the normal distribution, with the precision of float32 at most.

    They are a table, since devices differ in their mathematical functions.
    """
    probabilities = (torch.arange(1 << 16, dtype=torch.float64, device="cpu") + 0.5) / (1 << 16)
    quantiles: Tensor = torch.special.ndtri(probabilities)
    return quantiles.float().to(dtype).to(device)
