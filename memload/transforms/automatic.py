"""TrivialAugmentWide, RandAugment and AutoAugment: operations drawn for each sample.

draws ─▶ draw ─▶ Drawn: an operation and a ─▶ change_each: the samples of each operation are put
                 magnitude for each sample    side by side, changed by one call, and put back
"""

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memload.transforms import policies
from memload.transforms.arguments import (
    integer,
    interpolation_name,
    numbers,
    per_channel,
    share,
    wrong,
)
from memload.transforms.color import adjust_brightness, adjust_contrast, adjust_saturation
from memload.transforms.draws import Draws
from memload.transforms.filtering import sharpen
from memload.transforms.following import Movement
from memload.transforms.fused import TensorsByName
from memload.transforms.lookup import autocontrast, equalize, invert, posterize, solarize
from memload.transforms.policies import NUM_COMMON, NUMBERS, OPERATIONS, USUAL, WIDE, Drawn
from memload.transforms.some import take_some
from memload.transforms.transform import Transform
from memload.transforms.warping import Fill, Interpolation, Warping, affine_matrices, warp
from memload.upload import upload

#: Which operations move pixels, and the number that all of these have as a group.
_MOVES, _MOVING = np.array([name in OPERATIONS[1:6] for name in OPERATIONS]), -1


class Automatic(Transform):
    """The base of transforms that draw operations for each sample.

    Subclasses define `draw`.
    """

    #: Whether images may be posterized, which floats cannot be.
    _posterizes = True

    def __init__(self, interpolation: Any, fill: Fill) -> None:
        self.interpolation: Interpolation = interpolation_name(
            self, interpolation, "nearest", "bilinear"
        )
        self.fill = None if fill is None else numbers(self, "fill", fill)

    @property
    def moves_pixels(self) -> bool:
        """See `Transform.moves_pixels`."""
        return True

    def draw(self, draws: Draws, height: int, width: int) -> list[Drawn]:
        """Return what is done to images of this size, one operation after another."""
        raise NotImplementedError

    def movement(self, images: Tensor, draws: Draws) -> Movement:
        """Return how images ``(N, C, H, W)`` move. `Prepared` has masks and such follow."""
        count, _, height, width = images.shape
        return _Moves(self.draw(draws, height, width), count, height, width)

    def apply(
        self, images: Tensor, columns: TensorsByName, draws: Draws
    ) -> tuple[Tensor, TensorsByName]:
        """Do what was drawn for each sample. The columns were moved before."""
        channels, height, width = images.shape[1:]
        if channels not in (1, 3):
            raise wrong(self, "images", "of 1 or 3 channels", f"of {channels}")
        if images.dtype != torch.uint8 and self._posterizes:
            expected = "uint8, as some are posterized"
            advice = "Put it before ToDtype and Normalize."
            raise wrong(self, "images", expected, images.dtype, advice)
        fill = self.fill
        if fill is not None:
            fill = per_channel(self, "fill", fill, channels, images.dtype)
        steps = self.draw(draws, height, width)
        return change_each(images, steps, self.interpolation, fill), columns


class TrivialAugmentWide(Automatic):
    """Do one operation of 14 to each image, with any magnitude, like torchvision's.

    Operation, magnitude and sign are drawn for each sample: nothing, shears of up to 0.99, shifts
    of up to 32 pixels, rotations of up to 135°, brightness, color, contrast and sharpness by a
    factor between 0.01 and 1.99, posterize to 2 to 8 bits, solarize, autocontrast and equalize.
    Magnitudes are those of ``num_magnitude_bins`` equal steps.

    ``interpolation`` is "nearest" or "bilinear". What comes into view is ``fill``, one number or
    one for each channel, or None for black. Images ``(N, C, H, W)`` are uint8 and have 1 or 3
    channels. Results are those of torchvision's operations on tensors. Masks, points and boxes
    follow shears, shifts and rotations, as in a `Compose`. (Müller and Hutter, https://arxiv.org/abs/2103.10158)

    >>> images = TrivialAugmentWide()(images, samples=samples)
    """

    def __init__(
        self, num_magnitude_bins: int = 31, interpolation: Any = "nearest", fill: Fill = None
    ) -> None:
        super().__init__(interpolation, fill)
        self.num_magnitude_bins = integer(self, "num_magnitude_bins", num_magnitude_bins, 2)

    def draw(self, draws: Draws, height: int, width: int) -> list[Drawn]:
        """See `Automatic.draw`. Draws 0 to 2 are the operation, the bin and the sign."""
        bins, drawn = self.num_magnitude_bins, draws.uniform(3)
        operation, number = _below(NUM_COMMON, drawn[0]), _below(bins, drawn[1])
        magnitudes = policies.magnitudes(WIDE, bins, height, width)
        return [_with_sign(operation, magnitudes[operation, number], drawn[2])]


