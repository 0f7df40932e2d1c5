"""What it costs to open 1.28 million samples, to take the names of a subset, and to print a help.

The data set has the size of ImageNet's training set; its pixels are a sparse file. Each measurement
is a process of its own, in which torch and NumPy are imported before the clock starts; the index is
warm. Memory:

- `private` is what the process has of its own (`Private_*` in /proc/self/smaps_rollup) more than
  before, right after opening; and in each of two forked workers, after both have read all labels;
- `peak` is what all allocations of Python and NumPy come to while all samples are taken as a
  subset, in random order, with their names and labels (tracemalloc); and that as a multiple of the
  bytes of the names.
"""

import json
import time
from pathlib import Path
from typing import Any

from data import empty_dataset
from harness import Way, run_benchmark, run_python

from memload.storage.index import Index

OPEN = """
import json, os, sys, time
import torch, memload
memload.MemmapDataset, memload.Loader

def private():
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1000

before = private()
start = time.perf_counter()
dataset = memload.MemmapDataset(sys.argv[1])
milliseconds = 1000 * (time.perf_counter() - start)
opened = private() - before
workers = []
for _ in range(2):
    done, mine = os.pipe()
    go_on, theirs = os.pipe()
    if not os.fork():
        start = private()
        int(dataset.labels.sum()), dataset[len(dataset) // 2]
        os.write(mine, b"read")
        os.read(go_on, 1)
        os.write(mine, json.dumps(private() - start).encode())
        os.read(go_on, 1)
        os._exit(0)
    workers.append((done, theirs))
for done, _ in workers:
    os.read(done, 100)
worker = []
for done, theirs in workers:
    os.write(theirs, b".")
    worker.append(float(os.read(done, 100)))
for _, theirs in workers:
    os.write(theirs, b".")
print(json.dumps({"time (ms)": milliseconds, "private (MB)": opened,
                  "private of each of two workers (MB)": max(worker)}))
"""

SUBSET = """
import json, sys, time, tracemalloc
import numpy as np, torch, memload
dataset = memload.MemmapDataset(sys.argv[1])
chosen = np.random.default_rng(0).permutation(len(dataset))
dataset.keys[0]
start = time.perf_counter()
dataset.subset(chosen).keys[0]
milliseconds = 1000 * (time.perf_counter() - start)
tracemalloc.start()
subset = dataset.subset(chosen)
subset.keys[0], len(subset.labels)
peak = tracemalloc.get_traced_memory()[1]
print(json.dumps({"time (ms)": milliseconds, "peak (MB)": peak / 1e6,
                  "peak (bytes a byte of the names)": peak / int(sys.argv[2])}))
"""


def ways(options: Any, folder: Path) -> dict[str, Way]:
    """Return what is measured, each in a process of its own."""
    path = empty_dataset(folder, options.samples)
    bytes_of_names = Index.open(path).keys.pack()[1].nbytes

    def ask_for_help() -> float:
        start = time.perf_counter()
        run_python("-m", "memload", "build", "--help")
        return 1000 * (time.perf_counter() - start)

    return {
        "memload build --help (ms)": ask_for_help,
        "open": lambda: json.loads(run_python("-c", OPEN, path)),
        "subset of all": lambda: json.loads(run_python("-c", SUBSET, path, bytes_of_names)),
    }


if __name__ == "__main__":
    run_benchmark(
        ways,
        options={"samples": 1_281_167, "rounds": 9},
        quick={"rounds": 5},
        facts={"index": "warm"},
    )
