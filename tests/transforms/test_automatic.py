"""What is drawn is torchvision's and timm's, and what is done with each image is like theirs."""

import importlib
import math
import pickle
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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


@settings(max_examples=15, deadline=None)
@given(
    data=st.data(),
    count=st.integers(0, 40),
    size=st.one_of(
        st.tuples(st.integers(1, 40), st.integers(1, 40)),
        st.sampled_from([(8, 8), (16, 12), (32, 24), (8, 40)]),
    ),
    channels=st.sampled_from([1, 3]),
    channels_last=st.booleans(),
    smooth=st.booleans(),
    interpolation=st.sampled_from(["nearest", "bilinear"]),
    fill=st.sampled_from([None, 0, 77, "each"]),
    seed=st.integers(0, 1 << 30),
)
def test_every_image_is_changed_like_torchvisions(
    data, v2, count, size, channels,
    channels_last, smooth, interpolation, fill, seed
):  # fmt: skip
    if fill == "each":
        fill = [7.25, 200.5, 30.675][:channels]
    options = {"interpolation": interpolation, "fill": fill}
    ours = data.draw(
        st.sampled_from(
            [
                transforms.TrivialAugmentWide(**options),
                transforms.RandAugment(3, 20, **options),
                *(transforms.AutoAugment(name, **options) for name in policies.POLICIES),
            ]
        )
    )
    theirs = getattr(v2, type(ours).__name__)(**options)
    images = batch(count, *size, channels, channels_last, smooth, seed)
    original = images.clone()
    samples = np.arange(count) + seed
    changed = images
    for step in ours.operation_steps(Draws(samples, seed, 0, 0, 0), images):
        before, changed = changed, change_each(changed, [step])
        for index, (name, magnitude) in enumerate(zip(names_of(step), step.magnitude, strict=True)):
            image, one = before[index : index + 1], step.at([index])
            expected = theirs._apply_image_or_video_transform(
                image.clone(), name, taken_off(name, magnitude), interpolation, theirs._fill
            )
            if MOVES[one.operation[0]]:
                assert are_taken_by(expected, image, one.matrices, interpolation, fill), name
            else:
                difference = changed[index : index + 1].int() - expected.int()
                assert difference.abs().max() <= 1, name
    assert torch.equal(ours(images, samples=samples, seed=seed), changed)
    assert torch.equal(images, original)


def batch(count, height, width, channels, channels_last, smooth, seed):
    """Return random images, of noise or of few levels with their neighbours alike."""
    generator = torch.Generator().manual_seed(seed)
    shape = (count, channels, height, width)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    if smooth:
        images = images.sort(2).values // 3 + 40
    return images.contiguous(memory_format=torch.channels_last) if channels_last else images


def test_they_are_steps_among_others(make_images):
    images, samples = make_images(64), np.arange(64)
    flip, augment = transforms.RandomHorizontalFlip(), transforms.RandAugment()
    both = transforms.Compose([flip, augment, transforms.Normalize("imagenet")])
    found = pickle.loads(pickle.dumps(both))(images, samples=samples)
    flipped = flip(images, samples=samples)
    expected = change_each(flipped, augment.operation_steps(Draws(samples, 0, 0, 1, 0), images))
    assert torch.equal(found, transforms.Normalize("imagenet")(expected))
    some = transforms.RandomApply([transforms.TrivialAugmentWide()], p=0.5)
    changed = (some(images, samples=samples) != images).flatten(1).any(1)
    assert 15 < changed.sum() < 45
    assert both.moves_pixels


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


@pytest.mark.parametrize(("mstd", "share_of_10"), [(0, 1), (0.5, 1), (math.inf, 0.5)])
def test_magnitudes_above_10_become_10_as_in_timm(mstd, share_of_10):
    (step,) = transforms.TimmRandAugment(1, 20, mstd, p=1).operation_steps(draws(), like(50, 80))
    levels = np.abs(step.magnitude[names_of(step) == "Rotate"]) / 3
    assert levels.max() == 10
    assert (levels == 10).mean() == pytest.approx(share_of_10, abs=0.06)


