"""How long the rows of a batch take to be read from the disk."""

import time

import numpy as np

from memload.bench.direct import is_direct, random_reads
from memload.bench.setting import Setting
from memload.bench.stages import Measurement, Stage
from memload.doctor.data_checks import rows_in_ram, share_held
from memload.errors import MemloadError
from memload.reading.dataset import MemmapDataset

#: Threads that read, and for how long. Each reads one row at least.
_THREADS, _SECONDS = 32, 1.0
#: Seconds after which that should be over, also if the disk is slow.
_MAX_SECONDS = 2.0
#: Seconds of reading rows that are to be in RAM, about, and bytes that are read at a time.
_WARMING_SECONDS, _WARMING_BYTES = 3.0, 1 << 20


def disk_stage(dataset: MemmapDataset) -> Stage:
    """Return the stage that reads random rows past the page cache, so that nothing is dropped."""

    def measurement() -> float:
        # A disk that is busy with one thread already gives each of several its share.
        rows_a_second = random_reads(dataset, 1, 0)
        threads = max(1, min(_THREADS, int(rows_a_second * _MAX_SECONDS)))
        return random_reads(dataset, threads, _SECONDS)

    def prepare() -> Measurement:
        if not is_direct(dataset):
            raise MemloadError("the files cannot be read past the page cache")
        return measurement

    return Stage("reading the disk, random rows", prepare)


def disk_times(
    dataset: MemmapDataset,
    feed: str,
    cold_ms: float | None,
    cache_bytes: int | None = None,
) -> tuple[float, float]:
    """Return what reading a batch takes from now on, and after the first epoch, in milliseconds.

    ``cold_ms`` is what it takes if none of its rows is in RAM; None if that is not known. Only the
    images count there and now. Masks and other arrays take their share of RAM.
    """
    if cold_ms is None or feed == "resident":  # which reads all rows before the first batch
        return 0.0, 0.0
    in_ram = rows_in_ram(dataset) or 0.0
    later = (1 - share_held(dataset, feed, cache_bytes)) * cold_ms
    return max((1 - in_ram) * cold_ms, later), later  # rows that do not stay are of no use


def bring_sample_to_ram(setting: Setting) -> None:
    """Read the samples to measure on. Leave out those that a slow disk does not read soon."""
    end = time.monotonic() + _WARMING_SECONDS
    rows = max(1, _WARMING_BYTES // setting.row_bytes)
    for start in range(0, len(setting.sample), rows):
        stop = min(start + rows, len(setting.sample))
        setting.sample.gather(np.arange(start, stop))
        if time.monotonic() > end:
            setting.sample = setting.sample.subset(slice(stop))
            return
