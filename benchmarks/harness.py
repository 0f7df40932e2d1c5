"""What the benchmarks share: rounds, medians and quartiles, and the line in ``results/``.

A module has `Benchmark`s by name. Each way of one is called once a round and returns a figure, or
several by name. All ways of a round run one after another, so that a slow moment of the machine
strikes all of them; the first round warms up and is left out. Ratios are taken within each round.

Figures are rates, where more is better, unless their name has a unit of time or memory in
parentheses. `` › `` in a name divides tables: ``open › time (ms)``.

`ab.py` runs the same ways for two checkouts, so benchmarks use only public names of memload.
"""

import argparse
import atexit
import contextlib
import json
import math
import multiprocessing
import os
import platform
import re
import resource
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import memload

HERE = Path(__file__).parent
CORES = len(os.sched_getaffinity(0))
PACKAGES = (
    *("numpy", "torch", "torchvision", "triton", "pillow", "jpeg4py", "safetensors"),
    *("kornia", "ffcv", "tensordict", "litdata", "pylance", "pyarrow"),
)
#: The number of rounds from which on quartiles say something.
ENOUGH_ROUNDS = 3
#: That a process may take for an answer.
MOST_SECONDS = 300
#: Measures once; returns a figure, or several by name.
Way = Callable[[], Any]


@dataclass(frozen=True)
class Benchmark:
    """What is measured, and with what options."""

    #: Prepares data in a folder, and returns what is measured, by name.
    ways: Callable[[argparse.Namespace, Path], dict[str, Way]]
    #: Names with defaults: a number or text, False for a switch, an empty list for words, or None for
    #: a path.
    options: dict[str, Any]
    #: Options that ``--quick`` sets.
    quick: dict[str, Any] = field(default_factory=dict)
    #: The first and the second figure of each ratio, by its name.
    ratios: dict[str, tuple[str, str]] = field(default_factory=dict)
    #: Parameters of the line beside the options.
    facts: dict[str, Any] = field(default_factory=dict)


def run(benchmarks: Mapping[str, Benchmark]) -> None:
    """Run the benchmark that the command line names: measure, print, add a line to ``results/``.

    Data is kept between runs in the folder ``--data``.
    """
    name, benchmark, given = choose(benchmarks, sys.argv[1:])
    with tempfile.TemporaryDirectory(prefix="memload-benchmark-") as temporary:
        found = measure(prepared_ways(benchmark, given, temporary), given.rounds)
    if os.environ.get("RANK", "0") != "0":  # set by torchrun; rank 0 records
        return
    values = {option: getattr(given, option) for option in benchmark.options}
    parameters = {
        option: "given" if isinstance(value, Path) else value
        for option, value in values.items()
        if value is not None and not isinstance(value, list)  # words are in "partial"
    }
    for ratio, (one, other) in benchmark.ratios.items():
        if one in found and other in found:
            found[ratio] = divide(found[one], found[other])
    results = nested({figure: spread(values) for figure, values in found.items()})
    record(name, given, benchmark.options, results, parameters | benchmark.facts)


def choose(
    benchmarks: Mapping[str, Benchmark], words: Sequence[str]
) -> tuple[str, Benchmark, argparse.Namespace]:
    """Return the benchmark that the first word names, or the only one, with its options."""
    name = words[0] if words and words[0] in benchmarks else ""
    if not name and len(benchmarks) > 1:
        sys.exit(f"{sys.modules['__main__'].__doc__}\nGive one of: {', '.join(benchmarks)}.")
    rest, name = words[bool(name) :], name or next(iter(benchmarks))
    options = benchmarks[name].options | {"data": None}
    return name, benchmarks[name], parse_options(options, benchmarks[name].quick, rest)


def prepared_ways(
    benchmark: Benchmark, given: argparse.Namespace, temporary: str
) -> dict[str, Way]:
    """Return the ways, once their data is there."""
    folder = given.data or Path(temporary)
    folder.mkdir(parents=True, exist_ok=True)
    return benchmark.ways(given, folder)