class RandAugment(Automatic):
    """Do ``num_ops`` operations of 14 to each image, with one magnitude, like torchvision's.

    Operations and signs are drawn for each sample; one operation may be drawn again. They are those
    of `TrivialAugmentWide`, up to smaller magnitudes: shears of up to 0.3, shifts of up to 45 % of
    the image, rotations of up to 30°, factors from 0.1 to 1.9, and 4 to 8 bits. ``magnitude`` is
    the step among ``num_magnitude_bins``, of which 0 changes nothing. For the other arguments,
    images and masks see `TrivialAugmentWide`. (Cubuk et al., https://arxiv.org/abs/1909.13719)

    >>> images = RandAugment(num_ops=2, magnitude=9)(images, samples=samples)
    """

    def __init__(
        self,
        num_ops: int = 2,
        magnitude: int = 9,
        num_magnitude_bins: int = 31,
        interpolation: Any = "nearest",
        fill: Fill = None,
    ) -> None:
        super().__init__(interpolation, fill)
        self.num_ops = integer(self, "num_ops", num_ops, 0)
        self.num_magnitude_bins = integer(self, "num_magnitude_bins", num_magnitude_bins, 2)
        self.magnitude = integer(self, "magnitude", magnitude, 0)
        if self.magnitude >= self.num_magnitude_bins:
            expected = f"below num_magnitude_bins, {self.num_magnitude_bins}"
            raise wrong(self, "magnitude", expected, self.magnitude)

    def draw(self, draws: Draws, height: int, width: int) -> list[Drawn]:
        """See `Automatic.draw`. Each operation takes two draws: which one, and the sign."""
        magnitudes = policies.magnitudes(USUAL, self.num_magnitude_bins, height, width)
        result = []
        for step in range(self.num_ops):
            drawn = draws.uniform(2, first=2 * step)
            operation = _below(NUM_COMMON, drawn[0])
            result.append(_with_sign(operation, magnitudes[operation, self.magnitude], drawn[1]))
        return result


class AutoAugment(Automatic):
    """Do one of 25 pairs of operations to each image, like torchvision's.

    ``policy`` is "imagenet", "cifar10", "svhn", or torchvision's ``AutoAugmentPolicy``: the data
    set for which the pairs were found. Which pair, whether each of its operations is done, and
    signs are drawn for each sample. "svhn" takes floats from 0 to 1, too. For the other arguments,
    images and masks see `TrivialAugmentWide`. (Cubuk et al., https://arxiv.org/abs/1805.09501)

    >>> images = AutoAugment("cifar10")(images, samples=samples)
    """

    def __init__(
        self, policy: Any = "imagenet", interpolation: Any = "nearest", fill: Fill = None
    ) -> None:
        super().__init__(interpolation, fill)
        self.policy = getattr(policy, "value", policy)
        if self.policy not in policies.POLICIES:
            expected = f"one of {', '.join(map(repr, policies.POLICIES))}"
            raise wrong(self, "policy", expected, repr(policy))
        used = policies.policy(self.policy).operation
        self._posterizes = bool((used == NUMBERS["Posterize"]).any())

    def draw(self, draws: Draws, height: int, width: int) -> list[Drawn]:
        """See `Automatic.draw`.

        Draw 0 is the pair. Each operation takes two more: whether it is done, and the sign.
        """
        policy = policies.policy(self.policy)
        magnitudes = policies.magnitudes(USUAL, 10, height, width)
        drawn, result = draws.uniform(5), []
        pair = _below(len(policy.operation), drawn[0])
        for step in range(2):
            done, sign = drawn[1 + 2 * step : 3 + 2 * step]
            operation = np.where(done < policy.share[pair, step], policy.operation[pair, step], 0)
            magnitude = magnitudes[operation, policy.bin[pair, step]]
            result.append(_with_sign(operation, magnitude, sign))
        return result


