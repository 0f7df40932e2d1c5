"""``memload build`` against the bare decode and resize loop of the same decoder, times the number of cores.

    python benchmarks/build.py IMAGES [--copies 8] [--rounds 5] [--fast] [--dry-run]

The bare loop has the encoded files in memory and throws its pixels away: it reads nothing, checks nothing and
writes nothing. A build is timed whole, from the listing of the folder to the last flush to the disk. The loop runs
in one process a core at once, so that cores that slow each other down do so on both sides. Rounds are
interleaved; the first of each is left out. Files are warm.
"""

import io
import multiprocessing
import os
import tempfile
import time
from pathlib import Path

from PIL import Image
from record import arguments, at_least_one, numbers_of, record, run_main, spread

import memload

SIDE = 256


def bare(data: list[bytes], fast: bool) -> float:
    """Decode and resize all with Pillow alone, and return the seconds."""
    start = time.perf_counter()
    for encoded in data:
        image = Image.open(io.BytesIO(encoded))
        width, height = image.size
        scale = SIDE / min(width, height)
        width, height = max(SIDE, int(width * scale)), max(SIDE, int(height * scale))
        left, top = round((width - SIDE) / 2), round((height - SIDE) / 2)
        inner = (left, top, left + SIDE, top + SIDE)
        if fast:
            box = (0.0, 0.0, *map(float, image.size))
            scaled = image.draft(image.mode, (2 * width, 2 * height))
            sx, sy = (
                (scaled[1] if scaled else box)[side] / size
                for side, size in ((2, width), (3, height))
            )
            box = (
                inner[0] * sx,
                inner[1] * sy,
                inner[2] * sx,
                min(inner[3] * sy, float(image.height)),
            )
            image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR, box=box).tobytes()
        else:
            image.convert("RGB").resize((width, height), Image.Resampling.BILINEAR).crop(
                inner
            ).tobytes()
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
    parser = arguments(__doc__)
    parser.add_argument("images", type=Path)
    parser.add_argument("--copies", type=int, default=8, help="how often each image is built")
    parser.add_argument("--rounds", type=at_least_one, default=5)
    parser.add_argument("--fast", action="store_true")
    options = parser.parse_args()
    files = [options.images / key for key in memload.ImageFolder(options.images).keys]
    cores = len(os.sched_getaffinity(0))
    building, looping, ratios = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        root, output = Path(folder) / "images", Path(folder) / "out.bin"
        for path in files:
            (root / path.parent.name).mkdir(parents=True, exist_ok=True)
            for copy in range(options.copies):
                (root / path.parent.name / f"{copy}_{path.name}").symlink_to(path.resolve())
        count = len(files) * options.copies
        for number in range(options.rounds + 1):
            loop = bare_round(files, cores, max(1, options.copies // cores), options.fast)
            start = time.perf_counter()
            memload.build(root, output, size=SIDE, fast=options.fast)
            built = count / (time.perf_counter() - start)
            size = output.stat().st_size
            output.unlink()
            output.with_suffix(".idx").unlink()
            if number:
                looping.append(loop)
                building.append(built)
                ratios.append(built / loop)
    parameters = {
        "images": len(files),
        "copies": options.copies,
        "side": SIDE,
        "fast": options.fast,
        "files": "warm",
    }
    results = {
        "memload": spread(building),
        "bare": spread(looping),
        "ratio": spread(ratios),
        "bytes": size,
    }
    record("build", options, numbers_of(parser), parameters, results)


if __name__ == "__main__":
    run_main(main)
