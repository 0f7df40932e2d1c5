"""Rows of files that are not in RAM, beside what the disk gives at most.

    python -m benchmarks.cold --data /a/folder/on/the/disk

It measures a GPU where there is one, else the CPU. The file of ``--images`` is written in the folder
``--data``, to choose the disk. Rows come in a random order, a new one each time. The clock starts
with the loop, and stops when all images are in hand, the device waited for.

Before each way the pages of its own file, and no others, are dropped from the page cache; that they
are gone is checked with mincore(). "a file larger than RAM" is simulated: `cache_bytes` lets the
Loader hold none or half of the rows, which are in RAM when the clock starts, and it reads the others
past the page cache.

Limits are one read of the file from start to end, and bare O_DIRECT reads of ``--rows`` random rows
by 64 threads. Cores are CPU time over the time.
"""

import ctypes
import gc
import itertools
import math
import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import memload
from benchmarks.data import noise_dataset
from benchmarks.harness import Benchmark, Way, count_images, run, timed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: The offset of the first row in a file, and what O_DIRECT wants offsets and memory to be multiples of.
HEADER_BYTES = ALIGNMENT = 4096
#: Reads that have memory of their own, as in four batches of 256.
SLOTS = 1024
#: The tables, and their limits.
FITS, LARGER = "whole first epochs of a cold file that fits", "a file larger than RAM"
SEQUENTIAL, THREADS = "read from start to end", 64
DIRECT = f"bare O_DIRECT, {THREADS} threads"
_libc = ctypes.CDLL(None, use_errno=True)
_seeds = itertools.count()


# A file and its disk


def drop_from_page_cache(path: Path) -> None:
    """Remove a file, and no other, from the page cache. Raises RuntimeError if some of it stays."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if (left := share_in_ram(path)) > 0.001:
        raise RuntimeError(
            f"{left:.1%} of {path.name} stays in RAM, so it cannot be read cold. Put --data on a "
            "disk, and let no other process map the file."
        )


def share_in_ram(path: Path) -> float:
    """Return the share of a file's pages that are in the page cache, as mincore() says."""
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    start = np.frombuffer(mapped, np.uint8).ctypes.data
    pages = np.empty(math.ceil(len(mapped) / mmap.PAGESIZE), np.uint8)
    arguments = ctypes.c_void_p(start), ctypes.c_size_t(len(mapped))
    if _libc.mincore(*arguments, ctypes.c_void_p(pages.ctypes.data)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path.name)
    return float((pages & 1).mean())


@cache
def memory_for_reads(slot_bytes: int) -> memoryview:
    """Return memory for `SLOTS` reads, used again and again as a reader of batches does.

    On one virtual disk, reads into such memory were 1.3 times as fast as into 16 small buffers that
    were new each time: it is made of large pages.
    """
    memory = mmap.mmap(-1, SLOTS * slot_bytes)  # of mmap, as it has to begin at a page
    np.frombuffer(memory, np.uint8)[:] = 1  # so that no read has to find pages for it
    return memoryview(memory)


