"""The steps of an `OperationsPlan` as Triton kernels, for uint8 images of 1 or 3 channels.

A pass takes each pixel from where a matrix says, or sharpens it, and then changes its colours by
one operation after another. Each sample has operations of its own.

    OperationsPlan ─▶ _passes ─▶ of each pass: _count_levels ─▶ histograms of what is measured
                                               _make_tables  ─▶ tables for contrast, equalize, …
                                               _change       ─▶ images

Results have the same bits as those of `operations_reference.change_each`.
"""

# ruff: noqa: N803  # Triton's way of writing constants

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from memload.launch import ceil_div, launch
from memload.transforms.arguments import per_channel
from memload.transforms.blur_kernel import blur
from memload.transforms.color import LUMA
from memload.transforms.filtering import weights_of
from memload.transforms.operations_plan import (
    INDEX_OF,
    MOVES,
    OperationsPlan,
    OperationStep,
    is_one_of,
)
from memload.transforms.warping import FAR, MARGIN, Fill, Interpolation, grid_lines, matrices_of
from memload.upload import Parameters

#: A program makes ``_PIXELS`` pixels at once, ``_TIMES`` times. Another one counts ``_COUNTED``.
_PIXELS, _TIMES, _COUNTED = 256, 4, 512
#: A program counts about this many pixels of a sample. More programs have more histograms.
_PIXELS_PER_HISTOGRAM = 2048
_MAX_HISTOGRAMS = 32

_BRIGHTNESS = tl.constexpr(INDEX_OF["Brightness"])
_COLOR = tl.constexpr(INDEX_OF["Color"])
_CONTRAST = tl.constexpr(INDEX_OF["Contrast"])
_POSTERIZE = tl.constexpr(INDEX_OF["Posterize"])
_SOLARIZE = tl.constexpr(INDEX_OF["Solarize"])
_AUTOCONTRAST = tl.constexpr(INDEX_OF["AutoContrast"])
_EQUALIZE = tl.constexpr(INDEX_OF["Equalize"])
_INVERT = tl.constexpr(INDEX_OF["Invert"])
_SOLARIZE_ADD = tl.constexpr(INDEX_OF["SolarizeAdd"])
_JITTER_CONTRAST = tl.constexpr(INDEX_OF["JitterContrast"])
_JITTER_SATURATION = tl.constexpr(INDEX_OF["JitterSaturation"])
_HUE = tl.constexpr(INDEX_OF["Hue"])
_GRAYSCALE = tl.constexpr(INDEX_OF["Grayscale"])

#: Operations that need a histogram of the image, of which a table is made.
_MEASURED = is_one_of("Contrast", "AutoContrast", "Equalize", "JitterContrast")
#: Operations by which a pixel depends on others nearby or elsewhere.
_READS_OTHERS = MOVES | is_one_of("Sharpness")
_JITTERS = is_one_of("JitterContrast", "JitterSaturation")
#: How pixels are taken: as they are, from where a matrix says, or with their neighbours.
_AS_THEY_ARE, _MOVED, _SHARPENED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
#: Where each parameter of a sample is:
#:
#:     0          how its pixels are taken
#:     1 to 9     what that needs: a matrix, or an amount of sharpening
#:     10         which step is a table, or the number of steps
#:     11 to 16   factors and offsets of red, green and blue, with which the pass ends
#:     17 and on  for each step its operation, amount and rest; see `_amount_and_rest`
#:
#: The parameters of a sample are neighbours in memory, so that they are on few lines of the cache.
_MATRIX_OR_AMOUNT, _TABLE_STEP = tl.constexpr(1), tl.constexpr(10)
_FACTORS, _OFFSETS, _STEPS = tl.constexpr(11), tl.constexpr(14), tl.constexpr(17)
#: The weights of red, green and blue, as float32 has them.
_RED, _GREEN, _BLUE = (tl.constexpr(float(np.float32(weight))) for weight in LUMA)
_FAR, _MARGIN = tl.constexpr(FAR), tl.constexpr(MARGIN)
#: Adding and taking off this rounds a float32 to a whole number, to even where it is halfway.
_ROUNDING = tl.constexpr(1.5 * 2**23)


