"""Where pixels come from by a matrix for each sample, and one gather that takes them from there.

The arithmetic of `warp` is that of torch's ``grid_sample`` on a CPU with AVX2. It is written as
operations that are the same on every device: sums and products of float32, and of float64 where
such a CPU has a fused one, which rounds once.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import grid_sample

from memload.transforms.arguments import (
    interpolation_name,
    per_channel,
    wrong,
)
from memload.transforms.operations_plan import INDEX_OF, OperationStep
from memload.transforms.sub_batches import parts
from memload.upload import upload

Interpolation = Literal["nearest", "bilinear"]
Fill = float | Sequence[float] | None

#: A position outside of any image, in the units of `_grid`.
FAR = 3.0
#: Pixels outside of the image that a position can have, on each side. The second neighbour of a
#: position left of all pixels is outside, too.
MARGIN = 2


def warp(
    images: Tensor,
    matrices: np.ndarray,
    interpolation: Interpolation = "nearest",
    fill: Fill = None,
) -> Tensor:
    """Return images ``(n, C, H, W)`` of which each pixel comes from where a matrix says.

    ``matrices`` are float64 ``(n, 6)`` for affine maps or ``(n, 8)`` for perspectives, one for each
    image. They map coordinates of the output to those of the input:

    - ``(a, b, c, d, e, f)``: ``(x, y)`` comes from ``(a·x + b·y + c, d·x + e·y + f)``, in pixels
      from the centre of the image, so that (0, 0) is the middle. See `affine_matrices`.
    - ``(a, b, c, d, e, f, g, h)``: both are divided by ``g·x + h·y + 1``. Coordinates are those of
      the image's edges: (0, 0) is its corner, and the centre of the first pixel (0.5, 0.5). See
      `perspective_matrices`.

    What lies outside of the image is ``fill``: one number, one for each channel, or None for 0; in
    uint8 images, fractions are rounded. uint8, floats and, with "nearest", any integers keep their
    dtype.

    Pixels come from where torchvision's ``functional.affine`` and ``perspective`` take them on CPU
    tensors of uint8 and float32, within 1/1000 of a pixel. So "bilinear" gives the same values, or
    in uint8 the next level. Where two pixels are equally near, "nearest" may take the other one.
    torchvision's own pixels depend on the processor as much: some round each product of a matrix
    product, and others do not. Where the divisor is 0, pixels are outside here; torchvision's
    "bilinear" makes them black in uint8, and NaN in floats.

    As there, "bilinear" with ``fill`` darkens the pixels on the edge twice, so that None and 0
    differ. Positions are float32 for every dtype. CPU and CUDA give the same bits, whatever the
    batch: ``grid_sample`` itself differs between the two, and so is called only on CPUs where it
    gives what the operations of this module give.
    """
    count, channels, height, width = images.shape
    interpolation = interpolation_name("warp", interpolation, "nearest", "bilinear")
    if matrices.shape not in ((count, 6), (count, 8)):
        expected = f"({count}, 6) or ({count}, 8)"
        raise wrong("warp", "matrices", expected, matrices.shape)
    values = None if fill is None else per_channel("warp", "fill", fill, channels, images.dtype)
    if isinstance(fill, int):
        values = (fill,) * channels  # masks may have numbers that no float64 has
    lines = upload(grid_lines(matrices, height, width), images.device)
    out = torch.empty_like(images)
    # Positions and indices, and values: `_means` computes in float64.
    is_light = interpolation == "nearest" or _goes_to_grid_sample(images)
    bytes_of_pixel = 40 + (8 if is_light else 32) * (channels + 1)
    for part in parts(images, bytes_of_pixel * height * width):
        grid = _grid(lines[part], height, width)
        if interpolation == "nearest":
            out[part] = _nearest(images[part], grid, values)
        else:
            out[part] = _bilinear(images[part], grid, values)
    return out


def affine_matrices(
    height: int,
    width: int,
    angle: np.ndarray,
    translate: np.ndarray,
    scale: np.ndarray,
    shear: np.ndarray,
    center: Sequence[float] | np.ndarray | None = None,
) -> np.ndarray:
    """Return the matrices for `warp` of torchvision's ``functional.affine``, float64 ``(n, 6)``.

    ``angle`` in degrees, clockwise, and ``scale`` are ``(n,)``. ``translate``, in pixels, and
    ``shear``, in degrees, are ``(n, 2)``, x before y. ``center`` is (x, y) in pixels from the upper
    left corner, or ``(n, 2)``, by default the centre of the image.
    """
    middle = np.array([width * 0.5, height * 0.5])
    cx, cy = ((middle if center is None else np.asarray(center)) - middle).T
    shear_x, shear_y = np.radians(shear).T
    turn = np.radians(angle)
    # The image is sheared, turned, scaled, moved, in this order; [a, b; c, d] is the first two.
    a = _each(math.cos, turn - shear_y) / _each(math.cos, shear_y)
    b = -(a * _each(math.tan, shear_x) + _each(math.sin, turn))
    c = _each(math.sin, turn - shear_y) / _each(math.cos, shear_y)
    d = _each(math.cos, turn) - c * _each(math.tan, shear_x)
    # Its determinant is 1, which makes the inverse simple.
    from_x, from_y = cx + translate[:, 0], cy + translate[:, 1]
    inverse = d / scale, -b / scale, -c / scale, a / scale
    x = cx - inverse[0] * from_x - inverse[1] * from_y
    y = cy - inverse[2] * from_x - inverse[3] * from_y
    return np.stack([inverse[0], inverse[1], x, inverse[2], inverse[3], y], 1)


def matrices_of(step: OperationStep, height: int, width: int) -> np.ndarray:
    """Return the matrices for `warp` of shears, translations and rotations."""
    operation, magnitude = step.operation, step.magnitude
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


def perspective_matrices(starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return the matrices for `warp` of torchvision's ``functional.perspective``, ``(n, 8)``.

    ``starts`` and ``ends`` are four points (x, y) in the input and where they go in the output,
    ``(n, 4, 2)``. Their numbers are rounded to float32, as torchvision's are.
    """
    (x, y), (from_x, from_y) = np.moveaxis(ends, 2, 0), np.moveaxis(starts, 2, 0)
    one, zero = np.ones_like(x), np.zeros_like(x)
    # Two equations for each point. The divisor is on their other side.
    for_x = [x, y, one, zero, zero, zero, -from_x * x, -from_x * y]
    for_y = [zero, zero, zero, x, y, one, -from_y * x, -from_y * y]
    equations = np.stack([np.stack(for_x, 2), np.stack(for_y, 2)], 2).reshape(-1, 8, 8)
    solved = torch.linalg.lstsq(
        torch.from_numpy(equations), torch.from_numpy(starts.reshape(-1, 8, 1)), driver="gels"
    )
    rounded: np.ndarray = solved.solution[..., 0].float().double().numpy()
    return rounded


