"""Transforms that are operations, drawn for each sample, and neighbours of them in a list.

operation_steps ─▶ OperationStep: an operation and ─▶ FusedOperations: neighbours in a list
                   a magnitude for each sample          │ OperationsPlan
                                                        ├─▶ on CUDA, uint8: operations_kernel
                                                        └─▶ elsewhere: operations_reference
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memload.transforms.draws import Draws
from memload.transforms.filtering import fits_kernel
from memload.transforms.following import Movement, TensorsByName
from memload.transforms.fused import Fused, Fusion, PlannedSteps
from memload.transforms.geometry import runs_in_operations_kernel
from memload.transforms.moving import OperationsMovement
from memload.transforms.operations_plan import OperationsPlan, OperationStep
from memload.transforms.operations_reference import change_each
from memload.transforms.plan_reference import reference
from memload.transforms.transform import Transform


class OperationsTransform(Transform):
    """The base of transforms that are operations. Subclasses define `operation_steps`."""

    fuses_as: Fusion = "operations"
    #: Whether values may be below black or above white, as after Normalize.
    takes_normalized = False

    def operation_steps(self, draws: Draws, images: Tensor) -> list[OperationStep]:
        """Return the operations for images like these, one step after another.

        Only the shape ``(any, C, H, W)`` and the dtype of ``images`` matter.
        """
        raise NotImplementedError

    def check(self, images: Tensor) -> None:
        """Raise ValueError for images that cannot be changed, whatever is drawn."""

    def planned(self, position: int) -> PlannedSteps:
        """See `Transform.planned`."""
        return FusedOperations([(position, self)])


class FusedOperations(PlannedSteps):
    """Operations that are neighbours in a list, done in as few passes as possible.

    Maps of pixels, such as Normalize, can join at the end.
    """

    def takes(self, step: Any) -> bool:
        """See `PlannedSteps.takes`."""
        has_maps = self.steps[-1][1].fuses_as == "pixels"
        return step.fuses_as == "pixels" or (step.fuses_as == "operations" and not has_maps)

    def plan(
        self,
        images: Tensor,
        count: int,
        draws: Callable[[int], Draws],
        memory_format: torch.memory_format,
    ) -> OperationsPlan:
        """See `PlannedSteps.plan`."""
        steps: list[OperationStep] = []
        maps = [entry for entry in self.steps if entry[1].fuses_as == "pixels"]
        for position, step in self.steps[: len(self.steps) - len(maps)]:
            step.check(images)
            steps += step.operation_steps(draws(position), images)
        after = Fused(maps).plan(images, count, draws, memory_format)
        channels, height, width = images.shape[1:]
        return OperationsPlan(steps, after, count, channels, height, width, images.dtype)

    def movement(self, plan: OperationsPlan, first_in_plan: int, count: int) -> Movement:
        """See `PlannedSteps.movement`."""
        steps = plan.steps_of(first_in_plan, count)
        return OperationsMovement(steps, count, plan.height, plan.width)

    def run(
        self, images: Tensor, columns: TensorsByName, plan: OperationsPlan, first_in_plan: int
    ) -> tuple[Tensor, TensorsByName]:
        """See `PlannedSteps.run`."""
        if runs_in_operations_kernel(images) and all(
            fits_kernel(step.kernel_size) for step in plan.steps
        ):
            from memload.transforms.operations_kernel import run

            return run(images, plan, first_in_plan), columns
        images = change_each(images, plan.steps_of(first_in_plan, len(images)))
        if plan.maps_pixels:
            images = reference(images, plan.after, first_in_plan)
        return images, columns
