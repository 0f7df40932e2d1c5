"""What becomes of fixed images, masks, points and boxes: outputs of every transform and recipe.

``python -m tests.transforms.stored`` writes them to stored.npz, all but those of `UNSTORED`. They
were written before pixels were compared within one level; write them again only where what is drawn
changes on purpose.
"""

import contextlib
import functools
from pathlib import Path

import numpy as np
import torch

from memload import transforms
from memload.transforms import recipes

FILE = Path(__file__).with_name("stored.npz")
FOLLOWERS = {"points": ["points"], "masks": ["mask"], "boxes": ["boxes"]}
HEIGHT, WIDTH = 18, 20
T = transforms
#: Transforms by name, and for how many samples.
STEPS = {
    "AutoAugment": (T.AutoAugment(), 24),
    "AutoAugment bilinear": (T.AutoAugment("svhn", "bilinear", 7), 24),
    "CenterCrop": (T.CenterCrop(14), 2),
    "CenterCrop larger": (T.CenterCrop((16, 25)), 2),
    "ColorJitter": (T.ColorJitter(0.4, 0.4, 0.4, 0.1), 12),
    "crop normalize": (T.Compose([T.RandomCrop(12), T.Normalize("imagenet")]), 3),
    "Cutout": (T.Cutout(8, 0.5), 3),
    "CutMix": (T.CutMix(), 4),
    "GaussianBlur": (T.GaussianBlur(5), 4),
    "MixUp": (T.MixUp(), 4),
    "RandAugment": (T.RandAugment(), 24),
    "RandomAdjustSharpness": (T.RandomAdjustSharpness(2), 4),
    "RandomAffine": (T.RandomAffine(30, (0.2, 0.2), (0.5, 2), 10), 6),
    "RandomAffine bilinear": (T.RandomAffine(30, (0.2, 0.2), (0.5, 2), 10, "bilinear", 0.5), 6),
    "RandomApply": (T.RandomApply([T.RandomGrayscale(1)]), 4),
    "RandomApply moving": (T.RandomApply([T.RandomVerticalFlip(), T.RandomRotation(30)]), 6),
    "RandomAutocontrast": (T.RandomAutocontrast(1), 2),
    "RandomChoice": (T.RandomChoice([T.RandomGrayscale(), T.ColorJitter(hue=0.2)]), 6),
    "RandomChoice mixed": (T.RandomChoice([T.RandomHorizontalFlip(1), T.RandomInvert(1)]), 6),
    "RandomCrop": (T.RandomCrop(20, 4, False, 0.5), 4),
    "RandomCrop reflect": (T.RandomCrop(20, 4, False, 0, "reflect"), 4),
    "RandomCrop symmetric": (T.RandomCrop(20, 4, False, 0, "symmetric"), 4),
    "RandomCrop edge": (T.RandomCrop(20, 4, False, 0, "edge"), 4),
    "RandomEqualize": (T.RandomEqualize(1), 2),
    "RandomErasing": (T.RandomErasing(0.5, (0.1, 0.3), (0.3, 3), 0.5), 6),
    "RandomGrayscale": (T.RandomGrayscale(0.5), 3),
    "RandomHorizontalFlip": (T.RandomHorizontalFlip(), 3),
    "RandomHorizontalFlip alternate": (T.RandomHorizontalFlip(alternate=True), 3),
    "RandomInvert": (T.RandomInvert(), 3),
    "RandomPerspective": (T.RandomPerspective(), 6),
    "RandomPerspective nearest": (T.RandomPerspective(0.5, 1, "nearest", 9), 4),
    "RandomPosterize": (T.RandomPosterize(3), 3),
    "RandomResizedCrop": (T.RandomResizedCrop(12), 6),
    "RandomResizedCrop bicubic": (T.RandomResizedCrop(12, interpolation="bicubic"), 6),
    "RandomResizedCrop sharp": (T.RandomResizedCrop(12, antialias=False), 3),
    "RandomRotation": (T.RandomRotation(30, "bilinear"), 4),
    "RandomRotation quarter": (T.RandomRotation((90, 90)), 1),
    "RandomSolarize": (T.RandomSolarize(0.5), 3),
    "RandomVerticalFlip": (T.RandomVerticalFlip(), 3),
    "Resize": (T.Resize(12), 2),
    "Resize larger": (T.Resize((23, 31), "bicubic"), 1),
    "resize crop flip": (T.Compose([T.Resize(16), T.RandomCrop(12), T.RandomHorizontalFlip()]), 4),
    "TimmRandAugment": (T.TimmRandAugment(), 24),
    "ToDtype": (T.ToDtype(torch.float16, scale=True), 1),
    "TrivialAugmentWide": (T.TrivialAugmentWide(), 32),
    "TrivialAugmentWide bilinear": (T.TrivialAugmentWide(31, "bilinear"), 32),
    "TrivialAugmentWide filled": (T.TrivialAugmentWide(31, "bilinear", [9, 90, 200]), 16),
}  # fmt: skip
RECIPES = sorted({*recipes.__all__} - {"Ending"})
#: Noise, and what is like others.
UNSTORED = {
    "GaussianBlur sharp": (T.GaussianBlur(17, (1e-3, 1e-2)), 4),
    "MixUp or CutMix": (T.RandomChoice([T.MixUp(alpha=0.001), T.CutMix()]), 8),
    "Normalize": (T.Normalize("imagenet"), 3),
    "RandomApply in RandomChoice": (
        T.RandomChoice([T.RandomApply([T.ColorJitter(0.5), T.RandomInvert(1)]), abs]), 12
    ),
    "RandomErasing random": (T.RandomErasing(0.5, (0.1, 0.3), (0.3, 3), "random"), 6),
}  # fmt: skip
NOISY_RECIPES = ["deit", "convnext"]


