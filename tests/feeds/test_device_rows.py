"""The feed disk holds rows beyond those in RAM in the device's own memory."""

import itertools
import logging
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from memload import FormatError, Index
from memload.feeds import device_rows, held
from memload.feeds.budget import Claim, claim_all, hold_on_device
from memload.feeds.row_reader import RowReader
from memload.feeds.windows import plan_for_rows
from memload.storage.shards import Shards

ROW = 3000
ORDER = np.random.default_rng(0).permutation(40)


def stored(shards: Shards) -> np.ndarray:
    return np.concatenate(shards.maps)


@pytest.mark.parametrize("step", [1, 7000, 32 << 20])
def test_rows_for_which_ram_has_no_room_come_from_the_device(
    step: int, cuda: Any, open_shards: Callable[[], Shards], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_rows, "_STEP_BYTES", step)
    shards = open_shards()
    feed = cuda.feed(shards, limit=5 * 4096, resident=25 * ROW + 2999)
    cuda.wait(feed)
    np.testing.assert_array_equal(cuda.fetch(feed, ORDER), stored(shards)[ORDER])
    # Rows 0 to 4 end before byte 20,480. Rows 5 to 29 are on the device.
    assert (cuda.copied_on_device, cuda.copied_from_page_locked) == (25 + 9, 10)  # 9 in two parts
    counts = feed.counts()
    assert (counts.rows_held, counts.rows_on_device, counts.rows_to_hold) == (30, 25, 30)
    assert (counts.hits, counts.problem) == (30, "")
    assert [len(memory) for memory in cuda.on_device] == [25 * ROW]
    feed.close()
    assert not cuda.on_device
    assert not cuda.page_locked


@pytest.mark.parametrize("limit", [0, 8192, 30_000, 100_000])
def test_with_enough_memory_on_the_device_no_row_is_read_any_more(
    limit: int, cuda: Any, open_shards: Callable[[], Shards]
) -> None:
    shards = open_shards()
    feed = cuda.feed(shards, limit=limit, resident=40 * ROW)
    cuda.wait(feed)
    for _ in range(2):
        np.testing.assert_array_equal(cuda.fetch(feed, ORDER), stored(shards)[ORDER])
    counts = feed.counts()
    assert counts.rows_held == counts.rows_to_hold == 40
    assert (counts.served, counts.hits, counts.bytes_read) == (80, 80, 0)
    assert not cuda.copied_from_page_locked
    assert sum(len(memory) for memory in cuda.on_device) == counts.rows_on_device * ROW
    feed.close()


def test_only_windows_with_used_rows_are_held_on_the_device(
    cuda: Any, open_shards: Callable[[], Shards]
) -> None:
    shards = open_shards()
    feed = cuda.feed(shards, limit=0, resident=40 * ROW, rows=[0, 21, 0])
    cuda.wait(feed)
    np.testing.assert_array_equal(cuda.fetch(feed, [2, 1, 0]), stored(shards)[[0, 21, 0]])
    assert feed.counts().rows_on_device == feed.counts().rows == 2
    assert sum(len(memory) for memory in cuda.on_device) < 6 * ROW
    feed.close()


def test_less_memory_than_a_row_holds_nothing(cuda: Any, open_shards: Callable[[], Shards]) -> None:
    shards = open_shards()
    feed = cuda.feed(shards, limit=0, resident=ROW - 1)
    cuda.wait(feed)
    np.testing.assert_array_equal(cuda.fetch(feed, ORDER), stored(shards)[ORDER])
    assert not cuda.on_device
    assert feed.counts().rows_to_hold == 0
    feed.close()


def test_a_device_without_enough_memory_is_left_alone_with_a_warning(
    cuda: Any,
    open_shards: Callable[[], Shards],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (50_000, 100_000))
    cuda.device_bytes = 50_000
    shards = open_shards()
    feed = cuda.feed(shards, limit=8192, resident=30 * ROW)
    cuda.wait(feed)
    np.testing.assert_array_equal(cuda.fetch(feed, ORDER), stored(shards)[ORDER])
    counts = feed.counts()
    assert (counts.rows_held, counts.rows_on_device, counts.rows_to_hold) == (1, 0, 1)
    assert counts.problem == (
        "No rows are held on cpu: they need 90 kB of its memory, of which 50 kB are free. "
        "Use a smaller resident_bytes."
    )
    assert [(one.levelno, one.getMessage()) for one in caplog.records] == [
        (logging.WARNING, counts.problem)
    ]
    feed.close()


