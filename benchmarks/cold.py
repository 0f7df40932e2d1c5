"""Rows of files that are not in RAM, beside what the disk gives at most.

    python benchmarks/cold.py --data /a/folder/on/the/disk
    python benchmarks/cold.py --python FFCV=ffcv/bin/python LitData=litdata/bin/python

It measures a GPU where there is one, else the CPU (``--device``). The file of ``--images`` is
written in the folder ``--data``, to choose the disk. Rows come in a random order, a new one each
time. The clock starts with the loop (for whole epochs, before the Loader is opened), and stops when
so many images are in hand, the device waited for.

**Cold.** Before each way, the pages of its own file, and no others, are dropped from the page cache.
That they are gone is checked with mincore(). Where rows are held, none are dropped; epochs are taken
until all of them are in RAM. "in RAM" then is the share of the rows that came from there (on the
CPU: of the file's pages, before the clock starts).

**Limits.** Bare O_DIRECT reads of as many random rows, by 8, 16, 32 and 64 threads in each round;
the best of the round counts, which is hard on what is compared with it. Where a share of the rows is
held in RAM, the disk has to bring only the others, so the limit is that many times higher: 2 times
with half of the rows, 10 times with 90 %, but at most what the bus carries (one large copy from
page-locked memory). The limit of a whole first epoch is one sequential read of the file. Cores are
CPU time of the process and its workers over the time.

**Larger than RAM.** If the file is not larger than the RAM of the machine, a child process holds
RAM, until half of the file and 4 GB are left. The parameters say which. That process is the first
that the kernel would end, and it gives way by itself. 90 % are held without it, as their rest is
read past the page cache in any case.

On the CPU, beside it: FFCV and LitData read as many of the same rows from files of their own, if
they are installed for the Python that ``--python`` names (`cold_contenders.py`); and
`BlockShuffledSampler` is set beside `ShuffledSampler`, for rows of 150,528 and of 3,072 bytes.

``--only`` takes the tables whose titles contain a word, or a part of one. ``--quick`` has three
rounds and no contenders.
"""

import contextlib
import gc
import itertools
import json
import math
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import harness
import numpy as np
import torch
from cold_contenders import CONTENDERS, command
from contenders import CORES, Job
from data import noise_dataset
from disk import drop_from_page_cache, read_directly, read_from_start_to_end, share_in_ram
from harness import ChildError, Way, take, timed
from memory import limited_ram
from report import tables

import memload
from memload.machine import available_memory  # not public, but ab.py does not run this benchmark

USUAL = {"images": 60_000, "small": 400_000, "rows": 8192, "side": 224, "batch": 256, "rounds": 5}
OPTIONS = {**USUAL, "only": [], "python": [], "timeout": 600.0, "data": None}
DIRECT_THREADS = (8, 16, 32, 64)
#: RAM that is left beside what is held. With less than 3 GB, a machine came to its OOM killer;
#: memload leaves as much to others, and uses some of the rest.
BESIDE_HELD = 4_000_000_000
#: Within so many epochs, all rows that are to be held have to be in RAM.
EPOCHS_UNTIL_HELD = 10
SEQUENTIAL = "read from start to end"

Figures = dict[str, float]
_seeds = itertools.count()


