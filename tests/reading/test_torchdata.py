"""The Loader beside torchdata's StatefulDataLoader over the same samples, and under torchdata's own nodes."""

import copy
import gc
import io
import itertools
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from memload import Loader, MemmapDataset, ShuffledSampler

nodes = pytest.importorskip("torchdata.nodes")
stateful = pytest.importorskip("torchdata.stateful_dataloader")
RandomSampler = pytest.importorskip("torchdata.stateful_dataloader.sampler").RandomSampler

SIZE, BATCH = 23, 4
EACH = -(-SIZE // BATCH)

pytestmark = pytest.mark.filterwarnings(
    "ignore:'set_vital' is deprecated:UserWarning"
)  # by torchdata 0.11


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def path(make_dataset: Callable[..., Any]) -> Path:
    """Samples whose label says which they are."""
    classes = tuple(f"{number:02d}" for number in range(SIZE))
    return Path(
        make_dataset(rows=(9, 8, 6), columns={"label": np.arange(SIZE)}, classes=classes).path
    )


@pytest.fixture(params=["sequential", "shuffled"])
def make(request: pytest.FixtureRequest, path: Path) -> Callable[[str], Any]:
    """A function that makes the Loader or torchdata's, always alike."""
    shuffle = request.param == "shuffled"

    def make(name: str) -> Any:
        if name == "memload":
            return Loader(path, BATCH, shuffle=shuffle, num_threads=2)
        dataset = MemmapDataset(path)
        if not shuffle:
            return stateful.StatefulDataLoader(dataset, BATCH)
        # a generator of the sampler's own: one that the loader draws from too is elsewhere after a resumption
        sampler = RandomSampler(dataset, generator=torch.Generator().manual_seed(5))
        return stateful.StatefulDataLoader(dataset, BATCH, sampler=sampler)

    return make


@pytest.fixture(params=["torchdata", "memload"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def labels(batches: Any) -> list[list[int]]:
    return [values.tolist() for _, values in batches]


def flat(batches: list[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(batches))


def resumed(loader: Any, state: dict[str, Any], epochs: int = 1) -> list[list[list[int]]]:
    loader.load_state_dict(state)
    return [labels(loader) for _ in range(epochs)]


def test_the_loader_is_stateful_to_torchdata(path: Path) -> None:
    assert isinstance(Loader(path), stateful.Stateful)


@pytest.mark.parametrize("seen", range(1, EACH))
def test_a_new_loader_goes_on_in_the_epoch_and_then_with_the_next(
    seen: int, name: str, make: Callable[[str], Any]
) -> None:
    loader = make(name)
    iterator = iter(loader)
    before = labels(itertools.islice(iterator, seen))
    state = loader.state_dict()
    rest, following = labels(iterator), labels(loader)
    assert sorted(flat(before + rest)) == list(range(SIZE))
    assert resumed(make(name), state, 2) == [rest, following]


def test_a_state_from_before_the_first_batch_begins_the_epoch(
    name: str, make: Callable[[str], Any]
) -> None:
    loader = make(name)
    state = loader.state_dict()
    first = labels(loader)
    assert len(first) == EACH
    assert resumed(make(name), state) == [first]


def test_asking_for_the_state_changes_nothing(name: str, make: Callable[[str], Any]) -> None:
    loader, other = make(name), make(name)
    other.state_dict()
    expected = [labels(loader) for _ in range(2)]
    seen = []
    for _ in range(2):
        epoch = []
        for batch in other:
            epoch += labels([batch])
            other.state_dict()
        seen.append(epoch)
    assert seen == expected


def test_a_state_from_after_the_epoch_begins_the_next(
    name: str, make: Callable[[str], Any]
) -> None:
    loader = make(name)
    first = labels(loader)
    state = loader.state_dict()
    following = labels(loader)
    assert sorted(flat(following)) == sorted(flat(first))
    assert resumed(make(name), state) == [following]


def test_a_state_from_behind_the_last_batch_owes_nothing_to_torchdata_and_the_next_epoch_here(
    make: Callable[[str], Any],
) -> None:
    # Before the loop has seen that the epoch is over. StatefulDataLoader has an epoch of no batches then; the Loader
    # goes on with the next, as torchdata.nodes.Loader does, so that no epoch of a training is empty.
    for name, empty in (("torchdata", [[]]), ("memload", [])):
        loader = make(name)
        iterator = iter(loader)
        assert len(labels(itertools.islice(iterator, EACH))) == EACH
        state = loader.state_dict()
        assert labels(iterator) == []
        following = labels(loader)
        assert resumed(make(name), state, len(empty) + 1) == [*empty, following]


def test_a_loop_that_was_left_is_followed_by_a_whole_epoch(
    name: str, make: Callable[[str], Any]
) -> None:
    loader = make(name)
    left = iter(loader)
    next(left)
    assert len(labels(loader)) == EACH


@pytest.mark.parametrize("times", [2, 3])
def test_a_state_can_be_loaded_again(times: int, name: str, make: Callable[[str], Any]) -> None:
    loader = make(name)
    iterator = iter(loader)
    next(iterator)
    next(iterator)
    state = loader.state_dict()
    rest = labels(iterator)
    kept = copy.deepcopy(state)
    other = make(name)
    assert [resumed(other, state) for _ in range(times)] == [[rest]] * times
    other.load_state_dict(state)
    other.load_state_dict(state)  # and the last one counts
    next(iter(other))
    assert resumed(other, state) == [rest]
    assert repr(state) == repr(kept)


def test_the_state_of_a_loader_that_was_resumed_is_the_state_that_it_was_given(
    name: str, make: Callable[[str], Any]
) -> None:
    loader = make(name)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    rest = labels(iterator)
    other = make(name)
    other.load_state_dict(state)
    again = other.state_dict()
    assert resumed(make(name), again) == [rest]
    assert labels(other) == [*rest]


@pytest.mark.parametrize("way", ["pickle", "torch.save"])
def test_the_state_can_be_saved(way: str, name: str, make: Callable[[str], Any]) -> None:
    loader = make(name)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    if way == "pickle":
        state = pickle.loads(pickle.dumps(state))
    else:
        file = io.BytesIO()
        torch.save({"loader": state}, file)
        file.seek(0)
        state = torch.load(file, weights_only=True)["loader"]
    assert resumed(make(name), state) == [labels(iterator)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_torchdata_loads_a_data_set_in_an_order_of_ours(path: Path, num_workers: int) -> None:
    # Orders are functions of the epoch, no iterables: a list of one epoch's is, and torchdata skips in it.
    order = ShuffledSampler(SIZE, seed=3).take(1, np.arange(SIZE)).tolist()

    def make() -> Any:
        return stateful.StatefulDataLoader(
            MemmapDataset(path),
            BATCH,
            sampler=order,
            num_workers=num_workers,
            multiprocessing_context="forkserver" if num_workers else None,
        )

    loader = make()
    iterator = iter(loader)
    before = labels(itertools.islice(iterator, 2))
    state = loader.state_dict()
    rest = labels(iterator)
    assert flat(before + rest) == order
    assert flat(labels(Loader(path, BATCH, sampler=order))) == order
    assert resumed(make(), state) == [rest]
    for thread in threading.enumerate():  # of the queues to its workers, which it does not wait for
        if thread.name == "QueueFeederThread":
            thread.join(10)


@pytest.fixture
def make_nodes(path: Path) -> Iterator[Callable[[], Any]]:
    """A function that makes the Loader a source of torchdata's nodes, with a step of theirs behind it."""

    def make() -> Any:
        source = nodes.IterableWrapper(Loader(path, BATCH, shuffle=True, num_threads=2))
        return nodes.Loader(nodes.Mapper(source, lambda batch: batch.labels.tolist()))

    yield make
    gc.collect()  # torchdata's loader and its iterator hold each other, and with them an iterator of ours


@pytest.fixture
def expected(path: Path) -> list[list[list[int]]]:
    loader = Loader(path, BATCH, shuffle=True, num_threads=0)
    return [labels(loader) for _ in range(3)]


@pytest.mark.parametrize("seen", range(EACH + 1))
def test_under_torchdatas_nodes_the_loader_goes_on(
    seen: int, make_nodes: Callable[[], Any], expected: list[list[list[int]]]
) -> None:
    loader = make_nodes()
    assert list(itertools.islice(iter(loader), seen)) == expected[0][:seen]
    other = make_nodes()
    other.load_state_dict(loader.state_dict())
    assert list(other) == (expected[0][seen:] or expected[1])


def test_under_torchdatas_nodes_epochs_follow_each_other(
    make_nodes: Callable[[], Any], expected: list[list[list[int]]]
) -> None:
    loader = make_nodes()
    assert [list(loader) for _ in range(2)] == expected[:2]
    other = make_nodes()
    other.load_state_dict(loader.state_dict())
    assert list(other) == expected[2]


def test_torchdatas_nodes_gather_batches_of_a_data_set(path: Path) -> None:
    dataset = MemmapDataset(path)
    order = ShuffledSampler(SIZE).take(0, np.arange(SIZE)).tolist()

    def make() -> Any:
        batches = nodes.Batcher(nodes.SamplerWrapper(order), BATCH, drop_last=False)
        return nodes.Loader(
            nodes.Mapper(batches, lambda group: [label for _, label in dataset.__getitems__(group)])
        )

    loader = make()
    iterator = iter(loader)
    before = [next(iterator), next(iterator)]
    state = loader.state_dict()
    rest = list(iterator)
    assert flat(before + rest) == order
    other = make()
    other.load_state_dict(state)
    assert list(other) == rest
