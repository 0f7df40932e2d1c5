"""What a loader says of its batches and of the time. The clock is the test's: nothing waits."""

import itertools
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from memload import CudaPrefetcher, Loader, ThreadPrefetcher
from memload.reading import loader as loader_module
from memload.reading import prefetch
from memload.reading import stats as stats_module
from memload.reading.stats import Stats

ROW_BYTES = 4 * 6 * 3


class Clock:
    """Seconds that only tests let pass."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds

    def takes(self, seconds: float) -> Callable[[Tensor], Tensor]:
        """Return a transform that takes so long for each batch."""

        def wait(images: Tensor) -> Tensor:
            self.seconds += seconds
            return images

        return wait


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (loader_module, prefetch, stats_module):
        monkeypatch.setattr(module, "perf_counter", clock)
    return clock


@pytest.fixture
def path(make_dataset: Callable[..., Any]) -> Path:
    """Ten samples."""
    index: Any = make_dataset(rows=(6, 4))
    return Path(index.path)


def make(path: Path, clock: Clock, **options: Any) -> Loader:
    """Return a Loader whose batches of 4, 4 and 2 take 3 seconds each."""
    return Loader(path, 4, num_threads=0, device="cpu", transform=clock.takes(3), **options)


def test_an_epoch_counts_batches_bytes_and_the_seconds_of_both_sides(
    path: Path, clock: Clock
) -> None:
    loader = make(path, clock)
    assert loader.stats == Stats()
    assert str(loader.stats) == "no batches yet"
    for _ in loader:
        clock.seconds += 5
    assert loader.stats == Stats(
        epoch=0,
        batches=3,
        seconds_waited=9,
        seconds_to_first=3,
        seconds_in_loop=15,
        samples=10,
        bytes=10 * ROW_BYTES,
        feed="cpu",
        rows=10,
        hits=None,
    )
    assert str(loader.stats) == (
        "3 batches in 24.0 s: waited 9.0 s for data (37.5 %), feed cpu, 720 bytes"
    )


def test_stats_within_an_epoch_are_those_of_the_batches_so_far(path: Path, clock: Clock) -> None:
    loader = make(path, clock)
    found = []
    for _ in loader:
        clock.seconds += 5
        found.append(loader.stats)
    assert [one.batches for one in found] == [1, 2, 3]
    assert [one.samples for one in found] == [4, 8, 10]
    assert [one.seconds_waited for one in found] == [3, 6, 9]
    # the use of a batch counts when the next one is asked for
    assert [one.seconds_in_loop for one in found] == [0, 5, 10]


def test_stats_stay_after_a_loop_that_was_left_and_begin_anew_with_the_next_epoch(
    path: Path, clock: Clock
) -> None:
    loader = make(path, clock)
    for _ in itertools.islice(loader, 2):
        clock.seconds += 5
    clock.seconds += 1000  # an evaluation
    left = loader.stats
    assert (left.epoch, left.batches, left.seconds_waited, left.seconds_in_loop) == (0, 2, 6, 5)
    batches = iter(loader)
    assert loader.stats == left  # an epoch begins with its first batch
    clock.seconds += 1000
    next(batches)
    again = loader.stats
    assert (again.epoch, again.batches, again.seconds, again.rows) == (1, 1, 3, 4)
    batches.close()  # type: ignore[attr-defined]  # a generator


def test_a_resumed_epoch_counts_from_where_it_goes_on(path: Path, clock: Clock) -> None:
    loader = make(path, clock)
    for _ in itertools.islice(loader, 2):
        pass
    copy = pickle.loads(pickle.dumps(Loader(path, 4, num_threads=0, device="cpu")))
    copy.load_state_dict(loader.state_dict())
    assert copy.stats == Stats()
    assert len(list(copy)) == 1
    assert (copy.stats.epoch, copy.stats.batches, copy.stats.samples) == (0, 1, 2)


def test_of_several_iterators_the_newest_is_told(path: Path, clock: Clock) -> None:
    loader = make(path, clock)
    older, newer = iter(loader), iter(loader)
    next(older)
    next(newer)
    next(older)
    found = loader.stats
    assert (found.epoch, found.batches, found.seconds_waited) == (1, 1, 3)
    assert found.rows == 8  # since the newer one has begun, of both
    older.close()  # type: ignore[attr-defined]  # generators
    newer.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("num_threads", [1, 3])
def test_stats_are_right_with_threads_and_from_another_thread(path: Path, num_threads: int) -> None:
    loader = Loader(path, 4, num_threads=num_threads, device="cpu", columns=[])
    found: list[Stats] = []
    for _ in loader:
        asking = threading.Thread(target=lambda: found.append(loader.stats))
        asking.start()
        asking.join()
    assert [one.batches for one in found] == [1, 2, 3]
    assert loader.stats.samples == loader.stats.rows == 10
    assert loader.stats.seconds_waited > 0 < loader.stats.seconds_in_loop


def test_the_thread_of_a_prefetcher_is_the_one_that_waits(path: Path, clock: Clock) -> None:
    loader = make(path, clock)
    assert len(list(ThreadPrefetcher(loader))) == 3
    assert (loader.stats.batches, loader.stats.seconds_waited) == (3, 9)


def test_masks_count_as_bytes_and_as_rows(
    make_dataset: Callable[..., Any], add_array: Callable[..., Any]
) -> None:
    masks = np.zeros((5, 4, 6), np.uint8)
    index = add_array(make_dataset(), "mask", masks, "mask")
    loader = Loader(index.path, 5, device="cpu")
    assert len(list(loader)) == 1
    assert (loader.stats.samples, loader.stats.rows) == (5, 10)
    assert loader.stats.bytes == 5 * (ROW_BYTES + 24)


@pytest.mark.parametrize("own_thread", [False, True])
def test_a_prefetcher_tells_how_long_its_loop_has_waited(clock: Clock, own_thread: bool) -> None:
    batches = [torch.zeros(2, 3, 4, 4) for _ in range(3)]
    prefetcher = CudaPrefetcher(
        batches, device="cpu", transform=clock.takes(2), own_thread=own_thread
    )
    assert prefetcher.stats == Stats()
    for epoch in range(2):
        for _ in prefetcher:
            pass
        found = prefetcher.stats
        assert (found.epoch, found.batches, found.samples, found.bytes) == (epoch, 3, None, None)
    if not own_thread:  # else some of these seconds pass in the loop
        assert (found.seconds_waited, found.seconds_in_loop) == (6, 0)
        assert (
            str(found)
            == "3 batches in 6.0 s: waited 6.0 s for data (100.0 %; 6.0 s for the first batch)"
        )


def test_stats_are_one_readable_line() -> None:
    found = Stats(0, 1000, 0.4, 0.01, 51.7, 256_000, 38_535_168_000, "dma", 256_000, 256_000)
    assert str(found) == (
        "1,000 batches in 52.1 s: waited 0.4 s for data (0.8 %), feed dma, 38.5 GB"
    )
    some_missing = found._replace(feed="disk", hits=128_000, seconds_waited=0.0123)
    assert str(some_missing) == (
        "1,000 batches in 51.7 s: waited 12.3 ms for data (0.0 %; 10 ms for the first batch), "
        "feed disk, 38.5 GB, 50 % of the rows were in memory"
    )
    assert str(found._replace(batches=1, seconds_waited=0.01)).startswith("1 batch in 51.7 s: ")
