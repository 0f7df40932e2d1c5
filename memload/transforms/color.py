"""Brightness, contrast, saturation, hue and grey."""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from memload.transforms.arguments import one_or_three_channels, wrong
from memload.transforms.lookup import look_up
from memload.transforms.sub_batches import in_layout, layout_of, parts
from memload.upload import upload

#: The luma of red, green and blue, of ITU-R BT.601 as in torchvision.
LUMA = 0.2989, 0.587, 0.114
#: What a change of saturation or hue needs for a pixel of three channels. Others need less.
_BYTES_OF_PIXEL = 46
#: What grey needs for a pixel, and twice as much for float64.
_BYTES_OF_GREY = 14


def adjust_brightness(images: Tensor, factor: np.ndarray) -> Tensor:
    """Return images ``(n, C, H, W)`` times a factor, float64 ``(n,)``, at least 0."""
    _check_factor("adjust_brightness", images, factor)
    result, (shares, _) = torch.empty_like(images), _shares(factor, images)
    for part in _parts(images, _BYTES_OF_PIXEL):
        result[part] = _clamp(images[part] * shares[part], images.dtype)
    return result


def adjust_contrast(images: Tensor, factor: np.ndarray) -> Tensor:
    """Return images ``(n, C, H, W)`` whose distance from their mean is multiplied.

    ``factor`` is float64 ``(n,)``, at least 0.
    """
    _check_factor("adjust_contrast", images, factor)
    if images.dtype == torch.uint8:
        return look_up(images, contrast_table(images, factor))
    result = torch.empty_like(images)
    for part in _parts(images, _BYTES_OF_PIXEL):
        mean = _mean(images[part], images.dtype)
        result[part] = _blend(images[part], mean, *_shares(factor[part], images), images.dtype)
    return result


def adjust_saturation(images: Tensor, factor: np.ndarray) -> Tensor:
    """Return images ``(n, C, H, W)`` whose distance from grey is multiplied.

    ``factor`` is float64 ``(n,)``, at least 0. Grey images stay as they are.
    """
    _check_factor("adjust_saturation", images, factor)
    if images.shape[1] == 1:
        return images.clone()
    result = torch.empty_like(images)
    for part in _parts(images, _BYTES_OF_PIXEL):
        shares = _shares(factor[part], images)
        if images.dtype == torch.uint8:
            planes = _planes(images[part])
            changed = _blend_levels(planes, _grey_levels(planes), *shares)
            result[part] = in_layout(changed, layout_of(result))
        else:
            result[part] = _blend(images[part], _grey(images[part]), *shares, images.dtype)
    return result


# ColorJitter rounds its products before it adds them, since version 0.1. The next two functions do
# so, and the two above do what torchvision does.


def jitter_contrast(images: Tensor, factor: np.ndarray) -> Tensor:
    """Return what `adjust_contrast` does, but for the rounding of sums."""
    result, factors = torch.empty_like(images), _factors(factor, images)
    for part in _parts(images, _BYTES_OF_PIXEL):
        mean, share = _mean(images[part], images.dtype), factors[part]
        result[part] = _blend(images[part], mean, share, 1 - share, images.dtype)
    return result


def jitter_saturation(images: Tensor, factor: np.ndarray) -> Tensor:
    """Return what `adjust_saturation` does, but for the rounding of sums."""
    return _each_part(images, factor, _jitter_saturation)


def adjust_hue(images: Tensor, factor: np.ndarray) -> Tensor:
    """Return RGB images ``(n, 3, H, W)`` whose hue is turned, in HSV.

    ``factor`` is float64 ``(n,)``, a share of the circle. (Smith, "Color Gamut Transform Pairs",
    1978)
    """
    return _each_part(images, factor, _turn_hue)


def grayscale(images: Tensor) -> Tensor:
    """Return grey images ``(n, C, H, W)`` of as many channels; C is 1 or 3."""
    result = torch.empty_like(images)
    for part in _parts(images, _BYTES_OF_GREY):
        grey = _rounded_down(_grey(images[part]), images.dtype)
        for channel in _channels(result[part]):
            channel.copy_(grey)  # 15 µs each, all three at once 96 µs
    return result


