"""Results do not depend on torch's default device and dtype."""

import contextlib
import functools
import sys

import numpy as np
import pytest
import torch

from memload import Loader, transforms
from memload.transforms import recipes

COUNT = 40
FOLLOWERS = {"points": ["points"], "masks": ["mask"], "boxes": ["boxes"]}
#: Names of transforms and their arguments.
STEPS = [
    ("AutoAugment", ()),
    ("AutoAugment", ("svhn", "bilinear", 7)),
    ("CenterCrop", (26,)),
    ("ColorJitter", (0.4, 0.4, 0.4, 0.1)),
    ("Compose", ([transforms.RandomCrop(18), transforms.Normalize("imagenet")],)),
    ("CutMix", ()),
    ("Cutout", (8, 0.5)),
    ("GaussianBlur", (5,)),
    ("MixUp", ()),
    ("Normalize", ("imagenet",)),
    ("RandAugment", ()),
    ("RandomAdjustSharpness", (2,)),
    ("RandomAffine", (30, (0.2, 0.2), (0.5, 2), 10)),
    ("RandomAffine", (30, (0.2, 0.2), (0.5, 2), 10, "bilinear", 0.5)),
    ("RandomApply", ([transforms.RandomGrayscale(1)],)),
    ("RandomAutocontrast", ()),
    ("RandomChoice", ([transforms.RandomGrayscale(), transforms.ColorJitter(hue=0.2)],)),
    ("RandomCrop", (20, 4, False, 0.5)),
    ("RandomCrop", (20, 4, False, 0, "reflect")),
    ("RandomEqualize", ()),
    ("RandomErasing", (0.5, (0.1, 0.3), (0.3, 3), 0.5)),
    ("RandomErasing", (0.5, (0.1, 0.3), (0.3, 3), "random")),
    ("RandomGrayscale", (0.5,)),
    ("RandomHorizontalFlip", ()),
    ("RandomInvert", ()),
    ("RandomPerspective", ()),
    ("RandomPosterize", (3,)),
    ("RandomResizedCrop", (16,)),
    ("RandomResizedCrop", (16, (0.08, 1), (0.75, 1.3), "bicubic")),
    ("RandomRotation", (30, "bilinear")),
    ("RandomSolarize", (0.5,)),
    ("RandomVerticalFlip", ()),
    ("Resize", (16,)),
    ("TimmRandAugment", ()),
    ("ToDtype", (torch.float32, True)),
    ("TrivialAugmentWide", ()),
    ("TrivialAugmentWide", (31, "bilinear")),
]
RECIPES = sorted({*recipes.__all__} - {"Ending"})


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


DEFAULTS = {
    "meta": functools.partial(torch.device, "meta"),
    "float64": functools.partial(default_dtype, torch.float64),
    "bfloat16": functools.partial(default_dtype, torch.bfloat16),
    "float16": functools.partial(default_dtype, torch.float16),
}
under_each_default = pytest.mark.parametrize("default", DEFAULTS.values(), ids=DEFAULTS)


def forget():
    """Empty the caches, since the tables in them may have been made with other defaults."""
    for name, module in list(sys.modules.items()):
        if name.startswith("memload.transforms."):
            for value in vars(module).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


def check(default, results):
    expected = results()
    forget()
    try:
        with default():
            found = results()
    finally:
        forget()
    assert expected
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def results_of(step):
    """Return what becomes of a batch of uint8, and of floats, where the step takes them."""
    rng = np.random.default_rng(0)
    pixels = torch.from_numpy(rng.integers(0, 256, (COUNT, 3, 30, 34), np.uint8))
    columns = {
        "label": torch.from_numpy(np.arange(COUNT) % 4),
        "mask": torch.from_numpy(rng.integers(0, 9, (COUNT, 30, 34), np.uint8)),
        "points": torch.from_numpy(rng.integers(0, 24, (COUNT, 2, 2))),
        "boxes": torch.from_numpy(np.tile([[[2, 3, 12, 20]]], (COUNT, 1, 1))),
    }
    results = []
    for images in (pixels, pixels.float() / 255):
        with contextlib.suppress(ValueError):
            results.append(step(images, columns, samples=np.arange(COUNT), seed=3))
    return results


def test_every_transform_is_here():
    names = {name for name, _ in STEPS} | {"Transform", "evaluate", "recipes", "train"}
    assert names == {*transforms.__all__}


@under_each_default
@pytest.mark.parametrize(("name", "arguments"), STEPS)
def test_a_transform_gives_the_same(name, arguments, default):
    step = getattr(transforms, name)(*arguments)
    followers = FOLLOWERS if step.moves_pixels else {}
    check(default, lambda: results_of(step.bind(num_classes=4, **followers)))


@under_each_default
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_gives_the_same(name, default):
    step = getattr(recipes, name)(32, mean="imagenet").bind(num_classes=4)
    check(default, lambda: results_of(step))


@under_each_default
def test_a_loader_gives_the_same(default, make_dataset):
    path = make_dataset(rows=(9,), shape=(30, 34, 3)).path

    def batches():
        loader = Loader(path, 4, transform=transforms.train(16), shuffle=True, device="cpu")
        return [tuple(batch) for batch in loader]

    check(default, batches)
