"""Files that forked workers inherit. They would move each other's position in them."""

import fcntl
import os
import stat
import sys
from pathlib import Path

from memload.errors import BuildError

_DESCRIPTORS = Path("/proc/self/fd")

#: Flags of an open file that a second opening keeps.
_KEPT_FLAGS = os.O_ACCMODE | os.O_APPEND | os.O_NONBLOCK

#: Descriptors up to this one are stdin, stdout and stderr. Workers share what they write to them.
_LAST_STANDARD = 2


def reopen_files() -> None:
    """Give this process a position of its own in each file that it has inherited.

    A data set may hold a raw file, a tar, a zip or lazily opened images. A forked process shares
    the position in them with its parent and with other workers, so a read could return what another
    process has asked for. Each regular file that is open for reading is opened again at the same
    position. Sockets and pipes stay shared. Duplicates (``os.dup``) have positions of their own
    afterwards. Linux only; other systems do not fork.

    Raises BuildError, which names the file, if it cannot be opened again.
    """
    if sys.platform != "linux":
        return
    for descriptor in sorted(int(path.name) for path in _DESCRIPTORS.iterdir()):
        try:
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            name = str((_DESCRIPTORS / str(descriptor)).readlink())
            if not _is_read(descriptor, flags, name):
                continue
            position = os.lseek(descriptor, 0, os.SEEK_CUR)
        except OSError:  # the descriptor of the listing itself, or a file without a position
            continue
        try:
            again = os.open(_DESCRIPTORS / str(descriptor), flags & _KEPT_FLAGS)
        except OSError as error:
            raise BuildError(
                f"{name} is open in the data set, and a worker cannot open it again "
                f"({error.strerror}). Open it when the first sample is read, or use num_workers=0.",
                path=name,
            ) from error
        os.lseek(again, position, os.SEEK_SET)
        os.dup2(again, descriptor, inheritable=os.get_inheritable(descriptor))
        os.close(again)


def _is_read(descriptor: int, flags: int, name: str) -> bool:
    """Say whether an open file is a regular one that a data set may read."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        return False
    access = flags & os.O_ACCMODE
    if access == os.O_RDWR:
        # Memory that processes share, of multiprocessing and torch, is mapped and never read.
        is_memory = name.startswith("/dev/shm/") and name.endswith(" (deleted)")
        return descriptor > _LAST_STANDARD and not is_memory
    return access == os.O_RDONLY
