"""How much is read from the disk, and for how long, when reads overlap."""

from types import SimpleNamespace

import pytest

from memload.feeds import busy_time
from memload.feeds.busy_time import BusyTime


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock of which a test sets ``now``."""
    clock = SimpleNamespace(now=100.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(busy_time, "time", clock)
    return clock


def test_the_time_of_overlapping_tasks_counts_once(clock: SimpleNamespace) -> None:
    busy = BusyTime()
    assert busy.idle.is_set()
    busy.begin(["a", "b"])
    clock.now += 1
    assert busy.so_far() == (0, 0)
    busy.end(["b"], 10)
    assert busy.so_far() == (10, 1)
    busy.begin(["c"])
    clock.now += 2
    busy.end(["a"], 20)
    assert not busy.idle.is_set()
    clock.now += 4
    assert busy.so_far() == (30, 7)
    busy.end(["c"])
    assert busy.idle.is_set()
    clock.now += 8
    assert busy.so_far() == (30, 7)
    busy.begin(["d"])
    clock.now += 16
    busy.end(["d"], 1)
    assert busy.so_far() == (31, 23)


def test_time_in_which_nothing_was_read_does_not_count(clock: SimpleNamespace) -> None:
    busy = BusyTime()
    for size in (5, 0):
        busy.begin(["a"])
        clock.now += 1
        busy.end(["a"], size)
    assert busy.so_far() == (5, 1)


def test_a_task_that_ends_twice_is_timed_until_the_first_end(clock: SimpleNamespace) -> None:
    busy = BusyTime()
    busy.begin(["a"])
    for _ in range(2):
        clock.now += 1
        busy.end(["a"], 5)
    assert busy.so_far() == (10, 1)  # bytes count both times


def test_forgotten_tasks_leave_what_was_counted(clock: SimpleNamespace) -> None:
    busy = BusyTime()
    for _ in range(2):
        busy.begin(["a"])
        clock.now += 1
        busy.end(["a"], 5)
    busy.begin(["a"])
    busy.forget_tasks()
    assert busy.idle.is_set()
    assert busy.so_far() == (10, 2)
