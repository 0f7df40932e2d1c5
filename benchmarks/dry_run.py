"""What `memload build --dry-run` predicts, beside what the build then takes.

    python -m benchmarks.dry_run --images 8000

PHOTOGRAPHS is a folder of JPEGs; by default some are made. Five data sets come from it: a folder, a
folder with `--fast`, a folder of PNG, a tar, and a table with masks. Each way is one of them, and
its figure is the predicted time over the time of the build, both from the start of the process to
its end. Predictions are for builds longer than 20 s, so choose `--images` for that.
"""

import csv
import io
import json
import os
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks.build import photographs
from benchmarks.harness import Way, run_benchmark, run_python


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _pngs(images: Path, folder: Path, side: int) -> Path:
    for number, file in enumerate(_files(images)):
        path = folder / "all" / f"{number:06d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        with Image.open(file) as image:
            image.convert("RGB").resize((side, side)).save(path, compress_level=1)
    return folder


def _tar(images: Path, path: Path) -> Path:
    with tarfile.open(path, "w") as tar:
        for number, file in enumerate(_files(images)):
            content = file.read_bytes()
            for ending, data in (("jpg", content), ("cls", str(number % 10).encode())):
                member = tarfile.TarInfo(f"{number:06d}.{ending}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return path


def _table(images: Path, path: Path) -> Path:
    masks = path.parent / "masks"
    masks.mkdir(exist_ok=True)
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["file_name", "seg", "label"])
        for number, image in enumerate(_files(images)):
            mask = masks / f"{number:06d}.png"
            with Image.open(image) as opened:
                opened.convert("L").save(mask, compress_level=1)
            table.writerow([image, mask, number % 10])
    return path


def _made(path: Path, make: Callable[[Path], Path]) -> Path:
    return path if path.exists() else make(path)


def ways(options: Any, folder: Path) -> dict[str, Way]:
    """Return a way for each data set."""
    images = photographs(options.photographs, folder, options.images)
    side = options.side
    sources = {
        "folder": (images, []),
        "fast": (images, ["--fast"]),
        "png": (_made(folder / "png", lambda path: _pngs(images, path, 2 * side)), []),
        "tar": (_made(folder / "images.tar", lambda path: _tar(images, path)), []),
        "table": (
            _made(folder / "table.csv", lambda path: _table(images, path)),
            ["--mask", "mask=seg"],
        ),
    }

    def way(source: Path, given: list[str]) -> dict[str, float]:
        output = folder / f"dry-run-{os.getpid()}.bin"
        command = ("-m", "memload", "build", source, output, "--size", side, *given)
        predicted = json.loads(run_python(*command, "--dry-run", "--json"))["seconds"]
        start = time.perf_counter()
        run_python(*command, "--quiet")
        seconds = time.perf_counter() - start
        for file in folder.glob(f"{output.stem}.*"):
            file.unlink()
        return {"predicted over true": predicted / seconds, "build (s)": seconds}

    return {
        name: lambda source=source, given=given: way(source, given)
        for name, (source, given) in sources.items()
    }


if __name__ == "__main__":
    run_benchmark(
        ways,
        options={"photographs": None, "images": 8000, "side": 256, "rounds": 3},
        quick={"images": 500, "rounds": 1},
        facts={"files": "warm"},
    )
