"""Several GPUs of one host, each fed by its own process from the one page cache: images a second, all together.

    torchrun --nproc-per-node 4 benchmarks/several_gpus.py [--images 40000] [--rounds 5] [--folder DIR]
        [--dry-run]

Noise of 224×224×3, batches of 256, each rank its part of one shuffled epoch with `feed="dma"`; pages warm. All begin
an epoch together (a barrier), and its time is that of the slowest. Rank 0 writes the files and the result.
"""

import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from record import (
    arguments,
    at_least_one,
    need_cuda,
    noise_dataset,
    numbers_of,
    record,
    run_main,
    spread,
)

import memload


def main() -> None:
    """Run the benchmark."""
    parser = arguments(__doc__)
    parser.add_argument("--images", type=int, default=40_000)
    parser.add_argument("--rounds", type=at_least_one, default=5)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    need_cuda("Run it on a machine with GPUs")
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    path = options.folder / "several_gpus.bin"
    if rank == 0:
        noise_dataset(path, options.images, 224)
    dist.barrier()
    loader = memload.Loader(path, 256, shuffle=True, drop_last=True, feed="dma")
    loader._open().feed._pages.wait(120)
    alone, together = [], []
    for number in range(options.rounds + 1):
        for way in (together, alone):
            torch.cuda.synchronize()
            dist.barrier()
            start = time.perf_counter()
            images = 0
            if way is together or rank == 0:
                images = sum(len(batch.images) for batch in loader)
            torch.cuda.synchronize()
            seconds = torch.tensor([time.perf_counter() - start, images], dtype=torch.float64)
            found = [torch.empty_like(seconds) for _ in range(ranks)]
            dist.all_gather(found, seconds)
            if number:
                way.append(sum(float(f[1]) for f in found) / max(float(f[0]) for f in found))
        loader.set_epoch(number + 1)
    if rank == 0:
        for file in (path, path.with_suffix(".idx")):
            file.unlink()
        results = {"together": spread(together), "rank 0 alone": spread(alone)}
        parameters = {
            "images": options.images,
            "rounds": options.rounds,
            "ranks": ranks,
            "batch": 256,
            "pages": "warm",
        }
        record("several_gpus", options, numbers_of(parser), parameters, results)
    dist.barrier()
    del loader
    dist.destroy_process_group()


if __name__ == "__main__":
    run_main(main)
