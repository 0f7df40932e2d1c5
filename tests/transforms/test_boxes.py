"""Boxes go where their corners go, become upright again, and are cut at the edges."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memload import transforms

NONE = [math.nan] * 4
FLIP = transforms.RandomHorizontalFlip(1)
TURN = transforms.RandomVerticalFlip(1)


def move(steps, boxes, height=8, width=10, **options):
    """Return what becomes of the boxes of one image."""
    compose = transforms.Compose(steps, boxes=["boxes"], **options)
    images = torch.zeros((1, 3, height, width), dtype=torch.uint8)
    return compose(images, {"boxes": torch.tensor([boxes])})[1]["boxes"][0].tolist()


def same(found, expected):
    return np.array_equal(np.array(found), np.array(expected), equal_nan=True)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([FLIP], [5, 2, 9, 4]),
        ([TURN], [1, 4, 5, 6]),
        ([FLIP, TURN], [5, 4, 9, 6]),
        ([transforms.CenterCrop((4, 6))], [0, 0, 3, 2]),
        ([transforms.CenterCrop((12, 14))], [3, 4, 7, 6]),
        ([transforms.Resize((16, 5))], [0.5, 4, 2.5, 8]),
        ([transforms.Resize((16, 20)), transforms.CenterCrop(16), FLIP], [8, 4, 16, 8]),
        ([FLIP, transforms.CenterCrop((4, 6)), transforms.Resize((8, 12))], [6, 0, 12, 4]),
        ([transforms.CenterCrop((4, 6)), transforms.CenterCrop((6, 10))], [2, 1, 5, 3]),
        ([transforms.Normalize("imagenet")], [1, 2, 5, 4]),
    ],
)  # fmt: skip
def test_boxes_follow_crops_resizes_and_flips(steps, expected):
    assert move(steps, [[1.0, 2, 5, 4]]) == [expected]


def test_what_is_no_box_stays_none():
    boxes = [NONE, [1.0, 2, math.nan, 4], [2.0, 2, 4, 4]]
    assert same(move([FLIP], boxes), [NONE, NONE, [6, 2, 8, 4]])


def test_boxes_of_which_nothing_is_left_are_none():
    outside = [[0.0, 0, 2, 8], [8.0, 2, 10, 4], [0.0, 0, 10, 2], [0.0, 6, 10, 8], [3.0, 3, 3, 5]]
    for steps in ([transforms.CenterCrop((4, 6))], [FLIP, transforms.CenterCrop((4, 6)), TURN]):
        assert same(move(steps, outside), [NONE] * 5)


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 1 << 40))
def test_a_box_that_only_touches_a_crop_is_none(seed):
    samples = np.arange(20)
    crop = transforms.RandomResizedCrop((37, 53), scale=(0.1, 0.5))
    y, x = torch.meshgrid(torch.arange(61.0), torch.arange(83.0), indexing="ij")
    positions = torch.stack([y, x]).expand(20, 2, 61, 83)
    masks = {"y": positions[:, 0].byte(), "x": positions[:, 1].byte()}
    # The outermost pixels of a crop are known where it enlarges its box.
    seen = transforms.Compose([crop], masks=["y", "x"])(
        torch.zeros(20, 1, 61, 83), masks, samples=samples, seed=seed
    )[1]
    top, left = (seen[name].flatten(1).amin(1).float() for name in ("y", "x"))
    bottom, right = (seen[name].flatten(1).amax(1).float() + 1 for name in ("y", "x"))
    exact = (bottom - top <= 37) & (right - left <= 53)
    zero = torch.zeros(20)
    beside = [
        torch.stack([zero, zero, left, zero + 61], 1),
        torch.stack([right, zero, zero + 83, zero + 61], 1),
        torch.stack([zero, zero, zero + 83, top], 1),
        torch.stack([zero, bottom, zero + 83, zero + 61], 1),
        torch.stack([left, top, right, bottom], 1),
    ]
    found = transforms.Compose([crop], boxes=["boxes"])(
        torch.zeros(20, 1, 61, 83),
        {"boxes": torch.stack(beside, 1)},
        samples=samples,
        seed=seed,
    )[1]["boxes"][exact]
    assert found[:, :4].isnan().all()
    assert (found[:, 4] == torch.tensor([0, 0, 53, 37])).all()


@settings(deadline=None, max_examples=20)
@given(st.integers(5, 40), st.integers(5, 40), st.integers(0, 1 << 40))
def test_a_box_stays_round_what_was_in_it(height, width, seed):
    rng = np.random.default_rng(seed)
    low = rng.integers(0, (width, height), (6, 2))
    high = rng.integers(low, (width, height)) + 1
    masks = torch.zeros((6, height, width), dtype=torch.uint8)
    for mask, (left, top), (right, bottom) in zip(masks, low, high, strict=True):
        mask[top:bottom, left:right] = 1
    compose = transforms.Compose(
        [
            transforms.RandomHorizontalFlip(),
            transforms.RandomCrop((20, 30), padding=3, pad_if_needed=True),
            transforms.RandomVerticalFlip(),
            transforms.RandomCrop((11, 13)),
        ],
        masks=["mask"],
        boxes=["boxes"],
        mask_fill=0,
    )
    boxes = torch.from_numpy(np.concatenate([low, high], 1)[:, None]).float()
    _, columns = compose(
        torch.zeros(6, 1, height, width),
        {"mask": masks, "boxes": boxes},
        samples=np.arange(6),
        seed=seed,
    )
    for mask, box in zip(columns["mask"], columns["boxes"][:, 0], strict=True):
        y, x = mask.nonzero().unbind(1)
        expected = [x.min(), y.min(), x.max() + 1, y.max() + 1] if len(x) else NONE
        assert same(box.tolist(), [float(edge) for edge in expected])


def test_corners_of_boxes_and_points_go_to_the_same_place(make_images):
    points = torch.rand(8, 5, 2, dtype=torch.float64) * 4 + 8
    boxes = torch.cat([points + 0.5, points + 1.5], 2)
    crop = transforms.RandomResizedCrop((31, 33), scale=(0.9, 1))
    compose = transforms.Compose([crop, FLIP], points=["points"], boxes=["boxes"])
    moved = compose(make_images(), {"points": points, "boxes": boxes}, samples=np.arange(8))[1]
    right_and_top = moved["boxes"][..., [2, 1]] - 0.5
    assert torch.allclose(right_and_top, moved["points"])
    assert moved["boxes"].dtype == torch.float64


def test_an_empty_batch_and_no_boxes_at_all_pass():
    compose = transforms.Compose([transforms.RandomResizedCrop(4)], boxes=["boxes"])
    for shape in ((0, 3, 4), (5, 0, 4)):
        images = torch.zeros(shape[0], 3, 9, 9)
        assert compose(images, {"boxes": torch.zeros(shape)})[1]["boxes"].shape == shape


T = transforms
IMAGES = torch.zeros((2, 3, 8, 9), dtype=torch.uint8)

WRONG = [
    (lambda: T.Compose([], boxes="b"), "Compose: boxes must be a list of column names, not 'b'"),
    (lambda: T.CutMix().bind(boxes=["b"]), "CutMix cannot mix boxes, such as .*columns=…"),
    (
        lambda: T.Compose([], boxes=["b"])(IMAGES, {"b": torch.zeros(2, 4)}),
        r"columns\['b'\] must be a tensor \(2, K, 4\), since boxes names it, not .* \(2, 4\)",
    ),
]


@pytest.mark.parametrize(("call", "message"), WRONG)
def test_a_mistake_names_the_column_and_what_was_given(call, message):
    with pytest.raises(ValueError, match=message):
        call()
