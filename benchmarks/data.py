"""What the benchmarks read: data sets of noise, and JPEGs."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

import memload


def noise_dataset(folder: Path, count: int, side: int) -> Path:
    """Build a data set of random pixels, unless it is there from an earlier run; return its path.

    500 pictures repeat, which takes less time than new ones.
    """
    path = folder / f"noise-{count}-{side}.bin"
    if path.with_suffix(".idx").exists():
        return path
    pictures = np.random.default_rng(0).integers(0, 256, (500, side, side, 3), np.uint8)
    pixels, labels = folder / "pixels.npy", folder / "labels.npy"
    rows = np.lib.format.open_memmap(pixels, "w+", np.uint8, (count, side, side, 3))
    for start in range(0, count, len(pictures)):
        rows[start : start + len(pictures)] = pictures[: count - start]
    del rows
    np.save(labels, np.arange(count) % 1000)
    memload.build(pixels, path, label=labels, progress=False)
    pixels.unlink()
    return path


def made_pictures(folder: Path, count: int, **options: Any) -> list[Path]:
    """Write photograph-like JPEGs, a folder for each class; return them."""
    sys.path.append(str(Path(__file__).parents[1] / "scripts"))
    from photographs import write_folder

    return write_folder(folder, count, **options)


def find_jpegs(given: Path | None, folder: Path, count: int) -> list[Path]:
    """Return the JPEGs below the folder given; without one, write photograph-like ones."""
    if given is None:
        return made_pictures(folder, count)
    files = sorted(path for path in given.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    if not files:
        sys.exit(f"There are no JPEGs in {given}. Give a folder that has some.")
    return files


def planes(path: str | Path, side: int) -> torch.Tensor:
    """Return the pixels, (3, side, side), that Pillow decodes and torchvision would resize and crop."""
    with Image.open(path) as opened:
        image = opened.convert("RGB")
    short = min(image.size)
    width, height = (side if size == short else int(side * size / short) for size in image.size)
    left, top = round((width - side) / 2), round((height - side) / 2)
    image = image.resize((width, height), Image.Resampling.BILINEAR)
    image = image.crop((left, top, left + side, top + side))
    return torch.from_numpy(np.asarray(image).transpose(2, 0, 1).copy())


class Numbered(Dataset[tuple[Any, int]]):
    """What a function makes of each item, and the item's number."""

    def __init__(self, items: Any, load: Callable[[Any], Any]) -> None:
        self.items, self.load = items, load

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, number: int) -> tuple[Any, int]:
        return self.load(self.items[number]), number
