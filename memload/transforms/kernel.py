"""The fused step as one Triton kernel: each program makes a tile of one sample's output."""

# ruff: noqa: N803  # Triton's way of writing constants

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from memload.transforms.fused import Plan
from memload.transforms.geometry import precision

#: What a program makes: rows, columns times channels, strips of so many rows; and with how many warps. On an H200, 256
#: images of 224² are flipped and normalised to bfloat16 in 47 µs, in 54 with half the rows or columns; and resized to
#: that from boxes of 256² in 147 µs, in 175 with half the columns, in 155 with half the strips.
_MOVED, _RESIZED = (16, 256, 1, 4), (8, 256, 4, 4)


def run(images: Tensor, plan: Plan, first: int = 0) -> Tensor:
    """Do what a plan says with uint8 images ``(N, C, H, W)`` of any strides, its samples from ``first``.

    The same numbers as `reference` gives.
    """
    count, channels, height, width = images.shape
    extent = (plan.height.extent, plan.width.extent)
    out = torch.empty(
        (count, channels, *extent),
        dtype=plan.dtype,
        device=images.device,
        memory_format=plan.memory_format,
    )
    if not out.numel():
        return out
    if (
        sum(
            (size - 1) * stride
            for size, stride in zip(images.shape[1:], images.stride()[1:], strict=True)
        )
        >> 32
    ):
        images = images.contiguous(
            memory_format=torch.channels_last
        )  # the kernel's offsets in a sample have 32 bits
    dense = images.stride(1) == out.stride(1) == 1 and images.stride(3) == out.stride(3) == channels
    rows, columns, strips, warps = _RESIZED if plan.resizes else _MOVED
    programs = (
        count * triton.cdiv(extent[0], rows * strips) * triton.cdiv(extent[1] * channels, columns)
    )
    with torch.cuda.device(images.device if images.is_cuda else -1):
        _kernel[(programs,)](
            images, out, plan.uploaded(_numbers, images.device), first,
            height, width, *extent, plan.height.resized or 0, plan.width.resized or 0, len(plan),
            *images.stride(), *out.stride(),
            C=channels, RESIZE=plan.resizes, ANTIALIAS=plan.antialias, LINE=plan.line is not None,
            INSIDE=plan.height.inside and plan.width.inside, DENSE=dense,
            ROWS=rows, COLUMNS=columns, STRIPS=strips, num_warps=warps,
            enable_fp_fusion=False,  # a multiplication and an addition fused round otherwise than the CPU does
        )  # fmt: skip
    return out


def _numbers(plan: Plan) -> np.ndarray:
    """Return what the kernel has to know, int32: 10 numbers of every sample, then 3 of every channel, float32."""
    count, channels = len(plan), len(plan.fill)
    numbers = np.empty(10 * count + 3 * channels, np.int32)
    table, constants = (
        numbers[: 10 * count].reshape(10, count),
        numbers[10 * count :].view(np.float32),
    )
    table[:8] = plan.table().T
    table[8], table[9] = (
        precision(plan.height, plan.antialias),
        precision(plan.width, plan.antialias),
    )
    constants[: 2 * channels] = (
        np.repeat((1, 0), channels) if plan.line is None else plan.line.ravel()
    )
    constants[2 * channels :] = plan.fill
    return numbers


