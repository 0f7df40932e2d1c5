"""The lock of a temporary folder, so that one process at a time writes an output."""

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from memload.errors import BuildError

logger = logging.getLogger("memload")


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make a folder and hold its lock, which the system releases when this process ends.

    On a file system without locks a warning is logged, and two processes are not kept apart. Raises
    BuildError if another process holds the lock.
    """
    # Another process may end at any moment, and then it removes its folder.
    just_ended = BuildError(
        f"{folder}: another process has just ended that wrote the same output. Look at its result, "
        "then run the command again if it is still needed.",
        path=folder,
    )
    try:
        folder.mkdir(exist_ok=True)
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
    except (FileExistsError, FileNotFoundError):
        raise just_ended from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            process = os.read(descriptor, 20).decode("ascii", "replace") or "unknown"
            raise BuildError(
                f"{folder}: another process writes the same output now (process {process}). Wait "
                "for it, or stop it.",
                path=folder,
            ) from None
        except OSError as error:
            logger.warning(
                f"{folder}: this file system has no locks ({error.strerror}). Do not let a "
                "second process write the same output"
            )
        path = folder / "lock"
        if not path.exists() or not os.path.samestat(os.fstat(descriptor), path.stat()):
            raise just_ended
        with contextlib.suppress(OSError):  # for the message above only, and the disk may be full
            os.ftruncate(descriptor, 0)
            os.write(descriptor, str(os.getpid()).encode())
        yield
    finally:
        with contextlib.suppress(OSError):  # there are no locks here
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # also for copies of it that children hold
        os.close(descriptor)


def is_locked(folder: Path) -> bool:
    """Say whether a build holds the lock of a folder now."""
    try:
        with (folder / "lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False
