"""What all tests of the doctor have in common."""

import pytest
import torch

from memload.measure import stages


@pytest.fixture(autouse=True)
def in_no_time(monkeypatch):
    """Measure as little as possible, on the CPU of a machine with four cores that is idle."""
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(stages, "SECONDS", 0)
    monkeypatch.setattr(stages, "ROUNDS", 1)
    monkeypatch.setattr(stages, "available_cores", lambda: 4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
