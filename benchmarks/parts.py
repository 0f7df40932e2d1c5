"""What a build in parts takes besides converting: for 1.28 million rows in 313 shards and 64 parts,
and for a tenth of all of these.

The source is a folder of `--rows` empty files in 1,000 class folders, so that it is listed as a
real one. Each part is a process of its own, as on a machine of its own; they run one after another.
All steps are those of a real build, except that nothing is converted (see one_part.py): rows are
black, of 32×32 pixels, and take no room. Times of the parts between the first and the last are
medians, and so are those of a shard. Files are warm, and the disk is a local one: on a file system
of a network each file that is opened, flushed or renamed takes a message to its server.

"100,000,000 rows, extrapolated" continues the line through both sizes, with the same number of rows in a shard.

"one machine" is what the locks, journals and flushes of parts cost where nothing is shared:
`memload build --part 0/1` beside the same without it, of `--images` made photographs in ten shards,
from the start of the process to its end.
"""

import functools
import json
import os
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from build import photographs
from harness import HERE, Way, run_benchmark, run_python

CLASSES, SIDE = 1000, 32
#: How many rows the plan is for.
PLANNED = 100_000_000
#: What the first, another and the last part do, as sums of the steps of one_part.py.
TIMES = {
    "first part: list the source": ("first", ["list"]),
    "first part: write the list, the names and the plan": ("first", ["write list", "write plan"]),
    "each other part: read and compare the list": ("other", ["join"]),
    "last part: join journals, statistics, index": ("last", ["index"]),
    "last part: notes": ("last", ["notes"]),
    "last part: rename, remove the folder": ("last", ["rename", "remove"]),
}


def empty_pictures(folder: Path, count: int) -> Path:
    """Return a folder of empty files, named as ImageNet's, unless an earlier run has made it."""
    root = folder / f"empty-pictures-{count}"
    if root.exists():
        return root
    for label in range(CLASSES):
        name = f"n{label:08d}"
        (root / name).mkdir(parents=True)
        for number in range(count * label // CLASSES, count * (label + 1) // CLASSES):
            os.close(os.open(root / name / f"{name}_{number}.JPEG", os.O_CREAT | os.O_WRONLY))
    return root


def run_part(root: Path, output: Path, part: int, parts: int, rows: int) -> list[dict[str, float]]:
    """Build a part in a process; return seconds and calls by step, and further facts."""
    return json.loads(run_python(HERE / "one_part.py", root, output, part, parts, SIDE, rows))


def build_in_parts(root: Path, rows: int, parts: int, per_shard: int) -> dict[str, float]:
    """Build all parts; return the figures of their steps."""
    output = root.with_name(f"{root.name}-by-{os.getpid()}.bin")
    folder = output.with_suffix(".building")
    found = [run_part(root, output, part, parts, per_shard) for part in range(parts - 1)]
    sizes = {name: (folder / name).stat().st_size / 1e6 for name in ("source", "keys")}
    journals = [path.stat().st_size / 1e6 for path in folder.glob("shards/*/rows")]
    files = sum(len(names) for _, _, names in os.walk(folder))
    found.append(run_part(root, output, parts - 1, parts, per_shard))
    if found[-1][2]["samples"] != rows:
        raise SystemExit(f"{output} has {found[-1][2]['samples']} samples instead of {rows}.")
    index = output.with_suffix(".idx").stat().st_size / 1e6
    for path in output.parent.glob(f"{output.stem}*"):
        path.unlink()
    return {
        **figures_of_steps(found),
        "on the disk › list of the source (MB)": sizes["source"],
        "on the disk › names (MB)": sizes["keys"],
        "on the disk › journals of all shards (MB)": sum(journals) * parts / (parts - 1),
        "on the disk › index (MB)": index,
        "on the disk › files": files,
        "on the disk › flushes": sum(calls["flush"] for _, calls, _ in found),
    }


def figures_of_steps(found: list[list[dict[str, float]]]) -> dict[str, float]:
    """Return the times and the memory of the first, the last and the other parts."""
    first, *others, last = found
    figures: dict[str, float] = {}
    for name, (which, steps) in TIMES.items():
        members = {"first": [first], "other": others, "last": [last]}[which]
        values = [sum(seconds.get(step, 0) for step in steps) for seconds, _, _ in members]
        figures[f"time (s) › {name}"] = statistics.median(values)
    for name, members in {"first": [first], "each other": others, "last": [last]}.items():
        peak = statistics.median(facts["peak (MB)"] for _, _, facts in members)
        figures[f"peak memory (MB) › {name} part"] = peak
    a_shard = [
        1000 * (seconds["shards"] - seconds["convert"]) / calls["shards"]
        for seconds, calls, _ in others
    ]
    return {**figures, "a shard › journal, seal, flushes (ms)": statistics.median(a_shard)}


def simulate(roots: Mapping[int, Path], parts: int, per_shard: int) -> dict[str, float]:
    """Return the figures of builds of both sizes, and where the line through them leads."""
    (few, small), (many, large) = roots.items()
    least = build_in_parts(small, few, max(3, parts // 10), per_shard)
    most = build_in_parts(large, many, parts, per_shard)
    found: dict[str, float] = {}
    for name, value in most.items():
        found[f"{name} › {few:,} rows"], found[f"{name} › {many:,} rows"] = least[name], value
        if not name.startswith("a shard"):  # which does not grow with the number of rows
            slope = (value - least[name]) / (many - few)
            found[f"{name} › {PLANNED:,} rows, extrapolated"] = value + slope * (PLANNED - many)
    return found


def ways(options: Any, folder: Path) -> dict[str, Way]:
    """Return the build of empty pictures, and builds by one machine with and without parts."""
    roots = {rows: empty_pictures(folder, rows) for rows in (options.rows // 10, options.rows)}
    images = photographs(None, folder, options.images)
    output = folder / f"built-by-{os.getpid()}.bin"

    def build(*arguments: str) -> float:
        shard_size = 4096 + -(-options.images // 10) * 256**2 * 3
        settings = ["--shard-size", shard_size, "--quiet", *arguments]
        start = time.perf_counter()
        run_python("-m", "memload", "build", images, output, *settings)
        seconds = time.perf_counter() - start
        for path in folder.glob(f"{output.stem}*"):
            path.unlink()
        return options.images / seconds

    return {
        "": functools.partial(simulate, roots, options.parts, options.shard),
        "one machine › without --part": build,
        "one machine › --part 0/1": lambda: build("--part", "0/1"),
    }


if __name__ == "__main__":
    run_benchmark(
        ways,
        options={"rows": 1_281_167, "shard": 4096, "parts": 64, "images": 2000, "rounds": 2},
        quick={"rows": 128_117, "parts": 6, "images": 500},
        ratios={
            "one machine › --part 0/1 / without": (
                "one machine › --part 0/1",
                "one machine › without --part",
            )
        },
        facts={"files": "warm", "disk": "local"},
    )
