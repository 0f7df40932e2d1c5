"""Boxes of images painted over, and images mixed in pairs, as Triton kernels.

Each reads what it needs of the images once, and writes the result once. Numbers of all samples are
uploaded together. What is not changed is moved as integers, so its bits stay.
"""

# ruff: noqa: N803  # Triton's way of writing constants

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from memload.transforms.draws import FACTORS, INCREMENT, SHIFTS
from memload.upload import upload

#: What a program makes: rows, columns times channels; and its number of warps. They are those that
#: `plan_kernel` moves pixels with. On an H200, 256 images of 224×224 in bfloat16 are painted in
#: 50 µs.
_ROWS, _COLUMNS, _WARPS = 16, 256, 4
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: The constants of `draws.mix`, as unsigned numbers.
_INCREMENT = tl.constexpr(INCREMENT % (1 << 64))
_FACTOR_1, _FACTOR_2 = (tl.constexpr(factor % (1 << 64)) for factor in FACTORS)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = map(tl.constexpr, SHIFTS)


def paint(images: Tensor, boxes: np.ndarray, colour: Tensor) -> Tensor:
    """Return images ``(N, C, H, W)`` of any strides whose boxes have a colour.

    ``boxes``, int64 ``(4, number, N)``, are top, left, height and width. They may reach beyond the
    images. ``colour`` is ``(C,)`` of the images' dtype, on the host. The result has the layout of
    the images.
    """
    levels = _as_integers(colour).numpy()
    return _paint(images, boxes, levels, 0, colour.new_empty(0, device=images.device))


def paint_noise(
    images: Tensor, boxes: np.ndarray, streams: np.ndarray, first: int, table: Tensor
) -> Tensor:
    """Return images ``(N, C, H, W)`` of any strides whose boxes have values of ``table``.

    `draws.numbers_at` says which of its 2¹⁶ values: pixels have numbers ``first`` and up of their
    sample's stream, int64 ``(N,)``, by row, column and channel. ``table`` has the dtype of the
    images and is on their device. For boxes and the result see `paint`.
    """
    return _paint(images, boxes, streams, first, table)


def mix(images: Tensor, factor: np.ndarray, boxes: np.ndarray) -> Tensor:
    """Do what `mixing.mix` does."""
    out = torch.empty_like(images)
    count = len(images)
    parameters = np.empty((5, count), np.int32)
    parameters[:4] = _edges(boxes)
    parameters[4] = factor.astype(np.float32).view(np.int32)
    blends = images.is_floating_point()
    source, target = (images, out) if blends else (_as_integers(images), _as_integers(out))
    _launch(
        _mix_kernel, source, target, upload(parameters, images.device), count, BLENDS=blends,
        WIDE=tl.float64 if images.dtype == torch.float64 else tl.float32,
    )  # fmt: skip
    return out


def _paint(
    images: Tensor, boxes: np.ndarray, numbers: np.ndarray, first: int, table: Tensor
) -> Tensor:
    """Paint with the noise of streams or, if the table is empty, with the levels of channels."""
    out = torch.empty_like(images)
    parameters = np.concatenate([_edges(boxes).swapaxes(0, 1).ravel(), numbers])
    _launch(
        _paint_kernel, _as_integers(images), _as_integers(out), upload(parameters, images.device),
        len(images), boxes.shape[1], first, _as_integers(table), NOISE=table.numel() > 0,
    )  # fmt: skip
    return out


def _as_integers(tensor: Tensor) -> Tensor:
    """Return a tensor as integers of the same bits, without a copy."""
    return tensor.view(_INTEGERS[tensor.element_size()])


def _edges(boxes: np.ndarray) -> np.ndarray:
    """Return the first row, the row after the last, and the same of columns, ``(4, …)``."""
    top, left, height, width = boxes
    return np.array([top, top + height, left, left + width])


