"""The pipelines that `transforms.py` measures: memload's, and the same of torchvision v2 and Kornia.

memload has the names and arguments of torchvision, so a function of either library makes both.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from memload import transforms
from memload.transforms import recipes

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
#: Pillow's numbers, which both libraries take.
BILINEAR, BICUBIC = 2, 3
A_BATCH, A_SAMPLE = "torchvision v2, one draw a batch", "torchvision v2, one draw a sample"
#: Its TrivialAugment draws one operation a batch, with a magnitude for each sample.
KORNIA = "kornia, one operation a batch"
#: How the columns of other libraries begin.
OTHERS = ("torchvision", "kornia")
#: Makes a pipeline of uint8 images, of `memload.transforms` or of torchvision's v2.
Make = Callable[[Any], Callable[[Tensor], Tensor]]

#: Operations by name; all change every image.
OPERATIONS: dict[str, Make] = {
    "RandomResizedCrop(224), bicubic": lambda of: of.RandomResizedCrop(224, interpolation=BICUBIC),
    "TrivialAugmentWide()": lambda of: of.TrivialAugmentWide(),
    "RandAugment()": lambda of: of.RandAugment(),
    "ColorJitter(0.4, 0.4, 0.4, 0.1)": lambda of: of.ColorJitter(0.4, 0.4, 0.4, 0.1),
    "GaussianBlur(9)": lambda of: of.GaussianBlur(9),
    "GaussianBlur(23)": lambda of: of.GaussianBlur(23),
    "RandomAffine(30, (0.1, 0.1), (0.8, 1.2), 10), bilinear": lambda of: of.RandomAffine(
        30, (0.1, 0.1), (0.8, 1.2), 10, interpolation=BILINEAR
    ),
    "RandomPerspective(0.5), bilinear": lambda of: of.RandomPerspective(0.5, p=1.0),
    "RandomAdjustSharpness(2)": lambda of: of.RandomAdjustSharpness(2, p=1.0),
    "RandomSolarize(128)": lambda of: of.RandomSolarize(128, p=1.0),
    "RandomPosterize(4)": lambda of: of.RandomPosterize(4, p=1.0),
    "RandomAutocontrast()": lambda of: of.RandomAutocontrast(p=1.0),
    "RandomEqualize()": lambda of: of.RandomEqualize(p=1.0),
}


def trivial_augment() -> transforms.Compose:
    """Return the steps of ``recipes.imagenet_v2`` without its erasing and mixing."""
    return transforms.Compose([
        transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(),
        transforms.TrivialAugmentWide(interpolation=BILINEAR),
        transforms.Normalize("imagenet"), transforms.ToDtype(torch.bfloat16),
    ])  # fmt: skip


def named_recipes() -> dict[str, tuple[transforms.Compose, int]]:
    """Return each recipe, and the side of the pictures that it is given."""
    of_256 = {
        recipes.imagenet_v1: 224,
        recipes.imagenet_v2: 176,
        **dict.fromkeys((recipes.deit, recipes.deit3, recipes.convnext), 224),
        **dict.fromkeys((recipes.simclr, recipes.byol, recipes.mae), 224),
    }
    found = {
        f"{recipe.__name__}({size})": (recipe(size, dtype=torch.bfloat16), 256)
        for recipe, size in of_256.items()
    }
    for recipe in (recipes.cifar, recipes.airbench):
        # the mean of the data set is a fact that a Loader would fill in
        own = recipe(32, mean="imagenet", dtype=torch.bfloat16)
        found[f"{recipe.__name__}(32)"] = own, 32
    # as a Loader does
    return {name: (recipe.bind(num_classes=1000), side) for name, (recipe, side) in found.items()}


def torchvision_v2() -> Any:
    """Return ``torchvision.transforms.v2``, or None where it is not installed."""
    if not find_spec("torchvision"):
        return None
    from torchvision.transforms import v2

    return v2


def a_sample(transform: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return what calls a transform of torchvision for each image, as it draws once a call."""
    return lambda images: torch.stack([transform(image) for image in images])


def of_torchvision(v2: Any, steps: list[Any]) -> Callable[[Tensor], Tensor]:
    """Return torchvision's resized crop, flip, these steps, and normalise; they return float32."""
    return v2.Compose([
        v2.RandomResizedCrop(224), v2.RandomHorizontalFlip(), *steps,
        v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD),
    ])  # fmt: skip


def crops_of_others(images: Tensor) -> dict[str, Callable[[], Any]]:
    """Return the resized crop, flip, normalise and cast of other libraries, where installed."""
    calls: dict[str, Callable[[], Any]] = {}
    if v2 := torchvision_v2():
        theirs = of_torchvision(v2, [])
        calls[A_BATCH] = lambda: theirs(images).bfloat16()
        calls[A_SAMPLE] = lambda: a_sample(theirs)(images).bfloat16()
    if find_spec("kornia"):
        kornias = of_kornia([])
        calls["kornia"] = lambda: kornias(images / 255).bfloat16()
    return calls


def trivial_augments_of_others(images: Tensor) -> dict[str, Callable[[], Any]]:
    """Return `trivial_augment` of other libraries, where installed.

    Kornia's TrivialAugment has the narrower ranges of RandAugment.
    """
    calls: dict[str, Callable[[], Any]] = {}
    if v2 := torchvision_v2():
        theirs = of_torchvision(v2, [v2.TrivialAugmentWide(interpolation=BILINEAR)])
        calls[A_BATCH] = lambda: theirs(images).bfloat16()
        calls[A_SAMPLE] = lambda: a_sample(theirs)(images).bfloat16()
    if find_spec("kornia"):
        from kornia.augmentation.auto import TrivialAugment

        kornias = of_kornia([TrivialAugment()])
        calls[KORNIA] = lambda: kornias(images / 255).bfloat16()
    return calls


def of_kornia(steps: list[Any]) -> torch.nn.Sequential:
    """Return Kornia's resized crop, flip, these steps, and normalise."""
    import kornia.augmentation as kornia

    return torch.nn.Sequential(
        kornia.RandomResizedCrop((224, 224)),
        kornia.RandomHorizontalFlip(),
        *steps,
        kornia.Normalize(torch.tensor(MEAN), torch.tensor(STD)),
    )


def dino_of_others(images: Tensor) -> dict[str, Callable[[], Any]]:
    """Return the ten views of ``recipes.dino`` by torchvision, where it is installed."""
    v2 = torchvision_v2()
    if not v2:
        return {}

    def view(size: int, scale: tuple[float, float], *steps: Any) -> Any:
        return v2.Compose([
            v2.RandomResizedCrop(size, scale, interpolation=BICUBIC), v2.RandomHorizontalFlip(),
            v2.RandomApply([v2.ColorJitter(0.4, 0.4, 0.2, 0.1)], 0.8), v2.RandomGrayscale(0.2),
            *steps, v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD),
        ])  # fmt: skip

    def blur(p: float) -> Any:
        return v2.RandomApply([v2.GaussianBlur(9)], p)

    first = view(224, (0.32, 1.0), v2.GaussianBlur(9))
    second = view(224, (0.32, 1.0), blur(0.1), v2.RandomSolarize(128, 0.2))
    views = [first, second, *[view(96, (0.05, 0.32), blur(0.5))] * 8]
    return {A_BATCH: lambda: [view(images).bfloat16() for view in views]}
