"""Building a data set.

    python -m benchmarks.build build --images photographs/ [--fast]

`memload build` stands beside bare loops that store the same rows on all cores, both as a user sees
them, from the start of the process to its end. The bare loops are one process per core; each starts
Python and Pillow, reads its share of the files, decodes, resizes and crops as memload does, computes
checksums, writes into one file and flushes it. Files are warm. Other work on the machine does not
disturb the ratio of CPU time. The JPEGs below ``--images``, or made ones of ImageNet's sizes, are
repeated under other names until there are ``--count``.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.data import find_jpegs
from benchmarks.harness import CORES, Benchmark, Way, cpu_of_children, run

LOOP = """
import os, sys, zlib
from PIL import Image

side, fast, number, loops, folder, output = int(sys.argv[1]), sys.argv[2] == "True", *sys.argv[3:]
number, loops = int(number), int(loops)
with open(f"{folder}.txt") as listed:
    files = listed.read().splitlines()
descriptor = os.open(output, os.O_RDWR | os.O_CREAT, 0o644)
for row in range(number, len(files), loops):
    with Image.open(files[row]) as image:
        scale = side / min(image.size)
        width, height = (max(side, int(length * scale)) for length in image.size)
        left, top = round((width - side) / 2), round((height - side) / 2)
        if fast:
            image.draft(image.mode, (2 * width, 2 * height))
        whole = image.convert("RGB").resize((width, height), Image.Resampling.BILINEAR)
        pixels = whole.crop((left, top, left + side, top + side)).tobytes()
    zlib.crc32(pixels)
    os.pwrite(descriptor, pixels, 4096 + row * len(pixels))
os.fsync(descriptor)
"""


def photographs(given: Path | None, folder: Path, count: int) -> Path:
    """Return a folder with so many photographs, which are links to those of the folder given."""
    made = folder / f"photographs-{count}-of-{given.resolve().name if given else 'made'}"
    if made.exists():
        return made
    files = find_jpegs(given, folder / "originals", min(count, 64))
    links = []
    for number in range(count):
        file = files[number % len(files)]
        links.append(made / file.parent.name / f"{number // len(files):04d}_{file.name}")
        links[-1].parent.mkdir(parents=True, exist_ok=True)
        links[-1].symlink_to(file.resolve())
    made.with_name(f"{made.name}.txt").write_text("\n".join(map(str, links)))
    return made


def build(options: Any, folder: Path) -> dict[str, Way]:
    """Return a build and the bare loops."""
    images = photographs(options.images, folder, options.count)
    output = folder / f"built-by-{os.getpid()}.bin"

    def measured(run: Callable[[], None]) -> dict[str, float]:
        start, before = time.perf_counter(), cpu_of_children()
        run()
        seconds, used = time.perf_counter() - start, cpu_of_children() - before
        for file in output.parent.glob(f"{output.stem}.*"):
            file.unlink()
        return {
            "images/s": options.count / seconds,
            "images per second of CPU": options.count / used,
        }

    def by_memload() -> None:
        settings = ["--size", str(options.side), "--quiet", *["--fast"] * options.fast]
        command = [sys.executable, "-m", "memload", "build", str(images), str(output), *settings]
        subprocess.run(command, check=True)

    def bare() -> None:
        shares = [(options.side, options.fast, n, CORES, images, output) for n in range(CORES)]
        commands = [[sys.executable, "-c", LOOP, *map(str, share)] for share in shares]
        loops = [subprocess.Popen(command) for command in commands]
        if sum(process.wait() for process in loops):
            sys.exit("A bare loop failed.")

    return {"memload": lambda: measured(by_memload), "bare": lambda: measured(bare)}


PAIRS = {"ratio": "images/s", "ratio of CPU time": "images per second of CPU"}
BENCHMARKS = {
    "build": Benchmark(
        build,
        {"images": None, "count": 1500, "side": 256, "fast": False, "rounds": 5},
        quick={"count": 300},
        ratios={name: (f"memload › {it}", f"bare › {it}") for name, it in PAIRS.items()},
        facts={"files": "warm"},
    )
}

if __name__ == "__main__":
    run(BENCHMARKS)
