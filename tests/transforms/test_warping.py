"""Warped images are like torchvision's, whatever the batch, and what lies in them follows."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memload import transforms
from memload.transforms.draws import Draws
from memload.transforms.warping import affine_matrices, perspective_matrices
from tests.transforms.processors import are_taken_by

SIDES = st.integers(1, 40)
SEEDS = st.integers(0, 1 << 32)
INTERPOLATIONS = st.sampled_from(["nearest", "bilinear"])
#: No fill, the same for all channels, or one for each, from 0 to 255.
FILLS = st.sampled_from([None, 0, 200, (3, 100, 255), (123.675, 116.5, 103.25)])


def make_batch(seed, channels, height, width, layout):
    """Return three random images: uint8, or floats from 0 to 1."""
    shape = (3, height, width, channels)
    rng = np.random.default_rng(seed)
    images = torch.from_numpy(rng.integers(0, 256, shape, np.uint8)).permute(0, 3, 1, 2)
    if "contiguous" in layout:
        images = images.contiguous()
    return images / 255 if "float" in layout else images


LAYOUTS = st.sampled_from(["channels last", "contiguous", "float contiguous", "float"])
BATCHES = st.builds(make_batch, st.integers(0, 99), st.sampled_from([1, 3]), SIDES, SIDES, LAYOUTS)


def in_units_of(images, fill):
    """Return a fill from 0 to 255 for images of some channels and dtype."""
    if fill is None:
        return None
    values = fill[: images.shape[1]] if isinstance(fill, tuple) else (fill,)
    unit = 255 if images.is_floating_point() else 1
    scaled = tuple(value / unit for value in values)
    return scaled if isinstance(fill, tuple) else scaled[0]


def random_numbers(count, seed):
    """Return arguments of `affine_matrices`: angle, translate, scale and shear.

    In half of the maps many positions lie in the middle between two pixels.
    """
    rng = np.random.default_rng(seed)
    angle = rng.uniform(-360, 360, count), rng.choice([0.0, 45, 90, 180, -30], count)
    translate = rng.uniform(-30, 30, (count, 2)), rng.integers(-30, 31, (count, 2)) / 2
    scale = rng.uniform(0.2, 4, count), rng.choice([0.5, 1, 2], count)
    shear = rng.uniform(-60, 60, (count, 2)), np.zeros((count, 2))
    kind = int(rng.integers(2))
    return angle[kind], translate[kind], scale[kind], shear[kind]


@settings(deadline=None, max_examples=20)
@given(BATCHES, INTERPOLATIONS, FILLS, SEEDS, st.sampled_from([None, [3.0, 4.5], [30.0, 0.0]]))
def test_affine_maps_are_torchvisions(functional, images, interpolation, fill, seed, center):
    count, _, height, width = images.shape
    angle, translate, scale, shear = random_numbers(count, seed)
    fill = in_units_of(images, fill)
    matrices = affine_matrices(height, width, angle, translate, scale, shear, center)
    expected = [
        functional.affine(
            images[index : index + 1],
            angle=float(angle[index]),
            translate=translate[index].tolist(),
            scale=float(scale[index]),
            shear=shear[index].tolist(),
            interpolation=functional._geometry.InterpolationMode(interpolation),
            fill=fill,
            center=center,
        )
        for index in range(count)
    ]
    assert are_taken_by(torch.cat(expected), images, matrices, interpolation, fill)


@settings(deadline=None, max_examples=20)
@given(BATCHES, INTERPOLATIONS, FILLS, SEEDS)
def test_perspectives_are_torchvisions(functional, images, interpolation, fill, seed):
    count, _, height, width = images.shape
    if min(height, width) < 2:
        return  # three corners of four on a line: there is no such map
    rng = np.random.default_rng(seed)
    corners = np.array([[0, 0], [width - 1, 0], [width - 1, height - 1], [0, height - 1]], float)
    inwards = np.array([[1, 1], [-1, 1], [-1, -1], [1, -1]])
    moved = rng.integers(0, [width // 4 + 1, height // 4 + 1], (count, 4, 2))
    starts, ends = np.tile(corners, (count, 1, 1)), corners + moved * inwards
    fill = in_units_of(images, fill)
    matrices = perspective_matrices(starts, ends)
    corners = np.array([[x, y, 1] for x in (0.5, width - 0.5) for y in (0.5, height - 0.5)])
    if (corners @ matrices[:, 2].T < 0.1).any():
        return  # a pixel at the horizon comes from nowhere, and is black in torchvision's images
    expected = [
        functional.perspective(
            images[index : index + 1],
            starts[index].tolist(),
            ends[index].tolist(),
            interpolation=functional._geometry.InterpolationMode(interpolation),
            fill=fill,
        )
        for index in range(count)
    ]
    assert are_taken_by(torch.cat(expected), images, matrices, interpolation, fill)


def test_numbers_are_uniform_in_their_ranges():
    step = transforms.RandomAffine((-10, 30), (0.1, 0.5), (0.5, 3), (-20, 5, 0, 45))
    matrices = step.matrices(Draws(np.arange(20_000), 0, 0, 0, 0), 100, 40)
    scale = np.linalg.det(matrices[:, :2, :2]) ** -0.5
    assert scale.min() >= 0.5 - 1e-9
    assert scale.max() <= 3 + 1e-9
    assert abs(np.quantile(scale, [0.25, 0.5, 0.75]) - [1.125, 1.75, 2.375]).max() < 0.04
    # Where the centre goes.
    shifts = (np.linalg.inv(matrices) @ [20, 50, 1])[:, :2] - [20, 50]
    assert abs(shifts - shifts.round()).max() < 1e-6
    numbers, counts = np.unique(shifts[:, 0].round(), return_counts=True)
    assert numbers.tolist() == [*range(-4, 5)]
    # The outermost shifts have half the share, as in torchvision.
    assert abs(counts / 20_000 - [0.0625, *[0.125] * 7, 0.0625]).max() < 0.01
    assert abs(shifts[:, 1]).max() == pytest.approx(50)


def test_a_share_of_perspectives_moves_corners_inwards():
    step = transforms.RandomPerspective(0.5, p=0.3)
    matrices = step.matrices(Draws(np.arange(20_000), 0, 0, 0, 0), 41, 81)
    places = np.flatnonzero((matrices != np.eye(3)).any((1, 2)))
    assert abs(len(places) / 20_000 - 0.3) < 0.01
    corners = np.linalg.inv(matrices[places]) @ [0, 0, 1]
    corners = corners[:, :2] / corners[:, 2:]
    for axis, largest in ((0, 20), (1, 10)):
        numbers, counts = np.unique(corners[:, axis].round() + 0.0, return_counts=True)
        assert numbers.tolist() == [*range(largest + 1)]
        assert abs(counts / len(places) * (largest + 1) - 1).max() < 0.25


def test_a_corner_from_infinitely_far_away_leaves_its_image_as_it_is():
    starts = np.array([[0, 0], [3, 0], [3, 3], [0, 3.0]])
    ends = np.array([[1, 1], [2, 1], [2, 2], [0, 2.0]])  # the divisor is 0 at (0, 0)
    matrices = perspective_matrices(np.stack([starts, starts]), np.stack([ends, starts]))
    assert np.array_equal(matrices, [np.eye(3), np.eye(3)])
    images = torch.randint(0, 256, (1, 1, 4, 4), dtype=torch.uint8)
    prepared = transforms.RandomPerspective(0.5, p=1).prepare(np.arange(8192))
    assert prepared(images, None, 0, 1).shape == images.shape