def test_operations_and_magnitudes_are_drawn_like_timms():
    steps = transforms.TimmRandAugment(3, magnitude=8, mstd=0.5, p=0.4).operation_steps(
        draws(), like(50, 80)
    )
    assert len(steps) == 3
    for step in steps:
        names = names_of(step)
        assert_shares(names, dict.fromkeys(OPERATIONS[:16], 0.4 / 15) | {"Identity": 0.6})
        angles = step.magnitude[names == "Rotate"]
        assert_shares(angles > 0, {True: 0.5, False: 0.5})
        levels = np.abs(angles) / 3
        assert levels.mean() == pytest.approx(8, abs=0.15)
        assert levels.std() == pytest.approx(0.5, abs=0.1)
    (step,) = transforms.TimmRandAugment(1, 9.9, p=1).operation_steps(draws(), like(50, 80))
    levels = np.abs(step.magnitude[names_of(step) == "Rotate"]) / 3
    assert levels.max() == 10  # and not above
    (step,) = transforms.TimmRandAugment(1, 6, mstd=math.inf, p=1).operation_steps(
        draws(), like(50, 80)
    )
    levels = np.abs(step.magnitude[names_of(step) == "Rotate"]) / 3
    assert_shares((levels // 2).astype(int), dict.fromkeys(range(3), 1 / 3))
    (step,) = transforms.TimmRandAugment(1, 6, mstd=0, p=1).operation_steps(draws(), like(50, 80))
    assert set(np.abs(step.magnitude[names_of(step) == "Rotate"])) == {18}


T = transforms
UINT8 = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: T.TrivialAugmentWide(1), "num_magnitude_bins must be an integer of at least 2"),
        (lambda: T.TrivialAugmentWide(interpolation="bicubic"), "'bilinear', not 'bicubic'"),
        (lambda: T.TrivialAugmentWide(fill="red"), "fill must be a number, .*not 'red'"),
        (lambda: T.TrivialAugmentWide(fill=(1, 2))(UINT8), "3 channels, not 2 numbers"),
        (lambda: T.TrivialAugmentWide()(UINT8[:, :2]), "images must be of 1 or 3 .*not of 2"),
        (lambda: T.TrivialAugmentWide()(UINT8 / 255), "uint8, as some .*float32. Put it before"),
        (lambda: T.RandAugment(-1), "num_ops must be an integer of at least 0, not -1"),
        (lambda: T.RandAugment(magnitude=31), "below num_magnitude_bins, 31, not 31"),
        (lambda: T.AutoAugment("mnist"), "one of 'imagenet', 'cifar10', 'svhn', not 'mnist'"),
        (
            lambda: T.TimmRandAugment(magnitude=-1),
            "magnitude must be a number of at least 0, not -1",
        ),
        (lambda: T.TimmRandAugment("rand-m9-mstd0.5-inc1"), "rand-m9.* is magnitude=9, mstd=0.5,"),
        (lambda: T.TimmRandAugment(p=2), "p must be a number from 0 to 1, not 2"),
    ],
)
def test_wrong_arguments_are_told(act, message):
    with pytest.raises(ValueError, match=message):
        act()


AUGMENTS = [
    transforms.TrivialAugmentWide(), transforms.RandAugment(3, 20), transforms.AutoAugment("svhn"),
    transforms.TimmRandAugment(), transforms.RandAugment(0),
]  # fmt: skip


@pytest.mark.parametrize("augment", AUGMENTS, ids=repr)
def test_masks_points_and_boxes_follow(augment, make_images):
    count, height, width = 64, 60, 80
    images, samples = make_images(count, height, width), np.arange(count)
    masks = torch.zeros(count, height, width, dtype=torch.uint8)
    masks[:, 20:41, 30:51] = 1
    points = torch.tensor([[40.0, 30.0]]).expand(count, 1, 2)
    boxes = torch.tensor([[30.0, 20.0, 51.0, 41.0]]).expand(count, 1, 4)
    names = {"points": ["point"], "masks": ["mask"], "boxes": ["box"]}
    columns = {"point": points, "mask": masks, "box": boxes}
    found, moved = transforms.Compose([augment], **names)(images, columns, samples=samples)
    assert torch.equal(found, augment(images, samples=samples))
    for mask, point, box in zip(moved["mask"], moved["point"], moved["box"], strict=True):
        rows, places = torch.nonzero(mask == 1).unbind(1)
        if len(rows) > 0.95 * 21 * 21:  # it was in the image after every step
            centre = torch.stack([places.float().mean(), rows.float().mean()])
            assert (point[0] - centre).abs().max() < 1
            assert (box[0, :2] - torch.stack([places.min(), rows.min()])).abs().max() < 1.5
            assert (box[0, 2:] - torch.stack([places.max(), rows.max()]) - 1).abs().max() < 1.5


def test_masks_can_be_left_alone(make_images):
    step = transforms.Compose([transforms.TrivialAugmentWide()], masks=[])
    masks = torch.ones(8, 20, 24, dtype=torch.uint8)
    _, columns = step.bind(masks=["mask"])(make_images(), {"mask": masks})
    assert torch.equal(columns["mask"], masks)
