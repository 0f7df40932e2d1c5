"""A file that several processes read at any position."""

import os
import weakref
from pathlib import Path


class PositionalFile:
    """A file that is opened at its first read, and by each process for itself.

    Each read names its offset, so threads and processes do not disturb each other. Only its path is
    pickled. It is closed when the object is gone.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._process, self._descriptor = 0, -1

    def read(self, start: int, size: int) -> bytes:
        """Return ``size`` bytes from ``start``, or fewer at the end of the file. Raises OSError."""
        if self._process != os.getpid():
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            self._process = os.getpid()
            weakref.finalize(self, os.close, self._descriptor).atexit = False
        return os.pread(self._descriptor, size, start)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.path,)
