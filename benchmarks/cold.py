"""What asking the disk early gives: random samples of a file none of whose pages are in RAM.

    python benchmarks/cold.py [--images 20000] [--part 2000] [--side 224] [--batch 256] [--rounds 5] [--folder DIR]
        [--dry-run]

Few of many samples are taken, so that hardly any page is met twice, as with a file that is larger than RAM. Before
each way the file's pages are dropped from the page cache (posix_fadvise, after an fsync), which the major faults
show, that are recorded. Ways, in turn, images a second: with asking ahead and without, on one thread and on four;
and, as the limit, the file read from start to end. `--folder` is where the file is written, to choose the disk.
"""

import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from record import Noise, arguments, at_least_one, numbers_of, record, run_main, spread

import memload
from memload.storage.shards import Shards


def drop(path: Path) -> None:
    """Have no page of a file in the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def sequential(path: Path) -> None:
    """Read a file from start to end."""
    with path.open("rb", buffering=0) as file:
        while file.read(8 << 20):
            pass


def main() -> None:
    """Run the benchmark."""
    parser = arguments(__doc__)
    parser.add_argument("--images", type=int, default=20_000)
    parser.add_argument("--part", type=int, default=2000)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=at_least_one, default=5)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    asking = Shards.ask_for
    order = np.random.default_rng(0)
    rates: dict[str, list[float]] = {}
    faults: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / "out.bin"
        memload.build(Noise(options.images, options.side), path, size=options.side)
        for _ in range(options.rounds):
            for threads in (1, 4):
                for ahead in (True, False):
                    Shards.ask_for = asking if ahead else lambda self, rows: None  # type: ignore[method-assign]
                    chosen = order.integers(0, options.images, options.part).tolist()
                    loader = memload.Loader(
                        path, options.batch, sampler=chosen, num_threads=threads, device="cpu"
                    )
                    drop(path)
                    before = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
                    start = time.perf_counter()
                    for _batch in loader:
                        pass
                    name = f"{threads} threads, {'asking ahead' if ahead else 'not asking'}"
                    rates.setdefault(name, []).append(options.part / (time.perf_counter() - start))
                    faults.setdefault(name, []).append(
                        resource.getrusage(resource.RUSAGE_SELF).ru_majflt - before
                    )
                    del loader, _batch
            drop(path)
            start = time.perf_counter()
            sequential(path)
            rates.setdefault("read from start to end", []).append(
                options.images / (time.perf_counter() - start)
            )
    results: dict[str, Any] = {name: spread(values) for name, values in rates.items()}
    for threads in (1, 4):
        on, off = (rates[f"{threads} threads, {way}"] for way in ("asking ahead", "not asking"))
        results[f"asking / not, {threads} threads"] = spread(
            [a / b for a, b in zip(on, off, strict=True)]
        )
    results["major faults"] = {name: spread(values) for name, values in faults.items()}
    parameters = {
        **vars(options),
        "folder": "given" if options.folder else "temporary",
        "pages": "cold",
    }
    record("cold", options, numbers_of(parser), parameters, results)


if __name__ == "__main__":
    run_main(main)
