"""The Loader on the CPU against one `np.take` into one buffer, and against FFCV in raw mode where that is installed.

    python benchmarks/loader.py [--images 8000] [--side 224] [--batch 256] [--rounds 5] [--dry-run]

Random pixels, random order, pages warm, whole epochs with the loop included, images a second. A round is one epoch of
each way in turn; the first is left out, which also is the epoch in which FFCV fills its own page cache and compiles.
"""

import tempfile
import time
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from record import Noise, arguments, at_least_one, numbers_of, record, run_main, spread

import memload


def loop(batches: Iterable[Any]) -> int:
    """Take every batch; return the number of images."""
    return sum(len(batch[0]) for batch in batches)


def ffcv_loader(folder: Path, noise: Noise, batch: int, workers: int) -> Iterable[Any]:
    """Return FFCV's loader of the same pictures, raw, in random order, with its own documented settings."""
    from ffcv.fields import IntField, RGBImageField
    from ffcv.fields.decoders import IntDecoder, SimpleRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import ToTensor
    from ffcv.writer import DatasetWriter

    path = folder / "noise.beton"
    if not path.exists():
        fields = {"image": RGBImageField(write_mode="raw"), "label": IntField()}
        DatasetWriter(str(path), fields, num_workers=2).from_indexed_dataset(noise)
    pipelines = {
        "image": [SimpleRGBImageDecoder(), ToTensor()],
        "label": [IntDecoder(), ToTensor()],
    }
    return Loader(
        str(path), batch_size=batch, num_workers=workers, order=OrderOption.RANDOM, os_cache=True, drop_last=False,
        pipelines=pipelines,
    )  # fmt: skip


def main() -> None:
    """Run the benchmark."""
    parser = arguments(__doc__)
    parser.add_argument("--images", type=int, default=8000)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=at_least_one, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path, noise = Path(folder) / "out.bin", Noise(options.images, options.side)
        memload.build(noise, path, size=options.side)
        dataset = memload.MemmapDataset(path)
        pixels = np.load(path, mmap_mode="r")
        buffer = np.empty((options.batch, *pixels.shape[1:]), np.uint8)
        order = np.random.default_rng(0)

        def take() -> int:
            indices = order.permutation(len(pixels))
            for start in range(0, len(pixels), options.batch):
                part = indices[start : start + options.batch]
                np.take(pixels, part, axis=0, out=buffer[: len(part)], mode="clip")
            return len(pixels)

        loaders: dict[str, Iterable[Any]] = {
            f"memload, {threads} threads": memload.Loader(
                dataset, options.batch, shuffle=True, num_threads=threads
            )
            for threads in (0, 1, 2)
        }
        if find_spec("ffcv"):
            loaders |= {
                f"ffcv, {w} workers": ffcv_loader(Path(folder), noise, options.batch, w)
                for w in (1, 2)
            }
        ways: dict[str, Callable[[], int]] = {"np.take": take}
        ways |= {name: lambda batches=batches: loop(batches) for name, batches in loaders.items()}
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(options.rounds + 1):
            for name, way in ways.items():
                start = time.perf_counter()
                images = way()
                if number:
                    rates[name].append(images / (time.perf_counter() - start))
    one, two = rates["memload, 1 threads"], rates["memload, 2 threads"]
    results: dict[str, Any] = {name: spread(values) for name, values in rates.items()}
    results["one thread / np.take"] = spread(
        [a / b for a, b in zip(one, rates["np.take"], strict=True)]
    )
    results["two threads / one"] = spread([a / b for a, b in zip(two, one, strict=True)])
    for workers, own in ((1, one), (2, two)):
        if f"ffcv, {workers} workers" in rates:
            theirs = rates[f"ffcv, {workers} workers"]
            results[f"memload / ffcv, {workers}"] = spread(
                [a / b for a, b in zip(own, theirs, strict=True)]
            )
    record("loader", options, numbers_of(parser), vars(options) | {"pages": "warm"}, results)


if __name__ == "__main__":
    run_main(main)
