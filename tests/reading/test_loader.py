"""What a Loader hands out. test_machine.py has orders, ranks, epochs and resuming."""

import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, SubsetRandomSampler

from memload import (
    FormatError,
    Loader,
    MemmapDataset,
    RepeatedSampler,
    SequentialSampler,
    WeightedSampler,
    transforms,
)
from memload.machine import available_cores

SIZE = 23
MEAN, STD = [0.1, 0.2, 0.3], [0.5, 0.6, 0.7]
EYES = np.random.default_rng(0).uniform(0, 4, (SIZE, 2, 2)).astype(np.float32)
TRAIN = transforms.Compose([transforms.RandomCrop(4, 1), transforms.RandomHorizontalFlip()])

on_threads = pytest.mark.parametrize("num_threads", [0, 2])


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


def by_number(loader):
    images = {}
    for batch in loader:
        images |= zip(batch.index.tolist(), batch.images, strict=True)
    return images


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


def test_columns_of_any_type_are_the_batchs_own(make_dataset):
    rng = np.random.default_rng(0)
    columns = {
        "number": np.arange(30, dtype="<u2"),
        "grid": rng.random((30, 3, 5)),
        "flags": rng.random((30, 3)) > 0.5,
        "age": rng.integers(-9, 9, (30, 1)),
    }
    dataset = MemmapDataset(make_dataset(rows=(30,), columns=columns, classes=None).path)[::-2]
    for _ in range(2):
        for batch in Loader(dataset, 4, shuffle=True, columns=[*columns, "index"], device="cpu"):
            for name, stored in columns.items():
                value = getattr(batch, name)
                np.testing.assert_array_equal(value, stored[::-2][batch.index], strict=True)
                assert value.untyped_storage().nbytes() == value.nbytes  # not the whole chunk's
                value.fill_(0)


@on_threads
def test_a_batch_stays_as_it_is_while_anything_refers_to_it(make, num_threads):
    loader = make(2, shuffle=True, num_threads=num_threads)
    dataset = loader.dataset
    held = [(batch.images[:, 1:], batch.index) for _ in range(20) for batch in loader]
    for part, index in held:
        assert torch.equal(part.permute(0, 2, 3, 1), dataset.gather(index)[..., 1:])


def test_many_readers_of_one_data_set_do_not_disturb_each_other(path, make):
    shared = MemmapDataset(path, columns=["index"])
    expected, loader = [image for image, _ in shared], make(8, shuffle=True, num_threads=1)

    def reader(number):
        dataset = shared if number % 2 else MemmapDataset(path, columns=["index"])
        own = Loader(dataset, 7, shuffle=True, seed=number, num_threads=number % 3, device="cpu")
        for images in (by_number(own), by_number(loader)):
            assert len(images) == SIZE
            assert all(torch.equal(images[sample], expected[sample]) for sample in range(SIZE))
        for sample in np.random.default_rng(number).integers(0, SIZE, 100).tolist():
            image, found = dataset[sample]
            assert found == sample
            assert torch.equal(dataset.gather([sample, 0])[0], image.permute(1, 2, 0))

    with ThreadPoolExecutor(8) as readers:
        list(readers.map(reader, range(16), timeout=100))


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
    unlike = iter(make(1, batch_sampler=[[1, 2], [3]], static_buffers=True))
    next(unlike)
    with pytest.raises(ValueError, match=r"^static_buffers: a batch has tensors of \(1, 3, 4, 6\)"):
        next(unlike)


# Orders and ranks


class InOrder(SequentialSampler):
    """Notes the positions that it is asked for."""

    def take(self, epoch, positions):
        self._asked = (epoch, positions.tolist())
        return positions


def test_an_order_is_asked_only_for_what_a_rank_has_not_seen(make):
    order = InOrder(SIZE)
    loader = make(sampler=order, rank=1, num_replicas=2, num_threads=0)
    loader.load_state_dict({**loader.state_dict(), "epoch": 3, "samples_seen": 8})
    assert visits(loader) == [[12, 13, 14, 15], [19, 20, 21, 22]]  # rank 0 has 16, 17 and 18
    assert order._asked == (3, [12, 13, 14, 15, 19, 20, 21, 22])


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