class Bench:
    """The file that is read, and what the ways of a table share."""

    def __init__(self, options: Any, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.path = noise_dataset(folder, options.images, options.side)
        self.row_bytes = 3 * options.side**2
        #: How many rows a way reads, unless it takes whole epochs.
        self.count = options.images // 4
        if options.device == "cuda":
            self.count = min(options.rows, options.images)
        #: The limits of this round in images/s.
        self.direct = self.sequential = self.bus = math.nan
        #: Ends what the ways of a table have opened.
        self.opened = contextlib.ExitStack()
        #: What is told of a way beside its figures: versions, or why it is missing.
        self.notes: dict[str, dict[str, Any]] = {}

    def loader(self, **options: Any) -> memload.Loader:
        """Return a Loader in a random order of its own."""
        options = {"shuffle": True, "seed": next(_seeds), "device": self.options.device} | options
        return memload.Loader(self.path, self.options.batch, **options)

    def read_directly(self) -> Figures:
        """Read random rows past the page cache, by each number of threads; set the limit."""
        found = {}
        for threads in DIRECT_THREADS:
            rows = np.random.default_rng().permutation(self.options.images)[: self.count]
            read = partial(read_directly, self.path, rows, self.row_bytes, threads)
            found[f"bare O_DIRECT, {threads} threads"] = timed(read)
        self.direct = max(figures["images/s"] for figures in found.values())
        return {
            f"{name} › {figure}": value
            for name, figures in found.items()
            for figure, value in against(self.direct, figures).items()
        }

    def disk(self, share_held: float = 0.0) -> float:
        """Return the limit of this round, if a share of the rows need not come from the disk."""
        return self.direct / (1 - share_held)

    def read_sequentially(self) -> Figures:
        """Read the file from start to end."""

        def read() -> int:
            read_from_start_to_end(self.path)
            return int(self.options.images)

        found = timed(read)
        self.sequential = found["images/s"]
        return found

    def copy_over_the_bus(self) -> Figures:
        """Copy large page-locked memory to the device."""
        memory = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
        out = torch.empty_like(memory, device=self.options.device)
        found = timed(lambda: out.copy_(memory).numel() // self.row_bytes)
        self.bus = found["images/s"]
        return found


# Measuring


def cold(path: Path, run: Callable[[], Figures]) -> Way:
    """Return a way that begins without a page of its file in RAM."""

    def way() -> Figures:
        gc.collect()  # Loaders of the way before, which may hold pages
        drop_from_page_cache(path)
        return run()

    return way


def against(limit: float, found: Figures) -> Figures:
    """Return figures beside a limit in images/s."""
    rate = found.pop("images/s")
    return {"images/s": rate, "limit": limit, "of the limit": rate / limit, **found}


# Ways


def first_rows(bench: Bench, **options: Any) -> Way:
    """Return a way that reads the first rows of a cold file."""

    def run() -> Figures:
        return against(bench.disk(), take(bench.loader(**options), bench.count))

    return cold(bench.path, run)


def first_epoch(bench: Bench, **options: Any) -> Way:
    """Return a way that opens a cold file and reads a whole epoch of it."""

    def run() -> Figures:
        opened = []  # closed when the clock has stopped

        def epoch() -> int:
            opened.append(bench.loader(**options))  # "resident" reads the file here
            return harness.count_images(opened[0])

        return against(bench.sequential, timed(epoch))

    return cold(bench.path, run)


def held(bench: Bench, share: float, limit: Callable[[], float], **options: Any) -> Way:
    """Return a way that reads with a share of the rows in RAM, where they are from the start."""
    size = int(share * bench.options.images * bench.row_bytes)
    opened: list[memload.Loader] = []
    bench.opened.callback(opened.clear)

    def way() -> Figures:
        if not opened:
            gc.collect()
            opened.append(bench.loader(cache_bytes=size, **options))
            fill(opened[0], share)
        (loader,), in_ram = opened, share_in_ram(bench.path)
        before = counts(loader)
        found = take(loader, bench.count, least_seconds=1)
        after = counts(loader)
        if after.hits is not None:
            in_ram = (after.hits - before.hits) / (after.served - before.served)
        return against(limit(), found) | {"in RAM": in_ram}

    return way


def counts(loader: memload.Loader) -> Any:
    """Return where a Loader found its rows."""
    return loader.feed.counts


def fill(loader: memload.Loader, share: float) -> None:
    """Take epochs until a share of the rows is held, and no more. Raises RuntimeError."""
    for _ in range(EPOCHS_UNTIL_HELD):
        harness.count_images(loader)
        if abs(counts(loader).rows_held / counts(loader).rows - share) < 0.02:
            return
        time.sleep(1)  # while the disk is idle, pages are registered
    raise RuntimeError(f"{share:.0%} of the rows should be held. {loader.feed}.")


def limits(bench: Bench) -> dict[str, Way]:
    """Return bare reads of random rows. They leave the page cache as it is."""
    return {"": bench.read_directly}


# Tables


def quarter_on_cpu(bench: Bench) -> dict[str, Way]:
    """Return the first quarter of a cold file, beside other libraries."""

    def take_from_map() -> Figures:
        rows = np.random.default_rng().permutation(bench.options.images)
        rows, pixels = rows[: bench.count // 20 + 1], np.load(bench.path, mmap_mode="r")

        def run() -> int:
            for start in range(0, len(rows), bench.options.batch):
                np.take(pixels, rows[start : start + bench.options.batch], axis=0)
            return len(rows)

        return against(bench.disk(), timed(run))

    loaders = {
        f"Loader, {threads} threads": first_rows(bench, num_threads=threads)
        for threads in (2, 4, 8)
    }
    taken = {
        "np.take from the memory map, a twentieth of the rows": cold(bench.path, take_from_map)
    }
    return {**limits(bench), **loaders, **taken, **contenders(bench)}


def contenders(bench: Bench) -> dict[str, Way]:
    """Return other libraries' ways of reading as many of the same rows."""
    found: dict[str, Way] = {}
    for title in () if bench.options.quick else CONTENDERS:
        built = bench.folder / f"{title.partition(',')[0]}-{bench.path.stem}"
        job = Job(bench.folder, built, bench.options.batch, CORES, "cpu", bench.options.images)
        name = f"{title}, {CORES} workers"
        asked = command(title, bench.path, job, bench.count, bench.options.python)
        try:
            ask = bench.opened.enter_context(harness.started(asked, bench.options.timeout))
            bench.notes[name] = {"versions": ask("store")}
        except (ChildError, OSError) as error:
            bench.notes[name] = {"error": harness.without_folders(str(error))}
        else:
            found[name] = partial(ask_beside, bench, ask)
    return found


def ask_beside(bench: Bench, ask: harness.Ask) -> Figures:
    """Return the figures of another process beside the limit."""
    return against(bench.disk(), ask("read"))


def orders_on_cpu(bench: Bench) -> dict[str, Way]:
    """Return random order and blocks of neighbours, for the first quarter of two cold files."""
    options = bench.options
    small = noise_dataset(bench.folder, options.small, min(32, options.side))
    found: dict[str, Way] = {}
    for path, batch in ((bench.path, options.batch), (small, 8 * options.batch)):
        images, side = np.load(path, mmap_mode="r").shape[:2]
        for order in (memload.ShuffledSampler, memload.BlockShuffledSampler):
            name = f"rows of {3 * side**2:,} bytes, {order.__name__}"
            found[name] = cold(path, partial(in_order, path, order, images, batch))
    return found


def in_order(path: Path, order: Any, images: int, batch: int) -> Figures:
    """Read the first quarter of a file in an order."""
    sampler = order(images, seed=next(_seeds))
    loader = memload.Loader(path, batch, sampler=sampler, device="cpu")
    return take(loader, images // 4)


def epoch_on_cpu(bench: Bench) -> dict[str, Way]:
    """Return the whole first epoch of a cold file that fits in RAM."""
    return {SEQUENTIAL: cold(bench.path, bench.read_sequentially), "Loader": first_epoch(bench)}


def half_held_on_cpu(bench: Bench) -> dict[str, Way]:
    """Return reading from a file larger than RAM."""
    limit = partial(bench.disk, 0.5)
    loaders = {
        f"Loader, half held, {threads} threads": held(bench, 0.5, limit, num_threads=threads)
        for threads in (2, 4, 8)
    }
    return limits(bench) | loaders


def rows_on_cuda(bench: Bench) -> dict[str, Way]:
    """Return the first rows of a cold file."""
    return limits(bench) | {feed: first_rows(bench, feed=feed) for feed in ("dma", "pinned")}


def most_held_on_cuda(bench: Bench) -> dict[str, Way]:
    """Return reading with 90 % of the rows in RAM."""

    def limit() -> float:
        return min(bench.disk(0.9), bench.bus)

    return {
        **limits(bench),
        "one large copy": bench.copy_over_the_bus,
        "disk, 90 % held": held(bench, 0.9, limit, feed="disk"),
    }


def less_held_on_cuda(bench: Bench) -> dict[str, Way]:
    """Return reading from a file larger than RAM, with nothing and with half of the rows in RAM."""
    return {
        **limits(bench),
        # this one first: Loaders of a process share what they hold
        "disk, nothing held": held(bench, 0.0, bench.disk, feed="disk"),
        "disk, half held": held(bench, 0.5, partial(bench.disk, 0.5), feed="disk"),
    }


def epochs_on_cuda(
    feeds: tuple[str, ...], share_held: float | None, bench: Bench
) -> dict[str, Way]:
    """Return whole first epochs of a cold file."""
    options: dict[str, Any] = {}
    if share_held is not None:
        options["cache_bytes"] = int(share_held * bench.options.images * bench.row_bytes)
    loaders = {feed: first_epoch(bench, feed=feed, **options) for feed in feeds}
    return {SEQUENTIAL: cold(bench.path, bench.read_sequentially)} | loaders


class Table(NamedTuple):
    """Ways that are measured in turn."""

    ways: Callable[[Bench], dict[str, Way]]
    short_of_ram: bool = False  #: measured with a file larger than RAM
    whole_epochs: bool = False  #: measured in half as many rounds, none of them left out


TABLES = {
    "cpu": {
        "the first quarter of a cold file": Table(quarter_on_cpu),
        "the whole first epoch of a cold file that fits": Table(epoch_on_cpu, whole_epochs=True),
        "orders, the first quarter of cold files": Table(orders_on_cpu),
        "a file larger than RAM": Table(half_held_on_cpu, short_of_ram=True),
    },
    "cuda": {
        "the first rows of a cold file": Table(rows_on_cuda),
        "most rows held": Table(most_held_on_cuda),
        "whole first epochs of a cold file that fits": Table(
            partial(epochs_on_cuda, ("dma", "pinned", "resident"), None), whole_epochs=True
        ),
        "a file larger than RAM": Table(less_held_on_cuda, short_of_ram=True),
        "whole first epochs of a cold file larger than RAM": Table(
            partial(epochs_on_cuda, ("disk", "pinned"), 0.5), short_of_ram=True, whole_epochs=True
        ),
    },
}


def measure(bench: Bench, table: Table) -> dict[str, Any]:
    """Measure the ways of a table; return their figures."""
    rounds = bench.options.rounds
    with bench.opened:
        bench.notes.clear()
        drop_from_page_cache(bench.path)
        ways = table.ways(bench)
        if table.whole_epochs:
            found = harness.measure(ways, math.ceil(rounds / 2), warm_up=False)
        else:
            found = harness.measure(ways, rounds)
    gc.collect()
    results = harness.nested({name: harness.spread(values) for name, values in found.items()})
    for name, notes in bench.notes.items():
        results[name] = results.get(name, {}) | notes
    return results


def ram_to_leave(bench: Bench) -> int | None:
    """Return how much RAM to leave so that the file is larger; None if it is, or is too small."""
    size, available = bench.path.stat().st_size, available_memory()
    left = size // 2 + BESIDE_HELD
    return left if left < size < available else None


def described(bench: Bench) -> str:
    """Return how large the file is beside the RAM that is left."""
    size, available = bench.path.stat().st_size, available_memory()
    text = f"the file has {size / 1e9:.3g} GB, {available / 1e9:.3g} GB of RAM are available"
    if (left := ram_to_leave(bench)) is not None:
        return (
            f"{text}; for a file larger than RAM, all but {left / 1e9:.3g} GB of it are taken away"
        )
    return text


def measure_all(bench: Bench) -> tuple[dict[str, Any], list[str]]:
    """Measure the tables that are asked for; return their figures, and which ones failed."""
    results: dict[str, Any] = {}
    failed: list[str] = []
    checks: list[Callable[[], None]] = []  # that RAM is still taken away
    with contextlib.ExitStack() as taken_away:
        for title, table in TABLES[bench.options.device].items():
            if bench.options.only and not any(word in title for word in bench.options.only):
                continue
            try:
                if table.short_of_ram and (left := ram_to_leave(bench)) is not None:
                    checks.append(taken_away.enter_context(limited_ram(left)))
                results[title] = measure(bench, table)
                for check in checks:
                    check()
            except (RuntimeError, ChildError, memload.MemloadError) as error:
                # the other tables are worth having
                results[title] = {"error": harness.without_folders(str(error))}
                failed.append(title)
            for shown in tables({title: results[title]}):
                print(shown.title, shown.markdown(), sep="\n\n", file=sys.stderr, flush=True)
    return results, failed


def main() -> None:
    """Measure all tables of a device."""
    devices = ("cuda", "cpu") if torch.cuda.is_available() else ("cpu", "cuda")
    options = harness.parse_options({**OPTIONS, "device": devices}, {"rounds": 3})
    if options.device == "cuda":
        harness.need_cuda("--device cpu reads to memory.")
    with tempfile.TemporaryDirectory(prefix="memload-benchmark-") as temporary:
        folder = options.data or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        bench = Bench(options, folder)
        parameters = {"ram": described(bench)}
        results, failed = measure_all(bench)
    left_out = harness.partial(options, USUAL)
    left_out += ["--quick"] * (options.quick and options.device == "cpu")
    left_out += [f"--only {shlex.join(options.only)}"] * bool(options.only)
    left_out += [f"without {title}" for title in failed]
    shown = ("images", "rows", "side", "batch", "rounds", "device")
    parameters |= {name: getattr(options, name) for name in shown} | {"pages": "cold"}
    harness.record("cold", options, results, parameters, left_out)
    print(json.dumps({"parameters": parameters, "results": results}, indent=1, ensure_ascii=False))
    if failed:
        sys.exit(f"Not measured: {', '.join(failed)}.")


if __name__ == "__main__":
    main()