class Pass(NamedTuple):
    """Steps that are done together."""

    parameters: Parameters  #: int32 ``(N, _STEPS + 3 * steps)``
    steps: int
    measures: bool  #: whether any operation needs a histogram
    dtype: torch.dtype
    #: What comes into view: red, green and blue, or three times grey.
    colour: tuple[float, ...]
    #: What `_take` is compiled for, by name.
    constants: dict[str, Any]


class BlurPass(NamedTuple):
    """A blur of some samples."""

    parameters: Parameters  #: weights, factors and offsets, float32 ``(N, …)``, for `blur`
    radii: tuple[int, int]
    dtype: torch.dtype
    maps_pixels: bool


def run(images: Tensor, plan: OperationsPlan, first_in_plan: int = 0) -> Tensor:
    """Return uint8 images ``(N, C, H, W)`` changed by the steps of a plan.

    They are the plan's samples from ``first_in_plan`` on. C is 1 or 3. The result is new memory in
    the plan's memory format.
    """
    count, memory_format = len(images), plan.after.memory_format
    for this_pass in plan.computed(_passes):
        if isinstance(this_pass, Pass):
            images = _run(images, this_pass, first_in_plan, memory_format)
        else:
            images = blur(
                images,
                this_pass.parameters.on(images.device)[first_in_plan : first_in_plan + count],
                this_pass.radii,
                maps_pixels=this_pass.maps_pixels,
                dtype=this_pass.dtype,
                memory_format=memory_format,
            )
    return images


def warp(
    images: Tensor,
    matrices: np.ndarray,
    interpolation: Interpolation,
    fill: Fill,
) -> Tensor:
    """Return what `warping.warp` returns for uint8 images of 1 or 3 channels."""
    parameters = np.zeros((len(images), _STEPS.value), np.int32)
    _set_matrices(parameters, slice(None), matrices, *images.shape[2:])
    colour, constants = _how_to_take(
        images.shape[1], interpolation, fill, perspective=matrices.shape[1] == 8
    )
    constants |= {"STEPS": 0, "AFFINE": False}
    this_pass = Pass(Parameters(parameters), 0, False, torch.uint8, colour, constants)
    return _run(images, this_pass, 0, torch.preserve_format)


def _run(images: Tensor, this_pass: Pass, first: int, memory_format: torch.memory_format) -> Tensor:
    """Carry out a pass."""
    out = torch.empty_like(images, dtype=this_pass.dtype, memory_format=memory_format)
    if not images.numel():
        return out
    count, _, height, width = images.shape
    # The kernel's offsets within a sample have 32 bits.
    sides_and_strides = zip(images.shape[1:], images.stride()[1:], strict=True)
    if sum((side - 1) * stride for side, stride in sides_and_strides) >= 1 << 31:
        images = images.contiguous(memory_format=torch.channels_last)
    parameters = this_pass.parameters.on(images.device)[first : first + count]
    arguments = parameters, height, width, *this_pass.colour, *images.stride()
    tables = _tables(images, this_pass, arguments) if this_pass.measures else images
    launch(
        _change, count * ceil_div(height * width, _PIXELS * _TIMES),
        images, out, tables, *arguments, *out.stride(),
        MEASURES=this_pass.measures, TIMES=_TIMES, BLOCK=_PIXELS, enable_fp_fusion=False,
        **this_pass.constants,
    )  # fmt: skip
    return out


