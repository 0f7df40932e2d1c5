"""What the benchmarks share: rounds, medians and quartiles, and the line in ``results/``.

A benchmark is a function ``ways(options, folder)`` that prepares its data in ``folder`` and returns
what it measures, by name. Each way is called once a round and returns a figure, or several by name.
All ways of a round run one after another, so that a slow moment of the machine strikes all of them;
the first round warms up and is left out. Ratios are taken within each round.

Figures are rates, where more is better, unless their name has a unit of time or memory in
parentheses. `` › `` in a name divides tables: ``open › time (ms)``.

`ab.py` runs the same ways for two checkouts, so benchmarks use only public names of memload.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import re
import resource
import select
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import memload

HERE = Path(__file__).parent
CORES = len(os.sched_getaffinity(0))
PACKAGES = (
    *("numpy", "torch", "torchvision", "triton", "pillow", "jpeg4py", "safetensors"),
    *("kornia", "ffcv", "tensordict", "litdata", "pylance", "pyarrow"),
)
#: The number of rounds from which on quartiles say something.
ENOUGH_ROUNDS = 3
#: Measures once; returns a figure, or several by name.
Way = Callable[[], float | dict[str, float]]
#: The first and the second figure of each ratio, by its name.
Ratios = Mapping[str, Sequence[str]]
#: Asks a process for the figures of a way. Raises ChildError.
Ask = Callable[[Any], dict[str, Any]]


def run_one_of(benchmarks: Mapping[str, Mapping[str, Any]]) -> None:
    """Run the benchmark that the first word of the command line names, with its own arguments."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in benchmarks:
        sys.exit(f"{sys.modules['__main__'].__doc__}\nGive one of: {', '.join(benchmarks)}.")
    del sys.argv[1]
    run_benchmark(name=name, **benchmarks[name])


def run_benchmark(
    ways: Callable[[argparse.Namespace, Path], dict[str, Way]],
    *,
    options: Mapping[str, Any],
    quick: Mapping[str, Any] | None = None,
    ratios: Ratios | None = None,
    facts: Mapping[str, Any] | None = None,
    name: str = "",
) -> None:
    """Parse the command line, measure, print, and add a line to ``results/``.

    ``options`` are described at `parse_options`, and ``quick`` has the values that ``--quick`` sets
    instead. Data is kept between runs in the folder ``--data``, and ``--serve`` is for `ab.py`.
    ``facts`` adds to the parameters of the line. Without a name, it is that of the script.
    """
    given = parse_options({**options, "data": None, "serve": False}, quick or {})
    ratios = ratios or {}
    with tempfile.TemporaryDirectory(prefix="memload-benchmark-") as temporary:
        folder = given.data or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if given.serve:
            serve(ways(given, folder), rounds=given.rounds, ratios=ratios)
            return
        found = with_ratios(measure(ways(given, folder), given.rounds), ratios)
    if os.environ.get("RANK", "0") != "0":  # set by torchrun; rank 0 records
        return
    parameters = {name: getattr(given, name) for name in options if getattr(given, name) != []}
    parameters = {name: value for name, value in parameters.items() if value is not None}
    parameters = {k: "given" if isinstance(v, Path) else v for k, v in parameters.items()}
    record(
        name or Path(sys.argv[0]).stem,
        given,
        nested({figure: spread(values) for figure, values in found.items()}),
        parameters | dict(facts or {}),
        left_out(given, options),
    )


def parse_options(options: Mapping[str, Any], quick: Mapping[str, Any]) -> argparse.Namespace:
    """Return the command line's options.

    ``options`` are names with defaults: a number, False for a switch, choices of which the first is
    the default, an empty list for words, or None for a path.
    """
    parser, defaults = argument_parser(), dict(options)
    for name, default in options.items():
        if default is False:
            parser.add_argument(f"--{name}", action="store_true")
        elif isinstance(default, tuple):
            parser.add_argument(f"--{name}", choices=default, help=f"default: {default[0]}")
            defaults[name] = default[0]
        elif default == []:
            parser.add_argument(f"--{name}", nargs="+", action="extend")
        else:
            kind = Path if default is None else type(default)
            parser.add_argument(f"--{name}", type=kind, help=f"default: {default}")
    given = {name: value for name, value in vars(parser.parse_args()).items() if value is not None}
    return argparse.Namespace(**defaults | dict(quick if given["quick"] else {}) | given)


