"""Warped images are like torchvision's, whatever the batch, and what lies in them follows."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memload import transforms
from memload.transforms.draws import Draws
from memload.transforms.warping import affine_matrices, perspective_matrices, warp
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


@pytest.mark.parametrize(
    ("interpolation", "dtype"), [("nearest", torch.float16), ("bilinear", torch.float64)]
)
def test_an_image_is_warped_as_alone(interpolation, dtype):
    images = make_batch(0, 3, 50, 60, "channels last").repeat(2, 1, 1, 1).to(dtype)
    matrices = affine_matrices(50, 60, *random_numbers(6, 3))
    together = warp(images, matrices, interpolation, 7)
    alone = [warp(images[i : i + 1], matrices[i : i + 1], interpolation, 7) for i in range(6)]
    assert together.dtype == dtype
    assert torch.equal(together, torch.cat(alone))


WARPS = [
    transforms.RandomAffine(180, (0.2, 0.3), (0.5, 2.0), (-20.0, 20.0, -9.0, 9.0)),
    transforms.RandomAffine(30, center=[2.0, 7.0]),
    transforms.RandomRotation(180),
    transforms.RandomRotation((90, 90)),
    transforms.RandomPerspective(0.6, p=0.7, interpolation="nearest"),
]
IN_PARTS = [
    transforms.RandomApply([WARPS[0]], p=0.5),
    transforms.RandomChoice([WARPS[0], WARPS[4]]),
    transforms.Compose([transforms.RandomHorizontalFlip(), WARPS[0], WARPS[4]]),
]


@pytest.mark.parametrize("step", WARPS + IN_PARTS)
def test_a_mask_that_is_its_image_stays_so(step):
    images = make_batch(0, 1, 31, 26, "contiguous")
    compose = transforms.Compose([step], masks=["mask"], mask_fill=0)
    for dtype in (torch.uint8, torch.int16, torch.uint16):
        mask = {"mask": images[:, 0].to(dtype)}
        moved, columns = compose(images, mask, samples=np.arange(3), seed=5)
        assert columns["mask"].dtype == dtype
        # Positions of images are rounded to float32.
        assert (columns["mask"].int() != moved[:, 0].int()).float().mean() < 2e-3


@pytest.mark.parametrize("step", WARPS + IN_PARTS)
def test_points_go_where_their_pixels_go(step):
    side = 200
    y, x = torch.meshgrid(torch.arange(float(side)), torch.arange(float(side)), indexing="ij")
    images = torch.stack([x, y]).expand(3, 2, side, side)
    points = torch.from_numpy(np.random.default_rng(0).integers(50, 150, (3, 30, 2))).float()
    compose = transforms.Compose([step], points=["at"])
    moved, columns = compose(images, {"at": points}, samples=np.arange(3), seed=5)
    column, row = columns["at"].round().long().unbind(2)
    inside = (row >= 0) & (row < side) & (column >= 0) & (column < side)
    assert inside.sum() > 40
    sources = moved[torch.arange(3)[:, None], :, row.clamp(0, side - 1), column.clamp(0, side - 1)]
    # The pixel there may have come from beside the point, if the image has become smaller.
    assert (sources - points).abs().amax(2)[inside].max() <= 3


@pytest.mark.parametrize("step", WARPS + IN_PARTS[:2])
def test_boxes_hold_their_corners_and_stay_inside(step):
    images = torch.zeros((3, 1, 50, 60), dtype=torch.uint8)
    low = torch.from_numpy(np.random.default_rng(0).uniform(0, 40, (3, 20, 2)))
    boxes = torch.cat([low, low + 10], 2)
    inner = torch.cat([low, low + 10, low + torch.tensor([10, 0])], 1) - 0.5
    compose = transforms.Compose([step], points=["inner"], boxes=["boxes"])
    _, columns = compose(images, {"inner": inner, "boxes": boxes}, samples=np.arange(3), seed=5)
    found, points = columns["boxes"], columns["inner"].view(3, 3, 20, 2) + 0.5
    size = torch.tensor([60.0, 50.0])
    kept = ~found.isnan().any(2)
    assert kept.any()
    for corner in points.unbind(1):
        visible = kept & (corner >= 0).all(2) & (corner <= size).all(2)
        assert (corner >= found[..., :2] - 1e-4).all(2)[visible].all()
        assert (corner <= found[..., 2:] + 1e-4).all(2)[visible].all()
    assert (found[kept][:, :2] >= 0).all()
    assert (found[kept][:, 2:] <= size).all()


def test_a_box_is_the_smallest_upright_one_of_its_corners():
    boxes = torch.tensor([[[2.0, 4, 6, 6], [0, 0, 10, 10], [0, 0, 1, 1]]])
    images = torch.zeros((1, 1, 10, 10))

    def moved(degrees):
        turn = transforms.RandomRotation((degrees, degrees))
        compose = transforms.Compose([turn], boxes=["boxes"])
        return compose(images, {"boxes": boxes})[1]["boxes"][0]

    quarter = torch.tensor([[4.0, 4, 6, 8], [0, 0, 10, 10], [0, 9, 1, 10]])
    assert torch.allclose(moved(90), quarter, atol=1e-6)
    # The corners are (-3, -1), (1, -1), (1, 1) and (-3, 1) from the centre.
    eighth = torch.tensor([[-4.0, -2, 2, 4]]) / 2**0.5 + 5
    found = moved(45)
    assert torch.allclose(found[:1], eighth)
    assert torch.equal(found[1], torch.tensor([0.0, 0, 10, 10]))
    assert found[2].isnan().all() or found[2][0] < 1


def test_perspectives_of_images_of_one_row_change_nothing():
    for shape in ((3, 1, 1), (3, 1, 9), (3, 9, 1)):
        images = torch.rand(4, *shape)
        assert torch.equal(transforms.RandomPerspective(1.0, p=1)(images), images)


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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: transforms.RandomAffine(-1), "RandomAffine: degrees must be a number of at least"),
        (lambda: transforms.RandomAffine(0, translate=(0, 2)), "translate must be a pair"),
        (lambda: transforms.RandomAffine(0, scale=(0, 1)), "scale must be a pair"),
        (lambda: transforms.RandomAffine(0, shear=(1, 2, 3)), "shear must be"),
        (lambda: transforms.RandomAffine(0, center=(1,)), "center must be a pair"),
        (lambda: transforms.RandomAffine(0, interpolation="bicubic"), "interpolation must be"),
        (lambda: transforms.RandomRotation(5, expand=True), "expand must be False"),
        (lambda: transforms.RandomPerspective(2), "distortion_scale must be"),
        (lambda: transforms.RandomPerspective(p=-1), "p must be"),
    ],
)
def test_wrong_arguments_of_transforms_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("fill", [2**53 + 1, 2**63 - 1, -(2**63)])
def test_any_integer_may_fill_masks(fill):
    images, masks = torch.zeros(4, 3, 6, 7), torch.ones(4, 6, 7, dtype=torch.int64)
    for step in (transforms.RandomAffine(30, (0.5, 0.5)), transforms.RandomPerspective(1, p=1)):
        compose = transforms.Compose([step], masks=["mask"], mask_fill=fill)
        _, columns = compose(images, {"mask": masks}, samples=np.arange(4))
        assert columns["mask"].unique().tolist() == sorted([1, fill])
