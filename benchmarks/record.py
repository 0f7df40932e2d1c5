"""What benchmarks share: pictures of noise, and a result with where it was got, as a line of JSON in ``results/``."""

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from memload import inspection

HERE = Path(__file__).parent


class Noise:
    """Random pictures of one size, each from its own number."""

    def __init__(self, count: int, side: int) -> None:
        self.count, self.side = count, side

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return np.random.default_rng(index).integers(0, 256, (self.side, self.side, 3), np.uint8), index % 1000


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median and quartiles of repeats."""
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return {"median": middle, "lower_quartile": low, "upper_quartile": high, "repeats": len(values)}


def record(benchmark: str, parameters: dict[str, Any], results: dict[str, Any]) -> None:
    """Print a result and append it to ``results/<benchmark>.jsonl``."""
    line = {
        "benchmark": benchmark,
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": _git("rev-parse", "--short", "HEAD")
        + ("+changes" if _git("status", "--porcelain", "memload") else ""),
        "machine": {"cpu": _cpu(), "cores": len(os.sched_getaffinity(0)), "system": platform.platform()},
        "versions": inspection.environment(),
        "parameters": parameters,
        "results": results,
    }
    folder = HERE / "results"
    folder.mkdir(exist_ok=True)
    with (folder / f"{benchmark}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(json.dumps({"parameters": parameters, "results": results}, indent=1))


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(HERE), *arguments], capture_output=True, text=True, check=False
    ).stdout.strip()


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
