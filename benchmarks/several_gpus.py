"""Several GPUs of one host, each fed by its own process from the one page cache.

    torchrun --nproc-per-node 4 benchmarks/several_gpus.py [--images 40000] [--rounds 5]
        [--folder DIR] [--dry-run]

Noise of 224×224×3, batches of 256, each rank its part of a shuffled epoch with `feed="dma"`; pages
warm. All begin an epoch together, and its time is that of the slowest; images a second of all ranks.
Rank 0 writes the files and the result.
"""

import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from harness import (
    argument_parser,
    count_images,
    errors_in_one_line,
    need_cuda,
    noise_dataset,
    partial,
    record,
    settle,
    spread,
)

import memload

USUAL = {"images": 40_000, "rounds": 5}


def measure(loader: memload.Loader, takes_part: bool) -> float:
    """Return images a second of all ranks that take part in an epoch."""
    torch.cuda.synchronize()
    dist.barrier()
    start = time.perf_counter()
    images = count_images(loader) if takes_part else 0
    torch.cuda.synchronize()
    own = torch.tensor([time.perf_counter() - start, images], dtype=torch.float64)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    seconds, counts = torch.stack(every).T
    return float(counts.sum() / seconds.max())


def main() -> None:
    """Run the benchmark."""
    parser = argument_parser(__doc__)
    for name, default in USUAL.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    need_cuda("Run it on a machine with GPUs.")
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    path = [noise_dataset(options.folder, options.images, 224)] if rank == 0 else [None]
    dist.broadcast_object_list(path)
    loader = settle(memload.Loader(path[0], 256, shuffle=True, drop_last=True, feed="dma"))
    dist.barrier()
    rates: dict[str, list[float]] = {"together": [], "rank 0 alone": []}
    for number in range(options.rounds + 1):
        for way, found in rates.items():
            rate = measure(loader, way == "together" or rank == 0)
            found += [rate] * (number > 0)
    if rank == 0:
        for file in (path[0], path[0].with_suffix(".idx")):
            file.unlink()
        results = {way: spread(found) for way, found in rates.items()}
        parameters = {"images": options.images, "rounds": options.rounds, "ranks": ranks}
        parameters |= {"batch": 256, "pages": "warm"}
        record("several_gpus", options, results, parameters, partial(options, USUAL))
        print(results)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with errors_in_one_line():
        main()
