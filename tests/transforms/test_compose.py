import copy
import pickle
import random
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from memload import transforms

#: One of each kind, so that all that is random is in it; MixUp and CutMix depend on the batch.
ALL = [
    transforms.RandomCrop(18, padding=2),
    transforms.RandomVerticalFlip(),
    transforms.ColorJitter(0.4, 0.4, 0.4, 0.1),
    transforms.RandomGrayscale(0.3),
    transforms.RandomResizedCrop(14),
    transforms.RandomHorizontalFlip(),
    transforms.Cutout(4),
    transforms.Normalize("imagenet"),
    transforms.RandomErasing(),
    transforms.RandomErasing(value="random"),
]


def with_points():
    return transforms.Compose(ALL, points=("points",))


def batch(samples):
    """Return images and points that are functions of the samples' numbers."""
    made = [np.random.default_rng(int(sample)) for sample in samples]
    images = np.stack([rng.integers(0, 256, (20, 24, 3), np.uint8) for rng in made])
    points = np.stack([rng.uniform(0, 20, (3, 2)) for rng in made])
    return torch.from_numpy(images).permute(0, 3, 1, 2), {"points": torch.from_numpy(points)}


def test_seed_epoch_position_and_view_each_change_what_is_drawn():
    (images, columns), numbers = batch(range(16)), np.arange(16)
    views = transforms.Compose(ALL, points=("points",), views=2)
    (first, second), moved = views(images, columns, samples=numbers)
    step = transforms.RandomResizedCrop(9)
    shifted = transforms.Compose([lambda given: given, step])
    pairs = [
        (with_points()(images, columns, samples=numbers, seed=1)[0], first),
        (with_points()(images, columns, samples=numbers, epoch=1)[0], first),
        (second, first),
        moved["points"],
        (shifted(images, samples=numbers), step(images, samples=numbers)),
    ]
    for one, other in pairs:
        assert not (one == other).flatten(1).all(1).any()
    assert torch.equal(first, with_points()(images, columns, samples=numbers)[0])


def test_no_global_generator_is_touched():
    def states():
        numpy = np.random.get_state()
        return [torch.get_rng_state().tolist(), numpy[1].tolist(), random.getstate()]

    before = states()
    with_points()(*batch(range(5)), samples=np.arange(5))
    assert states() == before


def test_threads_and_pickled_copies_make_the_same():
    def part(compose, n):
        return compose(*batch(range(n, n + 4)), samples=np.arange(n, n + 4))[0]

    copied = pickle.loads(pickle.dumps(with_points()))
    with ThreadPoolExecutor(4) as pool:
        for n, found in enumerate(pool.map(lambda n: part(copied, n), range(8))):
            assert torch.equal(found, part(with_points(), n))


class Augmented(torch.utils.data.Dataset[Any]):
    """One whose samples are augmented one at a time, in DataLoader's workers."""

    transform = transforms.RandomCrop(1)

    def __len__(self):
        return 6

    def __getitem__(self, place):
        return self.transform(torch.arange(1 << 16).float().view(1, 1, 256, 256))[0]


def test_without_samples_workers_of_a_dataloader_draw_each_their_own():
    def two_epochs():
        torch.manual_seed(0)  # DataLoader derives the seeds of its workers from it
        loader = torch.utils.data.DataLoader(Augmented(), 1, num_workers=2)
        return [batch.item() for _ in range(2) for batch in loader]

    found = two_epochs()
    assert len(set(found)) == 12
    assert two_epochs() == found


def test_without_samples_each_object_counts_its_own_and_copies_begin_again():
    images, _ = batch(range(8))
    for step in (transforms.train(9), transforms.RandomResizedCrop(9)):
        first, second = step(images), step(images)
        assert torch.equal(first, step(images, samples=np.arange(8)))
        assert torch.equal(second, step(images, samples=np.arange(8, 16)))
        assert not torch.equal(first, second)
        for fresh in (copy.copy(step), copy.deepcopy(step), pickle.loads(pickle.dumps(step))):
            assert torch.equal(fresh(images), first)


