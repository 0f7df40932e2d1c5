"""What shuffling costs: the first batch of 1.28 million samples, a permutation of 10⁸, a short epoch.

The first batch is that of a new process, from making the Loader to holding 256 images, shuffled;
its pixels are a sparse file of ImageNet's size, so that no disk is waited for. The permutation is
asked for in parts of a million; its memory is what the peak of the process grew by. A short epoch is
one of 64 samples with two threads.
"""

import json
import time
from pathlib import Path
from typing import Any

from data import empty_dataset, noise_dataset
from harness import Way, run_benchmark, run_python

import memload

FIRST = """
import json, sys, time
import torch, memload
memload.Loader
start = time.perf_counter()
loader = memload.Loader(sys.argv[1], 256, shuffle=True, device="cpu")
batch = next(iter(loader))
print(json.dumps(time.perf_counter() - start))
"""

PERMUTATION = """
import inspect, json, resource, sys, time
import numpy as np
from memload import ShuffledSampler
size = int(sys.argv[1])

def take(start, stop):
    # version 0.1.0 takes the first and the last position, later ones all of them
    if "start" in inspect.signature(ShuffledSampler.take).parameters:
        return ShuffledSampler(size, seed=1).take(0, start, stop)
    return ShuffledSampler(size, seed=1).take(0, np.arange(start, stop))

take(0, 10)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.perf_counter()
for first in range(0, size, 1_000_000):
    take(first, min(size, first + 1_000_000))
seconds = time.perf_counter() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"time (s)": seconds, "memory (MB)": (peak - before) * 1024 / 1e6}))
"""


def ways(options: Any, folder: Path) -> dict[str, Way]:
    """Return what is measured."""
    large = empty_dataset(folder, options.samples)
    small = noise_dataset(folder, 64, 32)
    loader = memload.Loader(small, 16, shuffle=True, num_threads=2, device="cpu")

    def short_epoch() -> float:
        start = time.perf_counter()
        for _ in range(options.epochs):
            for _batch in loader:
                pass
        return 1000 * (time.perf_counter() - start) / options.epochs

    return {
        "first batch (s)": lambda: json.loads(run_python("-c", FIRST, large)),
        "permutation": lambda: json.loads(run_python("-c", PERMUTATION, options.permutation)),
        "epoch of 64 samples (ms)": short_epoch,
    }


if __name__ == "__main__":
    run_benchmark(
        ways,
        options={"samples": 1_281_167, "permutation": 100_000_000, "epochs": 500, "rounds": 5},
        quick={"permutation": 20_000_000, "rounds": 5},
        facts={"batch": 256, "index": "warm", "pixels": "sparse"},
    )
