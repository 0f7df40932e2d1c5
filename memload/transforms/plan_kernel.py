"""A plan as a Triton kernel for images and one for masks, which share the plan's parameters.

Each program makes a tile of one sample's output.
"""

# ruff: noqa: N803  # Triton's way of writing constants

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from memload.launch import ceil_div, launch
from memload.transforms.geometry import PADDING_MODES, Plan, precision
from memload.transforms.resampling import filters_of

#: What a program makes: rows, columns times channels, strips of so many rows; and the number of
#: warps. On an H200, 256 images of 224×224 are flipped and normalised to bfloat16 in 38 µs, and in
#: 54 µs with half the rows or columns. Random crops of them are resized to 224×224 in 112 µs, and
#: with tiles of (4, 256, 4, 2) in 128 µs; of 256×256 to 176×176, in 113 and 139 µs.
_TILE_MOVED, _TILE_RESIZED = (16, 256, 1, 4), (8, 64, 4, 1)
#: The same for filters of a table. Crops of 256×256 are resized bicubically to 224×224 in 270 µs,
#: and to 96×96 in 81 µs; in 301 and 99 µs with tiles of (8, 128, 2, 4).
_TILE_BY_TABLE = 8, 32, 2, 1
#: Rows and columns that a program makes of a mask.
_TILE_OF_MASK = 32, 64
#: How many integers `_parameters` has for each sample, and how many numbers for each channel.
_PER_SAMPLE, _PER_CHANNEL = tl.constexpr(12), tl.constexpr(3)


def run(images: Tensor, plan: Plan, first_in_plan: int = 0) -> Tensor:
    """Carry out a plan for uint8 images ``(N, C, H, W)`` of any strides.

    They are the plan's samples from ``first_in_plan``. The result has the same bits as that of
    `plan_reference`, except for images resized bilinearly to a width of 1 pixel. Sides have at most
    `geometry.LARGEST_SIDE` pixels.
    """
    count, channels, height, width = images.shape
    extent = plan.height.extent, plan.width.extent
    out = torch.empty(
        (count, channels, *extent),
        dtype=plan.dtype,
        device=images.device,
        memory_format=plan.memory_format,
    )
    if not out.numel():
        return out
    sides_and_strides = zip(images.shape[1:], images.stride()[1:], strict=True)
    # The kernel's offsets within a sample have 32 bits.
    if sum((side - 1) * stride for side, stride in sides_and_strides) >= 1 << 32:
        images = images.contiguous(memory_format=torch.channels_last)
    dense = images.stride(1) == out.stride(1) == 1 and images.stride(3) == out.stride(3) == channels
    tile = _TILE_RESIZED if plan.resizes else _TILE_MOVED
    rows, columns, strips, warps = _TILE_BY_TABLE if plan.resizes_bicubically else tile
    tiles = ceil_div(extent[0], rows * strips) * ceil_div(extent[1] * channels, columns)
    launch(
        _kernel, count * tiles, images, out, plan.uploaded(_parameters, images.device),
        first_in_plan, height, width, *extent, plan.height.resized or 0, plan.width.resized or 0,
        len(plan.height.start), *images.stride(), *out.stride(),
        C=channels, RESIZE=plan.resizes, TABLE=plan.resizes_bicubically,
        ANTIALIAS=plan.antialias, AFFINE=plan.maps_pixels,
        INSIDE=plan.height.inside and plan.width.inside, PADDING=_padding(plan), DENSE=dense,
        ROWS=rows, COLUMNS=columns, STRIPS=strips, num_warps=warps,
        enable_fp_fusion=False,  # a fused multiply-add rounds differently than the CPU does
    )  # fmt: skip
    return out


