"""Transforms that draw an operation and a magnitude for each sample, and those of a list together.

draw ─▶ Drawn: an operation and ─▶ DrawnSteps: ─▶ on CUDA, uint8   ─▶ operations_kernel
        a magnitude for each       neighbours     ─▶ anything else ─▶ operations.change_each,
        sample                     in a list                          the reference
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memload.transforms.drawn import Drawn, DrawnPlan
from memload.transforms.draws import Draws
from memload.transforms.filtering import fits_kernel
from memload.transforms.following import Movement
from memload.transforms.fused import Fused, Fusion, Together
from memload.transforms.geometry import runs_in_operations_kernel
from memload.transforms.moving import DrawnMovement
from memload.transforms.operations import change_each
from memload.transforms.plan_reference import reference
from memload.transforms.transform import Transform


class Drawing(Transform):
    """The base of transforms that draw an operation for each sample. Subclasses define `draw`."""

    fuses_as: Fusion = "drawn"

    def draw(self, draws: Draws, images: Tensor) -> list[Drawn]:
        """Return what is done to images like these, one operation after another.

        Only the shape ``(any, C, H, W)`` and the dtype of ``images`` matter.
        """
        raise NotImplementedError

    def check(self, images: Tensor) -> None:
        """Raise ValueError for images that cannot be changed, whatever is drawn."""

    def together(self, position: int) -> "DrawnSteps":
        """See `Transform.together`."""
        return DrawnSteps([(position, self)])


class DrawnSteps(Together):
    """Neighbours in a list that draw operations, done in as few passes as possible.

    Maps of pixels, such as Normalize, can join at the end.
    """

    def __repr__(self) -> str:
        steps = ", ".join(repr(step) for _, step in self.steps)
        return f"Fused({steps})" if len(self.steps) > 1 else steps

    def takes(self, step: Any) -> bool:
        """See `Together.takes`."""
        has_maps = self.steps[-1][1].fuses_as == "pixels"
        return step.fuses_as == "pixels" or (step.fuses_as == "drawn" and not has_maps)

    def plan(
        self,
        images: Tensor,
        count: int,
        draws: Callable[[int], Draws],
        memory_format: torch.memory_format,
    ) -> DrawnPlan:
        """See `Together.plan`."""
        steps: list[Drawn] = []
        maps = [entry for entry in self.steps if entry[1].fuses_as == "pixels"]
        for position, step in self.steps[: len(self.steps) - len(maps)]:
            step.check(images)
            steps += step.draw(draws(position), images)
        after = Fused(maps).plan(images, count, draws, memory_format)
        channels, height, width = images.shape[1:]
        return DrawnPlan(steps, after, count, channels, height, width, images.dtype)

    def movement(self, plan: DrawnPlan, first_in_plan: int, count: int) -> Movement:
        """See `Together.movement`."""
        return DrawnMovement(plan.steps_of(first_in_plan, count), count, plan.height, plan.width)

    def run(self, images: Tensor, plan: DrawnPlan, first_in_plan: int) -> Tensor:
        """See `Together.run`."""
        if runs_in_operations_kernel(images) and all(
            fits_kernel(step.kernel_size) for step in plan.steps
        ):
            from memload.transforms.operations_kernel import run

            return run(images, plan, first_in_plan)
        changed = change_each(images, plan.steps_of(first_in_plan, len(images)))
        return reference(changed, plan.after, first_in_plan) if plan.maps_pixels else changed
