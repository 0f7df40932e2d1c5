"""A plan as a Triton kernel. Each program makes a tile of one sample's output."""

# ruff: noqa: N803  # Triton's way of writing constants

import torch
import triton
import triton.language as tl
from torch import Tensor

from memload.launch import ceil_div, launch
from memload.transforms.geometry import PADDING_MODES, Plan

#: What a program makes: rows, columns times channels, strips of so many rows; and the number of
#: warps. On an H200, 256 images of 224×224 are flipped and normalised to bfloat16 in 38 µs, and in
#: 54 µs with half the rows or columns. Random crops of them are resized to 224×224 in 112 µs, and
#: with tiles of (4, 256, 4, 2) in 128 µs; of 256×256 to 176×176, in 113 and 139 µs.
_TILE_MOVED, _TILE_RESIZED = (16, 256, 1, 4), (8, 64, 4, 1)
#: Bits of a column's weight after the point. Pixels times integers are summed, as conversions to
#: float are slow: with one for each tap, a bilinear crop took 1.14 times as long on an H200, and a
#: bicubic one 1.25 times.
_BITS, _ONE, _HALF = tl.constexpr(21), tl.constexpr(1 << 21), tl.constexpr(1 << 20)
_UNIT = tl.constexpr(1.0 / (1 << 21))


def crop(
    images: Tensor, plan: Plan, boxes: Tensor, maps: Tensor, memory_format: torch.memory_format
) -> Tensor:
    """Carry out a plan for uint8 images ``(N, C, H, W)`` of any strides.

    ``boxes`` are the part of `Plan.boxes` for these images, and ``maps`` are `Plan.maps`. Sides
    have at most `geometry.LARGEST_SIDE` pixels.
    """
    (count, channels, height, width), size = images.shape, plan.size
    out = torch.empty(
        (count, channels, *size),
        dtype=plan.dtype,
        device=images.device,
        memory_format=memory_format,
    )
    if not out.numel():
        return out
    strides, out_strides = images.stride(), out.stride()
    # The kernel's offsets within a sample have 32 bits.
    last = (channels - 1) * strides[1] + (height - 1) * strides[2] + (width - 1) * strides[3]
    if last >= 1 << 32:
        images = images.contiguous(memory_format=torch.channels_last)
        strides = images.stride()
    dense = strides[1] == out_strides[1] == 1 and strides[3] == out_strides[3] == channels
    inside, resizes = plan.height.inside and plan.width.inside, plan.resizes
    rows, columns, strips, warps = _TILE_RESIZED if resizes else _TILE_MOVED
    tiles = ceil_div(size[0], rows * strips) * ceil_div(size[1] * channels, columns)
    launch(
        _kernel, count * tiles, images, out, boxes, maps, height, width, *size,
        plan.height.resized or 0, plan.width.resized or 0, *strides, *out_strides,
        C=channels, RESIZE=resizes, BICUBIC=plan.bicubic, ANTIALIAS=plan.antialias,
        MAPS_PIXELS=plan.maps_pixels, INSIDE=inside,
        PADDING=0 if inside else PADDING_MODES.index(plan.padding_mode), DENSE=dense,
        ROWS=rows, COLUMNS=columns, STRIPS=strips, num_warps=warps,
    )  # fmt: skip
    return out


