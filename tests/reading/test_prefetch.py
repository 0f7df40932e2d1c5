"""ThreadPrefetcher, background and CudaPrefetcher. tests/cuda has what needs a device."""

import gc
import threading
import traceback
import weakref
from collections import UserDict
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Subset

from memload import (
    CudaPrefetcher,
    Loader,
    MemmapDataset,
    ShuffledSampler,
    ThreadPrefetcher,
    background,
    fast_collate,
    transforms,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"  # of fork, from Python 3.12 on
)
prefetched = partial(CudaPrefetcher, device="cpu")


def failing(after, error=KeyError):
    yield from range(after)
    raise error("the cause")


def pairs(size):
    """Return samples (image, number) for a DataLoader."""
    return [(torch.full((3, 2, 2), number, dtype=torch.uint8), number) for number in range(size)]


# Both


@pytest.mark.parametrize("prefetch_factor", [1, 7])
@pytest.mark.parametrize("size", [0, 1, 100])
@pytest.mark.parametrize("prefetch", [ThreadPrefetcher, prefetched])
def test_items_come_in_order_in_every_epoch(prefetch, size, prefetch_factor):
    prefetcher = prefetch(range(size), prefetch_factor=prefetch_factor)
    assert len(prefetcher) == size
    assert list(prefetcher) == list(range(size))
    assert all(one == other for one, other in zip(prefetcher, prefetcher, strict=True))


@pytest.mark.parametrize(
    ("prefetch", "error"),
    [(ThreadPrefetcher, KeyError), (ThreadPrefetcher, KeyboardInterrupt), (prefetched, KeyError)],
)
def test_an_error_arrives_after_the_items_before_it_with_its_traceback(prefetch, error):
    seen = []
    with pytest.raises(error, match="the cause") as caught:
        seen.extend(prefetch(failing(3, error)))
    assert seen == [0, 1, 2]
    assert "failing" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]


@pytest.mark.parametrize("prefetch", [ThreadPrefetcher, prefetched])
def test_leaving_early_ends_the_thread_and_closes_the_generator(prefetch, own_threads):
    closed = []

    def items():
        try:
            yield from range(1000)
        finally:
            closed.append(threading.current_thread().name)

    for _ in prefetch(items()):
        break
    cycle = [iter(prefetch(items()))]
    next(cycle[0])
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert not own_threads()
    is_own = prefetch is prefetched
    assert closed == [threading.current_thread().name if is_own else "memload-prefetch"] * 2


@pytest.mark.parametrize("prefetch", [ThreadPrefetcher, prefetched])
def test_an_iterator_from_before_a_fork_is_refused_in_the_child(prefetch, in_forked_child):
    prefetcher = prefetch(range(100))
    iterator = iter(prefetcher)
    next(iterator)

    def child():
        with pytest.raises(RuntimeError, match="Iterate anew in the child"):
            next(iterator)
        return list(prefetcher)

    assert in_forked_child(child) == list(range(100))
    assert next(iterator) == 1
    iterator.close()


@pytest.mark.parametrize(
    ("set_default", "value", "before"),
    [
        (torch.set_default_device, "meta", None),
        (torch.set_default_dtype, torch.float64, torch.float32),
        (torch.set_default_dtype, torch.bfloat16, torch.float32),
    ],
)
def test_batches_do_not_depend_on_torchs_defaults(make_dataset, set_default, value, before):
    batches = Loader(make_dataset(rows=(9,)).path, 4, num_threads=0, device="cpu")
    prefetchers = [
        ThreadPrefetcher(batches),
        *(prefetched(batches, transform=transform) for transform in (None, transforms.evaluate(4))),
        prefetched(Batches(), shuffle=True, transform=transforms.RandomCrop(9, 4)),
    ]
    expected = [list(prefetcher) for prefetcher in prefetchers]
    set_default(value)
    try:
        for prefetcher in prefetchers[1:]:
            prefetcher.set_epoch(0)
        found = [list(prefetcher) for prefetcher in prefetchers]
    finally:
        set_default(before)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ThreadPrefetcher([1], 0), ValueError, "^prefetch_factor must be an integer of at"),
        (lambda: background(prefetch_factor=0), ValueError, "^prefetch_factor must be an integer"),
        (lambda: list(ThreadPrefetcher(3)), TypeError, "'int' object is not iterable"),
        (lambda: prefetched([1], prefetch_factor=0), ValueError, "^prefetch_factor must be an int"),
        (lambda: prefetched([1], shuffle=True), ValueError, "^shuffle is for a dataset of samples"),
        (lambda: prefetched(3), TypeError, "^iterable must be an iterable or a dataset with a len"),
        (lambda: prefetched("out.bin"), TypeError, r"^iterable is the path 'out\.bin'"),
        (lambda: prefetched([1], transform=3), TypeError, "^transform must be a function of im"),
        (lambda: prefetched([1], transform=transforms.train), TypeError, "^transform is train its"),
        (lambda: CudaPrefetcher([1], device="gpu"), ValueError, "^device: 'gpu' is not supported"),
    ],
)
def test_wrong_arguments_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


