"""Columns that follow the images: points, masks and boxes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from memload.transforms.arguments import describe, is_finite, wrong
from memload.transforms.fused import Columns
from memload.transforms.geometry import Plan, move_points
from memload.transforms.reference import reference_masks

_HAS_TRITON = find_spec("triton") is not None
#: torch can do little with these, so masks of them are moved as signed integers of the same bits.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


@dataclass(frozen=True)
class Followers:
    """The names of the columns that every crop, resize and flip moves together with the images.

    For their shapes, ``mask_fill`` and ``min_area`` see `Compose`.
    """

    points: tuple[str, ...] = ()
    masks: tuple[str, ...] = ()
    boxes: tuple[str, ...] = ()
    mask_fill: int = 255
    min_area: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.points or self.masks or self.boxes)

    def missing(self, columns: Mapping[str, Any]) -> list[str]:
        """Return which columns are not there, and why they have to be, for messages."""
        named = {"points": self.points, "masks": self.masks, "boxes": self.boxes}
        return [
            f"{name!r}, since {argument} names it"
            for argument, names in named.items()
            for name in names
            if name not in columns
        ]

    def check(
        self, owner: object, columns: Mapping[str, Any], count: int, after: str = ""
    ) -> Columns:
        """Check the columns of ``count`` samples. Return points and boxes, as floats.

        ``after`` is " after " and the step that they come from, if it is not the first.
        """
        checked: Columns = {}
        for names, argument, size in ((self.points, "points", 2), (self.boxes, "boxes", 4)):
            for name in names:
                column: Any = columns.get(name)
                if not _has_shape(column, (count, None, size)):
                    expected = f"a tensor ({count}, K, {size}), since {argument} names it"
                    raise wrong(owner, f"columns[{name!r}]{after}", expected, describe(column))
                checked[name] = column if column.is_floating_point() else column.float()
        for name in self.masks:
            column = columns.get(name)
            if not _has_shape(column, (count, None, None)) or not _is_integer(column.dtype):
                expected = f"integers ({count}, H, W), since masks names it"
                raise wrong(owner, f"columns[{name!r}]{after}", expected, describe(column))
            limits = torch.iinfo(column.dtype)
            if not limits.min <= self.mask_fill <= limits.max:
                expected = f"from {limits.min} to {limits.max} for the {column.dtype} of {name!r}"
                raise wrong(owner, "mask_fill", expected, self.mask_fill)
        return checked

    def check_sizes(
        self, owner: object, columns: Mapping[str, Any], images: Tensor, after: str = ""
    ) -> None:
        """Check that masks have the size of the images, and are on the same device."""
        height, width = images.shape[2:]
        for name in self.masks:
            mask, subject = columns[name], f"columns[{name!r}]"
            if mask.shape[1:] != (height, width):
                expected = f"as large as the images{after}, {height}×{width} pixels"
                found = f"{mask.shape[1]}×{mask.shape[2]}"
                advice = "Write a Transform that changes both" if after else "Resize one of them"
                advice += ", or leave the masks alone with Compose([…], masks=[])."
                raise wrong(owner, subject, expected, found, advice)
            if mask.device != images.device:
                expected = f"on {images.device}, as the images{after} are"
                raise wrong(owner, subject, expected, f"on {mask.device}")

    def move(
        self, columns: Columns, plan: Plan, first_in_plan: int, kept: dict[str, Any]
    ) -> Columns:
        """Return the columns, moved as the plan moves images from ``first_in_plan`` on.

        ``kept`` is filled with boxes by name, and the share of each that was kept so far.
        """
        moved = dict(columns)
        for name in self.points:
            moved[name] = move_points(columns[name], plan, first_in_plan)
        for name in self.masks:
            moved[name] = move_masks(columns[name], plan, self.mask_fill, first_in_plan)
        for name in self.boxes:
            before, share = kept.get(name, (None, None))
            if before is not columns[name]:
                share = torch.ones_like(columns[name][..., 0])
            kept[name] = _move_boxes(columns[name], plan, first_in_plan, share, self.min_area)
            moved[name] = kept[name][0]
        return moved


def column_names(owner: object, argument: str, value: Any) -> tuple[str, ...] | None:
    """Return names of columns as a tuple, or None where none were given."""
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise wrong(owner, argument, "a list of column names", repr(value))
    return tuple(value)


def check_fill(owner: object, value: Any) -> int:
    """Return ``mask_fill`` as an int."""
    if not isinstance(value, Integral):
        raise wrong(owner, "mask_fill", "an integer", repr(value))
    return int(value)


def check_min_area(owner: object, value: Any) -> float:
    """Return ``min_area`` as a float from 0 to 1."""
    if not is_finite(value) or not 0 <= value <= 1:
        raise wrong(owner, "min_area", "a share of the area, from 0 to 1", repr(value))
    return float(value)


def as_signed(masks: Tensor) -> Tensor:
    """Return masks as integers of the same bits that torch can work with, without a copy."""
    return masks.view(_SIGNED.get(masks.dtype, masks.dtype))


def move_masks(masks: Tensor, plan: Plan, fill: int, first_in_plan: int) -> Tensor:
    """Return masks ``(N, H, W)`` of any integers, moved as the plan moves images; new memory."""
    signed = as_signed(masks)
    limits = torch.iinfo(signed.dtype)
    fill -= (fill > limits.max) << limits.bits  # the signed number of the same bits
    if masks.is_cuda and plan.fits_kernel and _HAS_TRITON:
        from memload.transforms.kernel import run_masks

        return run_masks(signed, plan, fill, first_in_plan).view(masks.dtype)
    return reference_masks(signed, plan, fill, first_in_plan).view(masks.dtype)


def _has_shape(column: Any, shape: tuple[int | None, ...]) -> bool:
    """Return whether this is a tensor of a shape, of which None stands for any number."""
    return (
        isinstance(column, Tensor)
        and column.ndim == len(shape)
        and all(size in (None, found) for size, found in zip(shape, column.shape, strict=True))
    )


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def _move_boxes(
    boxes: Tensor, plan: Plan, first_in_plan: int, share: Tensor, min_area: float
) -> tuple[Tensor, Tensor]:
    """Return boxes ``(N, K, 4)`` after a plan, and the share of each box that is kept ``(N, K)``.

    ``share`` is what was kept of them before. Boxes of which nothing is left, or less than
    ``min_area``, are NaN.
    """
    count, number = boxes.shape[:2]
    maps = plan.edge_maps(boxes.device)[:, first_in_plan : first_in_plan + count]
    start, factor, divisor, offset, extent = maps.unbind()
    corners = boxes.reshape(count, 2 * number, 2).double()
    moved = ((corners - start) * factor / divisor + offset).to(boxes.dtype)
    one, other = moved.view(count, number, 2, 2).unbind(2)
    low, high = torch.minimum(one, other), torch.maximum(one, other)
    extent = extent.to(boxes.dtype)
    shown_low, shown_high = (torch.minimum(edge.clamp(min=0), extent) for edge in (low, high))
    area = (shown_high - shown_low).prod(2)
    share = share * area / (high - low).prod(2)
    gone = ~(area > 0) | (share < min_area)
    shown = torch.cat([shown_low, shown_high], 2)
    return shown.masked_fill(gone[..., None], torch.nan), share
