"""Masks go where the images go: with the same random numbers, and by the nearest neighbour."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.nn.functional import interpolate

from memload import transforms

SIDES = st.integers(1, 40)
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


def ids(masks):
    return masks.numpy().astype(np.int64)


def draw_move(data):
    """Return a crop or a resize."""
    size, sharp = data.draw(st.tuples(SIDES, SIDES)), {"antialias": False}
    margin, longest = data.draw(st.integers(0, 5)), data.draw(st.integers(8, 40))
    return data.draw(
        st.sampled_from([
            transforms.CenterCrop(size),
            transforms.RandomCrop(size, margin, pad_if_needed=True),
            transforms.Resize(size, **sharp),
            transforms.Resize(None, max_size=longest, **sharp),
            transforms.RandomResizedCrop(size, scale=(0.2, 1), **sharp),
        ])
    )  # fmt: skip


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 40), st.integers(2, 40), st.integers(0, 1 << 40), st.data())
def test_each_pixel_of_a_mask_lies_below_that_of_the_image(height, width, seed, data):
    """Images and masks of positions, from 1 on. Beside them, there is 0."""
    views, dtype = data.draw(st.integers(1, 2)), data.draw(st.sampled_from(INTEGERS))
    flips = [transforms.RandomHorizontalFlip(), transforms.RandomVerticalFlip()]
    steps = data.draw(st.permutations([draw_move(data), *flips, transforms.GaussianBlur(1)]))
    compose = transforms.Compose(steps, masks=["y", "x"], views=views, mask_fill=0)
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    images = 1 + torch.stack([y, x]).expand(6, 2, height, width)
    columns = {"y": images[:, 0].to(dtype), "x": images[:, 1].to(dtype)}
    samples = np.random.default_rng(seed).permutation(1 << 20)[:9]
    prepared = compose.prepare(samples, seed=seed, epoch=data.draw(st.integers(0, 9)))
    start = data.draw(st.integers(0, 3))
    found, moved = prepared(images.double(), columns, start, start + 6)
    for view in range(views):
        pixels = found[view] if views > 1 else found
        ids = [moved[name][view] if views > 1 else moved[name] for name in ("y", "x")]
        assert {each.dtype for each in ids} == {dtype}
        nearest = torch.stack(ids, 1).double()
        assert nearest.shape == pixels.shape
        inside = (nearest > 0).all(1, keepdim=True).expand_as(pixels)
        assert (nearest - pixels)[inside].abs().max() <= 0.5 + 1e-9 if inside.any() else True
        assert (pixels[~inside] == 0).all()


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
    "step", [transforms.RandomHorizontalFlip(), transforms.RandomResizedCrop(9)]
)
def test_a_transform_that_is_no_list_moves_what_it_is_bound_to(step, make_images):
    images, columns = make_images(), {"mask": make_masks(8, 20, 24), "at": torch.ones(8, 2, 2)}
    expected = transforms.Compose([step], masks=["mask"], points=["at"])(images, columns)
    found = step.bind(masks=["mask"], points=["at"])(images, columns)
    for one, other in zip(
        (found[0], *found[1].values()), (expected[0], *expected[1].values()), strict=True
    ):
        assert torch.equal(one, other)


def test_what_changes_colours_leaves_masks_alone(make_images):
    masks = make_masks(8, 20, 24)
    compose = transforms.Compose(COLOURS, masks=["mask"], views=2)
    columns = compose(make_images(), {"mask": masks})[1]
    assert columns["mask"] is masks


@pytest.mark.parametrize("dtype", INTEGERS)
def test_masks_may_be_of_any_integer_type(dtype):
    masks = make_masks(3, 6, 7, dtype)
    fill = 100 if dtype == torch.int8 else torch.iinfo(dtype).max
    compose = transforms.Compose([transforms.CenterCrop(8)], masks=["mask"], mask_fill=fill)
    found = compose(torch.zeros(3, 1, 6, 7), {"mask": masks})[1]["mask"]
    assert found.dtype == dtype
    assert np.array_equal(ids(found)[:, 1:7, 0:7], ids(masks))
    assert (ids(found)[:, 0] == fill).all()


def test_an_empty_batch_of_masks_stays_empty():
    images, masks = torch.zeros((0, 3, 9, 9), dtype=torch.uint8), make_masks(0, 9, 9)
    found = transforms.train(8).bind(masks=["mask"])(images, {"mask": masks})[1]["mask"]
    assert found.shape == (0, 8, 8)


def test_the_given_masks_are_never_changed(make_images):
    masks = make_masks(8, 20, 24)
    steps = [transforms.RandomCrop(30, pad_if_needed=True), transforms.RandomAffine(30)]
    transforms.Compose(steps, masks=["mask"])(make_images(), {"mask": masks})
    assert torch.equal(masks, make_masks(8, 20, 24))


class Half(transforms.Transform):
    """One that takes every second pixel of images, and of masks if it is told to."""

    def __init__(self, masks):
        self.masks = masks

    def apply(self, batch, drawn):
        columns = batch.columns
        if self.masks:
            columns = columns | {"mask": columns["mask"][:, ::2, ::2]}
        return batch._replace(images=batch.images[:, :, ::2, ::2], columns=columns)


class Shifted(transforms.Transform):
    """A transform of one's own that moves images to the right by 0 to 9 pixels, and what follows."""

    def draw(self, draws, images):
        matrices = np.tile(np.eye(3), (len(draws), 1, 1))
        matrices[:, 0, 2] = -np.floor(10 * draws.uniform(1)[0])
        return {"matrices": matrices}

    def apply(self, batch, drawn):
        shifts = -drawn.array("matrices")[:, 0, 2].astype(int)
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
    compose = transforms.Compose([Half(True), transforms.CenterCrop(6)], masks=["mask"])
    images, columns = compose(masks[:, None], {"mask": masks})
    assert torch.equal(images[:, 0], columns["mask"])


