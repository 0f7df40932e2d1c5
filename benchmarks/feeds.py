"""The Loader on CUDA, each feed against the bare operation that limits it, all in one run.

    python benchmarks/feeds.py [--images 40000] [--small 400000] [--rounds 5] [--flocks 4] [--dry-run]

Noise of 224×224×3 in batches of 256, and of 32×32×3 in batches of 2,048; random order, pages warm, whole epochs with
the loop included, the device waited for at the end of each, images a second. A round is each way in turn; the first
is left out. Limits: one copy from page-locked memory of the bytes of a batch; `torch.index_select` of a batch on the
device; for `pinned`, one thread that gathers into two page-locked buffers in turn and copies them.

"host time a step" is what a resident Loader's caller spends in asking for a batch, the device never waited for; the
first step of an epoch is left out, and the slowest 2 % of the others: what comes once in a while is not in it.

Beside them, in one table with the same limit, what else feeds a device: a DataLoader that decodes JPEGs (500×375,
quality 90, Pillow, resized bilinearly and cropped to 224), the stock DataLoader over `MemmapDataset` (with torch's
default collate and with `fast_collate`; page-locked memory, on as many workers as there are cores), and Apex's
prefetcher around it. An epoch of all these, and of the Loaders beside them, is `--flocks` batches a worker. With
workers the clock starts behind the first batch of each, so that no start is in it; Loaders are timed from the first
on. `--flocks 0` leaves all of that out.
"""

import functools
import io
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from record import (
    arguments,
    at_least_one,
    need_cuda,
    noise_dataset,
    numbers_of,
    record,
    run_main,
    spread,
)
from torch.utils.data import DataLoader, Dataset

import memload

DEVICE = torch.device("cuda", 0)
#: Where the results have what else there is; docs/speed.svg is drawn from it.
OTHERS = "what else there is, behind the first batch of each worker, 224×224×3, batch 256"


class Jpegs(Dataset[Any]):
    """Pictures decoded from memory, as an ImageFolder with the usual transforms does from files."""

    def __init__(self, count: int) -> None:
        rng = np.random.default_rng(0)
        self.files = []
        for _ in range(min(count, 200)):
            picture = Image.fromarray(rng.integers(0, 256, (24, 32, 3), np.uint8)).resize(
                (500, 375)
            )
            file = io.BytesIO()
            picture.save(file, "JPEG", quality=90)
            self.files.append(file.getvalue())
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        picture = Image.open(io.BytesIO(self.files[number % len(self.files)])).convert("RGB")
        pixels = np.asarray(picture.resize((298, 224), Image.Resampling.BILINEAR))[:, 37:261]
        return torch.from_numpy(pixels.transpose(2, 0, 1).copy()), number % 1000


class ApexPrefetcher:
    """The pattern of Apex's data_prefetcher: one batch ahead on a side stream."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = iter(batches)
        self.stream = torch.cuda.Stream()
        self.preload()

    def preload(self) -> None:
        """Begin the next batch."""
        self.ahead = next(self.batches, None)
        if self.ahead is not None:
            with torch.cuda.stream(self.stream):
                self.ahead = tuple(tensor.to(DEVICE, non_blocking=True) for tensor in self.ahead)

    def __iter__(self) -> Iterator[Any]:
        while self.ahead is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
            batch = self.ahead
            for tensor in batch:
                tensor.record_stream(torch.cuda.current_stream())
            self.preload()
            yield batch


def moved(batches: Iterable[Any]) -> Iterator[Any]:
    """Move each batch when it is asked for, as most training loops do."""
    for images, labels in batches:
        yield images.to(DEVICE, non_blocking=True), labels.to(DEVICE, non_blocking=True)


def rate(way: Callable[[], Iterable[Any] | int]) -> float:
    """Return images a second of one pass, with the device's work waited for."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    found = way()
    count = found if isinstance(found, int) else sum(len(batch[0]) for batch in found)
    torch.cuda.synchronize()
    return count / (time.perf_counter() - start)


def steady_rate(batches: Iterable[Any], untimed: int) -> float:
    """Return images a second behind the first batches of an epoch, with the device's work waited for at its end."""
    torch.cuda.synchronize()
    count, start = 0, time.perf_counter()
    for number, batch in enumerate(batches, 1):
        count += len(batch[0]) if number > untimed else 0
        if number == untimed:
            torch.cuda.current_stream().synchronize()  # not the device: batches ahead would have come for nothing
            start = time.perf_counter()
    torch.cuda.synchronize()
    return count / (time.perf_counter() - start)


def wait_for_pages(loader: memload.Loader) -> None:
    """Have all pages of a Loader's files registered, if its feed does that: it goes on in the background."""
    pages = getattr(loader._open().feed, "_pages", None)
    if pages is not None:
        pages.wait(60)


