"""RandomApply, RandomChoice, and views that differ."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from memload import Loader, transforms
from memload.reading.pipeline import _uses_only_own_tensors

SAMPLES = np.arange(1000, 1300)


def invert(images):
    return 255 - images


def darken(images):
    return images // 2


def is_equal(images, others):
    """Return which images of a batch are equal: bool (N,)."""
    return (images == others).flatten(1).all(1).numpy()


@pytest.mark.parametrize("p", [0.0, 0.25, 0.8, 1.0])
def test_the_drawn_share_of_samples_is_changed_and_no_other(p, make_images):
    images = make_images(300)
    found = transforms.RandomApply([invert], p=p)(images, samples=SAMPLES, seed=3)
    changed = is_equal(found, invert(images))
    assert (changed | is_equal(found, images)).all()
    assert abs(changed.mean() - p) < 4 * max(1e-9, p * (1 - p) / 300) ** 0.5 + 1e-9


def test_the_same_step_draws_anew_at_each_place_inside(make_images):
    images = make_images(200)
    flip = transforms.RandomHorizontalFlip()
    twice = transforms.RandomApply([flip, flip], p=1.0)(images, samples=SAMPLES[:200])
    assert 0.3 < is_equal(twice, images).mean() < 0.7


@pytest.mark.parametrize("p", [None, [1, 2, 5], [0, 0, 1]])
def test_options_are_drawn_by_their_weights(p, make_images):
    images = make_images(300)
    options = [invert, darken, transforms.RandomHorizontalFlip(1.0)]
    found = transforms.RandomChoice(options, p)(images, samples=SAMPLES)
    shares = [
        is_equal(found, changed).mean()
        for changed in (invert(images), darken(images), images.flip(3))
    ]
    weights = np.array(p or [1, 1, 1])
    np.testing.assert_allclose(shares, weights / weights.sum(), atol=0.1)
    assert sum(shares) == pytest.approx(1)


@pytest.mark.parametrize("channels_last", [True, False])
def test_layout_dtype_and_the_images_given_stay(channels_last, make_images):
    images = make_images(20)
    if not channels_last:
        images = images.contiguous()
    before = images.clone()
    found = transforms.RandomApply([lambda batch: batch.add_(1)], p=0.5)(
        images, samples=SAMPLES[:20]
    )
    assert torch.equal(images, before)
    assert found.dtype == torch.uint8
    assert found.is_contiguous(memory_format=torch.channels_last)


def test_mixup_or_cutmix_is_drawn_for_each_sample(make_images):
    images, labels = make_images(200).float(), torch.arange(200) % 7
    mix, cut = transforms.MixUp(num_classes=7), transforms.CutMix(num_classes=7)
    choice = transforms.RandomChoice([mix, cut])
    found, columns = choice(images, {"label": labels}, samples=SAMPLES[:200])
    partners = images.roll(1, 0)
    is_pixel_of_either = ((found == images) | (found == partners)).flatten(1).all(1)
    assert 0.35 < is_pixel_of_either.float().mean() < 0.65
    torch.testing.assert_close(columns["label"].sum(1), torch.ones(200))
    weight = columns["label"].gather(1, labels[:, None])[:, 0]
    mixed = ~is_pixel_of_either
    expected = images * weight[:, None, None, None] + partners * (1 - weight[:, None, None, None])
    torch.testing.assert_close(found[mixed], expected[mixed], atol=0.02, rtol=1e-4)


def test_samples_that_are_not_mixed_have_their_class_alone(make_images):
    images, labels = make_images(200).float(), torch.arange(200) % 7
    step = transforms.RandomApply([transforms.MixUp(num_classes=7)], p=0.3)
    found, columns = step(images, {"label": labels}, samples=SAMPLES[:200])
    same = is_equal(found, images)
    assert 0.55 < same.mean() < 0.85
    one_hot = torch.nn.functional.one_hot(labels, 7).float()
    assert torch.equal(columns["label"][same], one_hot[same])
    assert columns["label"].dtype == torch.float32


MIX, CUT = transforms.MixUp(num_classes=60), transforms.CutMix(num_classes=60)
#: Steps that mix inside of others, and the share of samples that they mix.
NESTED = [
    (transforms.RandomApply([transforms.RandomChoice([MIX, CUT])], 0.4), 0.4),
    (transforms.RandomChoice([transforms.RandomApply([MIX], 1.0), CUT]), 1.0),
    (transforms.RandomChoice([transforms.RandomApply([MIX], 0.5), CUT]), 0.75),
    (transforms.RandomChoice([transforms.RandomChoice([MIX, CUT]), darken]), 0.5),
    (transforms.RandomApply([transforms.RandomApply([transforms.RandomApply([MIX])])]), 0.125),
    (transforms.RandomApply([darken, transforms.RandomApply([MIX], 0.8)], 0.5), 0.4),
    (transforms.RandomApply([darken, transforms.RandomChoice([MIX, CUT])], 0.5), 0.5),
]


@pytest.mark.parametrize(("step", "share"), NESTED)
def test_partners_are_the_samples_before_at_any_depth(step, share, make_images):
    classes = torch.arange(60)
    mixed = []
    for epoch in range(4):
        images = make_images(60).float()
        _, columns = step(images, {"label": classes}, samples=SAMPLES[:60], epoch=epoch)
        labels = columns["label"]
        assert (labels.dtype, tuple(labels.shape)) == (torch.float32, (60, 60))
        kept, other = labels[classes, classes], labels[classes, classes - 1]
        torch.testing.assert_close(kept + other, torch.ones(60))
        mixed.append((kept < 1).float().mean().item())
    assert abs(np.mean(mixed) - share) < 0.13


@pytest.mark.parametrize(
    "step",
    [
        transforms.RandomApply([MIX], 0.3),
        transforms.RandomApply([MIX], 0.0),
        transforms.RandomChoice([transforms.RandomErasing(), CUT], [0.8, 0.2]),
        transforms.RandomApply([transforms.RandomChoice([CUT, transforms.Cutout(3)])], 0.5),
    ],
    ids=repr,
)
def test_labels_are_shares_in_every_batch(step, make_images):
    for count in (0, *[1] * 12, 5):
        images, labels = make_images(count).float(), torch.arange(count) % 7
        start = torch.randint(1000, (1,), generator=torch.Generator().manual_seed(count)).item()
        found = step(images, {"label": labels}, samples=np.arange(start, start + count))[1]["label"]
        assert (found.dtype, tuple(found.shape)) == (torch.float32, (count, 60))
        torch.testing.assert_close(found.sum(1), torch.ones(count))


class Own(transforms.Transform):
    """A transform of one's own whose settings have any names."""

    def __init__(self):
        self.movement = 3
        self.mixes_samples = self.unmixed = self.mix = self.steps = "no"

    def apply(self, batch, drawn):
        return batch.with_images(255 - batch.images)


