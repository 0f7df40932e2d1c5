"""What a Loader hands out. test_machine.py has orders, ranks, epochs and resuming."""

import gc
import json
import pickle
import re
import subprocess
import sys
import threading
import traceback
from itertools import islice

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, Subset, SubsetRandomSampler, TensorDataset

from memload import (
    FormatError,
    Loader,
    MemloadError,
    MemmapDataset,
    RepeatedSampler,
    ShuffledSampler,
    ThreadPrefetcher,
    WeightedSampler,
    transforms,
)
from memload.machine import available_cores

SIZE = 23
MEAN, STD = [0.1, 0.2, 0.3], [0.5, 0.6, 0.7]
EYES = np.random.default_rng(0).uniform(0, 4, (SIZE, 2, 2)).astype(np.float32)
TRAIN = transforms.Compose([transforms.RandomCrop(4, 1), transforms.RandomHorizontalFlip()])

on_threads = pytest.mark.parametrize("num_threads", [0, 2])
pytestmark = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"  # of fork, from Python 3.12 on
)


@pytest.fixture(scope="module")
def path(write_dataset, tmp_path_factory):
    """Samples of three classes in three shards of 4×6 pixels."""
    columns = {"label": np.arange(SIZE) % 3, "age": np.arange(SIZE) + 0.5, "eyes": EYES}
    facts = {"columns": columns, "points": ("eyes",), "statistics": {"mean": MEAN, "std": STD}}
    return write_dataset(tmp_path_factory.mktemp("shared"), rows=(9, 8, 6), **facts).path


@pytest.fixture(scope="module")
def make(path):
    """A function that makes a Loader whose batches have the images and the column ``index``."""

    def make(batch_size=4, **options):
        return Loader(path, batch_size, **{"columns": ["index"], "device": "cpu"} | options)

    return make


def visits(loader):
    """Return the samples of every batch of an epoch."""
    return [batch.index.tolist() for batch in loader]


def flat(batches):
    return [number for batch in batches for number in batch]


def position(loader):
    state = loader.state_dict()
    return state["epoch"], state["samples_seen"]


# Batches


@on_threads
@pytest.mark.parametrize("batch_size", [1, 5, 100])
def test_batches_are_the_samples_of_the_data_set_in_order(path, batch_size, num_threads):
    dataset = MemmapDataset(path, columns=["label"]).subset([5, 3, 3, 22, *range(SIZE)])
    loader = Loader(dataset, batch_size, num_threads=num_threads, device="cpu")
    batches = list(loader)
    sizes = [min(batch_size, 27 - start) for start in range(0, 27, batch_size)]
    assert [len(batch.images) for batch in batches] == sizes
    assert all(batch.images.permute(0, 2, 3, 1).is_contiguous() for batch in batches)
    images, labels = (torch.cat(values) for values in zip(*batches, strict=True))
    assert (images.dtype, labels.dtype) == (torch.uint8, torch.int64)
    assert torch.equal(images, torch.stack([image for image, _ in dataset]))
    assert labels.tolist() == [label for _, label in dataset]


def test_a_batch_is_a_named_tuple_of_the_columns_asked_for(path, make, make_dataset):
    def fields(dataset, **options):
        return next(iter(Loader(dataset, 2, device="cpu", **options)))._fields

    assert fields(path) == fields(path, columns="all") == ("images", "labels", "age", "eyes")
    assert fields(path, columns=["age", "label"]) == ("images", "age", "labels")
    assert fields(path, columns=[]) == ("images",)
    assert fields(MemmapDataset(path, columns=["age"])) == ("images", "age")
    columns = {"label": np.arange(5), "labels": np.arange(5), "image id": np.arange(5)}
    odd = make_dataset("odd.bin", columns=columns, classes=None).path
    assert fields(odd) == ("images", "label", "labels", "_3")
    batch = next(iter(make(5, shuffle=True, columns=["index", "age"])))
    images, index, age = batch
    assert images is batch.images
    assert age.tolist() == [number + 0.5 for number in index.tolist()]
    copy = pickle.loads(pickle.dumps(batch))
    assert copy._fields == batch._fields
    assert all(torch.equal(*both) for both in zip(copy, batch, strict=True))


