"""The engine (storage, feeds, reading) of this checkout beside that of another one, in one run.

    python -m benchmarks.engine --other ../old
    python -m benchmarks.engine --other ../old --only cold --json engine.jsonl

Each version has processes of its own (`engine_child.py`), and so have the limits, which are bare
operations. In each round all ways are measured in turn, the versions in alternating order, while
the processes that are not asked wait. Figures are medians of the rounds, images per second where no
unit is named; CPU cores are in parentheses. Shares of a limit are taken within each round.

- ``warm``: feeds to a GPU, all pages in RAM. The first round warms up, here and in the next two.
- ``cpu``: the feed of the CPU beside as many bare threads, and 200 shards beside one file, in RAM.
- ``open``: opening an index of 1.28 million samples in a new process, and the first batch of a new
  Loader in a process that had one before, in RAM.
- ``train``: ResNets with flip, Normalize and bfloat16, beside training with one batch again and
  again. The first steps of each measurement warm up.
- ``cold``: three epochs of a file whose pages have been dropped, which is checked, in a new process
  each; the file fits in RAM, or half of it may be held. The clock starts with the loop; opening is a
  figure of its own. The limit is O_DIRECT with 32 threads.

A part makes as many of the ``--rounds`` as its budget of seconds allows, but two at least. A way
that fails is left out from then on. Data stays in the temporary folder. ``--commits`` says what to
record where the checkouts have no history.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks import data, disk, harness

FOLDER = Path(tempfile.gettempdir()) / "memload-engine"
THIS, OTHER, LIMIT = "this", "other", "limit"
VERSIONS = (THIS, OTHER)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: A process that has not answered for so many seconds is taken to hang.
TIMEOUT = 200.0
LEAST_ROUNDS = 2
#: What each figure has to reach, on an H100 where it needs a GPU. "other" is a53af85.
REQUIRED = {
    "dma": "share 0.94",
    "pinned, 8 threads": "share 0.92",
    "resident": "2,400,000",
    "32×32, pinned, 8 threads": "650,000",
    "64×64, pinned, 8 threads": "280,000",
    "cpu, 1 thread": "share 0.9",
    "cpu, 2 threads": "that of other",
    "cpu, 8 threads": "that of other",
    "cpu, 16 threads": "that of other",
    "200 shards, 1 thread": "share 0.87 (time 1.15)",
    "200 shards, 2 threads": "share 0.87 (time 1.15)",
    "index of 1.28 million, time (ms)": "50",
    "index of 1.28 million, private (MB)": "40",
    "first batch, time (ms)": "100",
    "resnet18, dma": "share 0.9977",
    "resnet50, dma": "share 0.9977",
    "fits, first rows": "0.65 of other",
    "fits, epoch 1": "other, under 2 cores",
    "fits, epoch 2": "80,000",
    "fits, epoch 3": "335,000",
    "half held, epoch 2": "20,000, under 1 core",
    "half held, epoch 3": "20,000, under 1 core",
}


class Way(NamedTuple):
    """What is measured in each round, for each of its sides."""

    figure: str
    #: For `engine_child.py`, or a function that is called here.
    job: dict[str, Any] | Callable[[], dict[str, float]]
    sides: tuple[str, ...] = VERSIONS
    #: The figure that limits this one: of the limits, or of the same version.
    limit: str = ""
    #: Whether each measurement has a new process.
    fresh: bool = False
    #: The file whose pages are dropped before, when the process has started.
    cold: Path | None = None


class Processes:
    """A process for each side. One that has ended or hangs is replaced when its side is asked."""

    def __init__(self, checkouts: dict[str, Path]) -> None:
        self.checkouts, self.running = checkouts, {}

    def start(self, *sides: str) -> None:
        """Start the processes that do not run, all at the same time."""
        started = [side for side in sides if side not in self.running]
        command = [sys.executable, "-P", Path(__file__).with_name("engine_child.py")]
        for side in started:
            folders = [str(self.checkouts[side]), os.environ.get("PYTHONPATH", "")]
            self.running[side] = harness.Child(command, os.pathsep.join(filter(None, folders)))
        for side in started:
            found = Path(self.running[side].answer(TIMEOUT)["checkout"])
            if found.resolve() != self.checkouts[side]:
                raise RuntimeError(f"{side}: memload was imported from {found}.")

    def ask(self, side: str, job: dict[str, Any]) -> dict[str, Any]:
        """Return the figures of a job, or its error."""
        try:
            return self.running[side].measure(job, TIMEOUT)
        except harness.ChildError as error:
            self.stop(side)
            return {"error": str(error)}

    def stop(self, *sides: str) -> None:
        """End processes."""
        for side in sides:
            if (child := self.running.pop(side, None)) is not None:
                try:
                    child.close(20)
                except subprocess.TimeoutExpired:
                    child.process.kill()
                    child.process.wait()


class Part:
    """The figures of a part: by name and side, those of all rounds."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name, self.options = name, options
        self.checkouts = {THIS: harness.HERE.parent, LIMIT: harness.HERE.parent}
        if options.other:
            self.checkouts[OTHER] = options.other.resolve()
        self.found: dict[str, dict[str, list[float]]] = {}
        self.limits: dict[str, str] = {}
        self.errors: dict[tuple[str, str], str] = {}

    def count(self, rows: int) -> int:
        """Return how many rows to have in place of so many."""
        return max(1024, int(rows * self.options.scale))

    def images(self, rows: int, side: int, shards: int = 1) -> Path:
        """Return a data set of noise; it is on the disk and in RAM."""
        path = data.noise_dataset(FOLDER, self.count(rows), side, shards=shards)
        for file in FOLDER.glob(f"{path.stem}*.bin"):
            with file.open("rb") as written:
                os.fsync(written.fileno())  # so that nothing is written while others are measured
            disk.read_from_start_to_end(file)
        return path

    def measure(self, ways: list[Way], seconds: float, *, warm_up: bool = True) -> None:
        """Measure all ways in turn, in so many rounds as there is time for."""
        ways = [way._replace(sides=tuple(filter(self.checkouts.get, way.sides))) for way in ways]
        lasting = [way for way in ways if isinstance(way.job, dict) and not way.fresh]
        processes, end = Processes(self.checkouts), time.monotonic() + seconds
        try:
            processes.start(*sorted({side for way in lasting for side in way.sides}))
            for number in range(0 if warm_up else 1, self.options.rounds + 1):
                start = time.monotonic()
                for way in ways:
                    for side in way.sides if number % 2 else way.sides[::-1]:
                        if (way.figure, side) not in self.errors:
                            self.keep(way, side, number, measure_once(processes, way, side))
                now = time.monotonic()
                if number >= LEAST_ROUNDS and now + (now - start) > end:
                    break
        finally:
            processes.stop(*self.checkouts)

    def keep(self, way: Way, side: str, number: int, figures: dict[str, Any]) -> None:
        """Print what a way has given in a round, and keep it unless that was the warm-up."""
        title = f"{self.name} {number}: {way.figure}, {side}:"
        if "error" in figures:
            self.errors[way.figure, side] = harness.without_folders(figures["error"])
            print(title, self.errors[way.figure, side], flush=True)
            return
        print(title, ", ".join(f"{name} {shown(figures[name])}" for name in figures), flush=True)
        for name, value in figures.items() if number else ():
            row = f"{way.figure}, {name}".replace(", images/s", "")
            if name in ("images/s", "first rows", "epoch 1"):
                self.limits[row] = way.limit
            self.found.setdefault(row, {}).setdefault(side, []).append(value)

    def limit(self, row: str, side: str) -> list[float]:
        """Return the rounds of the figure that limits another one."""
        limits = self.found.get(self.limits.get(row, ""), {})
        return limits.get(LIMIT) or limits.get(side, [])

    def share(self, row: str, side: str) -> list[float]:
        """Return the share of the limit in each round."""
        rounds = self.found[row].get(side, []), self.limit(row, side)
        return [one / most for one, most in zip(*rounds, strict=False)]

    def table(self) -> str:
        """Return all figures as Markdown."""
        columns = (self.name, *VERSIONS, LIMIT, "share", "share of other", "required")
        lines = [f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
        for row, sides in self.found.items():
            if not row.endswith(", cores"):
                cores = self.found.get(f"{row}, cores", {})
                cells = [middle(sides.get(side, []), cores.get(side, [])) for side in VERSIONS]
                bare = middle(sides.get(LIMIT, []), cores.get(LIMIT, []))
                cells.append(bare or middle(self.limit(row, THIS)))
                cells += [middle(self.share(row, side)) for side in VERSIONS]
                lines.append(f"| {' | '.join([row, *cells, REQUIRED.get(row, '')])} |")
        failed = [f"{figure}, {side}: {error}" for (figure, side), error in self.errors.items()]
        return "\n".join([*lines, *failed])

    def record(self) -> None:
        """Add a line of JSON: all figures, the machine, and what was measured."""
        results: dict[str, dict[str, Any]] = {}
        for row, sides in self.found.items():
            shares = {f"share of {side}": self.share(row, side) for side in VERSIONS}
            results[row] = {
                side: harness.spread(values) | {"rounds": values}
                for side, values in (sides | shares).items()
                if values
            }
        for (figure, side), error in self.errors.items():
            results.setdefault(figure, {})[side] = {"error": error}
        given = dict(zip(VERSIONS, self.options.commits or (), strict=False))
        commits = {
            side: given.get(side) or harness.commit(self.checkouts[side])
            for side in VERSIONS
            if side in self.checkouts
        }
        line = {
            "benchmark": "engine",
            "command": harness.command(),
            "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "commit": commits[THIS],
            "machine": harness.machine(),
            "versions": {"numpy": np.__version__, "torch": torch.__version__},
            "parameters": {"part": self.name, "other": commits.get(OTHER)},
            "results": {self.name: results},
        }
        if self.options.scale != 1:
            line["partial"] = [f"--scale {self.options.scale}"]
        with self.options.json.open("a") as lines:
            lines.write(json.dumps(line) + "\n")


# Tools


def measure_once(processes: Processes, way: Way, side: str) -> dict[str, Any]:
    """Return the figures of a way, or its error."""
    try:
        if isinstance(way.job, dict):
            processes.start(side)
        if way.cold is not None:
            drop(way.cold)
        return processes.ask(side, way.job) if isinstance(way.job, dict) else way.job()
    except (harness.ChildError, OSError, RuntimeError) as error:
        return {"error": str(error)}
    finally:
        if way.fresh:
            processes.stop(side)


def drop(path: Path) -> None:
    """Drop the pages of a file. Those of a process that has just ended may take a moment."""
    for _ in range(4):
        try:
            return disk.drop_from_page_cache(path)
        except RuntimeError:
            time.sleep(2)
    return disk.drop_from_page_cache(path)


def shown(value: float) -> str:
    """Return a figure with three digits, or with all that stand before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.4g}"


def middle(values: list[float], cores: list[float] | None = None) -> str:
    """Return the median, and the CPU cores that belong to it."""
    text = shown(statistics.median(values)) if values else ""
    return text + (f" ({statistics.median(cores):.2f})" if cores else "")


def loading(job: str, path: object, batch: int = 256, **options: Any) -> dict[str, Any]:
    """Return a job that needs a Loader. Without a GPU, it is one for the CPU without a feed."""
    if DEVICE == "cpu":
        options = {name: value for name, value in options.items() if name != "feed"}
    options = {"device": DEVICE, **options}
    return {"job": job, "path": str(path), "batch": batch, "options": options}


def bare_threads(path: Path, threads: int, *, send: bool) -> dict[str, Any]:
    """Return the job of threads that take rows without memload."""
    options = {"threads": threads, "send": send}
    return {"job": "bare_threads", "path": str(path), "batch": 256, **options}


def threads(count: int) -> str:
    """Return a number of threads in words."""
    return f"{count} thread{'s' * (count > 1)}"


# Parts


def warm(part: Part) -> None:
    """Measure the feeds to a GPU with all pages in RAM."""
    path = part.images(40_000, 224)
    copies = {"job": "pinned_copies", "bytes_per_image": 3 * 224**2, "batch": 256}
    ways = [
        Way("pinned copies", copies, (LIMIT,)),
        Way("dma", loading("epochs", path, feed="dma"), limit="pinned copies"),
        Way("resident", loading("epochs", path, feed="resident")),
    ]
    for count in (8, 12):
        bare, job = bare_threads(path, count, send=True), loading("epochs", path, feed="pinned")
        job["options"]["num_threads"] = count
        ways.append(Way(f"bare, {threads(count)}", bare, (LIMIT,)))
        ways.append(Way(f"pinned, {threads(count)}", job, limit=f"bare, {threads(count)}"))
    part.measure(ways, 80)
    ways = []
    for side, rows, batch in ((32, 400_000, 512), (64, 200_000, 256)):
        path = part.images(rows, side)
        for count in (8, 1):
            job = loading("epochs", path, batch, feed="pinned", num_threads=count)
            ways.append(Way(f"{side}×{side}, pinned, {threads(count)}", job))
        ways.append(Way(f"{side}×{side}, uva", loading("epochs", path, batch, feed="uva")))
    part.measure(ways, 60)


def cpu(part: Part) -> None:
    """Measure the feed of the CPU, and what 200 shards cost."""
    path, shards = part.images(40_000, 224), part.images(40_000, 224, 200)
    ways = []
    for count in (1, 2, 8, 16):
        name, options = threads(count), {"device": "cpu", "num_threads": count}
        ways.append(Way(f"bare, {name}", bare_threads(path, count, send=False), (LIMIT,)))
        ways.append(Way(f"cpu, {name}", loading("epochs", path, **options), limit=f"bare, {name}"))
        if count <= 2:
            job = loading("epochs", shards, **options)
            ways.append(Way(f"200 shards, {name}", job, limit=f"cpu, {name}"))
    part.measure(ways, 80)


def opening(part: Part) -> None:
    """Measure what it takes to open an index, and until a Loader has its first batch."""
    path = data.empty_dataset(FOLDER, part.count(1_281_167))
    job = {"job": "open_index", "path": str(path)}
    part.measure([Way("index of 1.28 million", job, fresh=True)], 50)
    path = part.images(40_000, 224)
    part.measure([Way("first batch", loading("first_batch", path, feed="dma"))], 30)


def train(part: Part) -> None:
    """Measure training steps beside those with one batch again and again."""
    path = part.images(40_000, 224)
    feeds = {"dma": {"feed": "dma"}, "pinned, 8 threads": {"feed": "pinned", "num_threads": 8}}
    settings = (256, 100) if DEVICE == "cuda" else (4, 2)
    for model, names, seconds in (("resnet18", [*feeds], 60), ("resnet50", ["dma"], 100)):
        of_model = {"model": model, "steps": settings[1]}
        limit, job = f"{model}, synthetic", loading("train", "", settings[0]) | of_model
        ways = [Way(limit, job)]
        for name in names:
            job = loading("train", path, settings[0], **feeds[name]) | of_model
            ways.append(Way(f"{model}, {name}", job, limit=limit))
        part.measure(ways, seconds, warm_up=False)


def cold(part: Part) -> None:
    """Measure epochs of a file whose pages are not in RAM."""
    rows, row_bytes = part.count(60_000), 3 * 224**2
    path, limit = data.noise_dataset(FOLDER, rows, 224), "O_DIRECT, 32 threads"

    def read() -> dict[str, float]:
        chosen = np.random.default_rng().permutation(rows)[:16_384]
        disk.read_directly(path, chosen[:64], row_bytes, 32)  # makes its memory
        return harness.timed(lambda: disk.read_directly(path, chosen, row_bytes, 32))

    half = {"feed": "disk", "cache_bytes": rows * row_bytes // 2}
    ways = [Way(limit, read, (LIMIT,), cold=path)]
    for figure, options in (("fits", {"feed": "dma"}), ("half held", half)):
        job = loading("cold_epochs", path, **options) | {"first_rows": min(8192, rows // 2)}
        ways.append(Way(figure, job, limit=limit, fresh=True, cold=path))
    part.measure(ways, 300, warm_up=False)


PARTS = {"warm": warm, "cpu": cpu, "open": opening, "train": train, "cold": cold}


def main() -> None:
    """Measure the parts that are asked for, and print a table of each at the end."""
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shape)
    parser.add_argument("--other", type=Path, help="another checkout")
    parser.add_argument("--only", default=",".join(PARTS), help="parts; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--scale", type=float, default=1.0, help="of the rows, for a trial")
    parser.add_argument("--commits", nargs=2, metavar=("THIS", "OTHER"))
    parser.add_argument("--json", type=Path, default=harness.HERE / "engine.jsonl")
    options = parser.parse_args()
    parts = [Part(name, options) for name in options.only.split(",")]
    if unknown := {part.name for part in parts} - set(PARTS):
        parser.error(f"there is no part {', '.join(unknown)}")
    FOLDER.mkdir(exist_ok=True)
    for part in parts:
        start = time.monotonic()
        for step in (PARTS[part.name], Part.record):
            try:
                step(part)
            except Exception:  # noqa: BLE001  # of any kind: the other parts are worth having
                traceback.print_exc()
        print(f"{part.name} took {time.monotonic() - start:.0f} s", flush=True)
    print(*(f"\n{part.table()}" for part in parts), sep="\n", flush=True)


if __name__ == "__main__":
    main()