@functools.cache
def batch(count):
    """Return smooth images, and columns that follow them."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    phases = rng.uniform(0, 7, (32, 3, 4, 1, 1))
    waves = np.sin(phases[:, :, 0] + x / 4) + np.sin(phases[:, :, 1] + y / 3)
    waves += np.sin(phases[:, :, 2] + (x + y) / 5 * np.cos(phases[:, :, 3]))
    pixels = np.clip(waves * 45 + 120, 0, 255).astype(np.uint8)
    columns = {
        "label": np.arange(32) % 4,
        "mask": rng.integers(0, 9, (32, 6, 5), np.uint8).repeat(3, 1).repeat(4, 2),
        "points": rng.uniform(0, 18, (32, 2, 2)).astype(np.float32),
        "boxes": np.tile(np.float32([[[2, 3, 12, 17], [0, 0, WIDTH, HEIGHT]]]), (32, 1, 1)),
    }
    tensors = {name: torch.from_numpy(column[:count]) for name, column in columns.items()}
    return torch.from_numpy(pixels[:count]), tensors


def outputs():
    """Return arrays by name: of each transform for uint8 and floats, and of each recipe."""
    found = {}
    for name, (step, count) in (STEPS | UNSTORED).items():
        pixels, columns = batch(count)
        for dtype, images in ("uint8", pixels), ("float", pixels[:2].float() / 255):
            given = {key: column[: len(images)] for key, column in columns.items()}
            with contextlib.suppress(ValueError):  # transforms that do not take this dtype
                value = bound(step)(images, given, samples=np.arange(len(images)), seed=3)
                found |= flat(f"{name} {dtype}", value)
    for name in RECIPES:
        found |= flat(name, recipe(name)(*batch(4), samples=np.arange(4), seed=3))
    return found


def bound(step):
    """Return a step that has all it needs to know of a data set."""
    return step.bind(num_classes=4, **(FOLLOWERS if step.moves_pixels else {}))


def recipe(name):
    """Return a recipe for small images, which does not mix them."""
    small = {"small_size": 6, "num_small": 2} if name == "dino" else {}
    options = {"mix": False} if name in ("imagenet_v2", "deit3", "deit", "convnext") else {}
    return bound(getattr(recipes, name)(12, mean="imagenet", **small, **options))


def flat(name, value):
    """Return arrays by name: images, and the columns that followed them."""
    images, columns = value
    return {
        f"{name}/{key}/{number}": tensor.numpy()
        for key, item in {"images": images, **columns}.items()
        for number, tensor in enumerate(item if isinstance(item, tuple) else (item,))
    }


def is_stored(key, array):
    """Return whether an array is stored: not if it is noise, or a column as it was given."""
    name, column, _ = key.split("/")
    given = batch(32)[1].get(column)
    is_given = given is not None and np.array_equal(array, given[: len(array)].numpy())
    name = name.removesuffix(" uint8").removesuffix(" float")
    return not is_given and name not in {*UNSTORED, *NOISY_RECIPES}


if __name__ == "__main__":
    stored = {key: array for key, array in outputs().items() if is_stored(key, array)}
    for key, array in stored.items():
        if "/images/" in key and array.dtype == np.float32 and " float/" not in key:
            stored[key] = array.astype(np.float16)  # levels are compared, not all of the bits
    np.savez_compressed(FILE, **stored)
