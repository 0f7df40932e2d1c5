"""Worker processes for chunks of rows. A row that kills or blocks its worker costs only itself.

::

    this process                                      each worker
    hands out two chunks a worker  ── pipe ────────▶  make() once, then work(chunk, note_row)
    yields results in any order    ◀─ pipe ─────────  a few numbers; the rows go to the disk
    looks every 0.5 s              ◀─ shared memory   note_row(row): the row that it is at

A worker that dies, or that is at one row for longer than the timeout, is killed and replaced, and
its chunks are done again as a whole. The row that it was at is now a suspect: if it ends a second
worker, its chunk is done again with the row marked as lost. The other workers are not disturbed.

`concurrent.futures.ProcessPoolExecutor` is not used: one dead worker breaks all of that pool,
nothing says which row it was at, and its threads would be alive while replacements are forked. Here
no thread exists.
"""

import contextlib
import functools
import multiprocessing
import operator
import os
import pickle
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from multiprocessing.connection import wait
from typing import Any, NamedTuple, Protocol

from memload.errors import BuildError, MemloadError, describe_error

#: Linux forks, so workers start at once and a data set need not be picklable, as with DataLoader.
_CONTEXT: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")

#: What a worker's slot of the shared memory holds while it is at no row.
_NO_ROW = -1

#: Seconds a worker may take to start, or to go from one chunk to the next, however short the
#: timeout is.
_START_SECONDS = 60.0

#: Seconds between two looks at the workers.
_LOOK_SECONDS = 0.5

#: A function that is told each row before work on it begins.
NoteRow = Callable[[int], None]


class Chunk(NamedTuple):
    """Rows ``start`` to ``stop``, exclusively.

    ``lost`` has the rows that killed their worker twice, or took too long twice, and the reasons.
    ``is_retried`` says that a worker has been at it and was replaced.
    """

    start: int
    stop: int
    lost: Mapping[int, str] = {}
    is_retried: bool = False


class Work(Protocol):
    """What a worker does. It is made in the worker's process."""

    def __call__(self, chunk: Chunk, note_row: NoteRow) -> Any:
        """Do a chunk except its lost rows, and return a small result.

        ``note_row`` is to be called with each row before work on it begins.
        """

    def close(self) -> None:
        """Close files."""


def run(
    make: Callable[[], Work], chunks: Iterator[Chunk], *, num_workers: int, timeout: float
) -> Generator[tuple[Chunk, Any], None, None]:
    """Yield each chunk and its result, in any order.

    ``make`` is called once in each worker. ``timeout`` is in seconds for one row. An exception in a
    worker is raised here, as BuildError unless it is an OSError or a MemloadError. With
    ``num_workers=0`` all is done in this process: then a row that crashes or hangs is not caught.
    Closing the generator kills the workers. Raises BuildError if workers cannot start.
    """
    if num_workers == 0:
        with contextlib.closing(make()) as work:
            for chunk in chunks:
                yield chunk, work(chunk, lambda row: None)
        return
    try:
        pool = _Pool(make, chunks, num_workers, timeout)
    except OSError as error:
        raise _cannot_start(error) from error
    try:
        yield from pool.results()
    finally:
        for worker in pool.workers:
            worker.kill()  # all at once: the end of a process takes milliseconds
        for worker in pool.workers:
            worker.stop()


def _cannot_start(error: OSError) -> BuildError:
    """Return the error for what the system refuses while workers are started."""
    return BuildError(
        f"A worker cannot be started: {error}. Use fewer workers (--num-workers), raise the limits "
        "on processes and open files (ulimit -u, ulimit -n), or free memory. Then run the same "
        "command again: it goes on where it stopped."
    )


