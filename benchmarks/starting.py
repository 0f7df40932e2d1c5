"""What shuffling costs: the first batch of 1.28 million samples, and a permutation of 10⁸; and what many epochs leave.

    python benchmarks/starting.py [--samples 1281167] [--permutation 100000000] [--epochs 10000] [--rounds 5]
        [--dry-run]

The first batch is that of a new process, from making the Loader to holding 256 images, shuffled; its pixels are a
sparse file of ImageNet's size, so no disk is waited for. The permutation's memory is what the process's peak grew by.
Epochs are of a data set of 64 samples with two threads; resident memory, threads and descriptors are read before,
half way, and after, then again after a thousand loops that were left after their first batch.
"""

import gc
import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import psutil
from opening import make
from record import Noise, arguments, at_least_one, numbers_of, record, run_main, spread

import memload

FIRST = """
import json, sys, time
import torch, memload, memload.reading.loader
start = time.perf_counter()
loader = memload.Loader(sys.argv[1], 256, shuffle=True, device="cpu")
batch = next(iter(loader))
print(json.dumps(time.perf_counter() - start))
"""

PERMUTATION = """
import json, resource, sys, time
from memload import ShuffledSampler
size = int(sys.argv[1])
ShuffledSampler(size).take(0, 0, 10)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.perf_counter()
order = ShuffledSampler(size, seed=1).take(0, 0, size)
seconds = time.perf_counter() - start
print(json.dumps([seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / 1e9]))
"""


def run(code: str, *arguments: object) -> Any:
    """Run code in a process of its own; return what it printed."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def state() -> dict[str, float]:
    """Return what the process holds now."""
    gc.collect()
    process = psutil.Process()
    return {
        "resident MB": process.memory_info().rss / 1e6,
        "threads": threading.active_count(),
        "descriptors": process.num_fds(),
    }


def main() -> None:
    """Run the benchmark."""
    parser = arguments(__doc__)
    parser.add_argument("--samples", type=int, default=1_281_167)
    parser.add_argument("--permutation", type=int, default=100_000_000)
    parser.add_argument("--epochs", type=int, default=10_000)
    parser.add_argument("--rounds", type=at_least_one, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        large, small = Path(folder) / "large.bin", Path(folder) / "small.bin"
        make(large, options.samples)
        first = [run(FIRST, large) for _ in range(options.rounds)]
        permuted = [run(PERMUTATION, options.permutation) for _ in range(options.rounds)]
        memload.build(Noise(64, 32), small, size=32)
        loader = memload.Loader(small, 16, shuffle=True, num_threads=2, device="cpu")
        states = {}
        for epoch in range(options.epochs + 1):
            if epoch in (100, options.epochs // 2, options.epochs):
                states[f"after {epoch} epochs"] = state()
            for _batch in loader:
                pass
        for _ in range(1000):
            next(iter(loader))
        states["after 1000 early exits"] = state()
    results = {
        "first batch (s)": spread(first),
        "permutation (s)": spread([seconds for seconds, _ in permuted]),
        "permutation (GB)": spread([size for _, size in permuted]),
        "epochs": states,
    }
    parameters = vars(options) | {"batch": 256, "index": "warm", "pixels": "sparse"}
    record("starting", options, numbers_of(parser), parameters, results)


if __name__ == "__main__":
    run_main(main)
