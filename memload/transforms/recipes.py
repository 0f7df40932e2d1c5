"""The recipes that people train with, each a `Compose` whose `repr` shows its steps.

All take uint8 images ``(N, C, H, W)``, whose sizes may differ from ``size``, and end in Normalize
and ToDtype; some then mix samples. All have the arguments ``mean``, ``std``, ``statistics`` and
``dtype`` of these two, which `Ending` describes. Masks, points and boxes of the data set in a
Loader follow; recipes that mix samples refuse them without ``mix=False``.

=============== ====================================================================================
imagenet_v1     torchvision's first ImageNet weights, and PyTorch's example; `train` is the same
imagenet_v2     torchvision's later weights: TrivialAugmentWide, erasing, MixUp or CutMix
deit, convnext  RandAugment as timm has it, erasing, MixUp or CutMix, bicubic
deit3           3-Augment: grey, solarised or blurred
simclr, byol    two views
dino            two large views and eight small ones; its defaults are those of DINOv2
mae             bicubic crops and flips
cifar, airbench 32×32 pictures
=============== ====================================================================================
"""

from __future__ import annotations  # so that help() shows Size and Ending by these names

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch

from memload.transforms.adjusting import (
    ColorJitter,
    GaussianBlur,
    RandomGrayscale,
    RandomSolarize,
)
from memload.transforms.arguments import integer, pair
from memload.transforms.automatic import TimmRandAugment, TrivialAugmentWide
from memload.transforms.choosing import RandomApply, RandomChoice
from memload.transforms.compose import Compose
from memload.transforms.cropping import (
    CenterCrop,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
)
from memload.transforms.erasing import Cutout, RandomErasing
from memload.transforms.mixing import CutMix, MixUp
from memload.transforms.pixels import HasIndex, Normalize, ToDtype

__all__ = [
    "Ending",
    "airbench",
    "byol",
    "cifar",
    "convnext",
    "deit",
    "deit3",
    "dino",
    "evaluate",
    "imagenet_v1",
    "imagenet_v2",
    "mae",
    "simclr",
    "train",
]

#: A number of pixels, or (height, width).
FixedSize = int | Sequence[int]
#: One of these, or a function of the epoch that returns one.
Size = FixedSize | Callable[[int], FixedSize]


class Ending(TypedDict, total=False):
    """How a recipe ends.

    ``statistics`` is a `MemmapDataset`, or the path of one, whose mean and std take the place of
    ``mean`` and ``std``: give the training data to both recipes. ``mean=None`` takes those of the
    data set in the Loader. See `Normalize`. ``dtype`` is that of the images returned.
    """

    mean: Sequence[float] | str | None
    std: Sequence[float] | None
    statistics: HasIndex | str | Path | None
    dtype: torch.dtype