class TimmRandAugment(Automatic):
    """Do ``num_ops`` operations of 15 to each image, each with share ``p``, as timm does.

    The defaults are timm's "rand-m9-mstd0.5-inc1". A magnitude is drawn for each operation and
    sample from a normal distribution around ``magnitude`` with deviation ``mstd``, within 0 to 10;
    with ``mstd=math.inf``, uniformly from 0 to ``magnitude``. Operations are those of
    `RandAugment`, and invert and solarize-add, but not the one that does nothing. By the magnitude
    10 they are shears of 0.3, shifts of 45 % of the image, rotations of 30°, factors of 0.1 or 1.9,
    4 bits lost of the last 4, solarize from 0 and 110 levels added below 128. With
    ``increasing=False`` (timm without "inc1"), factors go from 0.1 to 1.9, bits from 0 to 4, and
    the threshold from 0 to 256.

    Ranges and shares are timm's, but pixels are not equal to its: it calls Pillow, whose operations
    differ from torchvision's by a level and at edges, and interpolates some images with bicubic
    kernels. timm's ``fill`` is the mean of the data set, (124, 116, 104) for ImageNet; None is
    black. Images ``(N, C, H, W)`` must be uint8. For the rest see `TrivialAugmentWide`.

    >>> images = TimmRandAugment(magnitude=9, mstd=0.5)(images, samples=samples)
    """

    def __init__(
        self,
        num_ops: int = 2,
        magnitude: float = 9,
        mstd: float = 0.5,
        increasing: bool = True,
        p: float = 0.5,
        interpolation: Any = "bilinear",
        fill: Fill = 128,
    ) -> None:
        super().__init__(interpolation, fill)
        self.num_ops = integer(self, "num_ops", num_ops, 0)
        if not isinstance(magnitude, Real) or not 0 <= magnitude <= 10:
            raise wrong(self, "magnitude", "a number from 0 to 10", repr(magnitude))
        if not isinstance(mstd, Real) or not mstd >= 0:
            raise wrong(self, "mstd", "a number of at least 0, or math.inf", repr(mstd))
        self.magnitude: float = float(magnitude)
        self.mstd: float = float(mstd)
        self.increasing: bool = bool(increasing)
        self.p: float = share(self, "p", p)

    def draw(self, draws: Draws, height: int, width: int) -> list[Drawn]:
        """See `Automatic.draw`.

        Each operation takes four draws: which one, whether it is done, magnitude and sign.
        """
        result = []
        for step in range(self.num_ops):
            drawn = draws.uniform(4, first=4 * step)
            operation = 1 + _below(len(OPERATIONS) - 1, drawn[0])
            operation = np.where(drawn[1] < self.p, operation, NUMBERS["Identity"])
            if self.mstd == math.inf:
                level = self.magnitude * drawn[2]
            elif self.mstd:
                deviation = torch.special.ndtri(torch.from_numpy(drawn[2])).numpy()
                level = np.clip(self.magnitude + self.mstd * deviation, 0, 10)
            else:
                level = np.full(len(operation), self.magnitude)
            sign = np.where(drawn[3] < 0.5, -1, 1)
            size = height, width
            result.append(policies.timm_magnitudes(operation, level, sign, self.increasing, size))
        return result


def _below(count: int, drawn: np.ndarray) -> np.ndarray:
    """Return integers from 0 to ``count - 1``, from random numbers from 0 to 1."""
    return (drawn * count).astype(np.int64)


def _with_sign(operation: np.ndarray, magnitude: np.ndarray, drawn: np.ndarray) -> Drawn:
    """Return what was drawn; half of the magnitudes that have a sign are negative."""
    is_negative = policies.HAS_SIGN[operation] & (drawn < 0.5)
    return Drawn(operation, np.where(is_negative, -magnitude, magnitude))


def change_each(
    images: Tensor, steps: Sequence[Drawn], interpolation: Interpolation, fill: Fill
) -> Tensor:
    """Return images in new memory, each changed by what was drawn for it, one step after another.

    ``fill`` is as for `warp`.
    """
    changed, places = images, np.arange(len(images))  # where each sample is among the changed
    for drawn in steps:
        # What moves pixels has one matrix an image, so all of it is one group.
        groups = np.where(_MOVES[drawn.operation], _MOVING, drawn.operation)
        order = groups.argsort(kind="stable")
        changed, places = take_some(changed, places[order]), order.argsort()
        numbers, starts, counts = np.unique(groups[order], return_index=True, return_counts=True)
        for number, start, end in zip(numbers, starts, starts + counts, strict=True):
            of_group = Drawn(drawn.operation[order[start:end]], drawn.magnitude[order[start:end]])
            if number == _MOVING:
                matrices = _matrices(of_group, *images.shape[2:])
                changed[start:end] = warp(changed[start:end], matrices, interpolation, fill)
            elif number != NUMBERS["Identity"]:
                change = _CHANGES[OPERATIONS[number]]
                changed[start:end] = change(changed[start:end], of_group.magnitude)
    return take_some(changed, places)


