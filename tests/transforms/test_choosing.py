"""RandomApply, RandomChoice, and views that differ."""

import pickle

import numpy as np
import pytest
import torch

from memload import transforms
from memload.reading.pipeline import _uses_only_own_tensors

SAMPLES = np.arange(1000, 1300)

UINT8 = torch.zeros(4, 3, 9, 9, dtype=torch.uint8)


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


MIX, CUT = transforms.MixUp(num_classes=60), transforms.CutMix(num_classes=60)
MIX_OR_CUT = transforms.RandomChoice([MIX, CUT])
APPLY_MIX = transforms.RandomApply([MIX], 0.5)
#: Steps that mix inside of others, and the shares of samples that MixUp and CutMix mix.
NESTED = [
    (transforms.RandomApply([MIX], 0.0), 0, 0),
    (transforms.RandomApply([MIX_OR_CUT], 0.4), 0.2, 0.2),
    (transforms.RandomChoice([APPLY_MIX, CUT]), 0.25, 0.5),
    (transforms.RandomChoice([MIX_OR_CUT, abs]), 0.25, 0.25),
    (transforms.RandomChoice([transforms.GaussianBlur(3), CUT], [0.8, 0.2]), 0, 0.2),
    (transforms.RandomApply([transforms.RandomApply([APPLY_MIX])]), 0.125, 0),
    (transforms.RandomApply([abs, APPLY_MIX]), 0.25, 0),
    (transforms.RandomApply([abs, MIX_OR_CUT]), 0.25, 0.25),
]


@pytest.mark.parametrize(("step", "mixup_share", "cutmix_share"), NESTED)
def test_images_and_labels_are_mixed_with_those_before_at_any_depth(
    step, mixup_share, cutmix_share
):
    """Images have the number of their sample everywhere."""
    classes = torch.arange(60)
    images = classes.float()[:, None, None, None].expand(60, 3, 20, 24)
    was_mixed, was_cut = [], []
    for epoch in range(4):
        found, columns = step(images, {"label": classes}, samples=SAMPLES[:60], epoch=epoch)
        labels = columns["label"]
        assert (labels.dtype, tuple(labels.shape)) == (torch.float32, (60, 60))
        kept, other = labels[classes, classes], labels[classes, classes - 1]
        torch.testing.assert_close(kept + other, torch.ones(60))
        expected = kept * classes + other * classes.roll(1)
        torch.testing.assert_close(found.mean((1, 2, 3)), expected, atol=1e-3, rtol=1e-4)
        is_cut = found.flatten(1).amax(1) - found.flatten(1).amin(1) > 0.01
        was_cut.append(is_cut.float().mean())
        was_mixed.append(((kept < 1) & ~is_cut).float().mean())
    assert abs(np.mean(was_mixed) - mixup_share) < 0.1
    assert abs(np.mean(was_cut) - cutmix_share) < 0.1


@pytest.mark.parametrize(
    "step", [APPLY_MIX, transforms.RandomApply([transforms.Cutout(3), CUT], 0.5)]
)
def test_labels_are_shares_in_every_batch(step, make_images):
    for start, count in ((0, 0), (0, 5), *((sample, 1) for sample in range(12))):
        labels = {"label": torch.arange(count)}
        samples = np.arange(start, start + count)
        found = step(make_images(count) / 255, labels, samples=samples)[1]["label"]
        assert (found.dtype, tuple(found.shape)) == (torch.float32, (count, 60))
        torch.testing.assert_close(found.sum(1), torch.ones(count))


@pytest.mark.parametrize("steps", [[], [MIX]])
@pytest.mark.parametrize("channels_last", [True, False])
def test_functions_may_change_images_in_place(steps, channels_last, make_images):
    images, labels = make_images(20).float(), {"label": torch.arange(20)}
    images = images if channels_last else images.contiguous()
    before = images.clone()
    step = transforms.RandomApply([lambda batch: batch.add_(1), *steps], p=0.5)
    found, _ = step(images, labels, samples=SAMPLES[:20])
    assert torch.equal(images, before)
    assert 0 < is_equal(found, before).sum() < 20
    assert found.dtype == torch.float32
    assert found.is_contiguous(memory_format=torch.channels_last)


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


def test_a_change_of_size_or_dtype_is_refused(make_images):
    images = make_images(40)
    for inner in (transforms.Resize(5), transforms.Normalize(0.5, 0.5)):
        with pytest.raises(
            ValueError, match="what RandomApply chooses: shape and dtype must be as"
        ):
            transforms.RandomApply([inner])(images, samples=SAMPLES[:40])


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


@pytest.mark.parametrize(
    ("step", "images", "message"),
    [
        (transforms.TrivialAugmentWide(), torch.zeros(4, 3, 9, 9), "must be uint8"),
        (transforms.RandomErasing(value="random"), UINT8, "must be floating"),
        (transforms.MixUp(num_classes=9), UINT8, "must be floating"),
        (transforms.Cutout(2, fill=(1, 2)), UINT8, "one for each of"),
    ],
)
def test_wrong_images_are_refused_in_the_first_batch(step, images, message):
    never = transforms.RandomApply([step], p=0)
    flip = transforms.RandomHorizontalFlip()
    for outer in (
        never,
        transforms.RandomApply([step, flip], p=0),
        transforms.RandomApply([never, abs], p=0.001),
        transforms.RandomChoice([never, abs]),
    ):
        with pytest.raises(ValueError, match=f"^{type(step).__name__}: .*{message}"):
            outer(images, {"label": torch.arange(4)}, samples=np.arange(4))


def test_functions_may_convert_images_for_those_behind_them(make_images):
    steps = [
        lambda images: (images * 255).byte(),
        transforms.RandomInvert(1),
        lambda images: images / 255,
    ]
    found = transforms.RandomApply(steps, p=1)(make_images() / 255, samples=np.arange(8))
    assert found.dtype == torch.float32
