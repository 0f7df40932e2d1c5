"""A plan carried out by plain torch operations: on the CPU, and where the kernel cannot be used."""

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from memload.transforms.geometry import Plan, pixels_shown
from memload.upload import upload

#: Images are processed in chunks of about this many values, which stay in a core's cache.
_CHUNK_VALUES = 1 << 19


def reference(images: Tensor, plan: Plan, first_in_plan: int = 0) -> Tensor:
    """Carry out a plan for images ``(N, C, H, W)``, on any device, and return new memory.

    They are the plan's samples from ``first_in_plan``.

    On the CPU, uint8 images are resized as uint8, and the kernel gives the same bits, except for
    bilinear results with a width of 1 pixel, which may differ by 1. On other devices they are
    resized as float32, and differ from the kernel's by 1 where rows and columns are rounded to 8
    bits in between, or more if a bicubic value is cut off there.
    """
    count, channels = images.shape[:2]
    height, width = plan.height.extent, plan.width.extent
    shape, layout, device = (count, channels, height, width), plan.memory_format, images.device
    out = torch.empty(shape, dtype=plan.dtype, device=device, memory_format=layout)
    planar = layout == torch.contiguous_format
    # Floats become factor · (pixel + offset). With factor · pixel + offset, two large numbers would
    # cancel if a mean is large and its standard deviation small.
    offset = plan.offset / plan.factor if images.is_floating_point() else plan.offset
    affine = np.array([plan.factor, offset], np.float32)
    # Channels last, work on whole rows of W·C values: torch is slow with a last dimension of 3.
    affine = affine[:, :, np.newaxis] if planar else np.tile(affine, width)
    factor_and_offset = upload(affine, device)
    samples = slice(first_in_plan, first_in_plan + count)
    table, bicubic = plan.table()[:, samples], plan.bicubic[samples]
    step = max(1, _CHUNK_VALUES // (height * width * channels))
    for start in range(0, count, step):
        chunk = slice(start, start + step)
        moved, target = _move(images[chunk], table[:, chunk], bicubic[chunk], plan), out[chunk]
        if not planar:
            moved, target = moved.permute(0, 2, 3, 1), target.permute(0, 2, 3, 1)
        if plan.maps_pixels:
            _scale(target.flatten(2), moved.flatten(2), *factor_and_offset)
        else:
            target.copy_(moved)
    return out


def reference_masks(masks: Tensor, plan: Plan, fill: int, first_in_plan: int = 0) -> Tensor:
    """Carry out a plan for masks ``(N, H, W)`` of signed integers or uint8, on any device.

    Returns new memory. Each pixel is that of the nearest neighbour, or ``fill`` outside.
    """
    count, height, width = masks.shape
    samples = slice(first_in_plan, first_in_plan + count)
    rows, columns = plan.height.nearest(samples), plan.width.nearest(samples)
    outside = [(rows < 0) | (rows >= height), (columns < 0) | (columns >= width)]
    has_margins = any(side.any() for side in outside)
    rows = rows.clip(0, height - 1) + np.arange(count)[:, np.newaxis] * height
    row, column = upload(rows, masks.device), upload(columns.clip(0, width - 1), masks.device)
    out = masks.new_empty((count, plan.height.extent, plan.width.extent))
    step = max(1, _CHUNK_VALUES // (plan.height.extent * max(width, plan.width.extent)))
    for start in range(0, count, step):
        chunk, target = masks[start : start + step], out[start : start + step]
        # Whole rows first: with one index of rows and columns it takes five times as long.
        chosen = row[start : start + step].flatten() - start * height
        in_rows = chunk.reshape(-1, width).index_select(0, chosen).view(*target.shape[:2], width)
        in_columns = column[start : start + step, None].expand_as(target)
        target.copy_(torch.gather(in_rows, 2, in_columns))
    if has_margins:
        in_margin = [upload(side, masks.device) for side in outside]
        out.masked_fill_(in_margin[0][:, :, None] | in_margin[1][:, None], fill)
    return out


def _move(images: Tensor, table: np.ndarray, bicubic: np.ndarray, plan: Plan) -> Tensor:
    """Crop, resize, crop again and flip.

    ``table`` and ``bicubic`` are the parts of `Plan.table` and the plan's for these images.
    """
    height, width = plan.height, plan.width
    if not (height.unchanged and width.unchanged):
        size = None
        if height.resized is not None and width.resized is not None:
            size = height.resized, width.resized
        images = _take_boxes(images, table[[0, 1, 4, 5]], bicubic, plan, size)
        extents = height.extent, width.extent
        if size not in (None, extents) or table[[2, 6]].any():
            windows = table[[2, 1, 6, 5]]
            windows[1], windows[3] = extents
            images = _take_boxes(images, windows, bicubic, plan)
    for flipped, dim in ((table[3], -2), (table[7], -1)):
        if flipped.any():
            images = _flip(images, flipped, dim)
    return images


def _flip(images: Tensor, flipped: np.ndarray, dim: int) -> Tensor:
    """Return images of which some are flipped, ``(N,)``."""
    pieces = zip(images.chunk(len(images)), flipped.tolist(), strict=True)
    return torch.cat([image.flip(dim) if is_flipped else image for image, is_flipped in pieces])


def _take_boxes(
    images: Tensor,
    boxes: np.ndarray,
    bicubic: np.ndarray,
    plan: Plan,
    size: tuple[int, int] | None = None,
) -> Tensor:
    """Return a box of each image, resized to ``size``. Around the images is the plan's padding.

    ``boxes`` ``(4, N)`` are top, height, left and width. ``bicubic`` ``(N,)`` says how to resize.
    """
    starts, lengths = boxes[::2], boxes[1::2]
    extents = np.array(images.shape[2:])
    top_left = np.maximum(-starts.min(1), 0)
    bottom_right = np.maximum((starts + lengths).max(1) - extents, 0)
    if top_left.any() or bottom_right.any():
        images, starts = _pad(images, top_left, bottom_right, plan), starts + top_left[:, None]
    (tops, lefts), (heights, widths) = starts.tolist(), lengths.tolist()
    if (boxes == boxes[:, :1]).all() and (size is None or (bicubic == bicubic[0]).all()):
        images = images[..., tops[0] : tops[0] + heights[0], lefts[0] : lefts[0] + widths[0]]
        return images if size is None else _resize(images, size, plan.antialias, bicubic[0])
    parts = [
        images[index : index + 1, :, top : top + height, left : left + width]
        for index, (top, height, left, width) in enumerate(
            zip(tops, heights, lefts, widths, strict=True)
        )
    ]
    if size is not None:
        parts = [
            _resize(part, size, plan.antialias, is_bicubic)
            for part, is_bicubic in zip(parts, bicubic, strict=True)
        ]
    return torch.cat(parts)


def _pad(images: Tensor, before: np.ndarray, after: np.ndarray, plan: Plan) -> Tensor:
    """Return images with so many more rows and columns before and after them."""
    extents, device = np.array(images.shape[2:]), images.device
    padded = torch.empty(
        (*images.shape[:2], *(before + extents + after).tolist()),
        dtype=images.dtype,
        device=device,
        memory_format=torch.channels_last,
    )
    rows, columns = map(slice, before, before + extents)
    padded[..., rows, columns] = images
    fill = upload(np.array(plan.fill), device).to(images.dtype)[:, None, None]
    # Columns first: then the rows that are repeated have their margins.
    for dim, inside in ((3, columns), (2, rows)):
        places = np.arange(padded.shape[dim])
        shown = pixels_shown(places - inside.start, images.shape[dim], plan.padding_mode)
        for margin in (places[: inside.start], places[inside.stop :]):
            if margin.size:
                target = padded.narrow(dim, int(margin[0]), margin.size)
                if plan.padding_mode == "constant":
                    target.copy_(fill)
                else:
                    source = upload(inside.start + shown[margin], device)
                    target.copy_(padded.index_select(dim, source))
    return padded


def _resize(images: Tensor, size: tuple[int, int], antialias: bool, bicubic: bool) -> Tensor:
    """Resize bicubically or bilinearly. uint8 becomes uint8."""
    is_uint8, on_cpu = images.dtype == torch.uint8, images.device.type == "cpu"
    # torch 2.13 returns wrong pixels for a width of 1.
    if size[1] == 1 and bicubic and is_uint8 and on_cpu:
        # With one channel they are right. Columns first would cut other values off in between.
        planes = images.clone(memory_format=torch.contiguous_format).flatten(0, 1)[:, None]
        resized = interpolate(planes, size, mode="bicubic", antialias=antialias)
        return resized.view(*images.shape[:2], *size)
    if size[1] == 1 and size[0] > 1:
        return _resize(images.mT, (1, size[0]), antialias, bicubic).mT
    if 1 in images.shape[2:]:  # a side of 1 may have any stride, and torch would use it
        images = images.clone(memory_format=torch.contiguous_format)
    # torch resizes uint8 on the CPU only, and fails at a single pixel.
    uint8_works = on_cpu and size != (1, 1)
    as_it_is = uint8_works if is_uint8 else images.dtype.itemsize > 2
    source = images if as_it_is else images.float()
    mode = "bicubic" if bicubic else "bilinear"
    resized = interpolate(source, size, mode=mode, antialias=antialias)
    if is_uint8 and not as_it_is:
        resized = resized.round_().clamp_(0, 255)
    return resized.to(images.dtype)


def _scale(out: Tensor, values: Tensor, factor: Tensor, offset: Tensor) -> None:
    """Write ``factor · values + offset`` to ``out``, or for floats ``factor · (values + offset)``.

    These are two operations, since a fused one rounds differently.
    """
    if values.is_floating_point():
        out.copy_((values + offset).mul_(factor))
        return
    in_place = out.dtype == torch.float32
    # The cast comes first: 1,290 µs, where a multiplication that casts takes 1,750.
    scaled = out.copy_(values) if in_place else values.float()
    scaled.mul_(factor).add_(offset)
    if not in_place:
        out.copy_(scaled)
