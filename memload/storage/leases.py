"""Keep a file from being truncated while it is read through a map."""

import contextlib
import errno
import os
import signal
import sys
from typing import Any

fcntl: Any = None
if sys.platform == "linux":
    import fcntl

#: The signal that the kernel sends to whom somebody waits for: one that does nothing unless a program wants it.
_SIGNAL = getattr(signal, "SIGURG", None)

#: Whether the system knows leases at all.
LEASES = sys.platform == "linux" and _SIGNAL is not None

#: Descriptors with a lease.
_held: set[int] = set()


def _close_in_child() -> None:
    """Close a forked child's copies: as long as one is open, the lease stands, whoever has it dies."""
    while _held:
        os.close(_held.pop())


if LEASES:
    os.register_at_fork(after_in_child=_close_in_child)


def lease(descriptor: int) -> bool | None:
    """Have whoever truncates a file, or opens it for writing, wait until `end_lease`; 2 µs.

    The descriptor is one for reading. Return False if there is a process already that can write to the file, None
    where there are no leases: on most network filesystems, and for files of another user. The kernel has nobody wait
    for longer than 45 seconds (/proc/sys/fs/lease-break-time). Does not block.
    """
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, int(_SIGNAL or 0))
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(descriptor, fcntl.F_SETOWN, 0)  # and to nobody at all
    except OSError as error:
        return False if error.errno in (errno.EAGAIN, errno.EBUSY) else None
    _held.add(descriptor)
    return True


def end_lease(descriptor: int) -> None:
    """End a lease, if there is one, and close its descriptor."""
    _held.discard(descriptor)
    with contextlib.suppress(OSError):  # there was none
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    os.close(descriptor)
