"""Masks and points go where the images go. Masks are of the nearest neighbours."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import interpolate

from memload import transforms

T = transforms
WARP = T.RandomAffine(180, (0.2, 0.3), (0.5, 2.0), (-20.0, 20.0, -9.0, 9.0), "bilinear")
#: Moves whose pixels are means of the nearest ones, so that a slope of the image stays one.
MOVES = [
    T.CenterCrop((30, 60)),
    T.RandomCrop((35, 44), 5),
    T.RandomCrop((60, 70), pad_if_needed=True),
    T.Resize((90, 33), antialias=False),
    T.Resize(None, max_size=41, antialias=False),
    T.RandomResizedCrop((37, 53), antialias=False),
    T.Compose([T.RandomResizedCrop((20, 30), antialias=False), T.CenterCrop((24, 41))]),
    WARP,
    T.RandomAffine(30, interpolation="bilinear", center=[2.0, 7.0]),
    T.RandomRotation((90, 90), "bilinear"),
    T.RandomPerspective(0.6, p=0.7),
    T.RandomApply([WARP]),
    T.RandomChoice([WARP, T.Compose([T.RandomPerspective(), T.RandomVerticalFlip()])]),
]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64]
#: Those that move nothing.
COLOURS = [
    transforms.ColorJitter(0.4, 0.4, 0.4, 0.1),
    transforms.RandomGrayscale(0.5),
    transforms.Cutout(4),
    transforms.RandomErasing(),
    transforms.Normalize("imagenet"),
    torch.nn.AvgPool2d(3, stride=1, padding=1),
    transforms.ToDtype(torch.float32),
]


def make_masks(count, height, width, dtype=torch.uint8, seed=0):
    """Return masks (N, H, W) of ids from 0 to 199, or in 16 bits to 59,999."""
    rng = np.random.default_rng(seed)
    largest = 200 if dtype in (torch.uint8, torch.int8) else 60_000
    ids = rng.integers(0, largest, (count, height, width))
    return torch.from_numpy(ids.astype(str(dtype).removeprefix("torch.")))


@pytest.mark.parametrize("flips_before", [0, 1, 2])
@pytest.mark.parametrize("move", MOVES, ids=lambda move: type(move).__name__)
def test_masks_and_points_are_where_the_image_shows_them(move, flips_before):
    """Images of x, y, and 1. Outside there is 0."""
    x, y = torch.meshgrid(torch.arange(1, 51), torch.arange(1, 42), indexing="xy")
    images = torch.stack([x, y, torch.ones_like(x)]).expand(9, 3, 41, 50)
    steps = [T.RandomHorizontalFlip(), T.RandomVerticalFlip()]
    steps.insert(flips_before, move)
    compose = T.Compose(steps, masks=["x", "y"], points=["at"], mask_fill=0)

    def moved(points):
        columns = {"x": images[:, 0], "y": images[:, 1], "at": points}
        return compose(images.double(), columns, samples=np.arange(9), seed=flips_before)

    shown, _ = moved(torch.zeros(9, 1, 2))
    shown, share_inside = shown[:, :2], shown[:, 2]
    _, columns = moved(shown.flatten(2).mT - 1)
    masks = torch.stack([columns["x"], columns["y"]], 1)
    assert ((masks - shown).abs().amax(1) <= 0.5001)[share_inside > 0.999999].all()
    is_inside = (masks > 0).all(1)
    assert torch.equal(is_inside, (masks > 0).any(1))
    assert (share_inside[is_inside] > 0.0624).all()  # in a corner, where 0 is mixed in twice
    assert (share_inside[~is_inside] < 0.5001).all()
    height, width = shown.shape[2:]
    place = torch.stack(torch.meshgrid(torch.arange(width), torch.arange(height), indexing="xy"))
    distance = (columns["at"].mT.unflatten(2, (height, width)) - place).abs().amax(1)
    # The last pixels of a resized crop are those of its edge, for some pixels.
    is_inner = torch.nn.functional.avg_pool2d(share_inside, 7, 1) > 0.999999
    assert is_inner.flatten(1).any(1).all()
    assert distance[:, 3:-3, 3:-3][is_inner].max() <= 1e-3


@pytest.mark.parametrize("size", [(7, 9), (30, 50), (11, 60), (20, 24), (1, 2), (40, 1)])
def test_resize_is_pillows_and_torchs_nearest(size):
    masks = make_masks(2, 21, 25)  # odd sides have no ties, which these two round either way
    found = transforms.Compose([transforms.Resize(size)], masks=["mask"])(
        torch.zeros(2, 3, 21, 25), {"mask": masks}
    )[1]["mask"]
    pillow = [
        np.array(Image.fromarray(mask.numpy()).resize(size[::-1], Image.Resampling.NEAREST))
        for mask in masks
    ]
    assert np.array_equal(found, pillow)
    assert torch.equal(found, interpolate(masks[:, None], size, mode="nearest-exact")[:, 0])


def test_the_recipes_move_the_masks_of_a_data_set_without_an_argument(make_images):
    images, masks = make_images(), make_masks(8, 20, 24)
    named = transforms.Compose(transforms.train(16).transforms, masks=["mask"])
    expected = named(images, {"mask": masks}, samples=np.arange(8))[1]["mask"]
    bound = transforms.train(16).bind(masks=["mask"])
    found = bound(images, {"mask": masks}, samples=np.arange(8))[1]["mask"]
    assert torch.equal(found, expected)
    assert found.shape == (8, 16, 16)
    evaluated = transforms.evaluate(16).bind(masks=["mask"])(images, {"mask": masks})[1]["mask"]
    assert evaluated.shape == (8, 16, 16)
    unbound = transforms.train(16)(images, {"mask": masks})[1]["mask"]
    assert unbound is masks


def test_lists_that_are_given_stay_when_a_list_is_bound():
    steps, names = [transforms.Resize(4)], {"points": ["p"], "masks": ["m"], "boxes": ["b"]}
    bound = transforms.Compose(steps).bind(**names)
    assert (bound.points, bound.masks, bound.boxes) == (("p",), ("m",), ("b",))
    assert bound.bind(points=["q"], masks=[], boxes=["c"]).masks == ("m",)
    given_lists = transforms.Compose(steps, points=[], masks=["own"]).bind(**names)
    assert (given_lists.points, given_lists.masks, given_lists.boxes) == ((), ("own",), ("b",))
    unbound = transforms.Compose(steps).bind(num_classes=3)
    assert (unbound.points, unbound.masks, unbound.boxes) == (None, None, None)


@pytest.mark.parametrize(
    "step",
    [
        T.RandomHorizontalFlip(),
        T.RandomResizedCrop(9),
        T.RandomApply([T.RandomHorizontalFlip()]),
        T.RandomChoice([T.RandomVerticalFlip(), abs]),
    ],
)
def test_a_transform_that_is_no_list_moves_what_it_is_bound_to(step, make_images):
    images, names = make_images(), {"masks": ["mask"], "points": ["at"], "boxes": ["box"]}
    columns = {"mask": make_masks(8, 20, 24), "at": torch.ones(8, 2, 2)}
    columns["box"] = torch.tensor([2.0, 3, 9, 11]).expand(8, 1, 4)
    expected = T.Compose([step], **names)(images, columns)
    found = step.bind(**names)(images, columns)
    assert not torch.equal(found[1]["box"], columns["box"])
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_what_changes_colours_leaves_masks_alone(make_images):
    masks = make_masks(8, 20, 24)
    compose = transforms.Compose(COLOURS, masks=["mask"], views=2)
    columns = compose(make_images(), {"mask": masks})[1]
    assert columns["mask"] is masks


@pytest.mark.parametrize("dtype", INTEGERS)
def test_masks_may_be_of_any_integer_type(dtype):
    masks = make_masks(4, 6, 7, dtype)
    ends = torch.iinfo(dtype)
    for step in (T.CenterCrop(8), T.RandomAffine(30, (0.5, 0.5)), T.RandomPerspective(1, p=1)):
        for fill in (ends.min, ends.max):
            compose = T.Compose([step], masks=["mask"], mask_fill=fill)
            _, columns = compose(torch.zeros(4, 1, 6, 7), {"mask": masks}, samples=np.arange(4))
            found = columns["mask"]
            assert found.dtype == dtype
            assert {*found.flatten().tolist()} <= {fill, *masks.flatten().tolist()}
            assert fill in found[:, 0].tolist()[0]


def test_the_given_masks_are_never_changed(make_images):
    masks = make_masks(8, 20, 24)
    steps = [transforms.RandomCrop(30, pad_if_needed=True), transforms.RandomAffine(30)]
    transforms.Compose(steps, masks=["mask"])(make_images(), {"mask": masks})
    assert torch.equal(masks, make_masks(8, 20, 24))


class Half(transforms.Transform):
    """One that takes every second pixel of images and masks."""

    def apply(self, batch, drawn):
        columns = {"mask": batch.columns["mask"][:, ::2, ::2]}
        return batch._replace(images=batch.images[:, :, ::2, ::2], columns=columns)


class Shifted(transforms.Transform):
    """A transform of one's own that moves images to the right by 0 to 9 pixels, and what follows."""

    def draw(self, draws, images):
        matrices = np.tile(np.eye(3), (len(draws), 1, 1))
        matrices[:, 0, 2] = -np.floor(10 * draws.uniform(1)[0])
        return {"matrices": matrices}

    def apply(self, batch, drawn):
        shifts = -drawn.on_host("matrices")[:, 0, 2].astype(int)
        moved = torch.zeros_like(batch.images)
        for target, image, shift in zip(moved, batch.images, shifts, strict=True):
            target[..., shift:] = image[..., : image.shape[2] - shift]
        return batch.follow(drawn["matrices"]).with_images(moved)


