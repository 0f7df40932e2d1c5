"""Loading alone, beside the bare operations that limit it: images a second of whole epochs.

    python -m benchmarks.loading feeds
    python -m benchmarks.loading collate
    python -m benchmarks.loading shards
    torchrun --nproc-per-node 4 -m benchmarks.loading several_gpus

Noise in random order, pages warm, with the loop included. The device is waited for at the end.

- feeds: the Loader on the GPU, or on the CPU where there is none, with images of 224×224×3 in batches
  of 256, the same with masks, and 32×32×3 in batches of 2,048. Limits: one copy from page-locked
  memory of the bytes of a batch; `torch.index_select` of a batch on the device; and as many bare
  threads as the Loader has, which take rows into buffers of their own, and send them to the GPU. All
  rows are held in RAM here; `cold.py` has others. In one table with the limit stands what else feeds
  a device: torch's DataLoader that decodes JPEGs (those below `--jpegs`, or made ones of ImageNet's
  sizes; Pillow, resized and cropped to 224), and one over `MemmapDataset`, with as many workers as
  there are cores. An epoch of these is `--batches` batches a worker, and the clock starts behind the
  first one of each. `--quick` leaves this table and the masks out.
- collate: torch's DataLoader without workers, with `fast_collate` and with torch's default.
- shards: `MemmapDataset.gather` of 256 random rows out of 256 shards, beside the same out of one.
- several_gpus: a process for each GPU, each with its part of a shuffled epoch, from one page cache.
  All begin together, and the time is that of the slowest.
"""

import atexit
import collections
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import memload
from benchmarks.data import noise_dataset
from benchmarks.harness import (
    CORES,
    Way,
    count_images,
    move,
    need_cuda,
    rate,
    rate_behind,
    run_one_of,
    settle,
    wait_for_device,
)
from benchmarks.pictures import Numbered, find_jpegs, planes

IS_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if IS_CUDA else torch.device("cpu")
#: The table of what else there is; docs/speed.svg is drawn from it.
OTHERS = "what else there is, behind the first batch of each worker, 224×224×3, batch 256"
LARGE, SMALL = "224×224×3, batch 256", "32×32×3, batch 2,048"
MASKS = "224×224×3 with masks, batch 256"
THREADS = (1, 12) if IS_CUDA else (1, 2, CORES)
BARE = {f"bare, {count} thread{'s' * (count > 1)}": count for count in THREADS}
#: What limits each feed.
LIMITS = {"dma": "copy", "resident": "index_select"} if IS_CUDA else {}
LIMITS |= {name.replace("bare", "pinned" if IS_CUDA else "cpu"): name for name in BARE}


# Limits


def copies(arrays: list[np.ndarray], batch: int) -> Way:
    """Return copies of batches from page-locked memory, from two buffers in turn."""
    shapes = [(batch, *rows.shape[1:]) for rows in arrays]
    pinned = [[torch.empty(s, dtype=torch.uint8, pin_memory=True) for s in shapes] for _ in "ab"]
    out = [[torch.empty_like(buffer, device=DEVICE) for buffer in some] for some in pinned]
    stream = torch.cuda.Stream()

    def copy() -> int:
        with torch.cuda.stream(stream):
            for number in range(100):
                for target, buffer in zip(out[number % 2], pinned[number % 2], strict=True):
                    target.copy_(buffer, non_blocking=True)
        return 100 * batch

    return rate(copy)


def selections(arrays: list[np.ndarray], batch: int) -> Way:
    """Return what gathers batches of rows that are on the device already."""
    count = len(arrays[0]) // batch * batch
    resident = [torch.from_numpy(rows[:]).to(DEVICE).view(len(rows), -1) for rows in arrays]
    random = np.random.default_rng(1)

    def select() -> int:
        chosen = torch.from_numpy(random.permutation(len(arrays[0]))[:count]).to(DEVICE)
        for part in chosen.split(batch):
            for rows in resident:
                torch.index_select(rows, 0, part)
        return count

    return rate(select)


