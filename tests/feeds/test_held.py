"""The feeds dma and disk hold rows in registered page cache, and read the others from the files."""

import itertools
import logging
import math
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from memload import FeedError, FormatError, Index
from memload.feeds import held, limits, resident, row_reader
from memload.feeds.budget import claim_all, claimed_bytes
from memload.feeds.interface import Samples
from memload.feeds.limits import MemoryLimits
from memload.feeds.registered import shared_file
from memload.feeds.resident import ResidentFeed
from memload.feeds.windows import plan_for_rows
from memload.storage.shards import Shards

ORDER = np.random.default_rng(0).permutation(40)


def stored(shards: Shards) -> np.ndarray:
    return np.concatenate(shards.maps)


@pytest.mark.parametrize("name", ["dma", "disk"])
def test_all_rows_come_from_registered_pages_if_they_fit(
    name: str, cuda: Any, open_shards: Callable[[], Shards]
) -> None:
    shards = open_shards()
    feed = cuda.feed(shards, name)
    cuda.wait(feed)
    np.testing.assert_array_equal(cuda.fetch(feed, ORDER), stored(shards)[ORDER])
    assert sum(cuda.pages.values()) == 2 * 64_096
    assert not cuda.copied_from_page_locked
    counts = feed.counts()
    assert (counts.rows, counts.rows_held, counts.rows_to_hold) == (40, 40, 40)
    assert (counts.served, counts.hits, counts.bytes_read, counts.problem) == (40, 40, 0, "")
    feed.close()
    assert not cuda.pages
    assert not claimed_bytes()


def test_rows_beyond_the_budget_come_through_page_locked_memory(
    cuda: Any, open_shards: Callable[[], Shards]
) -> None:
    shards = open_shards()
    feed = cuda.feed(shards, limit=5 * 4096)
    cuda.wait(feed)
    np.testing.assert_array_equal(cuda.fetch(feed, ORDER), stored(shards)[ORDER])
    assert sum(cuda.pages.values()) == 5 * 4096
    assert cuda.copied_from_pages == 5 + 2  # rows 0 to 4 end before byte 20,480; two are in parts
    assert cuda.copied_from_page_locked == 35
    counts = feed.counts()
    assert (counts.rows_held, counts.rows_to_hold, counts.served, counts.hits) == (5, 5, 40, 5)
    assert counts.bytes_read > 0
    feed.close()
    assert not cuda.page_locked


@pytest.mark.parametrize(
    ("limit", "rows_held"),
    [(0, 0), (4096, 0), (8192, 1), (30_000, 3), (100_000, 5), (math.inf, 5)],
)
def test_batches_of_a_subset_are_exact_with_any_budget(
    limit: float, rows_held: int, cuda: Any, open_shards: Callable[[], Shards]
) -> None:
    shards = open_shards()
    feed = cuda.feed(shards, limit=limit, rows=[7, 33, 7, 19, 20, 0])
    for samples in ([0, 1, 2, 3, 4, 5], [4], [5, 5, 2]):
        expected = stored(shards)[np.array([7, 33, 7, 19, 20, 0])[samples]]
        np.testing.assert_array_equal(cuda.fetch(feed, samples), expected)
        cuda.wait(feed)
    counts = feed.counts()
    assert counts.rows == 5
    assert counts.rows_held == counts.rows_to_hold == rows_held
    feed.close()


