"""Batches to transform."""

from collections.abc import Callable

import pytest
import torch


@pytest.fixture
def make_images() -> Callable[..., torch.Tensor]:
    """A function that returns random uint8 images (N, C, H, W), in channels-last layout."""

    def make(
        count: int = 8, height: int = 20, width: int = 24, channels: int = 3, seed: int = 0
    ) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        shape = (count, height, width, channels)
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).permute(
            0, 3, 1, 2
        )

    return make


@pytest.fixture(scope="session", autouse=True)
def initialized() -> None:
    """Initialize CUDA, which opens pipes and starts threads, before leaks are looked for."""
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")
