"""Transforms of whole batches, on their device, with random numbers for every sample on its own.

>>> train = transforms.Compose([transforms.RandomCrop(32, padding=4),
...                             transforms.RandomHorizontalFlip(), transforms.Normalize()])
>>> images, columns = train(images, columns, samples=samples, seed=0, epoch=3)

Names, arguments, defaults and arithmetic are those of torchvision. See `Transform` for how to call
a transform, and `Compose` for what is fused. ``train(224)`` and ``evaluate(224)`` are the usual
recipes for ImageNet.

What moves pixels moves masks, points and boxes together with the images. In a Loader these
are all those of the data set; elsewhere, a `Compose` names the columns:

>>> both = transforms.Compose([transforms.RandomResizedCrop(224)], masks=["mask"], boxes=["boxes"])
>>> images, columns = both(images, {"mask": masks, "boxes": boxes}, samples=samples)

The way of a batch:

    Compose, or a Transform alone       groups its steps, once
        │ prepare(samples, seed, epoch)
        ▼
    Prepared ─▶ Fused.plan(draws)       where pixels come from, for 2,048 samples at a time:
        │            │ Plan             each step adds itself by add_to(plan, draws)
        │            ├─▶ Followers      masks, points and boxes, by the same plan
        │            ├─▶ kernel         CUDA: a Triton kernel for images, and one for masks
        │            └─▶ reference      elsewhere: plain torch operations
        └─────▶ Transform.apply(draws)  what cannot be fused
        ▼
    images, columns

Each module imports only modules above it:

    arguments   checks of arguments and their messages
    draws       random numbers as a function of (seed, epoch, sample, position, view)
    geometry    Axis and Plan: where each output pixel comes from; the weights of a resize
    resampling  bicubic weights, and tables of weights for the kernel
    kernel      a plan as Triton kernels, for images and for masks
    reference   a plan by torch operations; defines the pixels
    fused       steps that make one plan together
    following   Followers: the masks, points and boxes that move with the images
    prepared    a list of steps, applied to parts of a chunk of samples
    transform   Transform, the base of all
    compose     Compose, the list
    choosing    RandomApply and RandomChoice
    some        takes and changes some images of a batch
    boxes       random boxes of given area and ratio
    cropping    crops, resizes and flips
    pixels      Normalize and ToDtype
    lookup      RandomSolarize, RandomPosterize, RandomInvert, RandomAutocontrast, RandomEqualize
    color       ColorJitter and RandomGrayscale
    warping     RandomAffine, RandomRotation and RandomPerspective: a matrix for each sample
    filtering   RandomAdjustSharpness and GaussianBlur
    policies    what is drawn for TrivialAugment, RandAugment and AutoAugment
    automatic   TrivialAugmentWide, RandAugment, AutoAugment and TimmRandAugment
    erasing     RandomErasing and Cutout
    mixing      MixUp and CutMix
    recipes     train, evaluate, and the recipes that people train with, by name
    foreign     the warning of torchvision's random transforms
"""

from memload.transforms import recipes
from memload.transforms.automatic import (
    AutoAugment,
    RandAugment,
    TimmRandAugment,
    TrivialAugmentWide,
)
from memload.transforms.choosing import RandomApply, RandomChoice
from memload.transforms.color import ColorJitter, RandomGrayscale
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
from memload.transforms.filtering import GaussianBlur, RandomAdjustSharpness
from memload.transforms.lookup import (
    RandomAutocontrast,
    RandomEqualize,
    RandomInvert,
    RandomPosterize,
    RandomSolarize,
)
from memload.transforms.mixing import CutMix, MixUp
from memload.transforms.pixels import Normalize, ToDtype
from memload.transforms.recipes import evaluate, train
from memload.transforms.transform import Transform
from memload.transforms.warping import RandomAffine, RandomPerspective, RandomRotation

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
