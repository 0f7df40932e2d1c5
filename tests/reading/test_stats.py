"""What a loader says of its batches and of the time. The clock is the test's: nothing waits."""

import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, replace
from itertools import islice

import pytest
import torch

from memload import CudaPrefetcher, Loader
from memload.reading import loader as loader_module
from memload.reading import prefetch
from memload.reading import stats as stats_module
from memload.reading.stats import Stats

ROW_BYTES = 4 * 6 * 3


class Clock:
    """Seconds that only tests let pass."""

    seconds = 100.0

    def __call__(self):
        return self.seconds

    def takes(self, seconds):
        """Return a transform that takes so long for each batch."""

        def wait(images):
            self.seconds += seconds
            return images

        return wait


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for module in (loader_module, prefetch, stats_module):
        monkeypatch.setattr(module, "perf_counter", clock)
    return clock


@pytest.fixture
def make(make_dataset, clock):
    """A function that makes a Loader whose batches of 4, 4 and 2 take 3 seconds each."""
    path = make_dataset(rows=(6, 4)).path
    return lambda: Loader(path, 4, num_threads=0, device="cpu", transform=clock.takes(3))


def test_an_epoch_counts_batches_bytes_and_the_seconds_of_both_sides(make, clock):
    loader, within = make(), []
    assert (loader.stats, str(loader.stats)) == (Stats(), "no batches yet")
    for _ in loader:
        clock.seconds += 5
        within.append(loader.stats)
    # The use of a batch counts when the next one is asked for.
    assert [astuple(one)[1:5] for one in within] == [(1, 3, 3, 0), (2, 6, 3, 5), (3, 9, 3, 10)]
    assert [one.samples for one in within] == [4, 8, 10]
    assert loader.stats == Stats(0, 3, 9, 3, 15, samples=10, bytes=10 * ROW_BYTES, feed="cpu")
    expected = "3 batches in 24.0 s: waited 9.0 s for data (37.5 %), feed cpu, 720 bytes"
    assert str(loader.stats) == expected


def test_stats_stay_after_a_loop_that_was_left_and_are_those_of_the_newest_epoch(make, clock):
    loader = make()
    for _ in islice(loader, 2):
        clock.seconds += 5
    clock.seconds += 1000  # an evaluation
    left = loader.stats
    assert astuple(left)[:5] == (0, 2, 6, 3, 5)
    resumed = pickle.loads(pickle.dumps(Loader(loader.dataset, 4, device="cpu")))
    assert resumed.stats == Stats()
    resumed.load_state_dict(loader.state_dict())
    list(resumed)  # counts from where it goes on
    assert (resumed.stats.epoch, resumed.stats.batches, resumed.stats.samples) == (0, 1, 2)
    batches = iter(loader)
    assert loader.stats == left  # an epoch begins with its first batch
    clock.seconds += 1000
    newest = iter(loader)
    for iterator in (batches, newest, batches):
        next(iterator)
    assert astuple(loader.stats)[:5] == (2, 1, 3, 3, 0)
    batches.close()
    newest.close()


def test_stats_are_right_with_threads_and_from_another_thread(make_dataset):
    loader = Loader(make_dataset(rows=(10,)).path, 4, num_threads=3, device="cpu")
    with ThreadPoolExecutor(1) as another:
        found = [another.submit(lambda: loader.stats.batches).result() for _ in loader]
    assert (found, loader.stats.samples) == ([1, 2, 3], 10)


def test_a_prefetcher_tells_how_long_its_loop_has_waited(clock):
    batches = [torch.zeros(2, 3, 4, 4)] * 3
    prefetcher = CudaPrefetcher(batches, device="cpu", transform=clock.takes(2))
    assert prefetcher.stats == Stats()
    for epoch in range(2):
        iterator = iter(prefetcher)
        clock.seconds += 1000
        list(iterator)
        assert prefetcher.stats == Stats(epoch, 3, 6, 6, 0)  # all were made for the first


def test_stats_are_one_readable_line():
    found = Stats(0, 1000, 0.4, 0.01, 51.7, 256_000, 38_535_168_000, "dma")
    expected = "1,000 batches in 52.1 s: waited 0.4 s for data (0.8 %), feed dma, 38.5 GB"
    assert str(found) == expected
    mostly_for_first = replace(found, seconds_waited=0.0123, bytes=0, feed="")
    assert str(mostly_for_first) == (
        "1,000 batches in 51.7 s: waited 12.3 ms for data (0.0 %; 10 ms for the first batch)"
    )
    assert str(replace(found, batches=1, seconds_waited=0.01)).startswith("1 batch in 51.7 s: ")
