"""The usual recipes for training and evaluating on ImageNet."""

from collections.abc import Sequence

import torch

from memload.transforms.arguments import wrong
from memload.transforms.compose import Compose
from memload.transforms.cropping import CenterCrop, RandomHorizontalFlip, RandomResizedCrop, Resize
from memload.transforms.pixels import Normalize, ToDtype


def train(
    size: int | Sequence[int] = 224,
    *,
    mean: Sequence[float] | str | None = "imagenet",
    std: Sequence[float] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Compose:
    """Return RandomResizedCrop to ``size``, RandomHorizontalFlip, Normalize and ToDtype.

    It takes uint8 images ``(N, C, H, W)``. ``mean=None`` takes the statistics of the data set in a
    Loader. This is the training recipe of torchvision's references.

    >>> train(224)(images, samples=samples, seed=0, epoch=3).shape[2:]
    torch.Size([224, 224])
    """
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
    """Return Resize to ``resize``, CenterCrop to ``size``, Normalize and ToDtype.

    ``resize`` is the new shorter side, by default 8/7 of ``size``: 256 for 224. For the rest see
    `train`.

    >>> evaluate(224)(images).shape[2:]
    torch.Size([224, 224])
    """
    if not isinstance(size, int):
        raise wrong("evaluate", "size", "an integer", repr(size))
    shorter = round(size * 8 / 7) if resize is None else resize
    return Compose([Resize(shorter), CenterCrop(size), Normalize(mean, std), ToDtype(dtype)])
