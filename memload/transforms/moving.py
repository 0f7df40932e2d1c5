"""How images move by matrices, and what follows them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from memload.transforms.geometry import runs_in_operations_kernel
from memload.transforms.operations_plan import MOVES, OperationStep
from memload.transforms.sub_batches import change_some
from memload.transforms.warping import Fill, Interpolation, matrices_of, warp
from memload.upload import upload


def move(images: Tensor, matrices: np.ndarray, interpolation: Interpolation, fill: Fill) -> Tensor:
    """Return what `warping.warp` returns. On CUDA, a kernel does it to uint8 images."""
    if not runs_in_operations_kernel(images):
        return warp(images, matrices, interpolation, fill)
    from memload.transforms import operations_kernel

    return operations_kernel.warp(images, matrices, interpolation, fill)


@dataclass(frozen=True)
class MatrixMovement:
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
            lambda copies, part: move(copies, self.matrices[part], interpolation, fill),
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


class OperationsMovement:
    """How images move by operations, one step after another: a `following.Movement`."""

    def __init__(self, steps: Sequence[OperationStep], count: int, height: int, width: int) -> None:
        size = count, height, width
        self._movements = []
        whole = np.tile(np.eye(3), (count, 1, 1))
        for step in steps:
            matrices = matrices_of(step, height, width)
            places = np.flatnonzero(MOVES[step.operation])
            self._movements.append(MatrixMovement(*size, places, matrices[places]))
            # Matrices map the output to the input, so the last step comes first.
            whole[:, :2] = whole[:, :2] @ _squares(matrices)
        self._whole = MatrixMovement(*size, np.arange(count), whole[:, :2].reshape(count, 6))

    def points(self, points: Tensor) -> Tensor:
        """See `following.Movement`."""
        return self._whole.points(points)

    def masks(self, masks: Tensor, fill: int) -> Tensor:
        """See `following.Movement`. What leaves the image in between does not come back."""
        moved = masks
        for movement in self._movements:
            moved = movement.masks(moved, fill)
        return masks.clone() if moved is masks else moved

    def boxes(self, boxes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `following.Movement`."""
        return self._whole.boxes(boxes)


def _squares(matrices: np.ndarray) -> np.ndarray:
    """Return affine maps ``(n, 6)`` as matrices ``(n, 3, 3)``."""
    last_rows = np.tile([[0.0, 0.0, 1.0]], (len(matrices), 1, 1))
    return np.concatenate([matrices.reshape(-1, 2, 3), last_rows], 1)
