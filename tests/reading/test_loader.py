import gc
import json
import math
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import textwrap
import threading
import traceback
import weakref
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, Sampler, Subset, SubsetRandomSampler
from torch.utils.data import SequentialSampler as TorchSequentialSampler

from memload import (
    BlockShuffledSampler,
    FeedError,
    Loader,
    MemmapDataset,
    SequentialSampler,
    ShuffledSampler,
    WeightedSampler,
    transforms,
)

SIZE, HEIGHT, WIDTH = 23, 4, 6

forks = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
on_threads = pytest.mark.parametrize("num_threads", [0, 1, 3])


pytestmark = pytest.mark.usefixtures("quick_collections")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def path(make_dataset: Callable[..., Any]) -> Path:
    """Samples whose column ``number`` says which they are."""
    columns = {"label": np.arange(SIZE) % 3, "number": np.arange(SIZE)}
    return Path(make_dataset(rows=(9, 8, 6), shape=(HEIGHT, WIDTH, 3), columns=columns).path)


def of_ours() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("memload")]


def visits(loader: Loader) -> list[list[int]]:
    """Return the samples of every batch of an epoch of a loader with the column ``number``."""
    return [batch.number.tolist() for batch in loader]


def flat(batches: list[list[int]]) -> list[int]:
    return [number for batch in batches for number in batch]


class Order:
    """An order without pixels, which notes what is asked of it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.asked: list[tuple[int, list[int]]] = []

    def __len__(self) -> int:
        return self.size

    def take(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        self.asked.append((epoch, positions.tolist()))
        return positions


class Numbers(Sampler[int]):
    """A torch Sampler with another order every epoch that it is told."""

    def __init__(self, size: int) -> None:
        self.size, self.epoch = size, 0

    def __len__(self) -> int:
        return self.size

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.default_rng(self.epoch).permutation(self.size).tolist())


@on_threads
@pytest.mark.parametrize("batch_size", [1, 5, 23, 100])
def test_batches_are_the_samples_of_the_data_set_in_order(
    path: Path, batch_size: int, num_threads: int
) -> None:
    dataset = MemmapDataset(path)
    batches = list(Loader(dataset, batch_size, num_threads=num_threads))
    assert [len(batch.images) for batch in batches] == [
        min(batch_size, SIZE - start) for start in range(0, SIZE, batch_size)
    ]
    for batch in batches:
        assert batch._fields == ("images", "labels")
        assert batch.images.dtype == torch.uint8
        assert batch.images.permute(0, 2, 3, 1).is_contiguous()
        assert batch.labels.dtype == torch.int64
    assert torch.equal(
        torch.cat([batch.images for batch in batches]), torch.stack([image for image, _ in dataset])
    )
    assert torch.cat([batch.labels for batch in batches]).tolist() == [
        label for _, label in dataset
    ]


@on_threads
def test_batches_are_the_samples_of_the_order(path: Path, num_threads: int) -> None:
    dataset = MemmapDataset(path)
    loader = Loader(dataset, 4, shuffle=True, seed=3, num_threads=num_threads, columns=["number"])
    for epoch in range(3):
        expected = ShuffledSampler(SIZE, seed=3).take(epoch, np.arange(SIZE))
        batches = list(loader)
        assert torch.cat([batch.number for batch in batches]).tolist() == expected.tolist()
        images = torch.cat([batch.images for batch in batches]).permute(0, 2, 3, 1)
        assert torch.equal(images, dataset.gather(expected))


def test_a_subset_gives_its_samples(path: Path) -> None:
    subset = MemmapDataset(path, columns=["number"]).subset([5, 3, 3, 22])
    batch = next(iter(Loader(subset, 4)))
    assert batch.number.tolist() == [5, 3, 3, 22]
    assert torch.equal(batch.images[2], subset[2][0])


def test_columns_are_those_asked_for(path: Path) -> None:
    assert next(iter(Loader(path, 2, columns=["number", "label"])))._fields == (
        "images",
        "number",
        "labels",
    )
    assert next(iter(Loader(path, 2, columns=[])))._fields == ("images",)
    assert next(iter(Loader(MemmapDataset(path, columns=["number"]), 2)))._fields == (
        "images",
        "number",
    )


def test_a_data_set_without_labels_gives_images(make_dataset: Callable[..., Any]) -> None:
    batch = next(iter(Loader(make_dataset(columns={}, classes=None).path, 2)))
    assert batch._fields == ("images",)


@on_threads
def test_a_transform_gets_the_images_of_a_batch(path: Path, num_threads: int) -> None:
    plain = list(Loader(path, 5))
    loader = Loader(path, 5, transform=lambda images: images.float() / 2, num_threads=num_threads)
    for batch, expected in zip(loader, plain, strict=True):
        assert torch.equal(batch.images, expected.images.float() / 2)


@pytest.mark.filterwarnings("ignore:drop_last:UserWarning")  # of epochs of which it leaves nothing
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
    dataset = share_dataset().subset(range(size))
    given_out = []
    for rank in range(ranks):
        loader = Loader(
            dataset,
            batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            rank=rank,
            num_replicas=ranks,
            columns=["number"],
            num_threads=0,
        )
        for _ in range(2):
            batches = visits(loader)
            assert len(batches) == len(loader)
            assert all(1 <= len(batch) <= batch_size for batch in batches)
        given_out.append(batches)
    sizes = [[len(batch) for batch in batches] for batches in given_out]
    everything = [number for batches in given_out for number in flat(batches)]
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


_shared: list[MemmapDataset] = []


def share_dataset() -> MemmapDataset:
    return _shared[0]


@pytest.fixture(scope="module", autouse=True)
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One data set for tests that make many loaders of it."""
    from memload.storage.format import npy_header
    from memload.storage.index import Array, Index, Shard
    from memload.storage.keys import Keys

    folder = tmp_path_factory.mktemp("shared")
    pixels = np.random.default_rng(0).integers(0, 256, (SIZE, HEIGHT, WIDTH, 3), np.uint8)
    data = npy_header("|u1", pixels.shape) + pixels.tobytes()
    (folder / "out.bin").write_bytes(data)
    Index(
        path=folder / "out.idx",
        arrays=(Array("image", "|u1", pixels.shape[1:], (Shard("out.bin", SIZE, len(data)),)),),
        row=np.arange(SIZE),
        flags=np.zeros(SIZE, np.uint8),
        keys=Keys.of([str(number) for number in range(SIZE)]),
        columns={"number": np.arange(SIZE)},
        crc32={"image": np.array([zlib.crc32(row.tobytes()) for row in pixels], np.uint32)},
        classes=None,
    ).write(folder / "out.idx")
    _shared.append(MemmapDataset(folder / "out.idx"))
    yield
    _shared.clear()


