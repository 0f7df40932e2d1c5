"""What holds for every transform: outputs stay, and neither settings nor a batch change them."""

import contextlib
import sys

import numpy as np
import pytest
import torch

from memload import transforms
from memload.transforms import batch, prepared
from tests.transforms import stored

STEPS = {name: stored.bound(step) for name, (step, _) in (stored.STEPS | stored.UNSTORED).items()}
STEPS |= {name: stored.recipe(name) for name in stored.RECIPES}


@pytest.fixture(scope="module")
def found():
    return stored.outputs()


def test_every_transform_is_here_and_takes_bytes_or_floats(found):
    names = {key.split("/")[0] for key in found}
    assert {name.removesuffix(" uint8").removesuffix(" float") for name in names} == {*STEPS}
    names = {type(step).__name__ for step in STEPS.values()}
    assert names | {"Transform", "evaluate", "recipes", "train"} == {*transforms.__all__}


def test_outputs_are_those_of_before(found):
    with np.load(stored.FILE) as file:
        expected = dict(file)
    assert {key for key, array in found.items() if stored.is_stored(key, array)} == {*expected}
    others = [key for key, before in expected.items() if not is_close(key, found[key], before)]
    assert not others


def is_close(key, array, before):
    """Return whether images differ by a level, or 1.5e-5 for floats, and what follows by less."""
    name, kind, _ = key.split("/")
    tolerance = {"mask": 0, "points": 1e-3, "boxes": 1e-3}.get(kind, 1.5e-5)
    if kind == "images" and not name.endswith("float"):
        tolerance = 1 if array.dtype == np.uint8 else 1.05 / 255 / 0.224  # ImageNet's std
    # Where two pixels are equally near, the nearest may be the other one.
    is_warped = any(step in name for step in ("Augment", "Affine", "Rotation", "Perspective"))
    share = 0.997 if is_warped and kind in ("images", "mask") else 1
    are_close = np.isclose(array.astype(float), before, 1.5e-5, tolerance, equal_nan=True)
    return array.dtype.kind == before.dtype.kind and are_close.mean() >= share


@contextlib.contextmanager
def other_settings(dtype):
    """Tensors of no given device have no values, and NumPy raises for floating errors."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    forget()
    try:
        with torch.device("meta"), np.errstate(all="raise"):
            yield
    finally:
        torch.set_default_dtype(before)
        forget()


def forget():
    """Empty the caches, since the tables in them may have been made with other defaults."""
    for name, module in list(sys.modules.items()):
        if name.startswith("memload.transforms."):
            for value in vars(module).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_settings_of_torch_and_numpy_change_nothing(dtype, found):
    with other_settings(dtype):
        others = stored.outputs()
    assert others.keys() == found.keys()
    for key, array in others.items():
        np.testing.assert_array_equal(array, found[key], key, strict=True)


@pytest.mark.parametrize("name", STEPS)
def test_a_sample_gets_the_same_in_any_batch_and_layout(name, monkeypatch):
    """What mixes samples depends on the batch, but not on the chunk that it is a part of."""
    monkeypatch.setattr(prepared, "_SAMPLES_AT_ONCE", 5)
    monkeypatch.setitem(batch._PART_BYTES, "cpu", 40_000)  # two images
    step, (images, columns) = STEPS[name], stored.batch(12)
    samples, options = np.random.default_rng(0).permutation(1000)[:12], {"seed": 3, "epoch": 1}
    for given in (images, images / 255):
        try:
            whole = stored.flat(name, step(given, columns, samples=samples, **options))
        except ValueError:
            continue  # some take one of these dtypes alone
        chunk = step.prepare(samples, **options)
        for start, stop, pixels in (
            (0, 5, given.contiguous(memory_format=torch.channels_last)),
            (4, 5, given),
            (3, 12, given.repeat(1, 1, 1, 2)[..., :20]),
        ):
            pixels = pixels[start:stop]
            part = {key: column[start:stop] for key, column in columns.items()}
            alone = step(pixels, part, samples=samples[start:stop], **options)
            if start == 4:  # images of another size come between
                narrow = part | {"mask": part["mask"][..., :-1]}
                chunk(pixels[..., :-1], narrow, start, stop)
            found = stored.flat(name, chunk(pixels, part, start, stop))
            for key, array in stored.flat(name, alone).items():
                np.testing.assert_array_equal(found[key], array, key)
                if "Mix" not in name:
                    np.testing.assert_array_equal(whole[key][start:stop], array, key)


@pytest.mark.parametrize(
    "shape", [(0, 3, 18, 20), (2, 3, 1, 20), (2, 3, 18, 1), (2, 1, 18, 20), (2, 4, 18, 20)]
)
def test_odd_images_are_refused_or_change_as_alone(shape):
    images, taken = torch.from_numpy(np.random.default_rng(0).integers(0, 256, shape, np.uint8)), 0
    columns = {"label": torch.arange(shape[0]), "mask": images[:, 0]}
    columns |= {"points": torch.zeros(shape[0], 5, 2), "boxes": torch.ones(shape[0], 0, 4)}
    for name, step in STEPS.items():
        with contextlib.suppress(ValueError):
            found = stored.flat(name, step(images, columns, samples=np.arange(shape[0])))
            assert {len(array) for array in found.values()} == {shape[0]}
            for sample in range(shape[0]) if "Mix" not in name else ():
                part = {key: column[sample : sample + 1] for key, column in columns.items()}
                alone = step(images[sample : sample + 1], part, samples=[sample])
                for key, array in stored.flat(name, alone).items():
                    np.testing.assert_array_equal(array[0], found[key][sample], key)
            taken += 1
    assert taken > 20
