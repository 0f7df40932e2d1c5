"""Checks of a data set: its files, how much of them is in RAM, and which feeds can serve it."""

import ctypes
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from memload.bench.setting import file_bytes
from memload.doctor.checks import Check
from memload.doctor.file_systems import mount_of, object_storage
from memload.errors import MemloadError
from memload.feeds.choice import choose_feed, free_memory
from memload.feeds.copies import RowCopies
from memload.feeds.held import ram_budget
from memload.machine import available_memory
from memload.reading.dataset import MemmapDataset
from memload.reading.pipeline import samples_of
from memload.storage.shards import open_direct
from memload.wording import counted, shape_text, size_text

#: The part of the available RAM in which rows stay as page cache, if nothing holds them.
_PAGE_CACHE_SHARE = 0.8
#: Random rows whose pages are looked at: they tell the share in RAM to 1 or 2 %.
_ROWS_LOOKED_AT = 2000
_FEEDS_ON_GPU = ("resident", "dma", "pinned")
#: File systems on the network.
_REMOTE = ("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "ceph", "beegfs", "9p")
_IN_RAM = ("tmpfs", "ramfs")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


def data_checks(
    dataset: MemmapDataset, feed: str = "cpu", cache_bytes: int | None = None
) -> list[Check]:
    """Return the checks of a data set and its files. Reads no rows.

    ``feed`` and ``cache_bytes`` are those of the Loader that is to read it.
    """
    fits = share_held(dataset, feed, cache_bytes) == 1
    return [
        _dataset(dataset),
        _file_system(dataset),
        _direct(dataset, fits),
        _in_ram(dataset, fits),
    ]


def _dataset(dataset: MemmapDataset) -> Check:
    first, *others = dataset.arrays.values()
    kind = f"{shape_text(first.shape)} {np.dtype(first.descr).name}"
    beside = "".join(f" and {array.name}" for array in others)
    row_bytes = sum(array.row_bytes for array in (first, *others))
    size = size_text(len(dataset.shards) * row_bytes)
    files = counted(len(dataset.shards.paths), "file") + (" each" if others else "")
    finding = f"{counted(len(dataset), 'sample')} of {kind}{beside}, {size} in {files}"
    return Check("data set", "ok", finding)


def _file_system(dataset: MemmapDataset) -> Check:
    folder = dataset.shards.paths[0].parent
    mount = mount_of(folder)
    if mount is None:
        return Check("file system", "note", "the system does not tell it")
    finding = f"{mount.type}, mounted at {mount.point}"
    storage, _ = object_storage(mount)
    if storage:
        remedy = "Copy the files to a disk of this machine: random rows come slowly from there"
        return Check("file system", "note", f"{finding}: object storage ({storage})", remedy)
    if mount.type in _REMOTE or mount.type.startswith("fuse."):
        remedy = "If reading the disk is what bounds training, copy the files to a local disk"
        return Check("file system", "note", f"{finding}: not a disk of this machine", remedy)
    return Check("file system", "ok", finding)


def _direct(dataset: MemmapDataset, fits_in_ram: bool) -> Check:
    for path, descriptor in zip(dataset.shards.paths, dataset.shards.descriptors, strict=True):
        direct = open_direct(descriptor)
        if direct is not None:
            os.close(direct)
            continue
        mount = mount_of(path.parent)
        if mount is not None and mount.type in _IN_RAM:
            return Check("O_DIRECT", "ok", "not needed: the files are in RAM")
        finding = f"{path.name} cannot be read past the page cache"
        if fits_in_ram:
            return Check("O_DIRECT", "ok", f"{finding}, which is not needed: it fits in RAM")
        remedy = "Files larger than RAM are read faster from ext4 or xfs"
        return Check("O_DIRECT", "note", finding, remedy)
    return Check("O_DIRECT", "ok", "works")


def _in_ram(dataset: MemmapDataset, fits_in_ram: bool) -> Check:
    share = rows_in_ram(dataset)
    if share is None:
        finding = "not known for files of other users, so all rows count as cold"
        return Check("in RAM", "ok", finding)
    finding = f"{share:.0%} of the rows"
    if share > 0.99:
        return Check("in RAM", "ok", finding)
    if fits_in_ram:
        return Check("in RAM", "ok", f"{finding}; the first epoch reads the others from the disk")
    finding += "; not all fit, so every epoch reads from the disk"
    return Check("in RAM", "note", finding, "See docs/memory.md")


def rows_in_ram(dataset: MemmapDataset) -> float | None:
    """Return which share of the rows is in RAM, from a random sample. None: not known."""
    shards = dataset.shards
    paths = [path for path in shards.paths if not _may_be_asked(path)]
    if paths:
        return None
    rng = np.random.default_rng(0)
    rows = dataset.index.row
    chosen = rng.choice(rows, min(_ROWS_LOOKED_AT, len(rows)), replace=False)
    shares = []
    for row in chosen.tolist():
        try:
            shares.append(share_in_ram(shards.row(row).ctypes.data, shards.array.row_bytes))
        except OSError:
            return None
    return float(np.mean(shares))


def _may_be_asked(path: Path) -> bool:
    """Return whether Linux tells this process which pages of a file are in RAM."""
    return os.access(path, os.W_OK) or path.stat().st_uid == os.geteuid()


def share_in_ram(address: int, size: int) -> float:
    """Return which share of the pages of some mapped memory is in RAM, without reading any.

    For files of others that this process may not write, Linux says that all pages are (see
    mincore(2)). Raises OSError if the system does not tell.
    """
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    length = address + size - start
    states = np.zeros(-(-length // mmap.PAGESIZE), np.uint8)
    if _libc.mincore(start, length, states.ctypes.data):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return float(np.mean(states & 1))


def share_held(dataset: MemmapDataset, feed: str, cache_bytes: int | None = None) -> float:
    """Return which share of the rows a feed finds in memory once an epoch has read all of them."""
    names = [name for name in dataset.sample_names if name in dataset.arrays]
    arrays = samples_of(dataset, names)
    if feed in ("cpu", "pinned"):  # the system keeps what it likes
        used = sum(len(array.used_rows) * array.row_bytes for array in arrays)
        available = available_memory()
        return 1.0 if available is None else min(1.0, _PAGE_CACHE_SHARE * available / used)
    if feed == "resident":
        return 1.0
    return min(1.0, ram_budget(cache_bytes) / file_bytes(arrays))


def feed_check(
    device: torch.device, dataset: MemmapDataset | None = None, names: Sequence[str] = ()
) -> Check:
    """Return which feeds can be used, and why others cannot.

    Each is created for one sample, and it is computed whether all samples have room. ``names`` are
    the arrays and columns that a batch has. Without a data set, what the feeds need is looked at.
    """
    feeds = ("cpu",) if device.type == "cpu" else _FEEDS_ON_GPU
    reasons = {feed: _why_not(feed, device, dataset, names) for feed in feeds}
    usable = ", ".join(feed for feed, reason in reasons.items() if not reason)
    refused = [f"{feed}: {reason}" for feed, reason in reasons.items() if reason]
    finding = "; ".join([f"usable: {usable or 'none'}", *refused])
    if device.type == "cpu":
        finding += f"; {', '.join(_FEEDS_ON_GPU)} need a GPU"
    if not usable:
        return Check("feeds", "bad", finding)
    return Check("feeds", "note" if refused else "ok", finding)


def _why_not(
    feed: str, device: torch.device, dataset: MemmapDataset | None, names: Sequence[str]
) -> str:
    """Return why a feed cannot be used; empty if it can."""
    try:
        _try_feed(feed, device, dataset)
    except (MemloadError, RuntimeError, OSError) as error:
        return str(error).splitlines()[0].removeprefix(f"feed={feed!r}: ").removesuffix(".")
    if feed == "resident" and dataset is not None:
        return _why_no_room(device, dataset, names)
    return ""


def _why_no_room(device: torch.device, dataset: MemmapDataset, names: Sequence[str]) -> str:
    """Return why not all samples fit on the device; empty if they do.

    A Loader with feed="auto" leaves more memory to other uses.
    """
    arrays, free = samples_of(dataset, names), free_memory(device)
    needed = sum(len(array.used_rows) * array.row_bytes for array in arrays)
    needed += sum(column.nbytes for column in arrays[0].columns)
    if needed <= free:
        return ""
    return f"{size_text(needed)} does not fit in the {size_text(free)} free on {device}"


def _try_feed(feed: Any, device: torch.device, dataset: MemmapDataset | None) -> None:
    """Create a feed for one sample and close it again. Raises FeedError."""
    if dataset is not None:
        few_pages = 2 * mmap.PAGESIZE * len(dataset.shards.paths)
        sample = samples_of(dataset.subset([0]), ())
        choose_feed(feed, sample, device, cache_bytes=few_pages)[0].close()
    elif feed == "dma":
        RowCopies(device)
