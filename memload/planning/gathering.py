"""How fast this machine copies samples out of RAM, as feeds do that gather on the CPU."""

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np

from memload.machine import available_cores

#: Samples of so many bytes are copied into batches of so many, for so long. Caches hold neither.
#: With 64 and 4 MiB, the rate was 2.5 times what a Loader then reached, and with these it is 1.2.
_BYTES: Final = 256 << 20
_BATCH_BYTES: Final = 32 << 20
_SECONDS: Final = 0.2


def gathering_rate(sample_bytes: int) -> float:
    """Return the bytes a second that a Loader's default number of threads gathers."""
    threads = min(8, available_cores())
    samples = np.ones((max(1, _BYTES // sample_bytes), sample_bytes), np.uint8)
    order = np.random.default_rng(0).permutation(len(samples))
    batches = np.array_split(order, max(1, samples.nbytes // _BATCH_BYTES))

    def gather(thread: int) -> int:
        memory = np.empty((len(batches[0]), sample_bytes), np.uint8)
        count, end = 0, time.perf_counter() + _SECONDS
        for batch in itertools.cycle(batches[thread:] + batches[:thread]):
            np.take(samples, batch, axis=0, out=memory[: len(batch)], mode="clip")
            count += len(batch)
            if time.perf_counter() > end:
                break
        return count

    with ThreadPoolExecutor(threads) as pool:
        started = time.perf_counter()
        count = sum(pool.map(gather, range(threads)))
        return count * sample_bytes / (time.perf_counter() - started)
