"""Transforms that draw which images get one operation, or how much of a few operations."""

from collections.abc import Sequence
from numbers import Integral, Real

import numpy as np
import torch
from torch import Tensor

from memload.transforms.arguments import (
    integer,
    interval,
    is_finite,
    one_or_three_channels,
    share,
    wrong,
)
from memload.transforms.draws import Draws
from memload.transforms.operation_step import INDEX_OF, OperationStep
from memload.transforms.operations_pass import OperationsTransform

#: For 1 - v to 1 + v the number v, or a range as a pair, or None for no change.
FactorRange = float | Sequence[float] | None
#: The operations of ColorJitter, in the order of its arguments.
_ADJUSTMENTS = "Brightness", "Contrast", "Color", "Hue"


class ColorJitter(OperationsTransform):
    """Adjust brightness, contrast, saturation and hue by random factors, in random order.

    A number ``v`` is the range 1 - v to 1 + v, or -v to v for ``hue``. A pair is the range itself.
    None leaves the property as it is. Each sample has its own factors and its own order. Formulas
    and arguments are those of torchvision's ``ColorJitter``.

    Images ``(N, C, H, W)`` have 1 or 3 channels, and keep their dtype. Floats are from 0 to 1.
    uint8 is rounded down after each adjustment, as in torchvision. Masks stay as they are.

    >>> images = ColorJitter(0.4, 0.4, 0.4, 0.1)(images, samples=samples)
    """

    def __init__(
        self,
        brightness: FactorRange = None,
        contrast: FactorRange = None,
        saturation: FactorRange = None,
        hue: FactorRange = None,
    ) -> None:
        self.brightness = self._range("brightness", brightness)
        self.contrast = self._range("contrast", contrast)
        self.saturation = self._range("saturation", saturation)
        if isinstance(hue, Real):
            hue = (-hue, hue)
        self.hue = None if hue is None else interval(self, "hue", hue, -0.5, 0.5)

    def _range(self, name: str, value: FactorRange) -> tuple[float, float] | None:
        if isinstance(value, Real) and value >= 0:
            value = (max(0, 1 - value), 1 + value)
        return None if value is None else interval(self, name, value, 0)

    def operation_steps(self, draws: Draws, images: Tensor) -> list[OperationStep]:
        """Draws 0 to 3 are the factors, and 4 to 7 sort to each sample's order."""
        one_or_three_channels(self, images)
        ranges = self.brightness, self.contrast, self.saturation, self.hue
        # Grey images have neither saturation nor hue.
        possible = ranges if images.shape[1] == 3 else ranges[:2]
        active = [number for number, factors in enumerate(possible) if factors is not None]
        if not active:
            return []
        low, high = np.array([ranges[number] for number in active]).T[:, :, np.newaxis]
        uniform = draws.uniform(8)
        # float32, as torchvision's factors are
        factors = (low + (high - low) * uniform[active]).astype(np.float32).astype(np.float64)
        operations = np.array([INDEX_OF[_ADJUSTMENTS[number]] for number in active])
        samples = np.arange(factors.shape[1])
        return [
            OperationStep(operations[index], factors[index, samples])
            for index in uniform[4:][active].argsort(0)
        ]


class _OneOperation(OperationsTransform):
    """The base of transforms that do one operation to each image with share ``p``."""

    #: One of `operation_step.OPERATIONS`.
    operation: str

    def __init__(self, p: float = 0.5) -> None:
        self.p = share(self, "p", p)

    def operation_steps(self, draws: Draws, images: Tensor) -> list[OperationStep]:
        """Draw 0 chooses samples."""
        if self.operation in ("Grayscale", "AutoContrast"):
            one_or_three_channels(self, images)
        chosen = draws.uniform(1)[0] < self.p
        everywhere = np.full(len(chosen), INDEX_OF[self.operation])
        magnitude = np.full(len(chosen), self.magnitude(images))
        return [OperationStep(everywhere, magnitude).only_for(chosen)]

    def magnitude(self, images: Tensor) -> float:
        """Return how much is done to images like these; see `OperationStep`."""
        return 0.0


class RandomGrayscale(_OneOperation):
    """Turn each image grey with share ``p``, like torchvision's.

    Images ``(N, C, H, W)`` have 1 or 3 channels; shape and dtype stay as they are, and so do masks.

    >>> images = RandomGrayscale(p=0.1)(images, samples=samples)
    """

    operation = "Grayscale"
    takes_normalized = True

    def __init__(self, p: float = 0.1) -> None:
        super().__init__(p)


class RandomSolarize(_OneOperation):
    """Invert all values from ``threshold`` on, for each image with share ``p``, like torchvision's.

    Images ``(N, C, H, W)`` keep their shape and dtype. ``threshold`` is in their units: at most 255
    for uint8, and at most 1 for floats, which are from 0 to 1. Masks stay as they are.

    >>> images = RandomSolarize(threshold=128, p=0.2)(images, samples=samples)
    """

    operation = "Solarize"

    def __init__(self, threshold: float, p: float = 0.5) -> None:
        if not is_finite(threshold):
            raise wrong(self, "threshold", "a number", repr(threshold))
        self.threshold = float(threshold)
        super().__init__(p)

    def magnitude(self, images: Tensor) -> float:
        """See `_OneOperation.magnitude`."""
        white = 255 if images.dtype == torch.uint8 else 1
        if self.threshold > white:
            advice = "It is in the units of the images."
            expected = f"at most {white} for {images.dtype}"
            raise wrong(self, "threshold", expected, self.threshold, advice)
        return self.threshold / white


