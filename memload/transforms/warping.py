"""RandomAffine, RandomRotation and RandomPerspective: a matrix for each sample, and one gather.

`warp` computes where each output pixel comes from, and takes it from there. Its arithmetic is that
of torch's ``grid_sample`` on a CPU, written as operations that are the same on every device: sums
and products of float32, and of float64 where a processor has a fused one, which rounds once.
"""

import math
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from memload.transforms.arguments import per_channel, wrong
from memload.upload import upload

Interpolation = Literal["nearest", "bilinear"]
Fill = float | tuple[float, ...] | list[float] | None

#: Pixels outside of the image that a position can have, on each side. The second neighbour of a
#: position left of all pixels is outside, too.
_MARGIN = 2
#: Images are processed in chunks of about this many pixels. On the CPU they stay in a core's cache.
_CHUNK_PIXELS = {"cpu": 1 << 16, "cuda": 1 << 20}


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

    What lies outside of the image is ``fill``: one number, one for each channel, or None for 0.
    uint8, floats and, with "nearest", any integers keep their dtype.

    The result is that of torchvision's ``functional.affine`` and ``perspective`` on CPU tensors, to
    the bit, for uint8 and float32. As there, "bilinear" with ``fill`` darkens the pixels on the
    edge twice, so that None and 0 differ. Positions are float32 for every dtype. CPU and CUDA give
    the same bits, whatever the batch; ``grid_sample`` itself differs between the two.
    """
    count, channels, height, width = images.shape
    if interpolation not in ("nearest", "bilinear"):
        expected = "'nearest' or 'bilinear'"
        raise wrong("warp", "interpolation", expected, repr(interpolation))
    if matrices.shape not in ((count, 6), (count, 8)):
        expected = f"({count}, 6) or ({count}, 8)"
        raise wrong("warp", "matrices", expected, matrices.shape)
    values = None if fill is None else per_channel("warp", "fill", fill, channels, images.dtype)
    lines = upload(_lines(matrices, height, width), images.device)
    out = torch.empty_like(images)
    step = max(1, _CHUNK_PIXELS.get(images.device.type, 1 << 20) // max(1, height * width))
    for start in range(0, count, step):
        chunk = slice(start, start + step)
        x, y = _positions(lines[chunk], height, width)
        take = _nearest if interpolation == "nearest" else _bilinear
        out[chunk] = take(images[chunk], x, y, values)
    return out


def affine_matrices(
    height: int,
    width: int,
    angle: np.ndarray,
    translate: np.ndarray,
    scale: np.ndarray,
    shear: np.ndarray,
    center: tuple[float, float] | None = None,
) -> np.ndarray:
    """Return the matrices for `warp` of torchvision's ``functional.affine``, float64 ``(n, 6)``.

    ``angle`` in degrees, clockwise, and ``scale`` are ``(n,)``. ``translate``, in pixels, and
    ``shear``, in degrees, are ``(n, 2)``, x before y. ``center`` is (x, y) in pixels from the upper
    left corner, by default the centre of the image.
    """
    cx, cy = (0.0, 0.0) if center is None else (center[0] - width * 0.5, center[1] - height * 0.5)
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


def _each(function: object, values: np.ndarray) -> np.ndarray:
    """Return a function of `math` for each number. NumPy's own may differ in the last bit."""
    return np.array([function(value) for value in values.tolist()])  # type: ignore[operator]


def _lines(matrices: np.ndarray, height: int, width: int) -> np.ndarray:
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


def _positions(lines: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Return where the output pixels come from: x and y, float32 ``(n, H, W)``, 0 the first pixel.

    What is outside, or nowhere, is at most two pixels outside.
    """
    affine = lines.shape[1] == 2
    x_start, y_start = (0.5 * (1 - width), 0.5 * (1 - height)) if affine else (0.5, 0.5)
    x = torch.arange(width, device=lines.device, dtype=torch.float32) + x_start
    y = torch.arange(height, device=lines.device, dtype=torch.float32)[:, None] + y_start
    from_x, from_y, offset = lines[..., None, None].unbind(2)
    sums = [
        (x * from_x[:, row] + y * from_y[:, row]).add_(offset[:, row])
        for row in range(lines.shape[1])
    ]
    if not affine:
        sums = [sums[0].div_(sums[2]).sub_(1), sums[1].div_(sums[2]).sub_(1)]
    return _in_pixels(sums[0], width), _in_pixels(sums[1], height)


def _in_pixels(positions: Tensor, extent: int) -> Tensor:
    """Return positions in pixels from those of grid_sample, where -1 and 1 are the edges."""
    # A fused operation: in float64 the product is exact.
    pixels = positions.add_(1).double().mul_(0.5 * extent).sub_(0.5).float()
    return pixels.nan_to_num_(-_MARGIN).clamp_(-_MARGIN, extent)


def _padded(images: Tensor, fill: tuple[float, ...] | None, dtype: torch.dtype) -> Tensor:
    """Return images ``(n, C, H + 4, W + 4)`` of a dtype with a margin of ``fill``."""
    count, channels, height, width = images.shape
    shape = count, channels, height + 2 * _MARGIN, width + 2 * _MARGIN
    padded = torch.zeros(shape, dtype=dtype, device=images.device)
    if fill is not None:
        padded += upload(np.array(fill), images.device).to(dtype)[:, None, None]
    padded[:, :, _MARGIN:-_MARGIN, _MARGIN:-_MARGIN] = images
    return padded


def _index(x: Tensor, y: Tensor, width: int, channels: int) -> Tensor:
    """Return the index of whole positions in a padded channel, int64 ``(n, C, H·W)``."""
    index = y.long().add_(_MARGIN).mul_(width + 2 * _MARGIN).add_(x.long()).add_(_MARGIN)
    return index.flatten(1)[:, None].expand(-1, channels, -1)


def _nearest(images: Tensor, x: Tensor, y: Tensor, fill: tuple[float, ...] | None) -> Tensor:
    """Return the pixels nearest to positions. Of two equally near ones it is the even one."""
    padded = _padded(images, fill, images.dtype).flatten(2)
    index = _index(x.round_(), y.round_(), images.shape[3], images.shape[1])
    return padded.gather(2, index).view(images.shape)


def _bilinear(images: Tensor, x: Tensor, y: Tensor, fill: tuple[float, ...] | None) -> Tensor:
    """Return the means of the four pixels around positions."""
    count, _, height, width = images.shape
    padded = _padded(images, None, torch.float64)
    if fill is not None:
        ones = torch.ones((count, 1, height, width), device=images.device)
        padded = torch.cat([padded, _padded(ones, None, torch.float64)], 1)
    left, top = x.floor(), y.floor()
    index = _index(left, top, width, padded.shape[1])
    to_right, to_bottom = x.sub_(left), y.sub_(top)
    to_left, to_top = 1 - to_right, 1 - to_bottom
    pixels, row = padded.flatten(2), width + 2 * _MARGIN
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
    if images.dtype != torch.float64:
        total = total.float()
    if fill is not None:
        colour = upload(np.array(fill), images.device).to(total.dtype)[:, None]
        covered = total[:, -1:]
        total = total[:, :-1].sub_(colour).mul_(covered).add_(colour)
    total = total.view(images.shape)
    return total.round_() if images.dtype == torch.uint8 else total


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