@pytest.mark.parametrize("in_list", [False, True])
def test_masks_and_points_follow_a_transform_of_ones_own(in_list):
    masks, points = make_masks(9, 20, 24), torch.ones(9, 2, 2)
    transform = transforms.Compose([Shifted()], mask_fill=0) if in_list else Shifted()
    transform.moves_pixels = True
    bound = transform.bind(masks=["mask"], points=["at"])
    moved, columns = bound(masks[:, None], {"mask": masks, "at": points}, samples=np.arange(9))
    assert torch.equal(columns["mask"].where(columns["mask"] < 255, 0), moved[:, 0])
    shift = columns["at"] - points
    assert torch.equal(shift[..., 1], torch.zeros(9, 2))
    assert len(shift[:, 0, 0].unique()) > 3
    assert ((shift >= 0) & (shift < 10)).all()


def test_a_transform_of_ones_own_can_change_images_and_masks(make_images):
    masks = make_masks(8, 20, 24)
    compose = transforms.Compose([Half(), transforms.CenterCrop(6)], masks=["mask"])
    images, columns = compose(masks[:, None], {"mask": masks})
    assert torch.equal(images[:, 0], columns["mask"])


def test_a_function_that_comes_first_may_take_other_layouts():
    masks = make_masks(4, 20, 24)
    steps = [lambda images: images.movedim(3, 1), transforms.RandomCrop(9)]
    images, columns = transforms.Compose(steps, masks=["mask"])(masks[..., None], {"mask": masks})
    assert torch.equal(images[:, 0], columns["mask"])
