"""What is wrong here, or could be better: the machine, its libraries, and the files."""

import ctypes
import mmap
import os
import platform
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from memload.building.decoders import loaded_libraries
from memload.machine import available_cores, available_memory, core_limit
from memload.wording import counted, shape_text, size_text

if TYPE_CHECKING:  # torch may be what is broken
    from collections.abc import Sequence

    from memload.feeds.feed import SampleArray
    from memload.reading.dataset import MemmapDataset

#: Processes per core from which on others are slowed down.
_BUSY = 1.2
#: Where NVIDIA's driver says its version, as long as it is loaded.
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
#: Random rows whose pages are looked at: they tell the share in RAM to 1 or 2 %.
_ROWS_LOOKED_AT = 2000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


@dataclass(frozen=True)
class Check:
    """What was found of one subject, and what to do about it.

    The mark is ``ok``, ``note`` for what could be better, or ``bad`` for what is broken.
    """

    subject: str
    finding: str
    remedy: str = ""
    mark: Literal["ok", "note", "bad"] = "ok"

    def __str__(self) -> str:
        remedy = f". {self.remedy}" if self.remedy else ""
        return f"{self.mark:4}  {self.subject:8}  {self.finding}{remedy}"


def machine_checks(root: Path = Path("/")) -> list[Check]:
    """Check cores, memory, libraries and the GPU. ``root`` is the folder of ``proc`` and ``sys``.

    torch itself may be what is broken.
    """
    checks = [_cores(root), _load(), _memory(root), _versions()]
    try:
        return [*checks, _gpu(import_module("torch"))]
    except (ImportError, OSError) as error:  # a library of the system may be missing
        reason = str(error).splitlines()[0]
        broken = Check("torch", f"cannot be imported: {reason}", "Install torch again", "bad")
        return [*checks, broken]


def _cores(root: Path) -> Check:
    usable, limit = available_cores(), core_limit(root)
    finding = f"{usable} of {os.cpu_count() or 1} may be used"
    if limit is None or limit >= usable:
        return Check("cores", finding)
    finding += f", but the container is given the time of {limit:g} (cgroup)"
    remedy = f"Set num_threads={max(1, int(limit))}, or give the container more CPU"
    return Check("cores", finding, remedy, "note")


def _load() -> Check:
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    finding = f"{load:.1f} processes wanted a core of {cores} in the last minute"
    if load < _BUSY * cores:
        return Check("load", finding)
    return Check("load", finding, "If others are at work, measure again when they end", "note")


def _memory(root: Path) -> Check:
    available = available_memory(root)
    return Check("RAM", "not known" if available is None else f"{size_text(available)} available")


def _versions() -> Check:
    """Return the versions of libraries. Of those that decode, these are the ones loaded."""
    found = {"Python": platform.python_version()}
    for name in ("memload", "numpy", "torch", "triton", "safetensors"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    found |= loaded_libraries()
    finding = ", ".join(f"{name} {version}" for name, version in found.items())
    if "libjpeg-turbo" in found:
        return Check("versions", finding)
    remedy = "Builds are faster with libjpeg-turbo, as Pillow's wheels have it"
    return Check("versions", finding, remedy, "note")


def _gpu(torch: Any) -> Check:
    if not torch.cuda.is_available():
        if not _NVIDIA_DRIVER.exists():
            return Check("GPU", "none: batches stay in the memory of the CPU")
        finding = f"NVIDIA's driver is loaded, but torch {torch.__version__} finds no GPU"
        remedy = "Is CUDA_VISIBLE_DEVICES empty, or torch for another CUDA? See pytorch.org"
        return Check("GPU", finding, remedy, "bad")
    try:
        name, (free, total) = torch.cuda.get_device_name(), torch.cuda.mem_get_info()
    except RuntimeError as error:  # it may be full, or lent to one process alone
        finding = f"cannot be used: {str(error).splitlines()[0]}"
        return Check("GPU", finding, "Look for other processes on it with nvidia-smi", "bad")
    memory = f"{size_text(free)} free of {size_text(total)}"
    return Check("GPU", f"{name}, CUDA {torch.version.cuda}: {memory}")


# ------------------------------------------------------------------------------- the data set


def dataset_check(dataset: "MemmapDataset", share_in_ram: float | None) -> Check:
    """Describe a data set and its files."""
    arrays = dataset.arrays.values()
    kinds = (f"{shape_text(array.shape)} {np.dtype(array.descr).name}" for array in arrays)
    size = size_text(sum(array.data_bytes for array in arrays))
    files = counted(sum(len(array.shards) for array in arrays), "file")
    in_ram = "an unknown share" if share_in_ram is None else f"{share_in_ram:.0%}"
    return Check(
        "data set",
        f"{counted(len(dataset), 'sample')} of {' and '.join(kinds)}, {size} in {files}, "
        f"{in_ram} of the images in RAM",
    )


def share_in_ram(arrays: "Sequence[SampleArray]") -> float | None:
    """Return which share of the bytes of all rows is in RAM, from a random sample. None: not known.

    Linux does not tell it of files of other users that this process may not write: see mincore(2).
    """
    paths = [path for array in arrays for path in array.shards.paths]
    if any(path.stat().st_uid != os.geteuid() and not os.access(path, os.W_OK) for path in paths):
        return None
    shares, count = [], min(_ROWS_LOOKED_AT, len(arrays[0].row))
    for array in arrays:
        rows = np.random.default_rng(0).choice(array.row, count, replace=False).tolist()
        shares.append(np.mean([_pages_in_ram(array.shards.row(row)) for row in rows]))
    return float(np.average(shares, weights=[array.row_bytes for array in arrays]))


def _pages_in_ram(pixels: np.ndarray) -> float:
    """Return which share of the pages of a mapped row is in RAM, without reading any."""
    start = pixels.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    length = pixels.ctypes.data + pixels.nbytes - start
    states = np.zeros(-(-length // mmap.PAGESIZE), np.uint8)
    if _libc.mincore(start, length, states.ctypes.data):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return float(np.mean(states & 1))
