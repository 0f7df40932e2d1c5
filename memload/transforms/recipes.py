"""The usual recipe for training on ImageNet, and for evaluating."""

from collections.abc import Sequence

import torch

from memload.transforms.compose import Compose
from memload.transforms.cropping import CenterCrop, RandomHorizontalFlip, RandomResizedCrop, Resize
from memload.transforms.pixels import Normalize, ToDtype
from memload.transforms.transform import is_integer


def train(
    size: int | Sequence[int] = 224,
    *,
    mean: Sequence[float] | str | None = "imagenet",
    std: Sequence[float] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Compose:
    """Return RandomResizedCrop to ``size``, RandomHorizontalFlip and Normalize; ``mean=None`` is the data set's."""
    return Compose(
        [RandomResizedCrop(size), RandomHorizontalFlip(), Normalize(mean, std), ToDtype(dtype)]
    )


def evaluate(
    size: int = 224,
    *,
    resize: int | None = None,
    mean: Sequence[float] | str | None = "imagenet",
    std: Sequence[float] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Compose:
    """Return Resize to ``resize`` (by default 8/7 of ``size``, 256 for 224), CenterCrop to ``size`` and Normalize."""
    if not is_integer(size):
        raise ValueError(f"evaluate: size: expected an integer, found {size!r}")
    shorter = round(size * 8 / 7) if resize is None else resize
    return Compose([Resize(shorter), CenterCrop(size), Normalize(mean, std), ToDtype(dtype)])