@settings(max_examples=60, deadline=None)
@given(
    first=st.tuples(st.integers(1, 7), st.integers(1, 4), st.sampled_from([0, 2])),
    then=st.tuples(st.integers(1, 7), st.integers(1, 4), st.sampled_from([0, 1, 3])),
    shuffle=st.booleans(),
    epoch=st.integers(0, 2),
    stop=st.integers(0, SIZE),
)
def test_resuming_gives_exactly_the_samples_still_owed(
    first: tuple[int, int, int], then: tuple[int, int, int], shuffle: bool, epoch: int, stop: int
) -> None:
    def loaders(batch_size: int, ranks: int, threads: int) -> list[Loader]:
        return [
            Loader(
                share_dataset(),
                batch_size,
                shuffle=shuffle,
                seed=1,
                rank=rank,
                num_replicas=ranks,
                num_threads=threads,
            )
            for rank in range(ranks)
        ]

    seen: list[int] = []
    for loader in loaders(*first):
        loader.set_epoch(epoch)
        iterator = iter(loader)
        steps = min(stop, SIZE // (first[0] * first[1]))  # whole steps, as ranks stop together
        for _ in range(steps):
            seen += next(iterator).number.tolist()
        state = json.loads(json.dumps(loader.state_dict()))
        assert (state["epoch"], state["samples_seen"]) == (epoch, steps * first[0] * first[1])
        iterator.close()  # type: ignore[attr-defined]
    owed: list[int] = []
    for loader in loaders(*then):
        loader.load_state_dict(state)
        loader.set_epoch(epoch)  # that one, even if nothing is left of it
        owed += flat(visits(loader))
        following = loader.state_dict()
        assert (following["epoch"], following["samples_seen"]) == (epoch + 1, 0)
    assert set(seen) | set(owed) == set(range(SIZE))
    assert len(owed) - (SIZE - len(seen)) in (range(then[1]) if shuffle else [0])
    if then[1] == 1:
        order = (
            ShuffledSampler(SIZE, seed=1).take(epoch, np.arange(SIZE))
            if shuffle
            else np.arange(SIZE)
        )
        assert owed == order[len(seen) :].tolist()


def test_resuming_asks_for_nothing_that_was_seen() -> None:
    order = Order(SIZE)
    loader = Loader(share_dataset(), 4, sampler=order, num_threads=0)
    loader.load_state_dict({**loader.state_dict(), "epoch": 3, "samples_seen": 12})
    assert order.asked == []
    assert flat(visits(loader)) == list(range(12, SIZE))
    assert order.asked == [(3, list(range(12, 23)))]


@pytest.mark.parametrize("kind", ["sampler", "batch_sampler"])
def test_resuming_goes_on_in_the_users_own_sampler(kind: str) -> None:
    def make(batch_size: int) -> Loader:
        own = Numbers(SIZE)
        if kind == "sampler":
            return Loader(share_dataset(), batch_size, sampler=own, num_threads=2)
        batches = BatchSampler(own, batch_size, False)
        batches.set_epoch = own.set_epoch  # type: ignore[attr-defined]
        return Loader(share_dataset(), batch_sampler=batches, num_threads=2)

    loader = make(4)
    loader.set_epoch(2)
    iterator = iter(loader)
    seen = next(iterator).number.tolist() + next(iterator).number.tolist()
    state = loader.state_dict()
    iterator.close()  # type: ignore[attr-defined]
    for batch_size in (4, 5, 3):
        other = make(batch_size)
        other.load_state_dict(state)
        order = np.random.default_rng(2).permutation(SIZE).tolist()
        assert seen + flat(visits(other)) == order


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_state_behind_the_last_batch_goes_on_with_the_next_epoch(drop_last: bool) -> None:
    def make() -> Loader:
        return Loader(share_dataset(), 5, shuffle=True, drop_last=drop_last)

    loader = make()
    iterator = iter(loader)
    for _ in range(len(loader)):
        next(iterator)
    other = make()
    other.load_state_dict(loader.state_dict())
    assert list(iterator) == []
    assert flat(visits(other)) == flat(visits(loader))
    assert other.state_dict() == loader.state_dict()
    assert other.state_dict()["epoch"] == 2


def test_an_epoch_begins_with_its_first_batch() -> None:
    loader = Loader(share_dataset(), 5, shuffle=True)
    iter(loader)
    assert flat(visits(loader)) == ShuffledSampler(SIZE).take(0, np.arange(SIZE)).tolist()


def test_a_state_after_set_epoch_is_that_epochs_start() -> None:
    loader = Loader(share_dataset(), 4, shuffle=True)
    list(loader)
    assert loader.state_dict()["epoch"] == 1
    loader.set_epoch(7)
    assert (loader.state_dict()["epoch"], loader.state_dict()["samples_seen"]) == (7, 0)


def test_set_epoch_leaves_a_resumed_epoch_where_it_is() -> None:
    loader = Loader(share_dataset(), 4)
    loader.load_state_dict({**loader.state_dict(), "epoch": 2, "samples_seen": 8})
    loader.set_epoch(2)
    assert flat(visits(loader)) == list(range(8, SIZE))
    loader.load_state_dict({**loader.state_dict(), "epoch": 2, "samples_seen": 8})
    loader.set_epoch(3)
    assert flat(visits(loader)) == list(range(SIZE))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fingerprint": "0" * 64}, "its fingerprint is "),
        ({"seed": 5}, "its seed is 5, but this Loader's is 0"),
        ({"epoch": -1}, "state: epoch must be an integer"),
        ({"epoch": "3"}, "state: epoch must be an integer"),
        ({"samples_seen": -4}, "state: samples_seen must be an integer"),
        ({"samples_seen": 2.5}, "state: samples_seen must be an integer"),
    ],
    ids=str,
)
def test_a_state_that_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    loader = Loader(share_dataset(), 4, shuffle=True)
    before = loader.state_dict()
    with pytest.raises(ValueError, match=message):
        loader.load_state_dict({**before, **change})
    assert loader.state_dict() == before


