"""Rows of files that are not in RAM, beside what the disk gives at most.

    python benchmarks/cold.py --data /a/folder/on/the/disk
    python benchmarks/cold.py --python FFCV=ffcv/bin/python LitData=litdata/bin/python

It measures a GPU where there is one, else the CPU (``--device``). The file of ``--images`` is
written in the folder ``--data``, to choose the disk. Rows come in a random order, a new one each
time. The clock starts with the loop (for whole epochs, before the Loader is opened), and stops when
so many images are in hand, the device waited for.

**Cold.** Before each way, the pages of its own file, and no others, are dropped from the page cache.
That they are gone is checked with mincore(). Where rows are held, none are dropped; the clock starts
when all of them are in RAM. "in RAM" then is the share of the rows that came from there. On the CPU,
where the system decides, an epoch is taken before, and it is the share of the file's pages then.

**Limits.** Bare O_DIRECT reads of as many random rows, by 8, 16, 32 and 64 threads in each round.
The number of threads counts whose median is the best. Where a share of the rows is held in RAM, the
disk has to bring only the others, so the limit is that many times higher: 2 times with half of the
rows, 10 times with 90 %, but at most what the bus carries (one large copy from page-locked memory).
The limit of a whole first epoch is one sequential read of the file. Ratios are taken within each
round, and each round has another order, as some disks are faster after a pause. Cores are CPU time
of the process and its workers over the time.

**Larger than RAM.** If the file is not larger than the RAM of the machine, a child process holds
RAM, until half of the file and 5 GB are left. The parameters say which. That process is the first
that the kernel would end, and it gives way by itself. 90 % are held without it, as their rest is
read past the page cache in any case.

On the CPU, beside it: FFCV and LitData read as many of the same rows from files of their own, if
they are installed for the Python that ``--python`` names (`cold_contenders.py`).

The first table has ``--rounds``, the others half as many. ``--only`` takes the tables whose titles
contain a word, or a part of one. ``--quick`` has three rounds and no contenders.
"""

import contextlib
import gc
import itertools
import json
import math
import statistics
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

USUAL = {"images": 70_000, "rows": 8192, "side": 224, "batch": 256, "rounds": 5}
OPTIONS = {**USUAL, "only": [], "python": [], "timeout": 600.0, "data": None}
#: RAM that is left beside what is held. With less than 3 GB, a machine came to its OOM killer.
#: memload leaves that much to others. The rest is for page-locked memory and for CUDA.
BESIDE_HELD = 5_000_000_000
#: Within so many seconds, all rows that are to be held have to be in RAM.
SECONDS_UNTIL_HELD = 300
#: The names of limits.
DIRECT = {threads: f"bare O_DIRECT, {threads} threads" for threads in (8, 16, 32, 64)}
SEQUENTIAL, BUS = "read from start to end", "one large copy"

Figures = dict[str, float]
#: The figures of all rounds by name, as in ``"read from start to end › images/s"``.
Rounds = dict[str, list[float]]
_seeds = itertools.count()


class Measured(NamedTuple):
    """A way, and what it could reach at most in each round, if there is a limit."""

    way: Way
    limit: Callable[[Rounds], list[float]] | None = None


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
        #: Ends what the ways of a table have opened.
        self.opened = contextlib.ExitStack()
        #: What is told of a way beside its figures: versions, or why it is missing.
        self.notes: dict[str, dict[str, Any]] = {}

    def loader(self, **options: Any) -> memload.Loader:
        """Return a Loader in a random order of its own."""
        options = {"shuffle": True, "seed": next(_seeds), "device": self.options.device} | options
        return memload.Loader(self.path, self.options.batch, **options)


# Limits


def bare_reads(bench: Bench) -> dict[str, Measured]:
    """Return reads of random rows past the page cache, which they leave as it is."""

    def read(threads: int) -> Figures:
        rows = np.random.default_rng().permutation(bench.options.images)[: bench.count]
        return timed(partial(read_directly, bench.path, rows, bench.row_bytes, threads))

    return {name: Measured(partial(read, threads), disk()) for threads, name in DIRECT.items()}


def disk(share_held: float = 0.0) -> Callable[[Rounds], list[float]]:
    """Return the limit where a share of the rows need not come from the disk."""

    def limit(found: Rounds) -> list[float]:
        rates = [found[f"{name} › images/s"] for name in DIRECT.values()]
        return [rate / (1 - share_held) for rate in max(rates, key=statistics.median)]

    return limit


def disk_and_bus(found: Rounds) -> list[float]:
    """Return the limit with 90 % of the rows in RAM."""
    return list(map(min, disk(0.9)(found), found[f"{BUS} › images/s"]))


