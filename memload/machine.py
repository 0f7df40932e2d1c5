"""The cores, the memory and the threads that this process may use."""

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

from memload.errors import MemloadError

#: Why a file that is there cannot be read. It must not be taken for memory without a limit.
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
    for controller, *names in (("cpu", "cpu.cfs_quota_us", "cpu.cfs_period_us"), ("", "cpu.max")):
        for group in _groups_of_process(root, controller):
            with _unless_without_limit():
                texts = [(group / name).read_text() for name in names]
                quota, period = map(int, " ".join(texts).split())
                if quota > 0:
                    limits.append(quota / period)
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
    found = None
    with _unless_without_limit():
        found = re.search(r"MemAvailable: *(\d+) kB", (root / "proc/meminfo").read_text())
    if not found:
        return None
    available = int(found[1]) * 1024
    for controller, limit, used, total in (
        ("memory", "limit_in_bytes", "usage_in_bytes", "total_"),
        ("", "max", "current", ""),
    ):
        page_cache = f"{total}active_file", f"{total}inactive_file"
        for group in _groups_of_process(root, controller):
            with _unless_without_limit():
                left = int((group / f"memory.{limit}").read_text())
                left -= int((group / f"memory.{used}").read_text())
                for line in (group / "memory.stat").read_text().splitlines():
                    name, _, value = line.partition(" ")
                    if name in page_cache:  # the kernel drops it when memory runs short
                        left += int(value)
                available = min(available, max(0, left))
    return available


def _groups_of_process(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of the control groups of this process and of those above them.

    ``controller`` is a name in /proc/self/cgroup and that of a folder, empty in version 2.
    """
    lines: list[str] = []
    with _unless_without_limit():
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            # A limit of a group above counts, too. Inside of a container, the path may not be
            # there. The mount itself is its group then. Folders above it have no such files.
            group = root / "sys/fs/cgroup" / controller / path.lstrip("/")
            yield from (group, *group.parents)


@contextlib.contextmanager
def _unless_without_limit() -> Iterator[None]:
    """Pass over a file that is not there, or says "max" for no limit."""
    try:
        yield
    except ValueError:
        pass
    except OSError as error:
        if error.errno in _TOO_MANY_FILES:
            raise
