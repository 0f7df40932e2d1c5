"""Warped images are those of torchvision, whatever the batch, and what lies in them follows."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memload.transforms.warping import affine_matrices, perspective_matrices, warp

SIDES = st.integers(1, 40)
SEEDS = st.integers(0, 1 << 32)
INTERPOLATIONS = st.sampled_from(["nearest", "bilinear"])
#: No fill, the same for all channels, or one for each, from 0 to 255.
FILLS = st.sampled_from([None, 0, 200, (3, 100, 255)])


def make_batch(seed: int, channels: int, height: int, width: int, layout: str) -> torch.Tensor:
    """Return three random images: uint8, or floats from 0 to 1."""
    shape = (3, height, width, channels)
    rng = np.random.default_rng(seed)
    images = torch.from_numpy(rng.integers(0, 256, shape, np.uint8)).permute(0, 3, 1, 2)
    if "contiguous" in layout:
        images = images.contiguous()
    return images / 255 if "float" in layout else images


LAYOUTS = st.sampled_from(["channels last", "contiguous", "float contiguous", "float"])
BATCHES = st.builds(make_batch, st.integers(0, 99), st.sampled_from([1, 3]), SIDES, SIDES, LAYOUTS)


def in_units_of(images: torch.Tensor, fill: Any) -> Any:
    """Return a fill from 0 to 255 for images of some channels and dtype."""
    if fill is None:
        return None
    values = fill[: images.shape[1]] if isinstance(fill, tuple) else (fill,)
    unit = 255 if images.is_floating_point() else 1
    scaled = tuple(value / unit for value in values)
    return scaled if isinstance(fill, tuple) else scaled[0]


def random_numbers(count: int, seed: int) -> tuple[np.ndarray, ...]:
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


@settings(deadline=None, max_examples=40)
@given(BATCHES, INTERPOLATIONS, FILLS, SEEDS, st.sampled_from([None, [3.0, 4.5], [30.0, 0.0]]))
def test_affine_maps_are_torchvisions(
    functional: Any, images: torch.Tensor, interpolation: Any, fill: Any, seed: int, center: Any
) -> None:
    count, _, height, width = images.shape
    angle, translate, scale, shear = random_numbers(count, seed)
    fill = in_units_of(images, fill)
    matrices = affine_matrices(height, width, angle, translate, scale, shear, center)
    found = warp(images, matrices, interpolation, fill)
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
    assert torch.equal(found, torch.cat(expected))


@settings(deadline=None, max_examples=40)
@given(BATCHES, INTERPOLATIONS, FILLS, SEEDS)
def test_perspectives_are_torchvisions(
    functional: Any, images: torch.Tensor, interpolation: Any, fill: Any, seed: int
) -> None:
    count, _, height, width = images.shape
    if min(height, width) < 2:
        return  # three corners of four on a line: there is no such map
    rng = np.random.default_rng(seed)
    corners = np.array([[0, 0], [width - 1, 0], [width - 1, height - 1], [0, height - 1]], float)
    inwards = np.array([[1, 1], [-1, 1], [-1, -1], [1, -1]])
    moved = rng.integers(0, [width // 4 + 1, height // 4 + 1], (count, 4, 2))
    starts, ends = np.tile(corners, (count, 1, 1)), corners + moved * inwards
    fill = in_units_of(images, fill)
    found = warp(images, perspective_matrices(starts, ends), interpolation, fill)
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
    assert torch.equal(found, torch.cat(expected))


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32, torch.float64])
def test_a_sample_is_the_same_in_every_batch(interpolation: Any, dtype: torch.dtype) -> None:
    images = make_batch(0, 3, 110, 120, "channels last").repeat(2, 1, 1, 1).to(dtype)
    matrices = affine_matrices(110, 120, *random_numbers(6, 3))
    together = warp(images, matrices, interpolation, 7)
    alone = [warp(images[i : i + 1], matrices[i : i + 1], interpolation, 7) for i in range(6)]
    assert together.dtype == dtype
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
def test_an_empty_batch_stays_empty(interpolation: Any) -> None:
    images = make_batch(0, 3, 5, 6, "float")[:0]
    assert warp(images, np.zeros((0, 6)), interpolation, 0).shape == (0, 3, 5, 6)
    assert warp(images, np.zeros((0, 8)), interpolation).shape == (0, 3, 5, 6)


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e38, -1e38])
def test_what_comes_from_nowhere_is_outside(interpolation: Any, value: float) -> None:
    images = make_batch(0, 3, 5, 6, "channels last")
    matrices = np.full((3, 6), value)
    assert (warp(images, matrices, interpolation, 9) == 9).all()
    assert (warp(images, matrices, interpolation) == 0).all()


@pytest.mark.parametrize(
    ("matrices", "options", "message"),
    [
        (np.zeros((3, 7)), {}, r"matrices must be \(3, 6\) or \(3, 8\), not \(3, 7\)"),
        (np.zeros((4, 6)), {}, "matrices must be"),
        (np.zeros((3, 6)), {"interpolation": "bicubic"}, "interpolation must be 'nearest' or"),
        (np.zeros((3, 6)), {"fill": (1, 2)}, "fill must be one number, or one for each of 3"),
        (np.zeros((3, 6)), {"fill": 0.5}, "fill must be integers from 0 to 255 for uint8"),
    ],
)
def test_wrong_arguments_are_named(
    matrices: np.ndarray, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"warp: {message}"):
        warp(make_batch(0, 3, 5, 6, "contiguous"), matrices, **options)