def _tables(images: Tensor, this_pass: Pass, arguments: tuple[Any, ...]) -> Tensor:
    """Return tables uint8 ``(N, C, 256)`` for the samples with an operation that needs one."""
    count, channels, height, width = images.shape
    parts = triton.next_power_of_2(ceil_div(height * width, _PIXELS_PER_HISTOGRAM))
    parts = min(parts, _MAX_HISTOGRAMS)
    counts = images.new_empty((count, parts, channels, 256), dtype=torch.int32)
    constants = {name: value for name, value in this_pass.constants.items() if name != "AFFINE"}
    launch(
        _count_levels, count * parts, images, counts, *arguments,
        PARTS=parts, BLOCK=_COUNTED, enable_fp_fusion=False, **constants,
    )  # fmt: skip
    tables = images.new_empty((count, channels, 256))
    launch(
        _make_tables, count, counts, tables, arguments[0], height * width,
        C=channels, STEPS=this_pass.steps, PARTS=parts, enable_fp_fusion=False,
    )  # fmt: skip
    return tables


def _passes(plan: OperationsPlan) -> list[Pass | BlurPass]:
    """Return the passes of a plan, as few as possible, but at least one.

    A pass begins with an operation that needs other pixels, and has one table for each sample. A
    blur is a pass by itself.
    """
    groups: list[list[OperationStep]] = [[]]
    for step in plan.steps:
        if not step.operation.any():  # nothing is done to any sample
            continue
        measured = sum((_MEASURED[before.operation] for before in groups[-1]), 0)
        fits = not ((measured + _MEASURED[step.operation]) > 1).any()
        blurs = _is_blur(step) or (groups[-1] and _is_blur(groups[-1][0]))
        if groups[-1] and (not fits or blurs or _READS_OTHERS[step.operation].any()):
            groups.append([])
        groups[-1].append(step)
    *others, last = groups
    return [*(_pass(steps, plan, is_last=False) for steps in others), _pass(last, plan)]


def _is_blur(step: OperationStep) -> bool:
    return bool((step.operation == INDEX_OF["Blur"]).any())


def _blur_pass(step: OperationStep, plan: OperationsPlan, *, is_last: bool) -> BlurPass:
    """Return a pass that blurs some samples."""
    radii = radius_x, radius_y = step.kernel_size[0] // 2, step.kernel_size[1] // 2
    blurred = np.flatnonzero(step.operation == INDEX_OF["Blur"])
    weights = np.zeros((plan.count, radius_x + 1 + radius_y + 1), np.float32)
    weights[:, [0, radius_x + 1]] = 1  # the pixel itself, which blurs nothing
    weights[blurred] = weights_of(step.magnitude[blurred], radii)
    maps = np.concatenate([plan.after.factor, plan.after.offset]).astype(np.float32)
    parameters = [weights, np.broadcast_to(maps, (plan.count, len(maps)))]
    return BlurPass(
        Parameters(np.concatenate(parameters, 1)),
        radii,
        dtype=plan.after.dtype if is_last else torch.uint8,
        maps_pixels=is_last and plan.after.maps_pixels,
    )


def _pass(
    steps: Sequence[OperationStep], plan: OperationsPlan, *, is_last: bool = True
) -> Pass | BlurPass:
    """Return a pass, of which the first step may need other pixels."""
    if steps and _is_blur(steps[0]):
        return _blur_pass(steps[0], plan, is_last=is_last)
    parameters = np.zeros((plan.count, _STEPS.value + 3 * len(steps)), np.int32)
    as_floats = parameters.view(np.float32)
    parameters[:, _TABLE_STEP.value] = len(steps)
    colour, constants = _how_to_take(plan.channels)
    for index, step in enumerate(steps):
        column = _STEPS.value + 3 * index
        parameters[:, column] = np.where(_READS_OTHERS[step.operation], 0, step.operation)
        as_floats[:, column + 1], as_floats[:, column + 2] = _amount_and_rest(step)
        parameters[_MEASURED[step.operation], _TABLE_STEP.value] = index
    if steps and _READS_OTHERS[steps[0].operation].any():
        first = steps[0]
        _set_taking(parameters, first, plan.height, plan.width)
        colour, constants = _how_to_take(plan.channels, first.interpolation, first.fill)
    if is_last:
        for start, values in (_FACTORS, plan.after.factor), (_OFFSETS, plan.after.offset):
            as_floats[:, start.value : start.value + plan.channels] = values
    maps = is_last and plan.after.maps_pixels
    return Pass(
        Parameters(parameters),
        len(steps),
        measures=bool((parameters[:, _TABLE_STEP.value] < len(steps)).any()),
        dtype=plan.after.dtype if is_last else torch.uint8,
        colour=colour,
        constants={**constants, "STEPS": len(steps), "AFFINE": maps},
    )


