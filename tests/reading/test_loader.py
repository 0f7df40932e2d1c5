import functools
import json
import math
import pickle
import re
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

from memload import (
    Loader,
    MemloadError,
    MemmapDataset,
    RepeatedSampler,
    SequentialSampler,
    ShuffledSampler,
    ThreadPrefetcher,
    WeightedSampler,
    transforms,
)
from memload.machine import available_cores
from memload.reading.pipeline import make_pipeline
from memload.transforms import (
    Compose,
    MixUp,
    RandomHorizontalFlip,
    RandomResizedCrop,
    ToDtype,
)

SIZE, HEIGHT, WIDTH = 23, 4, 6

pytestmark = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"  # of fork, from Python 3.12 on
)
on_threads = pytest.mark.parametrize("num_threads", [0, 1, 3])


_shared: list[MemmapDataset] = []


@pytest.fixture(scope="module", autouse=True)
def path(
    write_dataset: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """Samples in three shards, whose column ``number`` says which they are."""
    index = write_dataset(
        tmp_path_factory.mktemp("shared"),
        rows=(9, 8, 6),
        shape=(HEIGHT, WIDTH, 3),
        columns={"label": np.arange(SIZE) % 3, "number": np.arange(SIZE)},
    )
    _shared.append(MemmapDataset(index.path, columns=["number"]))
    yield index.path
    _shared.clear()


def make(batch_size: int = 4, **options: Any) -> Loader:
    """Return a Loader of the shared data set."""
    return Loader(_shared[0], batch_size, **options)


def visits(loader: Loader) -> list[list[int]]:
    """Return the samples of every batch of an epoch."""
    return [batch.number.tolist() for batch in loader]


def flat(batches: list[list[int]]) -> list[int]:
    return [number for batch in batches for number in batch]


def shuffled(epoch: int, seed: int = 0) -> list[int]:
    return ShuffledSampler(SIZE, seed=seed).take(epoch, np.arange(SIZE)).tolist()  # type: ignore[no-any-return]


class InOrder:
    """A user's own unshuffled order, which notes the positions that it is asked for."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.asked: list[tuple[int, list[int]]] = []

    def __len__(self) -> int:
        return self.size

    def take(self, epoch: int, positions: np.ndarray) -> Any:
        self.asked.append((epoch, positions.tolist()))
        return positions


# Batches


@on_threads
@pytest.mark.parametrize("batch_size", [1, 5, 100])
def test_batches_are_the_samples_of_the_data_set_in_order(
    path: Path, batch_size: int, num_threads: int
) -> None:
    dataset = MemmapDataset(path, columns=["label"]).subset([5, 3, 3, 22, *range(SIZE)])
    batches = list(Loader(dataset, batch_size, num_threads=num_threads))
    assert [len(batch.images) for batch in batches] == [
        min(batch_size, len(dataset) - start) for start in range(0, len(dataset), batch_size)
    ]
    for batch in batches:
        assert (batch.images.dtype, batch.labels.dtype) == (torch.uint8, torch.int64)
        assert batch.images.permute(0, 2, 3, 1).is_contiguous()
    images = torch.cat([batch.images for batch in batches])
    assert torch.equal(images, torch.stack([image for image, _ in dataset]))
    labels = torch.cat([batch.labels for batch in batches])
    assert labels.tolist() == [label for _, label in dataset]


def test_columns_are_those_asked_for(path: Path, make_dataset: Callable[..., Any]) -> None:
    def fields(dataset: Any, **options: Any) -> tuple[str, ...]:
        return tuple(next(iter(Loader(dataset, 2, **options)))._fields)

    assert fields(path) == fields(path, columns="all") == ("images", "labels", "number")
    assert fields(path, columns=["label"]) == ("images", "labels")
    assert fields(path, columns=["number", "label"]) == ("images", "number", "labels")
    assert fields(path, columns=[]) == ("images",)
    assert fields(MemmapDataset(path, columns=["number"])) == ("images", "number")
    bare = make_dataset("bare.bin", columns={}, classes=None)
    assert fields(bare.path) == ("images",)


def test_the_numbers_of_samples_come_as_a_column(path: Path) -> None:
    part = MemmapDataset(path)[3:]
    for batch in Loader(part, 7, shuffle=True, columns=["label", "index"], device="cpu"):
        assert (batch._fields, batch.index.dtype) == (("images", "labels", "index"), torch.int64)
        assert torch.equal(batch.images.permute(0, 2, 3, 1), part.gather(batch.index))
        assert batch.labels.tolist() == ((batch.index + 3) % 3).tolist()


def test_a_loader_and_its_batches_can_be_pickled(path: Path) -> None:
    columns = ["number", "label"]
    loader = Loader(path, 4, shuffle=True, seed=2, columns=columns, cache_bytes="5GB")
    batch = next(iter(loader))
    copied = pickle.loads(pickle.dumps(loader))
    assert "feed='auto', cache_bytes=5_000_000_000,\n" in repr(copied)
    assert copied.state_dict() == loader.state_dict()
    assert flat(visits(copied)) == shuffled(0, seed=2)[4:]
    again = pickle.loads(pickle.dumps(batch))
    assert again._fields == ("images", "number", "labels")
    assert all(torch.equal(one, other) for one, other in zip(batch, again, strict=True))


@on_threads
def test_a_batch_that_is_held_is_never_overwritten(num_threads: int) -> None:
    loader = make(2, shuffle=True, num_threads=num_threads)
    held = [batch for _ in range(20) for batch in loader]
    assert len({batch.images.data_ptr() for batch in held}) == len(held)
    for batch in held:
        pixels = loader.dataset.gather(batch.number)
        assert torch.equal(batch.images.permute(0, 2, 3, 1), pixels)


def test_static_buffers_are_the_same_in_all_epochs(path: Path) -> None:
    options: Any = {"shuffle": True, "drop_last": True, "columns": ["number"]}
    loader, reference = Loader(path, 4, static_buffers=True, **options), Loader(path, 4, **options)
    first = next(iter(loader))  # an early exit
    loader.set_epoch(0)
    for _ in range(3):
        for batch, expected in zip(loader, reference, strict=True):
            assert batch.images.data_ptr() == first.images.data_ptr()
            assert batch.number.data_ptr() == first.number.data_ptr()
            assert torch.equal(first.images, expected.images)  # what a captured graph would read
            assert torch.equal(first.number, expected.number)


def test_static_buffers_need_batches_of_one_shape() -> None:
    with pytest.raises(ValueError, match=r"static_buffers needs batches of one size"):
        make(static_buffers=True)
    batches = iter(make(1, batch_sampler=[[1, 2], [3]], static_buffers=True))
    next(batches)
    with pytest.raises(ValueError, match=r"^static_buffers: a batch has tensors of \(1, 3, 4, 6\)"):
        next(batches)


def test_static_buffers_need_one_size_in_all_epochs() -> None:
    crop = RandomResizedCrop(lambda epoch: 3 + epoch)
    loader = make(5, transform=crop, static_buffers=True, drop_last=True)
    assert [batch.images.shape[2:] for batch in loader] == [(3, 3)] * 4
    with pytest.raises(ValueError, match=r"^static_buffers: a batch has tensors of \(5, 3, 4, 4\)"):
        next(iter(loader))


# Ranks


@pytest.mark.filterwarnings("ignore:drop_last:UserWarning")  # if it leaves nothing of an epoch
@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, SIZE),
    batch_size=st.integers(1, 9),
    ranks=st.integers(1, 12),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
)
def test_ranks_share_an_epoch(
    size: int, batch_size: int, ranks: int, drop_last: bool, shuffle: bool
) -> None:
    dataset, of_ranks = _shared[0].subset(range(size)), []
    for rank in range(ranks):
        loader = Loader(
            dataset,
            batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            rank=rank,
            num_replicas=ranks,
            num_threads=0,
        )
        for _ in range(2):
            batches = visits(loader)
            assert len(batches) == len(loader)
            assert all(1 <= len(batch) <= batch_size for batch in batches)
        of_ranks.append(batches)
    sizes = [[len(batch) for batch in batches] for batches in of_ranks]
    everything = [number for batches in of_ranks for number in flat(batches)]
    if drop_last:
        assert all(own == [batch_size] * (size // (batch_size * ranks)) for own in sizes)
        assert len(set(everything)) == len(everything)
    elif shuffle:
        assert all(own == sizes[0] for own in sizes)
        assert set(everything) == set(range(size))
        assert len(everything) < size + ranks
    else:
        assert sorted(everything) == list(range(size))
        totals = [sum(own) for own in sizes]
        assert max(totals) - min(totals) <= 1


@pytest.mark.parametrize("even", [False, True])
def test_an_order_of_ones_own_says_whether_ranks_are_even(even: bool) -> None:
    order: Any = InOrder(12)
    if even:
        order.even_ranks = True
    loaders = [make(2, sampler=order, rank=rank, num_replicas=5) for rank in range(5)]
    of_ranks = [flat(visits(loader)) for loader in loaders]
    assert [len(visits(loader)) for loader in loaders] == [len(loader) for loader in loaders]
    if even:
        assert [len(numbers) for numbers in of_ranks] == [3] * 5
    else:
        assert sorted(flat(of_ranks)) == list(range(12))


def test_ranks_are_those_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = make()
    assert (loader.rank, loader.num_replicas) == (0, 1)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert (loader.rank, loader.num_replicas) == (2, 3)
    explicit = make(rank=0, num_replicas=2)
    assert (explicit.rank, explicit.num_replicas) == (0, 2)
    assert make().num_threads == min(8, available_cores())
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")  # which share the cores of this host
    assert make().num_threads == 1


# Epochs


@settings(max_examples=60, deadline=None)
@given(
    first=st.tuples(st.integers(1, 7), st.integers(1, 4), st.sampled_from([0, 2])),
    then=st.tuples(st.integers(1, 7), st.integers(1, 4), st.sampled_from([0, 1, 3])),
    shuffle=st.booleans(),
    epoch=st.integers(0, 2),
    stop=st.integers(0, SIZE),
)
def test_resuming_gives_exactly_the_samples_that_are_left(
    first: tuple[int, int, int], then: tuple[int, int, int], shuffle: bool, epoch: int, stop: int
) -> None:
    def loaders(batch_size: int, ranks: int, num_threads: int) -> list[Loader]:
        options: Any = {"shuffle": shuffle, "seed": 1, "num_threads": num_threads}
        return [make(batch_size, rank=rank, num_replicas=ranks, **options) for rank in range(ranks)]

    seen: list[int] = []
    for loader in loaders(*first):
        loader.set_epoch(epoch)
        iterator: Any = iter(loader)
        steps = min(stop, SIZE // (first[0] * first[1]))  # whole steps, as ranks stop together
        for _ in range(steps):
            seen += next(iterator).number.tolist()
        state = json.loads(json.dumps(loader.state_dict()))
        assert (state["epoch"], state["samples_seen"]) == (epoch, steps * first[0] * first[1])
        iterator.close()
    left: list[int] = []
    for loader in loaders(*then):
        loader.load_state_dict(state)
        loader.set_epoch(epoch)  # that one, even if nothing is left of it
        left += flat(visits(loader))
        following = loader.state_dict()
        assert (following["epoch"], following["samples_seen"]) == (epoch + 1, 0)
    assert set(seen) | set(left) == set(range(SIZE))
    assert len(left) - (SIZE - len(seen)) in (range(then[1]) if shuffle else [0])
    if then[1] == 1:
        order = shuffled(epoch, seed=1) if shuffle else list(range(SIZE))
        assert left == order[len(seen) :]


@pytest.mark.parametrize("num_threads", [0, 2])
def test_a_size_that_grows_is_resumed_in_another_process(
    num_threads: int, in_forked_child: Callable[..., Any]
) -> None:
    def size(epoch: int) -> int:
        return 3 + 2 * epoch

    crop = Compose([RandomResizedCrop(size), RandomHorizontalFlip(alternate=True)])
    options: Any = {"shuffle": True, "seed": 3, "transform": crop, "num_threads": num_threads}
    whole = make(4, **options)
    epochs = [[batch.images for batch in whole] for _ in range(3)]
    assert [epoch[0].shape[2:] for epoch in epochs] == [(3, 3), (5, 5), (7, 7)]
    stopped = make(4, **options)
    stopped.set_epoch(1)
    batches = iter(stopped)
    for expected in epochs[1][:2]:
        assert torch.equal(next(batches).images, expected)
    state = stopped.state_dict()
    batches.close()

    def resumed() -> list[list[np.ndarray]]:
        loader = make(4, **options)
        loader.load_state_dict(state)
        return [[batch.images.numpy() for batch in loader] for _ in range(2)]

    for found, left in zip(in_forked_child(resumed), (epochs[1][2:], epochs[2]), strict=True):
        assert len(found) == len(left)
        assert all(np.array_equal(*both) for both in zip(found, left, strict=True))


def test_a_loader_whose_size_grows_can_be_pickled() -> None:
    loader = make(5, transform=RandomResizedCrop(functools.partial(max, 3)))  # of a module
    batches = iter(loader)
    next(batches)
    copy = pickle.loads(pickle.dumps(loader))
    assert torch.equal(next(iter(copy)).images, next(batches).images)


def test_an_order_is_asked_only_for_what_a_rank_has_not_seen() -> None:
    order = InOrder(SIZE)
    loader = make(sampler=order, rank=1, num_replicas=2, num_threads=0)
    loader.load_state_dict({**loader.state_dict(), "epoch": 3, "samples_seen": 8})
    assert order.asked == []
    batches = visits(loader)
    assert batches == [[12, 13, 14, 15], [19, 20, 21, 22]]
    assert order.asked == [(3, flat(batches))]


@pytest.mark.parametrize("kind", ["sampler", "batch_sampler"])
def test_a_users_sampler_is_told_every_epoch_and_resumed(kind: str) -> None:
    numbers = DistributedSampler(_shared[0], num_replicas=1, rank=0, seed=1)
    orders = []
    for epoch in range(2):
        numbers.set_epoch(epoch)
        orders.append(list(numbers))

    def own(batch_size: int) -> Loader:
        if kind == "sampler":
            return make(batch_size, sampler=numbers)
        return make(1, batch_sampler=BatchSampler(numbers, batch_size, False))

    loader = own(4)
    assert flat(visits(loader)) == orders[0] != orders[1]
    iterator = iter(loader)
    seen = [next(iterator).number.tolist() for _ in range(2)]
    state = loader.state_dict()
    for batch_size in (4, 5, 3):
        other = own(batch_size)
        other.load_state_dict(state)
        assert flat(seen) + flat(visits(other)) == orders[1]
    del iterator


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_state_after_the_last_batch_goes_on_with_the_next_epoch(drop_last: bool) -> None:
    loader, other = (make(5, shuffle=True, drop_last=drop_last) for _ in range(2))
    iterator = iter(loader)
    for _ in range(len(loader)):
        next(iterator)
    other.load_state_dict(loader.state_dict())
    assert list(iterator) == []
    assert flat(visits(other)) == flat(visits(loader))
    assert other.state_dict() == loader.state_dict()
    assert other.state_dict()["epoch"] == 2


def test_epochs_advance_by_themselves_and_set_epoch_chooses_one() -> None:
    loader = make(5, shuffle=True, seed=2)
    iter(loader)  # an epoch begins with its first batch
    assert flat(visits(loader)) == shuffled(0, seed=2)
    assert flat(visits(loader)) == shuffled(1, seed=2)
    loader.set_epoch(np.int64(7))  # type: ignore[arg-type]
    state = json.loads(json.dumps(loader.state_dict()))
    assert (state["epoch"], state["samples_seen"]) == (7, 0)
    assert flat(visits(loader)) == shuffled(7, seed=2)
    for epoch, first in ((7, 10), (3, 0)):  # an epoch that was resumed stays where it is
        loader.load_state_dict({**state, "samples_seen": 10})
        loader.set_epoch(epoch)
        assert flat(visits(loader)) == shuffled(epoch, seed=2)[first:]
    with pytest.raises(ValueError, match=r"^epoch must be an integer of at least 0, not -1"):
        loader.set_epoch(-1)


@on_threads
def test_the_state_is_that_of_the_iterator_that_gave_a_batch_last(num_threads: int) -> None:
    def position() -> tuple[int, int]:
        state = loader.state_dict()
        return state["epoch"], state["samples_seen"]

    loader = make(shuffle=True, num_threads=num_threads)
    first = iter(loader)
    next(first)
    assert position() == (0, 4)
    second = iter(loader)
    assert position() == (1, 0)
    next(first)
    assert position() == (0, 8)
    next(second)
    assert position() == (1, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fingerprint": "0" * 64}, "its fingerprint is "),
        ({"seed": 5}, "its seed is 5, but this Loader's is 0"),
        (
            {"order": "ListWithSeed(seed=6)"},
            r"its order is .*this Loader's is 'ListWithSeed\(seed=5",
        ),
        ({"epoch": "3"}, "state: epoch must be an integer"),
        ({"samples_seen": -1}, "state: samples_seen must be an integer"),
    ],
    ids=str,
)
def test_a_state_that_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    loader = make(sampler=ListWithSeed(5))
    before = loader.state_dict()
    with pytest.raises(ValueError, match=message):
        loader.load_state_dict({**before, **change})
    with pytest.raises(ValueError, match=r"state has no .*samples_seen"):
        loader.load_state_dict({"seed": 0})
    with pytest.raises(TypeError, match="state is a list"):
        loader.load_state_dict([])  # type: ignore[arg-type]
    assert loader.state_dict() == before
    weighted, other = (make(sampler=WeightedSampler(weights)) for weights in ([1, 2], [1, 3]))
    with pytest.raises(ValueError, match="its order is 'WeightedSampler"):
        weighted.load_state_dict(other.state_dict())


class ListWithSeed(list[int]):
    """A user's own sampler with a seed, such as a DistributedSampler."""

    def __init__(self, seed: int) -> None:
        super().__init__([1, 2, 3])
        self.seed = seed


# Orders


@pytest.mark.parametrize(
    "sampler",
    [
        [4, 2, 2, -1],
        np.array([4, 2, 2, 22]),
        torch.tensor([4, 2, 2, 22]),
        SubsetRandomSampler([4, 2, 22], torch.Generator().manual_seed(0)),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_any_iterable_of_numbers_is_an_order(sampler: Any) -> None:
    loader = make(3, sampler=sampler)
    batches = visits(loader)
    assert len(batches) == len(loader) == math.ceil(len(sampler) / 3)
    assert sorted(flat(batches)) == sorted(int(number) % SIZE for number in sampler)
    full = make(3, sampler=sampler, drop_last=True)
    assert [len(batch) for batch in visits(full)] == [3] == [3] * len(full)
    with pytest.raises(TypeError, match=r"^sampler is a .*, which gives its numbers only once"):
        make(1, sampler=iter(sampler))


def test_a_batch_sampler_makes_the_batches() -> None:
    loader = make(1, batch_sampler=[[3], [5, 1], [], [2, 2, 2]])
    assert visits(loader) == [[3], [5, 1], [2, 2, 2]]
    assert len(loader) == 4
    with pytest.raises(
        TypeError, match=r"^batch_sampler is a generator, which gives its numbers o"
    ):
        make(1, batch_sampler=([number] for number in range(5)))


class Wrong(InOrder):
    """An order that gives something else than one integer for each position."""

    def __init__(self, taken: Any) -> None:
        super().__init__(SIZE)
        self.taken = taken

    def take(self, epoch: int, positions: np.ndarray) -> Any:
        return self.taken


@pytest.mark.parametrize(
    ("sampler", "error", "message"),
    [
        ([1, SIZE], IndexError, r"there is no sample 23\. .* 0 to 22"),
        ([1, -SIZE - 1], IndexError, r"there is no sample -24\. .* 0 to 22"),
        (ShuffledSampler(100), IndexError, "there is no sample"),
        ([1.5, 2], TypeError, "sample numbers must be integers"),
        ([True, False], TypeError, "sample numbers must be integers"),
        ([[1], [2]], TypeError, "sample numbers must be integers"),
        (Wrong([0]), ValueError, r"take\(\) returned .* for 23 positions"),
        (Wrong([0.5] * SIZE), ValueError, r"take\(\) returned .* for 23 positions"),
    ],
)
def test_what_is_no_number_of_a_sample_is_refused(
    sampler: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^sampler: {message}"):
        list(make(2, sampler=sampler))


# Transforms


TRAIN = transforms.Compose(
    [
        transforms.RandomCrop(4, padding=1),
        transforms.RandomHorizontalFlip(),
        transforms.Normalize("imagenet"),
    ]
)


def by_number(loader: Loader) -> dict[int, torch.Tensor]:
    return {
        int(number): image
        for batch in loader
        for number, image in zip(batch.number, batch.images, strict=True)
    }


def test_a_function_gets_the_images_of_a_batch_and_returns_as_many() -> None:
    loader = make(5, transform=lambda images: images.float() / 2)
    for batch, plain in zip(loader, make(5), strict=True):
        assert torch.equal(batch.images, plain.images.float() / 2)
    with pytest.raises(ValueError, match="transform returned None for 4 images"):
        next(iter(make(transform=lambda images: None)))
    with pytest.raises(ValueError, match=r"returned a tensor of shape \(1, 3, 4, 6\) for 4 images"):
        next(iter(make(transform=lambda images: images[:1])))


def test_random_draws_depend_on_seed_epoch_and_sample_only() -> None:
    options: Any = {"shuffle": True, "transform": TRAIN, "seed": 3}
    reference = make(transform=TRAIN, seed=3, num_threads=0)
    epochs = [by_number(reference) for _ in range(2)]
    assert not all(torch.equal(epochs[0][number], epochs[1][number]) for number in epochs[0])
    stopped, resumed = make(**options), make(6, **options)
    next(iter(stopped))
    resumed.load_state_dict(stopped.state_dict())
    ranks = [make(3, rank=rank, num_replicas=2, **options) for rank in (0, 1)]
    loaders = [make(23, **options), make(5, num_threads=3, **options), resumed, *ranks]
    for loader, count in zip(loaders, (23, 23, 19, 12, 12), strict=True):
        for expected in epochs:
            images = by_number(loader)
            assert len(images) == (count if expected is epochs[0] or count == 12 else 23)
            assert all(torch.equal(expected[number], images[number]) for number in images)


@pytest.mark.parametrize("kind", ["weighted", "repeated", "sampler", "batch_sampler"])
def test_a_sample_that_comes_again_looks_different(kind: str) -> None:
    def loader(batch_size: int) -> Loader:
        if kind == "weighted":
            order: Any = WeightedSampler(np.eye(SIZE)[3], size=40)
            return make(batch_size, sampler=order, transform=TRAIN)
        if kind == "repeated":  # two samples, twelve times each
            order = RepeatedSampler(SIZE, 12)
            return make(batch_size, sampler=order, transform=TRAIN)
        numbers = [3] * 40
        if kind == "sampler":
            return make(batch_size, sampler=numbers, transform=TRAIN)
        groups = [numbers[start : start + batch_size] for start in range(0, 40, batch_size)]
        return make(1, batch_sampler=groups, transform=TRAIN)

    images = torch.cat([batch.images for batch in loader(7)])
    assert len({image.numpy().tobytes() for image in images}) > 5
    stopped, resumed = loader(6), loader(11)
    begun = [batch.images for _, batch in zip(range(2), stopped, strict=False)]
    resumed.load_state_dict(stopped.state_dict())
    rest = [batch.images for batch in resumed]
    assert torch.equal(torch.cat(begun + rest), images)


def test_mixup_mixes_other_samples_with_a_repeated_one() -> None:
    dataset = _shared[0].with_columns(label=np.arange(SIZE))
    mixup = Compose([ToDtype(torch.float32, scale=True), MixUp(alpha=1.0, num_classes=SIZE)])
    loader = Loader(dataset, 5, sampler=RepeatedSampler(SIZE, 3), transform=mixup)
    for batch in loader:
        assert ((batch.labels > 0).sum(1) == 2).all()


def test_a_transform_gets_what_the_data_set_knows_and_may_make_views(
    make_dataset: Callable[..., Any],
) -> None:
    mean, std = [0.1, 0.2, 0.3], [0.5, 0.6, 0.7]
    path = make_dataset(statistics={"mean": mean, "std": std}).path
    mixed = transforms.Compose([transforms.Normalize(), transforms.MixUp()])
    assert next(iter(Loader(path, 5, transform=mixed))).labels.shape == (5, 3)
    views = transforms.Compose(TRAIN.transforms, views=2)
    one, other = next(iter(Loader(path, 5, transform=views))).images
    assert one.shape == other.shape == (5, 3, 4, 4)
    assert not torch.equal(one, other)
    (batch,) = Loader(path, 5, transform=transforms.Normalize())
    images = MemmapDataset(path).gather(np.arange(5)).permute(0, 3, 1, 2).double() / 255
    expected = (images - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    torch.testing.assert_close(batch.images, expected.float(), rtol=1e-5, atol=1e-5)


def test_labels_without_names_and_other_columns_go_through_transforms(
    make_dataset: Callable[..., Any],
) -> None:
    columns = {"label": np.arange(5) % 4, "age": np.arange(5), "box": np.ones((5, 4), np.int16)}
    path = make_dataset(columns=columns, classes=None).path
    mix = transforms.Compose([transforms.Normalize("imagenet"), transforms.MixUp()])
    (batch,) = Loader(path, 5, columns=["index", "label", "age", "box"], transform=mix)
    assert batch.labels.shape == (5, 4)  # the largest label is 3
    assert batch.index.tolist() == batch.age.tolist() == [0, 1, 2, 3, 4]
    assert (batch.box.dtype, batch.box.shape) == (torch.int16, (5, 4))


def test_points_of_the_transform_come_without_being_asked_for(
    make_dataset: Callable[..., Any],
) -> None:
    columns = {"label": np.arange(5) % 3, "eyes": np.zeros((5, 2, 2), np.float32)}
    path = make_dataset(columns=columns).path
    flip = transforms.Compose([transforms.RandomHorizontalFlip(p=1.0)], points=("eyes",))
    batch = next(iter(Loader(path, 5, transform=flip)))
    assert batch._fields == ("images", "labels", "eyes")
    assert batch.eyes[:, :, 0].unique().tolist() == [5.0]
    missing = transforms.Compose([transforms.RandomHorizontalFlip()], points=("nose",))
    with pytest.raises(ValueError, match=r"columns names 'nose'.* It has label, eyes"):
        Loader(path, 5, transform=missing)


# Threads and processes


@on_threads
def test_threads_live_from_the_first_batch_to_the_end_of_the_loop(
    num_threads: int, own_threads: Callable[[], Any]
) -> None:
    loader = make(2, num_threads=num_threads)
    iterator = iter(loader)
    assert not own_threads()
    for _ in iterator:
        assert len(own_threads()) == num_threads
    assert not own_threads()
    next(iter(loader))  # an early exit
    assert not own_threads()


@pytest.mark.parametrize(("num_threads", "in_flight"), [(0, 1), (2, 4)])
def test_no_more_batches_are_made_ahead_than_asked_for(num_threads: int, in_flight: int) -> None:
    makers: list[threading.Thread] = []
    all_made = threading.Event()

    def note(images: torch.Tensor) -> torch.Tensor:
        makers.append(threading.current_thread())
        if len(makers) == in_flight:
            all_made.set()
        return images

    iterator: Any = iter(make(1, transform=note, num_threads=num_threads, prefetch_factor=2))
    next(iterator)
    assert all_made.wait(10)
    assert len(makers) == in_flight
    assert (threading.current_thread() in makers) == (num_threads == 0)
    iterator.close()


def test_a_child_that_is_forked_while_a_thread_makes_the_feed_makes_its_own(
    monkeypatch: pytest.MonkeyPatch, in_forked_child: Callable[..., Any]
) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def make_slowly(*arguments: Any, **settings: Any) -> Any:
        begun.set()
        assert may_end.wait(30)
        return make_pipeline(*arguments, **settings)

    loader = make(num_threads=0)
    with monkeypatch.context() as patched, ThreadPoolExecutor(1) as pool:
        patched.setattr("memload.reading.loader.make_pipeline", make_slowly)
        feed = pool.submit(lambda: loader.feed)
        assert begun.wait(30)

        def child() -> list[list[int]]:
            torch.set_num_threads(1)
            may_end.set()
            return visits(loader)

        try:
            assert flat(in_forked_child(child)) == list(range(SIZE))
        finally:
            may_end.set()
        assert feed.result().name == "cpu"


@on_threads
def test_an_exception_arrives_in_its_turn_with_its_traceback(
    num_threads: int, own_threads: Callable[[], Any]
) -> None:
    def broken_transform(images: torch.Tensor) -> torch.Tensor:
        if torch.equal(images[0], _shared[0][8][0]):
            raise KeyError("the cause")
        return images

    class BrokenSampler:
        def __iter__(self) -> Iterator[int]:
            yield from range(8)
            raise KeyError("the cause")

    options: list[Any] = [{"transform": broken_transform}, {"sampler": BrokenSampler()}]
    for option, function in zip(options, ("broken_transform", "__iter__"), strict=True):
        loader = make(**option, num_threads=num_threads)
        batches = iter(loader)
        assert [next(batches).number.tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        with pytest.raises(KeyError, match="the cause") as caught:
            next(batches)
        frames = traceback.extract_tb(caught.value.__traceback__)
        assert function in [frame.name for frame in frames]
        assert loader.state_dict()["samples_seen"] == 8
        assert not own_threads()


@on_threads
def test_a_stop_iteration_of_the_transform_is_an_error_and_not_the_end(num_threads: int) -> None:
    def stop(images: torch.Tensor) -> torch.Tensor:
        raise StopIteration

    with pytest.raises(RuntimeError, match="StopIteration"):
        list(make(5, transform=stop, num_threads=num_threads))


def test_a_loader_on_the_cpu_never_asks_for_a_stream_of_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CUDA cannot be started in a child that was forked from a process that uses it."""

    def fail(*arguments: object) -> None:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    for name in ("stream", "current_device", "current_stream", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, fail)
    assert flat(visits(make(num_threads=0))) == list(range(SIZE))


@pytest.mark.parametrize(("num_threads", "prefetch_factor"), [(0, 2), (1, 1), (3, 2)])
def test_a_loader_works_in_a_forked_child_but_an_iterator_from_before_does_not(
    num_threads: int, prefetch_factor: int, in_forked_child: Callable[..., Any]
) -> None:
    loader = make(num_threads=num_threads, prefetch_factor=prefetch_factor)
    iterator: Any = iter(loader)
    next(iterator)

    def child() -> tuple[Any, list[list[int]]]:
        torch.set_num_threads(1)
        try:
            result = next(iterator).number.tolist()
        except RuntimeError as error:
            result = str(error)
        return result, visits(loader)

    result, anew = in_forked_child(child)
    assert "forked child" in result if num_threads else result == [4, 5, 6, 7]
    assert flat(anew) == list(range(SIZE))
    assert next(iterator).number.tolist() == [4, 5, 6, 7]
    iterator.close()


@pytest.mark.slow
def test_live_iterators_say_nothing_at_the_end_of_the_interpreter(path: Path) -> None:
    program = """
import os, sys, memload
from torch.utils.data import DataLoader

def cycle(loader):
    while True:
        yield from loader

iterators = [
    iter(memload.Loader(sys.argv[1], 3, num_threads=2)),
    cycle(memload.Loader(sys.argv[1], 3, num_threads=0)),
    iter(memload.ThreadPrefetcher(range(100))),
    memload.background(range)(100),
    iter(memload.CudaPrefetcher(range(100), device="cpu")),
    iter(memload.CudaPrefetcher(range(100), device="cpu", own_thread=True)),
    # whose thread is often inside of torch when the script ends
    iter(memload.ThreadPrefetcher(DataLoader(memload.MemmapDataset(sys.argv[1]), 2, shuffle=True))),
]
for iterator in iterators:
    next(iterator)
os.kept = iterators  # which is deleted after the modules of memload were
"""
    command = [sys.executable, "-c", program, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# Arguments


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"batch_size": 0}, ValueError, "batch_size must be an integer of at least 1, not 0."),
        ({"num_threads": 1.5}, ValueError, "num_threads must be an integer of at least 0, not 1.5"),
        ({"seed": None}, TypeError, "seed must be an integer, not None."),
        ({"shuffle": True, "sampler": [1]}, ValueError, "shuffle, sampler and batch_sampler excl"),
        ({"batch_sampler": [[1]], "drop_last": True}, ValueError, "batch_sampler makes the batche"),
        ({"rank": 1}, ValueError, "rank=1 and num_replicas=None: give both of them or neither."),
        ({"rank": 2, "num_replicas": 2}, ValueError, "rank must be at least 0 and less than num"),
        ({"columns": ["nothing"]}, ValueError, "columns names 'nothing', which the data set"),
        ({"feed": "gpu"}, ValueError, "feed: there is no 'gpu'. Choose one of auto, resident, "),
        ({"cache_bytes": 1.5}, TypeError, "cache_bytes must be a whole number of bytes or a text"),
        ({"resident_bytes": -1}, ValueError, "resident_bytes must be at least 0, not -1."),
        (
            {"cache_bytes": 1, "feed": "resident"},
            ValueError,
            "cache_bytes has no effect on feed='resident'. Leave it out, or use one of the feeds "
            "auto, dma, uva, disk, pinned, cpu.",
        ),
        (
            {"resident_bytes": "1GB", "device": "cpu"},
            ValueError,
            "resident_bytes has no effect on feed='cpu'. Leave it out on the CPU: it is about the m",
        ),
        ({"device": "gpu"}, ValueError, "device: 'gpu' is not supported."),
        ({"device": "meta"}, ValueError, "device: 'meta' is not supported."),
        ({"transform": 3}, TypeError, "transform must be a function of images, not 3."),
        (
            {"transform": [transforms.Normalize("imagenet")]},
            TypeError,
            "transform must be a function of images, not [Normalize(",
        ),
        (
            {"transform": "deit"},
            TypeError,
            "transform must be a function of images, not 'deit'. Write transforms.Compose([...])",
        ),
        ({"transform": transforms.train}, TypeError, "transform is train itself, which only makes"),
        ({"transform": transforms.recipes.deit}, TypeError, "transform is deit itself, which only"),
        ({"dataset": Subset([1, 2], [0])}, TypeError, "dataset must be a MemmapDataset or its pat"),
        ({"nothing": 1}, TypeError, "Loader has no argument 'nothing'."),
        (
            {"num_workers": 0, "pin_memory": True},
            TypeError,
            "The Loader takes no num_workers: it has no worker processes, since nothing is left to "
            "decode; num_threads=… sets how many threads read rows. The Loader takes no pin_memory"
            ": its batches are on the device already, and ",
        ),
        ({"collate_fn": list}, TypeError, "The Loader takes no collate_fn: it reads each batch as"),
        ({"persistent_workers": True}, TypeError, "The Loader takes no persistent_workers: it has"),
        ({"generator": None}, TypeError, "The Loader takes no generator: seed=… and the epoch al"),
        ({"worker_init_fn": print}, TypeError, "The Loader takes no worker_init_fn: it has no wor"),
    ],
)
def test_wrong_arguments_are_refused(
    path: Path, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        Loader(**{"dataset": _shared[0], **arguments})
    with pytest.raises(ValueError, match=r"^dataset has a transform"):
        Loader(MemmapDataset(path, transform=str))


def test_other_kinds_of_data_sets_are_refused_with_a_remedy() -> None:
    for other, remedy in (
        (TensorDataset(torch.zeros(3)), r"not a TensorDataset\. .* memload\.build\(dataset, 'out"),
        (iter([1]), r"not a list_iterator\. Build one first: memload\.build\('images/'"),
    ):
        with pytest.raises(TypeError, match=remedy):
            Loader(other)  # type: ignore[arg-type]


def test_points_of_a_data_set_move_with_its_images(make_dataset: Callable[..., Any]) -> None:
    columns = {"label": np.arange(5) % 3, "eyes": np.zeros((5, 2, 2), np.float32)}
    path = make_dataset(columns=columns, points=("eyes",)).path
    flip = transforms.RandomHorizontalFlip(1)
    for transform in (flip, transforms.Compose([flip])):
        (batch,) = Loader(path, 5, transform=transform)
        assert batch.eyes[:, :, 0].unique().tolist() == [5.0]
    still = transforms.Compose([flip], points=[])
    assert not next(iter(Loader(path, 5, transform=still))).eyes.any()
    assert next(iter(Loader(path, 5, transform=flip, columns=["label"]))).labels.shape == (5,)


def test_a_function_that_resizes_images_but_not_their_points_is_warned_of(
    make_dataset: Callable[..., Any],
) -> None:
    columns = {"label": np.arange(5) % 3, "eyes": np.zeros((5, 2, 2), np.float32)}
    path = make_dataset(columns=columns, points=("eyes",)).path
    pool = torch.nn.functional.max_pool2d

    def shrink(images: torch.Tensor) -> torch.Tensor:
        return pool(images.float(), 2)

    with pytest.warns(UserWarning, match="images of 2×3 from 4×6, .* alone: eyes stay as they are"):
        list(Loader(path, 5, transform=shrink))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(Loader(path, 5, transform=shrink, columns=["label"]))
        list(Loader(path, 5, transform=torch.Tensor.float))


def test_only_a_loader_that_does_not_shuffle_has_a_sequential_sampler() -> None:
    # This is how Lightning finds out whether overfit_batches has to change anything.
    sequential = torch.utils.data.SequentialSampler
    for loader in (make(), make(sampler=SequentialSampler(5))):
        assert isinstance(loader.sampler, sequential)
        assert list(loader.sampler) == flat(visits(loader))
    assert not isinstance(make(shuffle=True).sampler, sequential)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_thread_that_cannot_be_started_is_explained(
    num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(MemloadError, match=r"limit on processes .* or use num_threads=0"):
        list(make(num_threads=num_threads))
    with pytest.raises(MemloadError, match="iterate without a prefetcher"):
        list(ThreadPrefetcher([1]))
    assert flat(visits(make(num_threads=0))) == list(range(SIZE))


def test_a_loader_says_what_it_is_and_what_feeds_it(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loader = Loader(path, np.int64(4), shuffle=True, seed=2)  # type: ignore[arg-type]
    assert repr(loader).splitlines() == [
        "Loader(",
        f"    {loader.dataset!r},",
        "    batch_size=4, order=ShuffledSampler(size=23, seed=2),",
        "    transform=None,",
        "    device='auto', feed='auto',",
        ")",
    ]
    with caplog.at_level("INFO", logger="memload"):
        cpu = Loader(path, 4, device="cpu", transform=transforms.Normalize("imagenet"))
        assert cpu.feed.name == "cpu"
    assert [f"cpu: {cpu.feed.reason}" in record.message for record in caplog.records] == [True]
    assert "\n    transform=Normalize(mean=(0.485, " in repr(cpu)
    assert "\n    device='cpu', feed='cpu',\n" in repr(cpu)
    assert cpu.device == torch.device("cpu")


def test_an_epoch_without_batches_is_warned_of() -> None:
    message = rf"^drop_last: an epoch has no batches, because {SIZE} samples .* each of 2 ranks"
    with pytest.warns(UserWarning, match=message):
        loader = make(SIZE, shuffle=True, drop_last=True, rank=0, num_replicas=2)
    assert (len(loader), list(loader)) == (0, [])
