"""Several GPUs of one host, each fed by its own process from the one page cache.

    torchrun --nproc-per-node 4 benchmarks/several_gpus.py [--images 40000] [--rounds 5] [--data DIR]
        [--dry-run]

Noise of 224×224×3, batches of 256, each rank its part of a shuffled epoch with `feed="dma"`; pages
warm. All begin an epoch together, and its time is that of the slowest; images a second of all ranks.
Rank 0 writes the files and the result.
"""

import atexit
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from data import noise_dataset
from harness import Way, count_images, need_cuda, run_benchmark, settle

import memload


def ways(options: Any, folder: Path) -> dict[str, Way]:
    """Return an epoch of all ranks, and one of rank 0 alone."""
    need_cuda("Run it on a machine with GPUs.")
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    atexit.register(dist.destroy_process_group)
    rank = dist.get_rank()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    path = [noise_dataset(folder, options.images, 224)] if rank == 0 else [None]
    dist.broadcast_object_list(path)
    loader = settle(memload.Loader(path[0], 256, shuffle=True, drop_last=True, feed="dma"))
    dist.barrier()

    def measure(takes_part: bool) -> float:
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

    return {"together": lambda: measure(True), "rank 0 alone": lambda: measure(rank == 0)}


if __name__ == "__main__":
    run_benchmark(
        ways,
        options={"images": 40_000, "rounds": 5},
        facts={"ranks": int(os.environ["WORLD_SIZE"]), "batch": 256, "pages": "warm"},
    )
