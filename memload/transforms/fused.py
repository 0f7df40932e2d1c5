"""Steps that are planned for many samples at once, and those that are done in one pass."""

from collections.abc import Callable, Sequence
from textwrap import indent
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from memload.transforms.draws import Draws
from memload.transforms.following import Movement, PlannedMovement, TensorsByName
from memload.transforms.geometry import Axis, Plan
from memload.transforms.plan_reference import reference

#: How a transform is planned, and with which neighbours in a list it can be done together.
#: "painting" and "mixing" are planned, but done by themselves; "no" is not planned.
Fusion = Literal["crop", "resize", "flip", "pixels", "operations", "painting", "mixing", "no"]


class PlannedSteps:
    """The base of steps that are planned: neighbours in a list that are done together, or one step.

    ``steps`` are (position in the list, transform). What they draw is planned for many samples at
    once, and carried out for parts of them.
    """

    def __init__(self, steps: Sequence[tuple[int, Any]]) -> None:
        self.steps = list(steps)

    def __repr__(self) -> str:
        if len(self.steps) == 1:
            return repr(self.steps[0][1])
        lines = "".join(f"{step!r},\n" for _, step in self.steps)
        return f"Fused(\n{indent(lines, '    ')})"

    @property
    def moves_pixels(self) -> bool:
        """Whether one of the steps moves pixels."""
        return any(step.moves_pixels for _, step in self.steps)

    def takes(self, step: Any) -> bool:
        """Return whether one more step can join. None can, unless a subclass says so."""
        return False

    def plan(
        self,
        images: Tensor,
        count: int,
        draws: Callable[[int], Draws],
        memory_format: torch.memory_format,
    ) -> Any:
        """Return the plan for ``count`` samples whose images are like these.

        ``draws(position)`` returns the random numbers of the step at that position.
        """
        raise NotImplementedError

    def movement(self, plan: Any, first_in_plan: int, count: int) -> Movement:
        """Return how images move that are ``count`` samples of a plan from ``first_in_plan`` on."""
        raise NotImplementedError

    def run(
        self, images: Tensor, columns: TensorsByName, plan: Any, first_in_plan: int
    ) -> tuple[Tensor, TensorsByName]:
        """Return what becomes of images ``(N, C, H, W)`` and of their columns.

        They are the plan's samples from ``first_in_plan`` on. The columns have followed them.
        """
        raise NotImplementedError


class Fused(PlannedSteps):
    """Steps in one pass over memory: at most one crop and one resize, flips, then maps of pixels.

    Each transform has a method ``add_to(plan, draws)``.
    """

    def takes(self, step: Any) -> bool:
        """See `PlannedSteps.takes`.

        A flip can come anywhere, since it moves whole pixels. A second crop may have another fill,
        and a second resize rounds again.
        """
        fusions = [own.fuses_as for _, own in self.steps]
        if step.fuses_as in ("crop", "resize"):
            return step.fuses_as not in fusions and "pixels" not in fusions
        return step.fuses_as in ("flip", "pixels")

    def plan(
        self,
        images: Tensor,
        count: int,
        draws: Callable[[int], Draws],
        memory_format: torch.memory_format,
    ) -> Plan:
        """See `PlannedSteps.plan`."""
        _, channels, height, width = images.shape
        plan = Plan(
            Axis(height, count),
            Axis(width, count),
            fill=(0.0,) * channels,
            factor=np.ones(channels),
            offset=np.zeros(channels),
            dtype=images.dtype,
            memory_format=memory_format,
            bicubic=np.zeros(count, bool),
        )
        for position, step in self.steps:
            step.add_to(plan, draws(position))
        return plan

    def movement(self, plan: Plan, first_in_plan: int, count: int) -> Movement:
        """See `PlannedSteps.movement`."""
        return PlannedMovement(plan, first_in_plan)

    def run(
        self, images: Tensor, columns: TensorsByName, plan: Plan, first_in_plan: int
    ) -> tuple[Tensor, TensorsByName]:
        """See `PlannedSteps.run`."""
        if images.dtype == torch.uint8 and plan.runs_in_kernel(images):
            from memload.transforms.plan_kernel import run

            return run(images, plan, first_in_plan), columns
        return reference(images, plan, first_in_plan), columns


def group(transforms: Sequence[Any]) -> list[tuple[int, Any]]:
    """Return (position, step). Neighbours are put together under the first position."""
    groups: list[tuple[int, Any]] = []
    for position, step in enumerate(transforms):
        last = groups[-1][1] if groups else None
        if getattr(step, "fuses_as", "no") == "no":
            groups.append((position, step))
        elif isinstance(last, PlannedSteps) and last.takes(step):
            last.steps.append((position, step))
        else:
            groups.append((position, step.planned(position)))
    return groups