def _each(function: Callable[[float], float], values: np.ndarray) -> np.ndarray:
    """Return a function of `math` for each number. NumPy's own may differ in the last bit."""
    results = np.full(len(values), function(0.0))
    places = np.flatnonzero(values)  # most operations do not turn, and most do not shear
    # TrivialAugmentWide has 62 angles, for 600 of 8,192 samples.
    distinct, numbers = np.unique(values[places], return_inverse=True)
    results[places] = np.array([function(value) for value in distinct.tolist()])[numbers]
    return results


def grid_lines(matrices: np.ndarray, height: int, width: int) -> np.ndarray:
    """Return the matrices in grid_sample's units, half an image each, float32 ``(n, 2 or 3, 3)``.

    The rows give x, y and for perspectives the divisor.
    """
    affine = matrices[:, :6].astype(np.float32).reshape(-1, 2, 3)
    affine /= np.array([0.5 * width, 0.5 * height], np.float32)[:, np.newaxis]
    if matrices.shape[1] == 6:
        return affine
    divisor = np.ones((len(matrices), 1, 3), np.float32)
    divisor[:, 0, :2] = matrices[:, 6:]
    return np.concatenate([affine, divisor], 1)


def _grid(lines: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Return x and y of where the pixels come from, float32 ``(n, H, W)``.

    They are in the units of grid_sample: -1 and 1 are the edges of the image.
    """
    affine = lines.shape[1] == 2
    x_start, y_start = (0.5 * (1 - width), 0.5 * (1 - height)) if affine else (0.5, 0.5)
    x = torch.arange(width, device=lines.device, dtype=torch.float32) + x_start
    y = torch.arange(height, device=lines.device, dtype=torch.float32)[:, None] + y_start
    from_x, from_y, offset = lines[..., None, None].unbind(2)
    # In this order, and not fused: as by torch's bmm on processors without AVX-512.
    sums = [
        (x * from_x[:, row] + y * from_y[:, row]).add_(offset[:, row])
        for row in range(lines.shape[1])
    ]
    if not affine:
        sums = [sums[0].div_(sums[2]).sub_(1), sums[1].div_(sums[2]).sub_(1)]
    # From nowhere, or from far away, is from outside.
    x, y = (position.nan_to_num_(-FAR).clamp_(-FAR, FAR) for position in sums[:2])
    return x, y


def _in_pixels(positions: Tensor, extent: int) -> Tensor:
    """Return positions of `_grid` in pixels, 0 for the first; at most `MARGIN` outside."""
    # As if the two were one operation of float32: the product is exact in float64.
    pixels = (positions + 1).double().mul_(0.5 * extent).sub_(0.5).float()
    return pixels.clamp_(-MARGIN, extent)


def _padded(images: Tensor, fill: tuple[float, ...] | None, dtype: torch.dtype) -> Tensor:
    """Return images ``(n, C, H + 4, W + 4)`` of a dtype with a margin of ``fill``."""
    count, channels, height, width = images.shape
    shape = count, channels, height + 2 * MARGIN, width + 2 * MARGIN
    padded = torch.zeros(shape, dtype=dtype, device=images.device)
    if fill is not None:
        colour = np.array(fill)
        if not dtype.is_floating_point and colour.dtype.kind == "f":
            colour = np.rint(colour)
        padded += upload(colour, images.device).to(dtype)[:, None, None]
    padded[:, :, MARGIN:-MARGIN, MARGIN:-MARGIN] = images
    return padded


def _index(x: Tensor, y: Tensor, width: int, channels: int) -> Tensor:
    """Return the index of whole positions in a padded channel, int64 ``(n, C, H·W)``."""
    row = width + 2 * MARGIN
    # Sums of int64 take three times as long.
    index = y.int().mul_(row).add_(x.int()).add_(MARGIN * (row + 1)).long()
    return index.flatten(1)[:, None].expand(-1, channels, -1)


def _nearest(images: Tensor, grid: tuple[Tensor, Tensor], fill: tuple[float, ...] | None) -> Tensor:
    """Return the pixels nearest to positions. Of two equally near ones it is the even one."""
    _, channels, height, width = images.shape
    x, y = _in_pixels(grid[0], width).round_(), _in_pixels(grid[1], height).round_()
    pixels = _padded(images, fill, images.dtype).flatten(2)
    return pixels.gather(2, _index(x, y, width, channels)).view(images.shape)


def _bilinear(
    images: Tensor, grid: tuple[Tensor, Tensor], fill: tuple[float, ...] | None
) -> Tensor:
    """Return the means of the four pixels around positions."""
    work = torch.promote_types(images.dtype, torch.float32)
    if fill is not None:
        covered = torch.ones_like(images[:, :1], dtype=work)
        images, given = torch.cat([images.to(work), covered], 1), images.dtype
    else:
        given = images.dtype
    if _goes_to_grid_sample(images):
        means = _grid_sample(images.to(work), grid)
    else:
        means = _means(images, grid)
    if fill is not None:
        colour = upload(np.array(fill), images.device).to(work)[:, None, None]
        # In memory of its own, since gradients need it as it was.
        share = means[:, -1:].detach().clone()
        means = means[:, :-1].sub_(colour).mul_(share).add_(colour)
    return means if given.is_floating_point else means.round_()


def _goes_to_grid_sample(images: Tensor) -> bool:
    """Return whether `_grid_sample` computes the means of images, and not `_means`."""
    is_float32 = torch.promote_types(images.dtype, torch.float32) == torch.float32
    return is_float32 and images.device.type == "cpu" and _grid_sample_fits()


def _grid_sample(images: Tensor, grid: tuple[Tensor, Tensor]) -> Tensor:
    return grid_sample(images, torch.stack(grid, 3), align_corners=False)


def _means(images: Tensor, grid: tuple[Tensor, Tensor]) -> Tensor:
    """Return what `_grid_sample` returns on a CPU that has fused operations, on any device.

    On the CPU it takes twice as long. float64 is not rounded to float32 between.
    """
    _, channels, height, width = images.shape
    x, y = _in_pixels(grid[0], width), _in_pixels(grid[1], height)
    left, top = x.floor(), y.floor()
    index = _index(left, top, width, channels)
    to_right, to_bottom = x.sub_(left), y.sub_(top)
    to_left, to_top = 1 - to_right, 1 - to_bottom
    pixels, row = _padded(images, None, torch.float64).flatten(2), width + 2 * MARGIN
    total = torch.zeros((), dtype=torch.float64, device=images.device)
    for offset, weight in (
        (0, to_left * to_top),
        (1, to_right * to_top),
        (row, to_left * to_bottom),
        (row + 1, to_right * to_bottom),
    ):
        neighbours = pixels[..., offset:].gather(2, index)
        total = neighbours.mul_(weight.flatten(1)[:, None].double()).add_(total)
        if images.dtype != torch.float64:  # as if the two were one operation of float32
            total = total.float().double()
    means: Tensor = total.view(images.shape)
    return means if images.dtype == torch.float64 else means.float()


@functools.cache
def _grid_sample_fits() -> bool:
    """Return whether `_grid_sample` gives the same bits as `_means` on this CPU."""
    ramp = torch.arange(4096, dtype=torch.float32, device="cpu")
    images = (ramp * 0.37).sin().view(1, 1, 64, 64)
    grid = (ramp * 0.61).cos().view(1, 64, 64), (ramp * 0.83).cos().view(1, 64, 64)
    return torch.equal(_grid_sample(images, grid), _means(images, grid))
