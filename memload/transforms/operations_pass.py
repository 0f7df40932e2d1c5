"""Transforms that are operations, drawn for each sample, and neighbours of them in a list."""

from typing import Any

import numpy as np
from torch import Tensor

from memload.transforms.arguments import interpolation_name, numbers, per_channel
from memload.transforms.batch import Batch
from memload.transforms.crops_in_torch import run_plan
from memload.transforms.draws import Drawn, Draws
from memload.transforms.geometry import Plan, fits_kernels
from memload.transforms.operation_step import Fill, Interpolation, OperationStep
from memload.transforms.operations import change_each
from memload.transforms.passes import Pass
from memload.transforms.transform import Transform

#: The kernel keeps the rows that it sums in registers, which are too few for larger blurs.
_LARGEST_BLUR_IN_KERNEL = 41


class OperationsPass(Pass):
    """Operations that are neighbours in a list, and maps of pixels such as Normalize at the end."""

    def takes(self, step: Any) -> bool:
        """See `Pass.takes`."""
        has_maps = self.steps[-1][1].kind == "pixels"
        return step.kind == "pixels" or (step.kind == "operations" and not has_maps)

    def draw(self, draws: Draws, images: Tensor) -> dict[str, Any]:
        """See `Pass.draw`."""
        steps: list[OperationStep] = []
        plan = Plan.unchanged(images, len(draws))
        for position, step in self.steps:
            if step.kind == "pixels":
                step.add_to(plan, draws.at_position(position))
            else:
                steps += step.operation_steps(draws.at_position(position), images)
        moving = [step.matrices for step in steps if step.matrices is not None]
        drawn: dict[str, Any] = {
            f"matrices {number}": matrices for number, matrices in enumerate(moving)
        }
        drawn |= {"plan": plan, "maps": plan.maps(), "moves": len(moving), "steps": steps}
        drawn["passes"] = None
        sizes = [size for step in steps for size in step.kernel_size]
        is_small = max(sizes, default=1) <= _LARGEST_BLUR_IN_KERNEL
        if images.shape[1] in (1, 3) and fits_kernels(images) and is_small:
            from memload.transforms.kernels.operations import passes_of

            drawn["passes"], numbers = passes_of(steps, plan, images.shape[1])
            drawn |= {f"numbers {number}": each for number, each in enumerate(numbers)}
        return drawn

    def apply(self, batch: Batch, drawn: Drawn) -> Batch:
        """See `Pass.apply`."""
        images, plan = batch.images, drawn.on_host("plan")
        if batch.followers:
            moves = [drawn[f"matrices {number}"] for number in range(drawn.on_host("moves"))]
            batch = batch.follow(*moves)
        if (passes := drawn.on_host("passes")) is not None:
            of_channels = drawn.of_all("maps")
            for number, run in enumerate(passes):
                images = run(images, drawn[f"numbers {number}"], of_channels, batch.memory_format)
            return batch.with_images(images)
        steps = [step.at(drawn.samples) for step in drawn.on_host("steps")]
        images = change_each(images, steps)
        if plan.maps_pixels or plan.dtype != images.dtype:
            boxes = np.zeros((len(images), 8), np.int32)  # of none that moves
            images = run_plan(images, plan, boxes, batch.memory_format)
        return batch.with_images(images)


class OperationsTransform(Transform):
    """The base of transforms that are operations. Subclasses define `operation_steps`."""

    pass_type, kind = OperationsPass, "operations"
    #: Whether values may be below black or above white, as after Normalize.
    takes_normalized = False

    def operation_steps(self, draws: Draws, images: Tensor) -> list[OperationStep]:
        """Return what is done to images like these, one step after another.

        Only the shape ``(any, C, H, W)`` and the dtype of ``images`` matter. Raises ValueError for
        images that cannot be changed, whatever is drawn.
        """
        raise NotImplementedError


class WarpingTransform(OperationsTransform):
    """The base of operations that may move pixels. What comes into view is ``fill``."""

    moves_pixels = True

    def __init__(self, interpolation: Any, fill: Fill) -> None:
        self.interpolation: Interpolation = interpolation_name(
            self, interpolation, "nearest", "bilinear"
        )
        self.fill: Fill = None if fill is None else numbers(self, "fill", fill)

    def check_fill(self, images: Tensor) -> None:
        """Raise ValueError for a fill that is not one of images like these."""
        if self.fill is not None:
            per_channel(self, "fill", self.fill, images.shape[1], images.dtype)
