"""What it costs to start: ``memload build --help``, and opening a data set of 1.28 million samples.

    python benchmarks/opening.py [--samples 1281167] [--rounds 9] [--dry-run]

The data set has the size of ImageNet's training set, its pixels are a sparse file. Each opening is a process of
its own; torch and NumPy are imported before the clock starts. Private memory is what a process has more than
before (`Private_*` in /proc/self/smaps_rollup): right after opening, alone; and once two processes at a time have
opened it and read every row number and label, as workers do.
"""

import json
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path

import numpy as np
from record import arguments, at_least_one, numbers_of, record, run_main, spread

from memload.storage.format import HEADER_BYTES, npy_header, seal_of
from memload.storage.index import Array, Index, Shard
from memload.storage.keys import Keys

OPEN = """
import json, sys, time
import torch, memload, memload.reading.dataset
def private():
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))
before = private()
start = time.perf_counter()
dataset = memload.MemmapDataset(sys.argv[1])
seconds = time.perf_counter() - start
opened = private() - before
int(dataset.labels.sum()), int(dataset.index.row.sum()), dataset[len(dataset) // 2]
print("read", flush=True)
input()
print(json.dumps([1e3 * seconds, opened / 1e6, (private() - before) / 1e6]), flush=True)
input()
"""


def opening(path: Path, processes: int) -> list[list[float]]:
    """Open in several processes at once; return milliseconds, MB when opened and MB when all was read, of each."""
    command = [sys.executable, "-c", OPEN, str(path)]
    running = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(processes)
    ]
    for process in running:
        process.stdout.readline()
    results = []
    for process in running:  # all of them have read all of it by now
        print(file=process.stdin, flush=True)
        results.append(json.loads(process.stdout.readline()))
    for process in running:
        process.communicate("\n")
    return results


def make(path: Path, samples: int, side: int = 256) -> None:
    """Write an index of so many samples over a shard that takes no room."""
    rng = np.random.default_rng(0)
    shape = (side, side, 3)
    size = HEADER_BYTES + samples * side * side * 3
    crc32 = np.full(samples, zlib.crc32(bytes(side * side * 3)), np.uint32)
    with path.open("wb") as file:
        file.write(npy_header("|u1", (samples, *shape), seal_of(crc32)))
        file.truncate(size)
    labels = np.sort(rng.integers(0, 1000, samples))
    Index(
        path=path.with_suffix(".idx"),
        arrays=(Array("image", "|u1", shape, (Shard(path.name, samples, size),)),),
        row=np.arange(samples),
        flags=np.zeros(samples, np.uint8),
        keys=Keys.of(
            [f"n{label:08d}/n{label:08d}_{i}.JPEG" for i, label in enumerate(labels.tolist())]
        ),
        columns={"label": labels},
        crc32={"image": crc32},
        classes=tuple(f"n{label:08d}" for label in range(1000)),
    ).write(path.with_suffix(".idx"))


def main() -> None:
    """Run the benchmark."""
    parser = arguments(__doc__)
    parser.add_argument("--samples", type=int, default=1_281_167)
    parser.add_argument("--rounds", type=at_least_one, default=9)
    options = parser.parse_args()
    helps, opens, opened, read = [], [], [], []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "out.bin"
        make(path, options.samples)
        for number in range(options.rounds + 1):
            start = time.perf_counter()
            subprocess.run(
                [sys.executable, "-m", "memload", "build", "--help"],
                check=True,
                capture_output=True,
            )
            help_seconds = time.perf_counter() - start
            milliseconds, alone, _ = opening(path, 1)[0]
            together = max(private for _, _, private in opening(path, 2))
            if number:
                helps.append(1e3 * help_seconds)
                opens.append(milliseconds)
                opened.append(alone)
                read.append(together)
    results = {
        "help_ms": spread(helps),
        "open_ms": spread(opens),
        "private_MB_opened": spread(opened),
        "private_MB_of_each_of_two_workers": spread(read),
    }
    record(
        "opening",
        options,
        numbers_of(parser),
        {"samples": options.samples, "index": "warm"},
        results,
    )


if __name__ == "__main__":
    run_main(main)
