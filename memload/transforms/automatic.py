"""TrivialAugmentWide, RandAugment, AutoAugment and TimmRandAugment: many operations to draw."""

import math
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memload.transforms import policies
from memload.transforms.arguments import (
    integer,
    is_finite,
    one_or_three_channels,
    share,
    wrong,
)
from memload.transforms.draws import Draws
from memload.transforms.operation_step import INDEX_OF, MOVES, Fill, OperationStep
from memload.transforms.operations_pass import WarpingTransform
from memload.transforms.policies import HAS_FACTOR, HAS_SIGN, NARROW, NUM_COMMON, NUM_TIMM, WIDE
from memload.transforms.warping import affine_matrices


class Automatic(WarpingTransform):
    """The base of transforms that draw from many operations."""

    #: Whether images may be posterized. Floats are refused then: normalised ones would be ruined.
    _posterizes = True

    def _check(self, images: Tensor) -> None:
        one_or_three_channels(self, images)
        if images.dtype != torch.uint8 and self._posterizes:
            expected = "uint8, as some are posterized"
            advice = "Put it before ToDtype and Normalize."
            raise wrong(self, "images", expected, images.dtype, advice)
        self.check_fill(images)

    def _step(self, operation: np.ndarray, magnitude: np.ndarray, images: Tensor) -> OperationStep:
        """Return a step for images like these, with where pixels that move come from."""
        moved = np.flatnonzero(MOVES[operation])
        matrices = np.tile(np.eye(3), (len(operation), 1, 1))
        matrices[moved] = _matrices(operation[moved], magnitude[moved], *images.shape[2:])
        return OperationStep(operation, magnitude, matrices, self.interpolation, self.fill)

    def _with_sign(
        self, operation: np.ndarray, magnitude: np.ndarray, uniform: np.ndarray, images: Tensor
    ) -> OperationStep:
        """Return a step; half of the magnitudes that have a sign are negative."""
        is_negative = HAS_SIGN[operation] & (uniform < 0.5)
        signed = np.where(is_negative, -magnitude, magnitude)
        return self._step(operation, np.where(HAS_FACTOR[operation], 1 + signed, signed), images)


class TrivialAugmentWide(Automatic):
    """Do one operation of 14 to each image, with any magnitude, like torchvision's.

    Operation, magnitude and sign are drawn for each sample: nothing, shears of up to 0.99, shifts
    of up to 32 pixels, rotations of up to 135°, brightness, color, contrast and sharpness by a
    factor between 0.01 and 1.99, posterize to 2 to 8 bits, solarize, autocontrast and equalize.
    Magnitudes are those of ``num_magnitude_bins`` equal steps.

    ``interpolation`` is "nearest" or "bilinear". What comes into view is ``fill``, one number or
    one for each channel, or None for black. Images ``(N, C, H, W)`` are uint8 and have 1 or 3
    channels. Each operation does what torchvision's does with tensors. Colours may differ by one
    level, where torchvision rounds twice. Shears, shifts and rotations take pixels from where it
    takes them, within 1/1000 of a pixel, as in `RandomAffine`. Masks, points and boxes follow
    them, as in a `Compose`. (Müller and Hutter, https://arxiv.org/abs/2103.10158)

    >>> images = TrivialAugmentWide()(images, samples=samples)
    """

    def __init__(
        self, num_magnitude_bins: int = 31, interpolation: Any = "nearest", fill: Fill = None
    ) -> None:
        super().__init__(interpolation, fill)
        self.num_magnitude_bins = integer(self, "num_magnitude_bins", num_magnitude_bins, 2)

    def operation_steps(self, draws: Draws, images: Tensor) -> list[OperationStep]:
        """See `OperationsTransform.operation_steps`.

        Draws 0 to 2 are the operation, the bin and the sign.
        """
        self._check(images)
        bins, uniform = self.num_magnitude_bins, draws.uniform(3)
        operation, number = _below(NUM_COMMON, uniform[0]), _below(bins, uniform[1])
        magnitudes = policies.magnitudes(WIDE, bins, *images.shape[2:])
        return [self._with_sign(operation, magnitudes[operation, number], uniform[2], images)]


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

    def operation_steps(self, draws: Draws, images: Tensor) -> list[OperationStep]:
        """See `OperationsTransform.operation_steps`.

        Each operation takes two draws: which one, and the sign.
        """
        self._check(images)
        magnitudes = policies.magnitudes(NARROW, self.num_magnitude_bins, *images.shape[2:])
        result = []
        for step in range(self.num_ops):
            uniform = draws.uniform(2, first=2 * step)
            operation = _below(NUM_COMMON, uniform[0])
            magnitude = magnitudes[operation, self.magnitude]
            result.append(self._with_sign(operation, magnitude, uniform[1], images))
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
        self._posterizes = bool((used == INDEX_OF["Posterize"]).any())

    def operation_steps(self, draws: Draws, images: Tensor) -> list[OperationStep]:
        """See `OperationsTransform.operation_steps`.

        Draw 0 is the pair. Each operation takes two more: whether it is done, and the sign.
        """
        self._check(images)
        policy = policies.policy(self.policy)
        magnitudes = policies.magnitudes(NARROW, 10, *images.shape[2:])
        uniform, result = draws.uniform(5), []
        pair = _below(len(policy.operation), uniform[0])
        for step in range(2):
            done, sign = uniform[1 + 2 * step : 3 + 2 * step]
            operation = np.where(done < policy.share[pair, step], policy.operation[pair, step], 0)
            magnitude = magnitudes[operation, policy.bin[pair, step]]
            result.append(self._with_sign(operation, magnitude, sign, images))
        return result


