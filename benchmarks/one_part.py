"""Builds one part of a build in parts and prints what its steps took. `parts.py` runs it.

Everything is memload's own but the conversion, which is left out: all rows are black and count as
converted. Their records are signed and their shards have holes in place of pixels.
"""

import argparse
import json
import os
import time
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import memload
from memload.building import preparation
from memload.building.journal import DONE
from memload.building.parts import build, joining, workspace
from memload.building.target import RowTarget

#: The functions that are timed: where they are looked up, and their names.
STEPS = {
    "list": (preparation.Preparation, "open"),
    "write list": (joining, "write_source"),
    "write plan": (workspace.PartsWorkspace, "write_plan"),
    "shards": (build, "build_locked"),
    "convert": (workspace, "convert_rows"),
    "index": (build, "complete"),
    "notes": (build, "all_notes"),
    "rename": (build, "publish"),
    "remove": (build, "remove"),
    "flush": (os, "fsync"),
}


def convert_nothing(target: RowTarget, **_: Any) -> int:
    """Record all rows of a shard as converted; return how many they are."""
    journal = target.journal
    records = np.zeros(journal.rows, journal.dtype)
    records["status"], records["size"] = DONE, target.arrays[0].shape[0]
    records["crc32"] = zlib.crc32(bytes(target.arrays[0].row_bytes))
    labels = target.source.columns["label"]
    records["column/label"] = labels[journal.first_row : journal.stop_row]
    journal.write(journal.first_row, records, [])
    return journal.rows


def main() -> None:
    """Build the part, and print seconds and counts of its steps as JSON."""
    parser = argparse.ArgumentParser()
    for name in ("source", "output"):
        parser.add_argument(name)
    for name in ("part", "parts", "side", "rows"):
        parser.add_argument(name, type=int)
    given = parser.parse_args()
    seconds: Counter[str] = Counter()
    calls: Counter[str] = Counter()

    def timed(step: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                seconds[step] += time.perf_counter() - start
                calls[step] += 1

        return call

    workspace.convert_rows = convert_nothing
    for step, (owner, name) in STEPS.items():
        setattr(owner, name, timed(step, getattr(owner, name)))
    built = timed("all", memload.build)(
        given.source,
        given.output,
        size=given.side,
        shard_size=4096 + given.rows * given.side**2 * 3,
        part=(given.part, given.parts),
        num_workers=0,
        progress=False,
    )
    # not getrusage(), which counts what the process was before it ran this program
    status = Path("/proc/self/status").read_text()
    peak = int(status.partition("VmHWM:")[2].split()[0]) / 1000
    seconds["join"] = seconds["all"] - seconds["shards"]
    print(json.dumps([seconds, calls, {"samples": built.samples, "peak (MB)": peak}]))


if __name__ == "__main__":
    main()
