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
def quick_collections() -> Iterator[None]:
    """Keep torch's objects out of the collections that look for leaks, which take long with them."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[int]]:
    """What is registered with CUDA, by address; after each test that is nothing."""
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
    yield registered
    gc.collect()
    assert not registered


def cuda_device() -> Any:
    return torch.device("cuda", 0)
