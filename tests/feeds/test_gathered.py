"""Which rows stay in the page cache, and what the feeds that gather rows count."""

import itertools
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from memload import FormatError, Index, MemmapDataset
from memload.feeds import busy_time, gathered, pinned, windows
from memload.feeds.budget import claimed_bytes
from memload.feeds.cpu import CpuFeed
from memload.feeds.gathered import GatheredRows, claim_pages, pages_of_rows, rows_of_claim
from memload.feeds.interface import Samples
from memload.storage.shards import Shards
from tests.feeds.page_cache import PAGE, drop_pages

Make = Callable[..., Index]
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of 4 pages."""
    for module in (windows, gathered):
        monkeypatch.setattr(module, "WINDOW_BYTES", 4 * PAGE)


@pytest.fixture
def open_shards(make_dataset: Make) -> Callable[[], Shards]:
    """Opens two shards of 20 rows of 3,000 bytes, behind headers of a page."""
    index = make_dataset(rows=(20, 20), shape=(10, 100, 3))
    return lambda: Shards(index)  # a fixture would keep them open for too long


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every gather look as if it had read from the disk."""
    monkeypatch.setattr("memload.storage.shards.disk_reads", itertools.count().__next__)


def gathered_rows(shards: Shards) -> GatheredRows:
    samples = Samples(shards, np.arange(40), ())
    return GatheredRows(samples, claim_pages(samples, math.inf)[0])


