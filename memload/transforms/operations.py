"""What each operation on colours does, in torch's own operations.

    change_each ─▶ the samples of each operation together ─▶ values    by themselves: _VALUES
                                                          ─▶ pixels    all channels: _PIXELS
                                                          ─▶ images    warp, sharpen, blur

Images are uint8, or floats from 0 to 1. Computed values are float32, from 0 to ``white``: 255 or 1.
uint8 is rounded down, as in torchvision. Results are torchvision's within one level of uint8, or
1.5e-5 for floats.
"""

import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from memload.transforms.batch import change_some, in_layout, layout_of
from memload.transforms.operation_step import (
    LUMA,
    MOVES,
    OPERATIONS,
    OperationStep,
    kept_bits,
    weights_of,
)
from memload.transforms.warping import warp
from memload.upload import upload


@np.errstate(all="ignore")  # weights of a blur may be as good as 0
def change_each(images: Tensor, steps: Sequence[OperationStep]) -> Tensor:
    """Return images in new memory, each changed by its operations, one step after another."""
    changed = images
    for step in steps:
        if step.matrices is not None:
            changed = warp(
                changed,
                step.matrices,
                step.interpolation,
                step.fill,
                in_place=changed is not images,
            )
        for number in np.unique(step.operation[~MOVES[step.operation]]).tolist():
            if number:
                change = functools.partial(_change, OPERATIONS[number], step)
                places = np.flatnonzero(step.operation == number)
                changed = change_some(changed, places, change, in_place=changed is not images)
    return images.clone() if changed is images else changed


def _change(name: str, step: OperationStep, images: Tensor, places: np.ndarray) -> Tensor:
    """Return images ``(n, C, H, W)`` of a step changed by an operation, by their magnitudes."""
    magnitude = step.magnitude[places]
    amount = upload(magnitude.astype(np.float32), images.device)[:, None, None, None]
    if name == "Blur":
        return blur(images, step.kernel_size, magnitude)
    if name == "Sharpness":
        return _sharpen(images, amount)
    if images.dtype == torch.uint8 and name == "Invert":  # a table takes six times as long
        return ~images
    if images.dtype == torch.uint8 and name == "Posterize":
        return images & upload(kept_bits(magnitude), images.device)[:, None, None, None]
    if name in _VALUES:
        return _map_values(images, _VALUES[name], amount[..., 0])
    if images.shape[1] == 1:  # grey has neither saturation nor hue
        return images
    # A sum of three channels of 224² pixels takes 0.13 ms on a core, or 0.10 where they are apart.
    planes = in_layout(images, torch.contiguous_format)
    planes = planes.float() if images.is_floating_point() else planes
    changed = _PIXELS[name](planes, amount, 255 if images.dtype == torch.uint8 else 1)
    return in_layout(changed.to(images.dtype), layout_of(images))


def _map_values(
    images: Tensor, function: Callable[[Tensor, Tensor, Tensor], Tensor], amount: Tensor
) -> Tensor:
    """Return images of which each value is mapped by itself.

    ``function(values, amount, images)`` gets values ``(n or 1, C or 1, any)`` of these images. For
    uint8 these are all 256 levels, so that it makes a table.
    """
    if images.dtype == torch.uint8:
        levels = torch.arange(256, dtype=torch.float32, device=images.device)[None, None]
        return look_up(images, function(levels, amount, images).clamp_(0, 255).to(torch.uint8))
    mapped = function(images.float().flatten(2), amount, images)
    return mapped.clamp_(0, 1).view(images.shape).to(images.dtype)


def look_up(images: Tensor, tables: Tensor) -> Tensor:
    """Return uint8 images ``(n, C, H, W)`` in their layout, each value replaced by a table's.

    ``tables`` are uint8 ``(n, 1, 256)``, or ``(n, C, 256)`` with one for each channel.
    """
    is_last = layout_of(images) == torch.channels_last
    result = torch.empty_like(images, memory_format=layout_of(images))
    count, channels = tables.shape[:2]
    starts = torch.arange(count, dtype=torch.int32, device=images.device)[:, None] * channels
    starts = (starts + torch.arange(channels, dtype=torch.int32, device=images.device)) * 256
    if is_last:
        source, target = (part.permute(0, 2, 3, 1).flatten(2) for part in (images, result))
        # A whole row at once takes half the time of one pixel at a time.
        starts = starts.repeat(1, images.shape[3] if channels > 1 else 1)[:, None]
    else:
        source, target = images.flatten(2), result.flatten(2)
        starts = starts[:, :, None]
    # index_select takes int32. For an image of 224² on a core it needs 0.11 ms, gather 0.67.
    index = source.int().add_(starts).flatten()
    torch.index_select(tables.flatten(), 0, index, out=target.view(-1))
    return result


