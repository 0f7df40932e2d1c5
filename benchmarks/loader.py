"""The Loader on the CPU beside one `np.take` into one buffer, and beside FFCV where it is installed.

Images a second of whole epochs in random order, with the loop included; pages warm. FFCV reads raw
pixels with its own documented settings; it fills its page cache and compiles in the round that is
left out.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from data import noise_dataset
from harness import Way, rate, run_benchmark

import memload

THREADS = (0, 1, 2)


def ways(options: Any, folder: Path) -> dict[str, Way]:
    """Return an epoch of each loader."""
    path = noise_dataset(folder, options.images, options.side)
    dataset, pixels = memload.MemmapDataset(path), np.load(path, mmap_mode="r")
    buffer = np.empty((options.batch, *pixels.shape[1:]), np.uint8)
    order = np.random.default_rng(0)

    def take() -> int:
        chosen = order.permutation(len(pixels))
        for start in range(0, len(pixels), options.batch):
            part = chosen[start : start + options.batch]
            np.take(pixels, part, axis=0, out=buffer[: len(part)], mode="clip")
        return len(pixels)

    loaders = {
        f"memload, {threads} threads": memload.Loader(
            dataset, options.batch, shuffle=True, num_threads=threads, device="cpu"
        )
        for threads in THREADS
    }
    if find_spec("ffcv"):
        from contenders import Job, read_ffcv, write_ffcv

        for workers in (1, 2):
            job = Job(folder, folder, options.batch, workers, "cpu", options.images)
            if not (folder / "data.beton").exists():
                samples = [(image.numpy().transpose(1, 2, 0), label) for image, label in dataset]
                write_ffcv(job, samples)
            loaders[f"ffcv, {workers} workers"] = read_ffcv(job)
    epochs = {name: rate(lambda loader=loader: loader) for name, loader in loaders.items()}
    return {"np.take": rate(take), **epochs}


if __name__ == "__main__":
    run_benchmark(
        ways,
        options={"images": 8000, "side": 224, "batch": 256, "rounds": 5},
        quick={"images": 4000},
        ratios={
            "one thread / np.take": ("memload, 1 threads", "np.take"),
            "two threads / one": ("memload, 2 threads", "memload, 1 threads"),
            "memload / ffcv, 1": ("memload, 1 threads", "ffcv, 1 workers"),
            "memload / ffcv, 2": ("memload, 2 threads", "ffcv, 2 workers"),
        },
        facts={"pages": "warm"},
    )
