"""Neighbours in a list of transforms that make one plan together."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from memload.transforms.draws import Draws
from memload.transforms.geometry import Axis, Plan

#: Columns of a batch, ``(N, …)`` each.
TensorsByName = dict[str, Tensor]
#: How a transform can be fused with its neighbours in a list; "no" if it cannot.
Fusion = Literal["crop", "resize", "flip", "pixels", "no"]


class Fused:
    """Steps that are done together: at most one crop and one resize, flips, then maps of pixels.

    ``steps`` are (position in the list, transform). Each transform has a method
    ``add_to(plan, draws)``.
    """

    def __init__(self, steps: Sequence[tuple[int, Any]]) -> None:
        self.steps = list(steps)

    def __repr__(self) -> str:
        return f"Fused({', '.join(repr(step) for _, step in self.steps)})"

    @property
    def moves_pixels(self) -> bool:
        """Whether one of the steps is a crop, a resize or a flip."""
        return any(step.moves_pixels for _, step in self.steps)

    def takes(self, fusion: Fusion) -> bool:
        """Return whether one more step can join.

        A flip can come anywhere, since it moves whole pixels. A second crop may have another fill,
        and a second resize rounds again.
        """
        fusions = [step.fuses_as for _, step in self.steps]
        if fusion in ("crop", "resize"):
            return fusion not in fusions and "pixels" not in fusions
        return fusion != "no"

    def plan(
        self,
        images: Tensor,
        count: int,
        draws: Callable[[int], Draws],
        memory_format: torch.memory_format,
    ) -> Plan:
        """Return the plan for ``count`` samples whose images are like these.

        ``draws(position)`` returns the random numbers of the step at that position.
        """
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


def group(transforms: Sequence[Any]) -> list[tuple[int, Any]]:
    """Return (position, step). Neighbours are fused where possible, under the first position."""
    groups: list[tuple[int, Any]] = []
    for position, step in enumerate(transforms):
        fusion: Fusion = getattr(step, "fuses_as", "no")
        last = groups[-1][1] if groups else None
        if isinstance(last, Fused) and last.takes(fusion):
            last.steps.append((position, step))
        elif fusion == "no":
            groups.append((position, step))
        else:
            groups.append((position, Fused([(position, step)])))
    return groups