def test_a_function_that_comes_first_may_take_other_types_and_layouts(make_images):
    images = make_images(4, 32, 40)
    expected = transforms.CenterCrop(20)(images)
    channels_last = images.permute(0, 2, 3, 1)
    to_front = transforms.Compose([lambda given: given.movedim(3, 1), transforms.CenterCrop(20)])
    assert torch.equal(to_front(channels_last), expected)
    narrow = transforms.Compose([lambda given: (given // 257).byte(), transforms.CenterCrop(20)])
    assert torch.equal(narrow(images.int() * 257), expected)


def test_what_a_step_changes_in_place_the_next_view_does_not_see(make_images):
    images = make_images(2)
    one, other = transforms.Compose([lambda given: given.add_(3)], views=2)(images)
    assert torch.equal(one, other)
    assert torch.equal(images, make_images(2))


def test_columns_come_back_when_they_were_given():
    images, columns = batch(range(3))
    step = transforms.CenterCrop(4)
    assert isinstance(step(images), torch.Tensor)
    assert step(images, columns)[1]["points"] is columns["points"]
    compose = transforms.Compose([step], points=["points"])
    points = compose(images, {"points": torch.tensor([[[10, 8]]] * 3)})[1]["points"]
    assert points.tolist() == [[[0.0, 0.0]]] * 3
    assert points.dtype == torch.float32


def passes_of(compose):
    """Return the first lines of all passes, and the arguments behind them."""
    return re.findall(r"^ {4}([^ )].*)", repr(compose), re.MULTILINE)


def test_repr_shows_what_is_done_in_one_pass():
    assert repr(transforms.evaluate(224)) == (
        "Compose(\n"
        "    Fused(\n"
        "        Resize(size=256, max_size=None, interpolation='bilinear', antialias=True),\n"
        "        CenterCrop(size=(224, 224)),\n"
        "        Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),\n"
        "        ToDtype(dtype=torch.float32, scale=False),\n"
        "    ),\n"
        ")"
    )
    passes = passes_of(transforms.Compose([*ALL, abs], points=["at"], views=2))
    assert " ".join(line.partition("(")[0] for line in passes) == (
        "Fused Fused Fused Cutout Normalize RandomErasing RandomErasing "
        "<built-in function abs>, points= views=2,"
    )


def test_repr_tells_equal_views_once_and_rounds_floats():
    crop, jitter = transforms.CenterCrop(4), transforms.ColorJitter(0.8, contrast=(1 / 3, 2))
    text = repr(transforms.Compose(views=[jitter, *[crop] * 3, jitter]))
    jittered = (
        "ColorJitter(brightness=(0.2, 1.8), contrast=(0.333333, 2.0), saturation=None, hue=None)"
    )
    assert [line.strip() for line in text.splitlines()[1:-1]] == [
        "view 0:", f"{jittered},",
        "views 1 to 3:", "CenterCrop(size=(4, 4)),",
        "view 4:", f"{jittered},",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("steps", "passes"),
    [
        (["crop", "resize", "flip", "pixels"], 1),
        (["flip", "resize", "flip", "crop", "pixels", "flip", "pixels"], 1),
        (["crop", "crop"], 2),
        (["resize", "resize"], 2),
        (["pixels", "crop"], 2),
        (["pixels", "resize", "crop"], 2),
        (["flip", "foreign", "flip"], 3),
    ],
)
def test_what_can_be_fused_is_and_nothing_else(steps, passes):
    kinds = {
        "crop": transforms.CenterCrop(5), "resize": transforms.Resize(9),
        "flip": transforms.RandomHorizontalFlip(),
        "pixels": transforms.ToDtype(torch.float32), "foreign": torch.nn.Identity(),
    }  # fmt: skip
    compose = transforms.Compose([kinds[step] for step in steps])
    assert len(passes_of(compose)) == passes
    assert compose(batch([0])[0]).ndim == 4


@pytest.mark.parametrize("make", [np.array, torch.tensor, lambda numbers: numbers])
def test_mean_and_std_are_a_number_or_one_for_each_channel_of_any_kind(make, make_images):
    images, expected = make_images(), transforms.Normalize([0.25] * 3, [0.5] * 3)(make_images())
    assert torch.equal(transforms.Normalize(make(0.25), make([0.5] * 3))(images), expected)
    assert torch.equal(transforms.Normalize(make([0.25] * 3), make(0.5))(images), expected)


class Sum(transforms.Transform):
    """One that adds a column, and may leave another out."""

    def __init__(self, without=""):
        self.without = without

    def apply(self, batch, drawn):
        kept = {name: column for name, column in batch.columns.items() if name != self.without}
        return batch._replace(columns=kept | {"sum": batch.images.sum((1, 2, 3))})


def test_whatever_is_drawn_masks_that_may_move_are_one_for_each_view():
    compose = transforms.Compose(
        [transforms.RandomApply([transforms.RandomResizedCrop(8)], p=0.3)], masks=["mask"], views=2
    )
    images, masks = torch.zeros((2, 3, 8, 8)), torch.zeros((2, 8, 8), dtype=torch.uint8)
    for sample in range(12):
        _, columns = compose(images, {"mask": masks}, samples=[sample, sample + 1])
        assert [mask.shape for mask in columns["mask"]] == [masks.shape] * 2


def test_verbs_of_a_subclass_are_its_own():
    class Seven(transforms.RandomAffine):
        def apply(self, batch, drawn):
            return batch.with_images(torch.full_like(batch.images, 7))

    images = torch.zeros((2, 3, 8, 8), dtype=torch.uint8)
    for step in (
        Seven(10),
        transforms.Compose([transforms.RandomInvert(), Seven(10)]),
        transforms.RandomApply([Seven(9)], 1),
    ):
        assert (step(images) == 7).all()


def test_columns_that_a_step_adds_or_leaves_out_are_so_in_every_view(make_images):
    images, labels = make_images(), torch.arange(8)
    compose = transforms.Compose([transforms.RandomCrop(4), Sum(without="label")], views=2)
    pictures, columns = compose(images, {"label": labels, "other": labels})
    assert sorted(columns) == ["other", "sum"]
    for picture, total in zip(pictures, columns["sum"], strict=True):
        assert torch.equal(picture.sum((1, 2, 3)), total)


def test_normalize_takes_the_data_sets_statistics_when_it_is_bound(make_images):
    class Own(transforms.Compose):
        pass

    images, own = make_images(), {"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6)}
    views = [[transforms.CenterCrop(8), transforms.Normalize()], [transforms.Normalize()]]
    compose = Own(views=views)
    with pytest.raises(ValueError, match="Normalize has no mean and std"):
        compose(images)
    bound = compose.bind(**own)
    assert (type(bound), compose.views[0][1].mean) == (Own, None)
    plain = transforms.Compose([transforms.CenterCrop(8), transforms.Normalize(*own.values())])
    assert torch.equal(bound(images)[0], plain(images))
    assert torch.equal(bound(images)[1], transforms.Normalize(*own.values())(images))
    for step in (transforms.Normalize("imagenet"), transforms.RandomHorizontalFlip()):
        assert step.bind(**own) is step


@pytest.mark.slow
def test_torch_compile_works_over_the_result_and_round_the_call(make_images):
    images, transform = make_images(), transforms.train(9)
    consumer = torch.compile(lambda given: given * 2, backend="eager", fullgraph=True)
    caller = torch.compile(lambda given, at: transform(given, samples=at) * 2, backend="eager")
    for samples in (np.arange(8), np.arange(8, 16)):
        made = transform(images, samples=samples)
        assert torch.equal(consumer(made), made * 2)
        assert torch.equal(caller(images, samples), made * 2)


def test_ranks_that_only_torchrun_knows_of_draw_differently(monkeypatch):
    many = torch.arange(64 * 3 * 8 * 8).reshape(64, 3, 8, 8).to(torch.uint8)
    first = transforms.RandomCrop(8, 4)(many)
    monkeypatch.setenv("RANK", "1")
    assert not torch.equal(transforms.RandomCrop(8, 4)(many), first)


COLOURS = [
    transforms.ColorJitter(0.4),
    transforms.RandomAutocontrast(),
    transforms.RandomEqualize(),
    transforms.RandomPosterize(4),
    transforms.RandomAdjustSharpness(2),
    transforms.RandomInvert(),
    transforms.RandomSolarize(0.5),
    transforms.AutoAugment("svhn"),
    transforms.TrivialAugmentWide(),
]


@pytest.mark.parametrize("step", COLOURS, ids=lambda step: type(step).__name__)
def test_colours_after_normalize_are_refused(step):
    normalize, erasing = transforms.Normalize("imagenet"), transforms.RandomErasing()
    expected = f"{type(step).__name__} comes after Normalize.* Put it before Normalize"
    for steps in (
        [normalize, step],
        [normalize, transforms.RandomAffine(5), erasing, transforms.RandomApply([step])],
        [transforms.RandomApply([normalize]), step],
        [transforms.train(8), transforms.RandomChoice([erasing, transforms.Compose([step])])],
    ):
        with pytest.raises(ValueError, match=expected):
            transforms.Compose(steps)
    with pytest.raises(ValueError, match=expected):
        transforms.RandomApply([normalize, step])
    with pytest.raises(ValueError, match=expected):
        transforms.Compose([normalize], views=[[erasing], [erasing, step]])


def test_colours_are_taken_where_values_are_from_black_to_white():
    images, _ = batch(range(4))
    normalize, to_float = transforms.Normalize(0.5, 0.25), transforms.ToDtype(torch.float32, True)
    for step in (*COLOURS[:-1], transforms.RandomChoice([normalize, COLOURS[0]])):
        found = transforms.Compose([to_float, step, normalize])(images)
        assert found.dtype == torch.float32
    for between in (lambda images: images * 0.25 + 0.5, Denormalize()):
        back = transforms.Compose([normalize, between, transforms.RandomInvert(1)])(images)
        torch.testing.assert_close(back, 1 - images / 255)
    for step in (transforms.GaussianBlur(3), transforms.RandomGrayscale(1)):
        found = transforms.Compose([normalize, step])(images)
        expected = transforms.Compose([to_float, step, normalize])(images)
        torch.testing.assert_close(
            found, expected, atol=1e-3, rtol=0
        )  # the shares of grey sum up to 0.9999


class Denormalize(transforms.Transform):
    def apply(self, batch, drawn):
        return batch.with_images(batch.images * 0.25 + 0.5)
