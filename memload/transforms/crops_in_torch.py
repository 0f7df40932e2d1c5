"""A plan of crops, resizes, flips and maps of pixels, by torch's operations, on any device."""

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from memload.transforms.geometry import Plan, pixels_shown
from memload.upload import upload

#: Images are processed in chunks of about this many values, which stay in a core's cache.
_CHUNK_VALUES = 1 << 19


def run_plan(
    images: Tensor, plan: Plan, boxes: np.ndarray, memory_format: torch.memory_format
) -> Tensor:
    """Carry out a plan by torch's operations, on any device, and return new memory.

    ``boxes`` are the part of `Plan.boxes` for these images. uint8 images are resized as uint8 on
    the CPU, and elsewhere as float32, which gives the same but for a level or, rarely, two.
    """
    count, channels = images.shape[:2]
    height, width = plan.size
    shape, device = (count, channels, height, width), images.device
    out = torch.empty(shape, dtype=plan.dtype, device=device, memory_format=memory_format)
    planar = memory_format == torch.contiguous_format
    # Floats become factor · (pixel + offset). With factor · pixel + offset, two large numbers would
    # cancel if a mean is large and its standard deviation small.
    offset = plan.offset / plan.factor if images.is_floating_point() else plan.offset
    affine = np.array([plan.factor, offset], np.float32)
    # Channels last, work on whole rows of W·C values: torch is slow with a last dimension of 3.
    affine = affine[:, :, np.newaxis] if planar else np.tile(affine, width)
    factor_and_offset = upload(affine, device)
    step = max(1, _CHUNK_VALUES // (height * width * channels))
    for start in range(0, count, step):
        chunk = slice(start, start + step)
        moved, target = _move(images[chunk], boxes[chunk].T, plan), out[chunk]
        if not planar:
            moved, target = moved.permute(0, 2, 3, 1), target.permute(0, 2, 3, 1)
        if plan.maps_pixels:
            _scale(target.flatten(2), moved.flatten(2), *factor_and_offset)
        else:
            target.copy_(moved)
    return out


def _move(images: Tensor, boxes: np.ndarray, plan: Plan) -> Tensor:
    """Crop, resize, crop again and flip. ``boxes`` are `Plan.boxes` of these images, ``(8, N)``."""
    height, width = plan.height, plan.width
    if not (height.unchanged and width.unchanged):
        size = None
        if height.resized is not None and width.resized is not None:
            size = height.resized, width.resized
        images = _take_boxes(images, boxes[[0, 1, 4, 5]], plan, size)
        if size not in (None, plan.size) or boxes[[2, 6]].any():
            windows = boxes[[2, 1, 6, 5]]
            windows[1], windows[3] = plan.size
            images = _take_boxes(images, windows, plan)
    for flipped, dim in ((boxes[3], -2), (boxes[7], -1)):
        if flipped.any():
            pieces = zip(images.chunk(len(images)), flipped.tolist(), strict=True)
            images = torch.cat([image.flip(dim) if flips else image for image, flips in pieces])
    return images


def _take_boxes(
    images: Tensor, boxes: np.ndarray, plan: Plan, size: tuple[int, int] | None = None
) -> Tensor:
    """Return a box of each image, resized to ``size``. Around the images is the plan's padding.

    ``boxes`` ``(4, N)`` are top, height, left and width.
    """
    starts, lengths = boxes[::2], boxes[1::2]
    extents = np.array(images.shape[2:])
    top_left = np.maximum(-starts.min(1), 0)
    bottom_right = np.maximum((starts + lengths).max(1) - extents, 0)
    if top_left.any() or bottom_right.any():
        images, starts = _pad(images, top_left, bottom_right, plan), starts + top_left[:, None]
    (tops, lefts), (heights, widths) = starts.tolist(), lengths.tolist()
    if (boxes == boxes[:, :1]).all():
        images = images[..., tops[0] : tops[0] + heights[0], lefts[0] : lefts[0] + widths[0]]
        return images if size is None else _resize(images, size, plan)
    pieces = [
        images[index : index + 1, :, top : top + height, left : left + width]
        for index, (top, height, left, width) in enumerate(
            zip(tops, heights, lefts, widths, strict=True)
        )
    ]
    if size is not None:
        pieces = [_resize(piece, size, plan) for piece in pieces]
    return torch.cat(pieces)


def _pad(images: Tensor, before: np.ndarray, after: np.ndarray, plan: Plan) -> Tensor:
    """Return images with so many more rows and columns before and after them."""
    if plan.padding_mode != "constant":
        pixels = images.permute(0, 2, 3, 1)  # channels last, whole pixels are taken
        for dim, (first, last) in enumerate(zip(before, after, strict=True), 1):
            places = np.arange(-first, pixels.shape[dim] + last)
            shown = pixels_shown(places, pixels.shape[dim], plan.padding_mode)
            pixels = pixels.index_select(dim, upload(shown, images.device))
        return pixels.permute(0, 3, 1, 2)
    extents = np.array(images.shape[2:])
    shape = (*images.shape[:2], *(before + extents + after).tolist())
    padded = torch.empty(
        shape, dtype=images.dtype, device=images.device, memory_format=torch.channels_last
    )
    padded.fill_(plan.fill[0])
    if len(set(plan.fill)) > 1:  # channel by channel takes three times as long
        for channel, fill in zip(padded.unbind(1), plan.fill, strict=True):
            channel.fill_(fill)
    rows, columns = map(slice, before, before + extents)
    padded[..., rows, columns] = images
    return padded


def _resize(images: Tensor, size: tuple[int, int], plan: Plan) -> Tensor:
    """Resize bicubically or bilinearly. uint8 becomes uint8."""
    is_uint8, on_cpu = images.dtype == torch.uint8, images.device.type == "cpu"
    mode, antialias = "bicubic" if plan.bicubic else "bilinear", plan.antialias
    # torch 2.13 returns wrong pixels for a width of 1.
    if size[1] == 1 and size[0] > 1:
        return _resize(images.mT, (1, size[0]), plan).mT
    if 1 in images.shape[2:]:  # a side of 1 may have any stride, and torch would use it
        images = images.clone(memory_format=torch.contiguous_format)
    # torch resizes uint8 on the CPU only, and fails at a single pixel.
    uint8_works = on_cpu and size != (1, 1)
    as_it_is = uint8_works if is_uint8 else images.dtype.itemsize > 2
    source = images if as_it_is else images.float()
    resized = interpolate(source, size, mode=mode, antialias=antialias)
    if is_uint8 and not as_it_is:
        resized = resized.round_().clamp_(0, 255)
    return resized.to(images.dtype)


def _scale(out: Tensor, values: Tensor, factor: Tensor, offset: Tensor) -> None:
    """Write ``factor · values + offset`` to ``out``; for floats ``factor · (values + offset)``."""
    if values.is_floating_point():
        out.copy_((values + offset).mul_(factor))
        return
    in_place = out.dtype == torch.float32
    # The cast comes first: 1,290 µs, where a multiplication that casts takes 1,750.
    scaled = out.copy_(values) if in_place else values.float()
    scaled.mul_(factor).add_(offset)
    if not in_place:
        out.copy_(scaled)
