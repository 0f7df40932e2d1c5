"""Worker processes for chunks of rows. A row that kills or blocks its worker costs only itself.

::

    this process                                      each worker
    hands out two chunks a worker  ── pipe ────────▶  make() once, then work(chunk, note_row)
    yields results in any order    ◀─ pipe ─────────  a few numbers; the rows go to the disk
    looks every 0.5 s              ◀─ shared memory   note_row(row): the row that it is at

A worker that dies, or that is at one row for longer than the timeout, is killed and replaced, and
its chunks are done again as a whole. The row that it was at is now a suspect: if it ends a second
worker, it is given up as `Lost`, and the rest of its chunk is done without it. The other workers
are not disturbed.

`concurrent.futures.ProcessPoolExecutor` is not used: one dead worker breaks all of that pool,
nothing says which row it was at, and its threads would be alive while replacements are forked. Here
no thread exists.
"""

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from multiprocessing.connection import wait
from typing import Any, NamedTuple, Protocol

from memload.errors import BuildError, describe_error

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

#: Runs the user's code where it cannot harm this process, and returns what that returns. Without
#: workers this is `call_here`, which does not protect.
Isolate = Callable[[Callable[[], Any]], Any]


class Chunk(NamedTuple):
    """Rows ``start`` to ``stop``, exclusively."""

    start: int
    stop: int


class Lost(NamedTuple):
    """A row that killed its worker twice, or took too long twice."""

    row: int
    reason: str


class Work(Protocol):
    """What a worker does. It is made in the worker's process."""

    def __call__(self, chunk: Chunk, note_row: NoteRow) -> Any:
        """Do a chunk, calling ``note_row`` with each row before it, and return a small result."""

    def close(self) -> None:
        """Close files."""


def run(
    make: Callable[[], Work], chunks: Iterator[Chunk], *, num_workers: int, timeout: float
) -> Generator[tuple[Chunk, Any] | Lost, None, None]:
    """Yield the result of every chunk, in any order, and the `Lost` rows.

    ``make`` is called once in each worker. ``timeout`` is in seconds for one row. An exception in a
    worker is raised here. With ``num_workers=0`` all is done in this process: then a row that
    crashes or hangs is not caught. Closing the generator kills the workers. Raises BuildError if
    workers cannot start.
    """
    if num_workers == 0:
        with contextlib.closing(make()) as work:
            for chunk in chunks:
                yield chunk, work(chunk, lambda row: None)
        return
    pool = _Pool(make, chunks, num_workers, timeout)
    try:
        yield from pool.results()
    finally:
        pool.stop()


def call_here(function: Callable[[], Any]) -> Any:
    """Return ``function()``, called in this process."""
    return function()


def call_in_process(function: Callable[[], Any], timeout: float) -> Any:
    """Return ``function()``, called once in a forked process of its own.

    Files that it opens are not shared with workers that are forked later: those would move each
    other's position in the file. Its result has to be picklable and small. Where processes are not
    forked (macOS), the function is called in this process, without a timeout.
    Raises what the function raises, BuildError if its process dies, and TimeoutError if it takes
    longer than ``timeout`` seconds.
    """
    if not _forks():
        return function()
    worker = _Worker(0, lambda: lambda chunk, note_row: function(), _CONTEXT.RawArray("q", 1))
    try:
        worker.start()
        worker.give(Chunk(0, 1))
        if not worker.connection.poll(min(timeout, 1e6)):
            raise TimeoutError(f"it took longer than {timeout:g} s")
        result = worker.connection.recv()
    except (EOFError, ConnectionError):
        raise BuildError(worker.cause_of_death()) from None
    finally:
        worker.stop()
    if isinstance(result, BaseException):
        raise result
    return result


def limit_memory(extra_bytes: int) -> None:
    """Let this process allocate ``extra_bytes`` more, then raise MemoryError. Linux only."""
    if sys.platform == "linux":
        import resource

        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123  # in every worker
            pages = int(file.read().split()[5])
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        largest = sys.maxsize if hard == resource.RLIM_INFINITY else hard
        limit = min(pages * resource.getpagesize() + extra_bytes, largest)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


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

    def results(self) -> Generator[tuple[Chunk, Any] | Lost, None, None]:
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
                failure = worker.failure(elapsed, self.timeout)
                if worker.connection in ready:
                    try:
                        result = worker.connection.recv()
                    except (EOFError, OSError):
                        failure = worker.cause_of_death()
                    else:
                        if isinstance(result, BaseException):
                            raise result
                        worker.seconds, self.failed_starts = 0.0, 0
                        yield worker.chunks.popleft(), result
                        self._feed(worker)
                        continue
                if failure:
                    yield from self._replace(worker, failure)

    def stop(self) -> None:
        for worker in self.workers:
            worker.stop()

    def _feed(self, worker: "_Worker") -> None:
        """Give a worker a chunk to do and one in reserve, so that it never has to wait."""
        while len(worker.chunks) < 2:
            chunk = self.again.popleft() if self.again else next(self.chunks, None)
            if chunk is None:
                return
            worker.give(chunk)

    def _replace(self, worker: "_Worker", reason: str) -> Iterator[Lost]:
        row, lost = worker.row, worker.chunks
        worker.stop()
        chunk = lost[0]
        if not chunk.start <= row < chunk.stop:
            self.failed_starts += 1
            if self.failed_starts > 3 * len(self.workers):
                raise BuildError(_no_start(reason))
        elif row in self.suspects:
            yield Lost(row, reason)
            lost.popleft()
            rest = (Chunk(chunk.start, row), Chunk(row + 1, chunk.stop))
            lost.extend(part for part in rest if part.start < part.stop)
        else:
            self.suspects.add(row)
        self.again.extend(lost)
        self.workers[worker.number] = _Worker(worker.number, self.make, self.current_rows)
        self.workers[worker.number].start()
        for idle in self.workers:
            self._feed(idle)


