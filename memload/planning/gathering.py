"""How fast this machine copies samples out of RAM, as feeds do that gather on the CPU."""

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np

from memload.machine import available_cores

#: Samples of so many bytes, more than most caches hold, are copied in blocks for so long.
_BYTES: Final = 64 << 20
_BLOCK_BYTES: Final = 4 << 20
_SECONDS: Final = 0.2


def gathering_rate(sample_bytes: int) -> float:
    """Return the bytes a second that a Loader's default number of threads gathers."""
    threads = min(8, available_cores())
    samples = np.ones((max(1, _BYTES // sample_bytes), sample_bytes), np.uint8)
    order = np.random.default_rng(0).permutation(len(samples))
    blocks = np.array_split(order, max(1, samples.nbytes // _BLOCK_BYTES))

    def gather(thread: int) -> int:
        memory = np.empty((len(blocks[0]), sample_bytes), np.uint8)
        count, end = 0, time.perf_counter() + _SECONDS
        for block in itertools.cycle(blocks[thread:] + blocks[:thread]):
            np.take(samples, block, axis=0, out=memory[: len(block)], mode="clip")
            count += len(block)
            if time.perf_counter() > end:
                break
        return count

    with ThreadPoolExecutor(threads) as pool:
        started = time.perf_counter()
        count = sum(pool.map(gather, range(threads)))
        return count * sample_bytes / (time.perf_counter() - started)