def train(
    size: Size = 224,
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
    ending: Ending = {"mean": mean, "std": std, "statistics": statistics, "dtype": dtype}
    return Compose([RandomResizedCrop(size), RandomHorizontalFlip(), *_end(train, ending)])


def evaluate(
    size: int = 224,
    *,
    resize: int | None = None,
    interpolation: str = "bilinear",
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
    size = integer("evaluate", "size", size, 1)
    shorter = round(size * 8 / 7) if resize is None else resize
    ending: Ending = {"mean": mean, "std": std, "statistics": statistics, "dtype": dtype}
    return Compose([
        Resize(shorter, interpolation), CenterCrop(size), *_end(evaluate, ending)
    ])  # fmt: skip


def imagenet_v1(size: Size = 224, **ending: Unpack[Ending]) -> Compose:
    """Return the recipe of torchvision's first ImageNet weights, which is `train`.

    For ``ending`` see `Ending`.
    """
    return Compose([RandomResizedCrop(size), RandomHorizontalFlip(), *_end(imagenet_v1, ending)])


def imagenet_v2(size: Size = 176, *, mix: bool = True, **ending: Unpack[Ending]) -> Compose:
    """Return the recipe of torchvision's later ImageNet weights.

    That is TrivialAugmentWide, RandomErasing with p=0.1, and MixUp (alpha 0.2) or CutMix (alpha 1).
    Evaluate with ``evaluate(224, resize=232)``. torchvision draws MixUp or CutMix for each batch,
    and this for each sample. ``mix=False`` leaves both out. To the recipe also belong an average of
    the weights, label smoothing, 600 epochs, and a `RepeatedSampler` of 4.
    (https://github.com/pytorch/vision/issues/3995)
    """
    return Compose([
        RandomResizedCrop(size),
        RandomHorizontalFlip(),
        TrivialAugmentWide(interpolation="bilinear"),
        *_end(imagenet_v2, ending),
        RandomErasing(0.1),
        *([_mix_or_cut(mixup_alpha=0.2)] if mix else []),
    ])  # fmt: skip


def deit(size: Size = 224, *, mix: bool = True, **ending: Unpack[Ending]) -> Compose:
    """Return the recipe of DeiT, which Swin and MAE's fine-tuning share.

    That is a bicubic crop, timm's RandAugment ("rand-m9-mstd0.5-inc1"), RandomErasing of noise with
    p=0.25, and MixUp (alpha 0.8) or CutMix (alpha 1). ``mix=False`` leaves these two out. What
    RandAugment brings into view has the colour of ``mean``, (124, 116, 104) for ImageNet's; with
    ``mean=None``, which only the Loader knows, it is grey, 128. DeiT also has a `RepeatedSampler`
    of 3, and label smoothing. DeiT warps bicubically, this bilinearly: see `TimmRandAugment`.
    (Touvron et al., https://arxiv.org/abs/2012.12877)
    """
    return _deit(size, mix, _end(deit, ending))


def convnext(size: Size = 224, *, mix: bool = True, **ending: Unpack[Ending]) -> Compose:
    """Return the recipe of ConvNeXt, whose steps are those of `deit`.

    (Liu et al., https://arxiv.org/abs/2201.03545)
    """
    return _deit(size, mix, _end(convnext, ending))


def _deit(size: Size, mix: bool, end: list[Any]) -> Compose:
    # Both are timm's: the colour, and the ranges of area and ratio of what is erased.
    mean = end[0].mean
    fill = 128 if mean is None else [min(255, round(255 * channel)) for channel in mean]
    erase = RandomErasing(0.25, scale=(0.02, 1 / 3), ratio=(0.3, 1 / 0.3), value="random")
    return Compose([
        RandomResizedCrop(size, interpolation="bicubic"),
        RandomHorizontalFlip(),
        TimmRandAugment(fill=fill),
        *end,
        erase,
        *([_mix_or_cut(mixup_alpha=0.8)] if mix else []),
    ])  # fmt: skip


def deit3(size: Size = 224, *, mix: bool = True, **ending: Unpack[Ending]) -> Compose:
    """Return the recipe of DeiT III, "3-Augment".

    Each sample is made grey, solarised or blurred, and its colours are changed by up to 0.3. MixUp
    (alpha 0.8) or CutMix (alpha 1) follow; ``mix=False`` leaves both out. A `RepeatedSampler` of 3
    and binary cross-entropy belong to it. For training on ImageNet-21k, the paper takes in place of
    the crop ``Resize(size, "bicubic"), RandomCrop(size, padding=4, padding_mode="reflect")``.
    (Touvron et al., https://arxiv.org/abs/2204.07118)
    """
    return Compose([
        RandomResizedCrop(size, interpolation="bicubic"),
        RandomHorizontalFlip(),
        RandomChoice([RandomGrayscale(1.0), RandomSolarize(128, 1.0), GaussianBlur(9)]),
        ColorJitter(0.3, 0.3, 0.3),
        *_end(deit3, ending),
        *([_mix_or_cut(mixup_alpha=0.8)] if mix else []),
    ])  # fmt: skip


def simclr(size: FixedSize = 224, *, strength: float = 1.0, **ending: Unpack[Ending]) -> Compose:
    """Return the two views of SimCLR, which MoCo v2 and v3, Barlow Twins and VICReg resemble.

    ``strength`` is how strong the changes of colours are. The kernel of the blur has a tenth of
    ``size``. (Chen et al., https://arxiv.org/abs/2002.05709)
    """
    side = min(pair("simclr", "size", size))
    colours = ColorJitter(0.8 * strength, 0.8 * strength, 0.8 * strength, 0.2 * strength)
    return Compose(
        [
            RandomResizedCrop(size),
            RandomHorizontalFlip(),
            RandomApply([colours], 0.8),
            RandomGrayscale(0.2),
            RandomApply([GaussianBlur(max(3, side // 10 // 2 * 2 + 1))], 0.5),
            *_end(simclr, ending),
        ],
        views=2,
    )


def byol(size: Size = 224, **ending: Unpack[Ending]) -> Compose:
    """Return the two views of BYOL: the first is blurred, the second often solarised.

    (Grill et al., https://arxiv.org/abs/2006.07733)
    """
    crop = RandomResizedCrop(size, interpolation="bicubic")
    end = _end(byol, ending)
    blur, solarize = GaussianBlur(23), RandomSolarize(128, 0.2)
    first = [crop, *_flip_and_colours(), blur, *end]
    second = [crop, *_flip_and_colours(), RandomApply([blur], 0.1), solarize, *end]
    return Compose(views=[first, second])


def dino(
    size: Size = 224,
    *,
    small_size: Size = 96,
    num_small: int = 8,
    scale: Sequence[float] = (0.32, 1.0),
    small_scale: Sequence[float] = (0.05, 0.32),
    **ending: Unpack[Ending],
) -> Compose:
    """Return the views of DINO and DINOv2: two large ones, then ``num_small`` small ones.

    ``scale`` and ``small_scale`` are the shares of the area that are cropped. The defaults are
    those of DINOv2; DINO has 0.4 to 1 and 0.05 to 0.4. A small view of 5 % of a stored picture of
    256×256 has 57×57 pixels, so store larger ones. The first view, the second and the small ones
    are blurred with the shares 1, 0.1 and 0.5 of DINO. The published code of DINOv2 has 1 minus
    these. (Oquab et al., https://arxiv.org/abs/2304.07193; for the blur,
    https://github.com/facebookresearch/dinov2/pull/411)
    """
    large = RandomResizedCrop(size, scale, interpolation="bicubic")
    small = RandomResizedCrop(small_size, small_scale, interpolation="bicubic")
    end = _end(dino, ending)
    blur, solarize = GaussianBlur(9), RandomSolarize(128, 0.2)
    first = [large, *_flip_and_colours(), blur, *end]
    second = [large, *_flip_and_colours(), RandomApply([blur], 0.1), solarize, *end]
    each_small = [small, *_flip_and_colours(), RandomApply([blur], 0.5), *end]
    number = integer("dino", "num_small", num_small, 0)
    return Compose(views=[first, second, *[each_small] * number])


def mae(size: Size = 224, **ending: Unpack[Ending]) -> Compose:
    """Return the recipe for pre-training a masked autoencoder: bicubic crops of 20 % or more.

    (He et al., https://arxiv.org/abs/2111.06377)
    """
    return Compose([
        RandomResizedCrop(size, (0.2, 1.0), interpolation="bicubic"),
        RandomHorizontalFlip(),
        *_end(mae, ending),
    ])  # fmt: skip


def cifar(size: FixedSize = 32, *, cutout: int = 0, **ending: Unpack[Ending]) -> Compose:
    """Return padded crops and flips, and a `Cutout` of so many pixels.

    ``mean`` is by default that of the data set in the Loader.
    """
    return Compose([
        RandomCrop(size, padding=4),
        RandomHorizontalFlip(),
        *_end(cifar, ending, mean=None),
        *([Cutout(cutout)] if cutout else []),
    ])  # fmt: skip


def airbench(
    size: FixedSize = 32, *, padding: int = 2, cutout: int = 0, **ending: Unpack[Ending]
) -> Compose:
    """Return the recipe of airbench94: crops padded by reflection, and alternating flips.

    airbench96 has ``padding=4`` and ``cutout=12``. ``mean`` is by default that of the data set in
    the Loader. (Jordan, https://arxiv.org/abs/2404.00498)
    """
    return Compose([
        RandomCrop(size, padding=padding, padding_mode="reflect"),
        RandomHorizontalFlip(alternate=True),
        *_end(airbench, ending, mean=None),
        *([Cutout(cutout)] if cutout else []),
    ])  # fmt: skip


def _flip_and_colours() -> list[Any]:
    """Return what all views of BYOL and DINO have behind their crops."""
    return [
        RandomHorizontalFlip(),
        RandomApply([ColorJitter(0.4, 0.4, 0.2, 0.1)], 0.8),
        RandomGrayscale(0.2),
    ]


def _mix_or_cut(*, mixup_alpha: float) -> RandomChoice:
    return RandomChoice([MixUp(alpha=mixup_alpha), CutMix(alpha=1.0)])


def _end(
    recipe: Callable[..., Compose], ending: Ending, *, mean: str | None = "imagenet"
) -> list[Any]:
    """Return Normalize and ToDtype. ``mean`` is that of the recipe where none was given.

    Raises TypeError, as Python does, for an argument that the recipe does not have.
    """
    name = recipe.__name__
    for argument in ending:
        if argument not in Ending.__annotations__:
            *others, _ = inspect.signature(recipe).parameters  # the last is ``ending``
            names = ", ".join([*others, *Ending.__annotations__])
            found = f"{name}() got an unexpected keyword argument {argument!r}"
            raise TypeError(f"{found}. Its arguments are {names}.")
    statistics = ending.get("statistics")
    dtype = ending.get("dtype", torch.float32)
    given, std = ending.get("mean", mean), ending.get("std")
    if statistics is None:
        return [Normalize(given, std), ToDtype(dtype)]
    if given != mean or std is not None:
        raise ValueError(f"{name}: statistics takes the place of mean and std. Leave them out.")
    return [Normalize(statistics), ToDtype(dtype)]


def __dir__() -> list[str]:
    """Return the public names, so that completion shows nothing else."""
    return __all__