class _Worker:
    """One process with its pipe, and the chunks that it was given and has not done."""

    def __init__(self, number: int, make: Callable[[], Any], current_rows: Any) -> None:
        self.number, self.current_rows = number, current_rows
        current_rows[number] = _NO_ROW
        self.connection, self.its_end = _CONTEXT.Pipe()
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
            raise BuildError(
                f"Worker {self.number + 1} cannot be started: {error}. Use fewer workers, or "
                "raise the limits on processes and open files."
            ) from error
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            if _forks():  # nothing was pickled
                raise
            raise BuildError(
                "The source cannot be pickled, which this system needs to start workers: "
                f"{error!s:.300}. Define it at the top level of a module, without lambdas and "
                "open files, or use num_workers=0."
            ) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.its_end.close()

    def give(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)
        with contextlib.suppress(OSError):  # it has died, which is noticed at the next look
            self.connection.send(chunk)

    def failure(self, elapsed: float, timeout: float) -> str:
        """Say what is wrong with it, if anything, ``elapsed`` seconds after the last look."""
        row = self.current_rows[self.number]
        self.seconds = self.seconds + elapsed if row == self.row else 0.0
        self.row = row
        # A data set's own children may hold the pipe open after the worker's death.
        if not self.process.is_alive() and not self.connection.poll():
            return self.cause_of_death()
        limit = timeout if row != _NO_ROW else max(timeout, _START_SECONDS)
        return f"it took longer than {timeout:g} s" if self.seconds > limit else ""

    def cause_of_death(self) -> str:
        self.process.join(10)
        self.row = self.current_rows[self.number]
        code = self.process.exitcode
        if code is None or code >= 0:
            return f"decoding it ended the process (exit status {code})"
        return f"decoding it killed the process ({signal.Signals(-code).name})"

    def stop(self) -> None:
        if self.connection.closed:  # it was replaced
            return
        if self.process.pid is not None:
            self.process.kill()
            self.process.join(10)
        self.connection.close()
        self.its_end.close()
        with contextlib.suppress(ValueError):  # it cannot be waited for, as with SIGCHLD ignored
            self.process.close()


def _serve(
    connection: Any, make: Callable[[], Any], current_rows: Any, number: int, parent: int
) -> None:
    """Do chunks until the parent is gone. A worker's main function."""
    # Ctrl-C reaches the whole group; the parent decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    _die_with(parent)
    if "torch" in sys.modules:
        # Its threads were not forked, and an operation that uses them would never end.
        sys.modules["torch"].set_num_threads(1)

    def note_row(row: int) -> None:
        current_rows[number] = row

    work = None
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone
        while True:
            chunk = connection.recv()
            try:
                work = work or make()
                result = work(chunk, note_row)
                data = pickle.dumps(result)
            except BaseException as error:  # noqa: BLE001  # it is raised in the parent
                data = _pickled(error)
            note_row(_NO_ROW)
            connection.send_bytes(data)


def _pickled(error: BaseException) -> bytes:
    """Return an exception for the parent.

    One that cannot be pickled, or is a request to exit, becomes a BuildError.
    """
    try:
        if not isinstance(error, Exception):
            raise TypeError
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:  # noqa: BLE001  # an exception of a data set's may be of any kind
        data = pickle.dumps(BuildError(describe_error(error)))
    return data


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, even while it hangs in a row."""
    if sys.platform == "linux":
        import ctypes  # NumPy has loaded it already

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it died before the call
            os._exit(1)


def _forks() -> bool:
    return bool(_CONTEXT.get_start_method() == "fork")


def _no_start(reason: str) -> str:
    guard = (
        ""
        if _forks()
        else ", and put the call under 'if __name__ == \"__main__\":': workers import the script"
    )
    return (
        f"Workers die before their first row: {reason}. Use num_workers=0 to see the cause{guard}."
    )
