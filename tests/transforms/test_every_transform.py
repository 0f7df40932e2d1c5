"""What holds for every transform: torch's defaults and the rest of a batch change nothing."""

import contextlib
import sys

import numpy as np
import pytest
import torch

from memload import transforms
from tests.transforms import stored

STEPS = {
    **{name: step for name, (step, _) in stored.STEPS.items()},
    "Normalize": transforms.Normalize("imagenet"),
    "RandomErasing random": transforms.RandomErasing(0.5, (0.1, 0.3), (0.3, 3), "random"),
    "RandomRotation": transforms.RandomRotation(30, "bilinear"),
    "RandomApply in RandomChoice": transforms.RandomChoice(
        [transforms.RandomApply([transforms.ColorJitter(0.5), transforms.RandomInvert(1)]), abs]
    ),
    **{name: stored.recipe(name) for name in (*stored.RECIPES, "deit", "convnext")},
}
SAMPLES = np.random.default_rng(0).permutation(1000)[:24]


def test_every_transform_is_here():
    names = {type(step).__name__ for step in STEPS.values()}
    assert names | {"Transform", "evaluate", "recipes", "train"} == {*transforms.__all__}


def call_of(step):
    """Return a bound step, and images and columns that it takes."""
    images, columns = stored.batch(len(SAMPLES))
    bound = step.bind(num_classes=4, **(stored.FOLLOWERS if step.moves_pixels else {}))
    with contextlib.suppress(ValueError):
        bound(images, columns, samples=SAMPLES)
        return bound, images, columns
    return bound, images / 255, columns


@contextlib.contextmanager
def other_defaults():
    """Tensors of no given device have no values, and those of no given dtype have eight bits."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(before)


def forget():
    """Empty the caches, since the tables in them may have been made with other defaults."""
    for name, module in list(sys.modules.items()):
        if name.startswith("memload.transforms."):
            for value in vars(module).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


@pytest.mark.parametrize("name", STEPS)
def test_torchs_defaults_change_nothing(name):
    step, images, columns = call_of(STEPS[name])
    floats = images.float() / 255

    def results():
        batches = [step(images, columns, samples=SAMPLES, seed=3)]
        with contextlib.suppress(ValueError):  # some take uint8 alone
            batches.append(step(floats, columns, samples=SAMPLES, seed=3))
        return batches

    expected = results()
    forget()
    try:
        with other_defaults():
            found = results()
    finally:
        forget()
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", [name for name in STEPS if name not in ("MixUp", "CutMix")])
def test_a_sample_gets_the_same_in_any_batch(name):
    """What mixes samples depends on the batch: see test_erasing_and_mixing.py."""
    step, images, columns = call_of(STEPS[name])

    def check(found, places):
        for key, array in stored.flat(name, found):
            assert np.array_equal(array, whole[key][places], equal_nan=array.dtype.kind == "f"), key

    whole = dict(stored.flat(name, step(images, columns, samples=SAMPLES, seed=3, epoch=1)))
    prepared = step.prepare(SAMPLES, seed=3, epoch=1)
    for places in np.split(np.random.default_rng(1).permutation(len(SAMPLES)), [1, 6]):
        part = {key: column[places] for key, column in columns.items()}
        check(step(images[places], part, samples=SAMPLES[places], seed=3, epoch=1), places)
    for start, stop in ((0, 7), (5, 6), (6, 24)):
        part = {key: column[start:stop] for key, column in columns.items()}
        check(prepared(images[start:stop], part, start, stop), slice(start, stop))
