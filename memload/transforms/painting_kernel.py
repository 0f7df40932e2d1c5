"""Boxes of images painted over, and images mixed in pairs, as Triton kernels.

Each reads what it needs of the images once, and writes the result once. The images are a plan's
samples from ``first_in_plan`` on. What is not changed is moved as integers, so its bits stay.
"""

# ruff: noqa: N803  # Triton's way of writing constants

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from memload.launch import ceil_div, launch
from memload.transforms.draws import FACTORS, INCREMENT, SHIFTS
from memload.upload import Parameters

#: What a program makes: rows, columns times channels; and its number of warps. They are those that
#: `plan_kernel` moves pixels with. On an H200, 256 images of 224×224 in bfloat16 are painted in
#: 50 µs.
_ROWS, _COLUMNS, _WARPS = 16, 256, 4
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: The constants of `draws.mix`, as unsigned numbers.
_INCREMENT = tl.constexpr(INCREMENT % (1 << 64))
_FACTOR_1, _FACTOR_2 = (tl.constexpr(factor % (1 << 64)) for factor in FACTORS)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = map(tl.constexpr, SHIFTS)


def paint(
    images: Tensor,
    boxes: Parameters,
    first_in_plan: int,
    table: Tensor,
    streams: Parameters | None = None,
    first_number: int = 0,
) -> Tensor:
    """Return images ``(N, C, H, W)`` of any strides whose boxes have values of ``table``.

    ``boxes`` are edges, int32 ``(any, number, 4)``; see `boxes.edges_of`. ``table`` has the dtype
    of the images and is on their device. It has a value for each channel, or 2¹⁶ if there are
    ``streams``, int64 ``(any,)``. `draws.numbers_at` then says which: pixels have numbers
    ``first_number`` and up of their sample's stream, by row, column and channel. The result has the
    layout of the images.
    """
    out = torch.empty_like(images)
    _make_all(
        _paint_kernel, _as_integers(images), _as_integers(out), boxes.on(images.device),
        streams and streams.on(images.device), _as_integers(table), first_in_plan,
        boxes.array.shape[1], first_number,
    )  # fmt: skip
    return out


def mix(
    images: Tensor, factor: Parameters | None, boxes: Parameters | None, first_in_plan: int
) -> Tensor:
    """Do what `mixing.mix` does."""
    out = torch.empty_like(images)
    source, target = (_as_integers(images), _as_integers(out)) if factor is None else (images, out)
    _make_all(
        _mix_kernel, source, target, factor and factor.on(images.device),
        boxes and boxes.on(images.device), first_in_plan, len(images),
        WIDE=tl.float64 if images.dtype == torch.float64 else tl.float32,
    )  # fmt: skip
    return out


def _as_integers(tensor: Tensor) -> Tensor:
    """Return a tensor as integers of the same bits, without a copy."""
    return tensor.view(_INTEGERS[tensor.element_size()])


def _make_all(kernel: Any, images: Tensor, out: Tensor, *arguments: Any, **constants: Any) -> None:
    """Let a kernel make all of ``out``. A plane is what neighbouring programs make of a sample.

    That is all channels if they are neighbours in memory, and otherwise one channel.
    """
    if not out.numel():
        return
    count, channels, height, width = images.shape
    together = channels if out.stride(1) == 1 else 1
    planes = channels // together
    tiles = ceil_div(height, _ROWS) * ceil_div(width * together, _COLUMNS)
    dense = all(
        tensor.stride(3) == together and (together == 1 or tensor.stride(1) == 1)
        for tensor in (images, out)
    )
    launch(
        kernel, count * planes * tiles, images, out, *arguments, planes, height, width,
        *images.stride(), *out.stride(), C=together, DENSE=dense, ROWS=_ROWS, COLUMNS=_COLUMNS,
        num_warps=_WARPS,
        enable_fp_fusion=False,  # a fused multiply-add rounds differently than the CPU does
        **constants,
    )  # fmt: skip