def read_directly(path: Path, rows: np.ndarray, row_bytes: int) -> int:
    """Read rows past the page cache with many threads; return how many.

    Each read begins and ends at multiples of `ALIGNMENT`. What is read is kept nowhere. Raises
    OSError on file systems without O_DIRECT.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    offsets = HEADER_BYTES + rows.astype(np.int64) * row_bytes
    starts = offsets // ALIGNMENT * ALIGNMENT
    sizes = -(-(offsets + row_bytes) // ALIGNMENT) * ALIGNMENT - starts
    slot_bytes = (row_bytes // ALIGNMENT + 2) * ALIGNMENT
    memory, targets = memory_for_reads(slot_bytes), np.arange(len(rows)) % SLOTS * slot_bytes

    def read(part: np.ndarray) -> None:
        for start, size, target in part.tolist():
            os.preadv(descriptor, [memory[target : target + size]], start)

    try:
        # parts of many rows, and enough of them that all threads end at about the same time
        reads = np.stack([starts, sizes, targets], 1)
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(read, np.array_split(reads, min(len(rows), 8 * THREADS))))
    finally:
        os.close(descriptor)
    return len(rows)


def read_sequentially(path: Path, images: int) -> int:
    """Read a file through the page cache, 8 MiB at a time; return how many images it has."""
    memory = bytearray(8 << 20)
    with path.open("rb", buffering=0) as file:
        while file.readinto(memory):
            pass
    return images


# Ways


def cold(path: Path, take: Way) -> Way:
    """Return a way that begins without a page of its file in RAM."""

    def way() -> Any:
        gc.collect()  # Loaders of the way before, which may hold pages
        drop_from_page_cache(path)
        return take()

    return way


def first_rows(loader: memload.Loader, count: int) -> int:
    """Take batches until there are so many images; return how many there are."""
    taken, batches = 0, iter(loader)
    while taken < count:
        taken += len(next(batches)[0])
    return taken


def holding(loader: memload.Loader, share: float, count: int) -> dict[str, float]:
    """Measure batches once a share of the rows is held, and no more. Raises RuntimeError."""
    end = time.perf_counter() + 300
    while abs(loader.feed.counts.rows_held / loader.feed.counts.rows - share) > 0.02:
        time.sleep(0.1)
        if time.perf_counter() > end:
            raise RuntimeError(f"{share:.0%} of the rows should be held. {loader.feed}.")
    before = loader.feed.counts
    found = timed(lambda: first_rows(loader, count))
    after = loader.feed.counts
    return found | {"in RAM": (after.hits - before.hits) / (after.served - before.served)}


def ways(options: Any, folder: Path) -> dict[str, Way]:
    """Return the limits and the Loaders of both tables."""
    images, row_bytes = options.images, 3 * options.side**2
    path, count = noise_dataset(folder, images, options.side), min(options.rows, images)

    def loader(**given: Any) -> memload.Loader:
        given |= {"shuffle": True, "seed": next(_seeds), "device": DEVICE}
        return memload.Loader(path, options.batch, **given)

    def bare() -> dict[str, float]:
        rows = np.random.default_rng().permutation(images)[:count]
        return timed(lambda: read_directly(path, rows, row_bytes))

    def epochs(feed: Any) -> dict[str, float]:
        opened = []

        def first() -> int:  # opens the Loader, as "resident" reads the file there
            opened.append(loader(feed=feed))
            return count_images(opened[0])

        found = timed(first)
        second = timed(lambda: count_images(opened[0]))
        return found | {"second epoch, images/s": second["images/s"]}

    def held(share: float) -> dict[str, float]:
        size = int(share * images * row_bytes)
        return holding(loader(feed="disk", cache_bytes=size), share, count)

    feeds = ("dma", "pinned", "resident") if DEVICE == "cuda" else ("cpu",)
    found: dict[str, Way] = {
        f"{FITS} › {SEQUENTIAL}": lambda: timed(lambda: read_sequentially(path, images)),
        **{f"{FITS} › {feed}": partial(epochs, feed) for feed in feeds},
        f"{LARGER} › {DIRECT}": bare,
    }
    if DEVICE == "cuda":
        found[f"{LARGER} › disk, nothing held"] = partial(held, 0.0)
        found[f"{LARGER} › disk, half held"] = partial(held, 0.5)
    return {name: cold(path, way) for name, way in found.items()}


LIMITED = [(FITS, name, SEQUENTIAL) for name in ("cpu", "dma", "pinned", "resident")]
LIMITED += [(LARGER, f"disk, {held} held", DIRECT) for held in ("nothing", "half")]
BENCHMARKS = {
    "cold": Benchmark(
        ways,
        {"images": 20_000, "rows": 8192, "side": 224, "batch": 256, "rounds": 5},
        quick={"images": 4000, "rounds": 3},
        ratios={
            f"{table} › {name} › of the limit": (
                f"{table} › {name} › images/s",
                f"{table} › {limit} › images/s",
            )
            for table, name, limit in LIMITED
        },
        facts={"device": DEVICE, "pages": "cold"},
    )
}

if __name__ == "__main__":
    run(BENCHMARKS)
