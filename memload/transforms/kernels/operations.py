"""Operations as Triton kernels, for uint8 images of 1 or 3 channels.

A pass takes each pixel from where a matrix says, or sharpens it, and then changes its colours by
one operation after another. Each sample has operations of its own.

    passes_of ─▶ OperationsKernel: _measure     ─▶ what contrast, autocontrast and equalize need
                                   _make_tables ─▶ their tables
                                   _change      ─▶ images
              ─▶ blur
"""

# ruff: noqa: N803  # Triton's way of writing constants

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from memload.launch import ceil_div, launch
from memload.transforms.arguments import per_channel
from memload.transforms.geometry import TIE, Plan
from memload.transforms.kernels.blur import blur
from memload.transforms.operation_step import (
    INDEX_OF,
    LUMA,
    MOVES,
    OperationStep,
    is_one_of,
    kept_bits,
    weights_of,
)

#: A program makes ``_PIXELS`` pixels at once, ``_TIMES`` times. Another one measures ``_BLOCK``.
_PIXELS, _TIMES, _BLOCK = 256, 4, 512
#: A program measures about this many pixels of a sample. More programs have more histograms.
_PIXELS_PER_HISTOGRAM = 2048
_MAX_HISTOGRAMS = 32

_BRIGHTNESS = tl.constexpr(INDEX_OF["Brightness"])
_COLOR = tl.constexpr(INDEX_OF["Color"])
_POSTERIZE = tl.constexpr(INDEX_OF["Posterize"])
_SOLARIZE = tl.constexpr(INDEX_OF["Solarize"])
_AUTOCONTRAST = tl.constexpr(INDEX_OF["AutoContrast"])
_EQUALIZE = tl.constexpr(INDEX_OF["Equalize"])
_INVERT = tl.constexpr(INDEX_OF["Invert"])
_SOLARIZE_ADD = tl.constexpr(INDEX_OF["SolarizeAdd"])
_HUE = tl.constexpr(INDEX_OF["Hue"])
_GRAYSCALE = tl.constexpr(INDEX_OF["Grayscale"])

#: Operations that measure the image, and then are a table.
_MEASURED = is_one_of("Contrast", "AutoContrast", "Equalize")
#: Operations by which a pixel depends on others nearby or elsewhere.
_READS_OTHERS = MOVES | is_one_of("Sharpness")
#: How pixels are taken: as they are, from where a matrix says, or with their neighbours.
_AS_THEY_ARE, _MOVED, _SHARPENED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
#: Where each number of a sample is:
#:
#:     0          how its pixels are taken
#:     1 to 9     what that needs: a matrix, or an amount of sharpening
#:     10         which step is a table, or the number of steps
#:     11 and on  for each step its operation and amount; see `_amounts`
#:
#: The numbers of a sample are neighbours in memory, so that they are on few lines of the cache.
_MATRIX_OR_AMOUNT, _TABLE_STEP, _STEPS = tl.constexpr(1), tl.constexpr(10), tl.constexpr(11)
_RED, _GREEN, _BLUE = map(tl.constexpr, LUMA)
#: Positions further outside, in pixels, show nothing else.
_MARGIN, _TIE = tl.constexpr(2.0), tl.constexpr(TIE)


