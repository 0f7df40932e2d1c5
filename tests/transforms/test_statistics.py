"""Normalize takes mean and std of a data set that was built before."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from memload import Loader, MemmapDataset, MissingError, transforms

TRAIN = {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}


@pytest.fixture
def train(make_dataset):
    return make_dataset(name="train.bin", statistics=TRAIN).path.with_suffix(".bin")


@pytest.mark.parametrize(
    "form", [str, Path, MemmapDataset, lambda path: MemmapDataset(path).subset([0]),
             lambda path: str(path.with_suffix(".idx"))],
)  # fmt: skip
def test_validation_is_normalised_like_training(form, train, make_dataset, make_images):
    normalize = transforms.Normalize(form(train))
    copied, images = pickle.loads(pickle.dumps(normalize)), make_images()
    assert torch.equal(copied(images), transforms.Normalize(**TRAIN)(images))
    assert "mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6), dataset=" in repr(copied)
    assert "train.idx" in repr(copied)
    other = {"mean": [0.9] * 3, "std": [0.9] * 3}
    path = make_dataset(name="val.bin", statistics=other).path
    (found,) = Loader(path, 5, transform=normalize)
    (expected,) = Loader(path, 5, transform=transforms.Normalize(**TRAIN))
    assert torch.equal(found.images, expected.images)


@pytest.mark.parametrize("recipe", [transforms.train, transforms.evaluate])
def test_recipes_take_the_statistics_of_a_data_set(recipe, train, make_images):
    images, samples = make_images(), np.arange(8)
    expected = recipe(8, **TRAIN)(images, samples=samples)
    assert torch.equal(recipe(8, statistics=train)(images, samples=samples), expected)
    with pytest.raises(ValueError, match="statistics takes the place of mean and std"):
        recipe(8, statistics=train, mean=None)


def test_statistics_are_read_when_the_transform_is_made(train, make_dataset, make_images):
    normalize = transforms.Normalize(train)
    for path in (train, train.with_suffix(".idx")):
        path.unlink()
    assert normalize(make_images()).dtype == torch.float32
    with pytest.raises(MissingError, match="train"):
        transforms.Normalize(train)
    left_out = make_dataset(name="float.bin", statistics={"left_out": "mean and std: NaN values"})
    with pytest.raises(ValueError, match=r"float\.idx has no mean and std .*NaN values"):
        transforms.Normalize(left_out.path)
