"""Crop, resize, flip, normalise, cast and change the layout in one pass over memory."""

import functools
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from memload.transforms.arguments import per_channel
from memload.transforms.draws import Draws
from memload.transforms.geometry import Axis, Plan
from memload.transforms.reference import reference
from memload.upload import upload

Columns = dict[str, Tensor]
#: How a transform can be fused with its neighbours in a list; "no" if it cannot.
Fusion = Literal["crop", "resize", "flip", "pixels", "no"]


class MovesPixels:
    """A crop, resize or flip: a transform that says where pixels come from."""

    fuses_as: ClassVar[Fusion]
    antialias = True
    #: The value of pixels outside of the image, or one for each channel.
    fill: float | Sequence[float] = 0

    def add_to(self, height: Axis, width: Axis, draws: Draws) -> None:
        """Add the step to both axes."""
        raise NotImplementedError


class MapsPixels:
    """A transform that makes ``factor · pixel + offset`` of each pixel."""

    fuses_as: ClassVar[Fusion] = "pixels"

    def affine(
        self, is_uint8: bool, channels: int
    ) -> tuple[Sequence[float], Sequence[float], torch.dtype | None]:
        """Return the factor and the offset of each channel, and the dtype of the output.

        None as the dtype means float32 for uint8 images, and the same dtype for floats.
        """
        raise NotImplementedError


class Fused:
    """Steps that are done together: at most one crop and one resize, flips, then maps of pixels.

    ``steps`` are (position in the list, transform).
    """

    def __init__(self, steps: Sequence[tuple[int, Any]]) -> None:
        self.steps = tuple(steps)
        self._moves = [pair for pair in steps if isinstance(pair[1], MovesPixels)]
        self._maps = [step for _, step in steps if isinstance(step, MapsPixels)]

    def __repr__(self) -> str:
        return f"Fused({', '.join(repr(step) for _, step in self.steps)})"

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
        channels, *size = images.shape[1:]
        height, width = (Axis(extent, count) for extent in size)
        antialias, fill = True, (0.0,) * channels
        for position, step in self._moves:
            step.add_to(height, width, draws(position))
            if step.fuses_as == "resize":
                antialias = step.antialias
            if step.fuses_as == "crop":
                fill = per_channel(step, "fill", step.fill, channels, images.dtype)
        affine, dtype = self._affine(channels, images.dtype)
        return Plan(height, width, antialias, fill, affine, dtype, memory_format)

    def __call__(
        self,
        images: Tensor,
        columns: Columns,
        plan: Plan,
        first_in_plan: int,
        points: Sequence[str],
    ) -> tuple[Tensor, Columns]:
        """Carry out a plan for images that are its samples from ``first_in_plan``.

        ``points`` are the names of the columns that follow the pixels.
        """
        if points:
            samples = slice(first_in_plan, first_in_plan + images.shape[0])
            moved = {name: _move_points(columns[name], plan, samples) for name in points}
            columns = columns | moved
        if images.is_cuda and images.dtype == torch.uint8 and plan.fits_kernel and _has_triton():
            from memload.transforms.kernel import run

            return run(images, plan, first_in_plan), columns
        return reference(images, plan, first_in_plan), columns

    def _affine(self, channels: int, dtype: torch.dtype) -> tuple[np.ndarray | None, torch.dtype]:
        """Return the affine maps of all steps as one, and the dtype of the output: see `Plan`."""
        # A few numbers of Python, since each call of NumPy takes as long as all of them.
        factors, offsets = [1.0] * channels, [0.0] * channels
        is_float, is_uint8 = dtype.is_floating_point, dtype == torch.uint8
        for step in self._maps:
            next_factors, next_offsets, cast = step.affine(is_uint8, channels)
            offsets = [
                offset * factor + next_offset
                for offset, factor, next_offset in zip(
                    offsets, next_factors, next_offsets, strict=True
                )
            ]
            factors = [one * other for one, other in zip(factors, next_factors, strict=True)]
            dtype = cast or (torch.float32 if is_uint8 else dtype)
            is_uint8 = False
        if is_float:  # the offset comes first
            offsets = [offset / factor for offset, factor in zip(offsets, factors, strict=True)]
        if all(factor == 1 for factor in factors) and not any(offsets):
            return None, dtype
        return np.array([factors, offsets], np.float32), dtype


def group(transforms: Sequence[Any]) -> list[tuple[int, Any]]:
    """Return (position, step). Neighbours are fused where possible, under the first position."""
    groups: list[tuple[int, Any]] = []
    run: list[tuple[int, Any]] = []

    def end_run() -> None:
        if run:
            groups.append((run[0][0], Fused(tuple(run))))
            run.clear()

    for position, step in enumerate(transforms):
        fusion: Fusion = getattr(step, "fuses_as", "no")
        if not _can_follow(fusion, [other.fuses_as for _, other in run]):
            end_run()
        if fusion == "no":
            groups.append((position, step))
        else:
            run.append((position, step))
    end_run()
    return groups


def _can_follow(fusion: Fusion, fusions: Sequence[Fusion]) -> bool:
    """Return whether a step can join the pass of others.

    A flip can come anywhere, since it moves whole pixels. A second crop may have another fill, and
    a second resize rounds again.
    """
    if fusion in ("crop", "resize"):
        return fusion not in fusions and "pixels" not in fusions
    return fusion != "no"


def _move_points(points: Tensor, plan: Plan, samples: slice) -> Tensor:
    """Move points ``(N, K, 2)``, x and y, to where the pixels below them went."""
    maps = [np.stack(axis.affine(), 1) for axis in (plan.width, plan.height)]
    both = np.stack(maps, 2)[samples, :, np.newaxis]
    factor, offset = upload(both, points.device).to(points.dtype).unbind(1)
    return points * factor + offset


@functools.cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