@triton.jit(do_not_specialize=["first"])  # so that no batch needs a kernel of its own
def _paint_kernel(
    source, out, edges, streams, table, first, boxes, first_number, planes, height, width,
    source_n, source_c, source_y, source_x, out_n, out_c, out_y, out_x,
    C: tl.constexpr, DENSE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Copy a tile of a plane, and paint what is inside of any box.

    ``table`` has the level of each channel or, if there are ``streams``, those of noise.
    """
    sample, plane, y, column, in_image = _tile(planes, height, width, C, ROWS, COLUMNS)
    source += sample * source_n + plane * source_c
    out += sample * out_n + plane * out_c
    value = tl.load(
        source + _offsets(y, column, source_c, source_y, source_x, C, DENSE), mask=in_image
    )
    painted = tl.zeros(value.shape, tl.int1)
    for box in range(boxes):
        painted |= _in_box(edges + ((first + sample) * boxes + box) * 4, y, column // C)
    channel = plane * C + column % C
    if streams is None:
        value = tl.where(painted, tl.load(table + channel), value)
    elif _any(painted):
        # Most tiles have no box. Noise takes about 50 instructions for each value.
        pixel = (y.to(tl.int64) * width + column // C) * (planes * C) + channel
        drawn = _numbers_at(tl.load(streams + first + sample), first_number + pixel)
        value = tl.where(painted, tl.load(table + drawn), value)
    tl.store(out + _offsets(y, column, out_c, out_y, out_x, C, DENSE), value, mask=in_image)


@triton.jit(do_not_specialize=["first", "count"])
def _mix_kernel(
    source, out, factors, edges, first, count, planes, height, width,
    source_n, source_c, source_y, source_x, out_n, out_c, out_y, out_x,
    WIDE: tl.constexpr, C: tl.constexpr, DENSE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Mix a tile of a plane with that of the sample before, by factors, by a box, or both.

    Products and sums are of type ``WIDE``.
    """
    sample, plane, y, column, in_image = _tile(planes, height, width, C, ROWS, COLUMNS)
    where = plane * source_c + _offsets(y, column, source_c, source_y, source_x, C, DENSE)
    value = tl.load(source + sample * source_n + where, mask=in_image)
    # The partner is read only where it is needed.
    partner = source + tl.where(sample == 0, count - 1, sample - 1) * source_n + where
    if factors is not None:
        factor = tl.load(factors + first + sample)
        if factor != 1:
            other = tl.load(partner, mask=in_image).to(WIDE)
            mixed = value.to(WIDE) * factor.to(WIDE) + other * (1 - factor).to(WIDE)
            value = mixed.to(value.dtype)
    if edges is not None:
        shows_partner = in_image & _in_box(edges + (first + sample) * 4, y, column // C)
        if _any(shows_partner):
            value = tl.where(shows_partner, tl.load(partner, mask=in_image), value)
    out += sample * out_n + plane * out_c
    tl.store(out + _offsets(y, column, out_c, out_y, out_x, C, DENSE), value, mask=in_image)


@triton.jit
def _tile(
    planes, height, width, C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Return a program's sample and plane, its rows and columns, and which are in the image.

    Columns are those of pixels times channels, and a tile's first dimension; see `plan_kernel`.
    """
    program = tl.program_id(0)
    across, down = tl.cdiv(width * C, COLUMNS), tl.cdiv(height, ROWS)
    plane = (program // (across * down)).to(tl.int64)
    y = (program // across % down * ROWS + tl.arange(0, ROWS))[None, :]
    column = (program % across * COLUMNS + tl.arange(0, COLUMNS))[:, None]
    return plane // planes, plane % planes, y, column, (y < height) & (column < width * C)


@triton.jit
def _offsets(y, column, stride_c, stride_y, stride_x, C: tl.constexpr, DENSE: tl.constexpr):
    """Return where pixels are in a plane. ``DENSE`` says that columns are neighbours."""
    across = column
    if not DENSE:
        across = (column // C).to(tl.int64) * stride_x + (column % C).to(tl.int64) * stride_c
    return y.to(tl.int64) * stride_y + across


@triton.jit
def _in_box(edges, y, x):
    """Return which pixels are in the box whose four edges are at ``edges``."""
    in_rows = (y >= tl.load(edges)) & (y < tl.load(edges + 1))
    return in_rows & (x >= tl.load(edges + 2)) & (x < tl.load(edges + 3))


@triton.jit
def _any(values):
    """Return whether any of a tile's truth values is true."""
    return tl.max(tl.max(values.to(tl.int32), 1), 0) > 0


@triton.jit
def _numbers_at(stream, number):
    """Return 16 random bits of a stream, int64; see `draws.numbers_at`."""
    bits = stream.to(tl.uint64, bitcast=True) + (number + 1).to(tl.uint64) * _INCREMENT
    bits = (bits ^ (bits >> _SHIFT_1)) * _FACTOR_1
    bits = (bits ^ (bits >> _SHIFT_2)) * _FACTOR_2
    return ((bits ^ (bits >> _SHIFT_3)) >> 48).to(tl.int64)
