"""How far the pixels of ``--fast`` and ``--resizer torch`` are from the default, and how much time they save.

    python benchmarks/fidelity.py IMAGES [--side 256]

The default is torchvision's arithmetic to the bit (a test holds it to that), so it is the reference. PSNR in dB over
all pixels of an image; equal pictures count as 99. One process, encoded files in memory, CPU time of whole passes over
the folder, interleaved; the first round is left out. ``large`` are the images whose shorter side is at least
twice the target. ``12MP`` are some of the images scaled up to
4000×3000 and encoded again at quality 90, as a stand-in for photographs from a camera. torch has one thread, as
in a worker of a build.
"""

import argparse
import io
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from record import record, spread

import memload
from memload.conversion import Converter, Settings
from memload.sources import Record


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    """Return the peak signal to noise ratio in dB; 99 for equal pictures."""
    error = np.mean((a.astype(np.float64) - b) ** 2)
    return 99.0 if error == 0 else float(10 * np.log10(255**2 / error))


def compare(files: list[bytes], ways: dict[str, Converter], rounds: int) -> dict[str, dict[str, object]]:
    """Return time and distance from the first way of every way."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    pixels: dict[str, list[np.ndarray]] = {}
    for number in range(rounds + 1):
        for name, convert in ways.items():
            start = time.process_time()
            rows = [convert(Record("", data, {})).pixels for data in files]
            if number:
                seconds[name].append((time.process_time() - start) / len(files))
            pixels[name] = [np.frombuffer(row, np.uint8) for row in rows]
    reference, *_ = ways
    results: dict[str, dict[str, object]] = {}
    for name in ways:
        pairs = list(zip(pixels[reference], pixels[name], strict=True))
        ratios = [psnr(a, b) for a, b in pairs]
        results[name] = {
            "images": len(files),
            "images_per_second": spread([1 / value for value in seconds[name]]),
            "speed_up": spread([a / b for a, b in zip(seconds[reference], seconds[name], strict=True)]),
            "psnr_median": statistics.median(ratios),
            "psnr_lowest": min(ratios),
            "largest_difference": max(int(np.abs(a.astype(np.int16) - b).max()) for a, b in pairs),
            "mean_difference": statistics.mean(float(np.abs(a.astype(np.int16) - b).mean()) for a, b in pairs),
        }
    return results


def camera(data: bytes) -> bytes:
    """Return a picture as a 12 megapixel JPEG."""
    image = Image.open(io.BytesIO(data)).convert("RGB").resize((4000, 3000), Image.Resampling.BICUBIC)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("images", type=Path)
    parser.add_argument("--side", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    size = (options.side, options.side)
    ways = {
        "default": Converter(Settings(size), {}),
        "fast": Converter(Settings(size, fast=True), {}),
        "torch": Converter(Settings(size, resizer="torch"), {}),
    }
    files = [(options.images / key).read_bytes() for key in memload.ImageFolder(options.images).keys]
    large = [data for data in files if min(Image.open(io.BytesIO(data)).size) >= 2 * options.side]
    results = {
        "all": compare(files, ways, options.rounds),
        "large": compare(large, ways, options.rounds) if large else None,
        "12MP": compare([camera(data) for data in files[::16]], ways, options.rounds),
    }
    record("fidelity", {"images": len(files), "side": options.side, "files": "in memory"}, results)


if __name__ == "__main__":
    main()
