"""Masks that follow the images, as a Triton kernel: each pixel is the nearest one."""

# ruff: noqa: N803  # Triton's way of writing constants

import triton
import triton.language as tl
from torch import Tensor

from memload.launch import ceil_div, launch
from memload.transforms.geometry import PADDING_MODES, TIE
from memload.transforms.kernels.crops import pixel_shown

#: Rows and columns that a program makes.
_ROWS, _COLUMNS = 32, 64
_TIE = tl.constexpr(TIE)


def gather(
    masks: Tensor,
    matrices: Tensor,
    size: tuple[int, int],
    shown: Tensor | None,
    padding_mode: str,
    fill: int,
) -> Tensor:
    """Do what `following.move_masks` does with masks ``(N, H, W)`` of signed integers or uint8."""
    masks = masks.contiguous()
    count, height, width = masks.shape
    out = masks.new_empty((count, *size))
    if not out.numel():
        return out
    tiles = ceil_div(size[0], _ROWS) * ceil_div(size[1], _COLUMNS)
    launch(
        _kernel, count * tiles, masks, out, matrices, shown, fill, height, width, *size,
        PADDING=PADDING_MODES.index(padding_mode), ROWS=_ROWS, COLUMNS=_COLUMNS,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize_on_alignment=["matrices"])
def _kernel(
    source, out, matrices, boxes, fill, height, width, extent_y, extent_x,
    PADDING: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Make one tile of the output."""
    program = tl.program_id(0)
    across, down = tl.cdiv(extent_x, COLUMNS), tl.cdiv(extent_y, ROWS)
    sample = (program // (across * down)).to(tl.int64)
    row = program // across % down * ROWS + tl.arange(0, ROWS)[None, :]
    # Columns are a tile's first dimension, as in `crops`.
    column = program % across * COLUMNS + tl.arange(0, COLUMNS)[:, None]
    matrix = matrices + sample * 9
    x, y = column.to(tl.float64) + 0.5, row.to(tl.float64) + 0.5
    divisor = _line(matrix + 6, x, y)
    from_x, from_y = _line(matrix, x, y) / divisor, _line(matrix + 3, x, y) / divisor
    pixel_x, pixel_y = _floor(from_x, width), _floor(from_y, height)
    if PADDING:
        pixel_x = pixel_shown(pixel_x, width, PADDING)
        pixel_y = pixel_shown(pixel_y, height, PADDING)
    top, bottom, left, right = 0, height, 0, width
    if boxes is not None:
        box = boxes + sample * 4
        top, bottom = tl.load(box), tl.load(box + 1)
        left, right = tl.load(box + 2), tl.load(box + 3)
    in_output = (column < extent_x) & (row < extent_y)
    inside = (pixel_y >= top) & (pixel_y < bottom) & (pixel_x >= left) & (pixel_x < right)
    source += sample * height * width
    out += sample * extent_y * extent_x
    value = tl.load(source + pixel_y * width + pixel_x, mask=in_output & inside, other=fill)
    tl.store(out + row * extent_x + column, value, mask=in_output)


@triton.jit
def _line(line, x, y):
    return x * tl.load(line) + y * tl.load(line + 1) + tl.load(line + 2)


@triton.jit
def _floor(position, extent):
    """Return the pixel at a position. From nowhere, or from far away, is from outside."""
    position = tl.where(position == position, position, -9.0)
    return tl.floor(tl.minimum(tl.maximum(position + _TIE, -extent - 9.0), 2.0 * extent + 9.0)).to(
        tl.int32
    )
