"""ColorJitter and RandomGrayscale."""

from collections.abc import Sequence
from numbers import Real

import numpy as np
import torch
from torch import Tensor

from memload.transforms.arguments import interval, share, wrong
from memload.transforms.draws import Draws
from memload.transforms.fused import TensorsByName
from memload.transforms.transform import Transform
from memload.upload import upload

FactorRange = float | Sequence[float] | None


class ColorJitter(Transform):
    """Adjust brightness, contrast, saturation and hue by random factors, in random order.

    A number ``v`` is the range 1 - v to 1 + v, or -v to v for ``hue``. A pair is the range itself.
    None leaves the property as it is. Each sample has its own factors and its own order. Formulas
    and arguments are those of torchvision's ``ColorJitter``.

    Images ``(N, C, H, W)`` have 1 or 3 channels, and keep their dtype. Floats are from 0 to 1.
    uint8 is rounded down after each adjustment, as in torchvision. Masks stay as they are.

    >>> images = ColorJitter(0.4, 0.4, 0.4, 0.1)(images, samples=samples)
    """

    def __init__(
        self,
        brightness: FactorRange = None,
        contrast: FactorRange = None,
        saturation: FactorRange = None,
        hue: FactorRange = None,
    ) -> None:
        self.brightness = self._range("brightness", brightness)
        self.contrast = self._range("contrast", contrast)
        self.saturation = self._range("saturation", saturation)
        if isinstance(hue, Real):
            hue = (-hue, hue)
        self.hue = None if hue is None else interval(self, "hue", hue, -0.5, 0.5)

    def _range(self, name: str, value: FactorRange) -> tuple[float, float] | None:
        if isinstance(value, Real) and value >= 0:
            value = (max(0, 1 - value), 1 + value)
        return None if value is None else interval(self, name, value, 0)

    def apply(
        self, images: Tensor, columns: TensorsByName, draws: Draws
    ) -> tuple[Tensor, TensorsByName]:
        """Adjust each sample: draws 0 to 3 are its factors, and 4 to 7 sort to its order."""
        _check_channels(self, images)
        drawn = draws.uniform(8)
        ranges = self.brightness, self.contrast, self.saturation, self.hue
        # Grey images have neither saturation nor hue.
        possible = ranges if images.shape[1] == 3 else ranges[:2]
        active = [number for number, factors in enumerate(possible) if factors is not None]
        images = images.clone()
        for adjustments in drawn[4:][active].argsort(0):
            for index, number in enumerate(active):
                samples = np.flatnonzero(adjustments == index)
                low, high = ranges[number] or (0, 0)
                factors = (low + (high - low) * drawn[number, samples]).astype(np.float32)
                factor = upload(factors, images.device)[:, None, None, None]
                if samples.size == len(images):
                    images = _ADJUSTMENTS[number](images, factor)
                elif samples.size:
                    chosen = upload(samples, images.device)
                    images[chosen] = _ADJUSTMENTS[number](images[chosen], factor)
        return images, columns


class RandomGrayscale(Transform):
    """Turn each image grey with share ``p``, like torchvision's.

    Images ``(N, C, H, W)`` have 1 or 3 channels; shape and dtype stay as they are, and so do masks.

    >>> images = RandomGrayscale(p=0.1)(images, samples=samples)
    """

    def __init__(self, p: float = 0.1) -> None:
        self.p = share(self, "p", p)

    def apply(
        self, images: Tensor, columns: TensorsByName, draws: Draws
    ) -> tuple[Tensor, TensorsByName]:
        """Turn the drawn samples grey."""
        _check_channels(self, images)
        chosen = upload(draws.uniform(1)[0] < self.p, images.device)[:, None, None, None]
        return torch.where(chosen, _grey(images).to(images.dtype), images), columns


def _check_channels(owner: Transform, images: Tensor) -> None:
    if images.shape[1] not in (1, 3):
        raise wrong(owner, "images", "of 1 or 3 channels", f"of {images.shape[1]}")


def _grey(images: Tensor) -> Tensor:
    """Return the luma ``(N, 1, H, W)`` in float32 or float64, from 0 to 255 for uint8.

    The weights are those of ITU-R BT.601, as in torchvision.
    """
    if images.dtype.itemsize <= 2:
        images = images.float()
    if images.shape[1] == 1:
        return images
    red, green, blue = images[:, 0:1], images[:, 1:2], images[:, 2:3]
    return red * 0.2989 + green * 0.587 + blue * 0.114


def _blend(images: Tensor, others: Tensor, factor: Tensor) -> Tensor:
    """Return ``factor · images + (1 - factor) · others``."""
    # Two products, then their sum: a fused operation rounds differently on some devices.
    mixed = (images * factor).add_(others * (1 - factor))
    return _clamp(mixed, images.dtype)


def _clamp(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.clamp_(0, 255 if dtype == torch.uint8 else 1).to(dtype)


def _brightness(images: Tensor, factor: Tensor) -> Tensor:
    return _clamp(images * factor, images.dtype)


def _contrast(images: Tensor, factor: Tensor) -> Tensor:
    grey = _grey(images)
    # The mean must not depend on the order of the sum. Sums of whole numbers are exact in float64:
    # grey levels, or for floats multiples of 2^-28, of up to 33 megapixels.
    if images.dtype == torch.uint8:
        mean = grey.floor().double().mean((1, 2, 3), keepdim=True)
        return _blend(images, mean.float(), factor)
    scaled = grey.double() * (1 << 28)
    rounded = scaled + (scaled.round() - scaled).detach()  # keeps the gradient
    mean = rounded.mean((1, 2, 3), keepdim=True) * 2.0**-28
    return _blend(images, mean.float(), factor)


def _saturation(images: Tensor, factor: Tensor) -> Tensor:
    grey = _grey(images)
    return _blend(images, grey.floor() if images.dtype == torch.uint8 else grey, factor)


def _hue(images: Tensor, factor: Tensor) -> Tensor:
    """Turn the hue by ``factor`` of the circle, in HSV.

    (Smith, "Color Gamut Transform Pairs", 1978)
    """
    is_uint8 = images.dtype == torch.uint8
    pixels = images * (1 / 255) if is_uint8 else images.float()
    value, largest = pixels.max(1, keepdim=True)
    spread = value - pixels.amin(1, keepdim=True)
    below = (value - pixels) / torch.where(spread == 0, 1, spread)
    red, green, blue = below[:, 0:1], below[:, 1:2], below[:, 2:3]
    sector = torch.where(
        largest == 0, blue - green, torch.where(largest == 1, 2 + red - blue, 4 + green - red)
    )
    hue = (sector * (1 / 6) + 1).fmod(1).add(factor).remainder(1)
    # A channel is full for a third of the circle around its colour, and falls off on both sides.
    channel_offset = torch.arange(5, 0, -2, device=images.device)[:, None, None]
    position = (channel_offset + hue * 6).remainder(6)
    turned = value - spread * torch.minimum(position, 4 - position).clamp(0, 1)
    return (turned * (256 - 1e-3)).to(torch.uint8) if is_uint8 else turned.to(images.dtype)


_ADJUSTMENTS = _brightness, _contrast, _saturation, _hue