def test_settings_of_a_transform_of_ones_own_may_have_any_names(make_images):
    images, masks = make_images(10), torch.zeros(10, 20, 24, dtype=torch.uint8)
    for step in (Own(), transforms.RandomApply([Own()], 1.0), transforms.RandomChoice([Own()])):
        compose = transforms.Compose([step], masks=["mask"])
        found, columns = compose(images, {"mask": masks}, samples=range(10))
        assert torch.equal(found, invert(images))
        assert torch.equal(columns["mask"], masks)


class Renamed(transforms.Transform):
    """A transform of one's own that returns other columns."""

    def apply(self, batch, drawn):
        return batch._replace(columns={"number": batch.columns["label"]})


def test_other_columns_are_refused(make_images):
    columns = {"label": torch.arange(40)}
    message = "what RandomApply chooses: the columns must be as before, label, not number"
    with pytest.raises(ValueError, match=message):
        transforms.RandomApply([Renamed()])(make_images(40), columns, samples=SAMPLES[:40])


@pytest.mark.parametrize("in_compose", [True, False])
def test_masks_points_and_boxes_of_a_data_set_follow(in_compose, make_images):
    """A Loader calls bind with their names."""
    images = make_images(60)
    columns = {
        "mask": images[:, 0].contiguous(),
        "point": torch.tensor([[3.0, 5.0]]).expand(60, 1, 2),
        "box": torch.tensor([[2.0, 3.0, 9.0, 11.0]]).expand(60, 1, 4),
    }
    flip = transforms.RandomHorizontalFlip(1.0)
    for step in (transforms.RandomApply([flip]), transforms.RandomChoice([flip, invert])):
        whole = transforms.Compose([step]) if in_compose else step
        bound = whole.bind(masks=["mask"], points=["point"], boxes=["box"])
        found, moved = bound(images, columns, samples=SAMPLES[:60])
        flipped = is_equal(found, images.flip(3))
        assert 0.3 < flipped.mean() < 0.7
        expected = torch.where(torch.from_numpy(flipped)[:, None, None], found[:, 0], images[:, 0])
        assert torch.equal(moved["mask"], expected)
        assert moved["point"][:, 0, 0].tolist() == np.where(flipped, 20.0, 3.0).tolist()
        assert moved["box"][:, 0, 0].tolist() == np.where(flipped, 15.0, 2.0).tolist()


