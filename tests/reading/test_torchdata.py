"""The Loader under torchdata's nodes, and MemmapDataset in its StatefulDataLoader."""

import gc
import io
import itertools
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

SIZE, BATCH = 23, 4
NUM_BATCHES = -(-SIZE // BATCH)

# by torchdata 0.11
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


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


def labels(batches: Any) -> list[list[int]]:
    return [values.tolist() for _, values in batches]


def flat(batches: list[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(batches))


def test_the_loader_is_stateful_to_torchdata(path: Path) -> None:
    assert isinstance(Loader(path), stateful.Stateful)


def test_a_state_can_be_saved_by_torch(path: Path) -> None:
    loader, other = (Loader(path, BATCH, shuffle=True) for _ in range(2))
    iterator, file = iter(loader), io.BytesIO()
    next(iterator)
    torch.save({"loader": loader.state_dict()}, file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True)["loader"])
    assert labels(other) == labels(iterator)


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_torchdata_loads_a_data_set_in_an_order_of_ours(path: Path, num_workers: int) -> None:
    # An order is no iterable, but the list of its samples in one epoch is.
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
    other = make()
    other.load_state_dict(state)
    assert labels(other) == rest
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


@pytest.mark.parametrize("seen", range(NUM_BATCHES + 1))
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
