"""Random samples of a file none of whose pages are in RAM.

Few of many samples are taken, so that hardly any page is met twice, as with a file that is larger
than RAM. Before each way, the pages of the file are dropped from the page cache; the number of major
faults shows whether they were. Ways, in images a second: the Loader, which asks the disk for a batch
before it waits for its first page, with one thread and with four; `np.take` from the memory map,
which waits for one page after another; and as the limit, the file read from start to end.

The file is written in the folder `--data`, to choose the disk.
"""

import os
import resource
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from data import noise_dataset
from harness import Way, count_images, run_benchmark

import memload


def drop_from_page_cache(path: Path) -> None:
    """Remove the pages of a file that no process maps from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def ways(options: Any, folder: Path) -> dict[str, Way]:
    """Return the ways of reading, each of which begins without a page in RAM."""
    path = noise_dataset(folder, options.images, options.side)
    order = np.random.default_rng(0)

    def load(threads: int, chosen: list[int]) -> int:
        settings: Any = {"sampler": chosen, "num_threads": threads, "device": "cpu"}
        return count_images(memload.Loader(path, options.batch, **settings))

    def take(chosen: list[int]) -> int:
        pixels = np.load(path, mmap_mode="r")
        for start in range(0, len(chosen), options.batch):
            np.take(pixels, chosen[start : start + options.batch], axis=0)
        return len(chosen)

    def read(_: list[int]) -> int:
        with path.open("rb", buffering=0) as file:
            while file.read(8 << 20):
                pass
        return options.images

    def cold(run: Callable[[list[int]], int]) -> Way:
        def way() -> dict[str, float]:
            chosen = order.integers(0, options.images, options.part).tolist()
            drop_from_page_cache(path)
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
            start = time.perf_counter()
            images = run(chosen)
            seconds = time.perf_counter() - start
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt - faults
            return {"images/s": images / seconds, "major faults": faults}

        return way

    return {
        "Loader, 1 thread": cold(partial(load, 1)),
        "Loader, 4 threads": cold(partial(load, 4)),
        "np.take": cold(take),
        "read from start to end": cold(read),
    }


if __name__ == "__main__":
    run_benchmark(
        ways,
        options={"images": 20_000, "part": 2000, "side": 224, "batch": 256, "rounds": 5},
        quick={"images": 10_000, "part": 1000},
        ratios={
            f"Loader / np.take, {threads}": (f"Loader, {threads} › images/s", "np.take › images/s")
            for threads in ("1 thread", "4 threads")
        },
        facts={"pages": "cold"},
    )