@dataclass
class OperationsKernel:
    """Steps that are done together."""

    steps: int
    measures: bool  #: whether any operation measures the image
    dtype: torch.dtype
    #: What comes into view: red, green and blue, or three times grey.
    colour: tuple[float, ...]
    #: What `_take` is compiled for, by name.
    constants: dict[str, Any]

    def __call__(
        self, images: Tensor, numbers: Tensor, maps: Tensor, memory_format: torch.memory_format
    ) -> Tensor:
        """Return uint8 images ``(N, C, H, W)`` changed, in new memory.

        ``numbers`` are int32 ``(N, _STEPS + 2 * steps)``. For ``maps`` see `Plan.maps`.
        """
        out = torch.empty_like(images, dtype=self.dtype, memory_format=memory_format)
        if not images.numel():
            return out
        count, _, height, width = images.shape
        # The kernel's offsets within a sample have 32 bits.
        sides_and_strides = zip(images.shape[1:], images.stride()[1:], strict=True)
        if sum((side - 1) * stride for side, stride in sides_and_strides) >= 1 << 31:
            images = images.contiguous(memory_format=torch.channels_last)
        arguments = numbers, height, width, *self.colour, *images.stride()
        tables = self._tables(images, arguments) if self.measures else images
        launch(
            _change, count * ceil_div(height * width, _PIXELS * _TIMES),
            images, out, tables, maps, *arguments, *out.stride(),
            MEASURES=self.measures, TIMES=_TIMES, BLOCK=_PIXELS, **self.constants,
        )  # fmt: skip
        return out

    def _tables(self, images: Tensor, arguments: tuple[Any, ...]) -> Tensor:
        """Return tables uint8 ``(N, C, 256)`` for the samples with an operation that needs one."""
        count, channels, height, width = images.shape
        parts = triton.next_power_of_2(ceil_div(height * width, _PIXELS_PER_HISTOGRAM))
        parts = min(parts, _MAX_HISTOGRAMS)
        measures = images.new_empty((count, parts, channels, 256), dtype=torch.int32)
        constants = {name: value for name, value in self.constants.items() if name != "MAPS_PIXELS"}
        launch(
            _measure, count * parts, images, measures, *arguments,
            PARTS=parts, BLOCK=_BLOCK, **constants,
        )  # fmt: skip
        tables = images.new_empty((count, channels, 256))
        launch(
            _make_tables, count, measures, tables, arguments[0], height * width,
            C=channels, STEPS=self.steps, PARTS=parts,
        )  # fmt: skip
        return tables


def passes_of(
    steps: Sequence[OperationStep], plan: Plan, channels: int
) -> tuple[list[Any], list[np.ndarray]]:
    """Return passes, as few as possible, but at least one, and the numbers of each.

    A pass is a function of images, its numbers, `Plan.maps` and the layout of the result. It begins
    with an operation that needs other pixels, and has one table for each sample. A blur is a pass
    by itself. The last pass maps pixels as the plan says.
    """
    groups: list[list[OperationStep]] = [[]]
    for step in steps:
        if not step.operation.any():  # nothing is done to any sample
            continue
        measured = sum((_MEASURED[before.operation] for before in groups[-1]), 0)
        fits = not ((measured + _MEASURED[step.operation]) > 1).any()
        blurs = _is_blur(step) or (groups[-1] and _is_blur(groups[-1][0]))
        if groups[-1] and (not fits or blurs or _READS_OTHERS[step.operation].any()):
            groups.append([])
        groups[-1].append(step)
    last = len(groups) - 1
    passes = []
    for number, together in enumerate(groups):
        make = _blur_pass if together and _is_blur(together[0]) else _pass
        passes.append(make(together, plan, channels, number == last))
    return [each for each, _ in passes], [numbers for _, numbers in passes]


def _is_blur(step: OperationStep) -> bool:
    return bool((step.operation == INDEX_OF["Blur"]).any())


def _blur_pass(
    steps: Sequence[OperationStep], plan: Plan, channels: int, is_last: bool
) -> tuple[Any, np.ndarray]:
    """Return a pass that blurs some samples."""
    (step,) = steps
    radii = radius_x, radius_y = step.kernel_size[0] // 2, step.kernel_size[1] // 2
    blurred = np.flatnonzero(step.operation == INDEX_OF["Blur"])
    numbers = np.zeros((len(step.operation), radius_x + 1 + radius_y + 1), np.float32)
    numbers[:, [0, radius_x + 1]] = 1  # the pixel itself, which blurs nothing
    numbers[blurred] = weights_of(step.magnitude[blurred], radii)
    dtype = plan.dtype if is_last else torch.uint8
    return partial(blur, radii, is_last and plan.maps_pixels, dtype), numbers