def _white(images: Tensor) -> int:
    return 255 if images.dtype == torch.uint8 else 1


def _contrast(values: Tensor, factor: Tensor, images: Tensor) -> Tensor:
    # Sums of whole numbers in float64 do not depend on their order.
    luma, scale = _luma(images), 1 if images.dtype == torch.uint8 else 1 << 28
    total = (luma.double() * scale).round_().sum((1, 2, 3))
    mean = (total / (scale * luma[0].numel())).float()[:, None, None]
    return values * factor + mean * (1 - factor)


def _posterize(values: Tensor, bits: Tensor, _: Tensor) -> Tensor:
    levels = 2**bits
    return (values * levels).floor_().clamp_(max=levels - 1) / levels


def _solarize(values: Tensor, threshold: Tensor, images: Tensor) -> Tensor:
    white = _white(images)
    return torch.where(values >= threshold * white, white - values, values)


def _autocontrast(values: Tensor, _: Tensor, images: Tensor) -> Tensor:
    if layout_of(images) == torch.contiguous_format:
        planes = images.flatten(2)
        least, largest = planes.amin(2), planes.amax(2)
    else:  # one axis at a time: both at once take 0.17 ms for an image of 224²
        rows, shape = images.permute(0, 2, 3, 1).flatten(2), (len(images), -1, images.shape[1])
        least = rows.amin(1).view(shape).amin(1)
        largest = rows.amax(1).view(shape).amax(1)
    least, largest = least.float()[:, :, None], largest.float()[:, :, None]
    spread = largest - least
    scaled = (values - least) / (spread / _white(images))
    return torch.where(spread > 0, scaled, values)


def _equalize(values: Tensor, _: Tensor, images: Tensor) -> Tensor:
    """A value's new one is the number of values below it, divided by a step and rounded.

    255 steps are all values but the largest.
    """
    levels = images
    if images.dtype != torch.uint8:  # each of the 256 levels has an equal share of 0 to 1
        levels = (images.float().clamp(0, 1) * (256 - 1e-3)).to(torch.uint8)
    planes = levels.flatten(0, 1).unbind()
    # 0.13 ms for an image of 224² on a core, and with scatter_add_ 0.78.
    counts = torch.stack([torch.bincount(plane.flatten(), minlength=256) for plane in planes])
    up_to = counts.view(*images.shape[:2], 256).cumsum(2)
    below_largest = torch.where(up_to < images[0, 0].numel(), up_to, 0).amax(2, keepdim=True)
    step = below_largest // 255
    below = torch.nn.functional.pad(up_to[:, :, :-1], (1, 0))
    spread = ((below + step // 2) // step.clamp(min=1)).clamp(0, 255)
    tables = torch.where(step > 0, spread, torch.arange(256, device=images.device))
    if images.dtype == torch.uint8:
        return tables.float()
    return tables.float().gather(2, levels.flatten(2).long()).div_(255)


#: Functions of values, amounts ``(n, 1, 1)`` and images, where each value is mapped by itself.
#: `_change` posterizes and inverts uint8.
_VALUES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "Brightness": lambda values, factor, _: values * factor,
    "Contrast": _contrast,
    "Posterize": _posterize,
    "Solarize": _solarize,
    "AutoContrast": _autocontrast,
    "Equalize": _equalize,
    "Invert": lambda values, *_: 1 - values,
    "SolarizeAdd": lambda values, added, _: torch.where(values < 128, values + added, values),
}


def _luma(images: Tensor) -> Tensor:
    """Return the luma ``(n, 1, H, W)`` of images, float32; of uint8, whole numbers."""
    if images.shape[1] == 1:
        return images.float()
    red, green, blue = (images[:, channel : channel + 1].float() for channel in range(3))
    luma = (red * LUMA[0]).add_(green, alpha=LUMA[1]).add_(blue, alpha=LUMA[2])
    return luma.floor_() if images.dtype == torch.uint8 else luma


def _saturate(planes: Tensor, factor: Tensor, white: int) -> Tensor:
    mixed = (planes * factor).add_(_luma(planes) * (1 - factor)).clamp_(0, white)
    return _rounded_down(mixed, white)


def _grey(planes: Tensor, _: Tensor, white: int) -> Tensor:
    return _rounded_down(_luma(planes), white).to(planes.dtype).expand_as(planes)


def _turn_hue(planes: Tensor, turn: Tensor, white: int) -> Tensor:
    """Turn the hue in HSV (Smith, "Color Gamut Transform Pairs", 1978)."""
    # Only operations that the CPU vectorizes: 1.0 ms for an image of 224², and with torch's
    # ``remainder``, ``fmod``, and ``max`` of a dimension 3.9 ms.
    pixels = planes.float() if white == 1 else planes.float().mul_(1 / 255)
    channels = [pixels[:, channel : channel + 1] for channel in range(3)]
    value = torch.maximum(torch.maximum(channels[0], channels[1]), channels[2])
    spread = value - torch.minimum(torch.minimum(channels[0], channels[1]), channels[2])
    divisor = torch.where(spread == 0, 1, spread)
    red, green, blue = ((value - channel).div_(divisor) for channel in channels)
    sector = torch.where(
        channels[0] == value,
        blue - green,
        torch.where(channels[1] == value, (2 + red).sub_(blue), (4 + green).sub_(red)),
    )
    hue = sector.mul_(1 / 6).add_(1).frac_().add_(turn)
    angle = (hue - hue.floor()).mul_(6)
    turned = []
    for offset in (5, 3, 1):
        # A channel is full for a third of the circle around its colour, and falls off on both
        # sides: 2 less the distance from 2, from 0 to 1. The circle has a length of 6.
        distance = (angle + offset).sub_(5).abs_().sub_(3).abs_()
        level = distance.clamp_(1, 2).sub_(2).mul_(spread).add_(value)
        turned.append(_rounded_down(level if white == 1 else level.mul_(256 - 1e-3), white))
    return torch.cat(turned, 1)


def _rounded_down(values: Tensor, white: int) -> Tensor:
    # An image of 224² takes 16 µs to int16 and then to uint8, and 80 µs at once.
    return values.short() if white == 255 else values


#: Functions of images, amounts and white, where all channels of a pixel are changed together.
_PIXELS: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "Color": _saturate,
    "Hue": _turn_hue,
    "Grayscale": _grey,
}


