"""Crop, resize, flip, normalise, cast and layout in one pass over memory."""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from memload.transforms.cropping import CenterCrop, RandomCrop, RandomResizedCrop, Resize
from memload.transforms.draws import Draws
from memload.transforms.geometry import Axis, precision_of, weights
from memload.transforms.transform import Columns, Geometric, Pointwise, Transform, to_device

#: The longest side of an image, before or after, that the kernel takes.
LARGEST_SIDE = 16_384
#: The reference works on so many values at a time, which stay in a core's cache.
_AT_A_TIME = 1 << 19


@dataclass
class Plan:
    """What is to be done with a batch: for each axis where pixels come from, then a line a channel, or None."""

    height: Axis
    width: Axis
    antialias: bool
    fill: tuple[float, ...]
    #: Factors and offsets, float32 ``(2, C)``; the offset comes behind the factor, but with floats before it.
    line: np.ndarray | None
    dtype: torch.dtype
    memory_format: torch.memory_format
    _uploaded: Tensor | None = field(default=None, init=False, repr=False)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.height.start)

    @property
    def resizes(self) -> bool:
        """Whether pixels are interpolated."""
        return self.height.resized is not None

    def table(self) -> np.ndarray:
        """Return each sample's numbers, int32 ``(N, 8)``: of both axes start, length, shift and flipped."""
        table = np.empty((8, len(self.height.start)), np.int32)
        for first, axis in ((0, self.height), (4, self.width)):
            table[first], table[first + 1] = axis.start, axis.length
            table[first + 2], table[first + 3] = axis.shift, axis.flipped
        return table.T

    @property
    def fits_32_bits(self) -> bool:
        """Whether the kernel's integers have enough bits for images of these sizes."""
        sides = (
            side or 0
            for axis in (self.height, self.width)
            for side in (axis.source, axis.resized, axis.extent)
        )
        return max(sides) <= LARGEST_SIDE

    def part(self, which: slice) -> "Plan":
        """Return the plan for some of the samples, without a copy."""
        if which.start == 0 and which.stop == len(self):
            return self
        return replace(self, height=self.height.part(which), width=self.width.part(which))

    def uploaded(self, make: Callable[["Plan"], np.ndarray], device: torch.device) -> Tensor:
        """Return what ``make`` makes of the plan, on the device; made and uploaded once, by the stream current then."""
        if self._uploaded is None:
            self._uploaded = to_device(make(self), device)
        return self._uploaded


class Fused:
    """Steps that are done together: crop and resize, one of each at most, flips; then what pixels become."""

    def __init__(self, steps: Sequence[tuple[int, Transform]]) -> None:
        self.steps = tuple(steps)
        self._lines: dict[tuple[Any, ...], tuple[np.ndarray | None, torch.dtype]] = {}

    def __repr__(self) -> str:
        return f"Fused({', '.join(repr(step) for _, step in self.steps)})"

    def __call__(
        self, images: Tensor, columns: Columns, plan: Plan, first: int, points: Sequence[str]
    ) -> tuple[Tensor, Columns]:
        """Do the steps with images that are the samples of a plan from ``first``; ``points`` are the columns that
        follow.
        """
        rows = slice(first, first + images.shape[0])
        if points:
            columns = columns | {name: _carried(columns[name], plan.part(rows)) for name in points}
        if images.is_cuda and images.dtype == torch.uint8 and plan.fits_32_bits and _has_triton():
            from memload.transforms.kernel import run

            return run(images, plan, first), columns
        return reference(images, plan.part(rows)), columns

    def plan(
        self,
        images: Tensor,
        count: int,
        draws: Callable[[int], Draws],
        memory_format: torch.memory_format,
    ) -> Plan:
        """Return the plan of ``count`` samples, with the draws of a position, for images like these."""
        channels, *size = images.shape[1:]
        height, width = (Axis(extent, count) for extent in size)
        antialias, fill = True, (0.0,) * channels
        for position, step in self.steps:
            if isinstance(step, Geometric):
                step.place(height, width, draws(position))
                antialias = getattr(step, "antialias", antialias)
                fill = (
                    step._per_channel("fill", step.fill, channels, images.dtype)
                    if kind(step) == "crop"
                    else fill
                )
        pointwise = [step for _, step in self.steps if isinstance(step, Pointwise)]
        key = (channels, images.dtype, *map(repr, pointwise))  # their settings may be changed
        if key not in self._lines:
            self._lines = {key: self._line(channels, images.dtype, pointwise)}
        return Plan(height, width, antialias, fill, *self._lines[key], memory_format)

    def _line(
        self, channels: int, given: torch.dtype, steps: Sequence[Pointwise]
    ) -> tuple[np.ndarray | None, torch.dtype]:
        dtype, whole = given, given == torch.uint8
        line = np.stack([np.ones(channels), np.zeros(channels)])
        for step in steps:
            factor, offset, cast = step.line(whole, channels)
            line *= factor
            line[1] += offset
            dtype = cast or (torch.float32 if whole else dtype)
            whole = False
        if (
            given.is_floating_point
        ):  # (x + offset / factor) * factor: a large mean over a small std would cancel
            line[1] /= line[0]
        return None if (line == [[1], [0]]).all() else line.astype(np.float32), dtype


