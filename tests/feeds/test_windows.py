"""Which windows of files hold some rows, and which of them fit a budget."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from memload import Index
from memload.feeds import windows
from memload.feeds.windows import plan_for_rows, plan_within, window_sizes
from memload.storage.shards import Shards


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "WINDOW_BYTES", 2 * 4096)


@pytest.mark.parametrize(
    ("rows", "in_use"),
    [
        ([0], [(0, 0)]),
        ([1], [(0, 0), (0, 1)]),  # from byte 7,096 to 10,096
        ([2, 9], [(0, 1), (0, 3), (0, 4)]),
        ([10], [(1, 0)]),
        ([0, 19], [(0, 0), (1, 3), (1, 4)]),
        ([], []),
        (range(20), [(shard, window) for shard in (0, 1) for window in range(5)]),
    ],
    ids=str,
)
def test_the_plan_for_rows_has_the_windows_with_bytes_of_them(
    rows: Any, in_use: Any, make_dataset: Callable[..., Index]
) -> None:
    shards = Shards(make_dataset(rows=(10, 10), shape=(10, 100, 3)))
    plan = plan_for_rows(shards, np.array(rows, np.int64))
    assert [tuple(window) for window in np.argwhere(plan).tolist()] == in_use
    assert np.array_equal(plan[plan > 0], window_sizes(shards)[plan > 0])


def test_shards_of_different_sizes_have_windows_up_to_their_ends(
    make_dataset: Callable[..., Index],
) -> None:
    shards = Shards(make_dataset(rows=(1, 7), shape=(10, 100, 3)))
    expected = [[7096, 0, 0, 0], [8192, 8192, 8192, 520]]
    assert window_sizes(shards).tolist() == expected
    assert plan_for_rows(shards, np.arange(8)).tolist() == expected


def test_a_budget_is_spent_on_the_first_windows_in_whole_pages() -> None:
    plan, nothing = np.array([[8192, 0, 8192], [8192, 1000, 0]]), np.zeros((2, 3), np.int64)

    def within(budget: float) -> list[list[int]]:
        return plan_within(plan, nothing, budget).tolist()

    assert within(0) == [[0, 0, 0], [0, 0, 0]]
    assert within(4095) == [[0, 0, 0], [0, 0, 0]]
    assert within(8192 + 5000) == [[8192, 0, 4096], [0, 0, 0]]
    assert within(25_575) == [[8192, 0, 8192], [8192, 0, 0]]
    assert within(25_576) == within(float("inf")) == plan.tolist()


def test_what_is_held_in_any_case_costs_nothing() -> None:
    plan, held = np.array([[8192, 8192, 8192]]), np.array([[0, 4096, 8192]])
    assert plan_within(plan, held, 0).tolist() == [[0, 4096, 8192]]
    assert plan_within(plan, held, 8192 + 4096).tolist() == [[8192, 8192, 8192]]
    assert plan_within(plan, held, 8192).tolist() == [[8192, 4096, 8192]]
    assert plan_within(np.array([[0, 8192, 0]]), held, 0).tolist() == [[0, 4096, 0]]