def _how_to_take(
    channels: int,
    interpolation: Interpolation | None = None,
    fill: Fill = None,
    *,
    perspective: bool = False,
) -> tuple[tuple[float, ...], dict[str, Any]]:
    """Return the colour that comes into view, and the constants of `_take`.

    Without an interpolation, no pixels are moved or sharpened.
    """
    values = 0 if fill is None else per_channel("warp", "fill", fill, channels, torch.uint8)
    # Means are computed with fractions of it.
    rounded = np.asarray(values) if interpolation == "bilinear" else np.rint(values).astype(int)
    return tuple(np.broadcast_to(rounded, 3).tolist()), {
        "C": channels,
        "TAKES": interpolation is not None,
        "BILINEAR": interpolation == "bilinear",
        "FILLED": fill is not None,
        "PERSPECTIVE": perspective,
    }


def _set_taking(parameters: np.ndarray, step: OperationStep, height: int, width: int) -> None:
    """Write how pixels are taken, and what that needs."""
    places = np.flatnonzero(MOVES[step.operation])
    if places.size:
        _set_matrices(
            parameters, places, matrices_of(step.at(places), height, width), height, width
        )
    sharpened = step.operation == INDEX_OF["Sharpness"]
    parameters[sharpened, 0] = _SHARPENED.value
    as_floats = parameters.view(np.float32)
    as_floats[sharpened, _MATRIX_OR_AMOUNT.value] = 1 - step.magnitude[sharpened]


def _set_matrices(
    parameters: np.ndarray, places: Any, matrices: np.ndarray, height: int, width: int
) -> None:
    """Have the pixels of some samples taken from where matrices say."""
    lines = grid_lines(matrices, height, width).reshape(len(matrices), -1)
    parameters[places, 0] = _MOVED.value
    start = _MATRIX_OR_AMOUNT.value
    parameters.view(np.float32)[places, start : start + lines.shape[1]] = lines


def _amount_and_rest(step: OperationStep) -> tuple[np.ndarray, np.ndarray]:
    """Return what an operation needs for each sample, ``(N,)`` each.

    The amount is a factor, a threshold as a level, a mask of bits, or any other magnitude. The rest
    is 1 - magnitude.
    """
    operation, magnitude = step.operation, step.magnitude
    # The operations of ColorJitter subtract in float32.
    rest = np.where(_JITTERS[operation], 1 - magnitude.astype(np.float32), 1 - magnitude)
    amount = np.where(operation == INDEX_OF["Solarize"], magnitude * 255, magnitude)
    posterized = np.flatnonzero(operation == INDEX_OF["Posterize"])
    amount[posterized] = (0xFF00 >> magnitude[posterized].astype(np.int64)) & 0xFF
    return amount, rest


