"""A plan carried out by plain torch operations: on the CPU, and where the kernel cannot be used."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from memload.transforms.geometry import Plan
from memload.upload import upload

#: Images are processed in chunks of about this many values, which stay in a core's cache.
_CHUNK_VALUES = 1 << 19


def reference(images: Tensor, plan: Plan, first_in_plan: int = 0) -> Tensor:
    """Carry out a plan for images ``(N, C, H, W)``, on any device, and return new memory.

    They are the plan's samples from ``first_in_plan``.

    On the CPU, uint8 images are resized as uint8, and the kernel gives the same bits, except for a
    width of 1 pixel. On other devices they are resized as float32. In these two cases, the results
    here and of the kernel may differ by 1.
    """
    count, channels = images.shape[:2]
    height, width = plan.height.extent, plan.width.extent
    all_samples = slice(first_in_plan, first_in_plan + count)
    if count and _only_crops(plan, all_samples):
        return _copy(_crop_and_resize(images, plan, all_samples), images, plan)
    planar = plan.memory_format == torch.contiguous_format and images.is_contiguous()
    # Channels last, work on whole rows of W·C values: torch is slow with a last dimension of 3.
    shape = (count, channels, height * width) if planar else (count, height, width * channels)
    out = torch.empty(shape, dtype=plan.dtype, device=images.device)
    affine = None
    if plan.affine is not None:
        repeated = plan.affine[:, :, np.newaxis] if planar else np.tile(plan.affine, width)
        affine = upload(repeated, images.device)
    has_offset = plan.affine is not None and bool(plan.affine[1].any())
    step = max(1, _CHUNK_VALUES // (height * width * channels or 1))
    for start in range(0, count, step):
        chunk = slice(start, min(start + step, count))
        samples = slice(first_in_plan + chunk.start, first_in_plan + chunk.stop)
        moved = _flip(_crop_and_resize(images[chunk], plan, samples), plan, samples)
        values = (moved if planar else moved.permute(0, 2, 3, 1)).flatten(2)
        if affine is None:
            out[chunk] = values
        else:
            _scale(out[chunk], values, affine, has_offset)
    if planar:
        return out.view(count, channels, height, width)
    batch = out.view(count, height, width, channels).permute(0, 3, 1, 2)
    return batch.contiguous(memory_format=plan.memory_format)


def _only_crops(plan: Plan, samples: slice) -> bool:
    if plan.affine is not None or plan.resizes:
        return False
    return not (plan.height.flipped[samples].any() or plan.width.flipped[samples].any())


def _copy(cropped: Tensor, images: Tensor, plan: Plan) -> Tensor:
    """Return the output of a plan that only crops, with at most one copy."""
    shares_memory = cropped.untyped_storage().data_ptr() == images.untyped_storage().data_ptr()
    return cropped.to(plan.dtype, memory_format=plan.memory_format, copy=shares_memory)


def _crop_and_resize(images: Tensor, plan: Plan, samples: slice) -> Tensor:
    """Crop boxes, resize them, and crop again. Flips and affine maps follow later."""
    height, width = plan.height, plan.width
    if height.unchanged and width.unchanged:
        return images
    size = None
    if height.resized is not None and width.resized is not None:
        size = (height.resized, width.resized)
    boxes = np.stack([height.start, height.length, width.start, width.length], 1)[samples]
    images = _take_boxes(
        images, boxes, plan.fill, lambda box: _resize(box, size, plan.antialias) if size else box
    )
    shifted = height.shift[samples].any() or width.shift[samples].any()
    if not shifted and size in (None, (height.extent, width.extent)):
        return images
    rows, columns = (
        np.full_like(height.shift, height.extent),
        np.full_like(width.shift, width.extent),
    )
    windows = np.stack([height.shift, rows, width.shift, columns], 1)[samples]
    return _take_boxes(images, windows, plan.fill, lambda window: window)


def _take_boxes(
    images: Tensor, boxes: np.ndarray, fill: tuple[float, ...], change: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return ``change`` of a box of each image; ``fill`` is the value of pixels outside.

    ``boxes`` ``(N, 4)`` are top, height, left and width.
    """
    starts, lengths = boxes[:, ::2], boxes[:, 1::2]
    extents = images.shape[-2:]
    above, left_margin = np.maximum(-starts.min(0), 0)
    below, right_margin = np.maximum((starts + lengths).max(0) - extents, 0)
    if above or below or left_margin or right_margin:
        shape = (extents[0] + above + below, extents[1] + left_margin + right_margin)
        padded = images.new_empty((*images.shape[:2], *shape))
        padded = padded.contiguous(memory_format=torch.channels_last)
        padded[:] = upload(np.array(fill), images.device).to(images.dtype)[:, None, None]
        inside = slice(above, above + extents[0]), slice(left_margin, left_margin + extents[1])
        padded[(..., *inside)] = images
        images = padded
    boxes = boxes + np.array([above, 0, left_margin, 0])
    if (boxes == boxes[0]).all():
        top, height, left, width = boxes[0].tolist()
        return change(images[..., top : top + height, left : left + width])
    return torch.cat([
        change(images[index : index + 1, :, top : top + height, left : left + width])
        for index, (top, height, left, width) in enumerate(boxes.tolist())
    ])  # fmt: skip


def _resize(images: Tensor, size: tuple[int, int], antialias: bool) -> Tensor:
    """Resize bilinearly. uint8 becomes uint8."""
    if size[1] == 1 and size[0] > 1:  # torch 2.13 returns wrong pixels for a width of 1
        return _resize(images.mT, (1, size[0]), antialias).mT
    if 1 in images.shape[2:]:  # a side of 1 may have any stride, and torch would use it
        images = images.clone(memory_format=torch.contiguous_format)
    is_uint8 = images.dtype == torch.uint8
    # torch resizes uint8 on the CPU only, and fails at a single pixel.
    uint8_works = images.device.type == "cpu" and size != (1, 1)
    as_it_is = uint8_works if is_uint8 else images.dtype.itemsize > 2
    source = images if as_it_is else images.float()
    resized = interpolate(source, size, mode="bilinear", antialias=antialias)
    if as_it_is:
        return resized
    return (resized.round_() if is_uint8 else resized).to(images.dtype)


def _flip(images: Tensor, plan: Plan, samples: slice) -> Tensor:
    for axis, dim in ((plan.height, -2), (plan.width, -1)):
        flipped = axis.flipped[samples]
        if flipped.any():
            which = upload(flipped, images.device)[:, None, None, None]
            images = torch.where(which, images.flip(dim), images)
    return images


def _scale(out: Tensor, values: Tensor, affine: Tensor, has_offset: bool) -> None:
    """Write ``factor · values + offset`` to ``out``, or for floats ``factor · (values + offset)``.

    These are two operations, since a fused one rounds differently. They work in ``out`` itself
    where that is possible.
    """
    factor, offset = affine
    in_out = out if out.dtype == torch.float32 and not values.requires_grad else None
    if values.is_floating_point():
        scaled = torch.add(values, offset, out=in_out).mul_(factor)
    else:
        # The cast comes first: 1,290 µs, where a multiplication that casts takes 1,750.
        as_floats = values.float() if in_out is None else in_out.copy_(values)
        scaled = as_floats.mul_(factor)
        if has_offset:
            scaled = scaled.add_(offset)
    if in_out is None:
        out.copy_(scaled)