def _sharpen(images: Tensor, factor: Tensor) -> Tensor:
    """Return images blurred or sharpened by their factor. The outermost pixels stay as they are."""
    if min(images.shape[2:]) < 3:
        return images
    values = images.float()
    middle = values[..., 1:-1, 1:-1]
    # Means of 3×3 pixels of which the one in the middle counts 5 times.
    sums = values[..., :-2, :] + values[..., 1:-1, :]
    sums = sums.add_(values[..., 2:, :])
    sums = (sums[..., :-2] + sums[..., 1:-1]).add_(sums[..., 2:])
    smooth = sums.add_(middle, alpha=4).mul_(1 / 13)
    if images.dtype == torch.uint8:
        smooth.round_()
    mixed = smooth.sub_(middle).mul_(1 - factor).add_(middle)
    sharpened = images.clone(memory_format=layout_of(images))
    sharpened[..., 1:-1, 1:-1] = mixed.clamp_(0, _white(images))
    return sharpened


def blur(images: Tensor, kernel_size: tuple[int, int], sigma: np.ndarray) -> Tensor:
    """Return images, each blurred by a Gaussian of its ``sigma`` in pixels.

    ``kernel_size`` is (width, height), and ``sigma`` float64 ``(n,)``.
    """
    radii = kernel_size[0] // 2, kernel_size[1] // 2
    weights = upload(weights_of(sigma, radii).astype(np.float32), images.device)
    along_x, along_y = weights[:, : radii[0] + 1], weights[:, radii[0] + 1 :]
    blurred = _weighted_sum(images, along_x, 3, radii[0])
    blurred = _weighted_sum(blurred, along_y, 2, radii[1])
    return (blurred if images.is_floating_point() else blurred.round_()).to(images.dtype)


def _weighted_sum(images: Tensor, weights: Tensor, axis: int, radius: int) -> Tensor:
    """Return the sums of pixels and their neighbours along an axis, continued as in a mirror.

    Neighbours at the same distance are added first, since they have the same weight.
    """
    size, weights = images.shape[axis], weights.T[..., None, None, None]
    padded = images
    if radius:
        before = images.narrow(axis, 1, radius).flip(axis)
        after = images.narrow(axis, size - 1 - radius, radius).flip(axis)
        padded = torch.cat([before, images, after], axis)
    padded = padded.float()
    result = padded.narrow(axis, radius, size) * weights[0]
    pair = torch.empty_like(result)  # once, as fresh memory costs more than the sum
    for distance in range(1, radius + 1):
        before = padded.narrow(axis, radius - distance, size)
        after = padded.narrow(axis, radius + distance, size)
        result.addcmul_(torch.add(before, after, out=pair), weights[distance])
    return result
