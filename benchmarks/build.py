"""`memload build` beside bare loops that store the same rows on all cores.

Both are timed as a user sees them, from the start of the process to its end. The bare loops are one
process per core. Each starts Python and Pillow, reads its share of the files, decodes, resizes and
crops them as memload does, computes their checksums, writes them into one file and flushes it. Files
are warm. PHOTOGRAPHS is a folder of JPEGs, by default made ones of ImageNet's sizes; its files are
repeated under other names until there are `--images`. `cores` is the CPU time of all processes
over the time, which shows whether other work has disturbed a run; `ratio of CPU time` is not
disturbed by it.
"""

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import Way, run_benchmark, run_python
from pictures import find_jpegs

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


def ways(options: Any, folder: Path) -> dict[str, Way]:
    """Return a build and the bare loops."""
    images = photographs(options.photographs, folder, options.images)
    output = folder / f"built-by-{os.getpid()}.bin"
    cores = len(os.sched_getaffinity(0))

    def measured(run: Callable[[], None]) -> dict[str, float]:
        start, before = time.perf_counter(), _cpu_of_children()
        run()
        seconds, used = time.perf_counter() - start, _cpu_of_children() - before
        for file in output.parent.glob(f"{output.stem}.*"):
            file.unlink()
        return {
            "images/s": options.images / seconds,
            "images per second of CPU": options.images / used,
            "cores": used / seconds,
        }

    def build() -> None:
        settings = ["--size", options.side, "--quiet", *["--fast"] * options.fast]
        run_python("-m", "memload", "build", images, output, *settings)

    def loop() -> None:
        shares = [(options.side, options.fast, number, cores) for number in range(cores)]
        loops = [
            subprocess.Popen([sys.executable, "-c", LOOP, *map(str, (*share, images, output))])
            for share in shares
        ]
        if sum(process.wait() for process in loops):
            sys.exit("A bare loop failed.")

    return {"memload": lambda: measured(build), "bare": lambda: measured(loop)}


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    run_benchmark(
        ways,
        options={"photographs": Path, "images": 3000, "side": 256, "fast": False, "rounds": 5},
        quick={"images": 1000},
        ratios={
            "ratio": ("memload › images/s", "bare › images/s"),
            "ratio of CPU time": (
                "memload › images per second of CPU",
                "bare › images per second of CPU",
            ),
        },
        facts={"files": "warm"},
    )
