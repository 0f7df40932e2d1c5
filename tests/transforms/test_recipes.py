"""The recipes, by what they return for a batch."""

import inspect
import re

import numpy as np
import pytest
import torch

from memload import Loader, transforms
from memload.transforms import recipes

STATISTICS = {"mean": 0.5, "std": 0.25}
#: Recipe, its arguments, the steps in order, and the sides of its views.
RECIPES = {
    "train": ((20,), "RandomResizedCrop RandomHorizontalFlip Normalize ToDtype", [20]),
    "evaluate": ((20,), "Resize CenterCrop Normalize ToDtype", [20]),
    "imagenet_v1": ((20,), "RandomResizedCrop RandomHorizontalFlip Normalize ToDtype", [20]),
    "imagenet_v2": (
        (20,),
        "RandomResizedCrop RandomHorizontalFlip TrivialAugmentWide Normalize ToDtype RandomErasing "
        "RandomChoice",
        [20],
    ),
    "deit": (
        (20,),
        "RandomResizedCrop RandomHorizontalFlip TimmRandAugment Normalize ToDtype RandomErasing "
        "RandomChoice",
        [20],
    ),
    "convnext": (
        (20,),
        "RandomResizedCrop RandomHorizontalFlip TimmRandAugment Normalize ToDtype RandomErasing "
        "RandomChoice",
        [20],
    ),
    "deit3": (
        (20,),
        "RandomResizedCrop RandomHorizontalFlip RandomChoice ColorJitter Normalize ToDtype "
        "RandomChoice",
        [20],
    ),
    "simclr": (
        (40,),
        "RandomResizedCrop RandomHorizontalFlip RandomApply RandomGrayscale RandomApply Normalize "
        "ToDtype",
        [40, 40],
    ),
    "byol": ((40,), "", [40, 40]),
    "dino": ((20,), "", [20, 20, *[96] * 8]),
    "mae": ((20,), "RandomResizedCrop RandomHorizontalFlip Normalize ToDtype", [20]),
    "cifar": ((32,), "RandomCrop RandomHorizontalFlip Normalize ToDtype", [32]),
    "airbench": ((32,), "RandomCrop RandomHorizontalFlip Normalize ToDtype", [32]),
}


def make(name, **options):
    """Return a recipe for small images."""
    arguments = RECIPES[name][0]
    compose = getattr(recipes, name)(*arguments, **options)
    assert isinstance(compose, transforms.Compose)
    return compose


def test_every_recipe_is_here():
    functions = [value for value in vars(recipes).values() if inspect.isfunction(value)]
    names = [step.__name__ for step in functions if step.__module__ == recipes.__name__]
    assert sorted(name for name in names if name[0] != "_") == sorted(RECIPES)
    assert sorted(dir(recipes)) == ["Ending", *sorted(RECIPES)]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_gives_images_of_its_size_and_dtype(name, make_images):
    images, labels = make_images(6, 36, 40), torch.arange(6) % 4
    columns = {"label": labels}
    compose = make(name, **STATISTICS, dtype=torch.bfloat16).bind(num_classes=4)
    images_before = images.clone()
    found, found_columns = compose(images, columns, samples=np.arange(6), seed=1)
    views = found if isinstance(found, tuple) else (found,)
    assert [tuple(view.shape) for view in views] == [
        (6, 3, side, side) for side in RECIPES[name][2]
    ]
    assert {view.dtype for view in views} == {torch.bfloat16}
    assert all(view.isfinite().all() for view in views)
    assert torch.equal(images, images_before)
    if "mix" in inspect.signature(getattr(recipes, name)).parameters:
        torch.testing.assert_close(found_columns["label"].sum(1), torch.ones(6))
        alone = make(name, **STATISTICS, mix=False)
        _, same = alone(images, columns, samples=np.arange(6))
        assert torch.equal(same["label"], labels)


@pytest.mark.parametrize("name", [name for name, (_, steps, _) in RECIPES.items() if steps])
def test_printing_a_recipe_shows_its_steps(name):
    text = re.sub(r"\[.*?\](?=, p=)", "", repr(make(name, **STATISTICS)))  # options of a choice
    steps = RECIPES[name][1].split()
    found = [step for step in re.findall(r"(\w+)\(", text) if step not in ("Compose", "Fused")]
    assert found == steps


def test_byols_and_dinos_views_differ_in_kind():
    for name in ("byol", "dino"):
        first, second = repr(make(name)).split("view ")[1:3]
        assert "RandomSolarize" not in first
        assert "RandomSolarize(threshold=128" in second


def test_small_pictures_take_the_statistics_of_their_data_set(make_dataset):
    path = make_dataset(rows=(9,), shape=(32, 32, 3), columns={"label": np.arange(9) % 3}).path
    for name in ("cifar", "airbench"):
        with pytest.raises(ValueError, match="Normalize has no mean and std"):
            list(Loader(path, 9, transform=make(name), device="cpu"))  # it has none
        (images, _) = next(iter(Loader(path, 9, transform=make(name, **STATISTICS), device="cpu")))
        assert tuple(images.shape) == (9, 3, 32, 32)


@pytest.mark.parametrize("name", RECIPES)
def test_an_unknown_argument_is_a_type_error(name):
    with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected .* 'mixup_alpha'"):
        getattr(recipes, name)(mixup_alpha=0.8)


def test_the_error_for_an_unknown_argument_names_all_arguments():
    accepted = "size, mix, mean, std, statistics, dtype"
    with pytest.raises(TypeError, match=f"'scale'. Its arguments are {accepted}.$"):
        recipes.deit(224, scale=(0.5, 1.0))


@pytest.mark.parametrize("name", ["deit", "convnext"])
@pytest.mark.parametrize(
    ("ending", "levels"),
    [
        ({}, (124, 116, 104)),  # of ImageNet, as in timm
        ({"mean": [0.5, 0.25, 1.0], "std": [0.2] * 3}, (128, 64, 255)),
        ({"mean": None}, (128, 128, 128)),
    ],
)
def test_deit_warps_in_the_colour_of_the_mean(name, ending, levels):
    (step,) = (
        step
        for step in getattr(recipes, name)(16, **ending).transforms
        if isinstance(step, transforms.TimmRandAugment)
    )
    black = torch.zeros(400, 3, 16, 16, dtype=torch.uint8)
    found = step(black, samples=np.arange(400))
    corners = {tuple(corner) for corner in found[:, :, 0, 0].tolist()}
    assert levels in corners


def test_deit_takes_grey_images_with_their_mean(make_images):
    found = make("deit", **STATISTICS, mix=False)(make_images(4, 24, 24, channels=1))
    assert found.shape == (4, 1, 20, 20)