def limits(dataset: memload.MemmapDataset, batch: int, passes: int) -> dict[str, Callable[[], int]]:
    """Return the bare operations."""
    shape = dataset.shards.array.shape
    pinned = [torch.empty((batch, *shape), dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    out = [torch.empty((batch, *shape), dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    events = [torch.cuda.Event(), torch.cuda.Event()]
    pixels = dataset.shards.maps[0]
    flat = torch.from_numpy(pixels).view(len(pixels), -1)
    resident = flat.to(DEVICE)
    stream, rng = torch.cuda.Stream(), np.random.default_rng(1)

    def copy() -> int:
        with torch.cuda.stream(stream):
            for number in range(passes):
                out[number % 2].copy_(pinned[number % 2], non_blocking=True)
        return passes * batch

    def select() -> int:
        chosen = torch.from_numpy(rng.permutation(len(pixels))).to(DEVICE)
        for start in range(0, len(pixels) - batch + 1, batch):
            torch.index_select(
                resident, 0, chosen[start : start + batch], out=out[0].view(batch, -1)
            )
        return len(pixels) // batch * batch

    def gather_and_copy() -> int:
        chosen = rng.permutation(len(pixels))[: 40 * batch]
        with torch.cuda.stream(stream):
            for number in range(len(chosen) // batch):
                events[number % 2].synchronize()
                part = chosen[number * batch : (number + 1) * batch]
                np.take(pixels, part, axis=0, out=pinned[number % 2].numpy(), mode="clip")
                out[number % 2].copy_(pinned[number % 2], non_blocking=True)
                events[number % 2].record(stream)
        return len(chosen) // batch * batch

    return {"copy": copy, "index_select": select, "gather and copy": gather_and_copy}


def feeding(path: Path, batch: int, ways: dict[str, dict[str, Any]], rounds: int) -> dict[str, Any]:
    """Return rates of the limits and of Loaders, and their ratios."""
    dataset = memload.MemmapDataset(path)
    size = len(dataset)
    passes = min(400, max(50, size // batch))
    all_ways: dict[str, Callable[[], Any]] = dict(limits(dataset, batch, passes))
    for name, options in ways.items():
        loader = memload.Loader(dataset, batch, shuffle=True, device=DEVICE, **options)
        wait_for_pages(loader)
        all_ways[name] = lambda loader=loader: loader
    rates: dict[str, list[float]] = {name: [] for name in all_ways}
    for number in range(rounds + 1):
        for name, way in all_ways.items():
            found = rate(way)
            if number:
                rates[name].append(found)
    limit = {
        "dma": "copy",
        "uva": "copy",
        "resident": "index_select",
        "pinned, 1 thread": "gather and copy",
    }
    ratios = {
        f"{name} / {limit.get(name, 'copy')}": spread(
            [a / b for a, b in zip(rates[name], rates[limit.get(name, "copy")], strict=True)]
        )
        for name in ways
    }
    return {**{name: spread(values) for name, values in rates.items()}, **ratios}


def host_time(path: Path, batch: int, rounds: int) -> dict[str, Any]:
    """Return microseconds of the caller's in each step of a resident Loader.

    Each is a mean over an epoch but for its first step and the slowest 2 % of the others.
    """
    found = []
    loader = memload.Loader(path, batch, shuffle=True, device=DEVICE, feed="resident")
    for _ in range(rounds):
        times = []
        batches = iter(loader)
        while True:
            start = time.perf_counter()
            got = next(batches, None)
            times.append(1e6 * (time.perf_counter() - start))
            if got is None:
                break
            if len(times) % 8 == 0:
                torch.cuda.synchronize()  # so that the device is never what is waited for
        steps = sorted(times[1:-1])  # without the end, which is no batch
        found.append(float(np.mean(steps[: max(1, int(0.98 * len(steps)))])))
    return spread(found)


def host_memory(path: Path) -> dict[str, float]:
    """Return MB that this process has more, of its own, for a dma Loader and two epochs."""

    def own() -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return (
            sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem")))
            / 1e3
        )

    before = own()
    loader = memload.Loader(path, 256, shuffle=True, device=DEVICE, feed="dma")
    for _batch in loader:
        pass
    first = own() - before
    loader._open().feed._pages.wait(60)
    for _batch in loader:
        pass
    return {"after the first epoch": first, "after the second": own() - before}


def starting(path: Path, rounds: int) -> dict[str, Any]:
    """Return seconds to the first batch of a new Loader, and what loading a resident one makes of the bus."""
    size, first, loaded = path.stat().st_size, [], []
    for _ in range(rounds):
        start = time.perf_counter()
        loader = memload.Loader(path, 256, shuffle=True, device=DEVICE, feed="dma")
        batch = next(iter(loader))
        torch.cuda.synchronize()
        first.append(time.perf_counter() - start)
        del loader, batch
        start = time.perf_counter()
        loader = memload.Loader(path, 256, shuffle=True, device=DEVICE, feed="resident")
        loaded.append(size / (time.perf_counter() - start) / 1e9)
        del loader
        torch.cuda.empty_cache()
    return {"first batch with dma (s)": spread(first), "loading resident (GB/s)": spread(loaded)}


def others(path: Path, flocks: int, rounds: int) -> dict[str, Any]:
    """Return rates of what else feeds a device, beside Loaders and one copy of as many bytes."""
    workers, batch = len(os.sched_getaffinity(0)), 256
    whole = memload.MemmapDataset(path)
    dataset = whole.subset(range(flocks * workers * batch))
    options: dict[str, Any] = {
        "num_workers": workers,
        "pin_memory": True,
        "persistent_workers": True,
    }
    plain = DataLoader(dataset, batch, shuffle=True, **options)
    stock = DataLoader(dataset, batch, shuffle=True, collate_fn=memload.fast_collate, **options)
    pictures = DataLoader(Jpegs(len(dataset)), batch, shuffle=True, **options)

    @functools.cache  # made in the first round, when all workers have been forked: a fork does not take threads along
    def loader(feed: Any, threads: int | None = None) -> memload.Loader:
        made = memload.Loader(
            dataset, batch, shuffle=True, device=DEVICE, feed=feed, num_threads=threads
        )
        wait_for_pages(made)
        return made

    copy = limits(whole, batch, flocks * workers)["copy"]
    ways: dict[str, Callable[[], Iterable[Any]]] = {
        "JPEGs in a DataLoader": lambda: moved(pictures),
        "DataLoader over MemmapDataset, default collate": lambda: moved(plain),
        "DataLoader over MemmapDataset, fast_collate": lambda: moved(stock),
        "the same in Apex's prefetcher": lambda: ApexPrefetcher(stock),
        "the same in CudaPrefetcher": lambda: memload.CudaPrefetcher(stock, device=DEVICE),
        "Loader, pinned, 12 threads": lambda: loader("pinned", 12),
        "Loader, uva": lambda: loader("uva"),
        "Loader, dma": lambda: loader("dma"),
        "Loader, resident": lambda: loader("resident"),
    }
    rates: dict[str, list[float]] = {name: [] for name in [*ways, "one copy"]}
    for number in range(rounds + 1):
        for name, way in ways.items():
            found = steady_rate(way(), 0 if name.startswith("Loader") else workers)
            if number:
                rates[name].append(found)
        if number:
            rates["one copy"].append(rate(copy))
    return {name: spread(values) for name, values in rates.items()} | {
        "workers": workers,
        "batches a worker": flocks,
    }


def main() -> None:
    """Run the benchmark."""
    parser = arguments(__doc__)
    parser.add_argument("--images", type=int, default=40_000)
    parser.add_argument("--small", type=int, default=400_000)
    parser.add_argument("--rounds", type=at_least_one, default=5)
    parser.add_argument(
        "--flocks",
        type=int,
        default=4,
        help="batches a worker of what else there is, 4 or more; or 0",
    )
    options = parser.parse_args()
    if options.flocks and options.flocks < 4:
        parser.error(
            f"--flocks: expected 4 or more, as the first is not timed, or 0, found {options.flocks}"
        )
    least = options.flocks * len(os.sched_getaffinity(0)) * 256
    if options.images < least:
        parser.error(f"--images: expected {options.flocks} batches of 256 a core, {least:,} or more, or --flocks 0, "
                     f"found {options.images:,}")  # fmt: skip
    need_cuda("Run it on a machine with a GPU")
    with tempfile.TemporaryDirectory() as folder:
        large, small = Path(folder) / "large.bin", Path(folder) / "small.bin"
        noise_dataset(large, options.images, 224)
        noise_dataset(small, options.small, 32)
        torch.zeros(1, device=DEVICE)
        results: dict[str, Any] = {"host memory with dma (MB)": host_memory(large)}
        results[f"a new Loader of {large.stat().st_size / 1e9:.1f} GB"] = starting(
            large, options.rounds
        )
        pages = {"dma": {"feed": "dma"}, "uva": {"feed": "uva"}, "resident": {"feed": "resident"}}
        staged = {
            f"pinned, {n} thread{'s' * (n > 1)}": {"feed": "pinned", "num_threads": n}
            for n in (1, 12)
        }
        results["224×224×3, batch 256"] = feeding(large, 256, pages | staged, options.rounds)
        results["32×32×3, batch 2,048"] = feeding(small, 2048, pages, options.rounds)
        for batch in (256, 2048):
            name = (
                f"host time a step, resident, 32×32×3, batch {batch}, without the slowest 2 % (µs)"
            )
            results[name] = host_time(small, batch, options.rounds)
        if options.flocks:
            results[OTHERS] = others(large, options.flocks, options.rounds)
    parameters = vars(options) | {"batch": "256 of 224×224, 2,048 of 32×32", "pages": "warm"}
    record("feeds", options, numbers_of(parser), parameters, results)


if __name__ == "__main__":
    run_main(main)
