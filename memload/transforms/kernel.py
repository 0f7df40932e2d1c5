"""The fused step as one Triton kernel: each program makes a tile of one sample's output."""

# ruff: noqa: N803  # Triton's way of writing constants

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from memload.transforms.fused import Plan
from memload.transforms.geometry import precision
from memload.transforms.transform import to_device

#: A tile: rows, and columns times channels, which are neighbours in memory.
_ROWS, _COLUMNS = 8, 256


def run(images: Tensor, plan: Plan) -> Tensor:
    """Do what a plan says with uint8 images ``(N, C, H, W)`` of any strides; the same numbers as `reference` gives."""
    count, channels, height, width = images.shape
    extent = (plan.height.extent, plan.width.extent)
    out = torch.empty(
        (count, channels, *extent), dtype=plan.dtype, device=images.device, memory_format=plan.memory_format
    )
    if not out.numel():
        return out
    bits = [precision(axis, plan.antialias) for axis in (plan.height, plan.width)]
    table = np.column_stack([plan.table(), *bits]).astype(np.int32)
    line = np.stack([np.ones(channels), np.zeros(channels)]) if plan.line is None else plan.line
    constants = np.concatenate([line, [plan.fill]]).astype(np.float32)
    # one transfer for both
    numbers = to_device(np.concatenate([table.ravel(), constants.view(np.int32).ravel()]), images.device)
    down, across = triton.cdiv(extent[0], _ROWS), triton.cdiv(extent[1] * channels, _COLUMNS)
    with torch.cuda.device(images.device if images.is_cuda else -1):
        _kernel[(count * down * across,)](
            images, out, numbers, numbers[table.size :].view(torch.float32),
            height, width, *extent, plan.height.resized or 0, plan.width.resized or 0, down, across,
            *images.stride(), *out.stride(),
            C=channels, RESIZE=plan.resizes, ANTIALIAS=plan.antialias, LINE=plan.line is not None,
            ROWS=_ROWS, COLUMNS=_COLUMNS,
            enable_fp_fusion=False,  # a multiplication and an addition fused round otherwise than the CPU does
        )  # fmt: skip
    return out


@triton.jit
def _kernel(
    source, out, table, constants,
    height, width, extent_y, extent_x, resized_y, resized_x, down, across,
    from_n, from_c, from_y, from_x, to_n, to_c, to_y, to_x,
    C: tl.constexpr, RESIZE: tl.constexpr, ANTIALIAS: tl.constexpr, LINE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    sample = (program // (down * across)).to(tl.int64)
    y = program // across % down * ROWS + tl.arange(0, ROWS)
    column = program % across * COLUMNS + tl.arange(0, COLUMNS)
    x = column // C
    channel = column % C
    mine = table + sample * 10
    # the places of the output's pixels before the flip, in the box or in what it is resized to
    at_y = tl.where(tl.load(mine + 3) != 0, extent_y - 1 - y, y) + tl.load(mine + 2)
    at_x = tl.where(tl.load(mine + 7) != 0, extent_x - 1 - x, x) + tl.load(mine + 6)
    start_y, start_x = tl.load(mine), tl.load(mine + 4)
    base = source + sample * from_n
    lanes = (x < extent_x)[None, :] & (y < extent_y)[:, None]
    fill = tl.load(constants + 2 * C + channel)[None, :]
    if RESIZE:
        fill = fill.to(tl.int32)  # as uint8 has it
        length_y, length_x = tl.load(mine + 1), tl.load(mine + 5)
        bits_y, bits_x = tl.load(mine + 8), tl.load(mine + 9)
        first_y, half_y, taps_y, unit_y = _filter(at_y, length_y, resized_y, bits_y, ANTIALIAS)
        first_x, half_x, taps_x, unit_x = _filter(at_x, length_x, resized_x, bits_x, ANTIALIAS)
        total = tl.zeros((ROWS, COLUMNS), tl.int32) + (1 << bits_y >> 1)
        for i in range(taps_y):
            pixel_y = first_y + i
            weight_y = _weight(pixel_y, at_y, length_y, resized_y, half_y, unit_y)
            source_y = start_y + pixel_y
            inside_y = (source_y >= 0) & (source_y < height)
            row = tl.zeros((ROWS, COLUMNS), tl.int32) + (1 << bits_x >> 1)
            for j in range(taps_x):
                pixel_x = first_x + j
                weight_x = _weight(pixel_x, at_x, length_x, resized_x, half_x, unit_x)
                source_x = start_x + pixel_x
                inside_x = (source_x >= 0) & (source_x < width)
                where = (source_y.to(tl.int64) * from_y)[:, None] + (source_x * from_x + channel * from_c)[None, :]
                counts = lanes & (weight_y > 0)[:, None] & (weight_x > 0)[None, :]
                inside = inside_y[:, None] & inside_x[None, :]
                value = tl.load(base + where, mask=counts & inside, other=0).to(tl.int32)
                row += tl.where(inside, value, fill) * weight_x[None, :]
            # rows first, rounded to 8 bits, then columns: so torch does it
            total += tl.minimum(row >> bits_x, 255) * weight_y[:, None]
        value = tl.minimum(total >> bits_y, 255)
        shown = ((at_y >= 0) & (at_y < resized_y))[:, None] & ((at_x >= 0) & (at_x < resized_x))[None, :]
        value = tl.where(shown, value, fill).to(tl.float32)
    else:
        source_y, source_x = start_y + at_y, start_x + at_x
        shown = ((source_y >= 0) & (source_y < height))[:, None] & ((source_x >= 0) & (source_x < width))[None, :]
        where = (source_y.to(tl.int64) * from_y)[:, None] + (source_x * from_x + channel * from_c)[None, :]
        value = tl.load(base + where, mask=lanes & shown, other=0).to(tl.float32)
        value = tl.where(shown, value, fill)
    if LINE:
        factor, offset = tl.load(constants + channel), tl.load(constants + C + channel)
        value = value * factor[None, :] + offset[None, :]
    target = (y.to(tl.int64) * to_y)[:, None] + (x * to_x + channel * to_c)[None, :]
    tl.store(out + sample * to_n + target, value.to(out.dtype.element_ty), mask=lanes)


@triton.jit
def _filter(at, length, resized, bits, ANTIALIAS: tl.constexpr):
    """First pixel, half the width, number of taps, and what the weights' unit counts: see `geometry.weights`."""
    half = 2 * resized
    if ANTIALIAS:
        half = 2 * tl.maximum(length, resized)
    taps = (half + resized - 1) // resized
    first = tl.maximum(((2 * at + 1) * length - half + resized) // (2 * resized), 0)
    total = tl.zeros_like(at)
    for tap in range(taps):
        total += _distance(first + tap, at, length, resized, half)
    # places outside of what is shown have no taps
    return first, half, taps, (1 << bits).to(tl.float64) / tl.maximum(total, 1).to(tl.float64)


@triton.jit
def _distance(pixel, at, length, resized, half):
    inside = half - tl.abs((2 * pixel + 1) * resized - (2 * at + 1) * length)
    return tl.where(pixel < length, tl.maximum(inside, 0), 0)


@triton.jit
def _weight(pixel, at, length, resized, half, unit):
    """The weight of a pixel in fixed point. In float64, where its rounding is never in doubt."""
    return (_distance(pixel, at, length, resized, half).to(tl.float64) * unit + 0.5).to(tl.int32)
