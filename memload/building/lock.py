"""The locks of a temporary folder: who works in it now.

A build by itself holds the lock of its folder alone. Builds in parts share it, and each part holds
the lock of the shard that it is at alone. The system releases a lock when its process ends. On NFS
and other network file systems the server does, once the lease of the machine is over.
"""

import contextlib
import fcntl
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from memload.errors import BuildError

logger = logging.getLogger("memload")

#: Seconds between two attempts to get a lock that another process has.
_POLL_SECONDS = 0.2
#: Seconds between two lines about what is waited for.
_LINE_SECONDS = 30.0
#: Seconds between two signs of life.
_SIGN_SECONDS = 5.0


class FolderRemovedError(OSError):
    """The last holder of a lock has removed its folder, because its work is done."""


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
        """Read the file of a lock. What cannot be read is left empty."""
        with contextlib.suppress(OSError, ValueError, TypeError):  # it is being written
            return cls(**json.loads(path.read_bytes()))
        return cls()

    @property
    def is_here(self) -> bool:
        """Whether it is a process of this machine."""
        return self.machine in ("", socket.gethostname())

    def __str__(self) -> str:
        if not self.machine:
            return "process unknown"
        on = "" if self.is_here else f" on {self.machine}"
        work = f", {self.work}" if self.work else ""
        return f"process {self.process}{on}{work}"


class Lock:
    """The lock that the file ``lock`` of a folder carries. It is not thread-safe.

    On a file system without locks, a warning is logged, and each attempt succeeds.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "lock"
        self._descriptor, self._is_alone = -1, False

    def acquire(self, *, shared: bool = False, work: str = "") -> bool:
        """Get the lock if nobody has it, or, with ``shared``, if nobody has it alone.

        A lock that is held already is given back first. The folder is made if it is missing.
        ``work`` says what it is held for. Returns whether that succeeded, and does not wait. Raises
        FolderRemovedError if the holder has just removed the folder.
        """
        self.release()
        with contextlib.suppress(FileExistsError):
            self.folder.mkdir()
        try:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError as error:
            raise FolderRemovedError(self.folder) from error
        try:
            fcntl.flock(
                self._descriptor, fcntl.LOCK_NB | (fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
            )
        except BlockingIOError:
            self._close()
            return False
        except OSError as error:
            logger.warning(
                f"{self.folder}: this file system has no locks ({error.strerror}). Do not let a "
                "second process write the same output"
            )
        if not self._is_in_place():
            self.release()
            raise FolderRemovedError(self.folder)
        self._is_alone = not shared
        if self._is_alone:
            self._write(json.dumps(Holder.here(work)._asdict()))
        return True

    def wait(self, timeout: float, *, shared: bool = False, work: str = "") -> None:
        """Get the lock, and wait for its holder if need be.

        A line in the log says what is waited for. Raises BuildError once the holder has given no
        sign of life for ``timeout`` seconds: see `wait_until`. Raises FolderRemovedError as
        `acquire` does.
        """
        wait_until(lambda: self.acquire(shared=shared, work=work), self.path, self.folder, timeout)

    def release(self) -> None:
        """Give the lock back, if it is held."""
        if self._descriptor >= 0:
            if self._is_alone:
                self._write("")
            with contextlib.suppress(OSError):  # there are no locks here
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # also copies that children hold
            self._close()

    @contextlib.contextmanager
    def alive(self) -> Iterator[None]:
        """Give signs of life meanwhile, in a thread that ends with the block."""
        ended = threading.Event()

        def touch() -> None:
            while not ended.wait(_SIGN_SECONDS):
                with contextlib.suppress(OSError):  # the disk is full, for example
                    os.utime(self.path)

        thread = threading.Thread(target=touch, name="memload-lock", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _is_in_place(self) -> bool:
        """Return whether the file is still the one that others see. The last holder removes it."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), self.path.stat())
        except FileNotFoundError:
            return False

    def _write(self, text: str) -> None:
        """Say who holds the lock. That is for messages only."""
        with contextlib.suppress(OSError):  # the disk may be full
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, text.encode("ascii"), 0)

    def _close(self) -> None:
        os.close(self._descriptor)
        self._descriptor, self._is_alone = -1, False


def wait_until(succeeds: Callable[[], bool], lock: Path, subject: Path, timeout: float) -> None:
    """Call ``succeeds`` until it returns true, while another process has ``lock``.

    Raises BuildError once nothing has changed for ``timeout`` seconds: neither the holder nor the
    times of the files beside the lock, which its work changes. The clocks of two machines are not
    compared. ``subject`` is what messages call it.
    """
    sign: object = None
    began = changed = line = time.monotonic()
    while not succeeds():
        now, found = time.monotonic(), _sign_of_life(lock)
        if found != sign:
            sign, changed = found, now
        if now - changed >= timeout:
            raise BuildError(
                f"{subject} is locked ({Holder.of(lock)}), and nothing has changed there for "
                f"{timeout:g} s. If that process hangs, stop it. If its machine has died, its lock "
                "goes when the file server notices, so wait longer (--lock-timeout). Then run the "
                "same command again: it goes on where it stopped.",
                path=subject,
            )
        if now >= line:
            line = now + _LINE_SECONDS
            waited = f", for {now - began:.0f} s now" if now - began > 1 else ""
            logger.info(f"{subject}: waiting for its lock ({Holder.of(lock)}){waited}")
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


def is_locked(folder: Path) -> bool:
    """Say whether another process holds the lock of a folder alone now."""
    try:
        with (folder / "lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False