# On a thread


@pytest.mark.parametrize("prefetch_factor", [1, 3])
def test_no_more_than_prefetch_factor_items_are_made_ahead(prefetch_factor):
    made, one_more = [], threading.Semaphore(0)

    def items():
        for number in range(100):
            made.append(number)
            one_more.release()
            yield number

    iterator = iter(ThreadPrefetcher(items(), prefetch_factor))
    assert made == []
    for taken in (1, 2):
        next(iterator)
        while len(made) < prefetch_factor + taken:
            assert one_more.acquire(timeout=10)
        assert len(made) == prefetch_factor + taken
    iterator.close()
    assert len(made) == prefetch_factor + 2


def test_a_decorated_generator_runs_on_a_thread_and_keeps_its_name():
    class Source:
        @background
        def items(self, count, *, step=1):
            """Count."""
            for number in range(0, count, step):
                yield number, threading.current_thread().name

        few_items = background(prefetch_factor=1)(items)

    assert (Source.items.__name__, Source.items.__doc__) == ("items", "Count.")
    expected = [(number, "memload-prefetch") for number in (0, 2, 4)]
    assert list(Source().items(6, step=2)) == list(Source().few_items(6, step=2)) == expected


# To a device


class Batches:
    """A data set without an iterator: makes batches of two equal images by number."""

    def __len__(self):
        return 4

    def __getitem__(self, number):
        image = torch.arange(3 * 9 * 9, dtype=torch.uint8, device="cpu").view(1, 3, 9, 9)
        return image.repeat(2, 1, 1, 1)


class Pair(NamedTuple):
    images: torch.Tensor
    label: torch.Tensor


class Encoding(UserDict):
    """As that of transformers."""


def test_tensors_are_moved_and_all_else_stays_as_it_is():
    deep = Encoding(deep=({"x": (torch.ones(2),)}, 3.5), keys=["a", None])
    batch = Pair([torch.ones(2), None, "text"], deep)
    (result,) = prefetched([batch])
    assert (type(result), type(result.label), result.images[1:]) == (Pair, Encoding, [None, "text"])
    assert (result.label["keys"], result.label["deep"][1]) == (["a", None], 3.5)
    assert result.label["deep"][0]["x"][0].tolist() == result.images[0].tolist() == [1, 1]


def test_a_function_gets_the_images_wherever_they_are():
    image, label = torch.ones(2), torch.zeros(2)

    def run(batch, transform):
        return next(iter(prefetched([batch], transform=transform)))

    assert run(image, torch.neg).tolist() == [-1, -1]
    for batch in ((image, label), [image, label], Pair(image, label)):
        result = run(batch, torch.neg)
        assert type(result) is type(batch)
        assert (result[0].tolist(), result[1] is label) == ([-1, -1], True)
    assert run({"image": image}, lambda batch: batch["image"] + 1).tolist() == [2, 2]


def test_next_gives_none_for_every_element_at_the_end():
    prefetcher = prefetched(DataLoader(pairs(5), 2))
    seen = []
    images, numbers = prefetcher.next()
    while images is not None:
        seen += numbers.tolist()
        images, numbers = prefetcher.next()
    assert seen == [0, 1, 2, 3, 4]
    assert prefetcher.next() == prefetched([]).next() == (None, None)
    assert len(list(prefetcher)) == 3
    three = prefetched([(1, 2, 3)])
    assert [three.next(), three.next()] == [(1, 2, 3), (None, None, None)]


def test_samples_of_a_data_set_come_by_number_or_shuffled():
    class Samples:
        def __len__(self):
            return 7

        def __getitem__(self, number):
            return torch.tensor(number)

    assert [int(one) for one in prefetched(Samples())] == list(range(7))
    shuffled = prefetched(Samples(), shuffle=True, seed=3)
    assert len(shuffled) == 7
    for epoch in (0, 1, 0):
        expected = ShuffledSampler(7, seed=3).take(epoch, np.arange(7)).tolist()
        shuffled.set_epoch(epoch)
        assert [int(one) for one in shuffled] == expected


def crops(iterable, epoch=0, **options):
    prefetcher = prefetched(iterable, transform=transforms.RandomCrop(9, 4), **options)
    prefetcher.set_epoch(epoch)
    return torch.stack(list(prefetcher))


