"""Reads many parts of files at once past the page cache, by Linux's asynchronous I/O.

See io_setup(2), io_submit(2), io_getevents(2) and io_destroy(2). The C library has no functions
for these calls.
"""

import contextlib
import ctypes
import errno
import functools
import os
import platform
import queue
import sys

import numpy as np

#: The most reads under way in one queue.
DEPTH = 64
#: The numbers of io_setup, io_submit, io_getevents and io_destroy, from the kernel's tables.
_CALLS = {"x86_64": (206, 209, 208, 207), "aarch64": (0, 2, 4, 1)}
#: ``struct iocb`` and ``struct io_event`` of linux/aio_abi.h, as on little-endian machines.
_REQUEST = np.dtype(
    [
        ("number", "u8"),
        ("key", "u4"),
        ("flags", "i4"),
        ("operation", "u2"),  # 0: read
        ("priority", "i2"),
        ("descriptor", "u4"),
        ("address", "u8"),
        ("size", "u8"),
        ("offset", "i8"),
        ("reserved", "u8", 2),
    ]
)
_RESULT = np.dtype([("number", "u8"), ("request", "u8"), ("count", "i8"), ("reserved", "i8")])

_libc = ctypes.CDLL(None, use_errno=True)


class ReadQueue:
    """Has the kernel do many reads past the page cache, up to 64 of them at a time.

    One thread waits for all of them. With a thread for each read, every read would need the GIL
    when it is done, and wait for it while another thread is busy in Python. On one H200's host, two
    of these queues read 13,300 rows of 150 KB a second beside a thread that was busy for 2 ms in
    each batch of 128 rows, and 10,600 beside one busy for 6 ms. 32 threads read 11,600 and 7,700. A
    row took 12 µs of CPU time in place of 46. Unlike io_uring, containers usually allow it.

    Not thread-safe: use a queue on one thread at a time, and not in a forked child. A queue lasts
    until the process ends, as the kernel takes 32 ms to destroy one. So get it from `take_queue`,
    which hands out free ones again. Raises OSError where the system has no such calls, or allows no
    more queues (``fs.aio-max-nr``).
    """

    def __init__(self) -> None:
        calls = _CALLS.get(platform.machine())
        if sys.platform != "linux" or calls is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        setup, self._submit, self._get_results, self._destroy = calls
        self._context = ctypes.c_ulong(0)
        _call(setup, DEPTH, ctypes.addressof(self._context))

    def read(
        self, descriptor: np.ndarray, offset: np.ndarray, size: np.ndarray, address: np.ndarray
    ) -> np.ndarray:
        """Read parts of files, at offsets and of sizes in bytes, to addresses in memory.

        All are integer arrays ``(n,)``. Open the files with O_DIRECT: the kernel reads others one
        part after another. Offsets, sizes and addresses have to be aligned as the files need.

        Returns how many bytes were read of each part, int64 ``(n,)``. That is less than asked for
        at the end of a file, and 0 or less if it cannot be read. Blocks until all reads have ended;
        the GIL is released meanwhile. If an error is raised, they have ended, too, and so has the
        queue.
        """
        requests = np.zeros(len(size), _REQUEST)
        requests["number"] = np.arange(len(size))
        requests["descriptor"], requests["offset"] = descriptor, offset
        requests["size"], requests["address"] = size, address
        first = requests.ctypes.data
        pointers = first + np.arange(len(size), dtype=np.uint64) * _REQUEST.itemsize
        try:
            return self._read_all(pointers)
        except BaseException:
            # This waits for the reads under way, which write into memory of the caller.
            _call(self._destroy, self._context.value)
            raise

    def _read_all(self, pointers: np.ndarray) -> np.ndarray:
        """Do the reads of which these point to the requests; return how much each has read."""
        counts = np.zeros(len(pointers), np.int64)
        begun = under_way = 0
        while begun < len(pointers) or under_way:
            if begun < len(pointers) and under_way < DEPTH:
                accepted = self._begin(pointers[begun : begun + DEPTH - under_way])
                begun += max(1, accepted)  # one that is refused is left out: its count stays 0
                under_way += accepted
            # Half of a full queue goes on while the other half is refilled.
            if under_way and (begun == len(pointers) or under_way == DEPTH):
                under_way -= self._note_results(counts, under_way)
        return counts

    def _begin(self, pointers: np.ndarray) -> int:
        """Begin reads; return how many the kernel accepted. 0: it refuses the first one."""
        try:
            return _call(self._submit, self._context.value, len(pointers), pointers.ctypes.data)
        except OSError:
            return 0

    def _note_results(self, counts: np.ndarray, under_way: int) -> int:
        """Wait for reads, of a full queue for half of them; return how many have ended.

        Enters into ``counts``, int64 ``(n,)``, how many bytes each of these has read.
        """
        results = np.empty(under_way, _RESULT)
        at_least, address = min(under_way, DEPTH // 2), results.ctypes.data
        done = 0
        while not done:
            with contextlib.suppress(InterruptedError):  # by a signal
                done = _call(
                    self._get_results, self._context.value, at_least, under_way, address, 0
                )
        counts[results["number"][:done].astype(np.int64)] = results["count"][:done]
        return done


def _call(number: int, *arguments: int) -> int:
    """Make a system call; return its result. Raises OSError. Releases the GIL."""
    result = int(_libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments)))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


#: The queues that nobody uses.
_free: "queue.SimpleQueue[ReadQueue]" = queue.SimpleQueue()


def _begin_in_child() -> None:
    """Forget the queues of the parent process, which do not work in a forked child."""
    global _free  # noqa: PLW0603  # there is no other way to renew it
    _free = queue.SimpleQueue()


os.register_at_fork(after_in_child=_begin_in_child)


def take_queue() -> ReadQueue | None:
    """Return a queue for this thread alone; None if the system gives none. Thread-safe.

    Give it back with `give_back`.
    """
    with contextlib.suppress(queue.Empty):
        return _free.get_nowait()
    try:
        return ReadQueue()
    except OSError:
        return None


def give_back(read_queue: ReadQueue) -> None:
    """Let others take a queue again. Its reads have ended. Thread-safe."""
    _free.put(read_queue)


@functools.cache
def has_queues() -> bool:
    """Return whether this process can have queues. The system is asked once."""
    read_queue = take_queue()
    if read_queue is not None:
        give_back(read_queue)
    return read_queue is not None