@on_threads
def test_a_batch_stays_as_it_is_while_anything_refers_to_it(make, num_threads):
    loader = make(2, shuffle=True, num_threads=num_threads)
    dataset = loader.dataset
    held = [(batch.images[:, 1:], batch.index) for _ in range(20) for batch in loader]
    for part, index in held:
        assert torch.equal(part.permute(0, 2, 3, 1), dataset.gather(index)[..., 1:])


@on_threads
def test_static_buffers_are_the_same_in_all_epochs(make, num_threads):
    options = {"shuffle": True, "drop_last": True, "num_threads": num_threads}
    loader, expected = make(static_buffers=True, **options), make(**options)
    first = next(iter(loader))  # an early exit
    loader.set_epoch(0)
    for _ in range(2):
        for batch, other in zip(loader, expected, strict=True):
            assert batch.images.data_ptr() == first.images.data_ptr()
            assert torch.equal(first.images, other.images)  # what a captured graph would read
            assert torch.equal(first.index, other.index)


def test_batches_of_several_shapes_do_not_fit_in_static_buffers(make):
    batches = iter(make(1, batch_sampler=[[1, 2], [3]], static_buffers=True))
    next(batches)
    with pytest.raises(ValueError, match=r"^static_buffers: a batch has tensors of \(1, 3, 4, 6\)"):
        next(batches)


# Orders and ranks


class InOrder:
    """A user's own order, which notes the positions that it is asked for."""

    def __init__(self, size=SIZE, **facts):
        self.size, self.asked = size, []
        vars(self).update(facts)

    def __len__(self):
        return self.size

    def take(self, epoch, positions):
        self.asked.append((epoch, positions.tolist()))
        return positions


def test_an_order_of_ones_own_is_asked_only_for_what_a_rank_has_not_seen(make):
    order = InOrder()
    loader = make(sampler=order, rank=1, num_replicas=2, num_threads=0)
    loader.load_state_dict({**loader.state_dict(), "epoch": 3, "samples_seen": 8})
    assert order.asked == []
    batches = visits(loader)
    assert batches == [[12, 13, 14, 15], [19, 20, 21, 22]]  # rank 0 has 16, 17 and 18
    assert order.asked == [(3, flat(batches))]
    order.even_ranks = True
    loader.load_state_dict({**loader.state_dict(), "epoch": 0, "samples_seen": 20})
    assert visits(loader) == [[22, 0]]  # rank 0 has 20 and 21


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor, SubsetRandomSampler])
def test_any_iterable_of_numbers_is_an_order(make, kind):
    for drop_last, sizes in ((False, [3, 1]), (True, [3])):
        loader = make(3, sampler=kind([4, 2, 2, -1]), drop_last=drop_last)
        batches = visits(loader)
        assert [len(batch) for batch in batches] == sizes
        assert set(flat(batches)) <= {2, 4, SIZE - 1}
        assert len(loader) == len(sizes)
    loader = make(1, batch_sampler=[[3], kind([5, 1]), [], [2, 2, -1]])
    assert [sorted(batch) for batch in visits(loader)] == [[3], [1, 5], [2, 2, 22]]


