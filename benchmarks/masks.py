"""Images and masks through the Loader, beside a copy of the same bytes, all in one run.

Noise of 224×224×3 with masks of 224×224 in batches of 256; random order, pages warm, whole epochs
with the loop included, the device waited for at the end, images a second. Each image comes with its
mask, or without one where "images alone" says so.

Limits: on CUDA two copies from page-locked memory, of the images and of the masks of a batch, and
for `resident` two calls of `torch.index_select` on the device. On the CPU `np.take` into buffers
that are used again.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from data import noise_dataset
from harness import Way, rate, run_benchmark, settle

import memload

IS_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if IS_CUDA else torch.device("cpu")
FEEDS = ("dma", "resident", "pinned") if IS_CUDA else ("cpu",)
COPY = "copy" if IS_CUDA else "np.take"
LIMITS = {"resident": "index_select"}
WITHOUT = ", images alone"
LEAST_SECONDS = 0.25


def wait() -> None:
    """Wait for the device."""
    if IS_CUDA:
        torch.cuda.synchronize()


def copies(stored: list[np.ndarray], batch: int, passes: int) -> Way:
    """Return copies of a batch from page-locked memory, two batches in turn."""
    shapes = [(batch, *rows.shape[1:]) for rows in stored]
    pinned = [[torch.empty(s, dtype=torch.uint8, pin_memory=True) for s in shapes] for _ in "ab"]
    out = [[torch.empty(s, dtype=torch.uint8, device=DEVICE) for s in shapes] for _ in "ab"]
    stream = torch.cuda.Stream()

    def copy() -> int:
        with torch.cuda.stream(stream):
            for number in range(passes):
                for target, source in zip(out[number % 2], pinned[number % 2], strict=True):
                    target.copy_(source, non_blocking=True)
        return passes * batch

    return rate(copy, wait, LEAST_SECONDS)


def selections(stored: list[np.ndarray], batch: int) -> Way:
    """Return what gathers batches of rows that are on the device already."""
    count = len(stored[0]) // batch * batch
    resident = [torch.from_numpy(rows[:]).to(DEVICE).view(len(rows), -1) for rows in stored]
    random = np.random.default_rng(1)

    def select() -> int:
        chosen = torch.from_numpy(random.permutation(len(stored[0]))[:count]).to(DEVICE)
        for part in chosen.split(batch):
            for rows in resident:
                torch.index_select(rows, 0, part)
        return count

    return rate(select, wait, LEAST_SECONDS)


def takes(stored: list[np.ndarray], batch: int) -> Way:
    """Return what gathers batches into buffers on the CPU."""
    count = len(stored[0]) // batch * batch
    buffers = [np.empty((batch, *rows.shape[1:]), np.uint8) for rows in stored]
    random = np.random.default_rng(1)

    def take() -> int:
        for part in np.split(random.permutation(len(stored[0]))[:count], count // batch):
            for rows, buffer in zip(stored, buffers, strict=True):
                np.take(rows, part, axis=0, out=buffer, mode="clip")
        return count

    return rate(take, least_seconds=LEAST_SECONDS)


def ways(options: Any, folder: Path) -> dict[str, Way]:
    """Return the limits and an epoch of each Loader, with masks and without."""
    path = noise_dataset(folder, options.images, options.side, masks=True)
    dataset, batch = memload.MemmapDataset(path), options.batch
    files = [np.load(file, mmap_mode="c") for file in (path, path.with_suffix(".mask.bin"))]
    found: dict[str, Way] = {}
    for kind, columns, stored in (
        ("", ["label", "mask"], files),
        (WITHOUT, ["label"], files[:1]),
    ):
        if IS_CUDA:
            found[f"copy{kind}"] = copies(stored, batch, max(50, len(dataset) // batch))
            found[f"index_select{kind}"] = selections(stored, batch)
        else:
            found[f"np.take{kind}"] = takes(stored, batch)
        for feed in FEEDS:
            settings: dict[str, Any] = {"shuffle": True, "columns": columns, "device": DEVICE}
            loader = memload.Loader(dataset, batch, feed=feed, **settings)
            if feed == "dma":
                settle(loader)
            found[f"{feed}{kind}"] = rate(lambda loader=loader: loader, wait, LEAST_SECONDS)
    return found


if __name__ == "__main__":
    run_benchmark(
        ways,
        options={"images": 20_000, "side": 224, "batch": 256, "rounds": 5},
        quick={"images": 10_000},
        ratios={
            f"{feed}{kind} / {LIMITS.get(feed, COPY)}": (
                f"{feed}{kind}",
                f"{LIMITS.get(feed, COPY)}{kind}",
            )
            for kind in ("", WITHOUT)
            for feed in FEEDS
        },
        facts={"pages": "warm"},
    )
