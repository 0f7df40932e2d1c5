"""Brightness, contrast, saturation, hue and grey."""

import numpy as np
import torch
from torch import Tensor

from memload.transforms.arguments import one_or_three_channels, wrong
from memload.transforms.lookup import look_up
from memload.transforms.some import parts
from memload.upload import upload

#: The luma of red, green and blue, of ITU-R BT.601 as in torchvision.
LUMA = 0.2989, 0.587, 0.114
#: What a change of saturation needs for a pixel of three channels. Others need less.
_BYTES_OF_PIXEL = 46


def adjust_brightness(images: Tensor, factor: np.ndarray) -> Tensor:
    """Return images ``(n, C, H, W)`` times a factor, float64 ``(n,)``, at least 0."""
    _check_factor("adjust_brightness", images, factor)
    if images.dtype == torch.uint8:
        return look_up(images, brightness_table(factor, images.device))
    return _clamp(images * _shares(factor, images)[0], images.dtype)


def adjust_contrast(images: Tensor, factor: np.ndarray) -> Tensor:
    """Return images ``(n, C, H, W)`` whose distance from their mean is multiplied.

    ``factor`` is float64 ``(n,)``, at least 0.
    """
    _check_factor("adjust_contrast", images, factor)
    if images.dtype == torch.uint8:
        return look_up(images, contrast_table(images, factor))
    result = torch.empty_like(images)
    for part in parts(images, _BYTES_OF_PIXEL * images.shape[2:].numel()):
        result[part] = _blend(images[part], _mean(images[part]), *_shares(factor[part], images))
    return result


def adjust_saturation(images: Tensor, factor: np.ndarray) -> Tensor:
    """Return images ``(n, C, H, W)`` whose distance from grey is multiplied.

    ``factor`` is float64 ``(n,)``, at least 0. Grey images stay as they are.
    """
    _check_factor("adjust_saturation", images, factor)
    if images.shape[1] == 1:
        return images.clone()
    result = torch.empty_like(images)
    for part in parts(images, _BYTES_OF_PIXEL * images.shape[2:].numel()):
        shares = _shares(factor[part], images)
        if images.dtype == torch.uint8:
            # Channels apart from each other take 0.5 ms for an image of 224², others 0.7.
            planes = images[part].contiguous()
            result[part] = _blend_levels(planes, _grey_levels(planes), *shares)
        else:
            result[part] = _blend(images[part], _grey(images[part]), *shares)
    return result


# ColorJitter rounds its products before it adds them, since version 0.1. The next two functions do
# so, and the two above do what torchvision does.


def jitter_contrast(images: Tensor, factor: np.ndarray) -> Tensor:
    """Return what `adjust_contrast` does, but for the rounding of sums."""
    share = _jitter_factor(factor, images)
    return _blend(images, _mean(images), share, 1 - share)


def jitter_saturation(images: Tensor, factor: np.ndarray) -> Tensor:
    """Return what `adjust_saturation` does, but for the rounding of sums."""
    grey, share = _grey(images), _jitter_factor(factor, images)
    levels = grey.floor() if images.dtype == torch.uint8 else grey
    return _blend(images, levels, share, 1 - share)


def grayscale(images: Tensor) -> Tensor:
    """Return grey images ``(n, C, H, W)`` of as many channels; C is 1 or 3."""
    return torch.empty_like(images).copy_(_grey(images))


def brightness_table(factor: np.ndarray, device: torch.device) -> Tensor:
    """Return the tables uint8 ``(n, 1, 256)`` of `adjust_brightness`."""
    values = torch.arange(256, dtype=torch.float32, device=device).expand(1, 1, 1, 256)
    return _clamp(values * _shares(factor, values)[0], torch.uint8)[:, 0]


def contrast_table(images: Tensor, factor: np.ndarray) -> Tensor:
    """Return the tables uint8 ``(n, 1, 256)`` of `adjust_contrast` for uint8 images."""
    means = images.new_empty((len(images), 1, 1, 1), dtype=torch.float32)
    for part in parts(images, _BYTES_OF_PIXEL * images.shape[2:].numel()):
        means[part] = _mean_of_whole(_grey_levels(images[part]))
    values = torch.arange(256, dtype=torch.uint8, device=images.device).expand(1, 1, 1, 256)
    return _blend_levels(values, means, *_shares(factor, images))[:, 0]


def _check_factor(owner: str, images: Tensor, factor: np.ndarray) -> None:
    one_or_three_channels(owner, images)
    is_wrong = ~(np.isfinite(factor) & (factor >= 0))
    if is_wrong.any():
        raise wrong(owner, "factor", "numbers of at least 0", factor[is_wrong][0])