@pytest.mark.parametrize(
    ("sampler", "error", "message"),
    [
        ([1, SIZE], IndexError, r"there is no sample 23\. .* 0 to 22"),
        ([1, -SIZE - 1], IndexError, r"there is no sample -24\. .* 0 to 22"),
        (ShuffledSampler(100), IndexError, "there is no sample"),
        ([1.5, 2], TypeError, "sample numbers must be integers"),
        ([True, False], TypeError, "sample numbers must be integers"),
        ([[1], [2]], TypeError, "sample numbers must be integers"),
        (InOrder(take=lambda *_: [0]), ValueError, r"take\(\) returned .* for 23 positions"),
        (InOrder(take=lambda _, at: at / 2), ValueError, r"take\(\) returned .* for 23 positions"),
    ],
)
def test_what_is_no_number_of_a_sample_is_refused(make, sampler, error, message):
    with pytest.raises(error, match=f"^sampler: {message}"):
        list(make(2, sampler=sampler))


@pytest.mark.parametrize("kind", ["sampler", "batch_sampler"])
@on_threads
def test_a_users_sampler_is_not_asked_further_ahead_than_batches_are_made(make, kind, num_threads):
    asked = []

    class Numbers:
        def __iter__(self):
            for number in range(SIZE):
                asked.append(number)
                yield [number] if kind == "batch_sampler" else number

    ahead = max(1, 3 * num_threads)
    loader = make(1, **{kind: Numbers()}, num_threads=num_threads, prefetch_factor=3)
    for count, batch in enumerate(loader, start=1):
        assert batch.index.tolist() == [count - 1]
        # The number that begins the next epoch is not asked for before, either.
        assert len(asked) <= min(SIZE, count + ahead)
    assert asked == list(range(SIZE))


def test_ranks_are_those_of_torchrun_unless_they_are_given(make, monkeypatch):
    loader, given = make(), make(rank=0, num_replicas=2)
    assert (loader.rank, loader.num_replicas, len(loader)) == (0, 1, 6)
    assert loader.num_threads == min(8, available_cores())
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert (loader.rank, loader.num_replicas) == (2, 3)
    assert visits(loader) == [[8, 9, 10, 11], list(range(19, SIZE))]
    assert (given.rank, given.num_replicas) == (0, 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")  # which share the cores of this host
    assert make().num_threads == 1


@pytest.mark.parametrize(("name", "missing"), [("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")])
def test_half_of_what_torchrun_says_is_an_error_and_loses_no_samples(
    make, name, missing, monkeypatch
):
    monkeypatch.setenv(name, "4")
    loader = make()
    uses = len, lambda loader: next(iter(loader)), lambda loader: loader.rank
    for use in uses:
        with pytest.raises(ValueError, match=rf"variable {name} is '4', but {missing} is not set"):
            use(loader)
    assert len(make(rank=0, num_replicas=2)) == 3
    monkeypatch.delenv(name)
    assert flat(visits(loader)) == list(range(SIZE))
    assert position(loader) == (1, 0)


@on_threads
@pytest.mark.parametrize(
    ("size", "ranks", "batch_size", "without"), [(1, 4, 1, 3), (9, 4, 2, 3), (11, 3, 3, 1)]
)
def test_all_ranks_of_an_evaluation_have_the_same_state_at_each_step(
    path, size, ranks, batch_size, without, num_threads
):
    dataset = MemmapDataset(path, columns=["index"])[:size]
    options = {"num_replicas": ranks, "num_threads": num_threads, "device": "cpu"}
    loaders = [Loader(dataset, batch_size, rank=rank, **options) for rank in range(ranks)]
    for epoch in range(2):
        iterators = [iter(loader) for loader in loaders]
        for seen in [*range(batch_size * ranks, size, batch_size * ranks), size]:
            batches = [next(iterator, None) for iterator in iterators]
            assert [position(loader) for loader in loaders] == [(epoch, seen)] * ranks
        assert batches.count(None) == without  # have no share of the last step
        for _ in range(3):  # behind the end
            assert [next(iterator, None) for iterator in iterators] == [None] * ranks
            assert [position(loader) for loader in loaders] == [(epoch + 1, 0)] * ranks
    for loader in loaders:
        for _ in loader:
            pass
    assert [position(loader) for loader in loaders] == [(3, 0)] * ranks


# Epochs and states


def test_epochs_advance_by_themselves_and_set_epoch_chooses_one(make):
    def shuffled(epoch):
        return ShuffledSampler(SIZE, seed=2).take(epoch, np.arange(SIZE)).tolist()

    loader = make(5, shuffle=True, seed=2)
    iter(loader)  # an epoch begins with its first batch
    assert [flat(visits(loader)) for _ in range(2)] == [shuffled(0), shuffled(1)]
    loader.set_epoch(np.int64(7))
    state = json.loads(json.dumps(loader.state_dict()))
    assert flat(visits(loader)) == shuffled(7)
    for epoch, first in ((7, 10), (3, 0)):  # an epoch that was resumed goes on
        loader.load_state_dict({**state, "samples_seen": 10})
        loader.set_epoch(epoch)
        assert flat(visits(loader)) == shuffled(epoch)[first:]


@on_threads
def test_the_state_is_that_of_the_iterator_that_gave_a_batch_last(make, num_threads):
    loader = make(shuffle=True, num_threads=num_threads)
    first = iter(loader)
    next(first)
    second = iter(loader)
    assert position(loader) == (1, 0)
    for iterator, expected in ((first, (0, 8)), (second, (1, 4)), (first, (0, 12))):
        next(iterator)
        assert position(loader) == expected
    orders = [ShuffledSampler(SIZE).take(epoch, np.arange(SIZE)).tolist() for epoch in (0, 1)]
    assert flat(visits(islice(first, 3))) == orders[0][12:]
    assert flat(visits(islice(second, 1))) == orders[1][4:8]
    assert list(first) == []
    assert position(loader) == (1, 8)
    assert flat(visits(second)) == orders[1][8:]


def test_a_seed_of_numpy_gives_the_same_state(make):
    loader, other = (make(shuffle=True, seed=seed) for seed in (np.int64(5), 5))
    next(iter(loader))
    next(iter(other))
    assert json.dumps(loader.state_dict()) == json.dumps(other.state_dict())


def test_a_resumed_epoch_drops_the_last_batch_of_what_is_left(make):
    loader = make(5, drop_last=True)
    loader.load_state_dict({**loader.state_dict(), "samples_seen": 4})
    assert visits(loader) == [list(range(start, start + 5)) for start in (4, 9, 14)]


class Told(list):
    """A user's own list of numbers, which notes the epochs that it is told."""

    def __init__(self, numbers):
        super().__init__(numbers)
        self.epochs = []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)