def _pass(
    steps: Sequence[OperationStep], plan: Plan, channels: int, is_last: bool
) -> tuple[OperationsKernel, np.ndarray]:
    """Return a pass, of which the first step may need other pixels."""
    numbers = np.zeros((len(plan.height.start), _STEPS.value + 2 * len(steps)), np.int32)
    as_floats = numbers.view(np.float32)
    numbers[:, _TABLE_STEP.value] = len(steps)
    for index, step in enumerate(steps):
        column = _STEPS.value + 2 * index
        numbers[:, column] = np.where(_READS_OTHERS[step.operation], 0, step.operation)
        as_floats[:, column + 1] = _amounts(step)
        numbers[_MEASURED[step.operation], _TABLE_STEP.value] = index
    takes = bool(steps) and bool(_READS_OTHERS[steps[0].operation].any())
    interpolation, fill, perspective = "nearest", None, False
    if takes:
        first = steps[0]
        interpolation, fill = first.interpolation, first.fill
        if first.matrices is not None:
            moved = np.flatnonzero(MOVES[first.operation])
            numbers[moved, 0] = _MOVED.value
            matrices = first.matrices[moved].reshape(-1, 9)
            as_floats[moved, _MATRIX_OR_AMOUNT.value : _TABLE_STEP.value] = matrices
            perspective = bool(matrices[:, 6:8].any())
        sharpened = first.operation == INDEX_OF["Sharpness"]
        numbers[sharpened, 0] = _SHARPENED.value
        as_floats[sharpened, _MATRIX_OR_AMOUNT.value] = 1 - first.magnitude[sharpened]
    colour = 0 if fill is None else per_channel("warp", "fill", fill, channels, torch.uint8)
    # Means are computed with fractions of it.
    rounded = np.asarray(colour) if interpolation == "bilinear" else np.rint(colour).astype(int)
    kernel = OperationsKernel(
        len(steps),
        measures=bool((numbers[:, _TABLE_STEP.value] < len(steps)).any()),
        dtype=plan.dtype if is_last else torch.uint8,
        colour=tuple(np.broadcast_to(rounded, 3).tolist()),
        constants={
            "C": channels,
            "STEPS": len(steps),
            "TAKES": takes,
            "BILINEAR": interpolation == "bilinear",
            "FILLED": fill is not None,
            "PERSPECTIVE": perspective,
            "MAPS_PIXELS": is_last and plan.maps_pixels,
        },
    )
    return kernel, numbers


def _amounts(step: OperationStep) -> np.ndarray:
    """Return what an operation needs of each sample: a level, a mask of bits, or the magnitude."""
    operation, magnitude = step.operation, step.magnitude
    amount = np.where(operation == INDEX_OF["Solarize"], magnitude * 255, magnitude)
    posterized = np.flatnonzero(operation == INDEX_OF["Posterize"])
    amount[posterized] = kept_bits(magnitude[posterized])
    return amount


