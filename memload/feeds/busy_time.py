"""How much is read from the disk, and for how long."""

import threading
import time
from collections.abc import Collection


class BusyTime:
    """Counts what tasks read from the disk, and the seconds while any is under way. Thread-safe.

    While several are under way, the time counts once. The time from when a first task begins until
    none is under way counts only if something was read in it.
    """

    def __init__(self) -> None:
        self._bytes_read, self._seconds = 0, 0.0
        self.forget_tasks()

    def forget_tasks(self) -> None:
        """Forget the tasks under way in a forked child, which has none of their threads.

        What was counted stays. The lock is renewed, as another thread may have held it.
        """
        self._lock = threading.Lock()
        #: The tasks that are under way.
        self.under_way: set[object] = set()
        #: Set while there is none.
        self.idle = threading.Event()
        self.idle.set()
        # When the first of them began, and how many bytes were read before.
        self._since, self._bytes_before = 0.0, 0

    def begin(self, tasks: Collection[object]) -> None:
        """Begin tasks."""
        with self._lock:
            if not self.under_way:
                self._since, self._bytes_before = time.monotonic(), self._bytes_read
                self.idle.clear()
            self.under_way.update(tasks)

    def end(self, tasks: Collection[object], bytes_read: int = 0) -> None:
        """End tasks, which have read so many bytes.

        A task may end twice: its time counts up to the first end, and the bytes of both count.
        """
        with self._lock:
            self._bytes_read += bytes_read
            if self.under_way.issubset(tasks):
                self._seconds = self._seconds_until_now()
                self.idle.set()
            self.under_way.difference_update(tasks)

    def so_far(self) -> tuple[int, float]:
        """Return how many bytes were read so far, and in how many seconds."""
        with self._lock:
            return self._bytes_read, self._seconds_until_now()

    def _seconds_until_now(self) -> float:
        """Return the seconds with those of the tasks under way. The caller holds the lock."""
        if not self.under_way or self._bytes_read == self._bytes_before:
            return self._seconds
        return self._seconds + time.monotonic() - self._since
