"""What is drawn is torchvision's and timm's, and what is done with each image is like theirs."""

import importlib
import math
from collections import Counter

import numpy as np
import pytest
import torch

from memload import transforms
from memload.transforms import policies
from memload.transforms.draws import Draws
from memload.transforms.operation_step import MOVES, OPERATIONS
from memload.transforms.operations import change_each
from memload.transforms.policies import HAS_FACTOR
from tests.transforms.processors import are_taken_by

MANY = 20_000


@pytest.fixture(scope="session")
def v2(functional):
    """``torchvision.transforms.v2``."""
    return importlib.import_module("torchvision.transforms.v2")


def draws(count=MANY, seed=0):
    return Draws(np.arange(count), seed, 0, 0, 0)


def like(height, width):
    """Return images of this size."""
    return torch.empty(0, 3, height, width, dtype=torch.uint8)


def names_of(step):
    return np.array(OPERATIONS)[step.operation]


def assert_shares(found, expected):
    """Assert that values were found with these shares, within 5 standard deviations."""
    counts = Counter(np.asarray(found).tolist())
    total = sum(counts.values())
    assert counts.keys() <= expected.keys()
    for value, share in expected.items():
        deviation = math.sqrt(total * share * (1 - share))
        assert abs(counts[value] - total * share) <= 5 * deviation, value


@pytest.mark.parametrize(
    ("ours", "bins", "possible"),
    [
        (transforms.TrivialAugmentWide(), 31, range(31)),
        (transforms.TrivialAugmentWide(7), 7, range(7)),
        (transforms.RandAugment(), 31, [9]),
        (transforms.RandAugment(3, 2, 4), 4, [2]),
    ],
)
def test_operations_bins_and_signs_are_drawn_like_torchvisions(ours, bins, possible, v2):
    height, width = 37, 53
    space = getattr(v2, type(ours).__name__)._AUGMENTATION_SPACE
    steps = ours.operation_steps(draws(), like(height, width))
    assert len(steps) == getattr(ours, "num_ops", 1)
    for step in steps:
        expected = Counter()
        for name, (magnitudes, signed) in space.items():
            values = magnitudes(bins, height, width)
            for index in possible:
                value = 0.0 if values is None else float(values[index])
                for sign in (1, -1) if signed else (1,):
                    share = 1 / 14 / len(possible) / (2 if signed else 1)
                    expected[name, passed_on(name, sign * value)] += share
        assert_shares_of_magnitudes(step, expected)


def assert_shares_of_magnitudes(step, expected):
    """Assert that operations have these magnitudes with these shares, but for their rounding.

    Expected shifts are those before torchvision cuts off fractions of a pixel.
    """
    names, magnitudes = names_of(step), step.magnitude
    found = np.full(len(names), "", object)
    keys = {f"{name} {value}": (name, value) for name, value in expected}
    for key, (name, value) in keys.items():
        if name.startswith("Translate"):
            is_close = np.isin(magnitudes, np.trunc([value - 1e-5, value + 1e-5]))
        else:
            is_close = np.isclose(magnitudes, value, rtol=1e-6, atol=1e-6)
        found[(names == name) & is_close] = key
    assert_shares(found, {key: expected[pair] for key, pair in keys.items()})


def passed_on(name, value):
    """Return what torchvision passes on to an operation: a factor, where it is one."""
    return 1 + value if HAS_FACTOR[OPERATIONS.index(name)] else value


def taken_off(name, magnitude):
    """Return the magnitude of torchvision's transforms of which `passed_on` makes this one."""
    return magnitude - 1 if HAS_FACTOR[OPERATIONS.index(name)] else magnitude


@pytest.mark.parametrize("policy", ["imagenet", "cifar10", "svhn"])
def test_policies_are_drawn_like_torchvisions(policy, v2):
    height, width = 37, 53
    theirs = v2.AutoAugment(v2.AutoAugmentPolicy(policy))
    ours = transforms.AutoAugment(v2.AutoAugmentPolicy(policy))
    expected = [Counter(), Counter()]
    for pair in theirs._policies:
        for counter, (name, share, index) in zip(expected, pair, strict=True):
            magnitudes, signed = theirs._AUGMENTATION_SPACE[name]
            values = magnitudes(10, height, width)
            value = 0.0 if values is None else float(values[index])
            for sign in (1, -1) if signed else (1,):
                counter[name, passed_on(name, sign * value)] += share / 25 / (2 if signed else 1)
            counter["Identity", 0.0] += (1 - share) / 25
    steps = ours.operation_steps(draws(), like(height, width))
    for counter, step in zip(expected, steps, strict=True):
        assert_shares_of_magnitudes(step, counter)
    # The two operations of a pair come together.
    together = {(a, b) for a, b in zip(*map(names_of, steps), strict=True)}
    possible = {
        (a[0] if first else "Identity", b[0] if second else "Identity")
        for a, b in theirs._policies
        for first in {a[1] > 0, a[1] == 1}
        for second in {b[1] > 0, b[1] == 1}
    }
    assert together <= possible