@triton.jit
def _change(
    source, out, tables, parameters, height, width, fill_r, fill_g, fill_b,
    source_n, source_c, source_y, source_x, out_n, out_c, out_y, out_x,
    C: tl.constexpr, STEPS: tl.constexpr, TAKES: tl.constexpr, BILINEAR: tl.constexpr,
    FILLED: tl.constexpr, PERSPECTIVE: tl.constexpr, MEASURES: tl.constexpr, AFFINE: tl.constexpr,
    TIMES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Make ``BLOCK`` pixels of a sample, ``TIMES`` times.

    All at once would take too many registers: 184 for 512 pixels (sm_90), and 90 for 256.
    """
    programs = tl.cdiv(height * width, BLOCK * TIMES)
    sample = (tl.program_id(0) // programs).to(tl.int64)
    of_sample = parameters + sample * (_STEPS + 3 * STEPS)
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
                    red, green, blue, of_sample + _STEPS + 3 * step, C
                )
        inside = pixel < height * width
        where = out + sample * out_n + pixel // width * out_y + pixel % width * out_x
        _store(where, red, of_sample, 0, inside, AFFINE)
        if C == 3:
            _store(where + out_c, green, of_sample, 1, inside, AFFINE)
            _store(where + 2 * out_c, blue, of_sample, 2, inside, AFFINE)


@triton.jit
def _store(where, value, of_sample, channel: tl.constexpr, inside, AFFINE: tl.constexpr):
    if AFFINE:
        factor = tl.load(of_sample + _FACTORS + channel).to(tl.float32, bitcast=True)
        offset = tl.load(of_sample + _OFFSETS + channel).to(tl.float32, bitcast=True)
        value = value.to(tl.float32) * factor + offset
    tl.store(where, value.to(where.dtype.element_ty), mask=inside)


@triton.jit
def _count_levels(
    source, counts, parameters, height, width, fill_r, fill_g, fill_b,
    source_n, source_c, source_y, source_x,
    C: tl.constexpr, STEPS: tl.constexpr, TAKES: tl.constexpr, BILINEAR: tl.constexpr,
    FILLED: tl.constexpr, PERSPECTIVE: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a histogram of a part of a sample, as it is before the operation that needs one.

    True histograms take long, so only "Equalize" gets one. The others get one that leads to the
    same table. For autocontrast, it has one pixel of the least level and one of the largest. For
    contrast, it has as many pixels of the levels 255 and 1 as sum up to the luma of all pixels.
    """
    sample = (tl.program_id(0) // PARTS).to(tl.int64)
    part = tl.program_id(0) % PARTS
    of_sample = parameters + sample * (_STEPS + 3 * STEPS)
    table_step = tl.load(of_sample + _TABLE_STEP)
    if table_step < STEPS:
        operation = tl.load(of_sample + _STEPS + 3 * table_step)
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
                    red, green, blue, of_sample + _STEPS + 3 * step, C
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
                    if operation == _CONTRAST:
                        luma = _luma_rounded_once(red, green, blue)
                    else:
                        luma = _luma(red, green, blue).to(tl.int32)
                lumas += tl.where(inside, luma, 0)
        if operation == _AUTOCONTRAST:
            reds = _one_of_each(level, least_r, most_r)
            greens = _one_of_each(level, least_g, most_g)
            blues = _one_of_each(level, least_b, most_b)
        elif operation != _EQUALIZE:
            total = tl.sum(lumas.to(tl.int64))
            rest = tl.where(level == 1, total % 255, 0)
            reds = tl.where(level == 255, total // 255, rest).to(tl.int32)
        where = counts + (sample * PARTS + part) * (C * 256) + level
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
def _one_of_each(level, least, largest):
    """Return a histogram with one of the least and one of the largest level, if there are any."""
    least, largest = tl.min(least), tl.max(largest)
    return (((level == least) | (level == largest)) & (least <= largest)).to(tl.int32)


@triton.jit
def _make_tables(
    counts, tables, parameters, pixels, C: tl.constexpr, STEPS: tl.constexpr, PARTS: tl.constexpr
):
    """Make the table of each channel of a sample, where an operation is one."""
    sample = tl.program_id(0).to(tl.int64)
    of_sample = parameters + sample * (_STEPS + 3 * STEPS)
    table_step = tl.load(of_sample + _TABLE_STEP)
    if table_step < STEPS:
        row = of_sample + _STEPS + 3 * table_step
        operation = tl.load(row)
        factor = tl.load(row + 1).to(tl.float32, bitcast=True)
        rest = tl.load(row + 2).to(tl.float32, bitcast=True)
        level = tl.arange(0, 256)
        part = tl.arange(0, PARTS)[:, None]
        for channel in range(C):
            is_contrast = (operation == _CONTRAST) | (operation == _JITTER_CONTRAST)
            counted = tl.where(is_contrast, 0, channel)
            where = counts + (sample * PARTS + part) * (C * 256) + counted * 256
            found = tl.sum(tl.load(where + level[None, :]), 0)
            table = level
            if operation == _EQUALIZE:
                table = _equalized(level, found, pixels)
            elif operation == _AUTOCONTRAST:
                table = _stretched(level, found)
            else:
                total = tl.sum(level.to(tl.int64) * found)
                mean = (total.to(tl.float64) / pixels).to(tl.float32)
                if operation == _CONTRAST:
                    table = _blended_once(level, mean, factor, rest)
                else:
                    table = _blended(level, mean, factor, rest)
            tl.store(tables + (sample * C + channel) * 256 + level, table.to(tl.uint8))


@triton.jit
def _equalized(level, found, pixels):
    """Return the table of `lookup.equalize_table` for a histogram."""
    up_to = tl.cumsum(found)
    below_largest = tl.max(tl.where(up_to < pixels, up_to, 0))
    step = below_largest // 255
    spread = (up_to - found + step // 2) // tl.maximum(step, 1)
    return tl.where(step > 0, tl.minimum(spread, 255), level)


@triton.jit
def _stretched(level, found):
    """Return the table of `lookup.autocontrast_table` for a histogram."""
    least = tl.min(tl.where(found > 0, level, 255)).to(tl.float32)
    largest = tl.max(tl.where(found > 0, level, 0)).to(tl.float32)
    is_flat = least == largest
    scale = tl.where(is_flat, 1.0, (largest - least) * (1 / 255))
    value = level.to(tl.float32) - tl.where(is_flat, 0.0, least)
    return _clamped(tl.div_rn(value, scale + tl.zeros_like(value)))


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
            near_x = ((from_x + _ROUNDING) - _ROUNDING).to(tl.int32)
            near_y = ((from_y + _ROUNDING) - _ROUNDING).to(tl.int32)
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
    """Return what `filtering.sharpen` makes of a pixel; the weights have a sum of 13."""
    smooth = (2 * weighted_sum + 13) // 26  # rounded; it is never halfway, as 13 is odd
    mixed = (smooth - middle).to(tl.float64) * amount + middle.to(tl.float64)
    return _clamped(mixed.to(tl.float32))


@triton.jit
def _positions(matrix, y, x, height, width, PERSPECTIVE: tl.constexpr):
    """Return x and y of where pixels come from, as `warping._grid` and `_in_pixels` do it."""
    if PERSPECTIVE:
        x, y = x.to(tl.float32) + 0.5, y.to(tl.float32) + 0.5
    else:
        x, y = x.to(tl.float32) + 0.5 * (1 - width), y.to(tl.float32) + 0.5 * (1 - height)
    from_x, from_y = _line(matrix, x, y), _line(matrix + 3, x, y)
    if PERSPECTIVE:
        divisor = _line(matrix + 6, x, y)
        from_x, from_y = tl.div_rn(from_x, divisor) - 1, tl.div_rn(from_y, divisor) - 1
    return _in_pixels(from_x, width), _in_pixels(from_y, height)


@triton.jit
def _line(line, x, y):
    """Return a linear function of x and y, given as a line of a matrix."""
    by_x = tl.load(line).to(tl.float32, bitcast=True)
    by_y = tl.load(line + 1).to(tl.float32, bitcast=True)
    offset = tl.load(line + 2).to(tl.float32, bitcast=True)
    return (x * by_x + y * by_y) + offset


@triton.jit
def _in_pixels(position, extent):
    position = tl.where(position == position, position, -_FAR)  # from nowhere is from outside
    position = tl.minimum(tl.maximum(position, -_FAR), _FAR)
    pixels = ((position + 1).to(tl.float64) * (0.5 * extent) - 0.5).to(tl.float32)
    return tl.minimum(tl.maximum(pixels, -_MARGIN), extent)


@triton.jit
def _means(
    source, from_y, from_x, inside, height, width, fill_r, fill_g, fill_b,
    stride_c, stride_y, stride_x, C: tl.constexpr, FILLED: tl.constexpr,
):  # fmt: skip
    """Return the means of the four pixels around positions, as `warping._bilinear` does it."""
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
            red, green = _plus(red, near_r, weight), _plus(green, near_g, weight)
            blue, covered = _plus(blue, near_b, weight), _plus(covered, is_within, weight)
    if FILLED:
        red = (red - fill_r) * covered + fill_r
        green = (green - fill_g) * covered + fill_g
        blue = (blue - fill_b) * covered + fill_b
    red, green = (red + _ROUNDING) - _ROUNDING, (green + _ROUNDING) - _ROUNDING
    blue = (blue + _ROUNDING) - _ROUNDING
    return red.to(tl.int32), green.to(tl.int32), blue.to(tl.int32)


@triton.jit
def _plus(total, value, weight):
    """Return ``total + value · weight``, rounded once."""
    product = value.to(tl.float64) * weight.to(tl.float64)
    return (product + total.to(tl.float64)).to(tl.float32)


@triton.jit
def _change_colours(red, green, blue, step, C: tl.constexpr):
    """Return pixels after a step that is not a table."""
    operation = tl.load(step)
    amount = tl.load(step + 1).to(tl.float32, bitcast=True)
    rest = tl.load(step + 2).to(tl.float32, bitcast=True)
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
            red, green, blue = _mix_channels(red, green, blue, operation, amount, rest)
    return red, green, blue


@triton.jit
def _mix_channels(red, green, blue, operation, amount, rest):
    """Return pixels after an operation to whose result all channels contribute."""
    if operation == _COLOR:
        grey = _luma_rounded_once(red, green, blue)
        red = _blended_once(red, grey, amount, rest)
        green = _blended_once(green, grey, amount, rest)
        blue = _blended_once(blue, grey, amount, rest)
    elif operation == _JITTER_SATURATION:
        grey = tl.floor(_luma(red, green, blue))
        red = _blended(red, grey, amount, rest)
        green = _blended(green, grey, amount, rest)
        blue = _blended(blue, grey, amount, rest)
    elif operation == _HUE:
        red, green, blue = _turned(red, green, blue, amount)
    elif operation == _GRAYSCALE:
        red = _luma(red, green, blue).to(tl.int32)
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
    """Return the luma as `color._grey` computes it: each product is rounded, and each sum."""
    products = red.to(tl.float32) * _RED + green.to(tl.float32) * _GREEN
    return products + blue.to(tl.float32) * _BLUE


@triton.jit
def _luma_rounded_once(red, green, blue):
    """Return the luma as `color._grey_levels` computes it: sums are rounded, products are not."""
    first = (red.to(tl.float32) * _RED).to(tl.float64)
    both = (first + green.to(tl.float64) * _GREEN).to(tl.float32).to(tl.float64)
    return (both + blue.to(tl.float64) * _BLUE).to(tl.float32).to(tl.int32)


@triton.jit
def _blended(value, other, factor, rest):
    """Return levels as `color._blend` computes them."""
    return _clamped(value.to(tl.float32) * factor + other * rest)


@triton.jit
def _blended_once(value, other, factor, rest):
    """Return levels as `color._blend_levels` computes them: the second product is not rounded."""
    product = (value.to(tl.float32) * factor).to(tl.float64)
    mixed = product + other.to(tl.float64) * rest.to(tl.float64)
    return _clamped(mixed.to(tl.float32))


@triton.jit
def _turned(red, green, blue, turn):
    """Return pixels whose hue is turned, as `color.adjust_hue` computes it."""
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
    sector = third + tl.div_rn(value - one, divisor) - tl.div_rn(value - other, divisor)
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
