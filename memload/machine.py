"""The cores and the memory that this process may use."""

import os
from pathlib import Path


def available_cores() -> int:
    """Return the number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_memory(root: Path = Path("/")) -> int:
    """Return how many more bytes of RAM this process could use, counting page cache as free.

    The smaller of the kernel's estimate (``MemAvailable``) and of what the memory limits of its
    control groups (version 2) leave, as in a container. Returns 0 if the system does not report it.
    """
    available = 0
    path_of_group = ""
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                path_of_group = line.removeprefix("0::").lstrip("/")
    except OSError:
        return available
    group = root / "sys/fs/cgroup" / path_of_group
    for folder in (group, *group.parents):  # those above the groups have no limits
        available = min(available, _left_in_group(folder, available))
    return available


def _left_in_group(group: Path, without_limit: int) -> int:
    """Return how many bytes a control group may still use, or ``without_limit`` if it has none."""
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        for line in (group / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name in ("active_file", "inactive_file"):  # page cache, which gives way
                used -= int(value)
    except (OSError, ValueError):  # ValueError: the limit is the word "max"
        return without_limit
    return max(0, limit - max(0, used))
