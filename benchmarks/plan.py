"""`memload plan` beside the builds that follow: the seconds that it predicts, and those that they take.

In each round a plan and its build are run one after the other, each in a process of its own. A
build is timed as a user sees it, from the start of the process to its end. Files are in RAM, as the
round before has read them, or with `--pages cold` they are dropped from it before each plan and
before each build. The predicted bytes have to be those of the build exactly. PHOTOGRAPHS is a
folder of JPEGs, by default made ones of ImageNet's sizes. The data sets are, for `--images`:

- photographs: so many links to these files, or copies if they are to be cold, at 256×256
- large photographs: a fifth as many, enlarged to 6 megapixels, at 256×256
- small pictures: fifteen times as many JPEGs of 32×32, as they are
- PNGs: half as many of the photographs as PNG, at 224×160 with a margin
- tar: the photographs as WebDataset has them, at 128×128
- parquet: the photographs as Hugging Face has them, 100 in a row group, at 256×256

Other programs on the same cores change from one minute to the next what a build takes, also between
a plan and its build. The quartiles show that, and so does "others (cores)": how many cores other
processes had while a plan and its build ran.
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from build import photographs
from disk import drop_from_page_cache
from harness import Way, run_benchmark, run_python
from PIL import Image
from sources import write_parquet, write_tar

LARGE = (3000, 2000)
NAMES = ("photographs", "large photographs", "small pictures", "PNGs", "tar", "parquet")


def converted(files: list[Path], folder: Path, count: int, save: Callable[..., None]) -> Path:
    """Write so many pictures in ten classes, unless they are there; those of some files repeat."""
    if not folder.exists():
        for number in range(count):
            path = folder / f"class{number % 10}" / f"{number:06d}"
            path.parent.mkdir(parents=True, exist_ok=True)
            with Image.open(files[number % len(files)]) as image:
                save(image.convert("RGB"), path)
    return folder


def repeated(files: list[Path], folder: Path, count: int, save: Callable[..., None]) -> Path:
    """Write each of some pictures once, and link to them until there are so many."""
    originals = converted(files, folder.with_name(f"{folder.name}-once"), len(files), save)
    return photographs(originals, folder.parent, count)


def save_large(image: Image.Image, path: Path) -> None:
    """Save a picture of 6 megapixels."""
    image.resize(LARGE, Image.Resampling.BICUBIC).save(path.with_suffix(".jpg"), quality=90)


def save_small(image: Image.Image, path: Path) -> None:
    """Save a picture of 32×32."""
    image.resize((32, 32)).save(path.with_suffix(".jpg"))


def save_png(image: Image.Image, path: Path) -> None:
    """Save a picture without loss."""
    image.save(path.with_suffix(".png"))


def sources(options: Any, folder: Path) -> dict[str, tuple[object, list[object]]]:
    """Return a source and the options of its build, by name."""
    count = options.images
    root = photographs(options.photographs, folder, count)
    if options.pages == "cold":  # of a link, the file would be warm when another one has led to it
        copies = folder / f"{root.name}-copies"
        root = copies if copies.exists() else Path(shutil.copytree(root, copies))
    links = sorted(path for path in root.rglob("*") if not path.is_dir())
    files = sorted({path.resolve() for path in links})[:260]
    names = [str(path.relative_to(root)) for path in links]
    several = converted if options.pages == "cold" else repeated
    large = several(files[:20], folder / f"large-{options.pages}", max(1, count // 5), save_large)
    found: dict[str, tuple[object, list[object]]] = {
        "photographs": (root, []),
        "large photographs": (large, []),
        "small pictures": (
            converted(files, folder / f"small-{count}", 15 * count, save_small),
            ["--size", 32],
        ),
        "PNGs": (
            converted(files, folder / f"png-{count}", max(1, count // 2), save_png),
            ["--size", "224x160", "--fit", "pad"],
        ),
        "tar": (write_tar(root, names, folder / "pictures"), ["--size", 128]),
    }
    if find_spec("pyarrow"):
        found["parquet"] = (write_parquet(root, names, folder / "pictures", 100), [])
    return found


def drop(source: Path) -> None:
    """Remove a file, or all files of a folder, from the page cache."""
    for path in source.rglob("*") if source.is_dir() else [source]:
        if not path.is_dir():
            drop_from_page_cache(path)


class OtherProcesses:
    """Tells how many cores processes had that are not this one's, since it was made."""

    def __init__(self) -> None:
        self.begin, self.others = time.perf_counter(), self._seconds()

    def _seconds(self) -> float:
        """Return the CPU time of all processes without this one and its children that have ended."""
        user, nice, system, _, _, *interrupts = Path("/proc/stat").read_text().split()[1:9]
        ticks = sum(map(int, (user, nice, system, *interrupts)))
        return ticks / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])

    def cores(self) -> float:
        """Return their CPU time a second."""
        return max(0.0, self._seconds() - self.others) / (time.perf_counter() - self.begin)


def ways(options: Any, folder: Path) -> dict[str, Way]:
    """Return a plan and its build for each data set."""
    output = folder / f"planned-{os.getpid()}.bin"
    is_cold = options.pages == "cold"

    def planned(source: object, settings: list[object]) -> dict[str, float]:
        if is_cold:
            drop(Path(str(source)))
        others = OtherProcesses()
        plan = json.loads(run_python("-m", "memload", "plan", source, output, *settings, "--json"))
        if is_cold:
            drop(Path(str(source)))
        start = time.perf_counter()
        run_python("-m", "memload", "build", source, output, *settings, "--quiet")
        seconds = time.perf_counter() - start
        other_cores = others.cores()
        if plan["bytes"] != output.stat().st_size:
            sys.exit(f"{source}: the plan said {plan['bytes']} bytes, not {output.stat().st_size}.")
        for file in (output, output.with_suffix(".idx")):
            file.unlink()
        return {
            "predicted (s)": plan["seconds"],
            "built (s)": seconds,
            "others (cores)": other_cores,
        }

    return {
        name: lambda source=source, settings=settings: planned(source, settings)
        for name, (source, settings) in sources(options, folder).items()
    }


if __name__ == "__main__":
    run_benchmark(
        ways,
        options={"photographs": Path, "images": 2000, "rounds": 5, "pages": ("warm", "cold")},
        quick={"images": 500, "rounds": 3},
        ratios={
            f"{name}, predicted / built": (f"{name} › predicted (s)", f"{name} › built (s)")
            for name in NAMES
        },
    )
