"""What benchmarks share: pictures of noise, and a result with where it was got, as a line of JSON in ``results/``."""

import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from memload import inspection
from memload.format import HEADER_BYTES, npy_header
from memload.index import Array, Index, Shard
from memload.keys import Keys

HERE = Path(__file__).parent


class Noise:
    """Random pictures of one size, each from its own number."""

    def __init__(self, count: int, side: int) -> None:
        self.count, self.side = count, side

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return np.random.default_rng(index).integers(0, 256, (self.side, self.side, 3), np.uint8), index % 1000


def noise_dataset(path: Path, count: int, side: int) -> None:
    """Write a data set of noise faster than a build would: blocks of 500 pictures that differ in their first bytes."""
    shape = (side, side, 3)
    block = np.random.default_rng(0).integers(0, 256, (min(500, count), *shape), np.uint8)
    crc32 = np.empty(count, np.uint32)
    with path.open("wb") as file:
        file.write(npy_header("|u1", (count, *shape)))
        for start in range(0, count, len(block)):
            part = block[: count - start]
            part[:, 0, 0] = np.arange(start, start + len(part)).astype("<u4").view(np.uint8).reshape(-1, 4)[:, :3]
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
    low, middle, high = statistics.quantiles(values, n=4, method=method) if len(values) > 1 else [values[0]] * 3
    return {"median": middle, "lower_quartile": low, "upper_quartile": high, "repeats": len(values)}


def record(benchmark: str, parameters: dict[str, Any], results: dict[str, Any], *, show: bool = True) -> None:
    """Append a result to ``results/<benchmark>.jsonl``; print it, unless it is shown otherwise."""
    line = {
        "benchmark": benchmark,
        # folders of this machine say nothing to others
        "command": f"python benchmarks/{' '.join(re.sub(r'[^ =]*/', '', argument) for argument in sys.argv)}",
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        # from the environment where the tree was copied to another machine without its history
        "commit": os.environ.get("BENCHMARK_COMMIT")
        or _git("rev-parse", "--short", "HEAD") + ("+changes" if _git("status", "--porcelain", "memload") else ""),
        "machine": {"cpu": _cpu(), "cores": len(os.sched_getaffinity(0)), "system": platform.platform(), **_gpu()},
        "versions": inspection.environment(),
        "parameters": parameters,
        "results": results,
    }
    folder = HERE / "results"
    folder.mkdir(exist_ok=True)
    with (folder / f"{benchmark}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    if show:
        print(json.dumps({"parameters": parameters, "results": results}, indent=1))


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(HERE), *arguments], capture_output=True, text=True, check=False
    ).stdout.strip()


def _gpu() -> dict[str, Any]:
    """Return what CUDA devices there are, if a benchmark uses torch."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return {}
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.split("\n")[0]
    return {"gpu": torch.cuda.get_device_name(), "gpus": torch.cuda.device_count(), "driver": driver}


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
