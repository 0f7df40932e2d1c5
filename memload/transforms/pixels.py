"""Normalize and ToDtype: the transforms that map each pixel by itself."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from memload.storage.index import Index
from memload.transforms.arguments import not_inplace, numbers, wrong
from memload.transforms.draws import Draws
from memload.transforms.geometry import Plan
from memload.transforms.passes import CropPass
from memload.transforms.transform import Transform

#: ImageNet's means and standard deviations for pixels from 0 to 1, as in torchvision.
_IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class HasIndex(Protocol):
    """A data set that was opened: a `MemmapDataset`, which this module must not import."""

    index: Index


class Normalize(Transform):
    """Compute ``(pixel - mean) / std`` for each channel, for pixels from 0 to 1.

    uint8 images ``(N, C, H, W)`` count as 0 to 1 too, so no ToDtype is needed before, and become
    float32. Images of a floating dtype keep it. torchvision's ``Normalize`` does the same for
    floats. ``mean`` says where both come from:

    - Numbers: ``mean`` and ``std`` are one number, or one for each channel.
    - ``Normalize("imagenet")`` takes those of ImageNet.
    - ``Normalize()`` takes those of the data set in a Loader, which fills them in (see `bind`).
    - ``Normalize(dataset)`` and ``Normalize("train.bin")`` take those of another data set, a
      `MemmapDataset` or the path of one. They are read here, once. Use it for validation, whose
      images must be normalised like those of training. A subset has those of the whole data set.

    Masks stay as they are.

    Raises ValueError for other arguments, and FormatError if a data set cannot be opened.

    >>> images = Normalize([0.5, 0.5, 0.5], [0.25, 0.25, 0.25])(images)
    >>> validation = memload.Loader("val.bin", 256, transform=Normalize("train.bin"))
    """

    pass_type, kind = CropPass, "pixels"

    def __init__(
        self,
        mean: Sequence[float] | float | str | Path | HasIndex | None = None,
        std: Sequence[float] | float | None = None,
        inplace: bool = False,
    ) -> None:
        not_inplace(self, inplace)
        self.mean: tuple[float, ...] | None = None
        self.std: tuple[float, ...] | None = None
        given: Any = mean
        if isinstance(given, str | Path) or isinstance(getattr(given, "index", None), Index):
            if std is not None:
                raise wrong(self, "std", f"left out, since mean is {given!r}", repr(std))
            given, std = _IMAGENET if given == "imagenet" else self._read(given)
        if (given is None) != (std is None):
            raise ValueError(f"Normalize: mean is {given}, but std is {std}. Give both or neither.")
        if given is not None and std is not None:
            means = numbers(self, "mean", np.ravel(given).tolist())
            stds = numbers(self, "std", np.ravel(std).tolist())
            channels = max(len(means), len(stds))
            if {len(means), len(stds)} - {1, channels} or min(stds) <= 0:
                expected = "of equal length, and std above 0"
                raise wrong(self, "mean and std", expected, f"{means} and {stds}")
            self.mean, self.std = (
                tuple(map(float, values)) * (channels // len(values)) for values in (means, stds)
            )

    def _read(self, dataset: Any) -> tuple[list[float], list[float]]:
        """Return mean and std of a data set, and keep its path for `repr`."""
        if isinstance(dataset, str) and not dataset.endswith((".bin", ".idx")):
            expected = "numbers, 'imagenet', or a data set such as 'train.bin'"
            raise wrong(self, "mean", expected, repr(dataset))
        index = Index.open(dataset) if isinstance(dataset, str | Path) else dataset.index
        self.dataset = str(index.path)
        try:
            return index.statistics["mean"], index.statistics["std"]
        except KeyError:
            reason = index.statistics.get("left_out", "it was not written by a build")
            raise ValueError(
                f"Normalize: {index.path} has no mean and std ({reason}). Give them as numbers."
            ) from None

    def bind(
        self,
        *,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        **other: Any,
    ) -> Transform:
        """Return this transform if it has its mean and std, else one with these."""
        if self.mean is not None or mean is None:
            return self
        bound, filled = copy.copy(self), Normalize(mean, std)
        bound.mean, bound.std = filled.mean, filled.std
        return bound

    def add_to(self, plan: Plan, draws: Draws) -> None:
        """Normalise the channels."""
        if self.mean is None or self.std is None:
            raise ValueError(
                "Normalize has no mean and std. Give them, or a data set as in "
                "Normalize('train.bin'), or use it in a Loader, which takes those of its own."
            )
        channels = len(plan.fill)
        if len(self.mean) not in (1, channels):
            raise ValueError(
                f"Normalize has mean and std for {len(self.mean)} channels, but the images have "
                f"{channels}. Normalize() takes those of the data set."
            )
        is_uint8 = plan.dtype == torch.uint8
        # FFCV's statistics are those of pixels from 0 to 255. All images would turn out black.
        if is_uint8 and max(self.mean) > 1:
            advice = "Divide mean and std by 255."
            raise wrong(self, "mean", "that of pixels from 0 to 1", self.mean, advice)
        mean, std = np.array(self.mean), np.array(self.std)
        factor = 1 / ((255 if is_uint8 else 1) * std)
        plan.factor, plan.offset = plan.factor * factor, plan.offset * factor - mean / std
        plan.maps_pixels = True
        if is_uint8:
            plan.dtype = torch.float32


class ToDtype(Transform):
    """Convert images to float32, float16 or bfloat16, like torchvision's ``v2.ToDtype``.

    ``scale`` maps uint8 images ``(N, C, H, W)`` to 0 to 1; floats keep their range. Transforms that
    follow in the same pass still compute in float32, and round once at the end. Masks keep their
    dtype.

    >>> ToDtype(torch.bfloat16, scale=True)(images).dtype
    torch.bfloat16
    """

    pass_type, kind = CropPass, "pixels"

    def __init__(self, dtype: torch.dtype, scale: bool = False) -> None:
        if dtype not in (torch.float32, torch.float16, torch.bfloat16):
            expected = "torch.float32, torch.float16 or torch.bfloat16"
            raise wrong(self, "dtype", expected, repr(dtype))
        self.dtype = dtype
        self.scale = scale

    def add_to(self, plan: Plan, draws: Draws) -> None:
        """Convert all channels."""
        if self.scale and plan.dtype == torch.uint8:
            plan.factor, plan.maps_pixels = plan.factor / 255, True
        plan.dtype = self.dtype
