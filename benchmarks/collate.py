"""The stock DataLoader over `MemmapDataset`, with `fast_collate` and with torch's default, in one process.

    python benchmarks/collate.py [--images 8192] [--side 224] [--batch 256] [--rounds 5] [--dry-run]

Random pixels, random order, pages warm, whole epochs with the loop included; rounds are interleaved, the
first is left out.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from record import Noise, arguments, at_least_one, numbers_of, record, run_main, spread
from torch.utils.data import DataLoader

import memload


def epoch(
    dataset: memload.MemmapDataset, batch: int, collate_fn: Callable[[Any], Any] | None
) -> float:
    """Return images a second of one epoch."""
    start, images = time.perf_counter(), 0
    for pixels, _ in DataLoader(dataset, batch, shuffle=True, collate_fn=collate_fn):
        images += len(pixels)
    return images / (time.perf_counter() - start)


def main() -> None:
    """Run the benchmark."""
    parser = arguments(__doc__)
    parser.add_argument("--images", type=int, default=8192)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=at_least_one, default=5)
    options = parser.parse_args()
    stock, fast, ratios = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "out.bin"
        memload.build(Noise(options.images, options.side), path, size=options.side)
        dataset = memload.MemmapDataset(path)
        for number in range(options.rounds + 1):
            default = epoch(dataset, options.batch, None)
            ours = epoch(dataset, options.batch, memload.fast_collate)
            if number:
                stock.append(default)
                fast.append(ours)
                ratios.append(ours / default)
    results = {
        "default_collate": spread(stock),
        "fast_collate": spread(fast),
        "ratio": spread(ratios),
    }
    parameters = vars(options) | {"pages": "warm", "torch_threads": torch.get_num_threads()}
    record("collate", options, numbers_of(parser), parameters, results)


if __name__ == "__main__":
    run_main(main)