def test_ranks_are_those_of_torchrun_unless_they_are_given(make, monkeypatch):
    loader, given = make(), make(rank=0, num_replicas=2)
    assert (loader.rank, loader.num_replicas, len(loader)) == (0, 1, 6)
    assert loader.num_threads == min(8, available_cores())
    monkeypatch.setenv("RANK", "2")
    for use in (len, list, lambda loader: loader.rank):  # half of it is an error
        with pytest.raises(ValueError, match="variable RANK is '2', but WORLD_SIZE is not set"):
            use(loader)
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert (loader.rank, loader.num_replicas) == (2, 3)
    assert visits(loader) == [[8, 9, 10, 11], list(range(19, SIZE))]  # and loses no samples
    assert (given.rank, given.num_replicas) == (0, 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")  # which share the cores of this host
    assert make().num_threads == 1


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


def test_a_rank_without_a_share_of_the_last_step_does_not_begin_the_next_epoch(path):
    dataset = MemmapDataset(path, columns=["index"])[:9]
    loaders = [Loader(dataset, 2, rank=rank, num_replicas=4, device="cpu") for rank in range(4)]
    for loader in loaders:
        loader.load_state_dict({**loader.state_dict(), "samples_seen": 8})
    assert [visits(loader) for loader in loaders] == [[], [], [], [[8]]]
    assert {position(loader) for loader in loaders} == {(1, 0)}


# Epochs and states


class Told(list):
    """A user's own list of numbers, which is told the epochs."""

    def set_epoch(self, epoch):
        self.epoch = epoch


def test_an_epoch_begins_with_its_first_batch_and_is_told_to_samplers(make):
    for told in (Told(range(5)), Told([[0, 1], [2, 3, 4]])):
        batches = BatchSampler(told, 2, False) if told[0] == 0 else told
        loader = make(1, batch_sampler=batches)
        iter(loader)
        for epoch in (0, 1):
            assert flat(visits(loader)) == list(range(5))
            assert told.epoch == epoch
        loader.set_epoch(np.int64(7))
        assert told.epoch == 7
        state = json.loads(json.dumps(loader.state_dict()))
        loader.set_epoch(3)
        next(iter(loader))
        loader.load_state_dict(state)
        assert (loader.state_dict(), told.epoch) == (state, 7)


def test_the_state_is_that_of_the_iterator_that_gave_a_batch_last(make):
    loader = make(num_threads=2)
    first = iter(loader)
    next(first)
    second = iter(loader)
    assert position(loader) == (1, 0)
    for iterator, expected in ((first, (0, 8)), (second, (1, 4)), (first, (0, 12))):
        next(iterator)
        assert position(loader) == expected
    assert flat(visits(second)) == list(range(4, SIZE))
    assert position(loader) == (2, 0)
    next(first)
    assert position(loader) == (0, 16)
    second.close()
    assert flat(visits(first)) == list(range(16, SIZE))


@pytest.mark.parametrize("method", ["take", "__iter__"])
def test_an_error_before_the_first_batch_loses_no_position(make, method):
    def fail(*_):
        raise OSError("broken")

    broken = make(sampler=type("Broken", (), {"__len__": lambda _: SIZE, method: fail})())
    state = {**broken.state_dict(), "epoch": 3, "samples_seen": 8}
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


# Errors and words


@on_threads
def test_an_error_of_the_transform_leaves_the_state_before_its_batch(make, num_threads):
    def broken(images):
        if images[0].equal(loader.dataset[16][0]):
            raise KeyError("the cause")
        return images

    loader = make(4, transform=broken, num_threads=num_threads)
    with pytest.raises(KeyError, match="the cause"):
        visits(loader)
    assert position(loader) == (0, 16)


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