def one_read(found: Rounds) -> list[float]:
    """Return the limit of whole epochs."""
    return found[f"{SEQUENTIAL} › images/s"]


def read_sequentially(bench: Bench) -> Measured:
    """Return one read of the file from start to end."""

    def read() -> int:
        read_from_start_to_end(bench.path)
        return int(bench.options.images)

    return Measured(cold(bench.path, lambda: timed(read)))


def copy_over_the_bus(bench: Bench) -> Figures:
    """Copy large page-locked memory to the device."""
    memory = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    out = torch.empty_like(memory, device=bench.options.device)
    return timed(lambda: out.copy_(memory).numel() // bench.row_bytes)


# Ways


def cold(path: Path, run: Callable[[], Figures]) -> Way:
    """Return a way that begins without a page of its file in RAM."""

    def way() -> Figures:
        gc.collect()  # Loaders of the way before, which may hold pages
        drop_from_page_cache(path)
        return run()

    return way


def first_rows(bench: Bench, **options: Any) -> Measured:
    """Return a way that reads the first rows of a cold file."""

    def run() -> Figures:
        return take(bench.loader(**options), bench.count)

    return Measured(cold(bench.path, run), disk())


def first_epoch(bench: Bench, **options: Any) -> Measured:
    """Return a way that opens a cold file and reads a whole epoch of it."""

    def run() -> Figures:
        opened = []  # closed when the clock has stopped

        def epoch() -> int:
            opened.append(bench.loader(**options))  # "resident" reads the file here
            return harness.count_images(opened[0])

        return timed(epoch)

    return Measured(cold(bench.path, run), one_read)


def held(
    bench: Bench, share: float, limit: Callable[[Rounds], list[float]], **options: Any
) -> Measured:
    """Return a way that reads with a share of the rows in RAM, where they are from the start."""
    size = int(share * bench.options.images * bench.row_bytes)

    def way() -> Figures:
        gc.collect()  # Loaders of a process share what they hold
        loader = bench.loader(cache_bytes=size, **options)
        fill(loader, share)
        before = counts(loader)
        found = take(loader, bench.count, least_seconds=1)
        after = counts(loader)
        return found | {"in RAM": (after.hits - before.hits) / (after.served - before.served)}

    return Measured(way, limit)


def after_an_epoch(bench: Bench, **options: Any) -> Measured:
    """Return a way that reads on the CPU, where the system has kept what it likes of an epoch."""

    def way() -> Figures:
        loader = bench.loader(**options)
        harness.count_images(loader)
        in_ram = share_in_ram(bench.path)
        return take(loader, bench.count, least_seconds=1) | {"in RAM": in_ram}

    return Measured(way)


def counts(loader: memload.Loader) -> Any:
    """Return where a Loader found its rows."""
    return loader.feed.counts


def fill(loader: memload.Loader, share: float) -> None:
    """Wait until a share of the rows is held, and no more. Raises RuntimeError."""
    end = time.perf_counter() + SECONDS_UNTIL_HELD
    while time.perf_counter() < end:
        if abs(counts(loader).rows_held / counts(loader).rows - share) < 0.02:
            return
        time.sleep(0.1)
    raise RuntimeError(f"{share:.0%} of the rows should be held. {loader.feed}.")


# Tables


def quarter_on_cpu(bench: Bench) -> dict[str, Measured]:
    """Return the first quarter of a cold file, beside other libraries."""

    def take_from_map() -> Figures:
        rows = np.random.default_rng().permutation(bench.options.images)
        rows, pixels = rows[: bench.count // 20 + 1], np.load(bench.path, mmap_mode="r")

        def run() -> int:
            for start in range(0, len(rows), bench.options.batch):
                np.take(pixels, rows[start : start + bench.options.batch], axis=0)
            return len(rows)

        return timed(run)

    return {
        **bare_reads(bench),
        **{f"Loader, {n} threads": first_rows(bench, num_threads=n) for n in (2, 4, 8)},
        "np.take from the memory map, a twentieth of the rows": Measured(
            cold(bench.path, take_from_map), disk()
        ),
        **contenders(bench),
    }


def contenders(bench: Bench) -> dict[str, Measured]:
    """Return other libraries' ways of reading as many of the same rows."""
    found: dict[str, Measured] = {}
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
            found[name] = Measured(partial(ask, "read"), disk())
    return found


def epoch_on_cpu(bench: Bench) -> dict[str, Measured]:
    """Return the whole first epoch of a cold file that fits in RAM."""
    return {SEQUENTIAL: read_sequentially(bench), "Loader": first_epoch(bench)}


def larger_on_cpu(bench: Bench) -> dict[str, Measured]:
    """Return reading from a file larger than RAM."""
    return bare_reads(bench) | {
        f"Loader, {threads} threads": after_an_epoch(bench, num_threads=threads)
        for threads in (2, 4, 8)
    }


def rows_on_cuda(bench: Bench) -> dict[str, Measured]:
    """Return the first rows of a cold file."""
    return bare_reads(bench) | {feed: first_rows(bench, feed=feed) for feed in ("dma", "pinned")}


def most_held_on_cuda(bench: Bench) -> dict[str, Measured]:
    """Return reading with 90 % of the rows in RAM."""
    return {
        **bare_reads(bench),
        BUS: Measured(partial(copy_over_the_bus, bench)),
        "disk, 90 % held": held(bench, 0.9, disk_and_bus, feed="disk"),
    }


def less_held_on_cuda(bench: Bench) -> dict[str, Measured]:
    """Return reading from a file larger than RAM, with nothing and with half of the rows in RAM."""
    return {
        **bare_reads(bench),
        "disk, nothing held": held(bench, 0.0, disk(), feed="disk"),
        "disk, half held": held(bench, 0.5, disk(0.5), feed="disk"),
    }


def epochs_on_cuda(
    feeds: tuple[str, ...], share_held: float | None, bench: Bench
) -> dict[str, Measured]:
    """Return whole first epochs of a cold file."""
    options: dict[str, Any] = {}
    if share_held is not None:
        options["cache_bytes"] = int(share_held * bench.options.images * bench.row_bytes)
    loaders = {feed: first_epoch(bench, feed=feed, **options) for feed in feeds}
    return {SEQUENTIAL: read_sequentially(bench)} | loaders


class Table(NamedTuple):
    """Ways that are measured in turn, from which rounds."""

    ways: Callable[[Bench], dict[str, Measured]]
    short_of_ram: bool = False  #: measured with a file larger than RAM
    warm_up: bool = True
    all_rounds: bool = False  #: instead of half of them


TABLES = {
    "cpu": {
        "the first quarter of a cold file": Table(quarter_on_cpu, all_rounds=True),
        "the whole first epoch of a cold file that fits": Table(epoch_on_cpu, warm_up=False),
        "a file larger than RAM": Table(larger_on_cpu, short_of_ram=True),
    },
    "cuda": {
        "the first rows of a cold file": Table(rows_on_cuda, all_rounds=True),
        "most rows held": Table(most_held_on_cuda),
        "whole first epochs of a cold file that fits": Table(
            partial(epochs_on_cuda, ("dma", "pinned", "resident"), None), warm_up=False
        ),
        "a file larger than RAM": Table(less_held_on_cuda, short_of_ram=True),
        "whole first epochs of a cold file larger than RAM": Table(
            partial(epochs_on_cuda, ("disk", "pinned"), 0.5), short_of_ram=True, warm_up=False
        ),
    },
}


def measure(bench: Bench, table: Table) -> dict[str, Any]:
    """Measure the ways of a table; return their figures."""
    rounds = bench.options.rounds if table.all_rounds else math.ceil(bench.options.rounds / 2)
    with bench.opened:
        bench.notes.clear()
        drop_from_page_cache(bench.path)
        measured = table.ways(bench)
        ways = {name: one.way for name, one in measured.items()}
        found = harness.measure(ways, rounds, warm_up=table.warm_up, shuffled=True)
    gc.collect()
    results: dict[str, Any] = {}
    for name, one in measured.items():
        of_way = {
            figure.split(" › ")[1]: found[figure]
            for figure in found
            if figure.startswith(f"{name} › ")
        }
        if one.limit is not None:
            rates, limit = of_way.pop("images/s"), one.limit(found)
            ratio = harness.divide(rates, limit)
            of_way = {"images/s": rates, "limit": limit, "of the limit": ratio} | of_way
        results[name] = {figure: harness.spread(values) for figure, values in of_way.items()}
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
        text += f"; for a file larger than RAM, an anonymous allocation leaves {left / 1e9:.3g} GB"
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
    left_out = harness.partial(options, {**USUAL, "only": []})
    left_out += ["--quick"] * (options.quick and options.device == "cpu")
    left_out += [f"without {title}" for title in failed]
    parameters |= {"images": options.images, "rows": bench.count}
    shown = ("side", "batch", "rounds", "device")
    parameters |= {name: getattr(options, name) for name in shown} | {"pages": "cold"}
    harness.record("cold", options, results, parameters, left_out)
    print(json.dumps({"parameters": parameters, "results": results}, indent=1, ensure_ascii=False))
    if failed:
        sys.exit(f"Not measured: {', '.join(failed)}.")


if __name__ == "__main__":
    main()
