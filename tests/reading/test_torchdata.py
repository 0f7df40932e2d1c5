"""The Loader under torchdata's nodes."""

import gc
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memload import Loader

nodes = pytest.importorskip("torchdata.nodes")

SIZE, BATCH = 23, 4
NUM_BATCHES = -(-SIZE // BATCH)

# by torchdata 0.11
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


@pytest.fixture
def path(make_dataset: Callable[..., Any]) -> Path:
    """Samples whose label says which they are."""
    classes = tuple(f"{number:02d}" for number in range(SIZE))
    return Path(
        make_dataset(rows=(9, 8, 6), columns={"label": np.arange(SIZE)}, classes=classes).path
    )


def labels(batches: Any) -> list[list[int]]:
    return [values.tolist() for _, values in batches]


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


@pytest.mark.parametrize("seen", [0, 1, NUM_BATCHES - 1, NUM_BATCHES])
def test_under_torchdatas_nodes_the_loader_goes_on(
    seen: int, make_nodes: Callable[[], Any], expected: list[list[list[int]]]
) -> None:
    loader = make_nodes()
    assert list(loader) == expected[0]
    assert list(itertools.islice(iter(loader), seen)) == expected[1][:seen]
    other = make_nodes()
    other.load_state_dict(loader.state_dict())
    assert list(other) == (expected[1][seen:] or expected[2])