def bare_threads(arrays: list[np.ndarray], batch: int, count: int) -> Way:
    """Return threads that take random rows, each into its own buffers, and send them to a GPU."""
    shapes, random = [(batch, *rows.shape[1:]) for rows in arrays], np.random.default_rng(1)
    buffers = [
        [torch.empty(s, dtype=torch.uint8, pin_memory=IS_CUDA) for s in shapes]
        for _ in range(count)
    ]
    targets = [[torch.empty_like(buffer, device=DEVICE) for buffer in some] for some in buffers]
    streams = [torch.cuda.Stream() for _ in range(count)] if IS_CUDA else []
    batches: collections.deque[np.ndarray] = collections.deque()

    def work(number: int) -> None:
        while True:
            try:
                chosen = batches.pop()
            except IndexError:
                return
            for rows, buffer in zip(arrays, buffers[number], strict=True):
                np.take(rows, chosen, axis=0, out=buffer.numpy(), mode="clip")
            if streams:
                with torch.cuda.stream(streams[number]):
                    for target, buffer in zip(targets[number], buffers[number], strict=True):
                        target.copy_(buffer, non_blocking=True)
                streams[number].synchronize()

    def run() -> int:
        parts = len(arrays[0]) // batch
        batches.extend(np.split(random.permutation(len(arrays[0]))[: parts * batch], parts))
        threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return parts * batch

    return rate(run)


# Feeds


def open_loader(
    source: Any, batch: int, feed: Any, threads: int | None = None, **options: Any
) -> memload.Loader:
    """Return a Loader in random order, which has settled where pages are registered."""
    options |= {"device": DEVICE, "feed": feed, "num_threads": threads}
    loader = memload.Loader(source, batch, shuffle=True, **options)
    return settle(loader) if feed == "dma" else loader


def beside_limits(path: Path, batch: int, *others: Path) -> dict[str, Way]:
    """Return the limits, and an epoch of the Loader with each feed."""
    arrays = [np.load(file, mmap_mode="c") for file in (path, *others)]
    found = {name: bare_threads(arrays, batch, count) for name, count in BARE.items()}
    if IS_CUDA:
        found |= {"copy": copies(arrays, batch), "index_select": selections(arrays, batch)}
    columns = ["label", "mask"] if others else ["label"]
    for name, limit in LIMITS.items():
        feed = name.partition(",")[0]
        loader = open_loader(path, batch, feed, BARE.get(limit), columns=columns)
        found[name] = rate(lambda loader=loader: loader)
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
    plain, pictures = data_loader(dataset), data_loader(jpegs)
    stock = data_loader(dataset, collate_fn=memload.fast_collate)

    @cache  # made in the first round, when all workers are forked: threads do not survive
    def loader(feed: str, threads: int | None = None) -> memload.Loader:
        return open_loader(dataset, batch, feed, threads)

    with_workers: dict[str, Callable[[], Iterable[Any]]] = {
        "JPEGs in a DataLoader": lambda: move(pictures, DEVICE),
        "DataLoader over MemmapDataset, default collate": lambda: move(plain, DEVICE),
        "DataLoader over MemmapDataset, fast_collate": lambda: move(stock, DEVICE),
        "the same in CudaPrefetcher": lambda: memload.CudaPrefetcher(stock, device=DEVICE),
    }
    found = {name: rate_behind(batches, CORES) for name, batches in with_workers.items()}
    if not IS_CUDA:
        return found | {"Loader, cpu": rate_behind(lambda: loader("cpu"), 0)}
    feeds = {"pinned, 12 threads": ("pinned", 12), "dma": ("dma",), "resident": ("resident",)}
    for name, arguments in feeds.items():
        found[f"Loader, {name}"] = rate_behind(lambda arguments=arguments: loader(*arguments), 0)
    return found | {"one copy": copies([np.load(path, mmap_mode="r")], batch)}


def first_batch(path: Path) -> float:
    """Return the milliseconds from opening a Loader to its first batch."""
    start = time.perf_counter()
    loader = memload.Loader(
        path, 256, shuffle=True, device=DEVICE, feed="dma" if IS_CUDA else "cpu"
    )
    next(iter(loader))
    wait_for_device()
    return 1000 * (time.perf_counter() - start)


