"""How tests compare with torchvision, whose pixels depend on the processor.

torchvision multiplies positions by matrices with torch's ``bmm``. MKL rounds each product there, or
adds it to the sum as it is, with AVX-512. The latter is done on ARM, too. Other sums of torch and
torchvision are rounded once where a processor has AVX2, and otherwise twice.
"""

from itertools import product
from typing import Any

import numpy as np
import torch

from memload.transforms.warping import warp

#: Whether torch's vectors add a product to a sum without rounding it before.
FUSES = torch.backends.cpu.get_cpu_capability() != "DEFAULT"
#: How far beside a pixel may have been taken. Rounding moves positions by a hundredth of it.
_PIXELS_BESIDE = 1e-3


def are_taken_by(
    found: torch.Tensor, images: torch.Tensor, matrices: np.ndarray, interpolation: Any, fill: Any
) -> bool:
    """Return whether pixels are those that `warp` takes, but for the rounding of positions.

    The nearest pixel may be that of a position 1/1000 pixel beside. Means may differ by a level of
    uint8, and those of floats from 0 to 1 by as much as there can be in 1/1000 pixel.
    """
    if interpolation == "bilinear":
        shifts: Any = [(0, 0)]
        tolerance = 1 if images.dtype == torch.uint8 else _PIXELS_BESIDE
    else:
        shifts, tolerance = product((0, -_PIXELS_BESIDE, _PIXELS_BESIDE), repeat=2), 0
    are_close = torch.zeros_like(found[:, :1], dtype=torch.bool)
    for shift in shifts:
        moved = matrices.copy()
        moved[:, [2, 5]] += shift
        difference = warp(images, moved, interpolation, fill).double() - found.double()
        are_close |= difference.abs().amax(1, keepdim=True) <= tolerance
    return found.dtype == images.dtype and bool(are_close.all())


def are_equal_but_for_rounding(found: torch.Tensor, expected: torch.Tensor, exactly: bool) -> bool:
    """Return whether uint8 images are equal, and if not exactly, then within one level."""
    difference = (found.int() - expected.int()).abs()
    is_close = bool((difference <= (0 if exactly else 1)).all())
    return found.dtype == expected.dtype and found.shape == expected.shape and is_close