def run_masks(masks: Tensor, plan: Plan, fill: int, first_in_plan: int = 0) -> Tensor:
    """Carry out a plan for masks ``(N, H, W)`` of integers.

    They are the plan's samples from ``first_in_plan``. The result is that of `reference_masks`.
    """
    masks = masks.contiguous()
    count, height, width = masks.shape
    extent = plan.height.extent, plan.width.extent
    out = masks.new_empty((count, *extent))
    if not count:
        return out
    rows, columns = _TILE_OF_MASK
    tiles = ceil_div(extent[0], rows) * ceil_div(extent[1], columns)
    launch(
        _mask_kernel, count * tiles, masks, out, plan.uploaded(_parameters, masks.device),
        first_in_plan, fill, height, width, *extent, plan.height.resized or 0,
        plan.width.resized or 0, len(plan.height.start), RESIZE=plan.resizes,
        PADDING=_padding(plan), ROWS=rows, COLUMNS=columns,
    )  # fmt: skip
    return out


def _padding(plan: Plan) -> int:
    """Return the number of the padding mode; 0, that of "constant", where there is no padding."""
    inside = plan.height.inside and plan.width.inside
    return 0 if inside else PADDING_MODES.index(plan.padding_mode)


def _parameters(plan: Plan) -> np.ndarray:
    """Return the parameters of the kernels as int32.

    First come 12 rows with a number for each sample: `Plan.table`, the precisions of height and
    width, and whether each was mirrored. Then come 3 rows with a float32 for each channel: factor,
    offset and fill. If any sample is resized bicubically, `Filters.places` and the table of these
    follow. The places are then counted from the first parameter.
    """
    table, channels = plan.table(), len(plan.fill)
    rows, count = _PER_SAMPLE.value, table.shape[1]
    parameters = np.empty(rows * count + _PER_CHANNEL.value * channels, np.int32)
    per_sample = parameters[: rows * count].reshape(rows, count)
    per_sample[:8] = table
    per_sample[10], per_sample[11] = plan.height.mirrored, plan.width.mirrored
    per_channel = parameters[rows * count :].view(np.float32).reshape(-1, channels)
    per_channel[:] = plan.factor, plan.offset, plan.fill
    if plan.resizes_bicubically:
        per_sample[8:10], places, filters = filters_of(plan)
        places[:2] += parameters.size + places.size
        return np.concatenate([parameters, places.ravel(), *filters])
    per_sample[8] = precision(plan.height, plan.antialias)
    per_sample[9] = precision(plan.width, plan.antialias)
    return parameters


