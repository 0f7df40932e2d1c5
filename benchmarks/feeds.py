"""The Loader on CUDA, each feed beside the bare operation that limits it, all in one run.

Noise of 224×224×3 in batches of 256, and of 32×32×3 in batches of 2,048; random order, pages warm,
whole epochs with the loop included, the device waited for at the end, images a second. Limits: one
copy from page-locked memory of the bytes of a batch; `torch.index_select` of a batch on the device;
for `pinned`, one thread that gathers into two page-locked buffers in turn and copies them. All rows
are held in RAM here; `cold.py` has larger files.

"host time a step" is what the caller of a resident Loader spends in asking for a batch, the device
never waited for; the first step of an epoch is left out, and the slowest 2 % of the others.

Beside them, in one table with the same limit, what else feeds a device: a DataLoader that decodes
JPEGs (those below `--jpegs`, or 64 photograph-like ones of ImageNet's sizes, again and again;
Pillow, resized bilinearly and cropped to 224) and the stock DataLoader over `MemmapDataset` (with
torch's default collate and with `fast_collate`), both with page-locked memory and as many workers as
there are cores. An epoch of all these, and of the Loaders beside them, is `--batches` batches a worker. With workers the clock starts behind the first
batch of each, so that no start is in it. `--quick` leaves this table out.
"""

import itertools
import os
import time
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from data import noise_dataset
from harness import Way, count_images, move, need_cuda, rate, rate_behind, run_benchmark, settle
from pictures import Numbered, find_jpegs, planes
from torch.utils.data import DataLoader

import memload

DEVICE = torch.device("cuda", 0)
#: The table of what else there is; docs/speed.svg is drawn from it.
OTHERS = "what else there is, behind the first batch of each worker, 224×224×3, batch 256"
LARGE, SMALL = "224×224×3, batch 256", "32×32×3, batch 2,048"
#: The feeds, with the number of threads where it is not the Loader's own choice.
FEEDS = {"dma": None, "resident": None}
PINNED = {"pinned, 1 thread": 1, "pinned, 12 threads": 12}
LIMITS = {"resident": "index_select", "pinned, 1 thread": "gather and copy"}
LEAST_SECONDS = 0.25


