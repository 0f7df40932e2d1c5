"""Columns that follow the images: points, masks and boxes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from memload.transforms.arguments import describe, wrong
from memload.transforms.geometry import Plan
from memload.transforms.plan_reference import reference_masks
from memload.wording import listed, shape_text

#: Columns of a batch, ``(N, …)`` each.
TensorsByName = dict[str, Tensor]
#: The kinds of columns that follow the images. `Compose` has an argument of each name.
KINDS = ("points", "masks", "boxes")
#: torch can do little with these, so masks of them are moved as signed integers of the same bits.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


class Movement(Protocol):
    """How the pixels of a batch move, for what follows them.

    That of a crop, a resize or a flip is a `PlannedMovement`. Other transforms that move pixels
    have a method ``movement(images, draws)``, which returns one.
    """

    def points(self, points: Tensor) -> Tensor:
        """Return points ``(N, K, 2)`` where the pixels below them went."""

    def masks(self, masks: Tensor, fill: int) -> Tensor:
        """Return masks ``(N, H, W)`` of signed integers or uint8 that moved; ``fill`` outside."""

    def boxes(self, boxes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return where boxes ``(N, K, 4)`` went, and the size of the images.

        These are the smallest and the largest x and y, ``(N, K, 2)``, and the width and height.
        """


@dataclass(frozen=True)
class Followers:
    """The names of the columns that all that moves pixels moves together with the images.

    For their shapes, ``mask_fill`` and ``min_area`` see `Compose`.
    """

    points: tuple[str, ...] = ()
    masks: tuple[str, ...] = ()
    boxes: tuple[str, ...] = ()
    mask_fill: int = 255
    min_area: float = 0.0

    @classmethod
    def of(cls, facts: Mapping[str, Any], **options: Any) -> "Followers":
        """Return those that ``facts`` names by `KINDS`. What is missing there, or None, is none."""
        names: dict[str, Any] = {kind: tuple(facts.get(kind) or ()) for kind in KINDS}
        return cls(**names, **options)

    def __bool__(self) -> bool:
        return bool(self.points or self.masks or self.boxes)

    def missing(self, columns: Mapping[str, Any]) -> list[str]:
        """Return which columns are not there, and why they have to be, for messages."""
        return [
            f"{name!r}, since {kind} names it"
            for kind in KINDS
            for name in getattr(self, kind)
            if name not in columns
        ]

    def check(
        self, owner: object, columns: Mapping[str, Any], count: int, after: str = ""
    ) -> TensorsByName:
        """Check the columns of ``count`` samples. Return points and boxes, as floats.

        ``after`` is " after " and the step that they come from, if it is not the first.
        """
        checked: TensorsByName = {}
        for names, argument, size in ((self.points, "points", 2), (self.boxes, "boxes", 4)):
            for name in names:
                column: Any = columns.get(name)
                if not _has_shape(column, (count, None, size)):
                    expected = f"a tensor ({count}, K, {size}), since {argument} names it"
                    raise _wrong_column(owner, name, expected, columns, after)
                checked[name] = column if column.is_floating_point() else column.float()
        for name in self.masks:
            column = columns.get(name)
            if not _has_shape(column, (count, None, None)) or not _is_integer(column.dtype):
                expected = f"integers ({count}, H, W), since masks names it"
                raise _wrong_column(owner, name, expected, columns, after)
            limits = torch.iinfo(column.dtype)
            if not limits.min <= self.mask_fill <= limits.max:
                expected = f"from {limits.min} to {limits.max} for the {column.dtype} of {name!r}"
                raise wrong(owner, "mask_fill", expected, self.mask_fill)
        return checked

    def check_sizes(
        self, owner: object, columns: Mapping[str, Any], images: Tensor, after: str = ""
    ) -> None:
        """Check that masks have the size of the images, and are on the same device."""
        size = images.shape[2:]
        for name in self.masks:
            mask, subject = columns[name], f"columns[{name!r}]"
            if mask.shape[1:] != size:
                expected = f"as large as the images{after}, {shape_text(size)} pixels"
                advice = "Write a Transform that changes both" if after else "Resize one of them"
                advice += ", or leave the masks alone with Compose([…], masks=[])."
                raise wrong(owner, subject, expected, shape_text(mask.shape[1:]), advice)
            if mask.device != images.device:
                expected = f"on {images.device}, as the images{after} are"
                raise wrong(owner, subject, expected, f"on {mask.device}")

    def move(
        self, columns: TensorsByName, shares: TensorsByName, movement: Movement
    ) -> tuple[TensorsByName, TensorsByName]:
        """Return the columns, moved as the images are, and how much is left of each box.

        That is the share of the area that it had before the list, ``(N, K)`` by name of the column,
        which ``shares`` has for the boxes so far.
        """
        moved, moved_shares = dict(columns), dict(shares)
        for name in self.points:
            moved[name] = movement.points(columns[name])
        for name in self.masks:
            moved[name] = move_masks(columns[name], movement, self.mask_fill)
        for name in self.boxes:
            moved[name], moved_shares[name] = _move_boxes(
                columns[name], shares[name], movement, self.min_area
            )
        return moved, moved_shares