@triton.jit
def _kernel(
    source, out, boxes, maps, height, width, extent_y, extent_x, resized_y, resized_x,
    source_n, source_c, source_y, source_x, out_n, out_c, out_y, out_x,
    C: tl.constexpr, RESIZE: tl.constexpr, BICUBIC: tl.constexpr, ANTIALIAS: tl.constexpr,
    MAPS_PIXELS: tl.constexpr, INSIDE: tl.constexpr, PADDING: tl.constexpr, DENSE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STRIPS: tl.constexpr,
):  # fmt: skip
    """Make one tile of the output.

    Names that end in ``_y`` are about rows (the height), those in ``_x`` about columns (the width).
    What each name says of one axis:

    - start, length: the sample's box in the source: its first pixel, and the number of its pixels.
    - shift, flipped: see `geometry.Axis`.
    - from: for each pixel of the output, its pixel in the resized box; without resizing, in the
      box. In a margin it is outside.
    """
    program = tl.program_id(0)
    # Tiles of the same rows come first, since they are neighbours in memory.
    across, down = tl.cdiv(extent_x * C, COLUMNS), tl.cdiv(extent_y, ROWS * STRIPS)
    sample = (program // (across * down)).to(tl.int64)
    column = program % across * COLUMNS + tl.arange(0, COLUMNS)
    x, channel = column // C, column % C
    start_y, length_y, shift_y, flipped_y = _box(boxes + sample * 8)
    start_x, length_x, shift_x, flipped_x = _box(boxes + sample * 8 + 4)
    from_x = tl.where(flipped_x, extent_x - 1 - x, x) + shift_x
    source += sample * source_n
    out += sample * out_n
    # Offsets within a sample are unsigned and have 32 bits, as pointers take twice as many
    # registers. Columns are a tile's first dimension: Triton puts the threads of a warp along the
    # first dimension if it cannot see the order of addresses. Along rows, every thread would read
    # another sector.
    out_column = (column if DENSE and not RESIZE else x * out_x + channel * out_c)[:, None]
    channel_offset = channel * source_c
    factor, offset = tl.load(maps + channel)[:, None], tl.load(maps + C + channel)[:, None]
    fill = tl.load(maps + 2 * C + channel)[:, None]
    if RESIZE:
        filter_x = _filter(from_x, length_x, resized_x, BICUBIC, ANTIALIAS)
    for strip in range(STRIPS):
        y = (program // across % down * STRIPS + strip) * ROWS + tl.arange(0, ROWS)
        from_y = tl.where(flipped_y, extent_y - 1 - y, y) + shift_y
        in_output = (column < extent_x * C)[:, None] & (y < extent_y)[None, :]
        if RESIZE:
            filter_y = _filter(from_y, length_y, resized_y, BICUBIC, ANTIALIAS)
            value = _resized(
                source, channel_offset, in_output, fill, filter_y, filter_x, start_y, start_x,
                length_y, length_x, height, width, source_y, source_x,
                BICUBIC, ANTIALIAS, INSIDE, PADDING,
            )  # fmt: skip
            if PADDING == 0 and not INSIDE:
                is_shown_x = (from_x >= 0) & (from_x < resized_x)
                is_shown = ((from_y >= 0) & (from_y < resized_y))[None, :] & is_shown_x[:, None]
                value = tl.where(is_shown, value, fill)
        else:
            # Without a flip, the bytes of a row can be loaded in the order they are stored in.
            in_order = (PADDING == 0) & DENSE & (start_x + shift_x == 0) & (not flipped_x)
            value = _moved(
                source, column, channel_offset, in_output, fill, start_y + from_y,
                start_x + from_x, start_x, height, width, source_y, source_x, in_order,
                INSIDE, PADDING,
            )  # fmt: skip
        if MAPS_PIXELS:
            value = value * factor + offset
        target = (out_column + (y * out_y)[None, :]).to(tl.uint32)
        tl.store(out + target, value.to(out.dtype.element_ty), mask=in_output)


@triton.jit
def _box(numbers):
    """Return start, length, shift and flipped of an axis."""
    start, length, shift = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2)
    return start, length, shift, tl.load(numbers + 3) != 0


@triton.jit
def _moved(
    source, column, channel_offset, in_output, fill, pixel_y, pixel_x, start_x, height, width,
    source_y, source_x, in_order, INSIDE: tl.constexpr, PADDING: tl.constexpr,
):  # fmt: skip
    """Return the values of source pixels, or what is shown outside of the source."""
    if PADDING:
        pixel_y = pixel_shown(pixel_y, height, PADDING)
        pixel_x = pixel_shown(pixel_x, width, PADDING)
    row_offset = (pixel_y * source_y)[None, :]
    mask = in_output
    if PADDING == 0 and not INSIDE:
        inside_x = (pixel_x >= 0) & (pixel_x < width)
        mask &= ((pixel_y >= 0) & (pixel_y < height))[None, :] & inside_x[:, None]
    if in_order:
        # Here ``start_x`` is 0. With it, Triton takes 8 columns for neighbours, not 16: a thread
        # stores 8 bfloat16 at once.
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
    return value


@triton.jit
def _resized(
    source, channel_offset, in_output, fill, filter_y, filter_x, start_y, start_x, length_y,
    length_x, height, width, source_y, source_x,
    BICUBIC: tl.constexpr, ANTIALIAS: tl.constexpr, INSIDE: tl.constexpr, PADDING: tl.constexpr,
):  # fmt: skip
    """Return the values of pixels of the resized box, from 0 to 255 and rounded."""
    first_y, taps_y, first_x, taps_x = filter_y[1], filter_y[2], filter_x[1], filter_x[2]
    value = tl.zeros(in_output.shape, tl.float32)
    for i in range(taps_y):
        weight_y = _weight(first_y + i, filter_y, length_y, BICUBIC, ANTIALIAS)
        pixel_y, inside_y = _source_pixel(first_y + i, start_y, length_y, height, PADDING)
        row_offset, mask = (pixel_y * source_y)[None, :], in_output & inside_y[None, :]
        row = tl.zeros(in_output.shape, tl.int32) + (0 if BICUBIC else _HALF)
        # Two or four taps are enough unless the box shrinks. Unrolled, their weights are computed
        # once for all strips.
        for j in tl.static_range(4 if BICUBIC else 2):
            row += _tap(
                first_x + j, source, channel_offset, row_offset, mask, fill, filter_x, start_x,
                length_x, width, source_x, BICUBIC, ANTIALIAS, INSIDE, PADDING,
            )  # fmt: skip
        for j in range(4 if BICUBIC else 2, taps_x):
            row += _tap(
                first_x + j, source, channel_offset, row_offset, mask, fill, filter_x, start_x,
                length_x, width, source_x, BICUBIC, ANTIALIAS, INSIDE, PADDING,
            )  # fmt: skip
        # As torch does it: rows first, rounded to 8 bits. Bicubic ones are cut off, as weights may
        # be below 0, and not rounded, which would take 5 % longer.
        if BICUBIC:
            row_value = tl.minimum(tl.maximum(row.to(tl.float32) * _UNIT, 0.0), 255.0)
        else:
            row_value = (row >> _BITS).to(tl.float32)
        value += row_value * weight_y[None, :]
    return tl.minimum(tl.maximum(tl.floor(value + 0.5), 0.0), 255.0)


@triton.jit
def _tap(
    pixel, source, channel_offset, row_offset, mask, fill, filter_x, start_x, length_x, width,
    source_x,
    BICUBIC: tl.constexpr, ANTIALIAS: tl.constexpr, INSIDE: tl.constexpr, PADDING: tl.constexpr,
):  # fmt: skip
    """Return what a pixel of the box contributes to each pixel of a row."""
    weight = _weight(pixel, filter_x, length_x, BICUBIC, ANTIALIAS)
    pixel_x, inside_x = _source_pixel(pixel, start_x, length_x, width, PADDING)
    where = (row_offset + (pixel_x * source_x + channel_offset)[:, None]).to(tl.uint32)
    weight = tl.floor(weight * _ONE + 0.5).to(tl.int32)
    if INSIDE:
        value = tl.load(source + where).to(tl.int32)
    else:
        mask &= inside_x[:, None]
        value = tl.load(source + where, mask=mask, other=0).to(tl.int32)
        value = tl.where(mask, value, fill.to(tl.int32))
    return value * weight[:, None]


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
    """Return the source pixel of the pixel of the box nearest to a place, and if it is inside."""
    source_pixel = start + pixel_shown(pixel, length, 0)
    if PADDING:
        source_pixel = pixel_shown(source_pixel, extent, PADDING)
    return source_pixel, (source_pixel >= 0) & (source_pixel < extent)


@triton.jit
def _filter(pixel, length, resized, BICUBIC: tl.constexpr, ANTIALIAS: tl.constexpr):
    """Return the filter of each pixel that a box is resized to, for `_weight`.

    That is its centre in the box, its first pixel there, the number of its taps, how many times
    narrower than the filter's own a pixel of the box is, and 1 / the sum of its weights.

    Margins are filled later. Until then they repeat the border.
    """
    scale = length.to(tl.float32) / resized
    centre = (pixel_shown(pixel, resized, 0).to(tl.float32) + 0.5) * scale
    wide = tl.maximum(scale, 1.0) if ANTIALIAS else 1.0 + 0.0 * scale
    reach = 2.0 * wide if BICUBIC else wide
    taps = tl.ceil(2.0 * reach).to(tl.int32)
    first = tl.floor(centre - reach + 0.5).to(tl.int32)
    total = tl.zeros_like(centre) + 1.0
    if ANTIALIAS:
        first = tl.maximum(first, 0)
        whole = (centre, first, taps, 1.0 / wide, 1.0)
        total -= 1.0
        for tap in range(taps):
            total += _weight(first + tap, whole, length, BICUBIC, ANTIALIAS)
    return centre, first, taps, 1.0 / wide, 1.0 / total


@triton.jit
def _weight(pixel, filter, length, BICUBIC: tl.constexpr, ANTIALIAS: tl.constexpr):
    """Return the weight of a pixel of the box; see `_filter`.

    The cubic is torch's: with antialias that of Pillow (Keys, "Cubic Convolution Interpolation for
    Digital Image Processing", 1981), and otherwise that of OpenCV. With antialias, pixels beyond
    the box have no weight. Otherwise the border is repeated.
    """
    centre, narrow, unit = filter[0], filter[3], filter[4]
    distance = tl.abs(pixel.to(tl.float32) + 0.5 - centre) * narrow
    if BICUBIC:
        a: tl.constexpr = -0.5 if ANTIALIAS else -0.75
        near = ((a + 2) * distance - (a + 3)) * distance * distance + 1
        far = ((distance - 5) * distance + 8) * distance * a - 4 * a
        weight = tl.where(distance < 1, near, tl.where(distance < 2, far, 0.0))
    else:
        weight = tl.maximum(1 - distance, 0.0)
    if ANTIALIAS:
        weight = tl.where(pixel < length, weight, 0.0)
    return weight * unit