def test_a_state_with_something_missing_is_refused() -> None:
    loader = Loader(share_dataset())
    with pytest.raises(ValueError, match=r"state has no .*samples_seen"):
        loader.load_state_dict({"seed": 0})


def test_a_state_of_a_subset_or_of_an_order_with_another_seed_is_refused() -> None:
    dataset = share_dataset()
    with pytest.raises(ValueError, match="fingerprint"):
        Loader(dataset).load_state_dict(Loader(dataset.subset([1, 2])).state_dict())
    with pytest.raises(
        ValueError, match=r"its order is .*seed=5\)', but this Loader's is .*seed=6"
    ):
        Loader(dataset, sampler=ShuffledSampler(SIZE, seed=6)).load_state_dict(
            Loader(dataset, sampler=ShuffledSampler(SIZE, seed=5)).state_dict()
        )


def test_epochs_advance_by_themselves_and_set_epoch_says_which() -> None:
    loader = Loader(share_dataset(), 5, shuffle=True, seed=2)
    first, second = flat(visits(loader)), flat(visits(loader))
    assert first != second
    loader.set_epoch(1)
    assert flat(visits(loader)) == second
    with pytest.raises(ValueError, match=r"^epoch must be an integer of at least 0, not -1"):
        loader.set_epoch(-1)


