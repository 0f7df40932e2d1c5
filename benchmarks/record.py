"""What benchmarks share: options, noise, and a result with where it was got, as a line of JSON in ``results/``.

Every benchmark has `--dry-run`, which prints and records nothing. A run that is less than a whole one, by options that
leave something out or make it smaller, is recorded as partial, and RESULTS.md keeps the whole one before it.
"""

import argparse
import contextlib
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

import memload
from memload import inspection
from memload.storage.format import HEADER_BYTES, npy_header
from memload.storage.index import Array, Index, Shard
from memload.storage.keys import Keys

HERE = Path(__file__).parent
#: Rounds or repeats from which on a run is whole: fewer have no quartiles.
ENOUGH = 3
#: Packages that stand beside what `memload info --environment` tells, where they are installed.
BESIDE = ("torchvision", "kornia", "ffcv", "triton", "cuda-bindings")


def run_main(main: Callable[[], int | None]) -> NoReturn:
    """Run a benchmark, and end the process; an interrupt, or a file that is not there, in a line."""
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted: what has no line yet is lost", file=sys.stderr)
        sys.exit(130)
    except (memload.MemloadError, FileNotFoundError, PermissionError) as error:
        sys.exit(str(error))


def arguments(about: str | None) -> argparse.ArgumentParser:
    """Return a parser of a benchmark's options, with those that every one has."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry-run", action="store_true", help="print, and record nothing")
    return parser


def at_least_one(text: str) -> int:
    """Return a number of rounds from the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, found {text}")
    return int(text)


def partial(options: argparse.Namespace, usual: Mapping[str, Any]) -> list[str]:
    """Return in which options a run is less than a whole one.

    ``usual`` are the defaults: a number that is lower than its own makes a run partial, rounds and repeats below
    `ENOUGH`; so does a list of words that choose what is measured, which is empty by default.
    """
    found = []
    for name, whole in usual.items():
        given = getattr(options, name)
        if isinstance(whole, list):
            less = bool(given)
        else:
            less = given < (min(whole, ENOUGH) if name in ("rounds", "repeats") else whole)
        if less:
            shown = shlex.join(given) if isinstance(given, list) else given
            found.append(f"--{name.replace('_', '-')} {shown}")
    return found


def numbers_of(parser: argparse.ArgumentParser, *left_out: str) -> dict[str, Any]:
    """Return the options of a parser that are numbers, with their defaults, for `partial`."""
    found = {
        action.dest: action.default for action in parser._actions if action.dest not in left_out
    }
    return {name: value for name, value in found.items() if type(value) in (int, float)}


def need_cuda(otherwise: str) -> None:
    """End the process with a message where there is no GPU; the message ends with what to do otherwise."""
    import torch

    if not torch.cuda.is_available():
        sys.exit(f"device: expected a CUDA device, found none. {otherwise}")


class Noise:
    """Random pictures of one size, each from its own number."""

    def __init__(self, count: int, side: int) -> None:
        self.count, self.side = count, side

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return np.random.default_rng(index).integers(
            0, 256, (self.side, self.side, 3), np.uint8
        ), index % 1000


def noise_dataset(path: Path, count: int, side: int) -> None:
    """Write a data set of noise faster than a build would: blocks of 500 pictures that differ in their first bytes."""
    shape = (side, side, 3)
    block = np.random.default_rng(0).integers(0, 256, (min(500, count), *shape), np.uint8)
    crc32 = np.empty(count, np.uint32)
    with path.open("wb") as file:
        file.write(npy_header("|u1", (count, *shape)))
        for start in range(0, count, len(block)):
            part = block[: count - start]
            part[:, 0, 0] = (
                np.arange(start, start + len(part))
                .astype("<u4")
                .view(np.uint8)
                .reshape(-1, 4)[:, :3]
            )
            crc32[start : start + len(part)] = [zlib.crc32(picture) for picture in part]
            file.write(part.tobytes())
    shard = Shard(path.name, count, HEADER_BYTES + count * side * side * 3)
    Index(
        path=path.with_suffix(".idx"),
        arrays=(Array("image", "|u1", shape, (shard,)),),
        row=np.arange(count),
        flags=np.zeros(count, np.uint8),
        keys=Keys.of([str(number) for number in range(count)]),
        columns={"label": np.arange(count) % 1000},
        crc32={"image": crc32},
        classes=tuple(str(number) for number in range(1000)),
    ).write(path.with_suffix(".idx"))


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median and quartiles of repeats."""
    # of two, only this keeps quartiles between them
    method = "exclusive" if len(values) > 2 else "inclusive"
    low, middle, high = (
        statistics.quantiles(values, n=4, method=method) if len(values) > 1 else [values[0]] * 3
    )
    return {"median": middle, "lower_quartile": low, "upper_quartile": high, "repeats": len(values)}


def record(
    benchmark: str,
    options: argparse.Namespace,
    usual: Mapping[str, Any],
    parameters: dict[str, Any],
    results: dict[str, Any],
    *,
    show: bool = True,
) -> None:
    """Append a result to ``results/<benchmark>.jsonl``, but for a dry run; print it, unless it is shown otherwise.

    ``usual`` are the options of a whole run, as `partial` takes them.
    """
    line = {
        "benchmark": benchmark,
        "command": _command(),
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        # from the environment where the tree was copied to another machine without its history
        "commit": os.environ.get("BENCHMARK_COMMIT") or commit(HERE),
        "machine": {
            "cpu": _cpu(),
            "cores": len(os.sched_getaffinity(0)),
            "system": platform.platform(),
            **_gpu(),
        },
        "versions": versions(),
        "parameters": {name: value for name, value in parameters.items() if name != "dry_run"},
        "results": results,
    }
    if less := partial(options, usual):
        line["partial"] = less
    if not options.dry_run:
        folder = HERE / "results"
        folder.mkdir(exist_ok=True)
        with (folder / f"{benchmark}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        if less:
            print(f"recorded as a partial run: {', '.join(less)}", file=sys.stderr)
    if show:
        print(json.dumps({"parameters": line["parameters"], "results": results}, indent=1))


def versions() -> dict[str, str]:
    """Return versions of memload, as it is imported, of what it stands on, and of what is set beside it."""
    found = inspection.environment() | {
        "memload": memload.__version__
    }  # a checkout need not be installed
    for name in BESIDE:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def commit(folder: Path) -> str:
    """Return the commit of a checkout by a folder in it, with "+changes" where what is measured or measures differs."""
    head = _git(folder, "rev-parse", "--short", "HEAD")
    if not head:
        return "unknown"
    top = Path(_git(folder, "rev-parse", "--show-toplevel"))
    changed = _git(top, "status", "--porcelain", "--", "memload", ":(glob)benchmarks/*.py")
    return f"{head}{'+changes' * bool(changed)}"


def _command() -> str:
    """Return the command without folders, as those of this machine say nothing to others."""
    arguments = " ".join(re.sub(r"[^ =]*/", "", argument) for argument in sys.argv)
    ranks = os.environ.get("LOCAL_WORLD_SIZE")  # torchrun's
    return f"{f'torchrun --nproc-per-node {ranks}' if ranks else 'python'} benchmarks/{arguments}"


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False
    ).stdout.strip()


def _gpu() -> dict[str, Any]:
    """Return what CUDA devices there are, if a benchmark uses torch."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return {}
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.split("\n")[
        0
    ]
    return {
        "gpu": torch.cuda.get_device_name(),
        "gpus": torch.cuda.device_count(),
        "driver": driver,
    }


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