def argument_parser() -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark has, and the script's description."""
    parser = argparse.ArgumentParser(
        description=sys.modules["__main__"].__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dry-run", action="store_true", help="print, and record nothing")
    parser.add_argument("--quick", action="store_true", help="measure less")
    return parser


# Rounds


def figures(name: str, way: Way) -> dict[str, float]:
    """Measure a way once and return its figures by their full names."""
    found = way()
    if isinstance(found, dict):
        return {f"{name} › {inner}" if name else inner: value for inner, value in found.items()}
    return {name: found}


def measure(ways: Mapping[str, Way], rounds: int) -> dict[str, list[float]]:
    """Measure all ways in turn, for so many rounds after a first one, which is left out."""
    found: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        for name, way in ways.items():
            for figure, value in figures(name, way).items():
                found.setdefault(figure, []).extend([value] if number else [])
        print(f"round {number} of {rounds}", file=sys.stderr, flush=True)
    return found


def with_ratios(found: Mapping[str, list[float]], ratios: Ratios) -> dict[str, list[float]]:
    """Return the figures of all rounds, and behind them the ratios of those that were measured."""
    return dict(found) | {
        name: divide(found[one], found[other])
        for name, (one, other) in ratios.items()
        if one in found and other in found
    }


def divide(ones: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return the ratio of each round; that of two zeros is 1."""
    least = 1e-9
    return [max(one, least) / max(other, least) for one, other in zip(ones, others, strict=True)]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median and the quartiles of repeats."""
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


# Processes that measure on request


def serve(ways: Mapping[str, Way], **facts: Any) -> None:
    """Measure the way whose name comes in a line on stdin, and print its figures, until stdin ends.

    This is what a `child` runs; ``facts`` are for its parent. What else is printed goes to stderr.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(value: Any) -> None:
        print(json.dumps(value), file=answers, flush=True)

    answer({"ways": list(ways), "memload": str(Path(memload.__file__).parents[1]), **facts})
    for line in sys.stdin:
        name = json.loads(line)
        answer(figures(name, ways[name]))


class ChildError(Exception):
    """A process that measures on request has ended, or does not answer."""


@contextlib.contextmanager
def child(command: Sequence[object], timeout: float, **environment: str) -> Iterator[Ask]:
    """Start a process that serves requests, and end it, with all that it has started.

    The request None returns the facts that it was given. An error has its last line of stderr.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as stderr:
        process = subprocess.Popen(
            list(map(str, command)),
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )

        def ask(request: Any) -> dict[str, Any]:
            if request is not None:
                with contextlib.suppress(BrokenPipeError):  # the answer says that it has ended
                    print(json.dumps(request), file=process.stdin, flush=True)
            if not select.select([process.stdout], [], [], timeout)[0]:
                raise ChildError(f"It has not answered for {timeout:.0f} s.")
            if line := process.stdout.readline():
                return json.loads(line)
            status = process.wait()
            stderr.seek(0)
            lines = [f"It ended with status {status}.", *stderr.read().split("\n")]
            raise ChildError([line for line in lines if line.strip()][-1])

        try:
            yield ask
        finally:  # let it clear away after itself, then end whatever is left
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()


def without_folders(text: str) -> str:
    """Return the beginning of a text without folders of this machine, which say nothing to others."""
    return re.sub(r"(?:/[^\s/:'\"]+)+/", "", text)[:200]


def python_path() -> str:
    """Return where a new process finds the memload that is measured, then the benchmarks."""
    own = [str(Path(memload.__file__).parents[1]), str(HERE.parent)]
    return os.pathsep.join([*own, *filter(None, [os.environ.get("PYTHONPATH")])])


def run_python(*arguments: object, **environment: str) -> str:
    """Run Python in a new process, with the memload that is measured; return what it prints."""
    return subprocess.run(
        [sys.executable, "-P", *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": python_path()} | environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=580,
        check=True,
    ).stdout


def cpu_of_children() -> float:
    """Return the CPU time of all processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# Ways


def rate(run: Callable[[], Any], least_seconds: float = 0.25) -> Way:
    """Return a way that measures images a second.

    ``run`` returns the number of images, or batches whose first member is the images; it is called
    again until ``least_seconds`` have passed.
    """

    def repeated() -> int:
        images, end = 0, time.perf_counter() + least_seconds
        while not images or time.perf_counter() < end:
            images += count_images(run())
        return images

    return lambda: timed(repeated)["images/s"]


def rate_behind(
    batches: Callable[[], Iterable[Any]], untimed: int, least_seconds: float = 0.0
) -> Way:
    """Return a way that measures images a second behind the first batches of whole epochs."""

    def way() -> float:
        torch = sys.modules["torch"]
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
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def count_images(found: Any) -> int:
    """Return a number of images as it is; go through batches and count theirs."""
    return found if isinstance(found, int) else sum(len(batch[0]) for batch in found)


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


# The line in results/


def record(
    benchmark: str,
    options: argparse.Namespace,
    results: Mapping[str, Any],
    parameters: Mapping[str, Any],
    left_out: Sequence[str] = (),
) -> None:
    """Print results, and append them to ``results/BENCHMARK.jsonl`` unless it is a dry run.

    ``left_out`` names the options that made less of the run, which is then recorded as partial.
    """
    line = {
        "benchmark": benchmark,
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        # from the environment where the tree was copied to another machine without its history
        "commit": os.environ.get("BENCHMARK_COMMIT") or commit(HERE),
        "machine": machine(),
        "versions": versions(),
        "parameters": parameters,
        "results": results,
    }
    if left_out:
        line["partial"] = list(left_out)
        print(f"This is a partial run: {', '.join(left_out)}", file=sys.stderr)
    if not options.dry_run:
        with (HERE / "results" / f"{benchmark}.jsonl").open("a") as lines:
            lines.write(json.dumps(line, ensure_ascii=False) + "\n")
    print(json.dumps({"parameters": parameters, "results": results}, indent=1, ensure_ascii=False))


def left_out(options: argparse.Namespace, usual: Mapping[str, Any]) -> list[str]:
    """Return the options that made less of a run.

    These are lists of words, and numbers lower than their default; rounds where they are few.
    """
    words = {name: getattr(options, name) for name, value in usual.items() if value == []}
    least = {name: value for name, value in usual.items() if isinstance(value, int | float)}
    least["rounds"] = min(usual.get("rounds", 0), ENOUGH_ROUNDS)
    given = {name: getattr(options, name, 0) for name in least}
    less = [f"--{name} {value}" for name, value in given.items() if value < least[name]]
    return less + [f"--{name} {shlex.join(value)}" for name, value in words.items() if value]


def commit(folder: Path) -> str:
    """Return the commit of a checkout, with "+changes" where memload or the benchmarks differ."""

    def git(*arguments: str) -> str:
        asked = ["git", "-C", str(folder), *arguments]
        return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()

    head = git("rev-parse", "--short", "HEAD")
    changed = git("status", "--porcelain", "--", ":(top)memload", ":(top,glob)benchmarks/*.py")
    return f"{head}{'+changes' * bool(changed)}" if head else "unknown"


def machine() -> dict[str, Any]:
    """Return the processor, its cores, the system, and the GPUs if the benchmark uses torch."""
    named = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    found: dict[str, Any] = {
        "cpu": named[1].strip() if named else platform.machine(),
        "cores": CORES,
        "system": platform.platform(),
    }
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
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