def kind(step: Transform) -> str:
    """Return "crop", "resize", "pixels", "flip" or, for what cannot be fused, nothing."""
    if isinstance(step, (CenterCrop, RandomCrop)):
        return "crop"
    if isinstance(step, (Resize, RandomResizedCrop)):
        return "resize"
    return (
        "pixels" if isinstance(step, Pointwise) else "flip" if isinstance(step, Geometric) else ""
    )


def fits(kinds: Iterable[str], added: str) -> bool:
    """Return whether a step of this kind can follow these in one pass."""
    # A flip may come anywhere, since it moves whole pixels; a second crop may have another fill, a second resize
    # rounds again.
    return added in ("flip", "pixels") or (
        added != "" and added not in kinds and "pixels" not in kinds
    )


def reference(images: Tensor, plan: Plan) -> Tensor:
    """Do what a plan says by plain torch operations, on any device.

    uint8 is resized as uint8 on the CPU, exactly as the kernel does it, and elsewhere as float32, within one level.
    """
    count, channels = images.shape[:2]
    height, width = plan.height.extent, plan.width.extent
    if (
        count
        and plan.line is None
        and not (plan.resizes or plan.height.flipped.any() or plan.width.flipped.any())
    ):
        moved = _moved(images, plan, slice(0, count))  # nothing else: one copy
        shared = moved.untyped_storage().data_ptr() == images.untyped_storage().data_ptr()
        return moved.to(plan.dtype, memory_format=plan.memory_format, copy=shared)
    planar = plan.memory_format == torch.contiguous_format and images.is_contiguous()
    # whole rows, channels last: torch is slow with lines of 3 values
    shape = (count, channels, height * width) if planar else (count, height, width * channels)
    out = torch.empty(shape, dtype=plan.dtype, device=images.device)
    line, shifts = None, False
    if plan.line is not None:
        line = to_device(
            plan.line[:, :, np.newaxis] if planar else np.tile(plan.line, width), images.device
        )
        shifts = bool(plan.line[1].any())
    step = max(1, _AT_A_TIME // (height * width * channels or 1))
    for part in (slice(first, first + step) for first in range(0, count, step)):
        piece = _moved(images[part], plan, part)
        for axis, dim in ((plan.height, -2), (plan.width, -1)):
            if axis.flipped[part].any():
                which = to_device(axis.flipped[part], images.device)[:, None, None, None]
                piece = torch.where(which, piece.flip(dim), piece)
        rows = (piece if planar else piece.permute(0, 2, 3, 1)).flatten(2)
        direct = (
            out[part]
            if line is not None and out.dtype == torch.float32 and not rows.requires_grad
            else None
        )
        if line is not None:  # two operations, since one for both rounds otherwise
            if rows.is_floating_point():
                rows = torch.add(rows, line[1], out=direct).mul_(line[0])
            else:  # cast by itself: 1,290 µs where a multiplication that casts takes 1,750
                rows = (rows.float() if direct is None else direct.copy_(rows)).mul_(line[0])
                rows = rows.add_(line[1]) if shifts else rows
        if direct is None:
            out[part] = rows
    if planar:
        return out.view(count, channels, height, width)
    batch = out.view(count, height, width, channels).permute(0, 3, 1, 2)
    return batch.contiguous(memory_format=plan.memory_format)


def _moved(images: Tensor, plan: Plan, part: slice) -> Tensor:
    """Return images but for flips and values: their boxes, resized, and the windows of those."""
    y, x = plan.height, plan.width
    if y.whole and x.whole:
        return images
    size = None if y.resized is None or x.resized is None else (y.resized, x.resized)
    places = np.stack([y.start, y.length, x.start, x.length], 1)[part]
    images = _boxes(
        images, places, plan.fill, lambda box: _resize(box, size, plan.antialias) if size else box
    )
    if size in (None, (y.extent, x.extent)) and not (y.shift.any() or x.shift.any()):
        return images
    places = np.stack(
        [y.shift, np.full_like(y.shift, y.extent), x.shift, np.full_like(x.shift, x.extent)], 1
    )[part]
    return _boxes(images, places, plan.fill, lambda box: box)


def _boxes(
    images: Tensor, places: np.ndarray, fill: tuple[float, ...], change: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return a box of each image, changed, at places ``(N, 4)``: top, height, left and width; filled outside."""
    starts, lengths = places[:, ::2], places[:, 1::2]
    extents = images.shape[-2:]
    (above, before), (below, behind) = (
        np.maximum(-starts.min(0), 0), np.maximum((starts + lengths).max(0) - extents, 0)
    )  # fmt: skip
    if above or before or below or behind:
        shape = (extents[0] + above + below, extents[1] + before + behind)
        wider = images.new_empty((*images.shape[:2], *shape)).contiguous(
            memory_format=torch.channels_last
        )
        wider[:] = to_device(np.array(fill), images.device).to(images.dtype)[:, None, None]
        wider[..., above : above + extents[0], before : before + extents[1]] = images
        images = wider
    moved = np.array([above, 0, before, 0])
    if (places == places[0]).all():
        top, height, left, width = (places[0] + moved).tolist()
        return change(images[..., top : top + height, left : left + width])
    return torch.cat([
        change(images[place : place + 1, :, top : top + height, left : left + width])
        for place, (top, height, left, width) in enumerate((places + moved).tolist())
    ])  # fmt: skip


def _resize(images: Tensor, size: tuple[int, int], antialias: bool) -> Tensor:
    whole = images.dtype == torch.uint8
    if (
        1 in images.shape[2:]
    ):  # whose stride may be any, and on the CPU is taken at its word (torch 2.13)
        images = images.clone(memory_format=torch.contiguous_format)
    if (
        size[1] == 1
    ):  # comes out wrong or fails (seen in torch 2.13), so it is done first, and then as two columns
        twice = _one_column(images, antialias).expand(-1, -1, -1, 2).contiguous()
        return _resize(twice, (size[0], 2), antialias)[..., :1]
    # torch has uint8 on the CPU only
    direct = images.device.type == "cpu" if whole else images.dtype.itemsize > 2
    resized = interpolate(
        images if direct else images.float(), size, mode="bilinear", antialias=antialias
    )
    return resized if direct else (resized.round_() if whole else resized).to(images.dtype)


def _one_column(images: Tensor, antialias: bool) -> Tensor:
    """Return images ``(N, C, H, 1)``, resized to that width as `interpolate` does it for wider ones."""
    length = images.shape[3]
    known = weights(length, 1, antialias)[0]
    first = 0 if antialias else (length - 1) // 2  # two pixels count, or all of them
    each = np.zeros(length)
    each[first : first + len(known)] = known[: length - first]
    if images.dtype != torch.uint8:
        wide = images if images.dtype.itemsize > 2 else images.float()
        weight = to_device(each, images.device).to(wide.dtype)
        return (wide * weight).sum(3, keepdim=True).to(images.dtype)
    bits = precision_of(length, 1, antialias)
    unit = to_device(np.floor(each * (1 << bits) + 0.5).astype(np.int32), images.device)
    total = (images.int() * unit).sum(3, keepdim=True, dtype=torch.int32) + (1 << bits >> 1)
    return (total >> bits).clamp_(0, 255).to(torch.uint8)


def _carried(points: Tensor, plan: Plan) -> Tensor:
    """Carry points ``(N, K, 2)``, x and y, to where the pixels below them went."""
    lines = np.stack([np.stack(axis.line(), 1) for axis in (plan.width, plan.height)], 2)[
        :, :, np.newaxis
    ]
    factor, offset = to_device(lines, points.device).to(points.dtype).unbind(1)
    return points * factor + offset


@functools.cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
