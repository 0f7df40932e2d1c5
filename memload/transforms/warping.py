"""RandomAffine, RandomRotation and RandomPerspective: a matrix for each sample, and one gather.

`warp` computes where each output pixel comes from, and takes it from there. Its arithmetic is that
of torch's ``grid_sample`` on a CPU, written as operations that are the same on every device: sums
and products of float32, and of float64 where a processor has a fused one, which rounds once.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import grid_sample

from memload.transforms.arguments import (
    interpolation_name,
    interval,
    is_finite,
    numbers,
    per_channel,
    share,
    wrong,
)
from memload.transforms.draws import Draws
from memload.transforms.fused import TensorsByName
from memload.transforms.some import change_some, parts
from memload.transforms.transform import Transform
from memload.upload import upload

Interpolation = Literal["nearest", "bilinear"]
Fill = float | Sequence[float] | None

#: A position outside of any image, in the units of `_grid`.
_FAR = 3.0
#: Pixels outside of the image that a position can have, on each side. The second neighbour of a
#: position left of all pixels is outside, too.
_MARGIN = 2


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

    The result is that of torchvision's ``functional.affine`` and ``perspective`` on CPU tensors, to
    the bit, for uint8 and float32. As there, "bilinear" with ``fill`` darkens the pixels on the
    edge twice, so that None and 0 differ. Positions are float32 for every dtype. CPU and CUDA give
    the same bits, whatever the batch: ``grid_sample`` itself differs between the two, and so is
    called only on CPUs where it gives what the operations of this module give.
    """
    count, channels, height, width = images.shape
    interpolation = interpolation_name("warp", interpolation, "nearest", "bilinear")
    if matrices.shape not in ((count, 6), (count, 8)):
        expected = f"({count}, 6) or ({count}, 8)"
        raise wrong("warp", "matrices", expected, matrices.shape)
    values = None if fill is None else per_channel("warp", "fill", fill, channels, images.dtype)
    lines = upload(_lines(matrices, height, width), images.device)
    out = torch.empty_like(images)
    # Positions and indices, and values: on a device, means are computed in float64.
    is_light = interpolation == "nearest" or images.device.type == "cpu"
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


