"""Building a data set.

    python -m benchmarks.build build --images photographs/ [--fast]
    python -m benchmarks.build fidelity --images photographs/

- build: `memload build` beside bare loops that store the same rows on all cores, both as a user sees
  them, from the start of the process to its end. The bare loops are one process per core; each
  starts Python and Pillow, reads its share of the files, decodes, resizes and crops as memload does,
  computes checksums, writes into one file and flushes it. Files are warm. Other work on the machine
  does not disturb the ratio of CPU time. The JPEGs below ``--images``, or made ones of
  ImageNet's sizes, are repeated under other names until there are ``--count``.
- fidelity: the share of pictures that are stored equal to those made without memload (decoded by
  Pillow, with torchvision's arithmetic of Resize and CenterCrop), and the median and the least PSNR
  in dB; equal pictures count as 99.
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

import memload
from benchmarks.data import EQUAL, find_jpegs, psnr, resized
from benchmarks.harness import CORES, Way, cpu_of_children, run_one_of, run_python

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
        settings = ["--size", options.side, "--quiet", *["--fast"] * options.fast]
        run_python("-m", "memload", "build", images, output, *settings)

    def bare() -> None:
        shares = [(options.side, options.fast, n, CORES, images, output) for n in range(CORES)]
        commands = [[sys.executable, "-c", LOOP, *map(str, share)] for share in shares]
        loops = [subprocess.Popen(command) for command in commands]
        if sum(process.wait() for process in loops):
            sys.exit("A bare loop failed.")

    return {"memload": lambda: measured(by_memload), "bare": lambda: measured(bare)}


def reference(path: Path, side: int) -> np.ndarray:
    """Return a picture of side × side, made without memload."""
    return resized(ImageOps.exif_transpose(Image.open(path)).convert("RGB"), side)


def fidelity(options: Any, folder: Path) -> dict[str, Way]:
    """Return how near to the reference each kind of build is."""
    images = options.images or folder / "made"
    find_jpegs(options.images, images, 240)
    wanted = [reference(images / key, options.side) for key in memload.open_source(images).keys]

    def compare(decoder: Any, fast: bool) -> dict[str, float]:
        output, settings = folder / "pixels.bin", {"decoder": decoder, "fast": fast}
        memload.build(images, output, size=options.side, overwrite=True, progress=False, **settings)
        stored = np.load(output, mmap_mode="r")
        decibels = [psnr(one, other) for one, other in zip(wanted, stored, strict=True)]
        equal = sum(value == EQUAL for value in decibels) / len(decibels)
        middle, least = statistics.median(decibels), min(decibels)
        return {"share of equal pictures": equal, "median PSNR": middle, "least PSNR": least}

    def way(fast: bool) -> Way:
        return lambda: compare(options.decoder, fast)

    return {options.decoder: way(False), f"{options.decoder}, fast": way(True)}


if __name__ == "__main__":
    run_one_of({
        "build": {
            "ways": build,
            "options": {"images": None, "count": 1500, "side": 256, "fast": False, "rounds": 5},
            "quick": {"count": 300},
            "ratios": {
                "ratio": ("memload › images/s", "bare › images/s"),
                "ratio of CPU time": (
                    "memload › images per second of CPU",
                    "bare › images per second of CPU",
                ),
            },
            "facts": {"files": "warm"},
        },
        "fidelity": {
            "ways": fidelity,
            "options": {"images": None, "side": 256, "decoder": ("pillow", "jpeg4py"), "rounds": 1},
            "quick": {"side": 64},
        },
    })  # fmt: skip
