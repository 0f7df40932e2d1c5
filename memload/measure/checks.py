"""What is wrong here, or could be better: the machine, its libraries, and the files."""

import ctypes
import importlib
import mmap
import os
import platform
import shutil
import subprocess
import sysconfig
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from memload.building.decoders import loaded_libraries
from memload.machine import available_cores, available_memory, core_limit
from memload.wording import counted, shape_text, size_text

if TYPE_CHECKING:  # torch may be what is broken
    from memload.reading.dataset import MemmapDataset

#: Processes per core from which on others are slowed down.
_BUSY = 1.2
#: Where NVIDIA's driver says its version, as long as it is loaded.
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
_LIBRARIES = ("memload", "numpy", "torch", "triton", "safetensors", "pillow", "pillow-simd")
#: What file systems on the network are called. Those of FUSE count as such, too.
_REMOTE = ("nfs", "cifs", "smb", "lustre", "gpfs", "ceph", "beegfs", "9p", "fuse")
#: Random rows whose pages are looked at: they tell the share in RAM to 1 or 2 %.
_ROWS_LOOKED_AT = 2000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


class Check(NamedTuple):
    """What was found of one subject, and what to do about it.

    The mark is ``ok``, ``note`` for what could be better, or ``bad`` for what is broken.
    """

    subject: str
    finding: str
    remedy: str = ""
    mark: Literal["ok", "note", "bad"] = "ok"

    def __str__(self) -> str:
        remedy = f". {self.remedy}" if self.remedy else ""
        return f"{self.mark:4}  {self.subject:11}  {self.finding}{remedy}"


def machine_checks(root: Path = Path("/")) -> list[Check]:
    """Check cores, memory, libraries and the GPU. ``root`` is the folder of ``proc`` and ``sys``.

    It does without torch, since torch itself may be what is broken.
    """
    checks = [_cores(root), _load(), _memory(root), *_versions()]
    try:
        torch: Any = importlib.import_module("torch")
    except (ImportError, OSError) as error:  # a library of the system may be missing
        reason = str(error).splitlines()[0]
        broken = Check("torch", f"cannot be imported: {reason}", "Install torch again", "bad")
        return [*checks, broken]
    checks.append(_gpu(torch))
    return [*checks, _compiler()] if torch.cuda.is_available() else checks


def _cores(root: Path) -> Check:
    usable, limit = available_cores(), core_limit(root)
    finding = f"{usable} of {os.cpu_count() or 1} may be used"
    if limit is None or limit >= usable:
        return Check("cores", finding)
    finding += f", but the container is given the time of {limit:g} (cgroup)"
    remedy = f"Set num_threads={max(1, int(limit))}, or give the container more CPU"
    return Check("cores", finding, remedy, "note")


def is_busy() -> bool:
    """Return whether other processes slow this one down."""
    return os.getloadavg()[0] >= _BUSY * (os.cpu_count() or 1)


def _load() -> Check:
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    finding = f"{load:.1f} processes wanted a core of {cores} in the last minute"
    if not is_busy():
        return Check("load", finding)
    return Check("load", finding, "End other processes: all is slower while they run", "note")


def _memory(root: Path) -> Check:
    available = available_memory(root)
    if available is None:
        return Check("RAM", "the system does not say how much is available", mark="note")
    return Check("RAM", f"{size_text(available)} available")


def _versions() -> list[Check]:
    """Return the versions of libraries, and those of the decoders that are really loaded."""
    found = [f"Python {platform.python_version()}"]
    for name in _LIBRARIES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    loaded = loaded_libraries()
    decoders = Check("decoders", ", ".join(f"{name} {version}" for name, version in loaded.items()))
    if "libjpeg-turbo" not in loaded:
        remedy = "Builds are faster with libjpeg-turbo, as Pillow's wheels have it"
        decoders = decoders._replace(remedy=remedy, mark="note")
    return [Check("versions", ", ".join(found)), decoders]


