"""Files that forked workers inherit. Workers would move each other's position in them."""

import fcntl
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from memload.errors import BuildError

_DESCRIPTORS = Path("/proc/self/fd")

#: Flags of an open file that a second opening keeps.
_KEPT_FLAGS = os.O_ACCMODE | os.O_APPEND | os.O_NONBLOCK

#: Descriptors up to this one are stdin, stdout and stderr. Workers share what they write to them.
_LAST_STANDARD = 2


class _OpenFile(NamedTuple):
    descriptor: int
    name: str
    flags: int
    position: int


def reopen_files() -> None:
    """Give this process a position of its own in each file that it has inherited.

    A data set may hold a raw file, a tar, a zip or lazily opened images. A forked process shares
    the position in them with its parent and with other workers, so that a read could return what
    another process has asked for. Each regular file that is open for reading is opened again at
    the same position. Sockets and pipes stay shared. Linux only; other systems do not fork.

    Descriptors that were duplicates of each other (``os.dup``) have positions of their own
    afterwards.

    Raises BuildError, which names the file, if it cannot be opened again.
    """
    for file in _files():
        try:
            again = os.open(_DESCRIPTORS / str(file.descriptor), file.flags & _KEPT_FLAGS)
        except OSError as error:
            raise BuildError(
                f"{file.name} is open in the data set, and a worker cannot open it again "
                f"({error.strerror}). Open it when the first sample is read, or use num_workers=0.",
                path=file.name,
            ) from error
        os.lseek(again, file.position, os.SEEK_SET)
        os.dup2(again, file.descriptor, inheritable=os.get_inheritable(file.descriptor))
        os.close(again)


def positions() -> dict[int, tuple[str, int]]:
    """Return name and position of each file that a data set here may read, by its descriptor.

    These are the files that Python has opened for reading only. Others are more likely the shell's,
    or files such as logs, which this process itself goes on writing.
    """
    return {
        file.descriptor: (file.name, file.position)
        for file in _files()
        if file.descriptor > _LAST_STANDARD
        and file.flags & os.O_ACCMODE == os.O_RDONLY
        and not os.get_inheritable(file.descriptor)
    }


def check_positions(before: dict[int, tuple[str, int]]) -> None:
    """Raise BuildError if a position has moved while only workers were reading.

    ``before`` are the positions at the start. If one has moved, a file was shared after all, and
    samples may be mixed up. A thread of this process that reads a file meanwhile looks the same.
    """
    after = positions() if before else {}
    for descriptor, (name, position) in before.items():
        found, moved_to = after.get(descriptor, (name, position))
        if found == name and moved_to != position:
            raise BuildError(
                f"{name} was shared by workers: its position has moved from {position:,} to "
                f"{moved_to:,}, so samples may be mixed up, and nothing is kept of them. Open the "
                "file when the first sample is read, or use num_workers=0.",
                path=name,
            )


def _files() -> Iterator[_OpenFile]:
    """Yield the regular files that this process has open for reading."""
    if sys.platform != "linux":
        return
    try:
        entries = sorted(int(path.name) for path in _DESCRIPTORS.iterdir())
    except OSError as error:
        raise BuildError(
            "Workers cannot tell which files the data set has open, because /proc cannot be read "
            f"({error.strerror}). Mount it, or use num_workers=0."
        ) from error
    for entry in entries:
        try:
            is_regular = stat.S_ISREG(os.fstat(entry).st_mode)
            flags = fcntl.fcntl(entry, fcntl.F_GETFL)
            name = str((_DESCRIPTORS / str(entry)).readlink())
            position = os.lseek(entry, 0, os.SEEK_CUR)
        except OSError:  # the descriptor of the listing itself, or a file without a position
            continue
        access = flags & os.O_ACCMODE
        is_read = access == os.O_RDONLY or (access == os.O_RDWR and entry > _LAST_STANDARD)
        # Memory that processes share, of multiprocessing and torch. It is mapped, and never read.
        is_memory = (
            access == os.O_RDWR and name.startswith("/dev/shm/") and name.endswith(" (deleted)")
        )
        if is_regular and is_read and not is_memory:
            yield _OpenFile(entry, name, flags, position)