@pytest.mark.parametrize(
    "sampler",
    [
        [4, 2, 2, -1],
        np.array([4, 2, 2, 22]),
        torch.tensor([4, 2, 2, 22]),
        TorchSequentialSampler(range(10)),
        SubsetRandomSampler([4, 2, 22], torch.Generator().manual_seed(0)),
        range(0, 20, 3),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_any_iterable_of_numbers_is_an_order(sampler: Any) -> None:
    loader = Loader(share_dataset(), 3, sampler=sampler)
    batches = visits(loader)
    assert len(batches) == len(loader) == math.ceil(len(sampler) / 3)
    if not isinstance(sampler, SubsetRandomSampler):
        assert flat(batches) == [int(number) % SIZE for number in sampler]
    assert [
        len(batch) for batch in visits(Loader(share_dataset(), 3, sampler=sampler, drop_last=True))
    ] == [3] * (len(sampler) // 3)


def test_a_batch_sampler_decides_on_batches() -> None:
    loader = Loader(share_dataset(), batch_sampler=[[3], [5, 1], [2, 2, 2]])
    assert visits(loader) == [[3], [5, 1], [2, 2, 2]]
    assert len(loader) == 3


def test_an_order_that_draws_may_be_longer_than_the_data_set() -> None:
    order = WeightedSampler(np.arange(SIZE), size=100, seed=4)
    assert (
        flat(visits(Loader(share_dataset(), 7, sampler=order)))
        == order.take(0, np.arange(100)).tolist()
    )


@on_threads
def test_a_number_that_no_sample_has_is_refused(num_threads: int) -> None:
    with pytest.raises(IndexError, match=rf"^sampler: there is no sample {SIZE}.* 0 to {SIZE - 1}"):
        list(Loader(share_dataset(), 2, sampler=[1, SIZE], num_threads=num_threads))


def test_ranks_are_those_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = Loader(share_dataset(), 4)
    assert (loader.rank, loader.num_replicas) == (0, 1)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert (loader.rank, loader.num_replicas) == (2, 3)
    explicit = Loader(share_dataset(), 4, rank=0, num_replicas=2)
    assert (explicit.rank, explicit.num_replicas) == (0, 2)


def test_ranks_are_those_of_an_initialised_process_group(path: Path) -> None:
    code = f"""
        import os, torch.distributed as dist, memload
        loader = memload.Loader({str(path)!r}, 4)
        assert (loader.rank, loader.num_replicas) == (1, 2)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        assert (loader.rank, loader.num_replicas) == (0, 1)
        dist.destroy_process_group()
    """
    run(code, RANK="1", WORLD_SIZE="2")


def run(code: str, **environment: str) -> None:
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(
        command,
        timeout=60,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "^batch_size must be an integer of at least 1, not 0"),
        ({"batch_size": 2.0}, "^batch_size must be"),
        ({"prefetch_factor": 0}, "^prefetch_factor must be"),
        ({"num_threads": -1}, "^num_threads must be"),
        (
            {"shuffle": True, "sampler": [1]},
            "^shuffle, sampler and batch_sampler exclude each other",
        ),
        (
            {"sampler": [1], "batch_sampler": [[1]]},
            "^shuffle, sampler and batch_sampler exclude each other",
        ),
        ({"batch_sampler": [[1]], "batch_size": 3}, "^batch_sampler makes the batches itself"),
        (
            {"batch_sampler": [[1]], "drop_last": True},
            "^batch_sampler makes the batches itself",
        ),
        ({"rank": 1}, "^rank=1 and num_replicas=None: give both"),
        ({"rank": 2, "num_replicas": 2}, "^rank must be .* less than num_replicas=2, not 2"),
        ({"columns": ["nothing"]}, "^columns: .*names among number"),
        ({"columns": "number"}, "^columns: .*names among number"),
        ({"feed": "magic"}, "^feed: there is no 'magic'"),
        ({"device": "meta"}, "^device: meta is not supported"),
    ],
    ids=str,
)
def test_arguments_that_do_not_fit_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Loader(share_dataset(), **arguments)


def test_a_data_set_with_transforms_is_refused(path: Path) -> None:
    with pytest.raises(ValueError, match=r"^dataset has a transform"):
        Loader(MemmapDataset(path, transform=str))


@on_threads
def test_a_batch_that_is_held_is_never_overwritten(num_threads: int) -> None:
    loader = Loader(share_dataset(), 2, shuffle=True, num_threads=num_threads)
    held = [batch for _ in range(20) for batch in loader]
    dataset = share_dataset()
    assert len({batch.images.data_ptr() for batch in held}) == len(held)
    for batch in held:
        assert torch.equal(batch.images.permute(0, 2, 3, 1), dataset.gather(batch.number))


@on_threads
def test_the_steady_state_allocates_no_memory_for_images(num_threads: int) -> None:
    loader = Loader(share_dataset(), 5, drop_last=True, num_threads=num_threads)
    addresses = {batch.images.data_ptr() for _ in range(50) for batch in loader}
    assert len(addresses) <= loader.num_threads * loader.prefetch_factor + 3


@on_threads
def test_two_iterators_do_not_disturb_each_other(num_threads: int) -> None:
    loader = Loader(share_dataset(), 3, shuffle=True, num_threads=num_threads)
    pairs = [
        (one.number.tolist(), other.number.tolist())
        for one, other in zip(loader, loader, strict=True)
    ]
    for epoch in (0, 1):
        expected = ShuffledSampler(SIZE).take(epoch, np.arange(SIZE)).tolist()
        assert flat([pair[epoch] for pair in pairs]) == expected


@on_threads
def test_leaving_early_leaves_no_thread(num_threads: int) -> None:
    loader = Loader(share_dataset(), 2, num_threads=num_threads)
    for _ in loader:
        break
    assert not of_ours()
    iterator = iter(loader)
    next(iterator)
    assert len(of_ours()) == num_threads
    del iterator
    assert not of_ours()


def test_no_thread_is_there_before_the_first_batch_or_after_the_last() -> None:
    loader = Loader(share_dataset(), 2, num_threads=2)
    iterator = iter(loader)
    assert not of_ours()
    list(iterator)
    assert not of_ours()


@on_threads
def test_an_exception_of_the_transform_arrives_with_its_traceback(num_threads: int) -> None:
    def broken_on_purpose(images: torch.Tensor) -> torch.Tensor:
        if torch.equal(images[0], share_dataset()[8][0]):
            raise KeyError("the cause")
        return images

    loader = Loader(share_dataset(), 4, transform=broken_on_purpose, num_threads=num_threads)
    seen: list[Any] = []
    with pytest.raises(KeyError, match="the cause") as caught:
        seen.extend(batch.number for batch in loader)
    assert "broken_on_purpose" in [
        frame.name for frame in traceback.extract_tb(caught.value.__traceback__)
    ]
    assert loader.state_dict()["samples_seen"] == 8
    assert not of_ours()


@forks
@on_threads
def test_a_loader_works_in_a_forked_child_and_a_live_iterator_says_what_to_do(
    num_threads: int,
) -> None:
    loader = Loader(share_dataset(), 4, num_threads=num_threads)
    iterator = iter(loader)
    next(iterator)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def child() -> None:
        torch.set_num_threads(1)
        try:
            found: Any = next(iterator).number.tolist()
        except RuntimeError as error:
            found = str(error)
        theirs.send((found, visits(loader)))

    process = context.Process(target=child)
    process.start()
    assert ours.poll(30)
    found, anew = ours.recv()
    process.join(30)
    assert process.exitcode == 0
    assert "forked child" in found if num_threads else found == [4, 5, 6, 7]
    assert flat(anew) == list(range(SIZE))
    assert next(iterator).number.tolist() == [4, 5, 6, 7]
    iterator.close()  # type: ignore[attr-defined]
    ours.close()
    theirs.close()


def test_the_interpreter_exits_with_a_live_iterator(path: Path) -> None:
    run(f"""
        import memload
        loader = memload.Loader({str(path)!r}, 2, num_threads=2)
        iterator = iter(loader)
        next(iterator)
    """)


def test_thousands_of_epochs_and_early_breaks_leave_nothing() -> None:
    loader = Loader(share_dataset(), 16, shuffle=True, num_threads=0)
    threaded = Loader(share_dataset(), 8, shuffle=True, num_threads=1)
    for _ in range(100):
        list(loader)
    gc.collect()
    before = (
        len(gc.get_objects()),
        len(list(Path("/proc/self/fd").iterdir())),
        threading.active_count(),
    )
    for _ in range(2000):
        for _ in loader:
            pass
    for _ in range(1000):
        for _ in threaded:
            break
    gc.collect()
    after = (
        len(gc.get_objects()),
        len(list(Path("/proc/self/fd").iterdir())),
        threading.active_count(),
    )
    assert after[1:] == before[1:]
    assert after[0] - before[0] < 200


def test_nothing_global_is_touched() -> None:
    def globals_now() -> tuple[Any, ...]:
        return (
            torch.get_num_threads(),
            torch.get_num_interop_threads(),
            torch.get_default_dtype(),
            torch.get_rng_state().tolist(),
            np.random.get_state()[1].tolist(),
            random.getstate(),
            multiprocessing.get_start_method(allow_none=True),
            [
                signal.getsignal(number)
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)
            ],
            threading.excepthook,
            sys.excepthook,
        )

    before = globals_now()
    list(Loader(share_dataset(), 4, shuffle=True, num_threads=2))
    assert globals_now() == before


