"""Loading alone, beside the bare operations that limit it: images a second of whole epochs.

    python -m benchmarks.loading feeds
    torchrun --nproc-per-node 4 -m benchmarks.loading several_gpus

Noise in random order, pages warm, with the loop included. The device is waited for at the end.

- feeds: the Loader on the GPU, or on the CPU where there is none, with images of 224×224×3 in batches
  of 256, and of 32×32×3 in batches of 2,048. Limits: one copy from page-locked memory of the bytes of
  a batch, and `torch.index_select` of a batch on the device. All rows are held in RAM here; `cold.py`
  has others. In one table with the copy stands what else feeds a device: torch's DataLoader that
  decodes JPEGs (those below `--jpegs`, or made ones of ImageNet's sizes; Pillow, resized and cropped
  to 224), and one over `MemmapDataset`, with as many workers as there are cores. An epoch of these is
  `--batches` batches a worker, and the clock starts behind the first one of each. `--quick` leaves
  this table out.
- several_gpus: a process for each GPU, each with its part of a shuffled epoch, from one page cache.
  All begin together, and the time is that of the slowest.
"""

import atexit
import itertools
import os
import sys
import time
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import memload
from benchmarks.data import Numbered, find_jpegs, noise_dataset, planes
from benchmarks.harness import (
    CORES,
    Benchmark,
    Way,
    count_images,
    move,
    rate,
    rate_behind,
    run,
    settle,
    wait_for_device,
)

IS_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if IS_CUDA else torch.device("cpu")
#: The table of what else there is; docs/speed.svg is drawn from it.
OTHERS = "what else there is, behind the first batch of each worker, 224×224×3, batch 256"
LARGE, SMALL = "224×224×3, batch 256", "32×32×3, batch 2,048"


def copies(pixels: np.ndarray, batch: int) -> Way:
    """Return copies of batches from page-locked memory, from two buffers in turn."""
    shape = (batch, *pixels.shape[1:])
    pinned = [torch.empty(shape, dtype=torch.uint8, pin_memory=True) for _ in "ab"]
    out = [torch.empty_like(buffer, device=DEVICE) for buffer in pinned]
    stream = torch.cuda.Stream()

    def copy() -> int:
        with torch.cuda.stream(stream):
            for number in range(100):
                out[number % 2].copy_(pinned[number % 2], non_blocking=True)
        return 100 * batch

    return rate(copy)


def selections(pixels: np.ndarray, batch: int) -> Way:
    """Return what gathers batches of rows that are on the device already."""
    resident = torch.from_numpy(pixels[:]).to(DEVICE).view(len(pixels), -1)
    count = len(pixels) // batch * batch

    def select() -> int:
        for chosen in torch.randperm(len(pixels), device=DEVICE)[:count].split(batch):
            torch.index_select(resident, 0, chosen)
        return count

    return rate(select)


# Feeds


def open_loader(source: Any, batch: int, feed: Any, threads: int | None = None) -> memload.Loader:
    """Return a Loader in random order, which has settled where pages are registered."""
    options: dict[str, Any] = {"device": DEVICE, "feed": feed, "num_threads": threads}
    loader = memload.Loader(source, batch, shuffle=True, **options)
    return settle(loader) if feed == "dma" else loader


def epochs(loader: memload.Loader) -> Way:
    """Return a whole epoch, or more."""
    return rate(partial(count_images, loader))


def beside_limits(path: Path, batch: int) -> dict[str, Way]:
    """Return an epoch of the Loader with each feed, and the limits."""
    if not IS_CUDA:
        return {
            f"cpu, {threads} threads": epochs(open_loader(path, batch, "cpu", threads))
            for threads in (1, 2, CORES)
        }
    pixels = np.load(path, mmap_mode="c")
    found = {"copy": copies(pixels, batch), "index_select": selections(pixels, batch)}
    for feed in ("dma", "resident", "pinned"):
        found[feed] = epochs(open_loader(path, batch, feed))
    return found


