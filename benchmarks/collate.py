"""The stock DataLoader over `MemmapDataset`, with `fast_collate` and with torch's default.

Images a second of whole epochs in random order, with the loop included, in one process; pages warm.
"""

from pathlib import Path
from typing import Any

import torch
from data import noise_dataset
from harness import Way, rate, run_benchmark
from torch.utils.data import DataLoader

import memload


def ways(options: Any, folder: Path) -> dict[str, Way]:
    """Return an epoch with each collate function."""
    dataset = memload.MemmapDataset(noise_dataset(folder, options.images, options.side))
    default = DataLoader(dataset, options.batch, shuffle=True)
    fast = DataLoader(dataset, options.batch, shuffle=True, collate_fn=memload.fast_collate)
    return {"default_collate": rate(lambda: default), "fast_collate": rate(lambda: fast)}


if __name__ == "__main__":
    run_benchmark(
        ways,
        options={"images": 8192, "side": 224, "batch": 256, "rounds": 5},
        quick={"images": 4096},
        ratios={"ratio": ("fast_collate", "default_collate")},
        facts={"pages": "warm", "torch_threads": torch.get_num_threads()},
    )