def _grid(lines: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Return x and y of where the pixels come from, float32 ``(n, H, W)``.

    They are in the units of grid_sample: -1 and 1 are the edges of the image.
    """
    affine = lines.shape[1] == 2
    x_start, y_start = (0.5 * (1 - width), 0.5 * (1 - height)) if affine else (0.5, 0.5)
    x = torch.arange(width, device=lines.device, dtype=torch.float32) + x_start
    y = torch.arange(height, device=lines.device, dtype=torch.float32)[:, None] + y_start
    from_x, from_y, offset = lines[..., None, None].unbind(2)
    # In this order, and not fused, as by torch's bmm.
    sums = [
        (x * from_x[:, row] + y * from_y[:, row]).add_(offset[:, row])
        for row in range(lines.shape[1])
    ]
    if not affine:
        sums = [sums[0].div_(sums[2]).sub_(1), sums[1].div_(sums[2]).sub_(1)]
    # From nowhere, or from far away, is from outside.
    x, y = (position.nan_to_num_(-_FAR).clamp_(-_FAR, _FAR) for position in sums[:2])
    return x, y


def _in_pixels(positions: Tensor, extent: int) -> Tensor:
    """Return positions of `_grid` in pixels, 0 for the first; at most `_MARGIN` outside."""
    # As if the two were one operation of float32: the product is exact in float64.
    pixels = (positions + 1).double().mul_(0.5 * extent).sub_(0.5).float()
    return pixels.clamp_(-_MARGIN, extent)


def _padded(images: Tensor, fill: tuple[float, ...] | None, dtype: torch.dtype) -> Tensor:
    """Return images ``(n, C, H + 4, W + 4)`` of a dtype with a margin of ``fill``."""
    count, channels, height, width = images.shape
    shape = count, channels, height + 2 * _MARGIN, width + 2 * _MARGIN
    padded = torch.zeros(shape, dtype=dtype, device=images.device)
    if fill is not None:
        colour = np.array(fill) if dtype.is_floating_point else np.rint(fill)
        padded += upload(colour, images.device).to(dtype)[:, None, None]
    padded[:, :, _MARGIN:-_MARGIN, _MARGIN:-_MARGIN] = images
    return padded


def _index(x: Tensor, y: Tensor, width: int, channels: int) -> Tensor:
    """Return the index of whole positions in a padded channel, int64 ``(n, C, H·W)``."""
    row = width + 2 * _MARGIN
    # Sums of int64 take three times as long.
    index = y.int().mul_(row).add_(x.int()).add_(_MARGIN * (row + 1)).long()
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
    if work == torch.float32 and images.device.type == "cpu" and _grid_sample_fits():
        means = _grid_sample(images.to(work), grid)
    else:
        means = _means(images, grid)
    if fill is not None:
        colour = upload(np.array(fill), images.device).to(work)[:, None, None]
        means = means[:, :-1].sub_(colour).mul_(means[:, -1:]).add_(colour)
    return means if given.is_floating_point else means.round_()


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
    pixels, row = _padded(images, None, torch.float64).flatten(2), width + 2 * _MARGIN
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
    ramp = torch.arange(4096, dtype=torch.float32)
    images = (ramp * 0.37).sin().view(1, 1, 64, 64)
    grid = (ramp * 0.61).cos().view(1, 64, 64), (ramp * 0.83).cos().view(1, 64, 64)
    return torch.equal(_grid_sample(images, grid), _means(images, grid))


@dataclass(frozen=True)
class Warping:
    """How images of a batch are warped, and what follows them: a `following.Movement`.

    ``matrices`` are those of `warp` for the images at ``places``, int64 ``(n,)``, each once. The
    others stay as they are.
    """

    count: int
    height: int
    width: int
    places: np.ndarray
    matrices: np.ndarray

    def images(self, images: Tensor, interpolation: Interpolation, fill: Fill) -> Tensor:
        """Return the warped images ``(N, C, H, W)``."""
        return change_some(
            images,
            self.places,
            lambda copies, part: warp(copies, self.matrices[part], interpolation, fill),
        )

    def points(self, points: Tensor) -> Tensor:
        """See `following.Movement`."""
        # The centres of pixels have whole numbers there, and the edges of the image here.
        return (self._moved(points + 0.5) - 0.5).to(points.dtype)

    def masks(self, masks: Tensor, fill: int) -> Tensor:
        """See `following.Movement`."""
        return self.images(masks[:, None], "nearest", fill)[:, 0]

    def boxes(self, boxes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `following.Movement`."""
        left, top, right, bottom = boxes.unbind(2)
        corners = torch.stack([left, top, right, top, right, bottom, left, bottom], 2)
        count, number = boxes.shape[:2]
        moved = self._moved(corners.view(count, 4 * number, 2)).to(boxes.dtype)
        moved = moved.reshape(count, number, 4, 2)
        extent = upload(np.array([self.width, self.height]), boxes.device).to(boxes.dtype)
        return moved.amin(2), moved.amax(2), extent

    def _moved(self, points: Tensor) -> Tensor:
        """Return where points ``(N, K, 2)`` went, float64, in pixels from the upper left corner."""
        maps = upload(self._maps(), points.device)[:, :, :, None]
        x, y = points.double().unbind(2)
        moved = maps[:, :, 0] * x[:, None] + maps[:, :, 1] * y[:, None] + maps[:, :, 2]
        return (moved[:, :2] / moved[:, 2:]).mT

    def _maps(self) -> np.ndarray:
        """Return the map of input to output coordinates for each image, ``(N, 3, 3)``."""
        backwards = np.zeros((len(self.places), 9))
        backwards[:, 8] = 1
        backwards[:, : self.matrices.shape[1]] = self.matrices
        chosen = np.linalg.inv(backwards.reshape(-1, 3, 3))
        if self.matrices.shape[1] == 6:  # they count from the centre
            to_corner = np.array([[1, 0, self.width / 2], [0, 1, self.height / 2], [0, 0, 1]])
            chosen = to_corner @ chosen @ np.linalg.inv(to_corner)
        maps = np.tile(np.eye(3), (self.count, 1, 1))
        maps[self.places] = chosen
        return maps


class Warp(Transform):
    """The base of transforms that warp images. Subclasses define `draw`."""

    interpolation: Interpolation
    fill: Fill

    @property
    def moves_pixels(self) -> bool:
        """See `Transform.moves_pixels`."""
        return True

    def draw(self, height: int, width: int, draws: Draws) -> tuple[np.ndarray, np.ndarray]:
        """Return the places of the images to warp, int64 ``(n,)``, and matrices for `warp`."""
        raise NotImplementedError

    def movement(self, images: Tensor, draws: Draws) -> Warping:
        """Return how images ``(N, C, H, W)`` move. `Prepared` has masks and such follow."""
        count, _, height, width = images.shape
        return Warping(count, height, width, *self.draw(height, width, draws))

    def apply(
        self, images: Tensor, columns: TensorsByName, draws: Draws
    ) -> tuple[Tensor, TensorsByName]:
        """Warp the images. The columns were moved before."""
        fill = self.fill
        if fill is not None:
            fill = per_channel(self, "fill", fill, images.shape[1], images.dtype)
        return self.movement(images, draws).images(images, self.interpolation, fill), columns

    def _set_pixels(self, interpolation: Any, fill: Any) -> None:
        """Check and set what is the same for all of them."""
        self.interpolation = interpolation_name(self, interpolation, "nearest", "bilinear")
        self.fill = None if fill is None else numbers(self, "fill", fill)


class RandomAffine(Warp):
    """Turn, shift, scale and shear each image at random, like torchvision's.

    ``degrees`` and ``shear`` are ranges of angles: a number ``v`` is -v to v. ``shear`` is along x;
    with four numbers, the last two are its range along y. ``translate`` is the largest shift to
    either side as a share of the width, then of the height; shifts are whole pixels. ``scale`` is a
    range of factors. None leaves the property as it is. ``center`` is (x, y) in pixels, by default
    the centre of the image.

    Images ``(N, C, H, W)`` keep shape and dtype. ``interpolation`` is "nearest" or "bilinear". What
    lies outside becomes ``fill``: one number, one for each channel, or None, in the units of the
    images. Masks, points and boxes follow; masks take the nearest pixel and their ``mask_fill``.
    Pixels are those of torchvision on CPU tensors, to the bit; see `warp`.

    >>> images = RandomAffine(15, translate=(0.1, 0.1), scale=(0.8, 1.2))(images, samples=samples)
    """

    def __init__(
        self,
        degrees: float | Sequence[float],
        translate: Sequence[float] | None = None,
        scale: Sequence[float] | None = None,
        shear: float | Sequence[float] | None = None,
        interpolation: Any = "nearest",
        fill: Fill = 0,
        center: Sequence[float] | None = None,
    ) -> None:
        self.degrees = _angles(self, "degrees", degrees)
        self.translate = translate
        if translate is not None:
            shares = tuple(translate) if isinstance(translate, Sequence) else ()
            if len(shares) != 2 or not all(is_finite(one) and 0 <= one <= 1 for one in shares):
                raise wrong(self, "translate", "a pair of numbers from 0 to 1", repr(translate))
        self.scale = scale
        if scale is not None:
            self.scale = interval(self, "scale", scale, 0)
            if self.scale[0] == 0:
                raise wrong(self, "scale", "a pair of numbers above 0", repr(scale))
        self.shear = None if shear is None else _shears(self, shear)
        self.center = _center(self, center)
        self._set_pixels(interpolation, fill)

    def draw(self, height: int, width: int, draws: Draws) -> tuple[np.ndarray, np.ndarray]:
        """Draw 0 to 5 are the angle, the shift of x and y, the factor, and the shear of x and y."""
        drawn = draws.uniform(6)
        translate = np.zeros((drawn.shape[1], 2))
        if self.translate is not None:
            largest = np.array(self.translate) * [width, height]
            translate = np.round((2 * drawn[1:3].T - 1) * largest)
        shear = np.zeros((drawn.shape[1], 2))
        for axis, ends in enumerate((self.shear or ())[i : i + 2] for i in (0, 2)):
            shear[:, axis] = _between(ends or (0, 0), drawn[4 + axis])
        matrices = affine_matrices(
            height,
            width,
            _between(self.degrees, drawn[0]),
            translate,
            _between(self.scale or (1, 1), drawn[3]),
            shear,
            self.center,
        )
        return np.arange(drawn.shape[1]), matrices


class RandomRotation(Warp):
    """Turn each image by a random angle, like torchvision's.

    ``degrees`` is the range of angles, anticlockwise: a number ``v`` is -v to v. The image keeps
    its size, so corners are lost; ``expand`` must be False. Multiples of 90 degrees around the
    centre move pixels as they are. For ``center``, ``interpolation``, ``fill``, masks, points and
    boxes see `RandomAffine`.

    >>> images = RandomRotation(15, interpolation="bilinear")(images, samples=samples)
    """

    def __init__(
        self,
        degrees: float | Sequence[float],
        interpolation: Any = "nearest",
        expand: bool = False,
        center: Sequence[float] | None = None,
        fill: Fill = 0,
    ) -> None:
        self.degrees = _angles(self, "degrees", degrees)
        if expand is not False:
            advice = "All images of a batch have one size."
            raise wrong(self, "expand", "False", repr(expand), advice)
        self.center = _center(self, center)
        self._set_pixels(interpolation, fill)

    def draw(self, height: int, width: int, draws: Draws) -> tuple[np.ndarray, np.ndarray]:
        """Draw the angle."""
        angle = self._angle(draws)
        zero = np.zeros((len(angle), 2))
        matrices = affine_matrices(
            height, width, -angle, zero, np.ones(len(angle)), zero, self.center
        )
        return np.arange(len(angle)), matrices

    def apply(
        self, images: Tensor, columns: TensorsByName, draws: Draws
    ) -> tuple[Tensor, TensorsByName]:
        """Warp the images, and turn those exactly whose angle is a multiple of 90 degrees."""
        turned, columns = super().apply(images, columns, draws)
        angle = self._angle(draws)
        quarters = (0, 1, 2, 3) if images.shape[2] == images.shape[3] else (0, 2)
        for quarter in quarters if self.center is None else ():
            places = np.flatnonzero(angle == 90 * quarter)
            if len(places):
                where = upload(places, images.device)
                turned[where] = images[where].rot90(quarter, (2, 3))
        return turned, columns

    def _angle(self, draws: Draws) -> np.ndarray:
        """Return the angles, from 0 to 360."""
        return _between(self.degrees, draws.uniform(1)[0]) % 360


class RandomPerspective(Warp):
    """See each image at a slant with share ``p``, like torchvision's.

    Each corner moves inwards by a random number of whole pixels: at most ``distortion_scale`` of
    half the width, and of half the height. Images whose corners would lie on a line stay as they
    are; so do all of one pixel in width or height. With bilinear interpolation, a position exactly
    on the border may be outside where torchvision has it inside: 6 in 10 million values. For
    ``interpolation``, ``fill``, masks, points and boxes see `RandomAffine`.

    >>> images = RandomPerspective(0.5, p=0.5)(images, samples=samples)
    """

    def __init__(
        self,
        distortion_scale: float = 0.5,
        p: float = 0.5,
        interpolation: Any = "bilinear",
        fill: Fill = 0,
    ) -> None:
        self.distortion_scale = share(self, "distortion_scale", distortion_scale)
        self.p = share(self, "p", p)
        self._set_pixels(interpolation, fill)

    def draw(self, height: int, width: int, draws: Draws) -> tuple[np.ndarray, np.ndarray]:
        """Draw 0 chooses samples, and 1 to 8 move the corners, clockwise from the upper left."""
        drawn = draws.uniform(9)
        right, bottom = width - 1, height - 1
        starts = np.array([[0, 0], [right, 0], [right, bottom], [0, bottom]], np.float64)
        half = np.array([width // 2, height // 2])
        numbers_of_shifts = (self.distortion_scale * half).astype(np.int64) + 1
        shifts = np.floor(drawn[1:].T.reshape(-1, 4, 2) * numbers_of_shifts)
        ends = starts + shifts * [[1, 1], [-1, 1], [-1, -1], [1, -1]]
        places = np.flatnonzero((drawn[0] < self.p) & ~_on_a_line(ends))
        return places, perspective_matrices(np.tile(starts, (len(places), 1, 1)), ends[places])


def _between(ends: Sequence[float], drawn: np.ndarray) -> np.ndarray:
    """Return numbers within a range from numbers from 0 to 1."""
    return ends[0] + (ends[1] - ends[0]) * drawn


def _on_a_line(corners: np.ndarray) -> np.ndarray:
    """Return whether any three of four points ``(n, 4, 2)`` lie on a line, bool ``(n,)``."""
    triples = corners[:, [[0, 1, 2], [1, 2, 3], [2, 3, 0], [3, 0, 1]]]
    (x, y), (other_x, other_y) = (
        np.moveaxis(triples[:, :, side] - triples[:, :, 0], 2, 0) for side in (1, 2)
    )
    return np.asarray((x * other_y == y * other_x).any(1))


def _angles(owner: Transform, argument: str, value: Any) -> tuple[float, float]:
    """Return the range of angles that a number or a pair stands for."""
    ends = (-value, value) if isinstance(value, Real) else value
    are_angles = isinstance(ends, Sequence) and all(map(is_finite, ends))
    if not are_angles or len(ends) != 2 or ends[0] > ends[1]:
        expected = "a number of at least 0, or a pair (low, high), low <= high"
        raise wrong(owner, argument, expected, repr(value))
    return float(ends[0]), float(ends[1])


def _shears(owner: Transform, value: Any) -> tuple[float, ...]:
    """Return the ranges along x and, if given, y: two numbers or four."""
    if isinstance(value, Sequence) and len(value) == 4:
        return (*_angles(owner, "shear", value[:2]), *_angles(owner, "shear", value[2:]))
    return _angles(owner, "shear", value)


def _center(owner: Transform, value: Any) -> tuple[float, float] | None:
    if value is None:
        return None
    if not isinstance(value, Sequence) or len(value) != 2 or not all(map(is_finite, value)):
        raise wrong(owner, "center", "a pair of numbers (x, y)", repr(value))
    return float(value[0]), float(value[1])
