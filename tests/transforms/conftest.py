"""Batches to transform."""

import contextlib
import importlib
import sys
from pathlib import Path

import pytest
import torch


@pytest.fixture
def make_images():
    """A function that returns random uint8 images (N, C, H, W), in channels-last layout."""

    def make(count=8, height=20, width=24, channels=3, seed=0):
        generator = torch.Generator().manual_seed(seed)
        shape = (count, height, width, channels)
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).permute(
            0, 3, 1, 2
        )

    return make


#: They undo what they defined when they are dropped.
_libraries = []


@pytest.fixture(scope="session")
def torchvision():
    """torchvision, whose operations on tensors define the results."""
    with contextlib.suppress(ImportError, RuntimeError):
        return importlib.import_module("torchvision")
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    # See scripts/environment.sh. Its wheel for CUDA cannot load its operators beside torch for the
    # CPU, and wants to know their types.
    sys.path.append(str(Path(sys.prefix) / "torchvision"))
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _libraries.append(library)
    return importlib.import_module("torchvision")


@pytest.fixture(scope="session")
def functional(torchvision):
    """``torchvision.transforms.v2.functional``."""
    return importlib.import_module("torchvision.transforms.v2.functional")


@pytest.fixture(scope="session", autouse=True)
def initialized():
    """Initialize CUDA, which opens pipes and starts threads, before leaks are looked for."""
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")
