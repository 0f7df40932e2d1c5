"""The locks of a temporary folder: who works in it now.

A build by itself holds the lock of its folder alone. Builds in parts share it. A part holds the
lock of its current shard alone. The system releases a lock when its process and the
worker processes have ended.

On network file systems the server keeps the locks, and those of a machine that died are gone once
its lease is over: 90 seconds after its last sign of life with Linux's server of NFS 4. NFS 3 has no
leases: they stay until that machine has started again. Some file systems keep locks only within
each machine, as mounts of NFS with ``nolock`` do. A machine that was cut off for longer than its
lease does not notice that, and goes on writing.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from memload.editing.checked_json import read_record
from memload.errors import BuildError

logger = logging.getLogger("memload")

#: Seconds between two attempts to get a lock that another process has.
_POLL_SECONDS = 0.2
#: Seconds until the first line about what is waited for, and between two of them.
_FIRST_LINE_SECONDS, _LINE_SECONDS = 5.0, 30.0
#: Seconds between two signs of life.
_SIGN_SECONDS = 1.0


#: What the system says of a file that was removed: ESTALE if another client of NFS removed it.
_GONE = (errno.ENOENT, errno.ESTALE)


class FolderRemovedError(Exception):
    """Whoever had a lock has removed its folder, because the data set is published."""


class Holder(NamedTuple):
    """Who holds a lock, as the file of the lock says."""

    machine: str = ""
    process: int = 0
    work: str = ""  #: such as ``part 0 of 8``

    @classmethod
    def here(cls, work: str = "") -> "Holder":
        """Return this process as a holder."""
        return cls(socket.gethostname(), os.getpid(), work)

    @classmethod
    def of(cls, path: Path) -> "Holder":
        """Read the file of a lock. It is empty while it is being written, or if it is damaged."""
        return read_record(cls, path) or cls()

    @property
    def is_here(self) -> bool:
        """Whether it is a process of this machine."""
        return self.machine in ("", socket.gethostname())

    def __str__(self) -> str:
        if not self.machine:
            return "another process"
        on = "" if self.is_here else f" on {self.machine}"
        work = f", {self.work}" if self.work else ""
        return f"process {self.process}{on}{work}"


class Lock:
    """The lock that the file ``lock`` of a folder carries. It is not thread-safe.

    On a file system without locks each attempt succeeds. That is logged as a warning. The lock of a
    shard gets that of the whole build as ``within``: that one has warned, and each sign of life is
    shown at both, since others may wait for either.

    Forked processes keep the lock until they end. memload's workers should: they may still write.
    """

    def __init__(self, folder: Path, *, within: Path | None = None) -> None:
        self.folder, self.path, self._within = folder, folder / "lock", within
        self._has_warned = within is not None
        self._descriptor = -1
        #: whether it is held alone
        self.is_alone = False
        self._signed = 0.0  # when the last sign of life was given

    def acquire(self, *, shared: bool = False, work: str = "") -> bool:
        """Get the lock if nobody has it, or, with ``shared``, if nobody has it alone.

        A lock that is held already is given back first. The folder is made if it is missing, unless
        the lock was held already. ``work`` says what it is held for. Returns whether that
        succeeded, and does not wait. Raises FolderRemovedError if the holder has just removed the
        folder.
        """
        was_open = self._descriptor >= 0
        if was_open:
            # The file stays open, so that `_is_in_place` notices a new folder of the same name.
            self._unlock()
        else:
            self._open()
        if not self._try(fcntl.F_RDLCK if shared else fcntl.F_WRLCK):
            if not was_open:
                self._close()
            return False
        if not self._is_in_place():
            self._close()
            raise FolderRemovedError(self.folder)
        self.is_alone = not shared
        if self.is_alone:
            self._write(json.dumps(Holder.here(work)._asdict()))
        return True

    def wait(self, timeout: float, *, shared: bool = False, work: str = "") -> None:
        """Get the lock, and wait for its holder if need be.

        A line in the log says what is waited for. Raises BuildError once the holder has given no
        sign of life for ``timeout`` seconds: see `wait_until`. Raises FolderRemovedError as
        `acquire` does.
        """
        wait_until(lambda: self.acquire(shared=shared, work=work), self.path, timeout)

    def release(self) -> None:
        """Give the lock back, if it is held."""
        if self._descriptor >= 0:
            self._unlock()
            self._close()

    def show_life(self) -> None:
        """Tell those who wait for this lock that its holder works."""
        now = time.monotonic()
        if now - self._signed >= _SIGN_SECONDS:
            self._signed = now
            for path in (self.path, self._within):
                with contextlib.suppress(OSError):  # the disk is full, for example
                    if path is not None:
                        os.utime(path)

    def _try(self, kind: int) -> bool:
        """Set the lock if nobody has it. Without locks on the file system, that always succeeds."""
        try:
            return _set_lock(self._descriptor, kind)
        except OSError as error:
            if self._is_in_place() and not self._has_warned:
                self._has_warned = True
                logger.warning(
                    f"{self.folder}: this file system has no locks ({error.strerror}). Do not let "
                    "two processes write the same output. Of a build in parts, start the first "
                    "part alone until it has begun, and no part twice at a time"
                )
            return True

    def _open(self) -> None:
        with contextlib.suppress(FileExistsError):
            self.folder.mkdir()
        try:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            if error.errno in _GONE:
                raise FolderRemovedError(self.folder) from error
            raise

    def _is_in_place(self) -> bool:
        """Return whether others see the same file. Whoever publishes removes it."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), self.path.stat())
        except OSError as error:
            if error.errno in _GONE:
                return False
            raise

    def _unlock(self) -> None:
        if self.is_alone:
            self._write("")
            self.is_alone = False
        with contextlib.suppress(OSError):  # there are no locks here
            _set_lock(self._descriptor, fcntl.F_UNLCK)  # also for copies that children hold

    def _write(self, text: str) -> None:
        """Say who holds the lock. That is for messages and for `memload info`."""
        with contextlib.suppress(OSError):  # the disk may be full
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, text.encode("ascii"), 0)

    def _close(self) -> None:
        os.close(self._descriptor)
        self._descriptor, self.is_alone = -1, False


