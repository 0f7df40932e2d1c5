"""Plans of operations: an operation and a magnitude for each sample, one step after another."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from memload.transforms.geometry import Plan

Computed = TypeVar("Computed")

#: All operations. Elsewhere an operation is an index into this. The first 14 are those that
#: TrivialAugment and torchvision's RandAugment choose from, and timm's RandAugment has the first 16
#: but "Identity". The others are parts of ColorJitter, RandomGrayscale and GaussianBlur.
OPERATIONS = (
    *("Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate"),
    *("Brightness", "Color", "Contrast", "Sharpness"),
    *("Posterize", "Solarize", "AutoContrast", "Equalize", "Invert", "SolarizeAdd"),
    *("JitterContrast", "JitterSaturation", "Hue", "Grayscale", "Blur"),
)
#: The index of each operation.
INDEX_OF = {name: number for number, name in enumerate(OPERATIONS)}


def is_one_of(*names: str) -> np.ndarray:
    """Return for each operation whether it is one of these, bool ``(len(OPERATIONS),)``."""
    return np.isin(OPERATIONS, names)


MOVES = is_one_of("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate")


class OperationStep(NamedTuple):
    """An operation for each sample of a batch, and how much of it.

    By operation, the magnitude is a shear as its tangent, a translation in pixels, a rotation
    counterclockwise in degrees, a factor (brightness, color, contrast, sharpness, saturation), the
    number of bits that stay (posterize), a threshold as a share of white (solarize), the levels of
    255 that are added (SolarizeAdd), a share of the circle (hue), or a standard deviation in pixels
    (blur).
    """

    operation: np.ndarray  #: an index into `OPERATIONS`, int64 ``(N,)``
    magnitude: np.ndarray  #: float64 ``(N,)``
    #: How pixels are moved, and what comes into view; see `warping.warp`.
    interpolation: Any = "nearest"
    fill: Any = None
    #: (width, height) of the kernel of a blur.
    kernel_size: tuple[int, int] = (1, 1)

    def at(self, places: Any) -> "OperationStep":
        """Return the step of some samples, at places in the batch or a slice of it."""
        return self._replace(operation=self.operation[places], magnitude=self.magnitude[places])

    def only_for(self, chosen: np.ndarray) -> "OperationStep":
        """Return the same where ``chosen``, bool ``(N,)``, and no operation elsewhere."""
        return self._replace(operation=np.where(chosen, self.operation, INDEX_OF["Identity"]))


@dataclass
class OperationsPlan:
    """Steps for ``count`` samples, whose images are ``(channels, height, width)`` of a dtype."""

    steps: Sequence[OperationStep]
    #: The maps of pixels at the end.
    after: Plan
    count: int
    channels: int
    height: int
    width: int
    dtype: torch.dtype
    #: What functions given to `computed` returned.
    _computed: dict[Any, Any] = field(default_factory=dict)

    @property
    def maps_pixels(self) -> bool:
        """Whether there are any maps of pixels at the end."""
        return self.after.maps_pixels or self.after.dtype != self.dtype

    def steps_of(self, first: int, count: int) -> list[OperationStep]:
        """Return the steps of ``count`` samples from ``first`` on."""
        return [step.at(slice(first, first + count)) for step in self.steps]

    def computed(self, compute: Callable[["OperationsPlan"], Computed]) -> Computed:
        """Return ``compute(plan)``. Each function is called once."""
        if compute not in self._computed:
            self._computed[compute] = compute(self)
        result: Computed = self._computed[compute]
        return result