def _shares(factor: np.ndarray, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``factor`` and ``1 - factor``, ``(n, 1, 1, 1)``, in the precision of the images."""
    dtype = np.float64 if images.dtype == torch.float64 else np.float32
    both = upload(np.array([factor, 1 - factor], dtype), images.device)[:, :, None, None, None]
    return both[0], both[1]


def _jitter_factor(factor: np.ndarray, images: Tensor) -> Tensor:
    """Return factors float32 ``(n, 1, 1, 1)`` on the device of the images."""
    return upload(factor.astype(np.float32), images.device)[:, None, None, None]


# For levels, torchvision's sums are those of torch's ``add`` with a factor, which adds a product
# without rounding it before. The two functions below do so, too: the product is exact in float64.
# With rounded products, 1 value in 1,000 is another after a change of saturation.


def _blend_levels(images: Tensor, others: Tensor, factor: Tensor, rest: Tensor) -> Tensor:
    """Return ``factor · images + rest · others`` in uint8."""
    mixed = (images * factor).double().add_(others.double().mul_(rest))
    return _clamp(mixed.float(), torch.uint8)


def _grey_levels(images: Tensor) -> Tensor:
    """Return the luma ``(n, 1, H, W)`` of uint8 images, whole numbers in float32."""
    if images.shape[1] == 1:
        return images.float()
    red, green, blue = (images[:, channel : channel + 1] for channel in range(3))
    weights = torch.tensor(LUMA).tolist()  # rounded to float32
    sums: Tensor = (red * weights[0]).double().add_(green.double(), alpha=weights[1]).float()
    return sums.double().add_(blue.double(), alpha=weights[2]).float().floor_()


def _grey(images: Tensor) -> Tensor:
    """Return the luma ``(N, 1, H, W)`` in float32 or float64, from 0 to 255 for uint8."""
    if images.dtype.itemsize <= 2:
        images = images.float()
    if images.shape[1] == 1:
        return images
    red, green, blue = images[:, 0:1], images[:, 1:2], images[:, 2:3]
    return red * LUMA[0] + green * LUMA[1] + blue * LUMA[2]


def _blend(images: Tensor, others: Tensor, factor: Tensor, rest: Tensor) -> Tensor:
    """Return ``factor · images + rest · others``."""
    # Two products, then their sum: a fused operation rounds differently on some devices.
    mixed = (images * factor).add_(others * rest)
    return _clamp(mixed, images.dtype)


def _clamp(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.clamp_(0, 255 if dtype == torch.uint8 else 1).to(dtype)


def _mean(images: Tensor) -> Tensor:
    """Return the mean of the luma, float32 ``(n, 1, 1, 1)``."""
    grey = _grey(images)
    # The mean must not depend on the order of the sum. Sums of whole numbers are exact in float64:
    # grey levels, or for floats multiples of 2^-28, of up to 33 megapixels.
    if images.dtype == torch.uint8:
        return _mean_of_whole(grey.floor()).float()
    scaled = grey.double() * (1 << 28)
    rounded = scaled.round()
    if scaled.requires_grad:
        rounded = scaled + (rounded - scaled).detach()  # keeps the gradient
    return (_mean_of_whole(rounded) * 2.0**-28).float()


def _mean_of_whole(values: Tensor) -> Tensor:
    """Return the mean of whole numbers of each sample, float64 ``(n, 1, 1, 1)``."""
    total = values.sum((1, 2, 3), keepdim=True, dtype=torch.float64)
    # By a tensor: on CUDA, torch multiplies by the inverse of a number, and so does ``mean``.
    return total / torch.full_like(total, values.shape[1:].numel())


def adjust_hue(images: Tensor, factor: np.ndarray) -> Tensor:
    """Return RGB images ``(n, 3, H, W)`` whose hue is turned, in HSV.

    ``factor`` is float64 ``(n,)``, a share of the circle. (Smith, "Color Gamut Transform Pairs",
    1978)
    """
    turn, is_uint8 = _jitter_factor(factor, images), images.dtype == torch.uint8
    pixels = images * (1 / 255) if is_uint8 else images.float()
    value, largest = pixels.max(1, keepdim=True)
    spread = value - pixels.amin(1, keepdim=True)
    below = (value - pixels) / torch.where(spread == 0, 1, spread)
    red, green, blue = below[:, 0:1], below[:, 1:2], below[:, 2:3]
    sector = torch.where(
        largest == 0, blue - green, torch.where(largest == 1, 2 + red - blue, 4 + green - red)
    )
    hue = (sector * (1 / 6) + 1).fmod(1).add(turn).remainder(1)
    # A channel is full for a third of the circle around its colour, and falls off on both sides.
    channel_offset = torch.arange(5, 0, -2, device=images.device)[:, None, None]
    position = (channel_offset + hue * 6).remainder(6)
    turned = value - spread * torch.minimum(position, 4 - position).clamp(0, 1)
    return (turned * (256 - 1e-3)).to(torch.uint8) if is_uint8 else turned.to(images.dtype)
