"""What the tests of building share."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def jpeg4py() -> Any:
    """The module jpeg4py. Skips the test where it or its library is not installed."""
    module = pytest.importorskip("jpeg4py", reason="jpeg4py is not installed")
    try:
        module.initialize()
    except OSError as error:
        pytest.skip(f"jpeg4py finds no libturbojpeg: {error}")
    return module


@pytest.fixture
def ledger(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """A function that returns path and reason of the samples that a build has rejected."""

    def read(output: Path = tmp_path / "out.bin") -> dict[str, str]:
        path = output.with_suffix(".rejects.csv")
        if not path.exists():
            return {}
        with path.open(newline="", encoding="utf-8", errors="surrogateescape") as file:
            header, *lines = csv.reader(file)
        assert header == ["path", "reason"]
        return dict(lines)

    return read