def test_draws_are_those_of_seed_epoch_and_position_whatever_was_done_before():
    flock = [Batches()[number] for number in range(4)]
    prefetcher = prefetched(flock, transform=transforms.RandomCrop(9, 4))
    next(iter(prefetcher))  # an early exit from epoch 0
    assert torch.equal(torch.stack(list(prefetcher)), crops(flock, 1, prefetch_factor=1))
    drawn = crops(flock)
    for other in (crops(flock, 1), crops(flock, 0, seed=5), drawn[[1, 0, 2, 3]]):
        assert not torch.equal(drawn, other)


def test_samples_with_numbers_draw_by_these_on_each_rank_differently(monkeypatch):
    order = ShuffledSampler(4, seed=0).take(2, np.arange(4)).tolist()
    assert order != [0, 1, 2, 3]
    in_order = crops(Batches(), 2)
    assert len({one.numpy().tobytes() for one in in_order.flatten(0, 1)}) == 8
    assert torch.equal(crops(Batches(), 2, shuffle=True), in_order[order])
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not torch.equal(crops(Batches(), 2), in_order)


def test_an_epoch_is_told_to_the_iterable_and_to_its_samplers(make_dataset):
    sampler = DistributedSampler(pairs(8), num_replicas=2, rank=0, seed=1)
    batches = {"batch_sampler": BatchSampler(sampler, 4, False)}
    for options in (batches, {"sampler": sampler, "batch_size": 4}):
        prefetcher = prefetched(DataLoader(pairs(8), **options))
        for epoch in (2, 5):
            prefetcher.set_epoch(epoch)
            ((_, numbers),) = prefetcher
            sampler.set_epoch(epoch)
            assert numbers.tolist() == list(sampler)
            sampler.set_epoch(0)
    loader = Loader(make_dataset().path, 5, shuffle=True, device="cpu")
    prefetched(loader).set_epoch(5)
    assert loader.state_dict()["epoch"] == 5


def test_a_dropped_prefetcher_drops_its_iterable():
    class Items:
        def __iter__(self):
            yield from range(5)

    iterable = Items()
    prefetcher = prefetched(iterable)
    prefetcher.next()
    dropped = weakref.ref(iterable)
    gc.collect()
    gc.disable()
    try:
        del iterable, prefetcher
        assert dropped() is None
    finally:
        gc.enable()


EYES = np.random.default_rng(0).uniform(0, 4, (5, 2, 2)).astype(np.float32)


def test_a_dataloader_of_a_data_set_hands_its_columns_and_statistics_to_a_transform(make_dataset):
    columns = {"label": np.arange(5) % 3, "eyes": EYES, "age": np.arange(5) + 20}
    facts = {"points": ("eyes",), "statistics": {"mean": [0.5] * 3, "std": [0.25] * 3}}
    dataset = MemmapDataset(make_dataset(columns=columns, **facts).path)
    steps = [transforms.RandomHorizontalFlip(1), transforms.Normalize(), transforms.MixUp()]
    for whole in (dataset, Subset(dataset, range(5)), Subset(Subset(dataset, range(5)), range(5))):
        batches = DataLoader(whole, 5, collate_fn=fast_collate)
        ((images, labels, eyes, ages),) = prefetched(batches, transform=steps[0])
        ((before, *_),) = batches
        assert torch.equal(images, before.flip(3))
        np.testing.assert_allclose(eyes, EYES * [-1, 1] + [5, 0], rtol=1e-6)
        assert (labels.tolist(), ages.tolist()) == ([0, 1, 2, 0, 1], [20, 21, 22, 23, 24])
        ((images, *_),) = prefetched(batches, transform=steps[1])
        torch.testing.assert_close(images, (before / 255 - 0.5) / 0.25)
        ((_, labels, *_),) = prefetched(batches, transform=transforms.Compose(steps[1:]))
        assert labels.shape == (5, 3)


@pytest.mark.parametrize("columns", [1, 2])
def test_masks_without_a_name_are_refused_where_images_move(columns):
    images = torch.arange(2 * 3 * 4 * 5, dtype=torch.uint8).view(2, 3, 4, 5)
    batch = (images, *[images[:, 0].int()] * columns)

    def first(transform):
        return next(iter(prefetched([batch], transform=transform)))

    flip = transforms.RandomHorizontalFlip(p=1)
    for moving in (flip, transforms.Compose([transforms.CenterCrop(2)])):
        with pytest.raises(ValueError, match=r"int32 tensor of shape \(2, 4, 5\).*masks=\[\]"):
            first(moving)
    assert torch.equal(first(transforms.Compose([flip], masks=[]))[1], batch[1])
    assert torch.equal(first(transforms.Normalize("imagenet"))[1], batch[1])
    if columns == 1:
        flipped = first(transforms.Compose([flip], masks=["label"]))
        assert torch.equal(flipped[1], flipped[0][:, 0].int())