def test_a_state_behind_the_last_batch_goes_on_with_the_next_epoch(make):
    for batches in (Told([[0, 1], [2, 3], [4]]), BatchSampler(Told(range(5)), 2, False)):
        told = getattr(batches, "sampler", batches)
        loader = make(1, batch_sampler=batches)
        state = [loader.state_dict() for _ in loader][-1]
        assert (state["epoch"], state["samples_seen"], told.epochs) == (0, 5, [0])
        other = make(1, batch_sampler=batches)
        other.load_state_dict(state)
        assert visits(other) == [[0, 1], [2, 3], [4]]
        assert told.epochs[-1] == 1
        assert position(other) == (2, 0)
        other.set_epoch(9)
        assert told.epochs[-1] == 9
        other.load_state_dict(state)
        other.set_epoch(0)  # the finished one
        assert visits(other) == []


@pytest.mark.parametrize("kind", ["order", "sampler"])
def test_an_error_before_the_first_batch_loses_no_position(make, kind):
    class Broken(InOrder):
        take = None if kind == "order" else property()

        def __iter__(self):
            raise OSError("broken")

    if kind == "order":
        Broken.take = lambda self, epoch, positions: next(iter(self))
    whole, broken = make(sampler=InOrder()), make(sampler=Broken())
    state = {**whole.state_dict(), "order": "Broken", "epoch": 3, "samples_seen": 8}
    broken.load_state_dict(state)
    with pytest.raises(OSError, match="broken"):
        next(iter(broken))
    assert broken.state_dict() == state


