"""Columns that follow the images: masks, points and boxes, all by one matrix for each sample."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memload.transforms.arguments import describe, wrong
from memload.transforms.geometry import HAS_TRITON, TIE, pixels_shown
from memload.wording import listed, shape_text

#: Columns of a batch, ``(N, …)`` each.
TensorsByName = dict[str, Tensor]
#: The kinds of columns that follow the images. `Compose` has an argument of each name.
KINDS = ("points", "masks", "boxes")
#: torch can do little with these, so masks of them are moved as signed integers of the same bits.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_UNMOVED = [[1, 0, 0], [0, 1, 0], [0, 0, 1]]


@dataclass(frozen=True)
class Followers:
    """The names of the columns that move with the images. See `Compose`."""

    points: tuple[str, ...] = ()
    masks: tuple[str, ...] = ()
    boxes: tuple[str, ...] = ()
    mask_fill: int = 255

    @classmethod
    def of(cls, facts: Mapping[str, Any], **options: Any) -> "Followers":
        """Return those that ``facts`` names by `KINDS`. What is missing there, or None, is none."""
        names: dict[str, Any] = {kind: tuple(facts.get(kind) or ()) for kind in KINDS}
        return cls(**names, **options)

    @property
    def names(self) -> tuple[str, ...]:
        """All names."""
        return self.points + self.masks + self.boxes

    def __bool__(self) -> bool:
        return bool(self.names)

    def check(
        self, owner: object, columns: Mapping[str, Any], images: Tensor | None, count: int
    ) -> TensorsByName:
        """Check the columns of ``count`` samples. Return points and boxes, as floats.

        Masks have the size of the images and are on their device, if these are given.
        """
        checked: TensorsByName = {}
        for names, argument, size in ((self.points, "points", 2), (self.boxes, "boxes", 4)):
            for name in names:
                column: Any = columns.get(name)
                if not _has_shape(column, (count, None, size)):
                    expected = f"a tensor ({count}, K, {size}), since {argument} names it"
                    raise _wrong_column(owner, name, expected, columns)
                checked[name] = column if column.is_floating_point() else column.float()
        for name in self.masks:
            column = columns.get(name)
            if not _has_shape(column, (count, None, None)) or not _is_integer(column.dtype):
                expected = f"integers ({count}, H, W), since masks names it"
                raise _wrong_column(owner, name, expected, columns)
            limits = torch.iinfo(column.dtype)
            if not limits.min <= self.mask_fill <= limits.max:
                expected = f"from {limits.min} to {limits.max} for the {column.dtype} of {name!r}"
                raise wrong(owner, "mask_fill", expected, self.mask_fill)
            if images is not None:
                _check_size(owner, name, column, images)
        return checked

    def move(
        self,
        columns: TensorsByName,
        matrices: Sequence[Tensor],
        size: tuple[int, int],
        shown: Tensor | None,
        padding_mode: str,
    ) -> TensorsByName:
        """Return the columns, moved as the images are; see `Batch.follow`."""
        moved = dict(columns)
        for matrix in matrices:
            for name in self.masks:
                moved[name] = move_masks(
                    moved[name], matrix, size, shown, padding_mode, self.mask_fill
                )
            for name in self.points:
                # The centres of pixels have whole numbers there, and the edges of the image here.
                points = _move(moved[name].double() + 0.5, matrix) - 0.5
                moved[name] = points.to(columns[name].dtype)
            for name in self.boxes:
                moved[name] = _move_boxes(moved[name], matrix, size, shown)
        if len(matrices) > 1 and self.boxes:
            # Turned twice, a box grows twice, and so it is cut to where its corners are.
            at_once = functools.reduce(torch.matmul, matrices)
            for name in self.boxes:
                around = _move_boxes(columns[name], at_once, size, shown)
                low = torch.maximum(moved[name], around)[..., :2]
                high = torch.minimum(moved[name], around)[..., 2:]
                moved[name] = _unless_empty(torch.cat([low, high], -1))
        return moved


def as_signed(values: Tensor) -> Tensor:
    """Return any tensor as numbers of the same bits that torch can work with, without a copy."""
    return values.view(_SIGNED.get(values.dtype, values.dtype))


def move_masks(
    masks: Tensor,
    matrices: Tensor,
    size: tuple[int, int],
    shown: Tensor | None = None,
    padding_mode: str = "constant",
    fill: int = 255,
) -> Tensor:
    """Return masks ``(N, H, W)`` of any integers, moved as the images are; new memory.

    Each pixel is the nearest one, and of two equally near ones the one to the right or below. For
    the other arguments see `Batch.follow`.
    """
    signed, limits = as_signed(masks), torch.iinfo(as_signed(masks).dtype)
    fill -= (fill > limits.max) << limits.bits  # the signed number of the same bits
    if masks.is_cuda and HAS_TRITON:
        from memload.transforms.kernels.masks import gather

        moved = gather(signed, matrices, size, shown, padding_mode, fill)
        return moved.view(masks.dtype)
    moved = signed.new_empty((len(masks), *size))
    for index, (mask, matrix) in enumerate(zip(signed, matrices.tolist(), strict=True)):
        if matrix == _UNMOVED and size == mask.shape:
            moved[index] = mask
            continue
        box = [0, mask.shape[0], 0, mask.shape[1]] if shown is None else shown[index].tolist()
        moved[index] = _gathered(mask, matrix, size, box, padding_mode, fill)
    return moved.view(masks.dtype)


def _gathered(
    mask: Tensor,
    matrix: list[list[float]],
    size: tuple[int, int],
    box: list[int],
    padding_mode: str,
    fill: int,
) -> Tensor:
    """Return one mask that moved, from the ``box`` that is shown of it."""
    y, x = (torch.arange(s, dtype=torch.float64, device=mask.device) + 0.5 for s in size)
    (a, b, c), (d, e, f), (g, h, i) = matrix
    if b == d == g == h == 0:  # rows, then columns: with one index it takes five times as long
        rows, columns = y * (e / i) + f / i, x * (a / i) + c / i
    else:
        y = y[:, None]
        divisor = g * x + h * y + i
        rows, columns = (d * x + e * y + f) / divisor, (a * x + b * y + c) / divisor
    places, inside = [], []
    for position, extent, low, high in (
        (rows, mask.shape[0], box[0], box[1]),
        (columns, mask.shape[1], box[2], box[3]),
    ):
        # From nowhere, or from far away, is from outside.
        pixel = (position + TIE).floor().nan_to_num(-9).clamp(-extent - 9, 2 * extent + 9).long()
        pixel = pixels_shown(pixel, extent, padding_mode)
        inside.append((pixel >= low) & (pixel < high))
        places.append(pixel.clamp(0, extent - 1))
    if rows.ndim == 1:
        moved = mask.index_select(0, places[0]).index_select(1, places[1])
        inside[0] = inside[0][:, None]
    else:
        moved = mask.take(places[0] * mask.shape[1] + places[1])
    is_inside = inside[0] & inside[1]
    return moved if is_inside.all() else moved.where(is_inside, fill)


def _move(points: Tensor, matrices: Tensor) -> Tensor:
    """Return where points ``(N, K, 2)`` of float64 went, in pixels from the upper left corner.

    Matrices map the new to the old. Their adjugates are their inverses but for a factor, which
    falls out.
    """
    first, second, third = matrices.to(points.device).unbind(1)
    columns = [second.cross(third, 1), third.cross(first, 1), first.cross(second, 1)]
    inverse = torch.stack(columns, 2)
    moved = points @ inverse[:, :, :2].mT + inverse[:, None, :, 2]
    return moved[..., :2] / moved[..., 2:]


def _move_boxes(
    boxes: Tensor, matrices: Tensor, size: tuple[int, int], shown: Tensor | None
) -> Tensor:
    """Return the upright boxes around boxes ``(N, K, 4)`` that moved, within images of this size.

    Boxes of which nothing is left are NaN.
    """
    count, number = boxes.shape[:2]
    if shown is not None:
        boxes = _within(boxes, *shown.to(boxes.device)[:, None, None].unbind(-1))
    x1, y1, x2, y2 = boxes.double().unbind(-1)
    corners = torch.stack([x1, y1, x2, y1, x2, y2, x1, y2], -1).reshape(count, 4 * number, 2)
    # In float32, edges that meet are equal again.
    moved = _move(corners, matrices).float().view(count, number, 4, 2)
    around = _within(torch.cat([moved.amin(2), moved.amax(2)], -1), 0, size[0], 0, size[1])
    return _unless_empty(around).to(boxes.dtype)


def _unless_empty(boxes: Tensor) -> Tensor:
    """Return boxes ``(N, K, 4)``, of which those without an area are NaN."""
    has_area = (boxes[..., :2] < boxes[..., 2:]).all(-1, keepdim=True)
    return boxes.where(has_area, torch.nan)


def _within(boxes: Tensor, top: Any, bottom: Any, left: Any, right: Any) -> Tensor:
    """Return the parts of boxes ``(N, K, 4)`` between limits, numbers or ``(N, 1, 1)``."""
    x, y = boxes[..., ::2].clamp(left, right), boxes[..., 1::2].clamp(top, bottom)
    return torch.stack([x[..., 0], y[..., 0], x[..., 1], y[..., 1]], -1)


def _check_size(owner: object, name: str, mask: Tensor, images: Tensor) -> None:
    """Check that a mask has the size of the images, and is on the same device."""
    size, subject = images.shape[2:], f"columns[{name!r}]"
    if mask.shape[1:] != size:
        expected = f"as large as the images, {shape_text(size)} pixels"
        advice = (
            "Resize one of them, write a Transform that changes both, or leave the masks alone "
            "with Compose([…], masks=[])."
        )
        raise wrong(owner, subject, expected, shape_text(mask.shape[1:]), advice)
    if mask.device != images.device:
        raise wrong(owner, subject, f"on {images.device}, as the images are", f"on {mask.device}")


def _wrong_column(
    owner: object, name: str, expected: str, columns: Mapping[str, Any]
) -> ValueError:
    advice = "" if name in columns else f"The columns are: {listed(columns) or 'none'}."
    return wrong(owner, f"columns[{name!r}]", expected, describe(columns.get(name)), advice)


def _has_shape(column: Any, shape: tuple[int | None, ...]) -> bool:
    """Return whether this is a tensor of a shape, of which None stands for any number."""
    return (
        isinstance(column, Tensor)
        and column.ndim == len(shape)
        and all(size in (None, found) for size, found in zip(shape, column.shape, strict=True))
    )


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
