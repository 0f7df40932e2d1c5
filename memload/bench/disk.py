"""Reading what is not in RAM, beside the limit of the disk."""

import ctypes
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np

from memload.bench import stages
from memload.bench.direct import is_direct, read_past_cache
from memload.bench.loading import disk_loader, make_loader
from memload.bench.setting import BLOCK_BYTES, Setting, file_bytes
from memload.bench.stages import Measurement, Stage, rate
from memload.errors import MemloadError
from memload.feeds.held import ram_budget
from memload.reading.dataset import MemmapDataset
from memload.reading.pipeline import samples_of

_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def cold_stages(setting: Setting) -> list[Stage]:
    """Return the stages of reading from the disk while nothing is in RAM."""
    limit = _limit(setting)
    at_random = partial(_cold, setting, _read_at_random)
    found = [limit, Stage("disk cold, random order", at_random, [limit])]
    if setting.device.type == "cuda":
        found.append(disk_loader("feed disk, nothing held", setting, 0, [limit]))
    return found


def larger_than_ram_stages(setting: Setting) -> list[Stage]:
    """Return the stages of the feed "disk", which holds the share that it would hold of all rows.

    A Loader that holds rows may be faster than the disk. What it holds cannot be made cold, so
    measure `cold_stages` before.
    """
    share = ram_budget(None) / file_bytes(samples_of(setting.dataset, ()))
    cache_bytes = setting.cache_bytes(setting.cold_sample, share)
    limit = _limit(setting)
    feed = disk_loader(f"feed disk, {share:.0%} held", setting, cache_bytes, [limit])
    transform = setting.transform()
    name = f"Loader, disk, {setting.transform_name}"
    return [limit, feed, disk_loader(name, setting, cache_bytes, [feed], transform)]


def _limit(setting: Setting) -> Stage:
    """Return the stage of what the disk itself reaches.

    Where files cannot be read past the page cache, it is reading them from start to end.
    """
    if is_direct(setting.cold_sample):
        direct = partial(read_past_cache, setting)
        return Stage("random rows, past the page cache", direct, reported=False)
    in_order = partial(_cold, setting, _read_in_order)
    return Stage("reading from start to end, cold", in_order, reported=False)


def _cold(setting: Setting, read: Callable[[Setting], Iterable[float]]) -> Measurement:
    """Return what measures reading from the disk. ``read`` yields how many images it has read.

    Raises MemloadError if pages cannot be dropped from RAM.
    """
    if not hasattr(os, "posix_fadvise"):
        raise MemloadError("this system cannot drop pages from its cache")
    blocks = _blocks(setting.cold_sample)

    def measurement() -> float:
        _drop(setting.cold_sample, blocks)
        return rate(read(setting), stages.SLOW_SECONDS)

    _drop(setting.cold_sample, blocks)
    path, offset, size = blocks[0]
    _check_cold(path, offset + size // 2)
    return measurement


def _check_cold(path: Path, offset: int) -> None:
    """Raise MemloadError if a page is in RAM."""
    with path.open("rb") as file, suppress(OSError):  # which says that it is not
        if os.preadv(file.fileno(), [bytearray(1)], offset, os.RWF_NOWAIT):
            raise MemloadError(
                "its pages stay in RAM: the disk is in memory, or another process maps them"
            )


#: A path, and the offset and size of a part of the file.
Block = tuple[Path, int, int]


def _blocks(sample: MemmapDataset) -> list[Block]:
    """Return the part of each file that holds a sample, divided into blocks."""
    array = sample.shards.array
    shard, offset = array.locate(sample.index.row)
    blocks = []
    for number in np.unique(shard).tolist():
        offsets = offset[shard == number]
        end = int(offsets.max()) + array.row_bytes
        for begin in range(int(offsets.min()), end, BLOCK_BYTES):
            blocks.append((sample.shards.paths[number], begin, min(BLOCK_BYTES, end - begin)))
    return blocks


def _drop(sample: MemmapDataset, blocks: Sequence[Block]) -> None:
    """Remove the pages of a sample from RAM, unless another process maps them."""
    for pixels in sample.shards.maps:  # pages stay that a process has mapped
        start = pixels.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
        _libc.madvise(start, pixels.ctypes.data + pixels.nbytes - start, mmap.MADV_DONTNEED)
    for path, offset, size in blocks:
        with path.open("rb") as file:
            os.fsync(file)  # pages that are not written yet would stay
            os.posix_fadvise(file.fileno(), offset, size, os.POSIX_FADV_DONTNEED)


def _read_in_order(setting: Setting) -> Iterator[float]:
    def read(block: Block) -> float:
        path, offset, size = block
        return np.fromfile(path, np.uint8, size, offset=offset).nbytes / setting.row_bytes

    with ThreadPoolExecutor(setting.threads) as pool:
        yield from pool.map(read, _blocks(setting.cold_sample))


def _read_at_random(setting: Setting) -> Iterator[float]:
    batch_size = min(64, setting.batch_size)  # of larger ones, too few would be read in a second
    loader = make_loader(setting.cold_sample, batch_size, device="cpu")  # now, before the time runs
    return (len(batch[0]) for batch in loader)