class RandomPosterize(_OneOperation):
    """Keep the ``bits`` highest bits of each value, with share ``p``, like torchvision's.

    Images ``(N, C, H, W)`` keep their shape and dtype. Floats are from 0 to 1, and are rounded down
    to multiples of 2^-bits below 1. ``bits`` is from 0 to 8. Masks stay as they are.

    >>> images = RandomPosterize(bits=4)(images, samples=samples)
    """

    operation = "Posterize"

    def __init__(self, bits: int, p: float = 0.5) -> None:
        self.bits = integer(self, "bits", bits, 0)
        if self.bits > 8:
            raise wrong(self, "bits", "an integer from 0 to 8", repr(bits))
        super().__init__(p)

    def magnitude(self, images: Tensor) -> float:
        """See `_OneOperation.magnitude`."""
        return self.bits


class RandomInvert(_OneOperation):
    """Invert the colours of each image with share ``p``, like torchvision's.

    Images ``(N, C, H, W)`` keep their shape and dtype. Floats are from 0 to 1. Masks stay as they
    are.

    >>> images = RandomInvert(p=0.2)(images, samples=samples)
    """

    operation = "Invert"


class RandomAutocontrast(_OneOperation):
    """Stretch each channel to the full range, for each image with share ``p``, like torchvision's.

    The least value of the channel becomes black, the largest white. A channel of one value stays as
    it is. Images ``(N, C, H, W)`` have 1 or 3 channels, and keep their dtype. Floats are from 0 to
    1. Masks stay as they are.

    >>> images = RandomAutocontrast(p=0.2)(images, samples=samples)
    """

    operation = "AutoContrast"


class RandomEqualize(_OneOperation):
    """Spread the values of each channel evenly, for each image with share ``p``.

    It is torchvision's, whose formula is Pillow's. Images ``(N, C, H, W)`` keep their shape and
    dtype. Floats are from 0 to 1, and are rounded down to 256 levels. Masks stay as they are.

    >>> images = RandomEqualize(p=0.2)(images, samples=samples)
    """

    operation = "Equalize"


class RandomAdjustSharpness(_OneOperation):
    """Blur or sharpen each image by a factor with share ``p``, like torchvision's.

    ``sharpness_factor`` 0 gives a slightly blurred image, 1 the image itself, and 2 an image twice
    as sharp; it is at least 0. The blurred image is that of Pillow's ``ImageFilter.SMOOTH``. Images
    ``(N, C, H, W)`` have any number of channels, and keep their shape and dtype. Floats are from 0
    to 1. The outermost pixels stay as they are, and so do images with a side below 3, and masks.

    >>> images = RandomAdjustSharpness(2, p=0.3)(images, samples=samples)
    """

    operation = "Sharpness"

    def __init__(self, sharpness_factor: float, p: float = 0.5) -> None:
        if not is_finite(sharpness_factor) or sharpness_factor < 0:
            expected = "a number of at least 0"
            raise wrong(self, "sharpness_factor", expected, repr(sharpness_factor))
        self.sharpness_factor = float(sharpness_factor)
        super().__init__(p)

    def magnitude(self, images: Tensor) -> float:
        """See `_OneOperation.magnitude`."""
        return self.sharpness_factor


class GaussianBlur(OperationsTransform):
    """Blur each image with a Gaussian kernel of random width, like torchvision's.

    ``kernel_size`` is the side of the kernel in pixels, or a pair (width, height); each is odd.
    ``sigma``, the standard deviation in pixels, is drawn evenly from a pair (low, high) for each
    sample; a number is that of all samples. Images continue as in a mirror at their border, so each
    side of the kernel must be less than twice that of the image. Images ``(N, C, H, W)`` have any
    number of channels and keep their shape and dtype. Masks stay as they are.

    >>> images = GaussianBlur(9, sigma=(0.1, 2.0))(images, samples=samples)
    """

    takes_normalized = True

    def __init__(
        self, kernel_size: int | Sequence[int], sigma: float | Sequence[float] = (0.1, 2.0)
    ) -> None:
        sizes = tuple(kernel_size) if isinstance(kernel_size, Sequence) else (kernel_size,)
        are_odd = all(isinstance(size, Integral) and size > 0 and size % 2 for size in sizes)
        if len(sizes) not in (1, 2) or not are_odd:
            expected = "an odd integer of at least 1, or a pair (width, height) of them"
            raise wrong(self, "kernel_size", expected, repr(kernel_size))
        self.kernel_size = int(sizes[0]), int(sizes[-1])
        sigmas = tuple(sigma) if isinstance(sigma, Sequence) else (sigma,)
        are_numbers = len(sigmas) in (1, 2) and all(map(is_finite, sigmas))
        if not are_numbers or not 0 < sigmas[0] <= sigmas[-1]:
            expected = "a number above 0, or a pair (low, high) of them, low <= high"
            raise wrong(self, "sigma", expected, repr(sigma))
        self.sigma = float(sigmas[0]), float(sigmas[-1])

    def operation_steps(self, draws: Draws, images: Tensor) -> list[OperationStep]:
        """Draw 0 is where sigma is in its range."""
        height, width = images.shape[2:]
        if self.kernel_size[0] // 2 >= width or self.kernel_size[1] // 2 >= height:
            expected = "less than twice as large as the images, which are reflected at their border"
            found = f"{self.kernel_size} for images of {height}x{width} pixels"
            raise wrong(self, "kernel_size", expected, found)
        low, high = self.sigma
        sigma = low + (high - low) * draws.uniform(1)[0]
        everywhere = np.full(len(sigma), INDEX_OF["Blur"])
        return [OperationStep(everywhere, sigma, kernel_size=self.kernel_size)]
