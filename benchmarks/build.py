"""`memload build` beside bare loops that decode and resize the same files on all cores.

Both are timed as a user sees them, from the start of the process to its end. The bare loops are one
process a core; each starts Python and Pillow, reads its share of the files, decodes, resizes and
crops as memload does, and throws the pixels away: it checks nothing and writes nothing. Files are
warm. PHOTOGRAPHS is a folder of JPEGs, by default made ones of ImageNet's sizes; its files are
repeated under other names until there are `--images`.
"""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from harness import Way, run_benchmark, run_python
from pictures import find_jpegs

LOOP = """
import sys
from PIL import Image

side, fast, number, loops, folder = int(sys.argv[1]), sys.argv[2] == "True", *sys.argv[3:]
with open(f"{folder}.txt") as listed:
    files = listed.read().splitlines()[int(number) :: int(loops)]
for file in files:
    with Image.open(file) as image:
        scale = side / min(image.size)
        width, height = (max(side, int(length * scale)) for length in image.size)
        left, top = round((width - side) / 2), round((height - side) / 2)
        if not fast:
            whole = image.convert("RGB").resize((width, height), Image.Resampling.BILINEAR)
            whole.crop((left, top, left + side, top + side)).tobytes()
            continue
        full = image.size
        drafted = image.draft(image.mode, (2 * width, 2 * height))
        across, down = (drafted[1][2:] if drafted else full)
        box = (left * across / width, top * down / height,
               min((left + side) * across / width, image.width),
               min((top + side) * down / height, image.height))
        image.convert("RGB").resize((side, side), Image.Resampling.BILINEAR, box=box).tobytes()
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

    def build() -> float:
        settings = ["--size", options.side, "--quiet", *["--fast"] * options.fast]
        start = time.perf_counter()
        run_python("-m", "memload", "build", images, output, *settings)
        seconds = time.perf_counter() - start
        for file in (output, output.with_suffix(".idx")):
            file.unlink()
        return options.images / seconds

    def loop() -> float:
        start = time.perf_counter()
        shares = [(options.side, options.fast, number, cores, images) for number in range(cores)]
        loops = [
            subprocess.Popen([sys.executable, "-c", LOOP, *map(str, share)]) for share in shares
        ]
        if sum(process.wait() for process in loops):
            sys.exit("A bare loop failed.")
        return options.images / (time.perf_counter() - start)

    return {"memload": build, "bare": loop}


if __name__ == "__main__":
    run_benchmark(
        ways,
        options={"photographs": Path, "images": 3000, "side": 256, "fast": False, "rounds": 5},
        quick={"images": 1000},
        ratios={"ratio": ("memload", "bare")},
        facts={"files": "warm"},
    )