def test_rows_on_the_device_are_served_while_others_are_still_brought_in(
    cuda: Any, open_shards: Callable[[], Shards], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = itertools.count()
    in_turn = held._Filler._in_turn

    def stop_later(filler: Any, read: Any, *arguments: Any) -> bool:
        if next(steps) == 3:
            filler._state.stop.set()
        return in_turn(filler, read, *arguments)

    monkeypatch.setattr(held._Filler, "_in_turn", stop_later)
    monkeypatch.setattr(device_rows, "_STEP_BYTES", 2 * ROW)
    shards = open_shards()
    feed = cuda.feed(shards, limit=0, resident=40 * ROW)
    feed._held._thread.join(30)
    np.testing.assert_array_equal(cuda.fetch(feed, ORDER), stored(shards)[ORDER])
    counts = feed.counts()
    assert (counts.rows_held, counts.rows_on_device, counts.rows_to_hold) == (6, 6, 40)
    assert counts.hits == 6
    feed.close()
    assert not cuda.on_device


def test_rows_that_cannot_be_read_are_not_held_on_the_device(
    cuda: Any,
    open_shards: Callable[[], Shards],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read_range = RowReader.read_range

    def fail(reader: Any, file: int, *arguments: Any) -> int:
        if file == 1:
            raise FormatError("made.bin cannot be read: Input/output error.")
        return read_range(reader, file, *arguments)

    monkeypatch.setattr(RowReader, "read_range", fail)
    shards = open_shards()
    feed = cuda.feed(shards, limit=8192, resident=40 * ROW)
    cuda.wait(feed)
    np.testing.assert_array_equal(cuda.fetch(feed, ORDER), stored(shards)[ORDER])
    counts = feed.counts()
    assert (counts.rows_held, counts.rows_on_device, counts.hits) == (20, 19, 20)
    assert counts.problem == caplog.records[0].getMessage()
    assert "Input/output error" in counts.problem
    feed.close()


def test_loaders_of_the_same_rows_share_the_memory_of_the_device(
    cuda: Any, open_shards: Callable[[], Shards], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    read_range = RowReader.read_range

    def note(reader: Any, file: int, offset: int, size: int, memory: Any) -> int:
        reads.append(size)
        return read_range(reader, file, offset, size, memory)

    monkeypatch.setattr(RowReader, "read_range", note)
    shards = open_shards()
    feeds = [cuda.feed(open_shards(), limit=30_000, resident=20 * ROW) for _ in range(2)]
    for feed in feeds:
        cuda.wait(feed)
        np.testing.assert_array_equal(cuda.fetch(feed, ORDER), stored(shards)[ORDER])
        assert feed.counts().rows_on_device == 20
    assert [len(memory) for memory in cuda.on_device] == [20 * ROW]
    assert sum(reads) == 20 * ROW
    feeds.pop().close()
    del feed
    assert len(cuda.on_device) == 1
    np.testing.assert_array_equal(cuda.fetch(feeds[0], ORDER), stored(shards)[ORDER])
    feeds.pop().close()
    assert not cuda.on_device


# The limit.


def claims_of(*arrays: Shards, limit: int = 0) -> list[Claim]:
    wanted = [(shards, plan_for_rows(shards, np.arange(len(shards)))) for shards in arrays]
    return claim_all(wanted, limit)


def rows_of(claim: Claim) -> list[list[int]]:
    return [] if claim.on_device is None else claim.on_device.ranges.tolist()


def test_loaders_share_the_limit_of_a_device(
    make_dataset: Callable[..., Index],
) -> None:
    device, other = torch.device("cuda", 0), torch.device("cuda", 1)
    one = Shards(make_dataset("one.bin", rows=(30, 30), shape=(10, 100, 3)))
    two = Shards(make_dataset("two.bin", rows=(30, 30), shape=(10, 100, 3)))
    first, second, third = claims_of(one), claims_of(two), claims_of(two)
    hold_on_device(first, 40 * ROW, device)
    assert rows_of(first[0]) == [[0, 30], [30, 40]]
    hold_on_device(second, 65 * ROW, device)
    assert rows_of(second[0]) == [[0, 25]]
    hold_on_device(third, 65 * ROW, other)
    assert rows_of(third[0]) == [[0, 30], [30, 60]]
    del first
    again = claims_of(one)
    hold_on_device(again, 65 * ROW, device)
    assert rows_of(again[0]) == [[0, 30], [30, 40]]


def test_the_same_share_of_each_array_is_held_on_the_device(
    make_dataset: Callable[..., Index], add_array: Callable[..., Index]
) -> None:
    index = make_dataset(rows=(40,), shape=(10, 100, 3))
    index = add_array(index, "mask", np.zeros((40, 10, 100), np.uint8), "mask")
    claims = claims_of(Shards(index), Shards(index, "mask"))
    hold_on_device(claims, 20 * (ROW + 1000), torch.device("cuda", 0))
    assert [rows_of(claim) for claim in claims] == [[[0, 20]], [[0, 20]]]
    claims = claims_of(Shards(index), Shards(index, "mask"))
    hold_on_device(claims, 10**9, torch.device("cuda", 0))
    assert [rows_of(claim) for claim in claims] == [[[0, 40]], [[0, 40]]]


def test_nothing_is_held_on_a_device_if_all_fits_in_ram(
    make_dataset: Callable[..., Index],
) -> None:
    shards = Shards(make_dataset(rows=(40,), shape=(10, 100, 3)))
    claims = claims_of(shards, limit=10**9)
    hold_on_device(claims, 10**9, torch.device("cuda", 0))
    assert claims[0].on_device is None
    assert math.isclose(claims[0].size, claims[0].wanted)
