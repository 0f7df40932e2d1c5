"""The cores, the memory and the threads that this process may use."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from memload.errors import MemloadError

_TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)


def available_cores() -> int:
    """Return the number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def core_limit(root: Path = Path("/")) -> float | None:
    """Return how many cores' time the control groups of this process allow; None if all.

    It is the smallest quota divided by its period, of version 1 or 2, as in a container that was
    started with ``--cpus 2.5``. `available_cores` does not count it.
    """
    limits = []
    folders = [
        *_groups_of_process(root, "cpu", "sys/fs/cgroup/cpu"),
        *_groups_of_process(root, "", "sys/fs/cgroup"),
    ]
    for folder in folders:
        with contextlib.suppress(OSError, ValueError):  # no limit is the word "max", or -1
            if (folder / "cpu.max").exists():
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota = (folder / "cpu.cfs_quota_us").read_text()
                period = (folder / "cpu.cfs_period_us").read_text()
            if int(quota) > 0:
                limits.append(int(quota) / int(period))
    return min(limits, default=None)


@contextlib.contextmanager
def starting_threads(advice: str) -> Iterator[None]:
    """Turn Python's error for a thread that cannot be started into a MemloadError with advice."""
    try:
        yield
    except RuntimeError as error:
        if "start new thread" not in str(error):
            raise
        raise MemloadError(
            "No thread can be started: the limit on processes of this user or of this container "
            f"is reached (see 'ulimit -u' and the container's pids.max). Raise it, or {advice}."
        ) from error


def available_memory(root: Path = Path("/")) -> int | None:
    """Return how many more bytes of RAM this process could use, counting page cache as free.

    The smaller of the kernel's estimate (``MemAvailable``) and of what the memory limits of its
    control groups (version 1 and 2) leave, as in a container. Returns None if the system does not
    report it, and raises OSError if it cannot be asked because too many files are open.
    """
    available = None
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    except OSError as error:
        if error.errno in _TOO_MANY_FILES:
            raise
    if available is None:
        return None
    for files in _VERSIONS_OF_GROUPS:
        for folder in _groups_of_process(root, files.controller, files.mount):
            available = min(available, _left_in_group(folder, files, available))
    return available


def _groups_of_process(root: Path, controller: str, mount: str) -> Iterator[Path]:
    """Yield the folders of the control groups of this process and of those above them.

    ``controller`` is a name in /proc/self/cgroup, empty in version 2, and ``mount`` the folder of
    its groups. Raises OSError only if too many files are open.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError as error:
        if error.errno in _TOO_MANY_FILES:
            raise
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            # A limit of a group above counts, too. Inside of a container, the path may not be
            # there. The mount itself is its group then. Folders above it have no such files.
            group = root / mount / path.lstrip("/")
            yield from (group, *group.parents)


class _GroupFiles(NamedTuple):
    """Names in a version of control groups."""

    controller: str  #: in /proc/self/cgroup; empty in version 2
    mount: str  #: the folder of all groups, below the root
    limit: str  #: file with the most bytes that a group may use
    used: str  #: file with the bytes that it uses, page cache included
    page_cache: tuple[str, str]  #: lines of memory.stat


_VERSIONS_OF_GROUPS = (
    _GroupFiles(
        controller="memory",
        mount="sys/fs/cgroup/memory",
        limit="memory.limit_in_bytes",
        used="memory.usage_in_bytes",
        page_cache=("total_active_file", "total_inactive_file"),
    ),
    _GroupFiles(
        controller="",
        mount="sys/fs/cgroup",
        limit="memory.max",
        used="memory.current",
        page_cache=("active_file", "inactive_file"),
    ),
)


def _left_in_group(group: Path, files: _GroupFiles, without_limit: int) -> int:
    """Return how many bytes a control group may still use, or ``without_limit`` if it has none."""
    try:
        limit = int((group / files.limit).read_text())
        used = int((group / files.used).read_text())
        for line in (group / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name in files.page_cache:  # the kernel drops it when memory runs short
                used -= int(value)
    except ValueError:  # in version 2, no limit is the word "max"
        return without_limit
    except OSError as error:
        if error.errno in _TOO_MANY_FILES:
            raise
        return without_limit
    return max(0, limit - max(0, used))
