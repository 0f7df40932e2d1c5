"""A plugin of pytest: torch's ``bmm`` of positions as MKL computes it with AVX-512, anywhere.

The product of each column is added to the sum without being rounded before. MKL does not do so on
AMD's processors, even with AVX-512.
"""

from typing import Any

import pytest
import torch

_bmm: Any = torch.Tensor.bmm


def _fused(positions: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    if positions.dtype != torch.float32 or positions.shape[2] != 3:
        result: torch.Tensor = _bmm(positions, matrices)
        return result
    # Products of two float32 are exact in float64.
    columns, rows = positions.double().split(1, 2), matrices.double().split(1, 1)
    total = (columns[0] * rows[0]).float()
    for column, row in zip(columns[1:], rows[1:], strict=True):
        total = (column * row + total.double()).float()
    return total


def pytest_configure(config: pytest.Config) -> None:
    patch = pytest.MonkeyPatch()
    patch.setattr(torch.Tensor, "bmm", _fused)
    config.add_cleanup(patch.undo)
