"""`memload plan` beside the builds that follow: the seconds that it predicts, and those that they take.

In each round a plan and its build are run one after the other, each in a process of its own. A
build is timed as a user sees it, from the start of the process to its end. Files are warm, as the
round before has read them. The predicted bytes have to be those of the build exactly. PHOTOGRAPHS
is a folder of JPEGs, by default made ones of ImageNet's sizes. The data sets are, for `--images`:

- photographs: so many links to these files, at 256×256
- large photographs: a fifth as many, enlarged to 6 megapixels, at 256×256
- small pictures: fifteen times as many JPEGs of 32×32, as they are
- PNGs: half as many of the photographs as PNG, at 224×160 with a margin
- tar: the photographs as WebDataset has them, at 128×128
- parquet: the photographs as Hugging Face has them, 100 in a row group, at 256×256

Other programs on the same cores change from one minute to the next what a build takes, and so does
the time between a plan and its build. The quartiles show that.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from build import photographs
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
    links = sorted(path for path in root.rglob("*") if not path.is_dir())
    files = sorted({path.resolve() for path in links})[:260]
    names = [str(path.relative_to(root)) for path in links]
    large = repeated(files[:20], folder / "large", max(1, count // 5), save_large)
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


def ways(options: Any, folder: Path) -> dict[str, Way]:
    """Return a plan and its build for each data set."""
    output = folder / f"planned-{os.getpid()}.bin"

    def planned(source: object, settings: list[object]) -> dict[str, float]:
        plan = json.loads(run_python("-m", "memload", "plan", source, output, *settings, "--json"))
        start = time.perf_counter()
        run_python("-m", "memload", "build", source, output, *settings, "--quiet")
        seconds = time.perf_counter() - start
        if plan["bytes"] != output.stat().st_size:
            sys.exit(f"{source}: the plan said {plan['bytes']} bytes, not {output.stat().st_size}.")
        for file in (output, output.with_suffix(".idx")):
            file.unlink()
        return {"predicted (s)": plan["seconds"], "built (s)": seconds}

    return {
        name: lambda source=source, settings=settings: planned(source, settings)
        for name, (source, settings) in sources(options, folder).items()
    }


if __name__ == "__main__":
    run_benchmark(
        ways,
        options={"photographs": Path, "images": 2000, "rounds": 5},
        quick={"images": 500, "rounds": 3},
        ratios={
            f"{name}, predicted / built": (f"{name} › predicted (s)", f"{name} › built (s)")
            for name in NAMES
        },
        facts={"files": "warm"},
    )