def as_signed(values: Tensor) -> Tensor:
    """Return any tensor as numbers of the same bits that torch can work with, without a copy."""
    return values.view(_SIGNED.get(values.dtype, values.dtype))


def move_masks(masks: Tensor, movement: Movement, fill: int) -> Tensor:
    """Return masks ``(N, H, W)`` of any integers, moved as the images are; new memory."""
    signed = as_signed(masks)
    limits = torch.iinfo(signed.dtype)
    fill -= (fill > limits.max) << limits.bits  # the signed number of the same bits
    return movement.masks(signed, fill).view(masks.dtype)


@dataclass(frozen=True)
class PlannedMovement:
    """How images move that are a plan's samples from ``first_in_plan`` on. See `Movement`."""

    plan: Plan
    first_in_plan: int

    def points(self, points: Tensor) -> Tensor:
        """See `Movement.points`."""
        maps = self.plan.uploaded(_point_maps, points.device)
        maps = maps[self.first_in_plan : self.first_in_plan + len(points)]
        factor, offset = maps.to(points.dtype).unbind(1)
        return points * factor + offset

    def masks(self, masks: Tensor, fill: int) -> Tensor:
        """See `Movement.masks`."""
        if self.plan.runs_in_kernel(masks):
            from memload.transforms.plan_kernel import run_masks

            return run_masks(masks, self.plan, fill, self.first_in_plan)
        return reference_masks(masks, self.plan, fill, self.first_in_plan)

    def boxes(self, boxes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `Movement.boxes`."""
        count, number = boxes.shape[:2]
        maps = self.plan.uploaded(_edge_maps, boxes.device)
        maps = maps[:, self.first_in_plan : self.first_in_plan + count]
        start, factor, divisor, offset, extent = maps.unbind()
        corners = boxes.reshape(count, 2 * number, 2).double()
        moved = ((corners - start) * factor / divisor + offset).to(boxes.dtype)
        one, other = moved.view(count, number, 2, 2).unbind(2)
        return torch.minimum(one, other), torch.maximum(one, other), extent.to(boxes.dtype)


def _wrong_column(
    owner: object, name: str, expected: str, columns: Mapping[str, Any], after: str
) -> ValueError:
    advice = "" if name in columns else f"The columns are: {listed(columns) or 'none'}."
    found = describe(columns.get(name))
    return wrong(owner, f"columns[{name!r}]{after}", expected, found, advice)


def _has_shape(column: Any, shape: tuple[int | None, ...]) -> bool:
    """Return whether this is a tensor of a shape, of which None stands for any number."""
    return (
        isinstance(column, Tensor)
        and column.ndim == len(shape)
        and all(size in (None, found) for size, found in zip(shape, column.shape, strict=True))
    )


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def _point_maps(plan: Plan) -> np.ndarray:
    """Return `Axis.affine` of x and y, float64 ``(N, 2, 1, 2)``."""
    maps = [np.stack(axis.affine(), 1) for axis in (plan.width, plan.height)]
    return np.stack(maps, 2)[:, :, np.newaxis]


def _move_boxes(
    boxes: Tensor, shares: Tensor, movement: Movement, min_area: float
) -> tuple[Tensor, Tensor]:
    """Return boxes ``(N, K, 4)`` after a movement, and the shares ``(N, K)`` that are left of them.

    Boxes of which nothing is left, or less than ``min_area``, are NaN.
    """
    low, high, extent = movement.boxes(boxes)
    shown_low, shown_high = (torch.minimum(edge.clamp(min=0), extent) for edge in (low, high))
    area = (shown_high - shown_low).prod(2)
    shares = shares * area / (high - low).prod(2)
    gone = ~(area > 0) | (shares < min_area)
    shown = torch.cat([shown_low, shown_high], 2)
    return shown.masked_fill(gone[..., None], torch.nan), shares


def _edge_maps(plan: Plan) -> np.ndarray:
    """Return `Axis.edge_map` of x and y, float64 ``(5, N, 1, 2)``."""
    return np.stack([plan.width.edge_map(), plan.height.edge_map()], 2)[:, :, np.newaxis]
