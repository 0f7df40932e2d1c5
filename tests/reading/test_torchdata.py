"""The Loader under torchdata's nodes."""

import gc
from itertools import islice

import pytest

from memload import Loader

nodes = pytest.importorskip("torchdata.nodes")

# by torchdata 0.11
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


@pytest.fixture
def make(make_dataset):
    """A function that makes the Loader a source of torchdata's nodes, with a step behind it."""
    path = make_dataset(rows=(9, 8, 6)).path

    def make():
        loader = Loader(path, 4, shuffle=True, num_threads=2, columns=["index"], device="cpu")
        source = nodes.IterableWrapper(loader)
        return nodes.Loader(nodes.Mapper(source, lambda batch: batch.index.tolist()))

    yield make
    gc.collect()  # torchdata's loader and its iterator hold each other, and with them one of ours


@pytest.mark.parametrize("seen", [0, 1, 5, 6])
def test_under_torchdatas_nodes_the_loader_goes_on(make, seen):
    whole, loader, other = make(), make(), make()
    epochs = [list(whole) for _ in range(3)]
    assert [len(epoch) for epoch in epochs] == [6, 6, 6]
    assert list(loader) == epochs[0] != epochs[1]
    assert list(islice(iter(loader), seen)) == epochs[1][:seen]
    other.load_state_dict(loader.state_dict())
    assert list(other) == (epochs[1][seen:] or epochs[2])
