"""The cores and the memory that this process may use."""

import os
from pathlib import Path


def available_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes of RAM that this process could come to use, page cache included, within its containers' limits.

    The kernel's own estimate (MemAvailable), and for every control group above the process its limit less what is
    used in it and is not page cache. 0 where the system does not tell.
    """
    available = 0
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return available
    for group in groups:
        _, controllers, path = group.split(":", 2)
        if controllers == "":
            folder, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            folder = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        else:
            continue
        inner = folder / path.lstrip("/")
        for at in [inner, *inner.parents]:
            left = _left_in(at, *names)
            if left is not None:
                available = min(available, left)
            if at == folder:
                break
    return available


def _left_in(group: Path, limit: str, usage: str, prefix: str) -> int | None:
    """Return what a control group may still use; None if it has no limit, or is out of sight."""
    try:
        most = int((group / limit).read_text())
        used = int((group / usage).read_text())
        for line in (group / "memory.stat").read_text().splitlines():
            if line.startswith((f"{prefix}active_file ", f"{prefix}inactive_file ")):
                used -= int(line.split()[1])
    except (OSError, ValueError):  # ValueError: no limit is written as 'max'
        return None
    return max(0, most - max(0, used))