def limits(path: Path, batch: int) -> dict[str, Way]:
    """Return the bare operations."""
    pixels = np.load(path, mmap_mode="r")
    shape, passes = (batch, *pixels.shape[1:]), min(400, max(50, len(pixels) // batch))
    pinned = [torch.empty(shape, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    out = [torch.empty(shape, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    events = [torch.cuda.Event(), torch.cuda.Event()]
    stream, random = torch.cuda.Stream(), np.random.default_rng(1)
    resident = torch.empty((len(pixels), pixels[0].size), dtype=torch.uint8, device=DEVICE)
    for start in range(0, len(pixels), batch):
        part = torch.from_numpy(np.array(pixels[start : start + batch]))
        resident[start : start + batch] = part.view(len(part), -1)

    def copy() -> int:
        with torch.cuda.stream(stream):
            for number in range(passes):
                out[number % 2].copy_(pinned[number % 2], non_blocking=True)
        return passes * batch

    def select() -> int:
        chosen = torch.from_numpy(random.permutation(len(pixels))).to(DEVICE)
        for part in chosen.split(batch)[: len(pixels) // batch]:
            torch.index_select(resident, 0, part, out=out[0].view(batch, -1))
        return len(pixels) // batch * batch

    def gather_and_copy() -> int:
        chosen = random.permutation(len(pixels))[: 40 * batch]
        with torch.cuda.stream(stream):
            for number in range(len(chosen) // batch):
                events[number % 2].synchronize()
                part = chosen[number * batch : (number + 1) * batch]
                np.take(pixels, part, axis=0, out=pinned[number % 2].numpy(), mode="clip")
                out[number % 2].copy_(pinned[number % 2], non_blocking=True)
                events[number % 2].record(stream)
        return len(chosen) // batch * batch

    wait = torch.cuda.synchronize
    runs = {"copy": copy, "index_select": select, "gather and copy": gather_and_copy}
    return {name: rate(run, wait, LEAST_SECONDS) for name, run in runs.items()}


def open_loader(source: Any, batch: int, feed: Any, threads: int | None = None) -> memload.Loader:
    """Return a Loader in random order."""
    options: dict[str, Any] = {"device": DEVICE, "feed": feed, "num_threads": threads}
    return memload.Loader(source, batch, shuffle=True, **options)


def feeding(path: Path, batch: int, feeds: dict[str, int | None]) -> dict[str, Way]:
    """Return the limits, and an epoch of each Loader."""
    dataset, found = memload.MemmapDataset(path), limits(path, batch)
    for name, threads in feeds.items():
        loader = open_loader(dataset, batch, name.partition(",")[0], threads)
        if name == "dma":
            settle(loader)
        found[name] = rate(lambda loader=loader: loader, torch.cuda.synchronize, LEAST_SECONDS)
    return found


def host_time(path: Path, batch: int) -> Way:
    """Return a way that measures microseconds of the caller in each step of a resident Loader."""
    loader = open_loader(path, batch, "resident")

    def way() -> float:
        times, batches = [], iter(loader)
        for _ in range(len(loader)):
            start = time.perf_counter()
            next(batches)
            times.append(1e6 * (time.perf_counter() - start))
            if len(times) % 8 == 0:
                torch.cuda.synchronize()  # so that the device is never what is waited for
        steps = sorted(times[1:])
        return float(np.mean(steps[: max(1, int(0.98 * len(steps)))]))

    return way


def host_memory(path: Path) -> dict[str, float]:
    """Return how much memory of its own this process has more for a dma Loader and two epochs."""

    def own() -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        kinds = ("RssAnon", "RssShmem")
        return sum(int(line.split()[1]) for line in lines if line.startswith(kinds)) / 1e3

    before, grown = own(), []
    loader = open_loader(path, 256, "dma")
    for _ in range(2):
        count_images(loader)
        grown.append(own() - before)
        settle(loader)
    return {"after the first epoch": grown[0], "after the second": grown[1]}


def starting(path: Path) -> Way:
    """Return a way that measures what a new Loader takes: its first batch, and loading it all."""

    def way() -> dict[str, float]:
        start = time.perf_counter()
        loader = open_loader(path, 256, "dma")
        next(iter(loader))
        torch.cuda.synchronize()
        first = time.perf_counter() - start
        del loader
        start = time.perf_counter()
        loader = open_loader(path, 256, "resident")
        next(iter(loader))
        torch.cuda.synchronize()
        loaded = path.stat().st_size / (time.perf_counter() - start) / 1e9
        del loader
        torch.cuda.empty_cache()
        return {"first batch with dma (s)": first, "loading resident (GB/s)": loaded}

    return way


def others(path: Path, files: list[Path], batches_a_worker: int) -> dict[str, Way]:
    """Return what else feeds a device, beside Loaders."""
    workers, batch = len(os.sched_getaffinity(0)), 256
    count = batches_a_worker * workers * batch
    dataset = memload.MemmapDataset(path).subset(range(count))
    jpegs = Numbered(
        list(itertools.islice(itertools.cycle(files), count)), partial(planes, side=224)
    )
    settings: dict[str, Any] = {"shuffle": True, "num_workers": workers, "pin_memory": True}
    data_loader = partial(DataLoader, batch_size=batch, persistent_workers=True, **settings)
    plain, pictures = data_loader(dataset), data_loader(jpegs)
    stock = data_loader(dataset, collate_fn=memload.fast_collate)

    @cache  # made in the first round, when all workers are forked: threads do not survive
    def loader(feed: str, threads: int | None = None) -> memload.Loader:
        return settle(open_loader(dataset, batch, feed, threads))

    with_workers: dict[str, Callable[[], Iterable[Any]]] = {
        "JPEGs in a DataLoader": lambda: move(pictures, DEVICE),
        "DataLoader over MemmapDataset, default collate": lambda: move(plain, DEVICE),
        "DataLoader over MemmapDataset, fast_collate": lambda: move(stock, DEVICE),
        "the same in CudaPrefetcher": lambda: memload.CudaPrefetcher(stock, device=DEVICE),
    }
    loaders: dict[str, Callable[[], Iterable[Any]]] = {
        "Loader, pinned, 12 threads": lambda: loader("pinned", 12),
        "Loader, dma": lambda: loader("dma"),
        "Loader, resident": lambda: loader("resident"),
    }
    found = {name: rate_behind(batches, workers) for name, batches in with_workers.items()}
    found |= {name: rate_behind(batches, 0) for name, batches in loaders.items()}
    return found | {"one copy": limits(path, batch)["copy"]}


def ways(options: Any, folder: Path) -> dict[str, Way]:
    """Return all that is measured."""
    need_cuda("Run it on a machine with a GPU.")
    workers = len(os.sched_getaffinity(0))
    if not options.quick and options.images < options.batches * workers * 256:
        options.images = options.batches * workers * 256
    large = noise_dataset(folder, options.images, 224)
    small = noise_dataset(folder, options.small, 32)
    torch.zeros(1, device=DEVICE)
    memory = host_memory(large)
    found: dict[str, Way] = {"host memory with dma (MB)": lambda: memory}

    def add(table: str, ways: dict[str, Way]) -> None:
        found.update({f"{table} › {name}": way for name, way in ways.items()})

    add(LARGE, feeding(large, 256, FEEDS | PINNED))
    add(SMALL, feeding(small, 2048, FEEDS | PINNED))
    for batch in (256, 2048):
        name = f"host time a step, resident, 32×32×3, batch {batch}, without the slowest 2 % (µs)"
        found[name] = host_time(small, batch)
    if not options.quick:
        files = find_jpegs(options.jpegs, folder / "jpegs", 64)
        add(OTHERS, others(large, files, options.batches))
    found[f"a new Loader of {large.stat().st_size / 1e9:.1f} GB"] = starting(large)
    return found


if __name__ == "__main__":
    run_benchmark(
        ways,
        options={"images": 40_000, "small": 400_000, "rounds": 5, "batches": 4, "jpegs": None},
        quick={"images": 20_000, "small": 200_000},
        ratios={
            f"{table} › {name} / {LIMITS.get(name, 'copy')}": (
                f"{table} › {name}",
                f"{table} › {LIMITS.get(name, 'copy')}",
            )
            for table in (LARGE, SMALL)
            for name in FEEDS | PINNED
        },
        facts={
            "batch": "256 of 224×224, 2,048 of 32×32",
            "pages": "warm",
            "workers": len(os.sched_getaffinity(0)),
        },
    )