def _gpu(torch: Any) -> Check:
    if not torch.cuda.is_available():
        if not _NVIDIA_DRIVER.exists():
            return Check("GPU", "none: batches stay in the memory of the CPU")
        remedy = "Install torch with CUDA: see pytorch.org"
        if torch.version.cuda:
            remedy = "Is CUDA_VISIBLE_DEVICES empty, or the driver older than torch's CUDA?"
        return Check("GPU", "NVIDIA's driver is loaded, but torch finds no GPU", remedy, "bad")
    name = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    try:
        free, total = torch.cuda.mem_get_info()
    except RuntimeError as error:  # it may be full, or lent to one process alone
        finding = f"{name}: cannot be used: {str(error).splitlines()[0]}"
        return Check("GPU", finding, "Look for other processes on it with nvidia-smi", "bad")
    return Check("GPU", f"{name}: {size_text(free)} free of {size_text(total)}")


def _compiler() -> Check:
    """Look for what Triton compiles with when its kernels are first used (runtime/build.py)."""
    compilers = (os.environ.get("CC", "gcc"), "gcc", "clang")
    found = next(filter(None, map(shutil.which, compilers)), None)
    header = Path(sysconfig.get_path("include"), "Python.h")
    if found and os.access(header, os.R_OK):
        return Check("C compiler", found)
    missing = f"{header} cannot be read" if found else "none found (CC, gcc, clang)"
    remedy = "Run 'apt install gcc python3-dev', or set CC"
    return Check("C compiler", f"{missing}, and transforms on the GPU need it", remedy, "note")


# ------------------------------------------------------------------------------- the data set


def data_checks(dataset: "MemmapDataset", share_in_ram: float | None) -> list[Check]:
    """Check a data set and its files. Reads no rows."""
    in_ram = "not known" if share_in_ram is None else f"{share_in_ram:.0%} of the rows"
    folder = dataset.shards.paths[0].parent
    return [_dataset(dataset), _file_system(folder), Check("in RAM", in_ram)]


def _dataset(dataset: "MemmapDataset") -> Check:
    arrays = dataset.arrays.values()
    kinds = (f"{shape_text(array.shape)} {np.dtype(array.descr).name}" for array in arrays)
    size = size_text(sum(array.data_bytes for array in arrays))
    files = counted(sum(len(array.shards) for array in arrays), "file")
    finding = f"{counted(len(dataset), 'sample')} of {' and '.join(kinds)}, {size} in {files}"
    return Check("data set", finding)


def _file_system(folder: Path) -> Check:
    try:
        command = ["findmnt", "--noheadings", "--output=FSTYPE", f"--target={folder}"]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        kind = done.stdout.strip()
    except FileNotFoundError:  # a container without util-linux
        kind = ""
    if kind.startswith(_REMOTE):
        remedy = "If the disk is what bounds training, copy the files to a disk of this machine"
        return Check("file system", f"{kind}: on the network", remedy, "note")
    return Check("file system", kind or "not known")


def share_in_ram(dataset: "MemmapDataset") -> float | None:
    """Return which share of the rows is in RAM, from a random sample. None: not known.

    Linux does not tell it of files of other users that this process may not write: see mincore(2).
    """
    shards, rows = dataset.shards, dataset.index.row
    if any(
        path.stat().st_uid != os.geteuid() and not os.access(path, os.W_OK) for path in shards.paths
    ):
        return None
    chosen = np.random.default_rng(0).choice(rows, min(_ROWS_LOOKED_AT, len(rows)), replace=False)
    return float(np.mean([_pages_in_ram(shards.row(row)) for row in chosen.tolist()]))


def _pages_in_ram(pixels: np.ndarray) -> float:
    """Return which share of the pages of a mapped row is in RAM, without reading any."""
    start = pixels.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    length = pixels.ctypes.data + pixels.nbytes - start
    states = np.zeros(-(-length // mmap.PAGESIZE), np.uint8)
    if _libc.mincore(start, length, states.ctypes.data):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return float(np.mean(states & 1))
