from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from memload import Index
from memload.feeds import cpu
from memload.feeds.cpu import CpuFeed
from memload.shards import Shards

FEEDS: dict[str, Callable[[Shards], Any]] = {"cpu": lambda shards: CpuFeed(shards, keep=2)}

every_feed = pytest.mark.parametrize("make", FEEDS.values(), ids=FEEDS)


@pytest.fixture(params=[(12,), (5, 4, 3)], ids=["one shard", "three shards"])
def opened(request: pytest.FixtureRequest, make_dataset: Callable[..., Index]) -> Callable[[], Shards]:
    index = make_dataset(rows=request.param).path  # not the shards: a fixture would hold them too long
    return lambda: Shards(Index.read(index))


def stored(shards: Shards) -> np.ndarray:
    return np.concatenate(shards.maps)


@every_feed
@pytest.mark.parametrize("rows", [[0], [11, 0, 5, 5, 4, 9], list(range(12)), []], ids=str)
def test_rows_come_as_they_are_stored(make: Callable[..., Any], opened: Callable[[], Shards], rows: list[int]) -> None:
    shards = opened()
    batch = make(shards).fetch(np.array(rows, np.int64))
    assert batch.shape == (len(rows), 4, 6, 3)
    assert batch.dtype == torch.uint8
    assert batch.is_contiguous()
    np.testing.assert_array_equal(batch.cpu().numpy(), stored(shards)[rows])


@every_feed
def test_a_batch_is_the_callers_own(make: Callable[..., Any], opened: Callable[[], Shards]) -> None:
    shards = opened()
    feed = make(shards)
    held = [feed.fetch(np.array([row])) for row in range(12)]
    feed.fetch(np.array([3])).fill_(0)
    np.testing.assert_array_equal(torch.cat(held).cpu().numpy(), stored(shards))


@every_feed
def test_batches_outlive_a_closed_feed(make: Callable[..., Any], opened: Callable[[], Shards]) -> None:
    shards = opened()
    feed = make(shards)
    batch = feed.fetch(np.array([1, 2]))
    feed.close()
    np.testing.assert_array_equal(batch.cpu().numpy(), stored(shards)[[1, 2]])


@every_feed
def test_a_feed_says_its_name(
    make: Callable[..., Any], opened: Callable[[], Shards], request: pytest.FixtureRequest
) -> None:
    shards = opened()
    assert make(shards).name in request.node.callspec.id


@pytest.mark.parametrize("descr", ["|u1", "<f4", "<i2"])
def test_rows_of_other_types_come_as_they_are(make_dataset: Callable[..., Index], descr: str) -> None:
    shards = Shards(make_dataset(descr=descr))
    batch = CpuFeed(shards, keep=1).fetch(np.array([4, 2]))
    np.testing.assert_array_equal(batch.numpy(), shards.maps[0][[4, 2]])


def test_pages_are_asked_for_only_after_some_had_to_be_read(
    opened: Callable[[], Shards], monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = opened()
    asked: list[list[int]] = []
    faults = [0]
    monkeypatch.setattr(shards, "ask_for", lambda rows: asked.append(rows.tolist()))
    monkeypatch.setattr(cpu, "_major_faults", lambda: faults[0])
    monkeypatch.setattr(cpu, "_STAY_COLD", 2)
    feed = CpuFeed(shards, keep=1)
    feed.fetch(np.array([0, 1]))
    assert asked == []
    gather = shards.gather

    def cold(rows: np.ndarray, out: np.ndarray) -> np.ndarray:
        faults[0] += 1
        return gather(rows, out)

    monkeypatch.setattr(shards, "gather", cold)
    feed.fetch(np.array([2]))
    monkeypatch.setattr(shards, "gather", gather)
    for row in range(3, 8):
        feed.fetch(np.array([row]))
    assert asked == [[3], [4]]


def test_exactly_the_pages_of_the_rows_are_asked_for(
    opened: Callable[[], Shards], monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = opened()
    from memload import shards as module

    asked: list[tuple[int, int, int]] = []

    def spy(mapped: np.ndarray, start: int, size: int) -> None:
        shard = next(number for number, own in enumerate(shards.maps) if own is mapped)
        asked.append((shard, start, size))

    monkeypatch.setattr(module, "will_need", spy)
    rows = [11, 0, 6]
    shards.ask_for(np.array(rows))
    expected = []
    for row in rows:
        shard, inside = shards.locate(row)
        expected.append((shard, 4096 + inside * 72, 72))
    assert asked == expected


def test_asking_for_pages_of_a_real_file_changes_nothing(opened: Callable[[], Shards]) -> None:
    shards = opened()
    before = stored(shards)
    shards.ask_for(np.arange(12))
    np.testing.assert_array_equal(stored(shards), before)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="Linux tells")
def test_major_faults_are_counted_by_the_thread() -> None:
    assert cpu._major_faults() >= 0
