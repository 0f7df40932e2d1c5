"""Tests that need a CUDA device. They are skipped elsewhere."""

import gc
import operator
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from memload import Loader
from memload.feeds import page_locked, registered, windows
from memload.feeds.page_cache import PageCacheFeed

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="module", autouse=True)
def always_quick(quick_collections: None) -> None:
    """Use `quick_collections` in every module here."""


@pytest.fixture(scope="session", autouse=True)
def initialised() -> None:
    """Initialise CUDA, which opens pipes and starts threads, before leaks are looked for."""
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")


@pytest.fixture(autouse=True)
def registered_addresses(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[int]]:
    """The addresses registered with CUDA. Fails a test that leaves one, or that leaks memory."""
    addresses: set[int] = set()
    real_register, real_unregister = page_locked.register, page_locked.unregister

    def register(address: int, size: int, flags: int) -> None:
        real_register(address, size, flags)
        addresses.add(address)

    def unregister(address: int) -> None:
        real_unregister(address)
        addresses.discard(address)  # a test that failed may have left it

    for module in (page_locked, registered):
        monkeypatch.setattr(module, "register", register)
        monkeypatch.setattr(module, "unregister", unregister)
    gc.collect()
    before = _memory_in_use()
    yield addresses
    deadline = time.monotonic() + 5  # for threads that have been told to end
    while _is_left(addresses, before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not addresses
    for now, then in zip(_memory_in_use(), before, strict=True):
        assert now <= then, "bytes of the device's and of torch's page-locked memory"


def _is_left(addresses: set[int], before: tuple[int, int]) -> bool:
    """Return whether memory is registered or in use that was not before."""
    gc.collect()
    return bool(addresses) or any(map(operator.gt, _memory_in_use(), before))


@pytest.fixture
def wait_until_held() -> Callable[[Any], None]:
    """A function that waits until a feed, or that of a Loader, holds all rows that it shall hold."""

    def wait(owner: Any) -> None:
        feed = owner._get_pipeline().feed if isinstance(owner, Loader) else owner
        for one in getattr(feed, "_feeds", [feed]):
            if isinstance(one, PageCacheFeed):
                one._held._thread.join(30)
                assert one._held.is_complete()
                assert not one._held.problem

    return wait


@pytest.fixture
def may_register(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """An event that windows wait for before they are registered."""
    event, register = threading.Event(), registered.RegisteredFile.register

    def register_late(*arguments: Any) -> Any:
        event.wait(30)
        return register(*arguments)

    monkeypatch.setattr(registered.RegisteredFile, "register", register_late)
    return event


@pytest.fixture
def window_bytes(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A function that sets the size of windows, so that small files have several."""

    def set_size(size: int) -> None:
        monkeypatch.setattr(windows, "WINDOW_BYTES", size)

    return set_size


def _memory_in_use() -> tuple[int, int]:
    """Return the bytes in use of the device's memory, and of torch's page-locked memory."""
    if not torch.cuda.is_available():
        return 0, 0
    torch.cuda.synchronize()  # batches that were handed over are free once the device is done
    torch._C._cuda_clearCublasWorkspaces()  # that the first matrix product on a stream takes
    torch._C._host_emptyCache()  # memory that is kept for the next use counts as allocated
    return torch.cuda.memory_allocated(), torch.cuda.host_memory_stats().get(
        "allocated_bytes.current", 0
    )