# Transforms


def test_a_function_gets_the_images_of_a_batch_and_returns_as_many(make):
    loader = make(5, transform=lambda images: images.float() / 2)
    for batch, plain in zip(loader, make(5), strict=True):
        assert torch.equal(batch.images, plain.images.float() / 2)
    with pytest.raises(ValueError, match="transform returned None for 4 images"):
        next(iter(make(transform=lambda images: None)))
    with pytest.raises(ValueError, match=r"returned a tensor of shape \(1, 3, 4, 6\) for 4 images"):
        next(iter(make(transform=lambda images: images[:1])))


def by_number(loader):
    images = {}
    for batch in loader:
        images |= zip(batch.index.tolist(), batch.images, strict=True)
    return images


def test_random_draws_depend_on_seed_epoch_and_sample_only(make):
    options = {"transform": TRAIN, "shuffle": True, "seed": 3}
    in_order = make(transform=TRAIN, seed=3, num_threads=0)
    epochs = [by_number(in_order) for _ in range(2)]
    stopped, resumed = make(**options), make(6, **options)
    next(iter(stopped))
    resumed.load_state_dict(stopped.state_dict())
    ranks = [make(3, rank=rank, num_replicas=2, **options) for rank in (0, 1)]
    for loader in (make(23, **options), make(5, num_threads=2, **options), resumed, *ranks):
        for expected in epochs:
            images = by_number(loader)
            assert len(images) >= 12
            assert all(torch.equal(expected[number], images[number]) for number in images)
    of_seed = by_number(make(transform=TRAIN, seed=4))
    for other in (epochs[1], of_seed):
        assert not all(torch.equal(epochs[0][number], other[number]) for number in other)


@pytest.mark.parametrize("kind", ["weighted", "repeated", "sampler", "batch_sampler"])
def test_a_sample_that_comes_again_looks_different(make, kind):
    def loader(batch_size):
        if kind == "batch_sampler":
            batches = BatchSampler([3] * 40, batch_size, False)
            return make(1, batch_sampler=batches, transform=TRAIN)
        orders = {"weighted": WeightedSampler(np.eye(SIZE)[3], size=40), "sampler": [3] * 40}
        order = orders.get(kind, RepeatedSampler(SIZE, 12))  # two samples, twelve times each
        return make(batch_size, sampler=order, transform=TRAIN)

    images = torch.cat([batch.images for batch in loader(7)])
    assert len({image.numpy().tobytes() for image in images}) > 5
    stopped, resumed = loader(6), loader(11)
    begun = [batch.images for batch in islice(stopped, 2)]
    resumed.load_state_dict(stopped.state_dict())
    assert torch.equal(torch.cat([*begun, *(batch.images for batch in resumed)]), images)


