"""Transforms of whole batches, on their device, with a random draw of its own for every sample.

>>> train = transforms.Compose([transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip(),
...                             transforms.Normalize()])
>>> images, columns = train(images, columns, samples=samples, seed=0, epoch=3)

Names, arguments, defaults and arithmetic are torchvision's; see `Transform` for how they are called, and `Compose`
for what is fused. ``train(224)`` and ``evaluate(224)`` are the usual recipe for ImageNet.
"""

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
from memload.transforms.mixing import CutMix, MixUp
from memload.transforms.pixels import Normalize, ToDtype
from memload.transforms.recipes import evaluate, train
from memload.transforms.transform import Transform

__all__ = [
    "CenterCrop",
    "ColorJitter",
    "Compose",
    "CutMix",
    "Cutout",
    "MixUp",
    "Normalize",
    "RandomCrop",
    "RandomErasing",
    "RandomGrayscale",
    "RandomHorizontalFlip",
    "RandomResizedCrop",
    "RandomVerticalFlip",
    "Resize",
    "ToDtype",
    "Transform",
    "evaluate",
    "train",
]
