"""Neighbours in a list that are done in one pass: crops, resizes, flips and maps of pixels."""

from collections.abc import Sequence
from textwrap import indent
from typing import Any

from torch import Tensor

from memload.transforms.batch import Batch
from memload.transforms.crops_in_torch import run_plan
from memload.transforms.draws import Drawn, Draws
from memload.transforms.geometry import Plan, fits_kernels


class Pass:
    """The base of neighbours in a list that are done together, or one step alone.

    ``steps`` are (position in the list, transform). A pass has the verbs of a `Transform`.
    """

    def __init__(self, steps: Sequence[tuple[int, Any]]) -> None:
        self.steps = list(steps)

    @property
    def moves_pixels(self) -> bool:
        """Whether any step does."""
        return any(step.moves_pixels for _, step in self.steps)

    def __repr__(self) -> str:
        if len(self.steps) == 1:
            return repr(self.steps[0][1])
        lines = "".join(f"{step!r},\n" for _, step in self.steps)
        return f"Fused(\n{indent(lines, '    ')})"

    def takes(self, step: Any) -> bool:
        """Return whether one more step can join."""
        raise NotImplementedError

    def draw(self, draws: Draws, images: Tensor) -> dict[str, Any]:
        """Return what all steps draw; see `Transform.draw`."""
        raise NotImplementedError

    def apply(self, batch: Batch, drawn: Drawn) -> Batch:
        """Return what becomes of a batch; see `Transform.apply`."""
        raise NotImplementedError


def group(transforms: Sequence[Any]) -> list[tuple[int, Any]]:
    """Return (position, step). Neighbours are put together under the first position."""
    groups: list[tuple[int, Any]] = []
    for position, step in enumerate(transforms):
        last = groups[-1][1] if groups else None
        pass_type = getattr(step, "pass_type", None)
        if pass_type is None:
            groups.append((position, step))
        elif isinstance(last, Pass) and last.takes(step):
            last.steps.append((position, step))
        else:
            groups.append((position, pass_type([(position, step)])))
    return groups


class CropPass(Pass):
    """At most one crop and one resize, flips, then maps of pixels, in one pass over memory.

    Each transform has a method ``add_to(plan, draws)``.
    """

    def takes(self, step: Any) -> bool:
        """See `Pass.takes`.

        A flip can come anywhere, since it moves whole pixels. A second crop is not taken, as it may
        have another fill, nor a second resize, as it rounds again. Behind a resize, a crop that
        mirrors what lies outside is not taken: the kernel has no resized pixels to mirror.
        """
        kinds = [own.kind for _, own in self.steps]
        if step.kind in ("crop", "resize"):
            mirrors = getattr(step, "padding_mode", "constant") != "constant"
            return not {step.kind, "pixels"} & {*kinds} and not (mirrors and "resize" in kinds)
        return step.kind in ("flip", "pixels")

    def draw(self, draws: Draws, images: Tensor) -> dict[str, Any]:
        """See `Pass.draw`."""
        plan = self.plan(draws, images)
        resized = plan.height.resized or 0, plan.width.resized or 0
        return {
            "plan": plan,
            "boxes": plan.boxes(),
            "maps": plan.maps(),
            "matrices": plan.matrices,
            "shown": plan.shown,
            "fits_kernels": fits_kernels(images, *plan.size, *resized),
        }

    def plan(self, draws: Draws, images: Tensor) -> Plan:
        """Return what all steps do with images like these."""
        plan = Plan.unchanged(images, len(draws))
        for position, step in self.steps:
            step.add_to(plan, draws.at_position(position))
        return plan

    def apply(self, batch: Batch, drawn: Drawn) -> Batch:
        """See `Pass.apply`."""
        plan: Plan = drawn.on_host("plan")
        if batch.followers and self.moves_pixels:
            shown = drawn["shown"] if plan.resizes else None
            batch = batch.follow(
                drawn["matrices"], size=plan.size, shown=shown, padding_mode=plan.padding_mode
            )
        if drawn.on_host("fits_kernels"):
            from memload.transforms.kernels.crops import crop

            boxes, maps = drawn["boxes"], drawn.of_all("maps")
            return batch.with_images(crop(batch.images, plan, boxes, maps, batch.memory_format))
        return batch.with_images(
            run_plan(batch.images, plan, drawn.on_host("boxes"), batch.memory_format)
        )