def test_a_transform_gets_what_the_data_set_knows_and_may_make_views(path, make):
    (batch,) = make(SIZE, transform=transforms.Normalize())
    images = MemmapDataset(path).gather(np.arange(SIZE)).permute(0, 3, 1, 2) / 255
    expected = (images - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    torch.testing.assert_close(batch.images, expected, rtol=1e-5, atol=1e-5)
    mixed = transforms.Compose([transforms.Normalize(), transforms.MixUp()])
    assert next(iter(make(5, transform=mixed, columns=["label"]))).labels.shape == (5, 3)
    views = transforms.Compose(TRAIN.transforms, views=2)
    one, other = next(iter(make(5, transform=views))).images
    assert one.shape == other.shape == (5, 3, 4, 4)
    assert not torch.equal(one, other)


def test_points_that_a_transform_names_come_without_being_asked_for(path):
    flip = transforms.Compose([transforms.RandomHorizontalFlip(1)], points=["eyes"])
    images_alone = MemmapDataset(path, columns=[])
    (batch,) = Loader(images_alone, SIZE, transform=flip, device="cpu")
    assert batch._fields == ("images", "eyes")
    np.testing.assert_allclose(batch.eyes, EYES * [-1, 1] + [5, 0], rtol=1e-6)


# Torch's defaults, threads and processes


DEFAULTS = [
    (torch.set_default_device, "meta", None),
    (torch.set_default_dtype, torch.float64, torch.float32),
    (torch.set_default_dtype, torch.bfloat16, torch.float32),
]


@pytest.mark.parametrize(("set_default", "value", "before"), DEFAULTS)
@on_threads
def test_batches_do_not_depend_on_torchs_defaults(make, set_default, value, before, num_threads):
    def batches():
        for transform in (None, transforms.evaluate(4), TRAIN):
            options = {"transform": transform, "num_threads": num_threads, "shuffle": True}
            yield from make(5, **options, columns=["index", "label", "age", "eyes"])
            yield from make(5, **options, static_buffers=True, drop_last=True)

    expected = list(batches())
    set_default(value)
    try:
        found = list(batches())
    finally:
        set_default(before)
    for batch, other in zip(found, expected, strict=True):
        for one, two in zip(batch, other, strict=True):
            assert (one.device.type, one.dtype) == ("cpu", two.dtype)
            assert torch.equal(one, two)


@on_threads
def test_threads_live_from_the_first_batch_to_the_end_of_the_loop(make, num_threads, own_threads):
    loader = make(2, num_threads=num_threads)
    iterator = iter(loader)
    assert not own_threads()
    for _ in iterator:
        assert len(own_threads()) == num_threads
    assert not own_threads()
    for _ in loader:
        break  # an early exit
    assert not own_threads()
    cycle = [iter(loader)]
    next(cycle[0])
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert not own_threads()


@on_threads
@pytest.mark.parametrize("where", ["transform", "sampler", "batch_sampler"])
def test_an_error_arrives_in_its_turn_with_its_traceback(make, where, num_threads, own_threads):
    def broken(images):
        if images[0].equal(dataset[16][0]):
            raise KeyError("the cause")
        return images

    class Broken:
        def __iter__(self):
            yield from range(16) if where == "sampler" else np.arange(16).reshape(4, 4).tolist()
            raise KeyError("the cause")

    options = {"transform": broken} if where == "transform" else {where: Broken()}
    batch_size = 1 if where == "batch_sampler" else 4
    loader = make(batch_size, **options, num_threads=num_threads)
    dataset = loader.dataset
    batches = iter(loader)
    assert flat(next(batches).index.tolist() for _ in range(4)) == list(range(16))
    with pytest.raises(KeyError, match="the cause") as caught:
        next(batches)
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert ("broken" if where == "transform" else "__iter__") in frames
    assert position(loader) == (0, 16)
    assert not own_threads()


@on_threads
def test_batches_before_a_file_that_was_truncated_still_come(make_dataset, num_threads):
    index = make_dataset(rows=(12, 11), shape=(64, 64, 3))
    loader = Loader(index.path, 4, columns=["index"], num_threads=num_threads, device="cpu")
    with index.path.with_name("made-00001-of-00002.bin").open("r+b") as shard:
        shard.truncate(4096 + 5 * 64 * 64 * 3)
    batches = iter(loader)
    assert [next(batches).index[0].item() for _ in range(3)] == [0, 4, 8]
    with pytest.raises(FormatError, match=r"was truncated"):
        list(batches)


@pytest.mark.parametrize(("num_threads", "prefetch_factor"), [(0, 2), (1, 1), (3, 2)])
def test_a_loader_works_in_a_forked_child_but_an_iterator_from_before_does_not(
    make, num_threads, prefetch_factor, in_forked_child, monkeypatch
):
    loader = make(num_threads=num_threads, prefetch_factor=prefetch_factor)
    iterator = iter(loader)
    next(iterator)

    def child():
        for name in ("stream", "current_device", "current_stream", "_lazy_init"):
            monkeypatch.delattr(torch.cuda, name)  # they fail if the parent has used CUDA
        torch.set_num_threads(1)
        try:
            result = next(iterator).index.tolist()
        except RuntimeError as error:
            result = str(error)
        return result, visits(loader)

    result, anew = in_forked_child(child)
    assert "Iterate anew in the child" in result if num_threads else result == [4, 5, 6, 7]
    assert flat(anew) == list(range(SIZE))
    assert next(iterator).index.tolist() == [4, 5, 6, 7]
    iterator.close()


@pytest.mark.slow
def test_live_iterators_say_nothing_at_the_end_of_the_interpreter(path):
    program = """
import os, sys, memload
from torch.utils.data import DataLoader

def cycle(loader):
    while True:
        yield from loader

dataset = memload.MemmapDataset(sys.argv[1])
iterators = [
    iter(memload.Loader(dataset, 3, num_threads=2)),
    cycle(memload.Loader(dataset, 3, num_threads=0)),
    iter(memload.ThreadPrefetcher(memload.Loader(dataset, 3, num_threads=2))),
    memload.background(range)(100),
    iter(memload.CudaPrefetcher(range(100), device="cpu")),
    # whose thread is often inside of torch when the script ends
    iter(memload.ThreadPrefetcher(DataLoader(dataset, 2, shuffle=True))),
]
for iterator in iterators:
    next(iterator)
os.kept = iterators  # which is deleted after the modules of memload were
"""
    command = [sys.executable, "-c", program, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_thread_that_cannot_be_started_is_explained(make, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(MemloadError, match=r"limit on processes .* or use num_threads=0"):
        list(make(num_threads=2))
    with pytest.raises(MemloadError, match="iterate without a prefetcher"):
        list(ThreadPrefetcher([1]))
    assert flat(visits(make(num_threads=0))) == list(range(SIZE))


# Arguments


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"batch_size": 0}, ValueError, "batch_size must be an integer of at least 1, not 0."),
        ({"num_threads": 1.5}, ValueError, "num_threads must be an integer of at least 0, not 1.5"),
        ({"prefetch_factor": 0}, ValueError, "prefetch_factor must be an integer of at least 1"),
        ({"seed": None}, TypeError, "seed must be an integer, not None."),
        ({"shuffle": True, "sampler": [1]}, ValueError, "shuffle, sampler and batch_sampler excl"),
        (
            {"sampler": iter([1])},
            TypeError,
            "sampler is a list_iterator, which gives its numbers o",
        ),
        ({"batch_sampler": iter([[1]])}, TypeError, "batch_sampler is a list_iterator, which giv"),
        ({"batch_sampler": [[1]], "drop_last": True}, ValueError, "batch_sampler makes the batche"),
        ({"batch_sampler": [[1]], "batch_size": 2}, ValueError, "batch_sampler makes the batches"),
        ({"static_buffers": True}, ValueError, "static_buffers needs batches of one size."),
        ({"rank": 1}, ValueError, "rank=1 and num_replicas=None: give both of them or neither."),
        ({"rank": 2, "num_replicas": 2}, ValueError, "rank must be at least 0 and less than num"),
        ({"columns": ["nothing"]}, ValueError, "columns names 'nothing', which the data set"),
        ({"feed": "gpu"}, ValueError, "feed: there is no 'gpu'. Choose one of auto, resident, "),
        ({"feed": "dma", "device": "cpu"}, MemloadError, "feed='dma' needs a CUDA device"),
        ({"cache_bytes": 1.5}, ValueError, "cache_bytes: 1.5 is not a size."),
        ({"cache_bytes": 9, "feed": "cpu"}, ValueError, "cache_bytes has no effect on feed='cpu'"),
        ({"cache_bytes": -1}, ValueError, "cache_bytes must be at least 0, not -1."),
        ({"device": "gpu"}, ValueError, "device: 'gpu' is not supported."),
        ({"device": "meta"}, ValueError, "device: 'meta' is not supported."),
        ({"transform": [str]}, TypeError, "transform must be a function of images, not [<class"),
        ({"transform": transforms.train}, TypeError, "transform is train itself, which only makes"),
        ({"transform": transforms.Normalize}, TypeError, "transform is Normalize itself, which on"),
        ({"dataset": Subset([1, 2], [0])}, TypeError, "dataset must be a MemmapDataset or its pat"),
        ({"dataset": TensorDataset(torch.ones(3))}, TypeError, "dataset must be a MemmapDataset o"),
        ({"nothing": 1}, TypeError, "Loader has no argument 'nothing'."),
        ({"num_workers": 0, "pin_memory": True}, TypeError, "Loader has no argument 'num_workers'"),
    ],
)
def test_wrong_arguments_are_refused(path, arguments, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        Loader(**{"dataset": path, **arguments})


def test_a_data_set_with_a_transform_of_single_samples_is_refused(path):
    with pytest.raises(ValueError, match=r"^dataset has a transform, which is for single samples"):
        Loader(MemmapDataset(path, transform=str))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"fingerprint": "0" * 64}, ValueError, "belongs to another Loader: its fingerprint is "),
        ({"seed": 5}, ValueError, "its seed is 5, but this Loader's is 0"),
        ({"order": "ShuffledSampler(size=23, seed=6)"}, ValueError, "its order is 'Shuffled.*but"),
        ({"epoch": "3"}, ValueError, "state: epoch must be an integer of at least 0, not '3'"),
        ({"samples_seen": -1}, ValueError, "state: samples_seen must be an integer of at least 0"),
        ({"seed": ...}, ValueError, r"state has no seed\. Give what state_dict\(\) returned"),
        (None, TypeError, r"state is a list\. Give what state_dict\(\) returned"),
    ],
    ids=str,
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(make, change, error, message):
    loader = make(sampler=WeightedSampler(np.ones(SIZE), seed=5))
    before = loader.state_dict()
    state = [] if change is None else {**before, **change}
    state = state and {name: value for name, value in state.items() if value is not ...}
    with pytest.raises(error, match=message):
        loader.load_state_dict(state)
    assert loader.state_dict() == before
    with pytest.raises(ValueError, match="its order is 'WeightedSampler"):
        loader.load_state_dict(make(sampler=WeightedSampler(np.arange(SIZE))).state_dict())
    with pytest.raises(ValueError, match=r"^epoch must be an integer of at least 0, not -1"):
        loader.set_epoch(-1)