def test_a_change_of_size_or_dtype_is_refused(make_images):
    images = make_images(40)
    for inner in (transforms.Resize(5), transforms.Normalize(0.5, 0.5)):
        with pytest.raises(
            ValueError, match="what RandomApply chooses: shape and dtype must be as"
        ):
            transforms.RandomApply([inner])(images, samples=SAMPLES[:40])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: transforms.RandomApply(None), "^RandomApply: transforms .*not None. Write"),
        (lambda: transforms.RandomApply([]), "^RandomApply: transforms must be a list of at leas"),
        (
            lambda: transforms.RandomApply(transforms.RandomInvert()),
            r"^RandomApply: transforms must be a list .*not RandomInvert\(p=0.5\)",
        ),
        (lambda: transforms.RandomApply([invert], p=1.5), "RandomApply: p must be a number from 0"),
        (
            lambda: transforms.RandomChoice([]),
            "RandomChoice: transforms must be a list of at least",
        ),
        (lambda: transforms.RandomChoice([invert], p=[1, 2]), "p must be 1 numbers of at least 0"),
        (lambda: transforms.RandomChoice([invert], p=[0]), "not all 0"),
        (lambda: transforms.RandomChoice([invert], p=0.5), "p must be 1 numbers .*, not 0.5"),
        (lambda: transforms.RandomChoice([invert], p=[-1]), r"p must be 1 numbers .*\[-1\]"),
        (lambda: transforms.RandomChoice([3]), "Compose got 3"),
        (lambda: transforms.Compose(views=[]), "views must be an integer of at least 1, or a list"),
        (lambda: transforms.Compose(views=[3]), "Compose got 3"),
    ],
)
def test_wrong_arguments_are_told(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def test_repr_and_pickles_have_what_is_inside(make_images):
    step = transforms.Compose([
        transforms.RandomApply([transforms.RandomGrayscale()], p=0.2),
        transforms.RandomChoice([transforms.Cutout(3), transforms.RandomHorizontalFlip()]),
    ])  # fmt: skip
    assert "RandomApply([RandomGrayscale(p=0.1)], p=0.2)" in repr(step)
    assert "RandomChoice([Cutout(" in repr(step)
    images = make_images(30)
    copy = pickle.loads(pickle.dumps(step))
    expected = step(images, samples=SAMPLES[:30], seed=5)
    assert torch.equal(copy(images, samples=SAMPLES[:30], seed=5), expected)


# ---------------------------------------------------------------------------- views that differ


def test_each_view_has_its_own_transforms_and_size(make_images):
    images, samples = make_images(12), SAMPLES[:12]
    large, small = transforms.RandomResizedCrop(10), transforms.RandomResizedCrop(6)
    step = transforms.Compose(
        [transforms.RandomGrayscale(0.5)], views=[[large], transforms.Compose([small]), small]
    )
    views = step(images, samples=samples, seed=2)
    assert [tuple(view.shape) for view in views] == [(12, 3, side, side) for side in (10, 6, 6)]
    assert not torch.equal(views[1], views[2])
    again = step.prepare(samples, seed=2)
    for start in (0, 5):
        parts = again(images[start : start + 5], None, start, start + 5)
        for part, view in zip(parts, views, strict=True):
            assert torch.equal(part, view[start : start + 5])


def test_a_loader_fills_in_statistics_in_every_view(make_dataset):
    index = make_dataset(rows=(9,), shape=(8, 8, 3), columns={"label": np.arange(9) % 3})
    normalize = transforms.Normalize(0.5, 0.25)
    step = transforms.Compose(views=[[normalize], [transforms.RandomCrop(4), normalize]])
    (one, other), labels = next(iter(Loader(Path(index.path), 9, transform=step, device="cpu")))
    assert (tuple(one.shape), tuple(other.shape)) == ((9, 3, 8, 8), (9, 3, 4, 4))
    assert labels.tolist() == (np.arange(9) % 3).tolist()


def test_functions_of_the_users_are_found_inside():
    flip, own = transforms.RandomHorizontalFlip(), transforms.RandomApply([invert])
    for step, is_own in (
        (None, True),
        (transforms.Compose([flip]), True),
        (transforms.Compose([transforms.RandomApply([flip])]), True),
        (invert, False),
        (transforms.Compose([flip, own]), False),
        (transforms.RandomChoice([flip, own]), False),
        (transforms.Compose([flip], views=[[flip], [invert]]), False),
    ):
        assert _uses_only_own_tensors(step) == is_own


@pytest.mark.parametrize("p", [0.0, 0.001])
def test_images_of_a_wrong_dtype_are_refused_in_the_first_batch(p, make_images):
    augment, flip = transforms.TrivialAugmentWide(), transforms.RandomHorizontalFlip()
    images = make_images(4) / 255
    for steps in ([augment], [augment, flip], [transforms.RandomApply([augment, flip]), abs]):
        with pytest.raises(ValueError, match="TrivialAugmentWide: images must be uint8"):
            transforms.RandomApply(steps, p)(images, samples=np.arange(4))
    # Behind others, images may be different: these are converted before.
    convert = [lambda images: (images * 255).byte(), augment, lambda images: images / 255]
    found = transforms.RandomApply(convert, p=1)(images, samples=np.arange(4))
    assert found.dtype == torch.float32


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (transforms.RandomErasing(value="random"), "RandomErasing: images must be floating"),
        (transforms.Cutout(2, fill=(1, 2)), "Cutout: fill must be one number, or one for each of"),
        (transforms.MixUp(num_classes=9), "MixUp: images must be floating"),
    ],
)
def test_images_that_cannot_be_painted_or_mixed_are_refused_in_the_first_batch(
    transform, message, make_images
):
    images, labels = make_images(4), torch.arange(4)
    never = transforms.RandomApply([transform], p=0)
    for step in (never, transforms.RandomApply([never]), transforms.RandomChoice([never, abs])):
        with pytest.raises(ValueError, match=message):
            step(images, {"label": labels}, samples=np.arange(4))
    cut = transforms.RandomApply([transforms.CutMix(num_classes=9)], p=1)
    assert cut(images, {"label": labels}, samples=np.arange(4))[0].dtype == torch.uint8


def test_functions_before_what_mixes_may_change_images_in_place(make_images):
    images, labels = make_images(20).float(), torch.arange(20) % 7
    before, mix = images.clone(), transforms.MixUp(num_classes=7)
    step = transforms.RandomApply([lambda batch: batch.add_(1), mix], p=0.5)
    found, _ = step(images, {"label": labels}, samples=SAMPLES[:20])
    assert torch.equal(images, before)
    assert 0 < is_equal(found, before).sum() < 20