def _launch(kernel: Any, images: Tensor, out: Tensor, *arguments: Any, **constants: Any) -> None:
    """Let a kernel make all of ``out``. A plane is what neighbouring programs make of a sample.

    That is all channels if they are neighbours in memory, and otherwise one channel.
    """
    if not out.numel():
        return
    count, channels, height, width = images.shape
    together = channels if out.stride(1) == 1 else 1
    planes = channels // together
    tiles = triton.cdiv(height, _ROWS) * triton.cdiv(width * together, _COLUMNS)
    dense = all(
        tensor.stride(3) == together and (together == 1 or tensor.stride(1) == 1)
        for tensor in (images, out)
    )
    with torch.cuda.device(images.device if images.is_cuda else -1):
        kernel[(count * planes * tiles,)](
            images, out, *arguments, planes, height, width, *images.stride(), *out.stride(),
            C=together, DENSE=dense, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=_WARPS,
            enable_fp_fusion=False,  # a fused multiply-add rounds differently than the CPU does
            **constants,
        )  # fmt: skip


@triton.jit(do_not_specialize=["count"])  # so the last batch needs no kernel of its own
def _paint_kernel(
    source, out, parameters, count, boxes, first, table, planes, height, width,
    source_n, source_c, source_y, source_x, out_n, out_c, out_y, out_x,
    NOISE: tl.constexpr, C: tl.constexpr, DENSE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Copy a tile of a plane, and paint what is inside of any box.

    ``parameters`` has the four edges of each box, each with a number for each sample. Then come the
    samples' streams or, without noise, the level of each channel.
    """
    sample, plane, y, column, in_image = _tile(planes, height, width, C, ROWS, COLUMNS)
    source += sample * source_n + plane * source_c
    out += sample * out_n + plane * out_c
    value = tl.load(
        source + _offsets(y, column, source_c, source_y, source_x, C, DENSE), mask=in_image
    )
    painted = tl.zeros(value.shape, tl.int1)
    for box in range(boxes):
        painted |= _in_box(parameters + 4 * count * box + sample, count, y, column // C)
    others = parameters + 4 * count * boxes
    channel = plane * C + column % C
    if NOISE:
        # Most tiles have no box. Noise takes about 50 instructions for each value.
        if _any(painted):
            pixel = (y.to(tl.int64) * width + column // C) * (planes * C) + channel
            drawn = _numbers_at(tl.load(others + sample), first + pixel)
            value = tl.where(painted, tl.load(table + drawn), value)
    else:
        value = tl.where(painted, tl.load(others + channel).to(value.dtype), value)
    tl.store(out + _offsets(y, column, out_c, out_y, out_x, C, DENSE), value, mask=in_image)


@triton.jit(do_not_specialize=["count"])
def _mix_kernel(
    source, out, parameters, count, planes, height, width,
    source_n, source_c, source_y, source_x, out_n, out_c, out_y, out_x,
    BLENDS: tl.constexpr, WIDE: tl.constexpr, C: tl.constexpr, DENSE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Mix a tile of a plane with that of the sample before.

    ``parameters`` has four edges of a box and the factor, a float32, each for each sample. Products
    and sums are of type ``WIDE``.
    """
    sample, plane, y, column, in_image = _tile(planes, height, width, C, ROWS, COLUMNS)
    where = plane * source_c + _offsets(y, column, source_c, source_y, source_x, C, DENSE)
    value = tl.load(source + sample * source_n + where, mask=in_image)
    # The partner is read only where it is needed.
    partner = source + tl.where(sample == 0, count - 1, sample - 1) * source_n + where
    if BLENDS:
        factor = tl.load(parameters + 4 * count + sample).to(tl.float32, bitcast=True)
        if factor != 1:
            other = tl.load(partner, mask=in_image).to(WIDE)
            mixed = value.to(WIDE) * factor.to(WIDE) + other * (1 - factor).to(WIDE)
            value = mixed.to(value.dtype)
    shows_partner = in_image & _in_box(parameters + sample, count, y, column // C)
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
def _in_box(edges, count, y, x):
    """Return which pixels are in the box with the edges at ``edges``, ``count`` apart."""
    in_rows = (y >= tl.load(edges)) & (y < tl.load(edges + count))
    return in_rows & (x >= tl.load(edges + 2 * count)) & (x < tl.load(edges + 3 * count))


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
