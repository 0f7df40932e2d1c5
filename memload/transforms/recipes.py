"""The usual recipes for training and evaluating on ImageNet."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from memload.transforms.arguments import wrong
from memload.transforms.compose import Compose
from memload.transforms.cropping import CenterCrop, RandomHorizontalFlip, RandomResizedCrop, Resize
from memload.transforms.pixels import HasIndex, Normalize, ToDtype


def train(
    size: int | Sequence[int] | Callable[[int], int | Sequence[int]] = 224,
    *,
    mean: Sequence[float] | str | None = "imagenet",
    std: Sequence[float] | None = None,
    statistics: HasIndex | str | Path | None = None,
    dtype: torch.dtype = torch.float32,
) -> Compose:
    """Return RandomResizedCrop to ``size``, RandomHorizontalFlip, Normalize and ToDtype.

    It takes uint8 images ``(N, C, H, W)``. ``statistics`` is a `MemmapDataset`, or the path of one,
    whose mean and std take the place of ``mean`` and ``std``: give the training data to both
    recipes. ``mean=None`` takes those of the data set in the Loader. See `Normalize`. This is the
    training recipe of torchvision's references. Masks, points and boxes of the data set in the
    Loader follow; see `Compose`.

    >>> train(224)(images, samples=samples, seed=0, epoch=3).shape[2:]
    torch.Size([224, 224])
    """
    normalize = _normalize("train", mean, std, statistics)
    return Compose([RandomResizedCrop(size), RandomHorizontalFlip(), normalize, ToDtype(dtype)])


def evaluate(
    size: int = 224,
    *,
    resize: int | None = None,
    mean: Sequence[float] | str | None = "imagenet",
    std: Sequence[float] | None = None,
    statistics: HasIndex | str | Path | None = None,
    dtype: torch.dtype = torch.float32,
) -> Compose:
    """Return Resize to ``resize``, CenterCrop to ``size``, Normalize and ToDtype.

    ``resize`` is the new shorter side, by default 8/7 of ``size``: 256 for 224. For the rest see
    `train`.

    >>> evaluate(224)(images).shape[2:]
    torch.Size([224, 224])
    >>> validation = memload.Loader("val.bin", 256, transform=evaluate(statistics="train.bin"))
    """
    if not isinstance(size, int):
        raise wrong("evaluate", "size", "an integer", repr(size))
    shorter = round(size * 8 / 7) if resize is None else resize
    normalize = _normalize("evaluate", mean, std, statistics)
    return Compose([Resize(shorter), CenterCrop(size), normalize, ToDtype(dtype)])


def _normalize(recipe: str, mean: Any, std: Any, statistics: Any) -> Normalize:
    if statistics is None:
        return Normalize(mean, std)
    if mean != "imagenet" or std is not None:
        raise ValueError(f"{recipe}: statistics takes the place of mean and std. Leave them out.")
    return Normalize(statistics)
