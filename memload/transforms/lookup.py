"""Changes of each value by itself: solarize, posterize, invert, autocontrast, equalize.

    threshold ─▶ solarize_table ──────────────────────────────┐
    images ─▶ least and largest values ─▶ autocontrast_table ─┼─▶ tables ─▶ look_up
    images ─▶ histograms ─▶ equalize_table ───────────────────┘

Tables are uint8 ``(n, 1, 256)``, or ``(n, C, 256)`` with one for each channel, on the device of the
images. To posterize and invert uint8 images takes one operation on bits, and no table. Floating
images cannot be looked up, and are computed.

Results are those of torchvision's tensor backend, to the bit.
"""

import numpy as np
import torch
from torch import Tensor

from memload.transforms.arguments import one_or_three_channels, wrong
from memload.transforms.sub_batches import parts
from memload.upload import upload


def solarize(images: Tensor, threshold: np.ndarray) -> Tensor:
    """Return images ``(n, C, H, W)`` whose values are inverted from a threshold on.

    ``threshold`` is float64 ``(n,)``, in the units of the images.
    """
    check_threshold("solarize", images.dtype, threshold)
    if images.dtype == torch.uint8:
        return look_up(images, solarize_table(threshold, images.device))
    limit = upload(threshold, images.device).to(images.dtype)[:, None, None, None]
    return torch.where(images >= limit, 1 - images, images)


def posterize(images: Tensor, bits: np.ndarray) -> Tensor:
    """Return images ``(n, C, H, W)`` of which only the highest bits are kept.

    ``bits`` is int64 ``(n,)``, from 0 to 8. Floats have 2^bits levels: 0, 2^-bits, … below 1.
    """
    check_bits("posterize", bits)
    if images.dtype == torch.uint8:
        return images & _bit_masks(bits, images.device)[:, None, None, None]
    levels = upload(2.0**bits, images.device).to(images.dtype)[:, None, None, None]
    return (images * levels).floor_().clamp_(min=0).clamp_(max=levels - 1).mul_(1 / levels)


def invert(images: Tensor) -> Tensor:
    """Return images ``(n, C, H, W)`` with black for white."""
    return ~images if images.dtype == torch.uint8 else 1 - images


def autocontrast(images: Tensor) -> Tensor:
    """Return images ``(n, C, H, W)`` of which each channel has the full range; C is 1 or 3."""
    one_or_three_channels("autocontrast", images)
    if images.dtype == torch.uint8:
        return look_up(images, autocontrast_table(images))
    least, largest = _extremes(images)
    return _stretch(images, least[:, :, None, None], largest[:, :, None, None], 1)


def equalize(images: Tensor) -> Tensor:
    """Return images ``(n, C, H, W)`` of which the values of each channel are spread evenly."""
    if images.dtype == torch.uint8:
        return look_up(images, equalize_table(images))
    levels = torch.empty_like(images, dtype=torch.uint8)
    for part in parts(images, 12 * images.shape[1:].numel()):
        pixels = images[part].float() if images.dtype.itemsize == 2 else images[part]
        # Each of the 256 levels has an equal share of 0 to 1, as in torchvision.
        levels[part] = (pixels.clamp(0, 1) * (256 - 1e-3)).to(torch.uint8)
    return look_up(levels, equalize_table(levels)).to(images.dtype).mul_(1 / 255)


def solarize_table(threshold: np.ndarray, device: torch.device) -> Tensor:
    """Return the tables ``(n, 1, 256)`` of `solarize`."""
    values = torch.arange(256, device=device, dtype=torch.float32)
    inverted = values >= upload(threshold, device).float()[:, None, None]
    return torch.where(inverted, 255 - values, values).to(torch.uint8)


def autocontrast_table(images: Tensor) -> Tensor:
    """Return the tables ``(n, C, 256)`` of `autocontrast` for uint8 images."""
    least, largest = (extreme.float()[:, :, None] for extreme in _extremes(images))
    values = torch.arange(256, device=images.device, dtype=torch.float32)
    return _stretch(values, least, largest, 255).to(torch.uint8)