def test_a_chunk_that_was_prepared_early_is_served_while_rows_are_brought_in(
    cuda: Any, open_shards: Callable[[], Shards], monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = open_shards()
    may_read = threading.Event()
    read = held._Filler._register_windows

    def wait_and_read(filler: Any) -> None:
        may_read.wait(30)
        read(filler)

    monkeypatch.setattr(held._Filler, "_register_windows", wait_and_read)
    feed = cuda.feed(shards)
    assert (feed.counts().rows_held, feed.counts().rows_to_hold) == (0, 40)
    begin = feed.prepare(ORDER)
    first = begin(0, 10)
    may_read.set()
    cuda.wait(feed)
    for start, fetch in ((0, first), (10, begin(10, 20)), (20, begin(20, 30))):
        (pixels,) = fetch()
        np.testing.assert_array_equal(pixels.numpy(), stored(shards)[ORDER[start : start + 10]])
    assert (feed.counts().served, feed.counts().hits) == (30, 20)
    feed.close()


def test_the_rows_of_an_npy_file_begin_behind_its_own_header(
    make_dataset: Callable[..., Index], add_array: Callable[..., Index], cuda: Any
) -> None:
    values = np.random.default_rng(0).random((10, 375))  # 3,000 bytes
    index = add_array(make_dataset(rows=(10,)), "features", values, "npy")
    for limit in (math.inf, 8192):
        feed = cuda.feed(Shards(index, "features"), limit=limit)
        cuda.wait(feed)
        assert sum(cuda.pages.values()) == min(limit, 128 + 30_000)
        rows = [2, 9, 0, 5]  # rows 2 and 5 lie in two windows: 2 from byte 6,128 to 9,128
        np.testing.assert_array_equal(cuda.fetch(feed, rows), values[rows])
        feed.close()


def test_feeds_share_registered_windows_and_the_last_one_gives_them_back(
    cuda: Any, open_shards: Callable[[], Shards]
) -> None:
    one, other = cuda.feed(open_shards(), rows=[0]), cuda.feed(open_shards(), rows=[0, 19])
    cuda.wait(one)
    cuda.wait(other)
    assert len(cuda.pages) == 2  # row 19 lies in the last window alone
    one.close()
    assert len(cuda.pages) == 2
    other.close()
    assert not cuda.pages


def test_a_feed_that_needs_more_of_a_window_than_another_one_has_registered(
    cuda: Any, open_shards: Callable[[], Shards]
) -> None:
    shards = open_shards()
    small = cuda.feed(open_shards(), limit=3 * 4096)
    cuda.wait(small)
    large = cuda.feed(shards, "dma")
    cuda.wait(large)
    np.testing.assert_array_equal(cuda.fetch(large, ORDER), stored(shards)[ORDER])
    assert 30 < large.counts().rows_held == large.counts().rows_to_hold < 40
    assert large.counts().hits == large.counts().rows_held
    small.close()
    large.close()


def test_what_stays_registered_for_another_loader_counts_after_a_loader_is_closed(
    cuda: Any, open_shards: Callable[[], Shards]
) -> None:
    large, small = cuda.feed(open_shards()), cuda.feed(open_shards(), rows=[0])
    cuda.wait(large)
    cuda.wait(small)
    large.close()
    assert sum(cuda.pages.values()) == claimed_bytes() == 64_096  # of the file that both use
    small.close()
    assert not cuda.pages
    assert not claimed_bytes()


def test_a_feed_keeps_no_second_descriptor_for_what_it_registers(
    cuda: Any, open_shards: Callable[[], Shards]
) -> None:
    shards = open_shards()
    before = len(list(Path("/proc/self/fd").iterdir()))
    files = [
        shared_file(path, descriptor, 64_096)
        for path, descriptor in zip(shards.paths, shards.descriptors, strict=True)
    ]
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert bytes(files[1].bytes[4096:7096]) == shards.maps[1][0].tobytes()


# What fails.


def test_the_rows_are_served_whatever_ends_the_thread(
    cuda: Any,
    open_shards: Callable[[], Shards],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(file: Any, window: int, size: int, device: Any) -> int:
        raise RuntimeError("CUDA error: unknown")

    monkeypatch.setattr(held.RegisteredFile, "register", fail)
    shards = open_shards()
    feed = cuda.feed(shards, "dma")
    cuda.wait(feed)
    np.testing.assert_array_equal(cuda.fetch(feed, ORDER), stored(shards)[ORDER])
    counts = feed.counts()
    assert (counts.rows_held, counts.rows_to_hold, counts.hits) == (0, 0, 0)
    assert counts.problem == caplog.records[0].getMessage()
    assert "RuntimeError('CUDA error: unknown')" in counts.problem
    feed.close()


def test_disk_serves_without_registered_pages_and_says_why(
    cuda: Any, open_shards: Callable[[], Shards], caplog: pytest.LogCaptureFixture
) -> None:
    cuda.limit = 0
    shards = open_shards()
    feed = cuda.feed(shards)
    cuda.wait(feed)
    np.testing.assert_array_equal(cuda.fetch(feed, ORDER), stored(shards)[ORDER])
    counts = feed.counts()
    assert (counts.rows_held, counts.rows_to_hold, counts.hits) == (0, 0, 0)
    assert "cannot be registered with CUDA" in counts.problem
    assert [record.getMessage() for record in caplog.records] == [counts.problem]
    assert not claimed_bytes()
    feed.close()
    with pytest.raises(FeedError, match="cannot be registered with CUDA"):
        cuda.feed(shards, "dma")


@pytest.mark.parametrize("name", ["dma", "disk"])
def test_if_a_window_cannot_be_registered_its_rows_are_read_past_the_page_cache(
    name: str,
    cuda: Any,
    open_shards: Callable[[], Shards],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = []
    begin = row_reader.RowReader.begin

    def note_kept(reader: Any, rows: np.ndarray, are_kept: np.ndarray) -> Any:
        kept.extend(are_kept.tolist())
        return begin(reader, rows, are_kept)

    monkeypatch.setattr(row_reader.RowReader, "begin", note_kept)
    cuda.limit = 3 * 8192
    shards = open_shards()
    feed = cuda.feed(shards, name)
    cuda.wait(feed)
    np.testing.assert_array_equal(cuda.fetch(feed, ORDER), stored(shards)[ORDER])
    counts = feed.counts()
    assert (counts.rows_held, counts.rows_to_hold, counts.hits) == (6, 6, 6)
    assert kept == [False] * 34
    assert "CUDA refuses" in counts.problem
    assert len(caplog.records) == 1
    assert claimed_bytes() == 3 * 8192
    feed.close()


def test_rows_are_held_only_as_long_as_ram_is_left(
    cuda: Any,
    open_shards: Callable[[], Shards],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(held, "available_memory", lambda: 80_000)
    shards = open_shards()
    feed = cuda.feed(shards, "dma")
    cuda.wait(feed)
    assert sum(cuda.pages.values()) == 7 * 8192  # one more would leave less than 20,000 bytes
    np.testing.assert_array_equal(cuda.fetch(feed, ORDER), stored(shards)[ORDER])
    assert feed.counts().problem == (
        "No more rows are held in RAM than 57.3 kB: 22.7 kB are left, and the next 6.75 kB would "
        "leave less than 20 kB to other uses. The other rows are read from the disk in every epoch. "
        "To avoid this warning, free some RAM, or use feed='disk' and cache_bytes of at most 57.3 kB."
    )
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    feed.close()


@pytest.mark.parametrize("cache_bytes", [None, 10**12])
def test_what_is_planned_by_default_is_held_although_batches_take_ram(
    cache_bytes: int | None,
    cuda: Any,
    open_shards: Callable[[], Shards],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "available_memory", lambda: 80_000)
    limit = MemoryLimits(cache_bytes).in_ram("disk").size
    left = itertools.chain([80_000], itertools.repeat(65_000))  # before and after the first batch
    monkeypatch.setattr(held, "available_memory", lambda: next(left))
    feed = cuda.feed(open_shards(), limit=limit)
    cuda.wait(feed)
    assert not feed.counts().problem
    assert sum(cuda.pages.values()) == 9 * 4096  # half of it, in whole pages
    feed.close()


def test_a_later_loader_leaves_as_much_ram_as_the_first_one(
    cuda: Any,
    make_dataset: Callable[..., Index],
    open_shards: Callable[[], Shards],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(held, "available_memory", lambda: 80_000)  # with what is registered
    first = cuda.feed(open_shards(), "dma")
    cuda.wait(first)
    others = Shards(make_dataset("others.bin", rows=(20,), shape=(10, 100, 3)))
    second = cuda.feed(others, "dma")
    cuda.wait(second)
    assert sum(cuda.pages.values()) == 7 * 8192  # one more would leave less than 20,000 bytes
    assert first.counts().rows_held > 0
    assert second.counts().rows_held == 0
    np.testing.assert_array_equal(cuda.fetch(second, range(20)), stored(others))
    first.close()
    second.close()


def test_what_another_loader_has_registered_needs_no_more_ram(
    cuda: Any, open_shards: Callable[[], Shards], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = cuda.feed(open_shards())
    cuda.wait(first)
    monkeypatch.setattr(held, "available_memory", lambda: 128_193)  # one byte more than it holds
    second, another = cuda.feed(open_shards()), cuda.feed(open_shards(), rows=[3])
    for feed in (second, another):
        cuda.wait(feed)
        assert feed.counts().rows_held == feed.counts().rows
        assert not feed.counts().problem
    first.close()
    second.close()
    another.close()


def test_a_file_that_was_truncated_or_replaced_before_it_is_registered(
    make_dataset: Callable[..., Index], cuda: Any
) -> None:
    shards = Shards(make_dataset(rows=(10,), shape=(10, 100, 3)))
    expected = stored(shards).copy()
    make_dataset("other.bin", rows=(10,), shape=(10, 100, 3), seed=9)
    path = shards.paths[0]
    os.link(path, path.with_name("old.bin"))
    path.with_name("other.bin").replace(path)
    feed = cuda.feed(shards)
    cuda.wait(feed)
    np.testing.assert_array_equal(cuda.fetch(feed, range(10)), expected)
    os.truncate(path.with_name("old.bin"), 20_000)
    with pytest.raises(FormatError, match=r"truncated .* 20,000 bytes instead of 34,096"):
        cuda.fetch(feed, [0])
    with pytest.raises(FormatError, match=r"truncated .* 20,000 bytes instead of 34,096"):
        cuda.feed(shards)
    feed.close()


def test_rows_of_a_window_that_cannot_be_read_are_not_held(
    cuda: Any,
    open_shards: Callable[[], Shards],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault_in = held.RegisteredFile.fault_in

    def fail(file: Any, start: int, size: int) -> None:
        if start >= 16_384:
            raise FormatError(f"{file.path} cannot be read: Input/output error.")
        fault_in(file, start, size)

    monkeypatch.setattr(held.RegisteredFile, "fault_in", fail)
    shards = open_shards()
    feed = cuda.feed(shards)
    cuda.wait(feed)
    assert "Input/output error" in caplog.text
    np.testing.assert_array_equal(cuda.fetch(feed, ORDER), stored(shards)[ORDER])
    assert feed.counts().hits == 4
    feed.close()


# The pace.


@pytest.fixture(autouse=True)
def no_other_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the readers of tests before, which may be waiting still."""
    monkeypatch.setattr(held, "_readers", weakref.WeakSet())


class SlowDisk:
    """A disk that takes a second for each part of 4 KiB, on a clock that otherwise stands.

    It is the reader of rows as well: with ``is_busy``, batches wait for rows all the time.
    """

    def __init__(self, *, is_busy: bool, clock_runs: bool = True) -> None:
        self.seconds = 0.0
        #: When each part was read, and how large it was.
        self.times: list[float] = []
        self.sizes: list[int] = []
        self.is_busy, self.clock_runs = is_busy, clock_runs
        self.waited = threading.Event()
        self.idle = SimpleNamespace(wait=self.wait)

    def monotonic(self) -> float:
        return self.seconds

    def fault_in(self, start: int, size: int) -> None:
        self.sizes.append(size)
        self.times.append(self.seconds)
        self.seconds += 1

    def wait(self, seconds: float) -> bool:
        self.waited.set()
        if self.clock_runs and self.is_busy:
            self.seconds += seconds
        return not self.is_busy

    def hold(self, shards: Shards, cuda: Any, monkeypatch: pytest.MonkeyPatch) -> held.HeldRows:
        """Begin to hold the first shard, which is read from this disk."""
        monkeypatch.setattr(held, "time", self)
        monkeypatch.setattr(held, "_STEP_BYTES", 4096)
        monkeypatch.setattr(held.RegisteredFile, "fault_in", self.fault_in)
        (claim,) = claim_all([(shards, plan_for_rows(shards, np.arange(20)))], math.inf)
        reader: Any = self
        return held.HeldRows(shards, claim, cuda.device, reader)


def test_files_are_read_at_once_while_no_batch_waits_for_rows(
    cuda: Any, open_shards: Callable[[], Shards], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, count = SlowDisk(is_busy=False), itertools.count()
    monkeypatch.setattr(held, "disk_reads", lambda: next(count))
    rows = disk.hold(open_shards(), cuda, monkeypatch)
    rows._thread.join(30)
    assert rows.is_complete()
    assert disk.times == list(range(16))
    assert max(disk.sizes) == 4096
    rows.close()


@pytest.mark.parametrize("ranks", [1, 4])
def test_files_are_read_for_a_twentieth_of_the_time_while_batches_wait_for_rows(
    ranks: int, cuda: Any, open_shards: Callable[[], Shards], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))  # of one host, which share the twentieth
    disk, count = SlowDisk(is_busy=True), itertools.count()
    monkeypatch.setattr(held, "disk_reads", lambda: next(count))
    rows = disk.hold(open_shards(), cuda, monkeypatch)
    rows._thread.join(30)
    assert rows.is_complete()
    assert disk.times == pytest.approx([20 * ranks * part for part in range(16)], abs=0.2 * 16)
    rows.close()


def test_files_are_read_slowly_also_while_another_loader_waits_for_rows(
    cuda: Any, open_shards: Callable[[], Shards], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, other, count = SlowDisk(is_busy=True), SlowDisk(is_busy=False), itertools.count()
    monkeypatch.setattr(held, "disk_reads", lambda: 7)  # the other Loader finds all in RAM
    others_rows = other.hold(open_shards(), cuda, monkeypatch)
    others_rows._thread.join(30)
    disk.idle, other.idle = other.idle, disk.idle
    monkeypatch.setattr(held, "disk_reads", lambda: next(count))
    rows = disk.hold(open_shards(), cuda, monkeypatch)
    rows._thread.join(30)
    assert disk.times == pytest.approx([20 * part for part in range(16)], abs=0.2 * 16)
    rows.close()
    others_rows.close()


def test_what_is_in_ram_already_is_brought_in_without_pauses(
    cuda: Any, open_shards: Callable[[], Shards], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SlowDisk(is_busy=True)
    monkeypatch.setattr(held, "disk_reads", lambda: 7)
    rows = disk.hold(open_shards(), cuda, monkeypatch)
    rows._thread.join(30)
    assert disk.times == list(range(9))
    assert disk.sizes == [4096, 4096, *[8192] * 6, 64_096 - 7 * 8192]
    assert not disk.waited.is_set()
    rows.close()


@pytest.mark.parametrize("end", ["close", "drop"])
def test_the_thread_ends_with_what_it_reads_for(
    end: str, cuda: Any, open_shards: Callable[[], Shards], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, count = SlowDisk(is_busy=True, clock_runs=False), itertools.count()
    monkeypatch.setattr(held, "disk_reads", lambda: next(count))
    rows = disk.hold(open_shards(), cuda, monkeypatch)
    thread = rows._thread
    assert disk.waited.wait(30)  # without an end, it would wait for ever
    if end == "close":
        rows.close()
    else:
        del rows
    thread.join(30)
    assert not thread.is_alive()
    assert disk.times == [0]
    assert not cuda.pages


def test_resident_copies_files_with_little_memory_registered(
    make_dataset: Callable[..., Index], cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = Shards(make_dataset(rows=(20, 20), shape=(10, 100, 3)))
    most = 0
    register = cuda.register

    def note(address: int, size: int, flags: int) -> None:
        nonlocal most
        register(address, size, flags)
        most = max(most, sum(cuda.pages.values()))

    monkeypatch.setattr("memload.feeds.registered.register", note)
    monkeypatch.setattr(resident, "require_cuda", lambda name, device: None)
    samples = Samples(shards, np.arange(40), ())
    feed = ResidentFeed(samples, torch.device("cpu"), num_threads=1)
    (pixels,) = feed.prepare(ORDER)(0, 40)()
    np.testing.assert_array_equal(pixels.numpy(), stored(shards)[ORDER])
    assert 0 < most <= 2 * 8192
    feed.close()