def test_no_more_batches_are_made_ahead_than_told() -> None:
    made: list[int] = []
    gate = threading.Event()

    def note(images: torch.Tensor) -> torch.Tensor:
        made.append(len(made))
        if len(made) == 4:
            gate.set()
        return images

    loader = Loader(share_dataset(), 1, transform=note, num_threads=2, prefetch_factor=2)
    iterator = iter(loader)
    next(iterator)
    assert gate.wait(10)
    assert len(made) == 4
    iterator.close()  # type: ignore[attr-defined]


def test_a_state_of_another_order_is_refused(path: Path) -> None:
    shuffled = Loader(path, 4, shuffle=True).state_dict()
    with pytest.raises(
        ValueError,
        match=r"its order is 'ShuffledSampler.*this Loader's is 'SequentialSampler\(size=23\)'",
    ):
        Loader(path, 4).load_state_dict(shuffled)
    weights = np.ones(SIZE)
    state = Loader(path, 4, sampler=WeightedSampler(weights)).state_dict()
    weights[3] = 2
    with pytest.raises(ValueError, match="order"):
        Loader(path, 4, sampler=WeightedSampler(weights)).load_state_dict(state)


def test_a_state_beyond_the_end_of_the_epoch_is_refused(path: Path) -> None:
    loader = Loader(path, 4)
    with pytest.raises(ValueError, match="24 samples_seen, but an epoch has only 23"):
        loader.load_state_dict({**loader.state_dict(), "samples_seen": 24})


