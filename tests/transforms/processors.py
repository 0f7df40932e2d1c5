"""How tests compare with torchvision, whose pixels depend on the processor.

torchvision multiplies positions by matrices with torch's ``bmm``. MKL rounds each product there, or
adds it to the sum as it is, with AVX-512. The latter is done on ARM, too.
"""

from itertools import product

import torch

from memload.transforms.warping import warp

#: How far beside a pixel may have been taken. Rounding moves positions by a hundredth of it.
_PIXELS_BESIDE = 1e-3


def are_taken_by(found, images, matrices, interpolation, fill):
    """Return whether pixels are those that `warp` takes, but for the rounding of positions.

    The nearest pixel may be that of a position 1/1000 pixel beside. Means may differ by a level of
    uint8, and those of floats from 0 to 1 by as much as there can be in 1/1000 pixel.
    """
    if interpolation == "bilinear":
        shifts = [(0, 0)]
        tolerance = 1 if images.dtype == torch.uint8 else _PIXELS_BESIDE
    else:
        shifts, tolerance = product((0, -_PIXELS_BESIDE, _PIXELS_BESIDE), repeat=2), 0
    are_close = torch.zeros_like(found[:, :1], dtype=torch.bool)
    for shift in shifts:
        moved = matrices.copy()
        moved[:, :2, 2] += shift
        difference = warp(images, moved, interpolation, fill).double() - found.double()
        are_close |= difference.abs().amax(1, keepdim=True) <= tolerance
    return found.dtype == images.dtype and bool(are_close.all())