def pages_with(shards: Shards, rows: Any) -> set[tuple[int, int]]:
    """Return the shard and number of each page that has bytes of some rows."""
    found = set()
    for row in rows:
        shard, row_in_shard = shards.locate(row)
        first, stop = 4096 + row_in_shard * 3000, 4096 + (row_in_shard + 1) * 3000
        found |= {(shard, page) for page in range(first // PAGE, (stop - 1) // PAGE + 1)}
    return found


@pytest.mark.parametrize(
    "rows", [[], [0], [39], [0, 1, 2], [5, 19, 20, 33], range(40), range(1, 40, 3)], ids=str
)
def test_a_plan_counts_each_page_of_the_rows_once(
    rows: Any, open_shards: Callable[[], Shards]
) -> None:
    shards = open_shards()
    plan = pages_of_rows(shards, np.array(rows, np.int64))
    assert plan.sum() == PAGE * len(pages_with(shards, rows))
    assert [row.any() for row in plan] == [any(r < 20 for r in rows), any(r >= 20 for r in rows)]


@pytest.mark.parametrize("rows", [range(40), [3, 4, 9, 20, 28, 39], range(1, 40, 3)], ids=str)
@pytest.mark.parametrize("pages", [0, 1, 2, 5, 11, 100])
def test_the_first_rows_that_fit_stay(
    rows: Any, pages: int, open_shards: Callable[[], Shards]
) -> None:
    shards = open_shards()
    used = np.array(rows, np.int64)
    (claim,) = claim_pages(Samples(shards, used, ()), pages * PAGE)
    stays = rows_of_claim(shards, used, claim)
    if stays is None:
        assert pages >= len(pages_with(shards, rows))
        return
    staying = np.flatnonzero(stays).tolist()
    assert len(pages_with(shards, staying)) <= pages
    assert staying == list(rows)[: len(staying)]
    assert len(pages_with(shards, list(rows)[: len(staying) + 1])) > pages


def test_rows_that_another_loader_keeps_cost_nothing(open_shards: Callable[[], Shards]) -> None:
    shards = open_shards()
    used, budget = np.arange(40), 12 * PAGE
    claims = [claim_pages(Samples(shards, used, ()), budget)[0] for _ in range(2)]
    first, second = (rows_of_claim(shards, used, claim) for claim in claims)
    assert first is not None
    assert np.array_equal(first, second)
    assert claimed_bytes() <= budget


@pytest.fixture
def dropped(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The descriptor and the number of every page that is dropped from the page cache."""
    found: list[tuple[int, int]] = []

    def record(descriptor: int, offset: int, size: int, advice: int) -> None:
        if advice == os.POSIX_FADV_DONTNEED:
            assert size > 0 == offset % PAGE == size % PAGE
            found.extend(
                (descriptor, page) for page in range(offset // PAGE, (offset + size) // PAGE)
            )

    monkeypatch.setattr(os, "posix_fadvise", record)
    return found


@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize("name", ["cpu", "pinned"])
def test_a_feed_drops_the_rows_that_do_not_stay(
    name: str, open_shards: Callable[[], Shards], dropped: list[tuple[int, int]]
) -> None:
    shards = open_shards()
    used = np.arange(0, 40, 2)
    samples = Samples(shards, used, ())
    (claim,) = claim_pages(samples, 11 * PAGE)
    stays = rows_of_claim(shards, used, claim)
    assert stays is not None
    order = np.random.default_rng(0).permutation(20)
    if name == "cpu":
        feed: Any = CpuFeed(samples, CPU, keep=1, claim=claim)
        pixels = feed.prepare(order)(0, 20)()[0].numpy()
    else:
        feed = pinned.PinnedFeed(samples, CUDA, num_threads=1, callers=1, claim=claim)
        pixels = np.zeros((20, *shards.array.shape), np.uint8)
        feed._gather(used[order], pixels)  # without the copy to the device
    np.testing.assert_array_equal(pixels, np.concatenate(shards.maps)[used[order]])
    others = pages_with(shards, used[~stays[used]]) - pages_with(shards, np.flatnonzero(stays))
    assert set(dropped) == {(shards.descriptors[shard], page) for shard, page in others}
    counts = feed.counts()
    assert (counts.rows, counts.rows_to_hold, counts.served) == (20, stays.sum(), 20)
    assert counts.hits is None
    feed.close()


@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize("budget", [31 * PAGE, 32 * PAGE, 1 << 30])
def test_nothing_is_dropped_if_all_rows_fit(
    budget: int, open_shards: Callable[[], Shards], dropped: list[tuple[int, int]]
) -> None:
    shards = open_shards()
    used = np.arange(40)
    samples = Samples(shards, used, ())
    (claim,) = claim_pages(samples, budget)
    feed = CpuFeed(samples, CPU, keep=1, claim=claim)
    pixels = feed.prepare(used)(0, 40)()[0].numpy()
    np.testing.assert_array_equal(pixels, np.concatenate(shards.maps))
    assert not dropped
    assert feed.counts().rows_to_hold == 40


@pytest.mark.usefixtures("cold")
def test_bytes_and_time_of_reads_are_counted_across_threads(
    open_shards: Callable[[], Shards], monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = open_shards()
    bytes_so_far, seconds, gather = itertools.count(0, 1000), itertools.count(0, 2), shards.gather
    rows, out = gathered_rows(shards), np.empty((1, *shards.array.shape), np.uint8)
    monkeypatch.setattr(gathered, "bytes_read", bytes_so_far.__next__)
    monkeypatch.setattr(busy_time, "time", SimpleNamespace(monotonic=seconds.__next__))

    def gather_twice(*arguments: Any) -> Any:
        """Gather while another thread does."""
        monkeypatch.setattr(shards, "gather", gather)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(rows.gather, *arguments[:2]).result()
        counts = rows.counts()  # while the first one goes on
        assert (counts.served, counts.bytes_read, counts.seconds_reading) == (1, 1000, 2)
        return gather(*arguments)

    monkeypatch.setattr(shards, "gather", gather_twice)
    rows.gather(np.array([1]), out)
    rows.gather(np.array([2]), out)
    counts = rows.counts()
    assert (counts.served, counts.bytes_read) == (3, 3000 + 1000 + 1000)
    assert counts.seconds_reading == 4 + 2


@pytest.mark.usefixtures("cold")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_that_is_forked_while_a_thread_gathers_counts_on(
    open_shards: Callable[[], Shards], monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = open_shards()
    rows, out = gathered_rows(shards), np.empty((1, *shards.array.shape), np.uint8)
    monkeypatch.setattr(gathered, "bytes_read", itertools.count().__next__)
    # Another thread of the parent may be in any of these.
    with rows._reading(), rows._lock, rows._busy_time._lock:
        child = os.fork()
        if not child:
            rows.gather(np.array([1]), out)
            os._exit(0 if rows.counts().bytes_read else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_rows_that_different_loaders_keep_count_for_each(
    open_shards: Callable[[], Shards],
) -> None:
    """Even rows and odd rows have pages of their own, although in the same windows."""
    shards, budget = open_shards(), 12 * PAGE
    claims = [
        claim_pages(Samples(shards, np.arange(first, 40, 2), ()), budget)[0] for first in (0, 1)
    ]
    assert claimed_bytes() <= budget
    assert [claim.size for claim in claims] == [budget, 0]


def pages_of(shards: Shards, rows: Any, pages: int) -> list[bool]:
    """Return which of a file's first pages have bytes of some rows."""
    found, size = np.zeros(pages, bool), shards.array.row_bytes
    for row in rows:
        offset = shards.array.header_bytes + row * size
        found[offset // PAGE : (offset + size - 1) // PAGE + 1] = True
    return found.tolist()


SHAPES = [(16, 64, 1), (32, 32, 3), (224, 224, 3), (1, 5000, 1)]  # 1 KiB, 3 KiB, 147 KiB, 5,000 B


@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize("every", [2, 5])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_exactly_the_pages_of_rows_that_stay_are_left(
    shape: Any, every: int, make_dataset: Make, cached_pages: Callable[[Path], list[bool]]
) -> None:
    """All rows are read, in any order. Of every few, one stays for another Loader."""
    shards = Shards(make_dataset(rows=(40,), shape=shape))
    path, kept = shards.paths[0], np.arange(0, 40, every)
    stays = Samples(shards, kept, ())
    staying = GatheredRows(stays, claim_pages(stays, math.inf)[0])
    samples = Samples(shards, np.arange(40), ())
    rows = GatheredRows(samples, claim_pages(samples, 0)[0])
    drop_pages(path)
    for seed in range(2):
        order = np.random.default_rng(seed).permutation(40)
        for some in np.split(order, 4):
            rows.gather(some, np.empty((10, *shards.array.shape), np.uint8))
    found = cached_pages(path)
    assert found[1:] == pages_of(shards, kept, len(found))[1:]  # the first page is the header
    assert staying.counts().rows_to_hold == len(kept)


@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_loader_leaves_the_pages_of_its_own_rows(
    shape: Any, make_dataset: Make, cached_pages: Callable[[Path], list[bool]]
) -> None:
    shards = Shards(make_dataset(rows=(40,), shape=shape))
    samples = Samples(shards, np.arange(40), ())
    (claim,) = claim_pages(samples, pages_of_rows(shards, np.arange(25)).sum())
    stays = rows_of_claim(shards, np.arange(40), claim)
    assert stays is not None
    assert 0 < stays.sum() < 40
    rows = GatheredRows(samples, claim)
    drop_pages(shards.paths[0])
    order = np.random.default_rng(0).permutation(40)
    for some in np.split(order, 4):
        rows.gather(some, np.empty((10, *shards.array.shape), np.uint8))
    found = cached_pages(shards.paths[0])
    assert found[1:] == pages_of(shards, np.flatnonzero(stays), len(found))[1:]


@pytest.mark.usefixtures("cold")
def test_rows_are_dropped_once_no_loader_keeps_them(
    open_shards: Callable[[], Shards], dropped: list[tuple[int, int]]
) -> None:
    """Another Loader has opened the files for itself."""
    shards, out = open_shards(), np.empty((40, 10, 100, 3), np.uint8)
    samples, others = (Samples(opened, np.arange(40), ()) for opened in (shards, open_shards()))
    rows = GatheredRows(samples, claim_pages(samples, 0)[0])
    other = GatheredRows(others, claim_pages(others, math.inf)[0])
    rows.gather(np.arange(40), out)
    assert not dropped
    del other
    rows.gather(np.arange(40), out)
    assert len(set(dropped)) == len(pages_with(shards, range(40)))


@pytest.mark.usefixtures("cold")
def test_a_failed_read_ends_its_time(open_shards: Callable[[], Shards]) -> None:
    shards = open_shards()
    rows = gathered_rows(shards)
    out = np.empty((1, *shards.array.shape), np.uint8)
    os.truncate(shards.paths[1], 4096)
    with pytest.raises(FormatError, match=r"row 20 is the first one that it lacks"):
        rows.gather(np.array([30]), out)
    assert rows.counts().served == 0
    rows.gather(np.array([3]), out)
    np.testing.assert_array_equal(out[0], shards.maps[0][3])


@pytest.mark.usefixtures("cold")
def test_a_data_set_larger_than_ram_keeps_its_first_rows(
    make_dataset: Make,
    add_array: Make,
    dropped: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its arrays together: half of the rows of each."""
    index = make_dataset(rows=(20,), shape=(64, 64, 3))
    mask = np.random.default_rng(0).integers(0, 9, (20, 64, 128)).astype(np.uint8)
    dataset = MemmapDataset(add_array(index, "mask", mask, "mask").path)
    size = 20 * (64 * 64 * 3 + 64 * 128)
    monkeypatch.setattr("memload.feeds.limits.available_memory", lambda: size / 2 / 0.8)
    for name, row_bytes in (("image", 64 * 64 * 3), ("mask", 64 * 128)):
        dropped.clear()
        stored = np.concatenate(dataset.shards_of(name).maps)
        np.testing.assert_array_equal(
            dataset.gather([19, 10, 9, 0], name=name), stored[[19, 10, 9, 0]]
        )
        pages = row_bytes // PAGE
        assert [page - 1 for _, page in dropped[::pages]] == [19 * pages, 10 * pages]
    dropped.clear()
    dataset.subset(range(10, 20)).gather(range(10))  # all of which fit
    assert not dropped


def test_a_data_set_in_ram_does_not_look_at_memory(
    make_dataset: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = MemmapDataset(make_dataset().path)
    monkeypatch.setattr("memload.storage.shards.disk_reads", lambda: 0)
    dataset.gather([0])  # the first one shows that the disk is not read
    monkeypatch.delattr("memload.feeds.limits.available_memory")
    np.testing.assert_array_equal(dataset.gather(range(5)), dataset.shards.maps[0])
