"""Tests that need a CUDA device. They are skipped elsewhere."""

import gc
import operator
import threading
import time
from pathlib import Path

import pytest
import torch

from memload import Loader
from memload.feeds import choice, held, pages
from memload.feeds.pages import PagesFeed

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="module", autouse=True)
def always_quick(quick_collections):
    """Use `quick_collections` in every module here."""


@pytest.fixture(scope="session", autouse=True)
def initialised():
    """Initialise CUDA, which opens pipes and starts threads, before leaks are looked for."""
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")


@pytest.fixture(autouse=True)
def registered_addresses(monkeypatch):
    """The addresses registered with CUDA. Fails a test that leaves one, or that leaks memory."""
    addresses = set()
    real_register, real_unregister = held.register, held.unregister

    def register(address, size):
        real_register(address, size)
        addresses.add(address)

    def unregister(address):
        real_unregister(address)
        addresses.discard(address)  # a test that failed may have left it

    monkeypatch.setattr(held, "register", register)
    monkeypatch.setattr(held, "unregister", unregister)
    gc.collect()
    before = _memory_in_use()
    yield addresses
    deadline = time.monotonic() + 5  # for threads that have been told to end
    while _is_left(addresses, before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not addresses
    for now, then in zip(_memory_in_use(), before, strict=True):
        assert now <= then, "bytes of the device's and of torch's page-locked memory"


def _is_left(addresses, before):
    """Return whether memory is registered or in use that was not before."""
    gc.collect()
    return bool(addresses) or any(map(operator.gt, _memory_in_use(), before))


def _memory_in_use():
    """Return the bytes in use of the device's memory, and of torch's page-locked memory."""
    if not torch.cuda.is_available():
        return 0, 0
    torch.cuda.synchronize()  # batches that were handed over are free once the device is done
    torch._C._cuda_clearCublasWorkspaces()  # that the first matrix product on a stream takes
    torch._C._host_emptyCache()  # memory that is kept for the next use counts as allocated
    return torch.cuda.memory_allocated(), torch.cuda.host_memory_stats().get(
        "allocated_bytes.current", 0
    )


@pytest.fixture
def wait_until_held():
    """A function that waits until a feed, or that of a Loader, holds all that it shall hold."""

    def wait(owner):
        feed = owner._get_pipeline().feed if isinstance(owner, Loader) else owner
        for one in getattr(feed, "_feeds", [feed]):
            if isinstance(one, PagesFeed):
                one._filler._thread.join(30)
                assert not one._filler.problem
                assert all(file.held == file.planned for file in one._files)

    return wait


@pytest.fixture
def may_hold(monkeypatch):
    """An event that files wait for before anything of them is held. A test has to set it."""
    event, fault_in = threading.Event(), held.fault_in

    def fault_in_late(*arguments):
        event.wait(30)
        fault_in(*arguments)

    monkeypatch.setattr(held, "fault_in", fault_in_late)
    return event


@pytest.fixture
def window_bytes(monkeypatch):
    """A function that sets the size of windows, so that small files have several."""

    def set_size(size):
        for module in (choice, held, pages):
            monkeypatch.setattr(module, "WINDOW_BYTES", size)

    return set_size
