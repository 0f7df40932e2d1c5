"""RandomAffine, RandomRotation and RandomPerspective: a matrix for each sample."""

from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np
from torch import Tensor

from memload.transforms.arguments import (
    interval,
    is_finite,
    share,
    wrong,
)
from memload.transforms.draws import Draws
from memload.transforms.operation_step import Fill, OperationStep
from memload.transforms.operations_pass import WarpingTransform
from memload.transforms.transform import Transform
from memload.transforms.warping import affine_matrices, perspective_matrices


class Warp(WarpingTransform):
    """The base of transforms that warp images. Subclasses define `matrices`."""

    takes_normalized = True

    def matrices(self, draws: Draws, height: int, width: int) -> np.ndarray:
        """Return where the pixels of each image come from, float64 ``(N, 3, 3)``; see `warp`."""
        raise NotImplementedError

    def operation_steps(self, draws: Draws, images: Tensor) -> list[OperationStep]:
        """See `OperationsTransform.operation_steps`."""
        self.check_fill(images)
        matrices = self.matrices(draws, images.shape[2], images.shape[3])
        return [OperationStep.warp(matrices, self.interpolation, self.fill)]


class RandomAffine(Warp):
    """Turn, shift, scale and shear each image at random, like torchvision's.

    ``degrees`` and ``shear`` are ranges of angles: a number ``v`` is -v to v. ``shear`` is along x;
    with four numbers, the last two are its range along y. ``translate`` is the largest shift to
    either side as a share of the width, then of the height; shifts are whole pixels. ``scale`` is a
    range of factors. None leaves the property as it is. ``center`` is (x, y) in pixels, by default
    the centre of the image.

    Images ``(N, C, H, W)`` keep shape and dtype. ``interpolation`` is "nearest" or "bilinear". What
    lies outside becomes ``fill``: one number, one for each channel, or None, in the units of the
    images; for uint8, fractions are rounded. Masks, points and boxes follow; masks take the nearest
    pixel and their ``mask_fill``. Pixels come from where torchvision takes them, within 1/1000 of
    a pixel; see `warp`.

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
        self.translate = None
        if translate is not None:
            self.translate = shares = tuple(translate) if isinstance(translate, Sequence) else ()
            if len(shares) != 2 or not all(is_finite(one) and 0 <= one <= 1 for one in shares):
                raise wrong(self, "translate", "a pair of numbers from 0 to 1", repr(translate))
        self.scale = scale
        if scale is not None:
            self.scale = interval(self, "scale", scale, 0)
            if self.scale[0] == 0:
                raise wrong(self, "scale", "a pair of numbers above 0", repr(scale))
        self.shear = None if shear is None else _shears(self, shear)
        self.center = _center(self, center)
        super().__init__(interpolation, fill)

    def matrices(self, draws: Draws, height: int, width: int) -> np.ndarray:
        """See `Warp.matrices`.

        Draws 0 to 5 are the angle, the shifts of x and y, the factor, and the shears of both.
        """
        uniform = draws.uniform(6)
        translate = np.zeros((uniform.shape[1], 2))
        if self.translate is not None:
            largest = np.array(self.translate) * [width, height]
            translate = np.round((2 * uniform[1:3].T - 1) * largest)
        along_x, along_y = (self.shear or ())[:2], (self.shear or ())[2:]
        shear_x = _between(along_x or (0, 0), uniform[4])
        shear_y = _between(along_y or (0, 0), uniform[5])
        return affine_matrices(
            height,
            width,
            _between(self.degrees, uniform[0]),
            translate,
            _between(self.scale or (1, 1), uniform[3]),
            np.stack([shear_x, shear_y], 1),
            self.center,
        )


class RandomRotation(Warp):
    """Turn each image by a random angle, like torchvision's.

    ``degrees`` is the range of angles, anticlockwise: a number ``v`` is -v to v. The image keeps
    its size, so corners are lost; ``expand`` must be False. For ``center``, ``interpolation``,
    ``fill``, masks, points and boxes see `RandomAffine`.

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
        super().__init__(interpolation, fill)

    def matrices(self, draws: Draws, height: int, width: int) -> np.ndarray:
        """See `Warp.matrices`. Draw 0 is the angle."""
        angle = -_between(self.degrees, draws.uniform(1)[0]) % 360
        zero, one = np.zeros((len(angle), 2)), np.ones(len(angle))
        return affine_matrices(height, width, angle, zero, one, zero, self.center)


class RandomPerspective(Warp):
    """See each image at a slant with share ``p``, like torchvision's.

    Each corner moves inwards by a random number of whole pixels: at most ``distortion_scale`` of
    half the width, and of half the height. Images whose corners would lie on a line stay as they
    are, and so do those whose corner would come from infinitely far away, and all of one pixel in
    width or height. For ``interpolation``, ``fill``, masks, points
    and boxes see `RandomAffine`.

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
        super().__init__(interpolation, fill)

    def matrices(self, draws: Draws, height: int, width: int) -> np.ndarray:
        """See `Warp.matrices`.

        Draw 0 chooses samples, and 1 to 8 move the corners, clockwise from the upper left.
        """
        uniform = draws.uniform(9)
        right, bottom = width - 1, height - 1
        starts = np.array([[0, 0], [right, 0], [right, bottom], [0, bottom]], np.float64)
        half = np.array([width // 2, height // 2])
        numbers_of_shifts = (self.distortion_scale * half).astype(np.int64) + 1
        shifts = np.floor(uniform[1:].T.reshape(-1, 4, 2) * numbers_of_shifts)
        ends = starts + shifts * [[1, 1], [-1, 1], [-1, -1], [1, -1]]
        places = np.flatnonzero((uniform[0] < self.p) & ~_on_a_line(ends))
        matrices = np.tile(np.eye(3), (len(ends), 1, 1))
        starts = np.tile(starts, (len(places), 1, 1))
        matrices[places] = perspective_matrices(starts, ends[places])
        return matrices


def _between(ends: Sequence[float], uniform: np.ndarray) -> np.ndarray:
    """Return numbers within a range from numbers from 0 to 1."""
    return ends[0] + (ends[1] - ends[0]) * uniform


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