class TimmRandAugment(Automatic):
    """Do ``num_ops`` operations of 15 to each image, each with share ``p``, as timm does.

    The defaults are timm's "rand-m9-mstd0.5-inc1". A magnitude is drawn for each operation and
    sample from a normal distribution around ``magnitude`` with deviation ``mstd``; with
    ``mstd=math.inf``, uniformly from 0 to ``magnitude``. Below 0 it becomes 0, and above 10 it
    becomes 10, also where ``magnitude`` is more, as in timm's "rand-m15", which has ``mstd=0``.
    Operations are those of `RandAugment` without the one that does nothing, and in addition invert
    and solarize-add. At magnitude 10, these are shears of 0.3, shifts of 45 % of the image,
    rotations of 30°, factors of 0.1 or 1.9, 4 bits lost of the last 4, solarize from 0 and 110
    levels added below 128. With ``increasing=False`` (timm without "inc1"), factors go from 0.1 to
    1.9, bits from 0 to 4, and the threshold from 0 to 256.

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
        if isinstance(num_ops, str):
            advice = "rand-m9-mstd0.5-inc1 is magnitude=9, mstd=0.5, increasing=True."
            raise wrong(self, "num_ops", "an integer", repr(num_ops), advice)
        self.num_ops = integer(self, "num_ops", num_ops, 0)
        if not is_finite(magnitude) or magnitude < 0:
            raise wrong(self, "magnitude", "a number of at least 0", repr(magnitude))
        if not isinstance(mstd, Real) or not mstd >= 0:
            raise wrong(self, "mstd", "a number of at least 0, or math.inf", repr(mstd))
        self.magnitude: float = float(magnitude)
        self.mstd: float = float(mstd)
        self.increasing: bool = bool(increasing)
        self.p: float = share(self, "p", p)

    def operation_steps(self, draws: Draws, images: Tensor) -> list[OperationStep]:
        """See `OperationsTransform.operation_steps`.

        Each operation takes four draws: which one, whether it is done, magnitude and sign.
        """
        self._check(images)
        result = []
        for step in range(self.num_ops):
            uniform = draws.uniform(4, first=4 * step)
            operation = 1 + _below(NUM_TIMM, uniform[0])
            operation = np.where(uniform[1] < self.p, operation, INDEX_OF["Identity"])
            if self.mstd == math.inf:
                level = self.magnitude * uniform[2]
            elif self.mstd:
                deviation = torch.special.ndtri(torch.from_numpy(uniform[2])).numpy()
                level = self.magnitude + self.mstd * deviation
            else:
                level = np.full(len(operation), self.magnitude)
            sign = np.where(uniform[3] < 0.5, -1, 1)
            operation, magnitude = policies.timm_magnitudes(
                operation, level.clip(0, 10), sign, self.increasing, images.shape[2:]
            )
            result.append(self._step(operation, magnitude, images))
        return result


def _below(count: int, uniform: np.ndarray) -> np.ndarray:
    """Return integers from 0 to ``count - 1``, from random numbers from 0 to 1."""
    return (uniform * count).astype(np.int64)


def _matrices(operation: np.ndarray, magnitude: np.ndarray, height: int, width: int) -> np.ndarray:
    """Return where the pixels of shears, translations and rotations come from; see `warp`."""
    shear_x, shear_y, shift_x, shift_y, angle = np.where(
        operation == np.arange(1, 6)[:, np.newaxis], magnitude, 0
    )
    # Shears leave the upper left corner where it is, and rotations the centre.
    is_shear = (operation < INDEX_OF["TranslateX"])[:, np.newaxis]
    return affine_matrices(
        height,
        width,
        -(angle % 360),  # clockwise, and as torchvision rounds it
        np.stack([shift_x, shift_y], 1),
        np.ones(len(operation)),
        np.degrees(np.arctan(np.stack([shear_x, shear_y], 1))),
        np.where(is_shear, 0.0, [0.5 * width, 0.5 * height]),
    )
