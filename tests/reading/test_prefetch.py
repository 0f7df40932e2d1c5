"""ThreadPrefetcher, background and CudaPrefetcher. tests/cuda has what needs a device."""

import gc
import threading
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

prefetched = partial(CudaPrefetcher, device="cpu")


@pytest.mark.parametrize("prefetch_factor", [1, 7])
@pytest.mark.parametrize("size", [0, 1, 100])
@pytest.mark.parametrize("prefetch", [ThreadPrefetcher, prefetched])
def test_items_come_in_order_in_every_epoch(prefetch, size, prefetch_factor):
    prefetcher = prefetch(range(size), prefetch_factor=prefetch_factor)
    assert len(prefetcher) == size
    assert list(prefetcher) == list(range(size))
    assert all(one == other for one, other in zip(prefetcher, prefetcher, strict=True))


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
    made.clear()
    next(iter(prefetched(items(), prefetch_factor=prefetch_factor)))
    assert len(made) == 1 + prefetch_factor


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
    prefetcher = prefetched(DataLoader([(torch.zeros(3, 2, 2), number) for number in range(5)], 2))
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


def test_a_dropped_prefetcher_drops_its_iterable():
    iterable = UserDict({0: 1, 1: 2})
    prefetcher = prefetched(iterable)
    prefetcher.next()
    dropped = weakref.ref(iterable)
    gc.collect()
    gc.disable()  # a cycle would keep the workers of a DataLoader
    try:
        del iterable, prefetcher
        assert dropped() is None
    finally:
        gc.enable()


class Numbers:
    """A data set of numbers, without an iterator."""

    def __len__(self):
        return 7

    def __getitem__(self, number):
        return torch.tensor(number)


def test_samples_of_a_data_set_come_by_number_or_shuffled():
    assert [int(one) for one in prefetched(Numbers())] == list(range(7))
    shuffled = prefetched(Numbers(), shuffle=True, seed=3)
    assert len(shuffled) == 7
    for epoch in (0, 1, 0):
        expected = ShuffledSampler(7, seed=3).take(epoch, np.arange(7)).tolist()
        shuffled.set_epoch(epoch)
        assert [int(one) for one in shuffled] == expected


class Batches(Numbers):
    """Batches of two equal images, by number."""

    def __len__(self):
        return 4

    def __getitem__(self, number):
        return torch.arange(3 * 9 * 9, dtype=torch.uint8).view(1, 3, 9, 9).repeat(2, 1, 1, 1)


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


def test_each_sample_draws_anew_and_differently_on_each_rank(monkeypatch):
    in_order = crops(Batches(), 2)
    assert len({one.numpy().tobytes() for one in in_order.flatten(0, 1)}) > 5
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not torch.equal(crops(Batches(), 2), in_order)


def test_an_epoch_is_told_to_the_iterable_and_to_its_samplers(make_dataset):
    sampler = DistributedSampler(range(8), num_replicas=2, rank=0, seed=1)
    batches = {"batch_sampler": BatchSampler(sampler, 4, False)}
    for options in (batches, {"sampler": sampler, "batch_size": 4}):
        prefetcher = prefetched(DataLoader(range(8), **options))
        for epoch in (2, 5):
            prefetcher.set_epoch(epoch)
            (numbers,) = prefetcher
            sampler.set_epoch(epoch)
            assert numbers.tolist() == list(sampler)
            sampler.set_epoch(0)
    loader = Loader(make_dataset().path, 5, shuffle=True, device="cpu")
    prefetched(loader).set_epoch(5)
    assert loader.state_dict()["epoch"] == 5


def test_a_dataloader_of_a_data_set_hands_its_columns_and_statistics_to_a_transform(make_dataset):
    columns = {"label": np.arange(5) % 3, "age": np.arange(5) + 20}
    statistics = {"mean": [0.5] * 3, "std": [0.25] * 3}
    dataset = MemmapDataset(make_dataset(columns=columns, statistics=statistics).path)
    mix = transforms.Compose([transforms.Normalize(), transforms.MixUp()])
    for whole in (dataset, Subset(Subset(dataset, range(5)), range(5))):
        batches = DataLoader(whole, 5, collate_fn=fast_collate)
        ((before, *_),) = batches
        ((images, labels, ages),) = prefetched(batches, transform=transforms.Normalize())
        torch.testing.assert_close(images, (before / 255 - 0.5) / 0.25)
        assert (labels.tolist(), ages.tolist()) == ([0, 1, 2, 0, 1], [20, 21, 22, 23, 24])
        ((_, labels, _),) = prefetched(batches, transform=mix)
        assert labels.shape == (5, 3)


@pytest.mark.parametrize("columns", [1, 2])
def test_masks_without_a_name_are_refused_where_images_move(columns):
    images = torch.arange(2 * 3 * 4 * 5, dtype=torch.uint8).view(2, 3, 4, 5)
    batch = (images, *[images[:, 0].int()] * columns)

    def first(transform):
        return next(iter(prefetched([batch], transform=transform)))

    flip = transforms.RandomHorizontalFlip(p=1)
    with pytest.raises(ValueError, match=r"int32 tensor of shape \(2, 4, 5\).*masks=\[\]"):
        first(flip)
    assert torch.equal(first(transforms.Compose([flip], masks=[]))[1], batch[1])
    assert torch.equal(first(transforms.Normalize("imagenet"))[1], batch[1])
    if columns == 1:
        flipped = first(transforms.Compose([flip], masks=["label"]))
        assert torch.equal(flipped[1], flipped[0][:, 0].int())