def _set_lock(descriptor: int, kind: int) -> bool:
    """Set the lock of an open file, and say whether that succeeded. Does not wait.

    ``kind`` is ``fcntl.F_RDLCK`` (shared), ``F_WRLCK`` (alone) or ``F_UNLCK``. Raises OSError if
    the file system has no locks.

    Linux locks all bytes of the file. Such a lock belongs to the open file, and not to the process.
    It holds across machines on NFS, Lustre, GPFS and CephFS, while on GPFS flock() holds only
    within each machine.
    """
    try:
        if sys.platform == "linux":
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _whole_file(kind))
        else:
            flags = {fcntl.F_RDLCK: fcntl.LOCK_SH, fcntl.F_WRLCK: fcntl.LOCK_EX}
            fcntl.flock(descriptor, flags.get(kind, fcntl.LOCK_UN) | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # POSIX allows both if another one has it
        return False
    return True


def _whole_file(kind: int) -> bytes:
    """Return Linux's struct flock for all bytes of a file."""
    return struct.pack("hhqqi", kind, os.SEEK_SET, 0, 0, 0)


def wait_until(succeeds: Callable[[], bool], lock: Path, timeout: float) -> None:
    """Call ``succeeds`` until it returns true, while another process has ``lock``.

    Raises BuildError once nothing has changed for ``timeout`` seconds: neither the holder nor the
    times of the files beside the lock, which its work changes. The clocks of two machines are not
    compared.
    """
    subject = lock.parent
    sign: object = None
    began = changed = time.monotonic()
    line = began + _FIRST_LINE_SECONDS
    while not succeeds():
        now, found = time.monotonic(), _sign_of_life(lock)
        if found != sign:
            sign, changed = found, now
        if now - changed >= timeout:
            raise BuildError(
                f"{subject} is locked ({Holder.of(lock)}), and nothing has changed there for "
                f"{timeout:g} s. If that process hangs, stop it. If its machine has died, its lock "
                "goes when the file server notices, so wait longer. Then run the "
                "same command again: it goes on where it stopped.",
                path=subject,
            )
        if now >= line:
            line = now + _LINE_SECONDS
            waited = f" for {now - began:.0f} s now" if now - began > 1 else ""
            logger.info(
                f"{subject}: waiting{waited} for its lock ({Holder.of(lock)}). If nothing changes "
                f"there for {timeout:g} s, this is an error"
            )
        time.sleep(min(_POLL_SECONDS, timeout))


def _sign_of_life(lock: Path) -> object:
    """Return what changes while the holder of a lock works."""
    signs: list[object] = [Holder.of(lock)]
    for name in ("lock", "rows", "rejects.jsonl"):
        with contextlib.suppress(OSError), lock.with_name(name).open("rb") as file:
            # NFS asks the server for the times of a file when it is opened.
            signs.append(os.fstat(file.fileno()).st_mtime_ns)
    return signs


@contextlib.contextmanager
def locked(folder: Path, timeout: float = 0.0) -> Iterator[None]:
    """Make a folder, and hold its lock alone.

    A process of another machine is waited for, as long as `wait_until` says. Its lock may be that
    of a machine that died. Raises BuildError if a process of this machine has the lock.
    """
    lock = Lock(folder)
    try:
        if not lock.acquire():
            holder = Holder.of(lock.path)
            if holder.is_here or not timeout:
                raise BuildError(
                    f"{folder}: another process writes the same output now ({holder}). Wait for "
                    "it, or stop it.",
                    path=folder,
                )
            lock.wait(timeout)
    except (FolderRemovedError, NotADirectoryError):
        # Another process may end at any moment, and then it removes its folder.
        raise BuildError(
            f"{folder}: another process has just ended that wrote the same output. Look at its "
            "result, then run the command again if it is still needed.",
            path=folder,
        ) from None
    try:
        yield
    finally:
        lock.release()
