"""Which rows lie in pieces of files in memory, and where."""

from collections.abc import Callable

import numpy as np
import pytest

from memload import Index
from memload.feeds import windows
from memload.feeds.row_ranges import NO_PIECES, RowRanges, RowTable, pieces_of_rows
from memload.feeds.windows import pieces_of, plan_for_rows
from memload.storage.shards import Shards

ROW = 3000


@pytest.fixture
def shards(make_dataset: Callable[..., Index]) -> Callable[[], Shards]:
    """Ten rows of 3,000 bytes in each of two shards, from byte 4,096 on."""
    path = make_dataset(rows=(10, 10), shape=(10, 100, 3)).path
    return lambda: Shards(Index.read(path))


def held(ranges: RowRanges) -> list[int]:
    return np.flatnonzero(ranges.find(np.arange(20)).are_held).tolist()


def test_a_row_is_held_if_all_of_it_lies_in_a_piece(shards: Callable[[], Shards]) -> None:
    def rows_in(*pieces: list[int]) -> list[int]:
        return held(RowRanges(shards(), np.array(pieces)))

    assert held(RowRanges(shards(), NO_PIECES)) == []
    assert rows_in([0, 0, 4096, 0]) == rows_in([0, 0, 7095, 0]) == []
    assert rows_in([0, 0, 7096, 0]) == rows_in([0, 4096, 7096, 0]) == [0]
    assert rows_in([0, 4097, 10_096, 0]) == [1]
    assert rows_in([0, 4097, 10_095, 0]) == []
    assert rows_in([1, 0, 34_096, 0], [0, 31_000, 34_096, 0]) == [9, *range(10, 20)]


def test_pieces_that_follow_one_another_in_memory_hold_the_row_between_them(
    shards: Callable[[], Shards],
) -> None:
    table = RowTable(shards())
    table.add(0, 8192, 16_384, 50_000)
    assert held(table.ranges) == [2, 3]
    table.add(0, 0, 8192, 50_000 - 8192)
    assert held(table.ranges) == [0, 1, 2, 3]
    table.add(0, 16_384, 34_096, 999_999)  # elsewhere in memory: row 4 is in two parts
    assert held(table.ranges) == [0, 1, 2, 3, 5, 6, 7, 8, 9]
    table.add(1, 0, 7096, 999_999 + 34_096 - 16_384)
    assert held(table.ranges) == [0, 1, 2, 3, 5, 6, 7, 8, 9, 10]


def test_addresses_follow_from_those_of_pieces(shards: Callable[[], Shards]) -> None:
    ranges = RowRanges(shards(), np.array([[1, 0, 34_096, 10**6], [0, 5000, 20_000, 10**9]]))
    found = ranges.find(np.array([19, 2, 0, 3, 10]))
    assert found.are_held.tolist() == [True, True, False, True, True]
    addresses = found.addresses()[found.are_held].tolist()
    assert addresses == [10**6 + 31_096, 10**9 + 5096, 10**9 + 8096, 10**6 + 4096]


def test_rows_in_two_windows_have_a_part_before_the_boundary(
    shards: Callable[[], Shards], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows, "WINDOW_BYTES", 8192)
    ranges = RowRanges(shards(), np.array([[0, 0, 25_096, 0], [1, 0, 34_096, 0]]))
    rows = np.array([11, 0, 1, 7, 6, 9])  # row 6 begins at byte 22,096, and row 9 is not held
    expected = [8192 - 7096, 0, 8192 - 7096, 0, 24_576 - 22_096, 0]
    assert ranges.find(rows).before_boundary().tolist() == expected


def test_rows_are_counted_among_all_and_among_some(shards: Callable[[], Shards]) -> None:
    ranges = RowRanges(shards(), np.array([[0, 0, 10_096, 0], [1, 10_096, 34_096, 0]]))
    assert held(ranges) == [0, 1, *range(12, 20)]
    assert ranges.count(None) == 10
    assert ranges.count(np.array([1, 2, 3, 11, 12, 19])) == 3
    assert ranges.count(np.array([], np.int64)) == 0
    assert RowRanges(shards(), NO_PIECES).count(None) == 0


@pytest.mark.parametrize("seed", range(5))
def test_any_parts_of_files_hold_the_rows_whose_bytes_they_have(
    seed: int, shards: Callable[[], Shards], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows, "WINDOW_BYTES", 8192)
    opened, rng, rows = shards(), np.random.default_rng(seed), np.arange(20)
    wanted = plan_for_rows(opened, rows)
    for _ in range(20):
        plan = rng.choice([0, 1, 4096, 8192], wanted.shape)
        plan = np.minimum(plan, wanted)
        in_ram = RowRanges(opened, rng.permutation(pieces_of(plan)))
        has_byte = np.zeros((2, 40_960), bool)
        for file, start, stop, _ in pieces_of(plan).tolist():
            has_byte[file, start:stop] = True
        expected = [
            bool(has_byte[row // 10, 4096 + row % 10 * ROW :][:ROW].all()) for row in rows.tolist()
        ]
        assert in_ram.find(rows).are_held.tolist() == expected
        # The others lie on the device, one behind the other.
        spans = RowRanges(opened, pieces_of(wanted)).without(in_ram)
        on_device = pieces_of_rows(opened, spans, 10**9)
        both = RowRanges(opened, np.concatenate([on_device, in_ram.pieces])).find(rows)
        assert both.are_held.all()
        offsets, positions = 4096 + rows % 10 * ROW, np.cumsum(np.logical_not(expected)) - 1
        assert np.array_equal(
            both.addresses(), np.where(expected, offsets, 10**9 + positions * ROW)
        )
