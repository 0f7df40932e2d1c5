"""Normalize and ToDtype: the transforms that map each pixel by itself."""

import copy
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch

from memload.transforms.arguments import flag, not_inplace, numbers, wrong
from memload.transforms.fused import MapsPixels
from memload.transforms.transform import Transform

#: Means and standard deviations by name, for pixels from 0 to 1. ImageNet's are torchvision's.
STATISTICS = {"imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))}
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Normalize(MapsPixels, Transform):
    """Compute ``(pixel - mean) / std`` for each channel, for pixels from 0 to 1.

    uint8 images ``(N, C, H, W)`` count as 0 to 1 too, so no ToDtype is needed before, and become
    float32. Images of a floating dtype keep it. ``mean`` and ``std`` are one number, or one for
    each channel. ``Normalize("imagenet")`` takes those of ImageNet. ``Normalize()`` takes those of
    the data set, which a Loader fills in (see `bind`). torchvision's ``Normalize`` does the same
    for floats.

    >>> images = Normalize([0.5, 0.5, 0.5], [0.25, 0.25, 0.25])(images)
    """

    def __init__(
        self,
        mean: Sequence[float] | float | str | None = None,
        std: Sequence[float] | float | None = None,
        inplace: bool = False,
    ) -> None:
        not_inplace(self, inplace)
        if isinstance(mean, str):
            if mean not in STATISTICS or std is not None:
                found = repr(mean) if std is None else f"{mean!r} with a std"
                raise wrong(self, "mean", f"numbers or one of {', '.join(STATISTICS)}", found)
            mean, std = STATISTICS[mean]
        if (mean is None) != (std is None):
            raise ValueError(f"Normalize: mean is {mean}, but std is {std}. Give both or neither.")
        self.mean: tuple[float, ...] | None = None
        self.std: tuple[float, ...] | None = None
        if mean is not None and std is not None:
            means, stds = self._several("mean", mean), self._several("std", std)
            channels = max(len(means), len(stds))
            if {len(means), len(stds)} - {1, channels} or min(stds) <= 0:
                expected = "of equal length, and std above 0"
                raise wrong(self, "mean and std", expected, f"{means} and {stds}")
            self.mean = means * channels if len(means) == 1 else means
            self.std = stds * channels if len(stds) == 1 else stds

    def _several(self, argument: str, value: Any) -> tuple[float, ...]:
        """Return a number or an iterable of numbers as a tuple."""
        if isinstance(value, np.ndarray | torch.Tensor):
            value = value.tolist()
        if isinstance(value, Real):
            value = (value,)
        elif isinstance(value, Iterable) and not isinstance(value, str):
            value = tuple(value)
        return tuple(map(float, numbers(self, argument, value)))

    def bind(
        self,
        *,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        num_classes: int | None = None,
    ) -> Transform:
        """Return this transform if it has its mean and std, else one with these."""
        if self.mean is not None or mean is None:
            return self
        bound, filled = copy.copy(self), Normalize(mean, std)
        bound.mean, bound.std = filled.mean, filled.std
        return bound

    def affine(
        self, is_uint8: bool, channels: int
    ) -> tuple[Sequence[float], Sequence[float], torch.dtype | None]:
        """See `MapsPixels.affine`."""
        if self.mean is None or self.std is None:
            raise ValueError(
                "Normalize has no mean and std. Give them, or use it in a Loader, which takes "
                "those of the data set."
            )
        if len(self.mean) not in (1, channels):
            raise ValueError(
                f"Normalize has mean and std for {len(self.mean)} channels, but the images have "
                f"{channels}. Normalize() takes those of the data set."
            )
        # FFCV's statistics are those of pixels from 0 to 255. All images would turn out black.
        if is_uint8 and max(self.mean) > 1:
            advice = "Divide mean and std by 255."
            raise wrong(self, "mean", "that of pixels from 0 to 1", self.mean, advice)
        largest = 255 if is_uint8 else 1
        repeats = channels // len(self.mean)
        factors = [1 / (largest * std) for std in self.std] * repeats
        offsets = [-mean / std for mean, std in zip(self.mean, self.std, strict=True)] * repeats
        return factors, offsets, None


class ToDtype(MapsPixels, Transform):
    """Convert images to float32, float16 or bfloat16, like torchvision's ``v2.ToDtype``.

    ``scale`` maps uint8 images ``(N, C, H, W)`` to 0 to 1; floats keep their range. Transforms that
    follow in the same pass still compute in float32, and round once at the end.

    >>> ToDtype(torch.bfloat16, scale=True)(images).dtype
    torch.bfloat16
    """

    def __init__(self, dtype: torch.dtype, scale: bool = False) -> None:
        if dtype not in _DTYPES:
            raise wrong(
                self, "dtype", "torch.float32, torch.float16 or torch.bfloat16", repr(dtype)
            )
        self.dtype = dtype
        self.scale = flag(self, "scale", scale)

    def affine(
        self, is_uint8: bool, channels: int
    ) -> tuple[Sequence[float], Sequence[float], torch.dtype | None]:
        """See `MapsPixels.affine`."""
        factor = 1 / 255 if is_uint8 and self.scale else 1.0
        return [factor] * channels, [0.0] * channels, self.dtype
