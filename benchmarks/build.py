"""``memload build`` against the bare decode and resize loop of the same decoder, times the number of cores.

    python benchmarks/build.py IMAGES [--copies 8] [--rounds 5] [--fast]

The bare loop has the encoded files in memory and throws its pixels away: it reads nothing, checks nothing and
writes nothing. It runs in one process a core at once, so that cores that slow each other down do so on both sides.
Rounds are interleaved; the first of each is left out. Files are warm.
"""

import argparse
import io
import multiprocessing
import os
import shutil
import tempfile
import time
from pathlib import Path

from PIL import Image
from record import record, spread

import memload
from memload.resizing import place, resize

SIDE = 256


def bare(data: list[bytes], fast: bool) -> float:
    """Decode and resize all, as memload does, and return the seconds."""
    start = time.perf_counter()
    for encoded in data:
        image = Image.open(io.BytesIO(encoded))
        size = image.size
        placement = place(size, (SIDE, SIDE))
        box = None
        if fast:
            scaled = image.draft(image.mode, (2 * placement.resized[0], 2 * placement.resized[1]))
            box = scaled[1] if scaled else (0.0, 0.0, *map(float, size))
        resize(image.convert("RGB"), placement, box=box).tobytes()
    return time.perf_counter() - start


def bare_round(files: list[Path], cores: int, copies: int, fast: bool) -> float:
    """Return images a second of the bare loop on all cores at once."""
    barrier, times = multiprocessing.Barrier(cores), multiprocessing.Array("d", cores)

    def work(number: int) -> None:
        data = [path.read_bytes() for path in files]
        barrier.wait()
        times[number] = sum(bare(data, fast) for _ in range(copies))

    processes = [multiprocessing.Process(target=work, args=(number,)) for number in range(cores)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return sum(len(files) * copies / seconds for seconds in times)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("images", type=Path)
    parser.add_argument("--copies", type=int, default=8, help="how often each image is built")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--fast", action="store_true")
    options = parser.parse_args()
    files = [options.images / key for key in memload.ImageFolder(options.images).keys]
    cores = len(os.sched_getaffinity(0))
    many = [str(path.resolve()) for path in files] * options.copies
    building, looping, ratios = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds + 1):
            loop = bare_round(files, cores, max(1, options.copies // cores), options.fast)
            output = Path(folder) / "out.bin"
            start = time.perf_counter()
            memload.build(Paths(many), output, size=SIDE, fast=options.fast, overwrite=True)
            built = len(many) / (time.perf_counter() - start)
            if number:
                looping.append(loop)
                building.append(built)
                ratios.append(built / loop)
        size = output.stat().st_size
        shutil.rmtree(folder, ignore_errors=True)
    parameters = {"images": len(files), "copies": options.copies, "side": SIDE, "fast": options.fast, "files": "warm"}
    results = {"memload": spread(building), "bare": spread(looping), "ratio": spread(ratios), "bytes": size}
    record("build", parameters, results)


class Paths:
    """The files as a map-style data set, each several times."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[str, int]:
        return self.paths[index], 0


if __name__ == "__main__":
    main()
