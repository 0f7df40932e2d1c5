"""Boxes go where their corners go, become upright again, and are cut at the edges."""

import math

import numpy as np
import pytest
import torch

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


def test_a_box_that_only_touches_a_crop_is_none():
    crop = transforms.RandomResizedCrop((37, 53), scale=(1, 1), ratio=(0.5, 2))
    for height in range(1, 100):  # the crop is the middle, twice as wide as high
        left, right = 20, 20 + 2 * height
        boxes = [[0, 0, left, height], [right, 0, right + 20, height], [left, 0, right, height]]
        found = move([crop], boxes, height, right + 20)
        assert same(found, [NONE, NONE, [0, 0, 53, 37]]), height


def test_a_box_is_the_smallest_upright_one_of_its_corners():
    def turned(degrees):
        boxes = [[2.0, 4, 6, 6], [0, 0, 10, 10], [0, 0, 1, 1]]
        return move([transforms.RandomRotation((degrees, degrees))], boxes, 10, 10)

    quarter = [[4, 4, 6, 8], [0, 0, 10, 10], [0, 9, 1, 10]]
    assert np.allclose(turned(90), quarter, atol=1e-6)
    first, second, third = turned(45)
    # The corners are (-3, -1), (1, -1), (1, 1) and (-3, 1) from the centre.
    assert np.allclose(first, np.array([-4, -2, 2, 4]) / 2**0.5 + 5)
    assert second == [0, 0, 10, 10]
    assert same(third, NONE)


def test_boxes_keep_their_dtype_and_there_may_be_none():
    compose = transforms.Compose([transforms.RandomResizedCrop(4)], boxes=["boxes"])
    boxes = torch.zeros((5, 0, 4), dtype=torch.float64)
    found = compose(torch.zeros(5, 3, 9, 9), {"boxes": boxes})[1]["boxes"]
    assert (found.shape, found.dtype) == (boxes.shape, boxes.dtype)


def test_a_box_does_not_come_back_from_outside():
    samples = np.arange(100)
    masks = torch.zeros((100, 20, 20), dtype=torch.uint8)
    masks[:, 5:10, :5] = 1
    boxes = torch.tensor([[[0.0, 5, 5, 10]]]).repeat(100, 1, 1)
    shift = transforms.RandomAffine(0, (0.9, 0))
    steps = transforms.Compose([shift, shift], masks=["m"], boxes=["b"], mask_fill=0)
    images = torch.zeros((100, 1, 20, 20), dtype=torch.uint8)
    columns = steps(images, {"m": masks, "b": boxes}, samples=samples)[1]
    is_seen = (columns["m"] > 0).flatten(1).any(1)
    assert 0 < is_seen.sum() < 100
    assert torch.equal(~columns["b"].isnan().any(-1)[:, 0], is_seen)
    for mask, ((x1, y1, x2, y2),) in zip(columns["m"][is_seen], columns["b"][is_seen], strict=True):
        rows, places = mask.nonzero(as_tuple=True)
        assert [places.min(), rows.min(), places.max() + 1, rows.max() + 1] == [x1, y1, x2, y2]


def test_a_margin_around_a_crop_shows_no_box():
    steps = [transforms.RandomResizedCrop(20, scale=(0.1, 0.2)), transforms.CenterCrop(30)]
    assert move(steps, [[0.0, 0, 40, 40]], 40, 40) == [[5, 5, 25, 25]]