@triton.jit
def _kernel(
    source, out, table, first,
    height, width, extent_y, extent_x, resized_y, resized_x, count,
    from_n, from_c, from_y, from_x, to_n, to_c, to_y, to_x,
    C: tl.constexpr, RESIZE: tl.constexpr, ANTIALIAS: tl.constexpr, LINE: tl.constexpr,
    INSIDE: tl.constexpr, DENSE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, STRIPS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    # the parts of a row first, which are neighbours in memory
    across, down = tl.cdiv(extent_x * C, COLUMNS), tl.cdiv(extent_y, ROWS * STRIPS)
    sample = (program // (across * down)).to(tl.int64)
    column = program % across * COLUMNS + tl.arange(0, COLUMNS)
    x = column // C
    channel = column % C
    mine = table + first + sample
    turned_y, turned_x = tl.load(mine + 3 * count) != 0, tl.load(mine + 7 * count) != 0
    start_y, start_x = tl.load(mine), tl.load(mine + 4 * count)
    length_y, length_x = tl.load(mine + count), tl.load(mine + 5 * count)
    shift_y, shift_x = tl.load(mine + 2 * count), tl.load(mine + 6 * count)
    # the places of the output's pixels before the flip, in the box or in what it is resized to
    at_x = tl.where(turned_x, extent_x - 1 - x, x) + shift_x
    source += sample * from_n
    out += sample * to_n
    # Offsets in a sample have 32 bits and no sign: a thread that resizes takes 72 registers with them, and 122 with
    # pointers. Columns are a tile's first dimension: along that the threads of a warp lie where Triton sees no order of
    # the addresses. Along rows instead, each value of a warp is in a sector of its own.
    to_column = (column if DENSE and not RESIZE else x * to_x + channel * to_c)[:, None]
    from_channel = channel * from_c
    constants = table + 10 * count + channel
    factor = tl.load(constants)[:, None].to(tl.float32, bitcast=True)
    offset = tl.load(constants + C)[:, None].to(tl.float32, bitcast=True)
    fill = tl.load(constants + 2 * C)[:, None].to(tl.float32, bitcast=True)
    if RESIZE:
        fill = fill.to(tl.int32)  # as uint8 has it
        # margins of a crop are filled below; until then they repeat the border, so that no number overflows
        shown_x, bits_x = tl.minimum(tl.maximum(at_x, 0), resized_x - 1), tl.load(mine + 9 * count)
        first_x, half_x, taps_x, total_x, unit_x = _filter(
            shown_x, length_x, resized_x, bits_x, ANTIALIAS
        )
    for strip in range(STRIPS):
        y = (program // across % down * STRIPS + strip) * ROWS + tl.arange(0, ROWS)
        at_y = tl.where(turned_y, extent_y - 1 - y, y) + shift_y
        lanes = (column < extent_x * C)[:, None] & (y < extent_y)[None, :]
        if RESIZE:
            shown_y = tl.minimum(tl.maximum(at_y, 0), resized_y - 1)
            bits_y = tl.load(mine + 8 * count)
            first_y, half_y, taps_y, total_y, unit_y = _filter(
                shown_y, length_y, resized_y, bits_y, ANTIALIAS
            )
            value = tl.zeros(lanes.shape, tl.int32) + (1 << bits_y >> 1)
            for i in range(taps_y):
                weight_y = _weight(
                    first_y + i, shown_y, length_y, resized_y, half_y, total_y, unit_y, bits_y
                )
                source_y, inside_y = _place(first_y + i, start_y, length_y, height)
                rows, inside = (source_y * from_y)[None, :], lanes & inside_y[None, :]
                row = tl.zeros(lanes.shape, tl.int32) + (1 << bits_x >> 1)
                # two pixels are enough where nothing shrinks; their weights are computed once for all strips
                for j in tl.static_range(2):
                    row += _tap(
                        j, source, from_channel, rows, inside, fill, shown_x, start_x, length_x, width, resized_x, first_x,
                        half_x, total_x, unit_x, bits_x, from_x, INSIDE,
                    )  # fmt: skip
                for j in range(2, taps_x):
                    row += _tap(
                        j, source, from_channel, rows, inside, fill, shown_x, start_x, length_x, width, resized_x, first_x,
                        half_x, total_x, unit_x, bits_x, from_x, INSIDE,
                    )  # fmt: skip
                # rows first, rounded to 8 bits, then columns: so torch does it
                value += tl.minimum(row >> bits_x, 255) * weight_y[None, :]
            value = tl.minimum(value >> bits_y, 255)
            if not INSIDE:
                shown = ((at_y >= 0) & (at_y < resized_y))[None, :] & (
                    (at_x >= 0) & (at_x < resized_x)
                )[:, None]
                value = tl.where(shown, value, fill)
            value = value.to(tl.float32)
        else:
            source_y, source_x = start_y + at_y, start_x + at_x
            rows = (source_y * from_y)[None, :]
            inside = lanes
            if not INSIDE:
                inside_x = (source_x >= 0) & (source_x < width)
                inside &= ((source_y >= 0) & (source_y < height))[None, :] & inside_x[:, None]
            if (
                DENSE & (start_x + shift_x == 0) & (not turned_x)
            ):  # the bytes lie as they are needed
                columns = tl.multiple_of(
                    column + start_x, 8
                )  # not 16: a thread of bfloat16 stores 8
                pixels = tl.load(
                    source + (rows + columns[:, None]).to(tl.uint32), mask=inside, other=0
                )
            else:
                columns = source_x * from_x + from_channel
                pixels = tl.load(
                    source + (rows + columns[:, None]).to(tl.uint32), mask=inside, other=0
                )
            value = pixels.to(tl.float32)
            if not INSIDE:
                value = tl.where(inside, value, fill)
        if LINE:
            value = value * factor + offset
        target = (to_column + (y * to_y)[None, :]).to(tl.uint32)
        tl.store(out + target, value.to(out.dtype.element_ty), mask=lanes)


@triton.jit
def _tap(
    j, base, from_channel, rows, mask, fill, at_x, start_x, length_x, width, resized_x, first_x, half_x,
    total_x, unit_x, bits_x, from_x, INSIDE: tl.constexpr,
):  # fmt: skip
    weight = _weight(first_x + j, at_x, length_x, resized_x, half_x, total_x, unit_x, bits_x)
    source, inside = _place(first_x + j, start_x, length_x, width)
    where = (rows + (source * from_x + from_channel)[:, None]).to(tl.uint32)
    if INSIDE:
        value = tl.load(base + where)
    else:
        mask &= inside[:, None]
        value = tl.load(base + where, mask=mask, other=0)
    value = value.to(tl.int32)
    if not INSIDE:
        value = tl.where(mask, value, fill)
    return value * weight[:, None]


@triton.jit
def _place(pixel, start, length, extent):
    """Where in the source a pixel of a box is, those beyond the box at its end, and whether that is inside."""
    place = start + tl.minimum(pixel, length - 1)
    return place, (place >= 0) & (place < extent)


@triton.jit
def _filter(at, length, resized, bits, ANTIALIAS: tl.constexpr):
    """Return what `_weight` needs to know of output pixels ``at``: see `geometry.weights`.

    That is the first source pixel, half of the filter's width, the number of taps, the sum of their distances, and
    what one of these counts, which is 2^bits / total.
    """
    half = 2 * resized
    if ANTIALIAS:
        half = 2 * tl.maximum(length, resized)
    taps = (half + resized - 1) // resized
    first = tl.maximum(((2 * at + 1) * length - half + resized) // (2 * resized), 0)
    total = tl.zeros_like(at)
    for tap in range(taps):
        total += _distance(first + tap, at, length, resized, half)
    unit = (1 << bits).to(tl.float32) / total.to(tl.float32)
    return first, half, taps, total, unit


@triton.jit
def _distance(pixel, at, length, resized, half):
    """Return how far a source pixel is from the end of the filter, in units of 1/(2·resized) of a pixel."""
    inside = half - tl.abs((2 * pixel + 1) * resized - (2 * at + 1) * length)
    return tl.where(pixel < length, tl.maximum(inside, 0), 0)


@triton.jit
def _weight(pixel, at, length, resized, half, total, unit, bits):
    """Return the weight of a source pixel in fixed point: distance · 2^bits / total, rounded to nearest.

    The result is exact, though float64 is not used, which is slow on consumer GPUs. Let x be the exact quotient; it
    is below 2^15, as `geometry.precision` chooses the bits. The float32 product differs from x by less than 1/64:
    the conversion of total and the product are each off by at most 2^-24 of their values and the division by 2^-22,
    together 1.5 · 2^-22 · 2^15, and the addition by 2^-9. With 1/2 - 1/16 added, the sum is between
    x + 1/2 - 1/8 and x + 1/2, so its integer part is the weight or one less than it. The remainder tells the two
    apart. It is at least -total/2 and below 3/2 · total, and twice that fits in 32 bits, as total is at most 2^29 for
    sides of up to 16,384 pixels. So it is right although its terms may overflow: they wrap modulo 2^32.
    """
    distance = _distance(pixel, at, length, resized, half)
    estimate = (distance.to(tl.float32) * unit + 0.4375).to(tl.int32)
    remainder = (distance << bits) - estimate * total
    return estimate + (2 * remainder >= total).to(tl.int32)
