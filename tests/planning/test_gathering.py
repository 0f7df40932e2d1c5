"""How fast threads gather, with a clock that goes on by a second each time that somebody looks."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from memload.planning import gathering


def test_what_is_copied_in_a_second_is_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(gathering, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(gathering, "available_cores", lambda: 1)
    for name, value in (("_BYTES", 3000), ("_BATCH_BYTES", 1000), ("_SECONDS", 5)):
        monkeypatch.setattr(gathering, name, value)
    # It begins at 0. The thread begins at 1, copies six blocks of ten samples until 7, and ends at 8.
    assert gathering.gathering_rate(100) == 6 * 10 * 100 / 8


@pytest.mark.parametrize(("cores", "threads"), [(3, 3), (64, 8)])
def test_as_many_threads_gather_as_a_loader_has(
    monkeypatch: pytest.MonkeyPatch, cores: int, threads: int
) -> None:
    seen: list[int] = []

    def executor(number: int) -> ThreadPoolExecutor:
        seen.append(number)
        return ThreadPoolExecutor(number)

    monkeypatch.setattr(gathering, "ThreadPoolExecutor", executor)
    monkeypatch.setattr(gathering, "available_cores", lambda: cores)
    monkeypatch.setattr(gathering, "_BYTES", 3000)
    monkeypatch.setattr(gathering, "_SECONDS", 0)
    assert gathering.gathering_rate(5000) > 0  # a sample that is larger than all of that, too
    assert seen == [threads]