@triton.jit
def _change(
    source, out, tables, maps, numbers, height, width, fill_r, fill_g, fill_b,
    source_n, source_c, source_y, source_x, out_n, out_c, out_y, out_x,
    C: tl.constexpr, STEPS: tl.constexpr, TAKES: tl.constexpr, BILINEAR: tl.constexpr,
    FILLED: tl.constexpr, PERSPECTIVE: tl.constexpr, MEASURES: tl.constexpr,
    MAPS_PIXELS: tl.constexpr, TIMES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Make ``BLOCK`` pixels of a sample, ``TIMES`` times.

    All at once would take too many registers: 184 for 512 pixels (sm_90), and 90 for 256.
    """
    programs = tl.cdiv(height * width, BLOCK * TIMES)
    sample = (tl.program_id(0) // programs).to(tl.int64)
    of_sample = numbers + sample * (_STEPS + 2 * STEPS)
    table = tables + sample * (C * 256)
    table_step = tl.load(of_sample + _TABLE_STEP)
    for time in range(TIMES):
        pixel = (tl.program_id(0) % programs * TIMES + time) * BLOCK + tl.arange(0, BLOCK)
        red, green, blue = _take(
            source + sample * source_n, of_sample, pixel, height, width, fill_r, fill_g, fill_b,
            source_c, source_y, source_x, C, TAKES, BILINEAR, FILLED, PERSPECTIVE,
        )  # fmt: skip
        for step in range(STEPS):
            if MEASURES and step == table_step:
                red = tl.load(table + red).to(tl.int32)
                if C == 3:
                    green = tl.load(table + 256 + green).to(tl.int32)
                    blue = tl.load(table + 512 + blue).to(tl.int32)
            else:
                red, green, blue = _change_colours(
                    red, green, blue, of_sample + _STEPS + 2 * step, C
                )
        inside = pixel < height * width
        where = out + sample * out_n + pixel // width * out_y + pixel % width * out_x
        _store(where, red, maps, inside, C, MAPS_PIXELS)
        if C == 3:
            _store(where + out_c, green, maps + 1, inside, C, MAPS_PIXELS)
            _store(where + 2 * out_c, blue, maps + 2, inside, C, MAPS_PIXELS)


@triton.jit
def _store(where, value, maps, inside, C: tl.constexpr, MAPS_PIXELS: tl.constexpr):
    if MAPS_PIXELS:
        value = value.to(tl.float32) * tl.load(maps) + tl.load(maps + C)
    tl.store(where, value.to(where.dtype.element_ty), mask=inside)


@triton.jit
def _measure(
    source, measures, numbers, height, width, fill_r, fill_g, fill_b,
    source_n, source_c, source_y, source_x,
    C: tl.constexpr, STEPS: tl.constexpr, TAKES: tl.constexpr, BILINEAR: tl.constexpr,
    FILLED: tl.constexpr, PERSPECTIVE: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Measure a part of a sample, as it is before the operation that needs it.

    Only equalize needs a histogram, which takes long. For autocontrast this stores the least and
    the largest level of each channel, and for contrast the sum of the luma, at levels 0 and 1.
    """
    sample = (tl.program_id(0) // PARTS).to(tl.int64)
    part = tl.program_id(0) % PARTS
    of_sample = numbers + sample * (_STEPS + 2 * STEPS)
    table_step = tl.load(of_sample + _TABLE_STEP)
    if table_step < STEPS:
        operation = tl.load(of_sample + _STEPS + 2 * table_step)
        level = tl.arange(0, 256)
        reds = tl.zeros((256,), tl.int32)
        greens, blues = reds, reds
        lumas = tl.zeros((BLOCK,), tl.int32)
        least_r, least_g, least_b = lumas + 255, lumas + 255, lumas + 255
        most_r, most_g, most_b = lumas, lumas, lumas
        for block in range(part, tl.cdiv(height * width, BLOCK), PARTS):
            pixel = block * BLOCK + tl.arange(0, BLOCK)
            inside = pixel < height * width
            red, green, blue = _take(
                source + sample * source_n, of_sample, pixel, height, width, fill_r, fill_g, fill_b,
                source_c, source_y, source_x, C, TAKES, BILINEAR, FILLED, PERSPECTIVE,
            )  # fmt: skip
            for step in range(table_step):
                red, green, blue = _change_colours(
                    red, green, blue, of_sample + _STEPS + 2 * step, C
                )
            if operation == _EQUALIZE:
                outside = tl.where(level == 0, BLOCK - tl.sum(inside.to(tl.int32)), 0)
                reds += tl.histogram(tl.where(inside, red, 0), 256) - outside
                if C == 3:
                    greens += tl.histogram(tl.where(inside, green, 0), 256) - outside
                    blues += tl.histogram(tl.where(inside, blue, 0), 256) - outside
            elif operation == _AUTOCONTRAST:
                least_r, most_r = _extremes(least_r, most_r, red, inside)
                least_g, most_g = _extremes(least_g, most_g, green, inside)
                least_b, most_b = _extremes(least_b, most_b, blue, inside)
            else:
                luma = red
                if C == 3:
                    luma = _luma(red, green, blue)
                lumas += tl.where(inside, luma, 0)
        if operation == _AUTOCONTRAST:
            reds = tl.where(level == 0, tl.min(least_r), tl.max(most_r))
            greens = tl.where(level == 0, tl.min(least_g), tl.max(most_g))
            blues = tl.where(level == 0, tl.min(least_b), tl.max(most_b))
        elif operation != _EQUALIZE:
            # In two halves, so that none overflows.
            total = tl.sum(lumas.to(tl.int64))
            reds = tl.where(level == 0, total & 0xFFFF, total >> 16).to(tl.int32)
        where = measures + (sample * PARTS + part) * (C * 256) + level
        tl.store(where, reds)
        if C == 3:
            tl.store(where + 256, greens)
            tl.store(where + 512, blues)


@triton.jit
def _extremes(least, largest, value, inside):
    """Return the least and largest values so far."""
    least = tl.minimum(least, tl.where(inside, value, 255))
    return least, tl.maximum(largest, tl.where(inside, value, 0))


@triton.jit
def _make_tables(
    measures, tables, numbers, pixels, C: tl.constexpr, STEPS: tl.constexpr, PARTS: tl.constexpr
):
    """Make the table of each channel of a sample, where an operation is one."""
    sample = tl.program_id(0).to(tl.int64)
    of_sample = numbers + sample * (_STEPS + 2 * STEPS)
    table_step = tl.load(of_sample + _TABLE_STEP)
    if table_step < STEPS:
        operation = tl.load(of_sample + _STEPS + 2 * table_step)
        factor = tl.load(of_sample + _STEPS + 2 * table_step + 1).to(tl.float32, bitcast=True)
        level = tl.arange(0, 256)
        part = measures + (sample * PARTS + tl.arange(0, PARTS)) * (C * 256)
        for channel in range(C):
            table = level
            if operation == _EQUALIZE:
                found = tl.sum(tl.load(part[:, None] + channel * 256 + level[None, :]), 0)
                table = _equalized(level, found, pixels)
            elif operation == _AUTOCONTRAST:
                least = tl.min(tl.load(part + channel * 256)).to(tl.float32)
                largest = tl.max(tl.load(part + channel * 256 + 1)).to(tl.float32)
                scale = tl.where(largest > least, 255 / tl.maximum(largest - least, 1.0), 1.0)
                least = tl.where(largest > least, least, 0.0)
                table = _clamped((level.to(tl.float32) - least) * scale + 1e-4)
            else:
                total = tl.sum(tl.load(part).to(tl.float32))
                total += tl.sum(tl.load(part + 1).to(tl.float32)) * 65536
                table = _blended(level, total / pixels, factor)
            tl.store(tables + (sample * C + channel) * 256 + level, table.to(tl.uint8))


@triton.jit
def _equalized(level, found, pixels):
    """Return the table of `operations._equalize` for a histogram."""
    up_to = tl.cumsum(found)
    below_largest = tl.max(tl.where(up_to < pixels, up_to, 0))
    step = below_largest // 255
    spread = (up_to - found + step // 2) // tl.maximum(step, 1)
    return tl.where(step > 0, tl.minimum(spread, 255), level)


@triton.jit
def _take(
    source, of_sample, pixel, height, width, fill_r, fill_g, fill_b,
    stride_c, stride_y, stride_x, C: tl.constexpr, TAKES: tl.constexpr, BILINEAR: tl.constexpr,
    FILLED: tl.constexpr, PERSPECTIVE: tl.constexpr,
):  # fmt: skip
    """Return red, green and blue of pixels before their colours are changed, int32 0 to 255."""
    y, x = pixel // width, pixel % width
    inside = pixel < height * width
    red = tl.zeros(pixel.shape, tl.int32)
    green, blue = red, red
    how = _AS_THEY_ARE
    if TAKES:
        how = tl.load(of_sample)
    if how == _MOVED:
        from_x, from_y = _positions(of_sample + _MATRIX_OR_AMOUNT, y, x, height, width, PERSPECTIVE)
        if BILINEAR:
            red, green, blue = _means(
                source, from_y, from_x, inside, height, width, fill_r, fill_g, fill_b,
                stride_c, stride_y, stride_x, C, FILLED,
            )  # fmt: skip
        else:
            near_x = tl.floor(from_x + _TIE).to(tl.int32)
            near_y = tl.floor(from_y + _TIE).to(tl.int32)
            is_within = _is_within(near_y, near_x, height, width)
            red, green, blue = _load(
                source, near_y, near_x, inside & is_within, stride_c, stride_y, stride_x, C
            )
            red = tl.where(is_within, red, fill_r)
            green = tl.where(is_within, green, fill_g)
            blue = tl.where(is_within, blue, fill_b)
    else:
        red, green, blue = _load(source, y, x, inside, stride_c, stride_y, stride_x, C)
        if how == _SHARPENED:
            amount = tl.load(of_sample + _MATRIX_OR_AMOUNT).to(tl.float32, bitcast=True)
            is_border = (y == 0) | (x == 0) | (y == height - 1) | (x == width - 1)
            all_r, all_g, all_b = red * 4, green * 4, blue * 4
            for neighbour in range(9):  # not unrolled: that takes twice the registers
                near_r, near_g, near_b = _load(
                    source, y + neighbour // 3 - 1, x + neighbour % 3 - 1, inside & ~is_border,
                    stride_c, stride_y, stride_x, C,
                )  # fmt: skip
                all_r, all_g, all_b = all_r + near_r, all_g + near_g, all_b + near_b
            red = tl.where(is_border, red, _sharpened(red, all_r, amount))
            green = tl.where(is_border, green, _sharpened(green, all_g, amount))
            blue = tl.where(is_border, blue, _sharpened(blue, all_b, amount))
    return red, green, blue


@triton.jit
def _load(source, y, x, mask, stride_c, stride_y, stride_x, C: tl.constexpr):
    """Return red, green and blue of pixels, int32. With one channel, all are the same."""
    where = source + y * stride_y + x * stride_x
    red = tl.load(where, mask=mask, other=0).to(tl.int32)
    if C == 3:
        green = tl.load(where + stride_c, mask=mask, other=0).to(tl.int32)
        blue = tl.load(where + 2 * stride_c, mask=mask, other=0).to(tl.int32)
    else:
        green, blue = red, red
    return red, green, blue


@triton.jit
def _is_within(y, x, height, width):
    return (y >= 0) & (y < height) & (x >= 0) & (x < width)


@triton.jit
def _sharpened(middle, weighted_sum, amount):
    """Return what `operations._sharpen` makes of a pixel; the weights have a sum of 13."""
    smooth = (2 * weighted_sum + 13) // 26  # rounded; it is never halfway, as 13 is odd
    return _clamped((smooth - middle).to(tl.float32) * amount + middle.to(tl.float32))


@triton.jit
def _positions(matrix, y, x, height, width, PERSPECTIVE: tl.constexpr):
    """Return x and y of where pixels come from; see `warping`."""
    x, y = x.to(tl.float32) + 0.5, y.to(tl.float32) + 0.5
    from_x, from_y = _line(matrix, x, y), _line(matrix + 3, x, y)
    if PERSPECTIVE:
        divisor = _line(matrix + 6, x, y)
        from_x, from_y = from_x / divisor, from_y / divisor
    return _limited(from_x, width), _limited(from_y, height)


@triton.jit
def _line(line, x, y):
    """Return a linear function of x and y, given as a line of a matrix."""
    by_x = tl.load(line).to(tl.float32, bitcast=True)
    by_y = tl.load(line + 1).to(tl.float32, bitcast=True)
    offset = tl.load(line + 2).to(tl.float32, bitcast=True)
    return x * by_x + y * by_y + offset


@triton.jit
def _limited(position, extent):
    position = tl.where(position == position, position, -_MARGIN)  # from nowhere is from outside
    return tl.minimum(tl.maximum(position, -_MARGIN), extent + _MARGIN)


@triton.jit
def _means(
    source, from_y, from_x, inside, height, width, fill_r, fill_g, fill_b,
    stride_c, stride_y, stride_x, C: tl.constexpr, FILLED: tl.constexpr,
):  # fmt: skip
    """Return the means of the four pixels around positions, rounded."""
    from_x, from_y = from_x - 0.5, from_y - 0.5
    left, top = tl.floor(from_x), tl.floor(from_y)
    to_right, to_bottom = from_x - left, from_y - top
    x, y = left.to(tl.int32), top.to(tl.int32)
    red = tl.zeros(from_x.shape, tl.float32)
    green, blue, covered = red, red, red
    for row in tl.static_range(2):
        for column in tl.static_range(2):
            across = to_right if column else 1 - to_right
            weight = across * (to_bottom if row else 1 - to_bottom)
            is_within = _is_within(y + row, x + column, height, width)
            near_r, near_g, near_b = _load(
                source, y + row, x + column, inside & is_within, stride_c, stride_y, stride_x, C
            )
            red, green, blue = (
                red + near_r * weight,
                green + near_g * weight,
                blue + near_b * weight,
            )
            covered += tl.where(is_within, weight, 0.0)
    if FILLED:
        red = (red - fill_r) * covered + fill_r
        green = (green - fill_g) * covered + fill_g
        blue = (blue - fill_b) * covered + fill_b
    return _clamped(red + 0.5), _clamped(green + 0.5), _clamped(blue + 0.5)


@triton.jit
def _change_colours(red, green, blue, step, C: tl.constexpr):
    """Return pixels after a step that is not a table."""
    operation = tl.load(step)
    amount = tl.load(step + 1).to(tl.float32, bitcast=True)
    if operation != 0:
        if operation == _BRIGHTNESS:
            red = _clamped(red.to(tl.float32) * amount)
            green = _clamped(green.to(tl.float32) * amount)
            blue = _clamped(blue.to(tl.float32) * amount)
        elif operation == _POSTERIZE:
            mask = amount.to(tl.int32)
            red, green, blue = red & mask, green & mask, blue & mask
        elif operation == _INVERT:
            red, green, blue = 255 - red, 255 - green, 255 - blue
        elif operation == _SOLARIZE:
            red, green = _solarized(red, amount), _solarized(green, amount)
            blue = _solarized(blue, amount)
        elif operation == _SOLARIZE_ADD:
            added = amount.to(tl.int32)
            red, green = _added(red, added), _added(green, added)
            blue = _added(blue, added)
        elif C == 3:
            red, green, blue = _mix_channels(red, green, blue, operation, amount)
    return red, green, blue


@triton.jit
def _mix_channels(red, green, blue, operation, amount):
    """Return pixels after an operation to whose result all channels contribute."""
    if operation == _COLOR:
        grey = _luma(red, green, blue).to(tl.float32)
        red, green = _blended(red, grey, amount), _blended(green, grey, amount)
        blue = _blended(blue, grey, amount)
    elif operation == _HUE:
        red, green, blue = _turned(red, green, blue, amount)
    elif operation == _GRAYSCALE:
        red = _luma(red, green, blue)
        green, blue = red, red
    return red, green, blue


@triton.jit
def _clamped(value):
    """Return values between 0 and 255 and rounded down."""
    return tl.minimum(tl.maximum(value, 0.0), 255.0).to(tl.int32)


@triton.jit
def _solarized(value, threshold):
    return tl.where(value.to(tl.float32) >= threshold, 255 - value, value)


@triton.jit
def _added(value, added):
    return tl.where(value < 128, value + added, value)


@triton.jit
def _luma(red, green, blue):
    """Return the luma, rounded down."""
    red, green = red.to(tl.float32) * _RED, green.to(tl.float32) * _GREEN
    return (red + green + blue.to(tl.float32) * _BLUE).to(tl.int32)


@triton.jit
def _blended(value, other, factor):
    """Return levels whose distance from others is multiplied by a factor."""
    return _clamped(value.to(tl.float32) * factor + other * (1 - factor))


@triton.jit
def _turned(red, green, blue, turn):
    """Return pixels whose hue is turned; see `operations._turn_hue`."""
    red, green = red.to(tl.float32) * (1 / 255), green.to(tl.float32) * (1 / 255)
    blue = blue.to(tl.float32) * (1 / 255)
    value = tl.maximum(tl.maximum(red, green), blue)
    spread = value - tl.minimum(tl.minimum(red, green), blue)
    divisor = tl.where(spread == 0, 1.0, spread)
    # Of the three channels below the largest, the two others matter.
    is_red, is_green = red == value, green == value
    one = tl.where(is_red, blue, tl.where(is_green, red, green))
    other = tl.where(is_red, green, tl.where(is_green, blue, red))
    third = tl.where(is_red, 0.0, tl.where(is_green, 2.0, 4.0))
    sector = third + (other - one) / divisor
    hue = sector * (1 / 6) + 1
    hue = hue - hue.to(tl.int32).to(tl.float32) + turn
    hue = hue - hue.to(tl.int32).to(tl.float32)
    hue = tl.where(hue < 0, hue + 1, hue)
    return (
        _channel_of_hue(5, hue, value, spread),
        _channel_of_hue(3, hue, value, spread),
        _channel_of_hue(1, hue, value, spread),
    )


@triton.jit
def _channel_of_hue(offset: tl.constexpr, hue, value, spread):
    position = offset + hue * 6
    position = tl.where(position >= 6, position - 6, position)
    share = tl.minimum(tl.maximum(tl.minimum(position, 4 - position), 0.0), 1.0)
    return ((value - spread * share) * (256 - 1e-3)).to(tl.int32)
