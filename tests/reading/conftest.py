"""What the tests of reading share."""

import multiprocessing
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def _quick_collections(quick_collections: None) -> None:
    """See `quick_collections`: these tests load torch, and many of them collect garbage."""


@pytest.fixture(autouse=True)
def no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process be the only one, whoever started the tests."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def queues_ended(nothing_left_behind: None) -> Iterator[None]:
    """Wait for the threads that DataLoader tells to end, and does not wait for itself."""
    yield
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":
            thread.join(10)


@pytest.fixture
def in_forked_child() -> Callable[[Callable[[], Any]], Any]:
    """A function that calls another one in a forked child, and returns its result."""

    def call(function: Callable[[], Any]) -> Any:
        context = multiprocessing.get_context("fork")
        ours, childs = context.Pipe()
        process = context.Process(target=lambda: childs.send(function()))
        process.start()
        assert ours.poll(30)
        result = ours.recv()
        process.join(30)
        assert process.exitcode == 0
        ours.close()
        childs.close()
        return result

    return call


@pytest.fixture
def own_threads() -> Callable[[], list[threading.Thread]]:
    """A function that lists the threads that memload has started."""
    return lambda: [thread for thread in threading.enumerate() if thread.name.startswith("memload")]