def test_a_function_that_comes_first_may_take_other_layouts():
    masks = make_masks(4, 20, 24)
    steps = [lambda images: images.movedim(3, 1), transforms.RandomCrop(9)]
    images, columns = transforms.Compose(steps, masks=["mask"])(masks[..., None], {"mask": masks})
    assert torch.equal(images[:, 0], columns["mask"])


T = transforms
IMAGES = torch.zeros((2, 3, 8, 9), dtype=torch.uint8)
MASKS = {"m": torch.zeros((2, 8, 9), dtype=torch.uint8)}
CROP = [T.RandomCrop(4)]

WRONG = [
    (lambda: T.Compose([], masks="m"), "Compose: masks must be a list of column names, not 'm'"),
    (lambda: T.Compose([], mask_fill=0.5), "Compose: mask_fill must be an integer, not 0.5"),
    (
        lambda: T.MixUp().bind(masks=["m"]),
        "MixUp cannot mix masks.*Leave MixUp out.*columns=…",
    ),
    (
        lambda: T.Compose(CROP, masks=["m"])(IMAGES),
        r"Compose: columns\['m'\] must be integers \(2, H, W\), since masks names it, not None",
    ),
    (
        lambda: T.Compose(CROP, masks=["m"])(IMAGES, {"m": torch.zeros(2, 8, 9)}),
        r"integers \(2, H, W\).*not a torch.float32 tensor of shape \(2, 8, 9\)",
    ),
    (
        lambda: T.Compose(CROP, masks=["m"])(IMAGES, {"m": IMAGES}),
        r"integers \(2, H, W\).*not a torch.uint8 tensor of shape \(2, 3, 8, 9\)",
    ),
    (
        lambda: T.Compose(CROP, masks=["m"])(IMAGES, {"m": IMAGES[:, 0, :, 1:]}),
        r"columns\['m'\] must be as large as the images, 8×9 pixels, not 8×8. Resize one",
    ),
    (
        lambda: T.Compose(CROP, masks=["m"], mask_fill=256)(IMAGES, MASKS),
        "mask_fill must be from 0 to 255 for the torch.uint8 of 'm', not 256",
    ),
    (
        lambda: T.Compose([lambda images: images[..., 1:]], masks=["m"])(IMAGES, MASKS),
        r"^<lambda>: .*as large as the images, 8×8 pixels, not 8×9.*write a Transform .*masks=\[\]",
    ),
    (
        lambda: T.Compose([Half(False)], masks=["mask"])(IMAGES, {"mask": MASKS["m"]}),
        "Half: .*as large as the images, 4×5 pixels, not 8×9",
    ),
]


@pytest.mark.parametrize(("call", "message"), WRONG)
def test_a_mistake_names_the_column_and_what_was_given(call, message):
    with pytest.raises(ValueError, match=message):
        call()