def _jitter_saturation(planes: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    grey = _grey(planes)
    grey = grey.floor_() if dtype == torch.uint8 and planes.shape[1] == 3 else grey
    return _blend(planes, grey, factor, 1 - factor, dtype)


def _parts(images: Tensor, bytes_of_pixel: int) -> Iterator[slice]:
    """Yield parts of a batch, whose pixels need so much memory; see `sub_batches.parts`."""
    return parts(images, bytes_of_pixel * images.shape[2:].numel())


def _each_part(
    images: Tensor,
    factor: np.ndarray,
    change: Callable[[Tensor, Tensor, torch.dtype], Tensor],
) -> Tensor:
    """Return images changed in parts, to save memory and time.

    ``change`` gets a part whose channels lie apart from each other if it is uint8, its factors
    float32 ``(n, 1, 1, 1)``, and the images' dtype, which is that of what it returns.
    """
    result, factors = torch.empty_like(images), _factors(factor, images)
    for part in _parts(images, _BYTES_OF_PIXEL):
        changed = change(_planes(images[part]), factors[part], images.dtype)
        result[part] = in_layout(changed, layout_of(result))  # 55 µs, without in_layout 96 µs
    return result


def _factors(factor: np.ndarray, images: Tensor) -> Tensor:
    """Return factors in float32 ``(n, 1, 1, 1)``."""
    return upload(factor.astype(np.float32), images.device)[:, None, None, None]


def _planes(images: Tensor) -> Tensor:
    """Return images, and if they are uint8, then with channels apart from each other.

    A sum of three channels of 224² pixels then takes 0.10 ms on a core, and otherwise 0.13.
    """
    return in_layout(images, torch.contiguous_format) if images.dtype == torch.uint8 else images


def contrast_table(images: Tensor, factor: np.ndarray) -> Tensor:
    """Return the tables uint8 ``(n, 1, 256)`` of `adjust_contrast` for uint8 images."""
    means = images.new_empty((len(images), 1, 1, 1), dtype=torch.float32)
    for part in _parts(images, _BYTES_OF_PIXEL):
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


# For levels, torchvision's sums are those of torch's ``add`` with a factor. On processors with AVX2
# it adds a product without rounding it before. The two functions below do so everywhere: the
# product is exact in float64. With rounded products, 1 value in 1,000 is another after a change of
# saturation.


def _blend_levels(images: Tensor, others: Tensor, factor: Tensor, rest: Tensor) -> Tensor:
    """Return ``factor · images + rest · others`` in uint8."""
    mixed = (images * factor).double().add_(others.double().mul_(rest))
    return _clamp(mixed.float(), torch.uint8)


def _grey_levels(images: Tensor) -> Tensor:
    """Return the luma ``(n, 1, H, W)`` of uint8 images, whole numbers in float32."""
    if images.shape[1] == 1:
        return images.float()
    red, green, blue = _channels(_planes(images))
    weights = np.array(LUMA, np.float32).tolist()
    sums: Tensor = (
        red.float().mul_(weights[0]).double().add_(green.double(), alpha=weights[1]).float()
    )
    return sums.double().add_(blue.double(), alpha=weights[2]).float().floor_()


def _grey(images: Tensor) -> Tensor:
    """Return the luma ``(N, 1, H, W)`` in float32 or float64, from 0 to 255 for uint8."""
    if images.dtype.itemsize == 2:
        images = images.float()
    if images.shape[1] == 1:
        return images.float() if images.dtype == torch.uint8 else images
    red, green, blue = _channels(_planes(images))
    # As tensors, since uint8 times a number would have torch's default dtype.
    work = torch.promote_types(images.dtype, torch.float32)
    weights = torch.tensor(LUMA, dtype=work, device="cpu")
    return (red * weights[0]).add_(green * weights[1]).add_(blue * weights[2])


def _blend(
    images: Tensor, others: Tensor, factor: Tensor, rest: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return ``factor · images + rest · others`` in a dtype."""
    # Two products, then their sum: a fused operation rounds differently on some devices.
    mixed = (images * factor).add_(others * rest)
    return _clamp(mixed, dtype)


def _clamp(values: Tensor, dtype: torch.dtype) -> Tensor:
    return _rounded_down(values.clamp_(0, 255 if dtype == torch.uint8 else 1), dtype)


def _rounded_down(values: Tensor, dtype: torch.dtype) -> Tensor:
    # An image of 224² takes 16 µs to int16 and then to uint8, and 80 µs at once.
    return values.short().to(dtype) if dtype == torch.uint8 else values.to(dtype)


def _channels(images: Tensor) -> list[Tensor]:
    """Return each channel ``(n, 1, H, W)``."""
    return [images[:, channel : channel + 1] for channel in range(images.shape[1])]


def _mean(images: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mean of the luma, float32 ``(n, 1, 1, 1)``, of images that were of a dtype."""
    grey = _grey(images)
    # The mean must not depend on the order of the sum. Sums of whole numbers are exact in float64:
    # grey levels, or for floats multiples of 2^-28, of up to 33 megapixels.
    if dtype == torch.uint8:
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


def _turn_hue(planes: Tensor, turn: Tensor, dtype: torch.dtype) -> Tensor:
    # Only operations that the CPU vectorizes: 1.0 ms for an image of 224², and with torch's
    # ``remainder``, ``fmod``, and ``max`` of a dimension 3.9 ms.
    is_uint8 = dtype == torch.uint8
    pixels = planes.float().mul_(1 / 255) if is_uint8 else planes.float()
    channels = _channels(pixels)
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
        turned.append(_rounded_down(level.mul_(256 - 1e-3) if is_uint8 else level, dtype))
    return torch.cat(turned, 1)
