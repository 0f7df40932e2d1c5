"""What is measured on: samples, batches, and the device."""

import mmap
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch

from memload.feeds.feed import SampleArray
from memload.machine import available_cores
from memload.reading.dataset import MemmapDataset
from memload.reading.pipeline import samples_of
from memload.transforms import train

#: Bytes of pixels to measure on, at most: more than a CPU's cache holds.
_SAMPLE_BYTES = 512 << 20
#: The same on the disk, which may read 2 GB/s.
_COLD_BYTES = 2 << 30
#: Bytes that a thread reads or gathers at a time.
BLOCK_BYTES = 8 << 20


class Setting:
    """What to measure on: some samples of a data set, the size of batches, device and threads.

    ``sample_bytes`` is the size of the rows to gather, by default 512 MiB.
    """

    def __init__(self, dataset: MemmapDataset, *, sample_bytes: int | None = None) -> None:
        if not len(dataset):
            raise ValueError(f"{dataset.path} has no samples. Build it from a folder with images.")
        self.dataset = dataset
        self.row_bytes = dataset.shards.array.row_bytes
        self.block_size = max(1, BLOCK_BYTES // self.row_bytes)
        self.threads = available_cores()
        self.device = torch.device("cpu")
        # 256 images of 256×256×3; on the CPU, less, so that slow transforms end soon.
        batch_bytes, largest = 8 << 20, 256
        if torch.cuda.is_available():
            self.device = torch.device("cuda")  # the current one; CUDA starts when it is used
            batch_bytes, largest = 64 << 20, 2048
        # The samples that lie first in each file: the feed "dma" holds the beginnings of all files.
        order = np.argsort(_ends(dataset), kind="stable")
        self.sample = dataset.subset(
            order[: max(1, (sample_bytes or _SAMPLE_BYTES) // self.row_bytes)]
        )
        self.cold_sample = dataset.subset(order[: max(1, _COLD_BYTES // self.row_bytes)])
        batch_size = min(largest, len(self.sample), max(1, batch_bytes // self.row_bytes))
        self.batch_size = 1 << (batch_size.bit_length() - 1)

        #: The name of `transform`, which is what training takes.
        self.side = min(224, *dataset.shape[1:])
        self.transform_name = f"train({self.side})"

    def transform(self) -> Any:
        """Return the transform that training takes, of the largest side that fits."""
        statistics = {} if self.dataset.shape[0] == 3 else {"mean": [0.5], "std": [0.5]}
        return train(self.side, **cast("Any", statistics))

    def cache_bytes(self, sample: MemmapDataset, share: float = 1.0) -> int:
        """Return how much RAM lets the feed "dma" hold a share of one of these samples.

        It holds equal shares of all files.
        """
        names = [name for name in sample.sample_names if name in sample.arrays]
        arrays = samples_of(sample, names)
        pages = mmap.PAGESIZE * sum(len(one.shards.paths) for one in arrays)
        return pages + int(share * _ends(sample).max() * file_bytes(arrays))

    def random_blocks(self) -> list[np.ndarray]:
        """Return all samples in random order, divided into blocks."""
        order = np.random.default_rng(0).permutation(len(self.sample))
        return np.split(order, range(self.block_size, len(order), self.block_size))

    def synchronize(self) -> None:
        """Wait for the GPU, if there is one."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def file_bytes(arrays: Sequence[SampleArray]) -> int:
    """Return the size of all files that have rows of samples: what the feed "dma" would hold."""
    size = 0
    for array in arrays:
        files = array.shards.array.shards
        size += sum(files[number].bytes for number in array.used_shards)
    return size


def _ends(dataset: MemmapDataset) -> np.ndarray:
    """Return in which share of its file the row of each sample ends, ``(n,)``."""
    array = dataset.shards.array
    shard, offset = array.locate(dataset.index.row)
    ends: np.ndarray = (offset + array.row_bytes) / np.array([one.bytes for one in array.shards])[
        shard
    ]
    return ends