@on_threads
def test_an_error_of_a_sampler_comes_behind_the_batches_before_it(
    path: Path, num_threads: int
) -> None:
    class Broken:
        def __iter__(self) -> Iterator[int]:
            yield from range(6)
            raise KeyError("no more")

    batches = iter(Loader(path, 2, sampler=Broken(), num_threads=num_threads, columns=["number"]))
    assert [next(batches).number.tolist() for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(KeyError, match="no more"):
        next(batches)


@on_threads
def test_a_stop_iteration_of_the_transform_is_an_error_and_not_the_end(
    path: Path, num_threads: int
) -> None:
    def stop(images: torch.Tensor) -> torch.Tensor:
        raise StopIteration

    with pytest.raises(RuntimeError, match="StopIteration"):
        list(Loader(path, 5, transform=stop, num_threads=num_threads))


def test_a_loader_and_its_batches_can_be_pickled(path: Path) -> None:
    loader = Loader(path, 4, shuffle=True, seed=2, columns=["number", "label"])
    first = next(iter(loader))
    copy = pickle.loads(pickle.dumps(loader))
    assert copy.state_dict() == loader.state_dict()
    assert flat(visits(copy)) == ShuffledSampler(SIZE, seed=2).take(0, np.arange(4, SIZE)).tolist()
    again = pickle.loads(pickle.dumps(first))
    assert again._fields == ("images", "number", "labels")
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


@on_threads
def test_an_exception_leaves_nothing_for_the_garbage_collector(
    path: Path, num_threads: int
) -> None:
    class Mine(Exception):  # noqa: N818  # one that can be referred to weakly
        pass

    def fail(images: torch.Tensor) -> torch.Tensor:
        raise Mine

    gc.collect()
    gc.disable()
    try:
        try:
            for _ in Loader(path, 5, transform=fail, num_threads=num_threads):
                pass
        except Mine as error:
            seen = weakref.ref(error)
        assert seen() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("size", [-1, 2.5, "3"])
@pytest.mark.parametrize("make", [ShuffledSampler, SequentialSampler, BlockShuffledSampler])
def test_samplers_refuse_sizes_that_are_none(make: Callable[[Any], Any], size: Any) -> None:
    with pytest.raises(ValueError, match=f"{make.__name__}: size must be an integer of at least 0"):
        make(size)


def test_a_feed_for_cuda_says_why_it_cannot_serve_the_cpu(path: Path) -> None:
    for feed in ("resident", "dma", "uva", "pinned"):
        with pytest.raises(FeedError, match=f"feed='{feed}' needs a CUDA device, .* is cpu"):
            Loader(path, 4, device="cpu", feed=feed)
    with pytest.raises(
        ValueError,
        match=r"feed: there is no 'gpu'\. Choose one of auto, resident, dma, uva, pinned, cpu",
    ):
        Loader(path, 4, feed="gpu")  # type: ignore[arg-type]


def test_a_loader_says_what_feeds_it_and_why(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="memload"):
        loader = Loader(path, 4, device="cpu")
        assert loader.feed == ("cpu", "the device is cpu")
    assert [record.message for record in caplog.records] == [
        f"feed of {loader.dataset.shards.paths[0]}: cpu: the device is cpu"
    ]


def test_an_epoch_of_which_nothing_is_left_is_warned_of(path: Path) -> None:
    with pytest.warns(
        UserWarning,
        match=rf"^drop_last: an epoch has no batches, because {SIZE} samples .* each of 2 ranks",
    ):
        loader = Loader(path, SIZE, shuffle=True, drop_last=True, rank=0, num_replicas=2)
    assert (len(loader), list(loader)) == (0, [])


def test_threads_are_shared_by_the_processes_of_a_host(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memload.reading.loader.available_cores", lambda: 12)
    assert Loader(path).num_threads == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert Loader(path).num_threads == 3


@pytest.mark.parametrize("told", ["0", "-1", "", "four"])
def test_a_number_of_processes_that_is_none_is_told(
    path: Path, monkeypatch: pytest.MonkeyPatch, told: str
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", told)
    with pytest.raises(ValueError, match=r"variable LOCAL_WORLD_SIZE is .* integer of at least 1"):
        Loader(path)


def test_static_buffers_need_batches_of_one_size(path: Path) -> None:
    with pytest.raises(ValueError, match="static_buffers needs batches of one size"):
        Loader(path, 4, static_buffers=True)


@on_threads
def test_a_state_taken_before_the_first_batch_is_the_start_of_the_new_epoch(
    path: Path, num_threads: int
) -> None:
    loader = Loader(path, 4, shuffle=True, num_threads=num_threads)
    left = iter(loader)
    next(left)
    assert loader.state_dict()["samples_seen"] == 4
    iterator = iter(loader)
    state = loader.state_dict()
    assert (state["epoch"], state["samples_seen"]) == (1, 0)
    next(left)  # of the two, the state is that of the one which gave a batch last
    assert (loader.state_dict()["epoch"], loader.state_dict()["samples_seen"]) == (0, 8)
    next(iterator)
    assert (loader.state_dict()["epoch"], loader.state_dict()["samples_seen"]) == (1, 4)


TRAIN = transforms.Compose(
    [
        transforms.RandomCrop(4, padding=1),
        transforms.RandomHorizontalFlip(),
        transforms.Normalize("imagenet"),
    ]
)


def by_number(batches: Any) -> dict[int, torch.Tensor]:
    return {
        int(number): image
        for batch in batches
        for number, image in zip(batch.number, batch.images, strict=True)
    }


@pytest.mark.parametrize(
    "options", [{"batch_size": 3}, {"batch_size": 23}, {"batch_size": 5, "num_threads": 3}], ids=str
)
def test_a_samples_transform_depends_on_seed_and_epoch_and_on_nothing_else(
    path: Path, options: Any
) -> None:
    reference = Loader(path, 4, transform=TRAIN, seed=3, columns=["number"], num_threads=0)
    other = Loader(path, shuffle=True, transform=TRAIN, seed=3, columns=["number"], **options)
    epochs = []
    for _ in range(2):
        expected, found = by_number(reference), by_number(other)
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[number], found[number]) for number in expected)
        epochs.append(expected)
    assert not all(torch.equal(epochs[0][number], epochs[1][number]) for number in epochs[0])


def test_a_resumed_epoch_draws_what_it_would_have_drawn(path: Path) -> None:
    options: Any = {"shuffle": True, "transform": TRAIN, "columns": ["number"]}
    whole = by_number(Loader(path, 4, **options))
    loader = Loader(path, 4, **options)
    next(iter(loader))
    resumed = Loader(path, 6, **options)
    resumed.load_state_dict(loader.state_dict())
    found = by_number(resumed)
    assert len(found) == SIZE - 4
    assert all(torch.equal(whole[number], image) for number, image in found.items())


def test_ranks_draw_what_one_process_would(path: Path) -> None:
    options: Any = {"transform": TRAIN, "columns": ["number"]}
    whole = by_number(Loader(path, 4, **options))
    for rank in (0, 1):
        found = by_number(Loader(path, 3, rank=rank, num_replicas=2, **options))
        assert all(torch.equal(whole[number], image) for number, image in found.items())


def test_normalize_takes_the_data_sets_statistics(make_dataset: Callable[..., Any]) -> None:
    statistics = {"mean": [0.1, 0.2, 0.3], "std": [0.5, 0.6, 0.7]}
    path = make_dataset(statistics=statistics).path
    (batch,) = Loader(path, 5, transform=transforms.Normalize())
    images = MemmapDataset(path).gather(np.arange(5)).permute(0, 3, 1, 2).double() / 255
    expected = (images - torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1)) / torch.tensor(
        [0.5, 0.6, 0.7]
    ).view(3, 1, 1)
    torch.testing.assert_close(batch.images, expected.float(), rtol=1e-5, atol=1e-5)


