"""A Gaussian blur of uint8 images as a Triton kernel that reads and writes each image once.

Each thread goes down a few neighbouring columns. It blurs one row after another along x, keeps the
last of these rows in registers, as many as the kernel is high, and sums them along y. So there is
no intermediate image.
"""

# ruff: noqa: N803  # Triton's way of writing constants

import torch
import triton
import triton.language as tl
from torch import Tensor

from memload.launch import ceil_div, launch
from memload.transforms.geometry import PADDING_MODES
from memload.transforms.kernels.crops import pixel_shown

#: How many threads a program has, and how many rows it makes at most.
_THREADS, _ROWS = 128, 56
#: A thread makes so many neighbouring pixels of a row, which are sums of mostly the same pixels.
#: For larger radii than this, it makes one: more do not fit in the registers.
_PIXELS, _LARGEST_RADIUS_OF_SEVERAL = 2, 13
#: The loop over rows is unrolled up to so many loads. A kernel of 23×23 compiles in 6 s with 72
#: loads, and in 219 s with 552.
_LOADS = 96
_REFLECT = tl.constexpr(PADDING_MODES.index("reflect"))


def blur(
    radii: tuple[int, int],
    maps_pixels: bool,
    dtype: torch.dtype,
    images: Tensor,
    weights: Tensor,
    maps: Tensor,
    memory_format: torch.memory_format,
) -> Tensor:
    """Return uint8 images ``(N, C, H, W)`` of any strides, each blurred by its weights.

    ``radii`` are those of width and height. ``weights``, float32 ``(N, …)``, are by the distance
    from the middle, 0 to the radius: first those along x, then those along y. If ``maps_pixels``,
    the result is then multiplied by a factor, and an offset is added; see `Plan.maps`.
    """
    out = torch.empty_like(images, dtype=dtype, memory_format=memory_format)
    count, channels, height, width = images.shape
    # The kernel's offsets within a row have 32 bits.
    if (width - 1) * images.stride(3) + (channels - 1) * images.stride(1) >= 1 << 32:
        images = images.contiguous(memory_format=torch.channels_last)
    # Neighbouring threads make neighbouring bytes: all channels of a pixel, or pixels of a channel.
    together = channels if images.stride(1) == 1 else 1
    planes = channels // together
    pixels = _PIXELS if max(radii) <= _LARGEST_RADIUS_OF_SEVERAL else 1
    rows = ceil_div(height, ceil_div(height, _ROWS))
    across = ceil_div(ceil_div(width, pixels) * together, _THREADS)
    launch(
        _kernel, count * planes * across * ceil_div(height, rows),
        images, out, weights, maps, planes, height, width, rows,
        *images.stride(), *out.stride(), MAPS_PIXELS=maps_pixels, RADIUS_X=radii[0],
        RADIUS_Y=radii[1], C=together, PIXELS=pixels, THREADS=_THREADS,
        UNROLL=max(1, min(2 * radii[1] + 1, _LOADS // (2 * radii[0] + pixels))),
        num_warps=_THREADS // 32,
    )  # fmt: skip
    return out


@triton.jit
def _kernel(
    source, out, weights, maps, planes, height, width, rows,
    source_n, source_c, source_y, source_x, out_n, out_c, out_y, out_x,
    MAPS_PIXELS: tl.constexpr, RADIUS_X: tl.constexpr, RADIUS_Y: tl.constexpr, C: tl.constexpr,
    PIXELS: tl.constexpr, THREADS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Make ``rows`` rows of ``PIXELS`` columns for each thread.

    A plane is what neighbouring threads make of a sample: ``C`` channels, all or one.
    """
    program = tl.program_id(0)
    across, down = tl.cdiv(tl.cdiv(width, PIXELS) * C, THREADS), tl.cdiv(height, rows)
    plane = (program // (across * down)).to(tl.int64)
    sample, first_channel = plane // planes, plane % planes
    source += sample * source_n + first_channel * source_c
    out += sample * out_n + first_channel * out_c
    weights += sample * (RADIUS_X + RADIUS_Y + 2)
    thread = program % across * THREADS + tl.arange(0, THREADS)
    left, channel = thread // C * PIXELS, thread % C
    top = program // across % down * rows
    bottom = tl.minimum(top + rows, height)
    factor, offset = 1.0, 0.0
    if MAPS_PIXELS:
        maps += first_channel + channel
        factor, offset = tl.load(maps), tl.load(maps + planes * C)

    # A weight of 1 in the middle means a copy: many batches have samples that are not blurred.
    if (tl.load(weights) == 1) & (tl.load(weights + RADIUS_X + 1) == 1):
        for i in tl.static_range(PIXELS):
            _copy_column(
                source + (left + i) * source_x + channel * source_c,
                out + (left + i) * out_x + channel * out_c,
                left + i < width, top, bottom, source_y, out_y, factor, offset, MAPS_PIXELS,
            )  # fmt: skip
        return

    weights_x = _load(weights, RADIUS_X + 1)
    weights_y = weights_x
    if RADIUS_X != RADIUS_Y:
        weights_y = _load(weights + RADIUS_X + 1, RADIUS_Y + 1)
    # Where a row's pixels are that a thread needs.
    columns = ()
    for i in tl.static_range(2 * RADIUS_X + PIXELS):
        column = pixel_shown(left + i - RADIUS_X, width, _REFLECT) * source_x + channel * source_c
        # Unsigned, since 64 bits with a sign need two registers: 255 are too few for large kernels.
        columns += (column.to(tl.uint32),)
    # The last rows blurred along x, PIXELS values of each. Nothing is moved where the loop is
    # unrolled, and it has few registers for more.
    window = ()
    for _ in tl.static_range((2 * RADIUS_Y + 1) * PIXELS):
        window += (tl.zeros((THREADS,), tl.float32),)
    for step in tl.range(0, bottom - top + 2 * RADIUS_Y, loop_unroll_factor=UNROLL):
        y = pixel_shown(top + step - RADIUS_Y, height, _REFLECT).to(tl.int64)
        pixels = ()
        for i in tl.static_range(2 * RADIUS_X + PIXELS):
            pixels += (tl.load(source + y * source_y + columns[i]).to(tl.float32),)
        for i in tl.static_range(PIXELS):
            window = window[1:]
            window += (_weighted_sum(pixels, i, 1, weights_x, RADIUS_X),)
        if step >= 2 * RADIUS_Y:
            target = out + (top + step - 2 * RADIUS_Y).to(tl.int64) * out_y
            for i in tl.static_range(PIXELS):
                value = _weighted_sum(window, i, PIXELS, weights_y, RADIUS_Y)
                place = ((left + i) * out_x + channel * out_c).to(tl.uint32)
                _store(
                    target + place, _rounded(value), left + i < width, factor, offset, MAPS_PIXELS
                )


@triton.jit
def _copy_column(
    source, out, mask, top, bottom, source_y, out_y, factor, offset, MAPS_PIXELS: tl.constexpr
):
    """Copy a column for each thread, 16 rows at once, since most of the time is spent waiting."""
    for first in range(top, bottom, 16):
        pixels = ()
        for i in tl.static_range(16):
            y = tl.minimum(first + i, bottom - 1).to(tl.int64)
            pixels += (tl.load(source + y * source_y, mask=mask),)
        for i in tl.static_range(16):
            y = tl.minimum(first + i, bottom - 1).to(tl.int64)
            _store(out + y * out_y, pixels[i], mask, factor, offset, MAPS_PIXELS)


@triton.jit
def _store(target, value, mask, factor, offset, MAPS_PIXELS: tl.constexpr):
    if MAPS_PIXELS:
        value = value.to(tl.float32) * factor + offset
    tl.store(target, value.to(target.dtype.element_ty), mask=mask)


@triton.jit
def _load(start, COUNT: tl.constexpr):
    """Return so many numbers as a tuple."""
    values = ()
    for i in tl.static_range(COUNT):
        values += (tl.load(start + i),)
    return values


@triton.jit
def _weighted_sum(values, FIRST: tl.constexpr, STEP: tl.constexpr, weights, RADIUS: tl.constexpr):
    """Return the sum of every ``STEP``-th value, by its weight; those at one distance first."""
    middle: tl.constexpr = FIRST + STEP * RADIUS
    total = values[middle] * weights[0]
    for distance in tl.static_range(1, RADIUS + 1):
        pair = values[middle - STEP * distance] + values[middle + STEP * distance]
        total += pair * weights[distance]
    return total


@triton.jit
def _rounded(value):
    """Return a number from 0 to 255 as the nearest integer, and of two as the even one.

    From 2^23 to 2^24, float32 has whole numbers only. Its last bits are the integer.
    """
    return (value + 12_582_912.0).to(tl.int32, bitcast=True).to(tl.uint8)  # 1.5 · 2^23
