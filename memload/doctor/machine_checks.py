"""Checks of the machine: cores, memory, libraries and the GPU."""

import importlib
import os
import re
import resource
import shutil
import sysconfig
from pathlib import Path
from typing import Any

from memload.building.decoders import loaded_libraries
from memload.doctor.checks import Check
from memload.machine import available_cores, available_memory, core_limit
from memload.wording import size_text

#: Processes a core from which on others are slowed down.
_BUSY = 1.2
#: Memory that was looked at twice may have changed by up to this share in between.
_CHANGED_MEANWHILE = 0.1
#: Where NVIDIA's driver says its version, as long as it is loaded.
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def machine_checks(root: Path = Path("/")) -> list[Check]:
    """Return the checks of the machine. ``root`` is the folder that has ``proc`` and ``sys``."""
    torch = _import_torch()
    has_gpu = not isinstance(torch, Exception) and torch.cuda.is_available()
    return [
        _cores(root),
        _load(),
        _memory(root),
        _torch(torch),
        _cuda(torch),
        _compiler(has_gpu),
        _locked_memory(),
        _libjpeg(),
    ]


def _cores(root: Path) -> Check:
    usable, in_machine, limit = available_cores(), os.cpu_count() or 1, core_limit(root)
    finding = f"{usable} of {in_machine} may be used"
    if limit is None or limit >= usable:
        return Check("cores", "ok", finding)
    threads = max(1, int(limit))
    return Check(
        "cores",
        "note",
        f"{finding}, but the container is given the time of {limit:g} (cgroup)",
        f"Set num_threads={threads}, or give the container more CPU",
    )


def _load() -> Check:
    cores, (load, *_) = os.cpu_count() or 1, os.getloadavg()
    finding = f"{load:.1f} processes wanted a core of {cores} in the last minute"
    if load < _BUSY * cores:
        return Check("load", "ok", finding)
    return Check(
        "load",
        "note",
        finding,
        "End other processes: while they run, everything measures slower than it is",
    )


def _memory(root: Path) -> Check:
    available = available_memory(root)
    if available is None:
        return Check("RAM", "note", "the system does not say how much is available")
    facts = dict(re.findall(r"(\w+):\s*(\d+) kB", (root / "proc/meminfo").read_text()))
    finding = f"{size_text(available)} available of {size_text(int(facts['MemTotal']) * 1024)}"
    if available < (1 - _CHANGED_MEANWHILE) * 1024 * int(facts["MemAvailable"]):
        finding += ": the container has a limit (cgroup)"
    return Check("RAM", "ok", finding)


def _import_torch() -> Any:
    try:
        return importlib.import_module("torch")
    except (ImportError, OSError) as error:  # a library of the system may be missing
        return error


def _torch(torch: Any) -> Check:
    if isinstance(torch, Exception):
        reason = str(torch).splitlines()[0]
        return Check("torch", "bad", f"cannot be imported: {reason}", "Install torch again")
    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    return Check("torch", "ok", f"{torch.__version__}, {build}")


def _cuda(torch: Any) -> Check:
    if not isinstance(torch, Exception) and torch.cuda.is_available():
        return _gpu(torch.cuda)
    if not _NVIDIA_DRIVER.exists():
        return Check("GPU", "ok", "none: batches stay in the memory of the CPU")
    if getattr(getattr(torch, "version", None), "cuda", None):
        remedy = "Is CUDA_VISIBLE_DEVICES empty, or the driver older than torch's CUDA?"
    else:
        remedy = "Install torch with CUDA: see pytorch.org"
    return Check("GPU", "bad", "NVIDIA's driver is loaded, but torch finds no GPU", remedy)


def _gpu(cuda: Any) -> Check:
    count = cuda.device_count()
    name = cuda.get_device_name() + (f", one of {count}" if count > 1 else "")
    try:
        free, total = cuda.mem_get_info()
    except RuntimeError as error:  # it may be full, or lent to one process alone
        finding = f"{name}: cannot be used: {str(error).splitlines()[0]}"
        return Check("GPU", "bad", finding, "Look for other processes on it with nvidia-smi")
    return Check("GPU", "ok", f"{name}: {size_text(free)} free of {size_text(total)}")


def _compiler(has_gpu: bool) -> Check:
    """Look for what Triton compiles with when its kernels are first used (runtime/build.py)."""
    compilers = [os.environ.get("CC", ""), "gcc", "clang"]
    found = next(filter(None, map(shutil.which, filter(None, compilers))), None)
    header = Path(sysconfig.get_path("include"), "Python.h")
    if found and os.access(header, os.R_OK):
        return Check("C compiler", "ok", found)
    missing, remedy = "none found (CC, gcc, clang)", "Run 'apt install gcc python3-dev', or set CC"
    if found:
        missing, remedy = f"{header} cannot be read", "Run 'apt install python3-dev'"
    if not has_gpu:
        return Check("C compiler", "ok", f"{missing}. None is needed without a GPU")
    finding = f"{missing}. Triton needs it for transforms on the GPU"
    return Check("C compiler", "note", finding, remedy)


def _locked_memory() -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Check("locked memory", "ok", "no limit (ulimit -l)")
    finding = (
        f"at most {size_text(soft)} (ulimit -l). CUDA's page-locked memory usually does not count"
    )
    return Check("locked memory", "ok", finding)


def _libjpeg() -> Check:
    loaded = loaded_libraries()
    finding = ", ".join(f"{name} {version}" for name, version in loaded.items())
    if "libjpeg-turbo" in loaded:
        return Check("libjpeg", "ok", finding)
    remedy = (
        "Builds decode faster with libjpeg-turbo, which Pillow's wheels have: pip install pillow"
    )
    return Check("libjpeg", "note", finding, remedy)
