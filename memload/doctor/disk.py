"""How long the rows of a batch take to be read from the disk."""

from memload.bench.direct import is_direct, random_reads
from memload.bench.stages import Measurement, Stage
from memload.doctor.data_checks import rows_in_ram, share_held
from memload.errors import MemloadError
from memload.reading.dataset import MemmapDataset

#: Threads that read, and for how long. Each reads one row at least.
_THREADS, _SECONDS = 32, 1.0


def disk_stage(dataset: MemmapDataset) -> Stage:
    """Return the stage that reads random rows past the page cache, so that nothing is dropped."""

    def prepare() -> Measurement:
        if not is_direct(dataset):
            raise MemloadError("the files cannot be read past the page cache")
        return lambda: random_reads(dataset, _THREADS, _SECONDS)

    return Stage("reading the disk, random rows", prepare)


def disk_times(dataset: MemmapDataset, feed: str, cold_ms: float | None) -> tuple[float, float]:
    """Return what reading a batch takes now, and after the first epoch, in milliseconds.

    ``cold_ms`` is what it takes if none of its rows is in RAM; None if that is not known.
    """
    if cold_ms is None or feed == "resident":  # which reads all rows before the first batch
        return 0.0, 0.0
    in_ram = rows_in_ram(dataset) or 0.0
    return (1 - in_ram) * cold_ms, (1 - share_held(dataset, feed)) * cold_ms
