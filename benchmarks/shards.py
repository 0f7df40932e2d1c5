"""Random rows out of 256 shards beside the same out of one.

`MemmapDataset.gather` copies `--rows` random rows at a time into one buffer; rows a second, pages
warm. Rows are 12, 27 and 147 KiB long (pictures of 64×64, 96×96 and 224×224); the pixels of each
data set are `--megabytes` in all. `np.take` does the same with one array.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from data import noise_dataset
from harness import Way, rate, run_benchmark

import memload

SIDES = (64, 96, 224)
SHARDS = (1, 256)


def gathering(gather: Callable[[np.ndarray], object], count: int, rows: int, passes: int) -> Way:
    """Return a way that measures a function that gathers random rows."""
    random = np.random.default_rng(0)

    def run() -> int:
        for _ in range(passes):
            gather(random.integers(0, count, rows))
        return passes * rows

    return rate(run)


def ways(options: Any, folder: Path) -> dict[str, Way]:
    """Return what gathers from each data set."""
    found: dict[str, Way] = {}
    for side in SIDES:
        row_bytes = side * side * 3
        count = max(*SHARDS, options.megabytes * 1_000_000 // row_bytes)
        passes = max(1, 200_000_000 // (row_bytes * options.rows))
        pixels = np.load(noise_dataset(folder, count, side), mmap_mode="r")
        taken = np.empty((options.rows, side, side, 3), np.uint8)
        gathers = {"np.take": partial(np.take, pixels, axis=0, out=taken, mode="clip")}
        for shards in SHARDS:
            dataset = memload.MemmapDataset(noise_dataset(folder, count, side, shards=shards))
            out = torch.empty((options.rows, side, side, 3), dtype=torch.uint8)
            gathers[f"{shards} shard{'s' * (shards > 1)}"] = partial(dataset.gather, out=out)
        for name, gather in gathers.items():
            way = gathering(gather, count, options.rows, passes)
            found[f"{row_bytes / 1024:.0f} KiB › {name}"] = way
    return found


if __name__ == "__main__":
    tables = [f"{side * side * 3 / 1024:.0f} KiB" for side in SIDES]
    pairs = [("256 shards", "1 shard"), ("1 shard", "np.take")]
    run_benchmark(
        ways,
        options={"megabytes": 600, "rows": 256, "rounds": 9},
        quick={"megabytes": 300},
        ratios={
            f"{table} › {one} / {other}": (f"{table} › {one}", f"{table} › {other}")
            for table in tables
            for one, other in pairs
        },
        facts={"pages": "warm"},
    )