def equalize_table(images: Tensor) -> Tensor:
    """Return the tables ``(n, C, 256)`` of `equalize` for uint8 images.

    A value's new one is the number of values below it, divided by a step and rounded. 255 steps are
    all values but the largest.
    """
    up_to = _histograms(images).cumsum(2)
    count = images.shape[2] * images.shape[3]
    below_largest = torch.where(up_to < count, up_to, 0).amax(2, keepdim=True)
    step = below_largest // 255
    below = torch.nn.functional.pad(up_to[:, :, :-1], (1, 0))
    spread = ((below + step // 2) // step.clamp(min=1)).clamp(0, 255)
    unchanged = torch.arange(256, device=images.device, dtype=torch.uint8)
    return torch.where(step > 0, spread.to(torch.uint8), unchanged)


def look_up(images: Tensor, tables: Tensor) -> Tensor:
    """Return uint8 images ``(n, C, H, W)`` in their layout, each value replaced by a table's.

    ``tables`` are uint8 ``(n, 1, 256)``, or ``(n, C, 256)`` with one for each channel.
    """
    is_channels_last = not images.is_contiguous() and images.is_contiguous(
        memory_format=torch.channels_last
    )
    images = images if is_channels_last else images.contiguous()
    result = torch.empty_like(images)
    table_starts = torch.arange(tables.shape[1], dtype=torch.int32, device=images.device) * 256
    if is_channels_last:
        source, target = (part.permute(0, 2, 3, 1).flatten(2) for part in (images, result))
        # A whole row at once takes half the time of one pixel at a time.
        starts = table_starts.repeat(images.shape[3]) if len(table_starts) > 1 else table_starts
    else:
        source, target = images.flatten(2), result.flatten(2)
        starts = table_starts[:, None]
    for part in parts(images, 8 * images.shape[1:].numel()):
        chosen = tables[part]
        # index_select takes int32. For an image of 224² on a core it needs 0.11 ms, gather 0.67.
        index = source[part].int()
        if chosen.numel() > 256:
            samples = torch.arange(len(chosen), dtype=torch.int32, device=images.device)
            index += starts + samples[:, None, None] * chosen[0].numel()
        torch.index_select(chosen.flatten(), 0, index.flatten(), out=target[part].view(-1))
    return result


def _extremes(images: Tensor) -> tuple[Tensor, Tensor]:
    """Return the least and the largest value of each channel, ``(n, C)``."""
    if images.is_contiguous():
        planes = images.flatten(2)
        return planes.amin(2), planes.amax(2)
    # One axis at a time: both at once take 0.17 ms for an image of 224² in channels-last layout.
    rows = images.permute(0, 2, 3, 1).flatten(2)
    shape = len(images), images.shape[3], images.shape[1]
    return rows.amin(1).view(shape).amin(1), rows.amax(1).view(shape).amax(1)


def _stretch(values: Tensor, least: Tensor, largest: Tensor, bound: int) -> Tensor:
    """Return values of which the least becomes 0, the largest ``bound``."""
    is_flat = least == largest
    scale = torch.where(is_flat, 1, (largest - least) * (1 / bound))
    return (values - torch.where(is_flat, 0, least)).div_(scale).clamp_(0, bound)


def _histograms(images: Tensor) -> Tensor:
    """Return how often each channel has each value, ``(n, C, 256)``, for uint8 images."""
    counts = torch.zeros((*images.shape[:2], 256), dtype=torch.int32, device=images.device)
    if images.device.type == "cpu":
        # 0.13 ms for an image of 224² on a core, the other way 0.78.
        for image, into in zip(images, counts, strict=True):
            for plane, count in zip(image, into, strict=True):
                count.copy_(torch.bincount(plane.flatten(), minlength=256))
        return counts
    one = counts.new_ones(1)
    for part in parts(images, 16 * images.shape[1:].numel()):
        index = images[part].flatten(2).long()
        counts[part].scatter_add_(2, index, one.expand_as(index))
    return counts


def _bit_masks(bits: np.ndarray, device: torch.device) -> Tensor:
    """Return uint8 ``(n,)`` whose highest bits are set, as many as ``bits`` says."""
    return upload(((0xFF00 >> bits) & 0xFF).astype(np.uint8), device)


def check_threshold(owner: object, dtype: torch.dtype, threshold: np.ndarray) -> None:
    """Raise ValueError for thresholds above the largest value of a dtype."""
    largest = 255 if dtype == torch.uint8 else 1
    if not (threshold <= largest).all():
        found = threshold[~(threshold <= largest)][0]
        advice = "It is in the units of the images."
        raise wrong(owner, "threshold", f"at most {largest} for {dtype}", found, advice)


def check_bits(owner: object, bits: np.ndarray) -> None:
    """Raise ValueError for numbers of bits that are not from 0 to 8."""
    outside = (bits < 0) | (bits > 8)
    if bits.dtype.kind not in "iu" or outside.any():
        found = bits[outside][0] if outside.any() else f"of dtype {bits.dtype}"
        raise wrong(owner, "bits", "integers from 0 to 8", found)
