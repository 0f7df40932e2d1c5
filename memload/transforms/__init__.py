"""Transforms of whole batches, on their device, with random numbers for every sample on its own.

>>> train = transforms.Compose([transforms.RandomCrop(32, padding=4),
...                             transforms.RandomHorizontalFlip(), transforms.Normalize()])
>>> images, columns = train(images, columns, samples=samples, seed=0, epoch=3)

Names, arguments, defaults and arithmetic are those of torchvision. See `Transform` for how to call
a transform, and `Compose` for what is fused. ``train(224)`` and ``evaluate(224)`` are the usual
recipes for ImageNet.

Transforms that move pixels move masks, points and boxes with the images. In a Loader these are all
those of the data set; elsewhere, a `Compose` names the columns:

>>> both = transforms.Compose([transforms.RandomResizedCrop(224)], masks=["mask"], boxes=["boxes"])
>>> images, columns = both(images, {"mask": masks, "boxes": boxes}, samples=samples)

How a batch flows:

    Compose, or a Transform alone     groups its steps, once: neighbours that join are one Pass
        │ prepare(samples, seed, epoch)
        ▼
    Prepared                          checks what it is given, and runs the steps of each view
        │ step.draw(draws, images) ─▶ Drawn: arrays for 8,192 samples from the host, uploaded once
        │ step.apply(batch, drawn) ─▶ Batch
        ▼
    images, columns

    step                    on CUDA, uint8              elsewhere
    CropPass                kernels/crops               crops_in_torch
    OperationsPass          kernels/operations, blur    operations.change_each
    RandomErasing, MixUp …  kernels/painting            erasing, mixing
    RandomChoice …          take copies of samples, run their steps, put them back
    masks that follow       kernels/masks               following

The modules, from the lowest on; each imports only modules that stand before it:

    arguments       checks of arguments and their messages
    draws           Draws: random numbers as a function of (seed, epoch, sample, …); Drawn
    geometry        Axis and Plan: where each output pixel comes from
    operation_step  OPERATIONS, and OperationStep: an operation and a magnitude for each sample
    kernels/        Triton kernels
    following       Followers: masks, points and boxes follow a matrix for each sample
    batch           Batch: images and columns between two steps; parts of it
    crops_in_torch  a plan by torch's operations
    passes          Pass and group: neighbours that join; CropPass
    prepared        a list of steps, applied to parts of a chunk of samples
    transform       Transform, the base of all
    warping         matrices, and images warped by them
    operations      what each operation does, by torch operations
    operations_pass OperationsPass, and the base of transforms that are operations
    boxes           random boxes of given area and ratio, and the edges of boxes
    cropping        crops, resizes and flips
    pixels          Normalize and ToDtype
    compose         Compose, the list
    adjusting       ColorJitter, RandomSolarize, GaussianBlur and others, of one operation each
    affine          RandomAffine, RandomRotation and RandomPerspective
    policies        what is drawn for TrivialAugment, RandAugment and AutoAugment
    automatic       TrivialAugmentWide, RandAugment, AutoAugment and TimmRandAugment
    erasing         RandomErasing and Cutout
    mixing          MixUp and CutMix
    choosing        RandomApply and RandomChoice
    recipes         train, evaluate, and the recipes that people train with, by name
    foreign         what is said of torchvision's transforms: a warning, and what to use instead
"""

from typing import TYPE_CHECKING, NoReturn

from memload.transforms import recipes
from memload.transforms.adjusting import (
    ColorJitter,
    GaussianBlur,
    RandomAdjustSharpness,
    RandomAutocontrast,
    RandomEqualize,
    RandomGrayscale,
    RandomInvert,
    RandomPosterize,
    RandomSolarize,
)
from memload.transforms.affine import RandomAffine, RandomPerspective, RandomRotation
from memload.transforms.automatic import (
    AutoAugment,
    RandAugment,
    TimmRandAugment,
    TrivialAugmentWide,
)
from memload.transforms.choosing import RandomApply, RandomChoice
from memload.transforms.compose import Compose
from memload.transforms.cropping import (
    CenterCrop,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
)
from memload.transforms.erasing import Cutout, RandomErasing
from memload.transforms.foreign import advice_for
from memload.transforms.mixing import CutMix, MixUp
from memload.transforms.pixels import Normalize, ToDtype
from memload.transforms.recipes import evaluate, train
from memload.transforms.transform import Transform

__all__ = [
    "AutoAugment",
    "CenterCrop",
    "ColorJitter",
    "Compose",
    "CutMix",
    "Cutout",
    "GaussianBlur",
    "MixUp",
    "Normalize",
    "RandAugment",
    "RandomAdjustSharpness",
    "RandomAffine",
    "RandomApply",
    "RandomAutocontrast",
    "RandomChoice",
    "RandomCrop",
    "RandomEqualize",
    "RandomErasing",
    "RandomGrayscale",
    "RandomHorizontalFlip",
    "RandomInvert",
    "RandomPerspective",
    "RandomPosterize",
    "RandomResizedCrop",
    "RandomRotation",
    "RandomSolarize",
    "RandomVerticalFlip",
    "Resize",
    "TimmRandAugment",
    "ToDtype",
    "Transform",
    "TrivialAugmentWide",
    "evaluate",
    "recipes",
    "train",
]

if not TYPE_CHECKING:  # for type checkers, all names would be there

    def __getattr__(name: str) -> NoReturn:
        """Raise AttributeError, with advice for torchvision's names."""
        message = f"module {__name__!r} has no attribute {name!r}"
        advice = advice_for(name)
        raise AttributeError(f"{message}. {advice}" if advice else message)