def what_else(path: Path, files: list[Path], batches_a_worker: int) -> dict[str, Way]:
    """Return what else feeds a device, beside Loaders."""
    batch = 256
    dataset = memload.MemmapDataset(path)
    count = min(len(dataset), batches_a_worker * CORES * batch)
    dataset = dataset.subset(range(count))
    jpegs = Numbered([*itertools.islice(itertools.cycle(files), count)], partial(planes, side=224))
    settings: dict[str, Any] = {"shuffle": True, "num_workers": CORES, "pin_memory": IS_CUDA}
    data_loader = partial(DataLoader, batch_size=batch, persistent_workers=True, **settings)
    pictures, mapped = data_loader(jpegs), data_loader(dataset, collate_fn=memload.fast_collate)

    @cache  # made in the first round, when all workers are forked: threads do not survive
    def loader(feed: str, threads: int | None = None) -> memload.Loader:
        return open_loader(dataset, batch, feed, threads)

    found = {
        "JPEGs in a DataLoader": rate_behind(lambda: move(pictures, DEVICE), CORES),
        "DataLoader over MemmapDataset, fast_collate": rate_behind(
            lambda: move(mapped, DEVICE), CORES
        ),
    }
    if not IS_CUDA:
        return found | {"Loader, cpu": rate_behind(lambda: loader("cpu"), 0)}
    found["Loader, pinned, 12 threads"] = rate_behind(lambda: loader("pinned", 12), 0)
    found["Loader, dma"] = rate_behind(lambda: loader("dma"), 0)
    return found | {"one copy": copies(np.load(path, mmap_mode="r"), batch)}


def feeds(options: Any, folder: Path) -> dict[str, Way]:
    """Return the feeds of the Loader, their limits, and what else there is."""
    tables: dict[str, dict[str, Way]] = {}
    if not options.quick:  # first, as workers are forked
        jpegs = find_jpegs(options.jpegs, folder / "jpegs", 64)
        large = noise_dataset(folder, max(options.images, options.batches * CORES * 256), 224)
        tables[OTHERS] = what_else(large, jpegs, options.batches)
    large = noise_dataset(folder, options.images, 224)
    small = noise_dataset(folder, options.small, 32)
    tables |= {LARGE: beside_limits(large, 256), SMALL: beside_limits(small, 2048)}
    return {f"{table} › {name}": way for table in tables for name, way in tables[table].items()}


# Several GPUs


def several_gpus(options: Any, folder: Path) -> dict[str, Way]:
    """Return an epoch of all ranks, and one of rank 0 alone."""
    if not IS_CUDA:
        sys.exit("There is no CUDA device. Run it on a machine with GPUs.")
    dist.init_process_group("gloo")
    atexit.register(dist.destroy_process_group)
    rank = dist.get_rank()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    path = [noise_dataset(folder, options.images, 224) if rank == 0 else None]
    dist.broadcast_object_list(path)
    loader = settle(memload.Loader(path[0], 256, shuffle=True, drop_last=True, feed="dma"))
    dist.barrier()

    def epoch(takes_part: bool) -> float:
        wait_for_device()
        dist.barrier()
        start = time.perf_counter()
        images = count_images(loader) if takes_part else 0
        wait_for_device()
        own = torch.tensor([time.perf_counter() - start, images], dtype=torch.float64)
        every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(every, own)
        seconds, counts = torch.stack(every).T
        return float(counts.sum() / seconds.max())

    return {"together": lambda: epoch(True), "rank 0 alone": lambda: epoch(rank == 0)}


IMAGES, IMAGES_32 = (20_000, 200_000) if IS_CUDA else (8_000, 80_000)
BENCHMARKS = {
    "feeds": Benchmark(
        feeds,
        {"images": IMAGES, "small": IMAGES_32, "rounds": 5, "batches": 4, "jpegs": None},
        quick={"images": IMAGES // 4, "small": IMAGES_32 // 4},
        ratios={
            f"{table} › {feed} / {limit}": (f"{table} › {feed}", f"{table} › {limit}")
            for table in (LARGE, SMALL)
            for feed, limit in (("dma", "copy"), ("pinned", "copy"), ("resident", "index_select"))
        },
        facts={"pages": "warm", "workers": CORES},
    ),
    "several_gpus": Benchmark(
        several_gpus,
        {"images": 20_000, "rounds": 5},
        facts={"ranks": int(os.environ.get("WORLD_SIZE", "1")), "batch": 256, "pages": "warm"},
    ),
}

if __name__ == "__main__":
    run(BENCHMARKS)