def test_transforms_change_labels_and_make_views(path: Path) -> None:
    mixed = transforms.Compose([transforms.Normalize("imagenet"), transforms.MixUp(num_classes=3)])
    batch = next(iter(Loader(path, 6, transform=mixed)))
    assert batch.labels.shape == (6, 3)
    torch.testing.assert_close(batch.labels.sum(1), torch.ones(6))
    views = transforms.Compose(TRAIN.transforms, views=2)
    one, other = next(iter(Loader(path, 6, transform=views))).images
    assert one.shape == other.shape == (6, 3, 4, 4)
    assert not torch.equal(one, other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": True}, "batch_size must be an integer of at least 1, not True."),
        ({"seed": 1.5}, "seed must be an integer, not 1.5."),
        ({"seed": None}, "seed must be an integer, not None."),
        ({"transform": 3}, "transform must be a function of images, not 3."),
        (
            {"transform": transforms.train},
            "transform is train itself, which only makes one. Write train(…).",
        ),
        (
            {"transform": transforms.Normalize},
            "transform is Normalize itself, which only makes one. Write Normalize(…).",
        ),
        ({"dataset": [1, 2]}, "dataset must be a MemmapDataset or its path, not a list."),
        (
            {"dataset": Subset([1, 2], [0])},
            "dataset must be a MemmapDataset or its path, not a Subset. Write dataset.subset(part.indices) for a "
            "part of it.",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_arguments_of_other_types_are_refused(
    path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises((TypeError, ValueError)) as raised:
        Loader(**{"dataset": path, **options})
    assert str(raised.value) == message


@pytest.mark.parametrize("numbers", [[1.5, 2], [True, False], [[1], [2]]], ids=str)
def test_samplers_of_other_things_than_integers_are_refused(path: Path, numbers: list[Any]) -> None:
    with pytest.raises(TypeError, match="sampler: sample numbers must be integers"):
        list(Loader(path, 2, sampler=numbers))


def test_a_batch_size_of_numpy_is_an_integer(path: Path) -> None:
    assert len(Loader(path, np.int64(5))) == 5  # type: ignore[arg-type]


def test_a_function_that_returns_other_than_a_batch_is_told(path: Path) -> None:
    with pytest.raises(ValueError, match="transform returned None instead of 4 images"):
        next(iter(Loader(path, 4, transform=lambda images: None)))
    with pytest.raises(
        ValueError, match=r"transform returned a tensor of shape \(1, 3, 4, 6\) for 4 images"
    ):
        next(iter(Loader(path, 4, transform=lambda images: images[:1])))


def test_points_of_the_transform_come_without_being_asked_for(
    make_dataset: Callable[..., Any],
) -> None:
    columns = {"label": np.arange(5) % 3, "eyes": np.zeros((5, 2, 2), np.float32)}
    path = make_dataset(columns=columns).path
    flip = transforms.Compose([transforms.RandomHorizontalFlip(p=1.0)], points=("eyes",))
    batch = next(iter(Loader(path, 5, transform=flip)))
    assert batch._fields == ("images", "labels", "eyes")
    assert batch.eyes[:, :, 0].unique().tolist() == [5.0]


def test_the_number_of_classes_is_the_data_sets(path: Path) -> None:
    mixed = transforms.Compose([transforms.Normalize("imagenet"), transforms.MixUp()])
    assert next(iter(Loader(path, 6, transform=mixed))).labels.shape == (6, 3)


def test_a_loader_says_what_it_is(path: Path) -> None:
    assert "batch_size=4, order=ShuffledSampler(size=23, seed=2), feed='auto')" in repr(
        Loader(path, 4, shuffle=True, seed=2)
    )


@pytest.mark.parametrize("in_batches", [False, True])
def test_a_sampler_is_told_every_epoch_and_resumes_in_its_order(
    path: Path, in_batches: bool
) -> None:
    def make() -> Loader:
        numbers = Numbers(SIZE)
        options: Any = (
            {"batch_sampler": BatchSampler(numbers, 4, False)}
            if in_batches
            else {"sampler": numbers}
        )
        return Loader(
            path, columns=["number"], **options, **({} if in_batches else {"batch_size": 4})
        )

    loader = make()
    first = flat(visits(loader))
    assert first == np.random.default_rng(0).permutation(SIZE).tolist()
    iterator = iter(loader)
    seen = [next(iterator).number.tolist() for _ in range(2)]
    again = make()
    again.load_state_dict(loader.state_dict())
    assert flat(seen) + flat(visits(again)) == np.random.default_rng(1).permutation(SIZE).tolist()


def test_a_state_with_another_seed_of_the_loaders_own_is_refused(path: Path) -> None:
    state = Loader(path, 4, sampler=ShuffledSampler(SIZE, seed=1), seed=5).state_dict()
    with pytest.raises(ValueError, match="its seed is 5, but this Loader's is 6"):
        Loader(path, 4, sampler=ShuffledSampler(SIZE, seed=1), seed=6).load_state_dict(state)


def test_a_sample_that_a_sampler_of_ones_own_gives_again_looks_different(path: Path) -> None:
    numbers = [3, 3, 5, 3, -1, SIZE - 1, 5, 3, 3, 2]
    options: dict[str, Any] = {"transform": TRAIN, "columns": ["number"]}
    loader = Loader(path, 4, sampler=numbers, **options)
    images = torch.cat([batch.images for batch in loader])
    assert len({image.numpy().tobytes() for image in images}) > 6  # of four samples
    groups = [numbers[:3], numbers[3:7], numbers[7:]]
    batched = Loader(path, batch_sampler=groups, **options)
    assert torch.equal(torch.cat([batch.images for batch in batched]), images)
    for order in ({"batch_sampler": groups}, {"sampler": numbers, "batch_size": 4}):
        stopped, other = (Loader(path, **order, **options) for _ in range(2))  # type: ignore[arg-type]
        running = iter(stopped)
        next(running)
        state = stopped.state_dict()
        assert 0 < state["samples_seen"] < len(numbers)
        del running
        other.load_state_dict(state)
        begun = state["samples_seen"]
        assert torch.equal(torch.cat([batch.images for batch in other]), images[begun:])


def test_a_sample_that_is_drawn_again_looks_different(path: Path) -> None:
    weights = np.eye(SIZE)[3]
    loader = Loader(
        path, 7, sampler=WeightedSampler(weights, size=60), transform=TRAIN, columns=["number"]
    )
    images = torch.cat([batch.images for batch in loader])
    assert len({image.numpy().tobytes() for image in images}) > 5
    other = Loader(
        path, 11, sampler=WeightedSampler(weights, size=60), transform=TRAIN, columns=["number"]
    )
    assert torch.equal(torch.cat([batch.images for batch in other]), images)


def test_a_state_is_numbers_and_text_also_where_numpys_were_given(path: Path) -> None:
    loader = Loader(path, 4, shuffle=True)
    loader.set_epoch(np.int64(3))  # type: ignore[arg-type]
    assert json.loads(json.dumps(loader.state_dict()))["epoch"] == 3
    loader.load_state_dict({**loader.state_dict(), "samples_seen": np.int64(4)})
    json.dumps(loader.state_dict())


def test_what_an_order_returns_is_checked(path: Path) -> None:
    class Wrong(Order):
        def __init__(self, found: Any) -> None:
            super().__init__(SIZE)
            self.found = found

        def take(self, epoch: int, positions: np.ndarray) -> Any:
            return self.found

    for found in ([0], [0.5] * SIZE, None):
        with pytest.raises(ValueError, match=r"sampler: take\(\) returned .* for 23 positions"):
            list(Loader(path, 4, sampler=Wrong(found)))
    with pytest.raises(IndexError, match="sampler: there is no sample"):
        list(Loader(path, 4, sampler=ShuffledSampler(100)))


@pytest.mark.parametrize("name", ["sampler", "batch_sampler"])
def test_what_gives_its_numbers_only_once_is_refused(path: Path, name: str) -> None:
    numbers = (number if name == "sampler" else [number] for number in range(5))
    with pytest.raises(
        TypeError, match=f"^{name} is a generator, which gives its numbers only once"
    ):
        Loader(path, **{name: numbers})  # type: ignore[arg-type]


@pytest.mark.parametrize("even", [False, True])
def test_an_order_of_ones_own_says_whether_ranks_are_even(even: bool) -> None:
    order: Any = Order(12)
    if even:
        order.even_ranks = True
    loaders = [
        Loader(share_dataset(), 2, sampler=order, rank=rank, num_replicas=5) for rank in range(5)
    ]
    given = [flat(visits(loader)) for loader in loaders]
    assert [len(visits(loader)) for loader in loaders] == [len(loader) for loader in loaders]
    if even:
        assert [len(numbers) for numbers in given] == [3] * 5
    else:
        assert sorted(flat(given)) == list(range(12))


def test_static_buffers_are_the_same_in_all_epochs(path: Path) -> None:
    loader = Loader(path, 4, shuffle=True, drop_last=True, static_buffers=True, columns=["number"])
    reference = Loader(path, 4, shuffle=True, drop_last=True, columns=["number"], num_threads=0)
    addresses = set()
    first = next(iter(loader))
    state = loader.state_dict()
    for epoch in range(3):
        loader.set_epoch(epoch)
        reference.set_epoch(epoch)
        for batch, expected in zip(loader, reference, strict=True):
            addresses.add((batch.images.data_ptr(), batch.number.data_ptr()))
            assert torch.equal(first.images, expected.images)  # which a captured graph would read
            assert torch.equal(first.number, expected.number)
    loader.load_state_dict(state)
    resumed = next(iter(loader))
    addresses.add((resumed.images.data_ptr(), resumed.number.data_ptr()))
    assert addresses == {(first.images.data_ptr(), first.number.data_ptr())}
    other = next(iter(pickle.loads(pickle.dumps(loader))))
    assert other.images.data_ptr() != first.images.data_ptr()


def test_static_buffers_refuse_a_batch_of_another_shape(path: Path) -> None:
    loader = Loader(path, batch_sampler=[[1, 2], [3]], static_buffers=True)
    batches = iter(loader)
    next(batches)
    with pytest.raises(ValueError, match=r"^static_buffers: a batch has tensors of \(1, 3, 4, 6\)"):
        next(batches)


@pytest.mark.parametrize(
    "code",
    [
        "iter(memload.Loader(path, 3))",
        "cycle(memload.Loader(path, 3, num_threads=0))",
        "iter(memload.ThreadPrefetcher(range(100)))",
        "memload.background(range)(100)",
        "iter(memload.CudaPrefetcher(range(100), device='cpu'))",
        "iter(memload.CudaPrefetcher(range(100), device='cpu', own_thread=True))",
    ],
)
def test_a_live_iterator_that_outlives_memload_says_nothing_at_exit(path: Path, code: str) -> None:
    run(f"""
        import os, memload

        def cycle(loader):
            while True:
                yield from loader

        path = {str(path)!r}
        os.kept = {code}  # which is cleared after the modules of memload
        next(os.kept)
    """)


def test_each_batch_is_made_when_it_is_asked_for_without_threads(path: Path) -> None:
    made: list[str] = []

    def note(images: torch.Tensor) -> torch.Tensor:
        made.append(threading.current_thread().name)
        return images

    batches = iter(Loader(path, 4, transform=note, num_threads=0))
    for count in range(1, 4):
        next(batches)
        assert made == [threading.current_thread().name] * count
