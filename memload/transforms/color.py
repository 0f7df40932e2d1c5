"""ColorJitter and RandomGrayscale."""

from collections.abc import Sequence
from numbers import Real

import numpy as np
import torch
from torch import Tensor

from memload.transforms.draws import Draws
from memload.transforms.transform import Columns, Transform, to_device

_RANGES = {
    "brightness": (1.0, 0.0, float("inf")),
    "contrast": (1.0, 0.0, float("inf")),
    "saturation": (1.0, 0.0, float("inf")),
    "hue": (0.0, -0.5, 0.5),
}
Range = float | Sequence[float] | None


class ColorJitter(Transform):
    """Brightness, contrast, saturation and hue, changed by factors of their own and in an order of its own.

    A number ``v`` stands for the range 1 - v to 1 + v, but for ``hue`` for -v to v; a pair is the range itself. What
    is None stays. Images have 1 or 3 channels, and pixels from 0 to 1 unless they are uint8, which is rounded down
    after each change, as in torchvision.
    """

    def __init__(
        self,
        brightness: Range = None,
        contrast: Range = None,
        saturation: Range = None,
        hue: Range = None,
    ) -> None:
        self.brightness = self._around("brightness", brightness)
        self.contrast = self._around("contrast", contrast)
        self.saturation = self._around("saturation", saturation)
        self.hue = self._around("hue", hue)

    def _around(self, name: str, value: Range) -> tuple[float, float] | None:
        centre, least, most = _RANGES[name]
        if isinstance(value, Real) and not isinstance(value, bool) and value >= 0:
            value = (max(least, centre - value) if centre else -value, centre + value)
        return None if value is None else self._range(name, value, least, most)

    def apply(self, images: Tensor, columns: Columns, draws: Draws) -> tuple[Tensor, Columns]:
        """Change each sample by its own factors: number 0 to 3 of its draws, in the order that 4 to 7 sort to."""
        _check(self, images)
        drawn = draws.uniform(8)
        active = [
            (number, name) for number, name in enumerate(_RANGES) if getattr(self, name) is not None
        ]
        # of one change alone the order says nothing, and no sample has to be picked out
        order = (
            drawn[4:].argsort(0)
            if len(active) > 1
            else np.full((1, len(images)), [n for n, _ in active] or -1)
        )
        images = images.clone()
        for turn in order:
            for number, name in active:
                places = np.flatnonzero(turn == number)
                if places.size:
                    limits = getattr(self, name)
                    factors = (limits[0] + (limits[1] - limits[0]) * drawn[number, places]).astype(
                        np.float32
                    )
                    factor = to_device(factors, images.device)[:, None, None, None]
                    if places.size == len(images):
                        images = _CHANGES[name](images, factor)
                    else:
                        which = to_device(places, images.device)
                        images[which] = _CHANGES[name](images[which], factor)
        return images, columns


class RandomGrayscale(Transform):
    """Grey, with probability ``p``; of as many channels as before, 1 or 3."""

    def __init__(self, p: float = 0.1) -> None:
        self.p = self._probability(p)

    def apply(self, images: Tensor, columns: Columns, draws: Draws) -> tuple[Tensor, Columns]:
        """Turn grey those samples whose draw says so."""
        _check(self, images)
        which = to_device(draws.uniform(1)[0] < self.p, images.device)[:, None, None, None]
        return torch.where(which, _grey(images).to(images.dtype), images), columns


def _check(owner: Transform, images: Tensor) -> None:
    if images.shape[1] not in (1, 3):
        raise owner._wrong("images", "1 or 3 channels", images.shape[1])


def _grey(images: Tensor) -> Tensor:
    """Return ``(N, 1, H, W)`` float32 or wider, for uint8 from 0 to 255. torchvision's weights, of ITU-R BT.601."""
    if images.dtype.itemsize <= 2:
        images = images.float()
    if images.shape[1] == 1:
        return images
    red, green, blue = images[:, 0:1], images[:, 1:2], images[:, 2:3]
    return red * 0.2989 + green * 0.587 + blue * 0.114


def _blend(images: Tensor, others: Tensor, factor: Tensor) -> Tensor:
    # products first and then their sum, as one operation for both rounds otherwise on some devices
    mixed = (images * factor).add_(others * (1 - factor))
    return mixed.clamp_(0, 255 if images.dtype == torch.uint8 else 1).to(images.dtype)


def _brightness(images: Tensor, factor: Tensor) -> Tensor:
    return (images * factor).clamp_(0, 255 if images.dtype == torch.uint8 else 1).to(images.dtype)


def _contrast(images: Tensor, factor: Tensor) -> Tensor:
    grey = _grey(images)
    # whole numbers have the same sum in float64 whichever way they are added up; those of 2^-28 of 33 megapixels
    if images.dtype == torch.uint8:
        return _blend(images, grey.floor().double().mean((1, 2, 3), keepdim=True).float(), factor)
    grey = grey.double() * (1 << 28)
    grey = grey + (grey.round() - grey).detach()  # which has the gradient of what is not rounded
    return _blend(images, (grey.mean((1, 2, 3), keepdim=True) * 2.0**-28).float(), factor)


def _saturation(images: Tensor, factor: Tensor) -> Tensor:
    if images.shape[1] == 1:
        return images
    grey = _grey(images)
    return _blend(images, grey.floor() if images.dtype == torch.uint8 else grey, factor)


def _hue(images: Tensor, factor: Tensor) -> Tensor:
    """Turn the hue by ``factor`` of the circle, through HSV (Smith, "Color Gamut Transform Pairs", 1978)."""
    if images.shape[1] == 1:
        return images
    whole = images.dtype == torch.uint8
    pixels = images * (1 / 255) if whole else images.float()
    value, most = pixels.max(1, keepdim=True)
    spread = value - pixels.amin(1, keepdim=True)
    below = (value - pixels) / torch.where(spread == 0, 1, spread)
    red, green, blue = below[:, 0:1], below[:, 1:2], below[:, 2:3]
    sixth = torch.where(
        most == 0, blue - green, torch.where(most == 1, 2 + red - blue, 4 + green - red)
    )
    hue = (sixth * (1 / 6) + 1).fmod(1).add(factor).remainder(1)
    # a channel is full for a third of the circle around its colour, and rises and falls beside it
    away = torch.arange(5, 0, -2, device=images.device)[:, None, None]  # red, green, blue
    turned = (away + hue * 6).remainder(6)
    turned = value - spread * torch.minimum(turned, 4 - turned).clamp(0, 1)
    return (turned * (256 - 1e-3)).to(torch.uint8) if whole else turned.to(images.dtype)


_CHANGES = {
    "brightness": _brightness,
    "contrast": _contrast,
    "saturation": _saturation,
    "hue": _hue,
}