def test_shifts_are_the_same_on_every_processor():
    # torch.linspace has 16 where torch has no vectors, in place of 15.999999.
    (step,) = transforms.TrivialAugmentWide().operation_steps(draws(), like(37, 53))
    shifts = set(np.abs(step.magnitude[names_of(step) == "TranslateX"]).astype(int).tolist())
    assert shifts == {*range(16), *range(17, 33)} - {31}


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("TrivialAugmentWide", ()),
        ("RandAugment", (3, 20)),
        *(("AutoAugment", (policy,)) for policy in policies.POLICIES),
    ],
)
def test_every_image_is_changed_like_torchvisions(name, arguments, interpolation, make_images, v2):
    options = {"interpolation": interpolation, "fill": [7.25, 200.5, 30.675]}
    ours, theirs = (getattr(module, name) for module in (transforms, v2))
    ours, theirs, images = ours(*arguments, **options), theirs(**options), make_images(40, 21, 17)
    changed = images
    for step in ours.operation_steps(draws(40), images):
        before, changed = changed, change_each(changed, [step])
        for index, (name, magnitude) in enumerate(zip(names_of(step), step.magnitude, strict=True)):
            image, one = before[index : index + 1], step.at([index])
            expected = theirs._apply_image_or_video_transform(
                image, name, taken_off(name, magnitude), interpolation, theirs._fill
            )
            if MOVES[one.operation[0]]:
                assert are_taken_by(expected, image, one.matrices, **options), name
            else:
                difference = changed[index : index + 1].int() - expected.int()
                assert difference.abs().max() <= 1, name
    assert torch.equal(ours(images, samples=np.arange(40)), changed)


def test_no_operation_is_a_copy(make_images):
    images = make_images()
    for step in (transforms.RandAugment(0), transforms.TimmRandAugment(p=0)):
        found = step(images)
        assert torch.equal(found, images)
        assert found.data_ptr() != images.data_ptr()


FACTS = {  # of timm, by level and increasing: posterize, solarize, solarize-add, and both factors
    (0, True): (4, None, 0, 1, 1),
    (5, True): (2, 128, 55, 0.55, 1.45),
    (9, True): (1, 26, 99, 0.19, 1.81),
    (10, True): (0, 0, 110, 0.1, 1.9),
    (0, False): (0, 0, 0, 0.1, 0.1),
    (9, False): (3, 230, 99, 1.72, 1.72),
    (10, False): (4, None, 110, 1.9, 1.9),
}


@pytest.mark.parametrize(("level", "increasing"), FACTS)
@pytest.mark.parametrize("sign", [-1, 1])
def test_magnitudes_are_timms(level, increasing, sign):
    posterize, threshold, added, low, high = FACTS[level, increasing]
    number = np.arange(len(OPERATIONS))
    every = np.ones(len(number))
    operation, magnitude = policies.timm_magnitudes(
        number, level * every, sign * every, increasing, (50, 80)
    )
    found = dict(zip(OPERATIONS, magnitude, strict=True))
    share = sign * level / 10
    expected = {
        "ShearX": 0.3 * share, "ShearY": 0.3 * share, "TranslateX": 36 * share,
        "TranslateY": 22.5 * share, "Rotate": 30 * share, "Posterize": posterize,
        "SolarizeAdd": added,
    }  # fmt: skip
    expected |= dict.fromkeys(OPERATIONS[6:10], low if sign < 0 else high)
    assert found["Solarize"] == pytest.approx((256 if threshold is None else threshold) / 255)
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    changed = operation != number
    assert changed.tolist() == [name == "Solarize" and threshold is None for name in OPERATIONS]


def timms_levels(magnitude, mstd):
    """Return the levels that are drawn for "Rotate", in which ten are 30 degrees."""
    augment = transforms.TimmRandAugment(1, magnitude, mstd, p=1)
    (step,) = augment.operation_steps(draws(), like(50, 80))
    return np.abs(step.magnitude[names_of(step) == "Rotate"]) / 3


def test_levels_are_drawn_like_timms():
    assert set(timms_levels(6, 0)) == {6}
    levels = timms_levels(8, 0.5)
    assert levels.mean() == pytest.approx(8, abs=0.05)
    assert levels.std() == pytest.approx(0.5, abs=0.05)
    assert_shares((timms_levels(6, math.inf) // 2).astype(int), dict.fromkeys(range(3), 1 / 3))
    for magnitude, mstd, share_of_10 in ((20, 0, 1), (20, math.inf, 0.5), (9.9, 0.5, 0.42)):
        levels = timms_levels(magnitude, mstd)
        assert levels.max() == 10
        assert (levels == 10).mean() == pytest.approx(share_of_10, abs=0.06)


def test_operations_and_signs_are_drawn_like_timms():
    steps = transforms.TimmRandAugment(3, p=0.4).operation_steps(draws(), like(50, 80))
    assert len(steps) == 3
    for step in steps:
        names = names_of(step)
        assert_shares(names, dict.fromkeys(OPERATIONS[:16], 0.4 / 15) | {"Identity": 0.6})
        assert_shares(step.magnitude[names == "Rotate"] > 0, {True: 0.5, False: 0.5})


@pytest.mark.parametrize(
    "augment", [transforms.TrivialAugmentWide(), transforms.RandAugment(3, 20)]
)
def test_masks_points_and_boxes_follow(augment, make_images):
    images, masks = make_images(64, 60, 80), torch.zeros(64, 60, 80, dtype=torch.uint8)
    masks[:, 20:41, 30:51] = 1
    columns = {
        "mask": masks,
        "point": torch.tensor([40.0, 30.0]).expand(64, 1, 2),
        "box": torch.tensor([30.0, 20.0, 51.0, 41.0]).expand(64, 1, 4),
    }
    bound = augment.bind(points=["point"], masks=["mask"], boxes=["box"])
    _, moved = bound(images, columns, samples=np.arange(64))
    seen = 0
    for mask, (point,), (box,) in zip(moved["mask"], moved["point"], moved["box"], strict=True):
        places = torch.nonzero(mask == 1).flip(1).float()
        if len(places) > 0.95 * 21 * 21:  # it was in the image after every step
            seen += 1
            assert (point - places.mean(0)).abs().max() < 1
            edges = torch.cat([places.amin(0), places.amax(0) + 1])
            assert (box - edges).abs().max() < 1.5
    assert seen > 20
