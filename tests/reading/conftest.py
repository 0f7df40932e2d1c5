"""What the tests of reading share."""

import pytest


@pytest.fixture(autouse=True)
def _quick_collections(quick_collections: None) -> None:
    """See `quick_collections`: these tests load torch, and many of them collect garbage."""


@pytest.fixture(autouse=True)
def no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process be the only one, whoever started the tests."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