def test_an_epoch_without_batches_is_warned_of(make):
    loader = make(SIZE, shuffle=True, drop_last=True, rank=0, num_replicas=2)
    message = rf"^drop_last: an epoch has no batches, because {SIZE} samples .* each of 2 ranks"
    with pytest.warns(UserWarning, match=message) as caught:
        assert list(loader) == []
    assert caught[0].filename == __file__
    assert len(loader) == 0


def test_a_loader_says_what_it_is_and_what_feeds_it(path, caplog):
    loader = Loader(path, np.int64(4), shuffle=True, seed=2)
    assert repr(loader).splitlines() == [
        "Loader(",
        f"    {loader.dataset!r},",
        "    batch_size=4, order=ShuffledSampler(size=23, seed=2),",
        "    transform=None,",
        "    device='auto', feed='auto',",
        ")",
    ]
    with caplog.at_level("INFO", logger="memload"):
        cpu = Loader(path, 4, device="cpu")
    assert str(cpu.feed) == "cpu: the device is cpu"
    assert [f"{path}".removesuffix(".idx") in message for message in caplog.messages] == [True]
    assert "cpu: the device is cpu" in caplog.text
    assert "\n    device='cpu', feed='cpu',\n" in repr(cpu)
    assert cpu.device == torch.device("cpu")