def _matrices(drawn: Drawn, height: int, width: int) -> np.ndarray:
    """Return the matrices for `warp` of shears, translations and rotations."""
    operation, magnitude = drawn
    shear_x, shear_y, shift_x, shift_y, angle = np.where(
        operation == np.arange(1, 6)[:, np.newaxis], magnitude, 0
    )
    arguments = (
        -(angle % 360),  # clockwise, and as torchvision rounds it
        np.stack([shift_x, shift_y], 1),
        np.ones(len(operation)),
        np.degrees(np.arctan(np.stack([shear_x, shear_y], 1))),
    )
    centred = affine_matrices(height, width, *arguments)
    # Shears leave the upper left corner where it is, and rotations the centre.
    from_corner = affine_matrices(height, width, *arguments, center=(0.0, 0.0))
    return np.where((operation < NUMBERS["TranslateX"])[:, np.newaxis], from_corner, centred)


class _Moves:
    """How images move by what was drawn for them: a `following.Movement`."""

    def __init__(self, steps: Sequence[Drawn], count: int, height: int, width: int) -> None:
        size = count, height, width
        self._steps = []
        whole = np.tile(np.eye(3), (count, 1, 1))
        for drawn in steps:
            matrices = _matrices(drawn, height, width)
            places = np.flatnonzero(_MOVES[drawn.operation])
            self._steps.append(Warping(*size, places, matrices[places]))
            # Matrices map the output to the input, so the last step comes first.
            whole[:, :2] = whole[:, :2] @ _squares(matrices)
        self._whole = Warping(*size, np.arange(count), whole[:, :2].reshape(count, 6))

    def points(self, points: Tensor) -> Tensor:
        """See `following.Movement`."""
        return self._whole.points(points)

    def masks(self, masks: Tensor, fill: int) -> Tensor:
        """See `following.Movement`. What leaves the image in between does not come back."""
        moved = masks
        for step in self._steps:
            moved = step.masks(moved, fill)
        return masks.clone() if moved is masks else moved

    def boxes(self, boxes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `following.Movement`."""
        return self._whole.boxes(boxes)


def _squares(matrices: np.ndarray) -> np.ndarray:
    """Return affine maps ``(n, 6)`` as matrices ``(n, 3, 3)``."""
    last_rows = np.tile([[0.0, 0.0, 1.0]], (len(matrices), 1, 1))
    return np.concatenate([matrices.reshape(-1, 2, 3), last_rows], 1)


def _solarize_add(images: Tensor, added: np.ndarray) -> Tensor:
    """Return uint8 images whose values below 128 have grown by ``added``, which is at most 127."""
    levels = upload(added.astype(np.uint8), images.device)[:, None, None, None]
    return torch.where(images < 128, images + levels, images)


def _white(images: Tensor) -> int:
    return 255 if images.dtype == torch.uint8 else 1


#: Functions of images and magnitudes by the operation, where it changes values.
_CHANGES: dict[str, Callable[[Tensor, np.ndarray], Tensor]] = {
    "Brightness": lambda images, magnitude: adjust_brightness(images, 1 + magnitude),
    "Color": lambda images, magnitude: adjust_saturation(images, 1 + magnitude),
    "Contrast": lambda images, magnitude: adjust_contrast(images, 1 + magnitude),
    "Sharpness": lambda images, magnitude: sharpen(images, 1 + magnitude),
    "Posterize": lambda images, magnitude: posterize(images, magnitude.astype(np.int64)),
    "Solarize": lambda images, magnitude: solarize(images, magnitude * _white(images)),
    "AutoContrast": lambda images, magnitude: autocontrast(images),
    "Equalize": lambda images, magnitude: equalize(images),
    "Invert": lambda images, magnitude: invert(images),
    "SolarizeAdd": _solarize_add,
}