@triton.jit
def _kernel(
    source, out, parameters, first,
    height, width, extent_y, extent_x, resized_y, resized_x, count,
    source_n, source_c, source_y, source_x, out_n, out_c, out_y, out_x,
    C: tl.constexpr, RESIZE: tl.constexpr, TABLE: tl.constexpr, ANTIALIAS: tl.constexpr,
    AFFINE: tl.constexpr, INSIDE: tl.constexpr, PADDING: tl.constexpr, DENSE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STRIPS: tl.constexpr,
):  # fmt: skip
    """Make one tile of the output.

    Names that end in ``_y`` are about rows (the height), those in ``_x`` about columns (the width).
    What each name says of one axis:

    - start, length: the sample's box in the source: its first pixel, and the number of its pixels.
    - shift, flipped: see `geometry.Axis`.
    - from: for each pixel of the output, its pixel in the resized box; without resizing, in the
      box. In a margin it is outside.
    - shown: ``from``, moved to the nearest pixel of the resized box. Only this is computed.
    - first, half, taps, total, unit: the filter of each such pixel. That is its first pixel in the
      box, half its width, the number of its taps, the sum of its distances, and 2^bits / total; see
      `_filter`.
    - bits: how many bits of the weights are after the binary point; see `geometry.precision`.

    If any sample of the plan is bicubic (``TABLE``), filters come from a table instead; see
    `_by_table`. Without a bicubic sample, the code is that of a kernel that knows no tables.

    The parameter ``first`` has no axis: it is the batch's first sample in the plan.
    """
    program = tl.program_id(0)
    # Tiles of the same rows come first, since they are neighbours in memory.
    across, down = tl.cdiv(extent_x * C, COLUMNS), tl.cdiv(extent_y, ROWS * STRIPS)
    sample = (program // (across * down)).to(tl.int64)
    column = program % across * COLUMNS + tl.arange(0, COLUMNS)
    x = column // C
    channel = column % C
    mine = parameters + first + sample
    start_y, start_x = tl.load(mine), tl.load(mine + 4 * count)
    length_y, length_x = tl.load(mine + count), tl.load(mine + 5 * count)
    shift_y, shift_x = tl.load(mine + 2 * count), tl.load(mine + 6 * count)
    flipped_y, flipped_x = tl.load(mine + 3 * count) != 0, tl.load(mine + 7 * count) != 0
    # Where the output's columns come from: in the box, or in what it is resized to.
    from_x = tl.where(flipped_x, extent_x - 1 - x, x) + shift_x
    source += sample * source_n
    out += sample * out_n
    # Offsets within a sample are unsigned and have 32 bits, as pointers take twice as many
    # registers. Columns are a tile's first dimension: Triton puts the threads of a warp along the
    # first dimension if it cannot see the order of addresses. Along rows, every thread would read
    # another sector.
    out_column = (column if DENSE and not RESIZE else x * out_x + channel * out_c)[:, None]
    channel_offset = channel * source_c
    constants = parameters + _PER_SAMPLE * count + channel
    factor = tl.load(constants)[:, None].to(tl.float32, bitcast=True)
    offset = tl.load(constants + C)[:, None].to(tl.float32, bitcast=True)
    fill = tl.load(constants + 2 * C)[:, None].to(tl.float32, bitcast=True)
    if RESIZE:
        fill = fill.to(tl.int32)
        # Margins are filled below. Until then they repeat the border, so that nothing overflows.
        shown_x = pixel_shown(from_x, resized_x, PADDING)
        bits_x = tl.load(mine + 9 * count)
        if TABLE:
            places = mine + _PER_SAMPLE * count + _PER_CHANNEL * C
            rows_y, rows_x = parameters + tl.load(places), parameters + tl.load(places + count)
            taps_y, taps_x = tl.load(places + 2 * count), tl.load(places + 3 * count)
        else:
            first_x, half_x, taps_x, total_x, unit_x = _filter(
                shown_x, length_x, resized_x, bits_x, ANTIALIAS
            )
    for strip in range(STRIPS):
        y = (program // across % down * STRIPS + strip) * ROWS + tl.arange(0, ROWS)
        from_y = tl.where(flipped_y, extent_y - 1 - y, y) + shift_y
        in_output = (column < extent_x * C)[:, None] & (y < extent_y)[None, :]
        if RESIZE:
            shown_y = pixel_shown(from_y, resized_y, PADDING)
            bits_y = tl.load(mine + 8 * count)
            if TABLE:
                value = _by_table(
                    source, channel_offset, in_output, fill, shown_y, shown_x, rows_y, rows_x,
                    taps_y, taps_x, bits_y, bits_x, start_y, start_x, length_y, length_x,
                    height, width, resized_y, resized_x, source_y, source_x, INSIDE, PADDING,
                )  # fmt: skip
            else:
                first_y, half_y, taps_y, total_y, unit_y = _filter(
                    shown_y, length_y, resized_y, bits_y, ANTIALIAS
                )
                value = tl.zeros(in_output.shape, tl.int32) + (1 << bits_y >> 1)
                for i in range(taps_y):
                    weight_y = _weight(
                        first_y + i, shown_y, length_y, resized_y, half_y, total_y, unit_y, bits_y
                    )
                    pixel_y, inside_y = _source_pixel(
                        first_y + i, start_y, length_y, height, PADDING
                    )
                    row_offset, mask = (pixel_y * source_y)[None, :], in_output & inside_y[None, :]
                    row = tl.zeros(in_output.shape, tl.int32) + (1 << bits_x >> 1)
                    # Two taps are enough unless the box shrinks. Unrolled, their weights are
                    # computed once for all strips.
                    for j in tl.static_range(2):
                        row += _tap(
                            j, source, channel_offset, row_offset, mask, fill, shown_x, start_x,
                            length_x, width, resized_x, first_x, half_x, total_x, unit_x, bits_x,
                            source_x, INSIDE, PADDING,
                        )  # fmt: skip
                    for j in range(2, taps_x):
                        row += _tap(
                            j, source, channel_offset, row_offset, mask, fill, shown_x, start_x,
                            length_x, width, resized_x, first_x, half_x, total_x, unit_x, bits_x,
                            source_x, INSIDE, PADDING,
                        )  # fmt: skip
                    # As torch does it: rows first, rounded to 8 bits, then columns.
                    value += tl.minimum(row >> bits_x, 255) * weight_y[None, :]
                value = tl.minimum(value >> bits_y, 255)
            if PADDING == 0 and not INSIDE:
                shown = ((from_y >= 0) & (from_y < resized_y))[None, :] & (
                    (from_x >= 0) & (from_x < resized_x)
                )[:, None]
                value = tl.where(shown, value, fill)
            value = value.to(tl.float32)
        else:
            pixel_y, pixel_x = start_y + from_y, start_x + from_x
            if PADDING:
                pixel_y = pixel_shown(pixel_y, height, PADDING)
                pixel_x = pixel_shown(pixel_x, width, PADDING)
            row_offset = (pixel_y * source_y)[None, :]
            mask = in_output
            if PADDING == 0 and not INSIDE:
                inside_x = (pixel_x >= 0) & (pixel_x < width)
                mask &= ((pixel_y >= 0) & (pixel_y < height))[None, :] & inside_x[:, None]
            # Without a flip, the bytes of a row can be loaded in the order they are stored in.
            if (PADDING == 0) & DENSE & (start_x + shift_x == 0) & (not flipped_x):
                # Not a multiple of 16: a thread stores 8 bfloat16 at once.
                columns = tl.multiple_of(column + start_x, 8)
                where = (row_offset + columns[:, None]).to(tl.uint32)
                pixels = tl.load(source + where, mask=mask, other=0)
            else:
                columns = pixel_x * source_x + channel_offset
                where = (row_offset + columns[:, None]).to(tl.uint32)
                pixels = tl.load(source + where, mask=mask, other=0)
            value = pixels.to(tl.float32)
            if not INSIDE:
                value = tl.where(mask, value, fill)
        if AFFINE:
            value = value * factor + offset
        target = (out_column + (y * out_y)[None, :]).to(tl.uint32)
        tl.store(out + target, value.to(out.dtype.element_ty), mask=in_output)


@triton.jit
def _by_table(
    source, channel_offset, in_output, fill, shown_y, shown_x, rows_y, rows_x,
    taps_y, taps_x, bits_y, bits_x, start_y, start_x, length_y, length_x,
    height, width, resized_y, resized_x, source_y, source_x,
    INSIDE: tl.constexpr, PADDING: tl.constexpr,
):  # fmt: skip
    """Return what a tile is resized to, by filters of a table, whose ``rows`` are `Filter.rows`.

    Each pass ends between 0 and 255, as torch does it: bicubic weights can be below 0.
    """
    first_y, first_x = tl.load(rows_y + shown_y), tl.load(rows_x + shown_x)
    value = tl.zeros(in_output.shape, tl.int32) + (1 << bits_y >> 1)
    for i in range(taps_y):
        weight_y = tl.load(rows_y + (i + 1) * resized_y + shown_y)
        pixel_y, inside_y = _source_pixel(first_y + i, start_y, length_y, height, PADDING)
        row_offset, mask = (pixel_y * source_y)[None, :], in_output & inside_y[None, :]
        row = tl.zeros(in_output.shape, tl.int32) + (1 << bits_x >> 1)
        # Four taps are enough unless the box shrinks, and every filter has so many rows.
        for j in tl.static_range(4):
            weight = tl.load(rows_x + (j + 1) * resized_x + shown_x)
            row += weight[:, None] * _tap_pixels(
                first_x + j, source, channel_offset, row_offset, mask, fill, start_x, length_x,
                width, source_x, INSIDE, PADDING,
            )  # fmt: skip
        for j in range(4, taps_x):
            weight = tl.load(rows_x + (j + 1) * resized_x + shown_x)
            row += weight[:, None] * _tap_pixels(
                first_x + j, source, channel_offset, row_offset, mask, fill, start_x, length_x,
                width, source_x, INSIDE, PADDING,
            )  # fmt: skip
        value += tl.minimum(tl.maximum(row >> bits_x, 0), 255) * weight_y[None, :]
    return tl.minimum(tl.maximum(value >> bits_y, 0), 255)


@triton.jit
def _tap(
    j, source, channel_offset, row_offset, mask, fill, shown_x, start_x, length_x,
    width, resized_x, first_x, half_x, total_x, unit_x, bits_x, source_x,
    INSIDE: tl.constexpr, PADDING: tl.constexpr,
):  # fmt: skip
    """Return what source pixel ``first_x + j`` contributes to each pixel of a row."""
    weight = _weight(first_x + j, shown_x, length_x, resized_x, half_x, total_x, unit_x, bits_x)
    value = _tap_pixels(
        first_x + j, source, channel_offset, row_offset, mask, fill, start_x, length_x,
        width, source_x, INSIDE, PADDING,
    )  # fmt: skip
    return value * weight[:, None]


@triton.jit
def _tap_pixels(
    pixel, source, channel_offset, row_offset, mask, fill, start_x, length_x,
    width, source_x, INSIDE: tl.constexpr, PADDING: tl.constexpr,
):  # fmt: skip
    """Return the value of a pixel of the box for each pixel of a row."""
    pixel_x, inside_x = _source_pixel(pixel, start_x, length_x, width, PADDING)
    where = (row_offset + (pixel_x * source_x + channel_offset)[:, None]).to(tl.uint32)
    if INSIDE:
        value = tl.load(source + where)
    else:
        mask &= inside_x[:, None]
        value = tl.load(source + where, mask=mask, other=0)
    value = value.to(tl.int32)
    if not INSIDE:
        value = tl.where(mask, value, fill)
    return value


@triton.jit
def pixel_shown(pixel, extent, PADDING: tl.constexpr):
    """Return which pixel of an axis is shown at a place: for "constant" as for "edge", the nearest.

    See `geometry.pixels_shown`.
    """
    last = extent - 1
    if PADDING == 2:
        pixel = last - tl.abs(last - tl.abs(pixel))
    if PADDING == 3:
        pixel = tl.where(pixel < 0, -1 - pixel, pixel)
        pixel = tl.where(pixel > last, 2 * last + 1 - pixel, pixel)
    return tl.minimum(tl.maximum(pixel, 0), last)


@triton.jit
def _source_pixel(pixel, start, length, extent, PADDING: tl.constexpr):
    """Return the source pixel of a pixel of the box, at most the last, and whether it is inside."""
    source_pixel = start + tl.minimum(pixel, length - 1)
    if PADDING:
        source_pixel = pixel_shown(source_pixel, extent, PADDING)
    return source_pixel, (source_pixel >= 0) & (source_pixel < extent)


@triton.jit
def _filter(pixel, length, resized, bits, ANTIALIAS: tl.constexpr):
    """Return the filter of each output pixel, for `_weight`. See `geometry.weights`.

    That is the first source pixel, half the filter's width, the number of taps, the sum of their
    distances, and 2^bits / sum.
    """
    half = 2 * resized
    if ANTIALIAS:
        half = 2 * tl.maximum(length, resized)
    taps = (half + resized - 1) // resized
    first = tl.maximum(((2 * pixel + 1) * length - half + resized) // (2 * resized), 0)
    total = tl.zeros_like(pixel)
    for tap in range(taps):
        total += _distance(first + tap, pixel, length, resized, half)
    unit = (1 << bits).to(tl.float32) / total.to(tl.float32)
    return first, half, taps, total, unit


@triton.jit
def _distance(source_pixel, pixel, length, resized, half):
    """Return how far a source pixel is from the end of the filter, 0 beyond it or the box."""
    inside = half - tl.abs((2 * source_pixel + 1) * resized - (2 * pixel + 1) * length)
    return tl.where(source_pixel < length, tl.maximum(inside, 0), 0)


@triton.jit
def _weight(source_pixel, pixel, length, resized, half, total, unit, bits):
    """Return the weight of a source pixel in fixed point: distance · 2^bits / total, rounded.

    The result is exact, though float64, which is slow on consumer GPUs, is not used. Let x be the
    exact quotient. It is below 2^15, because `geometry.precision` chooses the bits so.

    - The float32 sum is x + 1/2 - 1/16, with an error of less than 1/64. Converting total and
      multiplying are each off by at most 2^-24 of the value, and dividing by 2^-22: together by
      1.5 · 2^-22 · 2^15. The addition is off by at most 2^-9.
    - So the sum is between x + 1/2 - 1/8 and x + 1/2, and its integer part is the weight, or one
      less.
    - The remainder distance · 2^bits - estimate · total tells which. It is at least -total/2 and
      below 3/2 · total. total is at most 2^29, for sides of up to 16,384 pixels, so twice the
      remainder fits in 32 bits. Its two terms may overflow, but they wrap modulo 2^32, and so their
      difference is right.
    """
    distance = _distance(source_pixel, pixel, length, resized, half)
    estimate = (distance.to(tl.float32) * unit + 0.4375).to(tl.int32)
    remainder = (distance << bits) - estimate * total
    return estimate + (2 * remainder >= total).to(tl.int32)


@triton.jit
def _mask_kernel(
    source, out, parameters, first, fill,
    height, width, extent_y, extent_x, resized_y, resized_x, count,
    RESIZE: tl.constexpr, PADDING: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Make one tile of the output of a mask. The names are those of `_kernel`."""
    program = tl.program_id(0)
    across, down = tl.cdiv(extent_x, COLUMNS), tl.cdiv(extent_y, ROWS)
    sample = (program // (across * down)).to(tl.int64)
    y = program // across % down * ROWS + tl.arange(0, ROWS)
    x = program % across * COLUMNS + tl.arange(0, COLUMNS)
    mine = parameters + first + sample
    pixel_y, inside_y = _nearest(
        y, mine, tl.load(mine + 10 * count), count, height, extent_y, resized_y, RESIZE, PADDING
    )
    pixel_x, inside_x = _nearest(
        x, mine + 4 * count, tl.load(mine + 11 * count), count, width, extent_x, resized_x, RESIZE,
        PADDING,
    )  # fmt: skip
    # Columns are a tile's first dimension, as in `_kernel`.
    in_output = (x < extent_x)[:, None] & (y < extent_y)[None, :]
    inside = in_output & inside_x[:, None] & inside_y[None, :]
    source += sample * height * width
    out += sample * extent_y * extent_x
    where = (pixel_y * width)[None, :] + pixel_x[:, None]
    value = tl.load(source + where, mask=inside, other=fill)
    tl.store(out + (y * extent_x)[None, :] + x[:, None], value, mask=in_output)


@triton.jit
def _nearest(
    output, mine, mirrored, count, source, extent, resized,
    RESIZE: tl.constexpr, PADDING: tl.constexpr,
):  # fmt: skip
    """Return the source pixel of each output pixel of an axis, and whether it is inside.

    ``mine`` points at the start of the sample's box. See `geometry.Axis.nearest`.
    """
    start, length = tl.load(mine), tl.load(mine + count)
    shift, flipped = tl.load(mine + 2 * count), tl.load(mine + 3 * count) != 0
    pixel = tl.where(flipped, extent - 1 - output, output) + shift
    inside, in_box = output < extent, pixel
    if RESIZE:
        if PADDING:
            pixel = pixel_shown(pixel, resized, PADDING)
        inside &= (pixel >= 0) & (pixel < resized)
        in_box = ((2 * pixel + 1) * length - mirrored) // (2 * resized)
    source_pixel = start + in_box
    if PADDING:
        source_pixel = pixel_shown(source_pixel, source, PADDING)
    return source_pixel, inside & (source_pixel >= 0) & (source_pixel < source)
