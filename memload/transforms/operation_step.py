"""OperationStep: an operation for each sample, and how much of it."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

Interpolation = Literal["nearest", "bilinear"]
Fill = float | Sequence[float] | None

#: All operations. Elsewhere an operation is an index into this, so new ones come last; `operations`
#: does them on the CPU, and kernels/operations on CUDA. The first 14 are those that
#: TrivialAugment and torchvision's RandAugment choose from, and timm's RandAugment has the first 16
#: but "Identity". The others are parts of ColorJitter, RandomGrayscale, GaussianBlur and
#: RandomAffine.
OPERATIONS = (
    *("Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate"),
    *("Brightness", "Color", "Contrast", "Sharpness"),
    *("Posterize", "Solarize", "AutoContrast", "Equalize", "Invert", "SolarizeAdd"),
    *("Hue", "Grayscale", "Blur", "Warp"),
)
#: The index of each operation.
INDEX_OF = {name: number for number, name in enumerate(OPERATIONS)}
#: The luma of red, green and blue, of ITU-R BT.601 as in torchvision.
LUMA = 0.2989, 0.587, 0.114
#: Smaller weights of a blur become 0. They add less than the rounding does.
_SMALLEST_WEIGHT = 2.0**-64


def is_one_of(*names: str) -> np.ndarray:
    """Return for each operation whether it is one of these, bool ``(len(OPERATIONS),)``."""
    return np.isin(OPERATIONS, names)


MOVES = is_one_of("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "Warp")


class OperationStep(NamedTuple):
    """An operation for each sample, and how much of it.

    By operation, the magnitude is a shear as its tangent, a translation in pixels, a rotation
    counterclockwise in degrees, a factor (brightness, color, contrast, sharpness), the number of
    bits that stay (posterize), a threshold as a share of white (solarize), the levels of 255 that
    are added (SolarizeAdd), a share of the circle (hue), or a standard deviation in pixels (blur).
    """

    operation: np.ndarray  #: an index into `OPERATIONS`, int64 ``(N,)``
    magnitude: np.ndarray  #: float64 ``(N,)``
    #: Where the pixels of operations that move them come from, float64 ``(N, 3, 3)``; see `warp`.
    matrices: np.ndarray | None = None
    interpolation: Interpolation = "nearest"
    fill: Fill = None
    #: (width, height) of the kernel of a blur.
    kernel_size: tuple[int, int] = (1, 1)

    @classmethod
    def warp(
        cls, matrices: np.ndarray, interpolation: Interpolation, fill: Fill
    ) -> "OperationStep":
        """Return the step that warps all images by their matrices."""
        operation = np.full(len(matrices), INDEX_OF["Warp"])
        return cls(operation, np.zeros(len(matrices)), matrices, interpolation, fill)

    def at(self, places: Any) -> "OperationStep":
        """Return the step of some samples, at places in the batch or a slice of it."""
        matrices = None if self.matrices is None else self.matrices[places]
        return self._replace(
            operation=self.operation[places], magnitude=self.magnitude[places], matrices=matrices
        )

    def only_for(self, chosen: np.ndarray) -> "OperationStep":
        """Return the same where ``chosen``, bool ``(N,)``, and no operation elsewhere."""
        operation, matrices = np.where(chosen, self.operation, 0), self.matrices
        if matrices is not None:
            matrices = np.where(chosen[:, None, None], matrices, np.eye(3))
        return self._replace(operation=operation, matrices=matrices)


def kept_bits(count: np.ndarray) -> np.ndarray:
    """Return masks that keep so many of the highest bits of a byte, uint8 ``(n,)``."""
    return (0xFF00 >> count.astype(np.int64)).astype(np.uint8)


def weights_of(sigma: np.ndarray, radii: tuple[int, int]) -> np.ndarray:
    """Return the weights of each image, float64 ``(n, …)``: those along x, then those along y.

    They are by the distance from the middle, from 0 to the radius. Both sides sum to 1.
    """
    different = {}
    for radius in radii:
        weights = np.exp(-0.5 * (np.arange(radius + 1) / sigma[:, None]) ** 2)
        weights /= (2 * weights.sum(1) - 1)[:, None]
        weights[weights < _SMALLEST_WEIGHT] = 0
        different[radius] = weights
    return np.concatenate([different[radius] for radius in radii], 1)