class _Pool:
    """The workers, the chunks that are left, and the rows that are suspects."""

    def __init__(
        self, make: Callable[[], Work], chunks: Iterator[Chunk], num_workers: int, timeout: float
    ) -> None:
        self.make, self.chunks, self.timeout = make, chunks, timeout
        self.current_rows = _CONTEXT.RawArray("q", num_workers)
        self.again: deque[Chunk] = deque()
        self.suspects: set[int] = set()
        self.failed_starts = 0
        self.workers: list[_Worker] = []

    def results(self) -> Iterator[tuple[Chunk, Any]]:
        for number in range(len(self.current_rows)):
            worker = _Worker(number, self.make, self.current_rows)
            self.workers.append(worker)  # before it starts, so that a Ctrl-C leaves none behind
            worker.start()
            self._feed(worker)
        looked = time.monotonic()
        while busy := [worker for worker in self.workers if worker.chunks]:
            ready = wait([worker.connection for worker in busy], _LOOK_SECONDS)
            now = time.monotonic()
            # In a long gap this process was suspended, as by Ctrl-Z, and its workers with it.
            elapsed, looked = min(now - looked, 2 * _LOOK_SECONDS), now
            for worker in busy:
                if worker.connection in ready:
                    try:
                        result = worker.connection.recv()
                    except (EOFError, OSError):
                        worker.process.join(10)  # it is dying
                    else:
                        if isinstance(result, BaseException):
                            raise result
                        worker.seconds, self.failed_starts = 0.0, 0
                        yield worker.chunks.popleft(), result
                        self._feed(worker)
                        continue
                if failure := worker.failure(elapsed, self.timeout):
                    self._replace(worker, failure)

    def _feed(self, worker: "_Worker") -> None:
        """Give a worker a chunk to do and one in reserve, so that it never has to wait."""
        while len(worker.chunks) < 2:
            chunk = self.again.popleft() if self.again else next(self.chunks, None)
            if chunk is None:
                return
            worker.chunks.append(chunk)
            with contextlib.suppress(OSError):  # it has died, which is noticed at the next look
                worker.connection.send(chunk)

    def _replace(self, worker: "_Worker", reason: str) -> None:
        worker.stop()
        row, chunk = worker.row, worker.chunks[0]._replace(is_retried=True)
        if row == _NO_ROW:
            self.failed_starts += 1
            if self.failed_starts > 3 * len(self.workers):
                raise BuildError(
                    f"Workers die before their first row: {reason}. Use num_workers=0 to see the "
                    "cause. In a script, put the call under 'if __name__ == \"__main__\":', since "
                    "workers import the script on some systems."
                )
        elif row in self.suspects:
            chunk = chunk._replace(lost={**chunk.lost, row: reason})
        else:
            self.suspects.add(row)
        worker.chunks[0] = chunk
        self.again.extend(worker.chunks)
        self.workers[worker.number] = _Worker(worker.number, self.make, self.current_rows)
        self.workers[worker.number].start()
        for idle in self.workers:
            self._feed(idle)


class _Worker:
    """One process with its pipe, and the chunks that it was given and has not done."""

    def __init__(self, number: int, make: Callable[[], Work], current_rows: Any) -> None:
        self.number, self.current_rows = number, current_rows
        current_rows[number] = _NO_ROW
        try:
            self.connection, self.its_end = _CONTEXT.Pipe()
        except OSError as error:
            raise _cannot_start(error) from error
        arguments = (self.its_end, make, current_rows, number, os.getpid())
        self.process = _CONTEXT.Process(target=_serve, args=arguments, daemon=True)
        self.chunks: deque[Chunk] = deque()
        #: the row that it was at when it was last looked at, and for how many seconds by then
        self.row, self.seconds = _NO_ROW, 0.0

    def start(self) -> None:
        # Python's fork hooks drop a KeyboardInterrupt, so a Ctrl-C has to wait for the fork's end.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.process.start()
        except OSError as error:
            raise _cannot_start(error) from error
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise BuildError(
                "The source cannot be pickled, which this system needs to start workers: "
                f"{error!s:.300}. Define it at the top level of a module, without lambdas and "
                "open files, or use num_workers=0."
            ) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.its_end.close()

    def failure(self, elapsed: float, timeout: float) -> str:
        """Say what is wrong with it, if anything, ``elapsed`` seconds after the last look."""
        row = self.current_rows[self.number]
        self.seconds = self.seconds + elapsed if row == self.row else 0.0
        self.row = row
        if not self.process.is_alive():
            code = self.process.exitcode
            if code < 0:
                return f"decoding it killed the process ({signal.Signals(-code).name})"
            return f"decoding it ended the process (exit status {code})"
        limit = timeout if row != _NO_ROW else max(timeout, _START_SECONDS)
        return f"it took longer than {limit:g} s" if self.seconds > limit else ""

    def kill(self) -> None:
        if self.process.pid is not None:
            self.process.kill()

    def stop(self) -> None:
        self.kill()
        if self.process.pid is not None:
            self.process.join(10)
        self.connection.close()
        self.its_end.close()


def _serve(
    connection: Any, make: Callable[[], Work], current_rows: Any, number: int, parent: int
) -> None:
    """Do chunks until the parent is gone. A worker's main function."""
    # Ctrl-C reaches the whole group; the parent decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # multiprocessing sends it at exit
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if sys.platform == "linux":
        # The kernel kills this process when its parent dies, even while it hangs in a row.
        import ctypes  # NumPy has loaded it already

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it died before the call
            os._exit(1)
    if "torch" in sys.modules:
        # Its threads were not forked, and an operation that uses them would never end.
        sys.modules["torch"].set_num_threads(1)
    note_row = functools.partial(operator.setitem, current_rows, number)
    work = None
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone
        while True:
            chunk = connection.recv()
            try:
                work = work or make()
                result = work(chunk, note_row)
            except (OSError, MemloadError) as error:
                result = error
            except BaseException as error:  # noqa: BLE001  # it is raised in the parent
                result = BuildError(describe_error(error))
            note_row(_NO_ROW)
            connection.send(result)
