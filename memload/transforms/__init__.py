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

    Compose, or a Transform alone       groups its steps, once
        │ prepare(samples, seed, epoch)
        ▼
    Prepared ─▶ Fused                   crops, resizes, flips and maps of pixels, as one pass
        │         │ Plan                where pixels come from, for 8,192 samples at a time
        │         ├─▶ plan_kernel       CUDA: a Triton kernel for images, and one for masks
        │         └─▶ plan_reference    elsewhere: plain torch operations
        ├─────▶ FusedOperations         changes of colours, TrivialAugmentWide and the like
        │         │ OperationsPlan      an operation and a magnitude for each of 8,192 samples
        │         ├─▶ operations_kernel CUDA: Triton kernels, in which a sample is a matrix and a
        │         │                     list of operations
        │         └─▶ operations_reference   elsewhere: the samples of each operation together
        ├─────▶ PlannedPainting, PlannedMixing   erasing, MixUp and the like
        │         │ PaintingPlan, MixingPlan       boxes and shares of 8,192 samples
        │         ├─▶ painting_kernel   CUDA: Triton kernels
        │         └─▶ erasing, mixing   elsewhere: plain torch operations
        ├─────▶ options.apply_options   steps drawn for each sample, of which some are none of these
        │         └─▶ Prepared          those steps, for copies of the samples
        └─────▶ Transform.apply(draws)  what is not planned
        ▼
    images, columns                     Followers move masks, points and boxes as each step moves

Each module imports only modules above it:

    arguments   checks of arguments and their messages
    draws       random numbers as a function of (seed, epoch, sample, position, view)
    geometry    Axis and Plan: where each output pixel comes from; the weights of a resize
    resampling  bicubic weights, and tables of weights for the kernel
    plan_kernel a plan as Triton kernels, for images and for masks
    sub_batches takes, puts and changes some images of a batch, or all in parts
    plan_reference   a plan by torch operations; defines the pixels
    following   Followers: the masks, points and boxes that move with the images
    fused       PlannedSteps, neighbours in a list that are done together
    lookup      changes of single values: solarize, posterize, invert, autocontrast, equalize
    color       brightness, contrast, saturation, hue, grey
    blur_kernel, filtering   blur and sharpness
    operations_plan     OPERATIONS, and OperationStep: an operation and a magnitude for each sample
    warping     matrices, and images warped by them
    operations_reference   such steps by torch operations; defines the pixels
    operations_kernel      the same as Triton kernels
    moving      how images move by matrices, for masks, points and boxes
    batch       Batch: images and columns between two steps
    options     lists of steps that are drawn for each sample, and steps that mix samples
    prepared    a list of steps, applied to parts of a chunk of samples
    transform   Transform, the base of all
    pixels      Normalize and ToDtype
    compose     Compose, the list
    operations_transform   OperationsTransform, the base of transforms that are operations
    adjusting   ColorJitter, RandomSolarize, GaussianBlur and others, of one operation each
    affine      RandomAffine, RandomRotation and RandomPerspective
    policies    what is drawn for TrivialAugment, RandAugment and AutoAugment
    automatic   TrivialAugmentWide, RandAugment, AutoAugment and TimmRandAugment
    choosing    RandomApply and RandomChoice
    boxes       random boxes of given area and ratio, and the edges of boxes
    cropping    crops, resizes and flips
    painting_kernel   boxes painted over, and images mixed in pairs, as Triton kernels
    erasing     RandomErasing and Cutout
    mixing      MixUp and CutMix
    recipes     train, evaluate, and the recipes that people train with, by name
    foreign     what is said of torchvision's transforms: a warning, and what to use instead
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
