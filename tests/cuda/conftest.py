"""Tests that need a CUDA device; elsewhere they say that they are skipped."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="module", autouse=True)
def always(quick_collections: None) -> None:
    """Collect quickly in every module here."""


@pytest.fixture(scope="session", autouse=True)
def begun() -> None:
    """Have CUDA begin, which opens pipes and starts threads of its own, before anything is compared."""
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[int]]:
    """What is registered with CUDA, by address; after each test that is nothing, and no memory has become less."""
    from memload.feeds import pages, staging

    registered: set[int] = set()
    real_register, real_unregister = staging.register, staging.unregister

    def register(address: int, size: int, flags: int) -> None:
        real_register(address, size, flags)
        registered.add(address)

    def unregister(address: int) -> None:
        real_unregister(address)
        registered.remove(address)

    for module in (pages, staging):
        monkeypatch.setattr(module, "register", register)
        monkeypatch.setattr(module, "unregister", unregister)
    gc.collect()
    before = _in_use()
    yield registered
    gc.collect()
    assert not registered
    assert _in_use() == before, "bytes of the device's and of torch's page-locked memory"


def _in_use() -> tuple[int, int]:
    """Return the bytes in use of the device's memory, and of torch's page-locked memory."""
    if not torch.cuda.is_available():
        return 0, 0
    torch.cuda.synchronize()  # what is handed over is free once the device is done with it
    torch._C._cuda_clearCublasWorkspaces()  # which the first product of matrices on a stream takes for good
    torch._C._host_emptyCache()  # what is kept for the next that asks counts as taken
    return torch.cuda.memory_allocated(), torch.cuda.host_memory_stats().get(
        "allocated_bytes.current", 0
    )


def cuda_device() -> Any:
    return torch.device("cuda", 0)
