"""Images warped by a matrix for each sample, and the matrices of torchvision's transforms.

A matrix ``(3, 3)`` maps ``(x, y, 1)`` in the output to where its pixel comes from in the input. (0,
0) is the upper left corner of the image, and (0.5, 0.5) the centre of its first pixel. If the last
row is not (0, 0, 1), the first two numbers are divided by the third.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import grid_sample

from memload.transforms.batch import change_some
from memload.transforms.geometry import TIE
from memload.transforms.operation_step import Fill, Interpolation
from memload.upload import upload

#: Positions further outside, in pixels or in half images, show nothing else.
_FAR = 3.0


def warp(
    images: Tensor,
    matrices: np.ndarray,
    interpolation: Interpolation = "nearest",
    fill: Fill = None,
    *,
    in_place: bool = False,
) -> Tensor:
    """Return images ``(n, C, H, W)`` of which each pixel comes from where a matrix says.

    ``matrices`` are float64 ``(n, 3, 3)``. What lies outside of the image is ``fill``: one number,
    one for each channel, or None for 0; in uint8 images, fractions are rounded. Images keep their
    dtype. They are in new memory, or in that of the images.

    Pixels come from where torchvision's ``functional.affine`` and ``perspective`` take them, within
    1/1000 of a pixel. So "bilinear" gives the same values, or in uint8 the next level. Where two
    pixels are equally near, "nearest" takes the one to the right or below, and torchvision either;
    its own pixels differ as much between processors. As there, "bilinear" with ``fill`` darkens the
    pixels on the edge twice, so that None and 0 differ.
    """
    places = np.flatnonzero((matrices != np.eye(3)).any((1, 2)))
    return change_some(
        images,
        places,
        lambda some, at: _warp(some, matrices[at], interpolation, fill),
        in_place=in_place,
    )


def _warp(images: Tensor, matrices: np.ndarray, interpolation: Interpolation, fill: Fill) -> Tensor:
    channels, height, width = images.shape[1:]
    x, y = _positions(matrices, height, width, images.device)
    colour = upload(np.array(fill or 0.0, np.float32).reshape(-1, 1, 1), images.device)
    if interpolation == "bilinear":
        pixels = images.float()
        if fill is not None:
            pixels = torch.cat([pixels, torch.ones_like(pixels[:, :1])], 1)
        grid = torch.stack([x.mul_(2 / width).sub_(1), y.mul_(2 / height).sub_(1)], 3)
        means = grid_sample(pixels, grid.nan_to_num_(_FAR).clamp_(-_FAR, _FAR), align_corners=False)
        if fill is not None:
            share = means[:, -1:]
            means = (means[:, :-1] - colour).mul_(share).add_(colour)
        return (means if images.is_floating_point() else means.round_()).to(images.dtype)
    x = x.nan_to_num_(-_FAR).add_(TIE).floor_().clamp_(-1, width)
    y = y.nan_to_num_(-_FAR).add_(TIE).floor_().clamp_(-1, height)
    is_inside = ((x >= 0) & (x < width) & (y >= 0) & (y < height))[:, None]
    index = (y.clamp_(0, height - 1) * width).add_(x.clamp_(0, width - 1)).long()
    index = index.flatten(1)[:, None].expand(-1, channels, -1)
    moved = images.flatten(2).gather(2, index).view(images.shape)
    if not images.is_floating_point():
        colour = colour.round()
    return moved.where(is_inside, colour.to(images.dtype))


def _positions(
    matrices: np.ndarray, height: int, width: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return x and y of where the pixels come from, float32 ``(n, H, W)``."""
    lines = upload(matrices.astype(np.float32), device)[..., None, None].unbind(1)
    x = torch.arange(width, device=device, dtype=torch.float32) + 0.5
    y = torch.arange(height, device=device, dtype=torch.float32)[:, None] + 0.5
    from_x, from_y, divisor = ((x * line[:, 0] + y * line[:, 1]).add_(line[:, 2]) for line in lines)
    if matrices[:, 2, :2].any():
        from_x, from_y = from_x / divisor, from_y / divisor
    return from_x, from_y


def affine_matrices(
    height: int,
    width: int,
    angle: np.ndarray,
    translate: np.ndarray,
    scale: np.ndarray,
    shear: np.ndarray,
    center: Sequence[float] | np.ndarray | None = None,
) -> np.ndarray:
    """Return the matrices of torchvision's ``functional.affine``, float64 ``(n, 3, 3)``.

    ``angle`` in degrees, clockwise, and ``scale`` are ``(n,)``. ``translate``, in pixels, and
    ``shear``, in degrees, are ``(n, 2)``, x before y. ``center`` is (x, y) in pixels from the upper
    left corner, or ``(n, 2)``, by default the centre of the image.
    """
    cx, cy = np.asarray([width * 0.5, height * 0.5] if center is None else center).T
    shear_x, shear_y = np.radians(shear).T
    turn = np.radians(angle)
    # The image is sheared, turned, scaled, moved, in this order; [a, b; c, d] is the first two.
    a = np.cos(turn - shear_y) / np.cos(shear_y)
    b = -(a * np.tan(shear_x) + np.sin(turn))
    c = np.sin(turn - shear_y) / np.cos(shear_y)
    d = np.cos(turn) - c * np.tan(shear_x)
    # Its determinant is 1, which makes the inverse simple.
    matrices = np.zeros((len(turn), 3, 3))
    matrices[:, 0, 0], matrices[:, 0, 1] = d / scale, -b / scale
    matrices[:, 1, 0], matrices[:, 1, 1] = -c / scale, a / scale
    from_x, from_y = cx + translate[:, 0], cy + translate[:, 1]
    matrices[:, 0, 2] = cx - matrices[:, 0, 0] * from_x - matrices[:, 0, 1] * from_y
    matrices[:, 1, 2] = cy - matrices[:, 1, 0] * from_x - matrices[:, 1, 1] * from_y
    matrices[:, 2, 2] = 1
    return matrices


def perspective_matrices(starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return the matrices of torchvision's ``functional.perspective``, float64 ``(n, 3, 3)``.

    Where there is none, it is the identity.

    ``starts`` and ``ends`` are four points (x, y) in the input and where they go in the output,
    ``(n, 4, 2)``. Their numbers are rounded to float32, as torchvision's are.
    """
    (x, y), (from_x, from_y) = np.moveaxis(ends, 2, 0), np.moveaxis(starts, 2, 0)
    one, zero = np.ones_like(x), np.zeros_like(x)
    # Two equations for each point. The divisor is on their other side.
    for_x = [x, y, one, zero, zero, zero, -from_x * x, -from_x * y]
    for_y = [zero, zero, zero, x, y, one, -from_y * x, -from_y * y]
    equations = np.stack([np.stack(for_x, 2), np.stack(for_y, 2)], 2).reshape(-1, 8, 8)
    solvable = np.linalg.det(equations) != 0
    solved = np.linalg.solve(equations[solvable], starts[solvable].reshape(-1, 8, 1))[..., 0]
    matrices = np.tile(np.eye(3), (len(starts), 1, 1))
    matrices.reshape(-1, 9)[solvable, :8] = solved.astype(np.float32)
    return matrices