def parse_options(
    options: dict[str, Any], quick: dict[str, Any], words: Sequence[str]
) -> argparse.Namespace:
    """Return the options of a command line, with ``--dry-run`` and ``--quick``."""
    parser = argparse.ArgumentParser(
        description=sys.modules["__main__"].__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dry-run", action="store_true", help="print, and record nothing")
    parser.add_argument("--quick", action="store_true", help="measure less")
    for name, default in options.items():
        if default is False:
            parser.add_argument(f"--{name}", action="store_true")
        elif default == []:
            parser.add_argument(f"--{name}", nargs="+", action="extend")
        else:
            kind = Path if default is None else type(default)
            parser.add_argument(f"--{name}", type=kind, help=f"default: {default}")
    found = vars(parser.parse_args(words))
    given = {name: value for name, value in found.items() if value is not None}
    return argparse.Namespace(**options | (quick if given["quick"] else {}) | given)


def named_ways(ways: Mapping[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """Return the ways whose names contain one of the words of ``--only``; without words, all."""
    found = {
        name: way
        for name, way in ways.items()
        if not words or any(word.lower() in name.lower() for word in words)
    }
    if not found:
        sys.exit(f"No name contains one of {words}. Give --only other words: {', '.join(ways)}.")
    return found


# Rounds


def figures(name: str, way: Way) -> dict[str, Any]:
    """Measure a way once and return its figures by their full names; without a name, by their own."""
    found = way()
    if isinstance(found, dict):
        return {f"{name} › {inner}" if name else inner: value for inner, value in found.items()}
    return {name: found}


def measure(ways: Mapping[str, Way], rounds: int) -> dict[str, list[Any]]:
    """Measure all ways in turn, for so many rounds after a first one, which is left out."""
    found: dict[str, list[Any]] = {}
    for number in range(rounds + 1):
        for name, way in ways.items():
            for figure, value in figures(name, way).items():
                found.setdefault(figure, []).extend([value] if number else [])
        print(f"round {number} of {rounds}", file=sys.stderr, flush=True)
    return found


def divide(ones: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return the ratio of each round; NaN where it is divided by zero."""
    pairs = zip(ones, others, strict=True)
    return [one / other if other else math.nan for one, other in pairs]


def spread(values: Sequence[Any]) -> Any:
    """Return the median and the quartiles of repeats; of a text, the last one."""
    if isinstance(values[-1], str):
        return values[-1]
    if len(values) == 1:
        low = middle = high = values[0]
    else:  # of two values, only "inclusive" keeps the quartiles between them
        method = "exclusive" if len(values) > 2 else "inclusive"
        low, middle, high = statistics.quantiles(values, n=4, method=method)
    return {"median": middle, "lower_quartile": low, "upper_quartile": high, "repeats": len(values)}


def nested(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return figures with `` › `` in their names as dictionaries in dictionaries."""
    tree: dict[str, Any] = {}
    for name, value in results.items():
        *branches, leaf = name.split(" › ")
        branch = tree
        for part in branches:
            branch = branch.setdefault(part, {})
        branch[leaf] = value
    return tree


# Other processes


class ChildError(Exception):
    """A process has failed or ended, or does not answer."""


class Child:
    """A process that calls functions of a module of benchmarks, when it is asked to.

    So it can have other packages or another memload, and may fail. It ends with this process.
    """

    def __init__(self, module: str, python: str = sys.executable, **environment: str) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        start = f"import benchmarks.{module} as module; from benchmarks import harness; "
        self.process = subprocess.Popen(
            [python, "-c", f"{start} harness.answer(module, {theirs.fileno()})"],
            env=os.environ | environment,
            pass_fds=[theirs.fileno()],
            stdout=sys.stderr,
            start_new_session=True,
        )
        theirs.close()
        atexit.register(self.end)

    def ask(self, function: str, *arguments: Any) -> Any:
        """Return what a function returns, by its name. Raises ChildError."""
        try:
            self.connection.send((function, arguments))
            if not self.connection.poll(MOST_SECONDS):
                raise ChildError(f"It has not answered for {MOST_SECONDS} s.")
            found = self.connection.recv()
        except (EOFError, ConnectionError):
            raise ChildError(f"It ended with status {self.process.wait()}.") from None
        if isinstance(found, ChildError):
            raise found
        return found

    def end(self) -> None:
        """Let it clear away after itself, then end whatever it has started and left."""
        self.connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        atexit.unregister(self.end)


def answer(module: Any, descriptor: int) -> None:
    """Call what a parent asks for until the parent has ended. An error is sent, and raised here."""
    parent = Connection(descriptor)
    with contextlib.suppress(EOFError):
        while True:
            function, arguments = parent.recv()
            try:
                parent.send(getattr(module, function)(*arguments))
            except Exception as error:
                parent.send(ChildError(f"{type(error).__name__}: {error}"))
                raise


# Ways


def rate(run: Callable[[], int], least_seconds: float = 0.25) -> Way:
    """Return a way that measures images a second.

    ``run`` returns a number of images. It is called again until ``least_seconds`` have passed.
    """

    def repeated() -> int:
        images, end = 0, time.perf_counter() + least_seconds
        while not images or time.perf_counter() < end:
            images += run()
        return images

    return lambda: timed(repeated)["images/s"]


def rate_behind(
    batches: Callable[[], Iterable[Any]], untimed: int, least_seconds: float = 0.0
) -> Way:
    """Return a way that measures images a second behind the first batches of whole epochs."""

    def way() -> float:
        count, seconds = 0, 0.0
        while not seconds or seconds < least_seconds:
            wait_for_device()
            start = time.perf_counter()
            for number, batch in enumerate(batches(), 1):
                count += len(batch[0]) if number > untimed else 0
                if number == untimed:
                    # not the whole device: batches ahead would have come for nothing
                    if torch.cuda.is_initialized():
                        torch.cuda.current_stream().synchronize()
                    start = time.perf_counter()
            wait_for_device()
            seconds += time.perf_counter() - start
            if not count:
                sys.exit(f"An epoch has at most {untimed} batches, which are not timed. Take more.")
        return count / seconds

    return way


def timed(run: Callable[[], int]) -> dict[str, float]:
    """Measure something once that returns a number of images: images a second, and cores.

    The device is waited for, before the clock starts and before it stops.
    """
    wait_for_device()
    cpu, start = cpu_seconds(), time.perf_counter()
    images = run()
    wait_for_device()
    seconds = time.perf_counter() - start
    return {"images/s": images / seconds, "cores": (cpu_seconds() - cpu) / seconds}


def wait_for_device() -> None:
    """Wait for all that the GPU was given, if one is used."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def count_images(batches: Iterable[Any]) -> int:
    """Go through batches and count their images."""
    return sum(len(batch[0]) for batch in batches)


def move(batches: Iterable[Any], device: Any) -> Iterator[tuple[Any, Any]]:
    """Move each batch to a device when it is asked for, as most training loops do."""
    for images, labels in batches:
        yield images.to(device, non_blocking=True), labels.to(device, non_blocking=True)


def settle(loader: Any, seconds: float = 3.0) -> Any:
    """Go through a Loader until its rate has not risen for some seconds; return it.

    A Loader for a GPU registers the pages of its files in the background and grows faster until
    that is done.
    """
    best, end = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        found = timed(lambda: count_images(loader))["images/s"]
        if found > 1.05 * best:
            best, end = found, time.perf_counter() + seconds
    return loader


def cpu_seconds() -> float:
    """Return the CPU time of this process and its workers so far."""
    ticks = 0
    for worker in multiprocessing.active_children():
        fields = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def cpu_of_children() -> float:
    """Return the CPU time of all processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# The line in results/


def record(
    benchmark: str,
    options: argparse.Namespace,
    usual: Mapping[str, Any],
    results: Mapping[str, Any],
    parameters: Mapping[str, Any],
) -> None:
    """Print results, and append them to ``results/BENCHMARK.jsonl`` unless it is a dry run.

    With options that made less of the run than the ``usual`` ones, the line is a partial one.
    """
    line = {
        "benchmark": benchmark,
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        # from the environment where the tree was copied to another machine without its history
        "commit": os.environ.get("BENCHMARK_COMMIT") or commit(),
        "machine": machine(),
        "versions": versions(),
        "parameters": parameters,
        "results": results,
    }
    if less := left_out(options, usual):
        line["partial"] = less
        print(f"This is a partial run: {', '.join(less)}", file=sys.stderr)
    if not options.dry_run:
        with (HERE / "results" / f"{benchmark}.jsonl").open("a") as lines:
            lines.write(json.dumps(line, ensure_ascii=False) + "\n")
    print(json.dumps({"parameters": parameters, "results": results}, indent=1, ensure_ascii=False))


def left_out(options: argparse.Namespace, usual: Mapping[str, Any]) -> list[str]:
    """Return the options that made less of a run: words, numbers lower than usual, few rounds."""
    found = []
    for name, value in usual.items():
        given, least = getattr(options, name), ENOUGH_ROUNDS if name == "rounds" else value
        if name == "only" and given:
            found.append(f"--{name} {shlex.join(given)}")
        elif isinstance(value, int | float) and given < min(value, least):
            found.append(f"--{name} {given}")
    return found


def commit() -> str:
    """Return the commit of this checkout, with "+changes" where memload or benchmarks differ."""

    def git(*arguments: str) -> str:
        asked = ["git", "-C", str(HERE), *arguments]
        return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()

    head = git("rev-parse", "--short", "HEAD")
    changed = git("status", "--porcelain", "--", ":(top)memload", ":(top,glob)benchmarks/*.py")
    return f"{head}{'+changes' * bool(changed)}" if head else "unknown"


def machine() -> dict[str, Any]:
    """Return the processor, its cores, the system, and the GPUs."""
    named = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    found: dict[str, Any] = {
        "cpu": named[1].strip() if named else platform.machine(),
        "cores": CORES,
        "system": platform.platform(),
    }
    if torch.cuda.is_available():
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        drivers = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.split()
        found |= {"gpu": torch.cuda.get_device_name(), "gpus": torch.cuda.device_count()}
        found["driver"] = next(iter(drivers), "unknown")
    return found


def versions() -> dict[str, str]:
    """Return the versions of Python, of memload, and of what it uses or is measured beside it."""
    found = {"python": platform.python_version(), "memload": memload.__version__}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
