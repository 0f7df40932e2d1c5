import gc
import threading
import traceback
import weakref
from collections import UserDict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

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


def failing(after: int, error: type[BaseException] = KeyError) -> Iterator[int]:
    yield from range(after)
    raise error("the cause")


class Batches:
    """A dataset without an iterator: makes batches of two images by number."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.arange(2 * 3 * 9 * 9).reshape(2, 3, 9, 9).to(torch.uint8)


@pytest.mark.parametrize("prefetch_factor", [1, 7])
@pytest.mark.parametrize("size", [0, 1, 100])
def test_items_come_in_order_in_every_epoch(size: int, prefetch_factor: int) -> None:
    prefetcher = ThreadPrefetcher(range(size), prefetch_factor)
    assert len(prefetcher) == size
    assert list(prefetcher) == list(range(size))
    assert list(zip(prefetcher, prefetcher, strict=True)) == [
        (number, number) for number in range(size)
    ]


@pytest.mark.parametrize("prefetch_factor", [1, 3])
def test_no_more_than_prefetch_factor_items_are_made_ahead(prefetch_factor: int) -> None:
    made: list[int] = []
    one_more = threading.Semaphore(0)

    def items() -> Iterator[int]:
        for number in range(100):
            made.append(number)
            one_more.release()
            yield number

    iterator: Any = iter(ThreadPrefetcher(items(), prefetch_factor))
    assert made == []
    for taken in (1, 2):
        next(iterator)
        while len(made) < prefetch_factor + taken:
            assert one_more.acquire(timeout=10)
        assert len(made) == prefetch_factor + taken
    iterator.close()
    assert len(made) == prefetch_factor + 2


@pytest.mark.parametrize(
    ("prefetch", "error"),
    [
        (ThreadPrefetcher, KeyError),
        (ThreadPrefetcher, KeyboardInterrupt),
        (partial(CudaPrefetcher, device="cpu"), KeyError),
        (partial(CudaPrefetcher, device="cpu", own_thread=True), KeyError),
    ],
)
def test_an_exception_arrives_after_the_items_before_it_with_its_traceback(
    prefetch: Any, error: type[BaseException]
) -> None:
    seen = []
    with pytest.raises(error, match="the cause") as caught:
        seen.extend(prefetch(failing(3, error)))
    assert seen == [0, 1, 2]
    assert "failing" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]


def test_leaving_early_ends_the_thread_and_closes_the_generator(
    own_threads: Callable[[], Any],
) -> None:
    closed = []

    def items() -> Iterator[int]:
        try:
            yield from range(1000)
        finally:
            closed.append(threading.current_thread().name)

    for _ in ThreadPrefetcher(items()):
        break
    cycle: list[Any] = [iter(CudaPrefetcher(items(), device="cpu", own_thread=True))]
    next(cycle[0])
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert not own_threads()
    assert closed == ["memload-prefetch"] * 2


def test_a_decorated_generator_runs_ahead_and_keeps_its_name() -> None:
    class Source:
        @background
        def items(self, count: int, *, step: int = 1) -> Iterator[tuple[int, str]]:
            """Count."""
            for number in range(0, count, step):
                yield number, threading.current_thread().name

        few_items = background(prefetch_factor=1)(items)

    assert (Source.items.__name__, Source.items.__doc__) == ("items", "Count.")
    expected = [(number, "memload-prefetch") for number in (0, 2, 4)]
    assert list(Source().items(6, step=2)) == expected
    assert [number for number, _ in Source().few_items(6, step=2)] == [0, 2, 4]


def test_an_iterator_says_in_a_forked_child_that_it_has_no_thread(
    in_forked_child: Callable[..., Any],
) -> None:
    prefetcher = ThreadPrefetcher(range(100))
    iterator: Any = iter(prefetcher)
    next(iterator)

    def child() -> list[int]:
        with pytest.raises(RuntimeError, match="forked child"):
            next(iterator)
        return list(prefetcher)

    assert in_forked_child(child) == list(range(100))
    assert next(iterator) == 1
    iterator.close()


def pairs(size: int) -> Any:
    """Return samples (image, number) for a DataLoader."""
    return [(torch.full((3, 2, 2), number, dtype=torch.uint8), number) for number in range(size)]


on_both = pytest.mark.parametrize("own_thread", [False, True])


def prefetched(iterable: Any, **options: Any) -> CudaPrefetcher:
    return CudaPrefetcher(iterable, device="cpu", **options)


@on_both
@pytest.mark.parametrize("prefetch_factor", [1, 9])
def test_a_dataloader_gives_the_same_batches(own_thread: bool, prefetch_factor: int) -> None:
    batches = DataLoader(pairs(10), 4)
    prefetcher = prefetched(batches, own_thread=own_thread, prefetch_factor=prefetch_factor)
    assert len(prefetcher) == 3
    for _ in range(2):
        numbers = [numbers.tolist() for _, numbers in prefetcher]
        assert numbers == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@on_both
def test_a_transform_gets_the_images_wherever_they_are(own_thread: bool) -> None:
    class Batch(NamedTuple):
        images: torch.Tensor
        labels: torch.Tensor

    image, label = torch.ones(2), torch.zeros(2)

    def double(images: torch.Tensor) -> torch.Tensor:
        return images * 2

    def run(batch: Any, transform: Any = double) -> Any:
        (result,) = prefetched([batch], transform=transform, own_thread=own_thread)
        return result

    assert torch.equal(run(image), image * 2)
    for batch in ((image, label), [image, label], Batch(image, label)):
        result = run(batch)
        assert type(result) is type(batch)
        assert torch.equal(result[0], image * 2)
        assert result[1] is label
    assert run({"image": image}, lambda batch: batch["image"] + 1).tolist() == [2, 2]


def test_tensors_are_moved_and_all_else_stays_as_it_is() -> None:
    class Encoding(UserDict[str, Any]):
        """As that of transformers."""

    batch = Encoding(keys=["a", None], deep=({"x": (torch.ones(2),)}, 3.5))
    (result,) = prefetched([batch])
    assert type(result) is Encoding
    assert result["keys"] == ["a", None]
    assert result["deep"][1] == 3.5
    assert torch.equal(result["deep"][0]["x"][0], torch.ones(2))


def test_points_of_a_data_set_follow_what_a_transform_moves(
    make_dataset: Callable[..., Any],
) -> None:
    eyes = np.random.default_rng(0).uniform(0, 4, (5, 2, 2)).astype(np.float32)
    columns = {"label": np.arange(5) % 3, "eyes": eyes, "age": np.arange(5) + 20}
    path = make_dataset(columns=columns, points=("eyes",)).path
    dataset = MemmapDataset(path, columns=["label", "eyes", "age"])
    batches = DataLoader(dataset, 3, collate_fn=fast_collate)
    flip = transforms.RandomHorizontalFlip(1)
    for found, expected in zip(prefetched(batches, transform=flip), batches, strict=True):
        assert torch.equal(found[0], expected[0].flip(3))
        assert torch.equal(found[2][..., 0], 5 - expected[2][..., 0])
        assert torch.equal(found[2][..., 1], expected[2][..., 1])
        assert torch.equal(found[1], expected[1])
        assert torch.equal(found[3], expected[3])


@pytest.mark.parametrize("columns", [1, 2])
def test_masks_without_a_name_are_refused_where_images_move(columns: int) -> None:
    images = torch.arange(2 * 3 * 4 * 5, dtype=torch.uint8).view(2, 3, 4, 5)
    batch = (images, *[images[:, 0].int()] * columns)

    def first(transform: Any) -> Any:
        return next(iter(CudaPrefetcher([batch], device="cpu", transform=transform)))

    flip = transforms.RandomHorizontalFlip(p=1)
    for moving in (flip, transforms.Compose([transforms.CenterCrop(2)])):
        with pytest.raises(ValueError, match=r"int32 tensor of shape \(2, 4, 5\).*masks=\[\]"):
            first(moving)
    assert torch.equal(first(transforms.Compose([flip], masks=[]))[1], batch[1])
    assert torch.equal(first(transforms.Normalize("imagenet"))[1], batch[1])
    if columns == 1:
        flipped = first(transforms.Compose([flip], masks=["label"]))
        assert torch.equal(flipped[1], flipped[0][:, 0].int())
        with pytest.raises(ValueError, match=r"not None\. The columns are: label\."):
            first(transforms.Compose([flip], masks=["mask"]))


@on_both
def test_next_gives_none_for_every_element_at_the_end(own_thread: bool) -> None:
    prefetcher = prefetched(DataLoader(pairs(5), 2), own_thread=own_thread)
    seen = []
    images, numbers = prefetcher.next()
    while images is not None:
        seen += numbers.tolist()
        images, numbers = prefetcher.next()
    assert seen == [0, 1, 2, 3, 4]
    assert prefetcher.next() == (None, None)
    assert prefetched([]).next() == (None, None)
    three = prefetched([(1, 2, 3)])
    assert [three.next(), three.next()] == [(1, 2, 3), (None, None, None)]


@on_both
def test_samples_of_a_dataset_come_by_number_or_shuffled(own_thread: bool) -> None:
    class Samples:
        def __len__(self) -> int:
            return 7

        def __getitem__(self, number: int) -> torch.Tensor:
            return torch.tensor(number)

    assert [int(one) for one in prefetched(Samples(), own_thread=own_thread)] == list(range(7))
    shuffled = prefetched(Samples(), shuffle=True, seed=3, own_thread=own_thread)
    assert len(shuffled) == 7
    for epoch in (0, 1, 0):
        expected = ShuffledSampler(7, seed=3).take(epoch, np.arange(7)).tolist()
        shuffled.set_epoch(epoch)
        assert [int(one) for one in shuffled] == expected


def crops(
    iterable: Any, seed: int = 0, epoch: int | None = None, **options: Any
) -> list[torch.Tensor]:
    prefetcher = prefetched(iterable, transform=transforms.RandomCrop(9, 4), seed=seed, **options)
    if epoch is not None:
        prefetcher.set_epoch(epoch)
    return list(prefetcher)


@on_both
def test_draws_are_those_of_seed_epoch_and_place_whatever_was_done_before(own_thread: bool) -> None:
    flock = [Batches()[number] for number in range(4)]
    prefetcher = prefetched(flock, transform=transforms.RandomCrop(9, 4), own_thread=own_thread)
    epochs = [torch.stack(list(prefetcher)) for _ in range(3)]
    assert not torch.equal(epochs[0], epochs[1])
    for epoch, expected in enumerate(epochs):
        assert torch.equal(torch.stack(crops(flock, epoch=epoch, prefetch_factor=3)), expected)
    assert not torch.equal(torch.stack(crops(flock, seed=5)), epochs[0])
    left = prefetched(flock, transform=transforms.RandomCrop(9, 4), own_thread=own_thread)
    next(iter(left))
    assert torch.equal(torch.stack(list(left)), epochs[1])


def test_samples_with_numbers_draw_by_these_on_each_rank_differently(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order = ShuffledSampler(4, seed=0).take(2, np.arange(4)).tolist()
    assert order != [0, 1, 2, 3]
    shuffled, in_order = crops(Batches(), epoch=2, shuffle=True), crops(Batches(), epoch=2)
    for position, number in enumerate(order):
        assert torch.equal(shuffled[position], in_order[number])
    monkeypatch.setenv("RANK", "1")
    assert not torch.equal(torch.stack(crops(Batches(), epoch=2)), torch.stack(in_order))


def test_batches_of_several_sizes_that_have_numbers_draw_differently() -> None:
    class Shrinking(Batches):
        def __getitem__(self, number: int) -> torch.Tensor:
            image = torch.arange(9 * 9, dtype=torch.uint8).reshape(1, 9, 9)
            return image.repeat((32, 32, 5, 1)[number], 3, 1, 1)

    drawn = torch.cat(crops(Shrinking())).flatten(1)
    # 25 windows, each seen about three times: any two batches that draw alike would show as runs
    for shift in range(1, 70):
        assert not (drawn[shift:] == drawn[:-shift]).all(1)[-5:].all()


def test_an_epoch_is_told_to_the_iterable_and_to_the_sampler_of_a_batch_sampler(
    make_dataset: Callable[..., Any],
) -> None:
    sampler = DistributedSampler(pairs(8), num_replicas=2, rank=0, seed=1)
    batches = DataLoader(pairs(8), batch_sampler=BatchSampler(sampler, 4, drop_last=False))
    prefetcher = prefetched(batches)
    orders = []
    for epoch in range(3):
        prefetcher.set_epoch(epoch)
        ((_, numbers),) = prefetcher
        orders.append(numbers.tolist())
    assert orders[0] != orders[1] != orders[2]
    loader = Loader(make_dataset().path, 5, shuffle=True, device="cpu")
    prefetched(loader).set_epoch(5)
    assert loader.state_dict()["epoch"] == 5


def test_wrong_arguments_of_a_prefetcher_are_refused() -> None:
    for make in (ThreadPrefetcher, prefetched, background):
        with pytest.raises(ValueError, match="prefetch_factor must be an integer of at least 1"):
            make(iter, prefetch_factor=0)
    with pytest.raises(ValueError, match="shuffle is for a dataset of samples"):
        prefetched([1], shuffle=True)
    with pytest.raises(TypeError, match="iterable must be an iterable or a dataset with a length"):
        prefetched(3)
    with pytest.raises(TypeError, match="not iterable"):
        list(ThreadPrefetcher(3))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="transform is train itself, which only makes one"):
        prefetched([1], transform=transforms.train)
    with pytest.raises(TypeError, match=r"iterable is the path 'out\.bin'"):
        prefetched("out.bin")


@on_both
def test_a_dropped_prefetcher_drops_its_iterable(own_thread: bool) -> None:
    class Batches:
        def __iter__(self) -> Iterator[int]:
            yield from range(5)

    iterable = Batches()
    prefetcher = prefetched(iterable, own_thread=own_thread)
    prefetcher.next()
    dropped = weakref.ref(iterable)
    gc.collect()
    gc.disable()
    try:
        del iterable, prefetcher
        assert dropped() is None
    finally:
        gc.enable()


def test_transforms_get_the_statistics_and_the_columns_of_a_data_set(
    make_dataset: Callable[..., Any],
) -> None:
    columns = {"label": np.arange(5) % 3, "age": np.arange(5)}
    statistics = {"mean": [0.5] * 3, "std": [0.25] * 3}
    path = make_dataset(columns=columns, statistics=statistics).path
    dataset = MemmapDataset(path, columns=["label", "age"])
    mix = transforms.Compose([transforms.Normalize(), transforms.MixUp(num_classes=3)])

    def concatenate_ages(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        images, labels, ages = fast_collate(samples)
        return images, labels, torch.cat([ages, ages])  # as boxes of detection are

    batches = DataLoader(dataset, 5, collate_fn=concatenate_ages)
    ((images, labels, ages),) = prefetched(batches, transform=transforms.Normalize())
    ((before, _, _),) = batches
    torch.testing.assert_close(images, (before / 255 - 0.5) / 0.25)
    assert (labels.shape, ages.shape) == ((5,), (10,))
    for whole in (MemmapDataset(path), Subset(MemmapDataset(path), range(5))):
        ((_, labels, ages),) = prefetched(DataLoader(whole, 5), transform=mix)
        assert (labels.shape, ages.tolist()) == ((5, 3), [0, 1, 2, 3, 4])
    turned = Loader(dataset, 5, columns=["age", "label"], device="cpu")
    mix = transforms.Compose([transforms.Normalize(0.5, 0.2), transforms.MixUp(num_classes=3)])
    with pytest.raises(ValueError, match=r"MixUp: there is no column 'label' .* are: none"):
        list(prefetched(turned, transform=mix))