def feeds(options: Any, folder: Path) -> dict[str, Way]:
    """Return the feeds of the Loader, their limits, and what else there is."""
    if not options.quick:
        options.images = max(options.images, options.batches * CORES * 256)
    large, small = (
        noise_dataset(folder, options.images, 224),
        noise_dataset(folder, options.small, 32),
    )
    found: dict[str, Way] = {}

    def add(table: str, ways: dict[str, Way]) -> None:
        found.update({f"{table} › {name}": way for name, way in ways.items()})

    if not options.quick:  # first, as workers are forked
        add(
            OTHERS,
            what_else(large, find_jpegs(options.jpegs, folder / "jpegs", 64), options.batches),
        )
    add(LARGE, beside_limits(large, 256))
    add(SMALL, beside_limits(small, 2048))
    if not options.quick:
        masked = noise_dataset(folder, options.images // 2, 224, masks=True)
        add(MASKS, beside_limits(masked, 256, masked.with_suffix(".mask.bin")))
    return found | {"first batch of a new Loader (ms)": lambda: first_batch(large)}


# On the CPU


def collate(options: Any, folder: Path) -> dict[str, Way]:
    """Return an epoch with each collate function."""
    dataset = memload.MemmapDataset(noise_dataset(folder, options.images, options.side))
    default = DataLoader(dataset, options.batch, shuffle=True)
    fast = DataLoader(dataset, options.batch, shuffle=True, collate_fn=memload.fast_collate)
    return {"default_collate": rate(lambda: default), "fast_collate": rate(lambda: fast)}


def shards(options: Any, folder: Path) -> dict[str, Way]:
    """Return what gathers random rows of each size, from one shard and from 256."""
    found: dict[str, Way] = {}
    for side in (64, 224):
        count = max(256, options.megabytes * 1_000_000 // (side * side * 3))
        out = torch.empty((256, side, side, 3), dtype=torch.uint8)
        for name, number in (("1 shard", 1), ("256 shards", 256)):
            dataset = memload.MemmapDataset(noise_dataset(folder, count, side, shards=number))
            random = np.random.default_rng(0)

            def gather(dataset: Any = dataset, out: Any = out, random: Any = random) -> int:
                dataset.gather(random.integers(0, len(dataset), 256), out=out)
                return 256

            found[f"{side}×{side} › {name}"] = rate(gather)
    return found


# Several GPUs


def several_gpus(options: Any, folder: Path) -> dict[str, Way]:
    """Return an epoch of all ranks, and one of rank 0 alone."""
    need_cuda("Run it on a machine with GPUs.")
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


def shares() -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield the ratios of feeds and their limits."""
    for table, (name, limit) in itertools.product((LARGE, SMALL, MASKS), LIMITS.items()):
        yield f"{table} › {name} / {limit}", (f"{table} › {name}", f"{table} › {limit}")


if __name__ == "__main__":
    images, small = (40_000, 400_000) if IS_CUDA else (8_000, 80_000)
    of_shards = {
        f"{side}×{side} › ratio": tuple(
            f"{side}×{side} › {name}" for name in ("256 shards", "1 shard")
        )
        for side in (64, 224)
    }
    run_one_of({
        "feeds": {
            "ways": feeds,
            "options": {"images": images, "small": small, "rounds": 5, "batches": 4, "jpegs": None},
            "quick": {"images": images // 2, "small": small // 2},
            "ratios": dict(shares()),
            "facts": {"pages": "warm", "workers": CORES},
        },
        "collate": {
            "ways": collate,
            "options": {"images": 8192, "side": 224, "batch": 256, "rounds": 5},
            "quick": {"images": 4096},
            "ratios": {"ratio": ("fast_collate", "default_collate")},
            "facts": {"pages": "warm", "torch_threads": torch.get_num_threads()},
        },
        "shards": {
            "ways": shards,
            "options": {"megabytes": 600, "rounds": 9},
            "quick": {"megabytes": 300},
            "ratios": of_shards,
            "facts": {"pages": "warm"},
        },
        "several_gpus": {
            "ways": several_gpus,
            "options": {"images": 40_000, "rounds": 5},
            "facts": {"ranks": int(os.environ.get("WORLD_SIZE", "1")), "batch": 256, "pages": "warm"},
        },
    })  # fmt: skip
