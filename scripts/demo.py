"""Build a data set from a folder of images, verify it, draw it, and compare reading with decoding."""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import photographs
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Subset

import memload
from memload.machine import available_cores

SIDE, BATCH, DECODED = 256, 256, 2000


class Jpegs(Dataset[tuple[torch.Tensor, int]]):
    """The images as most training scripts read them: decode, resize the shorter side, crop the center."""

    def __init__(self, root: Path, dataset: memload.MemmapDataset) -> None:
        self.paths = [root / key for key in dataset.keys]
        self.labels = dataset.labels

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = Image.open(self.paths[index]).convert("RGB")
        scale = SIDE / min(image.size)
        width, height = (max(SIDE, int(side * scale)) for side in image.size)
        left, top = round((width - SIDE) / 2), round((height - SIDE) / 2)
        image = image.resize((width, height), Image.Resampling.BILINEAR).crop(
            (left, top, left + SIDE, top + SIDE)
        )
        pixels = (
            torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
            .view(SIDE, SIDE, 3)
            .permute(2, 0, 1)
        )
        return pixels, 0 if self.labels is None else int(self.labels[index])


def rate(loader: DataLoader[object], seconds: float) -> float:
    """Return the median rate of whole epochs, in images/s, without the first. Takes about ``seconds``."""
    rates: list[float] = []
    end = time.perf_counter() + seconds
    for epoch in range(1000):
        start, images = time.perf_counter(), 0
        for batch in loader:
            images += len(batch[0] if isinstance(batch, (tuple, list)) else batch)
        if epoch:
            rates.append(images / (time.perf_counter() - start))
            if time.perf_counter() > end:
                break
    return statistics.median(rates)


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__)
    parser.add_argument(
        "images", nargs="?", type=Path, help="a folder of images (default: generate some)"
    )
    images: Path | None = parser.parse_args().images
    here = Path("demo")
    here.mkdir(exist_ok=True)
    if images is None:
        images = here / "images"
        if not images.exists():
            print("generating 400 JPEGs …", flush=True)
            photographs.write_folder(images, 400)

    output = here / "out.bin"
    print(f"memload build {images} {output}", flush=True)
    try:
        print(memload.build(images, output, size=SIDE, overwrite=True))
        print(f"memload verify {output}")
        report = memload.verify(output)
        print(
            f"{report.rows:,} rows, {report.bytes:,} bytes: {'intact' if report.ok else 'DAMAGED'}"
        )
        memload.preview(output, here / "preview.png", count=30)
    except memload.MemloadError as error:
        sys.exit(f"memload: {error}")
    print(f"{here / 'preview.png'} shows 30 of them\n")

    cores = available_cores()
    dataset = memload.MemmapDataset(output)
    some = Subset(Jpegs(images, dataset), range(min(len(dataset), DECODED)))
    collate: Callable[..., object] = memload.fast_collate
    mapped = DataLoader(dataset, BATCH, shuffle=True, collate_fn=collate)
    decoded = DataLoader(some, BATCH, shuffle=True, num_workers=cores, persistent_workers=True)
    print(
        f"epochs of {len(dataset):,} images in batches of {BATCH}, random order, files in RAM, {cores} cores:"
    )
    by_decoding, by_mapping = rate(decoded, 3), rate(mapped, 3)
    print(f"  decoding the files, {cores} workers  {by_decoding:10,.0f} images/s")
    print(
        f"  memload, no workers            {by_mapping:10,.0f} images/s   {by_mapping / by_decoding:.0f} times as fast"
    )


if __name__ == "__main__":
    main()
