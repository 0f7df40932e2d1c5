"""Worker processes for chunks of rows. A row that kills or blocks its worker costs only itself.

::

    this process                                      each worker
    hands out one chunk per worker ── pipe ────────▶  make() once, then work(chunk, note_row)
    yields results in any order    ◀─ pipe ─────────  a few numbers; the rows go to the disk
    looks every 0.5 s              ◀─ shared memory   note_row(row): the row that it is at

A worker that dies, or that is at one row for longer than the timeout, is killed and replaced, and
its chunk is done again as a whole. The row that it was at is now a suspect. If it ends a second
worker, its chunk is done again with the row marked as lost. The other workers are not disturbed.

`concurrent.futures.ProcessPoolExecutor` is not used: one dead worker breaks all of that pool, and
nothing says which row it was at.
"""

import contextlib
import functools
import multiprocessing
import operator
import os
import signal
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from multiprocessing.connection import wait
from typing import Any, NamedTuple, Protocol

from PIL import Image

from memload.building.open_files import reopen_files
from memload.errors import BuildError, MemloadError, SourceError, describe_error

#: Linux forks, so workers start at once and a data set need not be picklable, as with DataLoader.
_CONTEXT: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")

#: What a worker's slot of the shared memory holds while it is at no row.
_NO_ROW = -1

#: Seconds a worker may take to start, or from one chunk to the next, however short the timeout is.
_START_SECONDS = 60.0

#: Seconds between two looks at the workers.
_LOOK_SECONDS = 0.5

#: Freeing a block of just below 32 MiB makes glibc reuse freed memory: see `_prepare`.
_LARGE_BLOCK = (32 << 20) - (64 << 10)

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
        """Do a chunk except its lost rows, and return a small result."""

    def close(self) -> None:
        """Close files."""


def run(
    make: Callable[[], Work], chunks: Iterator[Chunk], *, num_workers: int, timeout: float
) -> Generator[tuple[Chunk, Any], None, None]:
    """Yield each chunk and its result, in any order. Closing the generator kills the workers.

    Args:
        make: Called once in each worker.
        chunks: The rows to be done.
        num_workers: With 0, all is done in this process: a row that crashes or hangs is not caught.
        timeout: Seconds for one row.

    An exception in a worker is raised here, as BuildError unless it is an OSError or a
    MemloadError.
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
        for worker in pool.workers:
            worker.kill()  # all at once: the end of a process takes milliseconds
        for worker in pool.workers:
            worker.close()


def look_at(
    look: Callable[[int], Any], rows: Iterable[int], *, num_workers: int, timeout: float
) -> Generator[tuple[Chunk, Any], None, None]:
    """Yield for each row what ``look`` returns, and why it fails. One worker does all.

    An exception is a reason like a crash, but for SourceError and BuildError, which are raised.
    """
    chunks = (Chunk(row, row + 1) for row in rows)
    make = functools.partial(_Look, look, BaseException if num_workers else Exception)
    return run(make, chunks, num_workers=min(num_workers, 1), timeout=timeout)


class _Look:
    """The work of `look_at`."""

    def __init__(self, look: Callable[[int], Any], failures: type[BaseException]) -> None:
        self.look, self.failures = look, failures

    def __call__(self, chunk: Chunk, note_row: NoteRow) -> tuple[Any, str]:
        note_row(chunk.start)
        if chunk.lost:
            return None, chunk.lost[chunk.start]
        try:
            return self.look(chunk.start), ""
        except (SourceError, BuildError):
            raise
        except self.failures as error:  # a data set's own code may raise anything
            return None, describe_error(error)

    def close(self) -> None:
        """Do nothing: it has no files."""


class _Pool:
    """The workers, the chunks that are left, and the rows that are suspects."""

    def __init__(
        self, make: Callable[[], Work], chunks: Iterator[Chunk], num_workers: int, timeout: float
    ) -> None:
        self.make, self.chunks, self.timeout = make, chunks, timeout
        self.current_rows = _CONTEXT.RawArray("q", num_workers)
        self.again, self.suspects = deque[Chunk](), set[int]()
        self.failed_starts = 0
        self.workers: list[_Worker] = []

    def results(self) -> Iterator[tuple[Chunk, Any]]:
        for number in range(len(self.current_rows)):
            self.workers.append(_Worker(number, self.current_rows))
            self._start(self.workers[number])
        while busy := [worker for worker in self.workers if worker.chunk is not None]:
            wait([worker.pipe for worker in busy], _LOOK_SECONDS)
            for worker in busy:
                result, failure = worker.look(self.timeout)
                if isinstance(result, BaseException):
                    raise result
                if failure:
                    self._replace(worker, failure)
                elif result is not None:
                    self.failed_starts = 0
                    done = worker.chunk
                    worker.take(self._next_chunk())
                    yield done, result  # type: ignore[misc]  # a busy worker has a chunk

    def _next_chunk(self) -> Chunk | None:
        return self.again.popleft() if self.again else next(self.chunks, None)

    def _start(self, worker: "_Worker") -> None:
        """Start a worker if there is something to do."""
        chunk = self._next_chunk()
        if chunk is not None:
            worker.start(self.make)
            worker.take(chunk)

    def _replace(self, worker: "_Worker", failure: str) -> None:
        worker.kill()
        worker.close()
        row, chunk = worker.row, worker.chunk._replace(is_retried=True)  # type: ignore[union-attr]
        if row == _NO_ROW:
            self.failed_starts += 1
            if self.failed_starts > 3 * len(self.workers):
                raise BuildError(
                    f"Workers die before their first row: {failure}. Use num_workers=0 to see the "
                    "cause. In a script, put the call under 'if __name__ == \"__main__\":', since "
                    "workers import the script on some systems."
                )
        elif row in self.suspects:
            chunk = chunk._replace(lost={**chunk.lost, row: failure})
        else:
            self.suspects.add(row)
        self.again.append(chunk)
        self.workers[worker.number] = _Worker(worker.number, self.current_rows)
        self._start(self.workers[worker.number])


class _Worker:
    """One process, its pipe, and the chunk that it is at."""

    def __init__(self, number: int, current_rows: Any) -> None:
        self.number, self.current_rows = number, current_rows
        current_rows[number] = _NO_ROW
        self.process, self.pipe = None, None
        self.chunk: Chunk | None = None
        #: the row that it was at when it was last looked at, and since when
        self.row, self.since = _NO_ROW, time.monotonic()

    process: Any
    pipe: Any

    def start(self, make: Callable[[], Work]) -> None:
        # Python's fork hooks and __del__ drop a KeyboardInterrupt, so a Ctrl-C has to wait.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._fork(make)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _fork(self, make: Callable[[], Work]) -> None:
        self.pipe, its_end = _CONTEXT.Pipe()
        arguments = (its_end, make, self.current_rows, self.number, os.getpid())
        self.process = _CONTEXT.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()
        its_end.close()  # so that the end of the process is that of the pipe

    def take(self, chunk: Chunk | None) -> None:
        """Give it a chunk, or nothing."""
        self.chunk, self.row, self.since = chunk, _NO_ROW, time.monotonic()
        if chunk is not None:
            with contextlib.suppress(OSError):  # it has died, which is noticed at the next look
                self.pipe.send(chunk)

    def look(self, timeout: float) -> tuple[Any, str]:
        """Return its result if it is done, and what is wrong with it if anything is."""
        row = self.current_rows[self.number]
        if row != self.row:
            self.row, self.since = row, time.monotonic()
        try:
            if self.pipe.poll():
                return self.pipe.recv(), ""
        except (EOFError, OSError):
            self.process.join()
            code = self.process.exitcode
            if code < 0:
                return None, f"decoding it killed the process ({signal.Signals(-code).name})"
            return None, f"decoding it ended the process (exit status {code})"
        limit = timeout if row != _NO_ROW else max(timeout, _START_SECONDS)
        is_late = time.monotonic() - self.since > limit
        return None, f"it took longer than {limit:g} s" if is_late else ""

    def kill(self) -> None:
        if self.process is not None and self.process.pid is not None:
            self.process.kill()

    def close(self) -> None:
        if self.process is not None and self.process.pid is not None:
            self.process.join(10)
        if self.pipe is not None:
            self.pipe.close()


def _serve(
    pipe: Any, make: Callable[[], Work], current_rows: Any, number: int, parent: int
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
    note_row = functools.partial(operator.setitem, current_rows, number)
    work = None
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone
        while True:
            chunk = pipe.recv()
            try:
                if work is None:
                    _prepare()
                    work = make()
                result = work(chunk, note_row)
            except (OSError, MemloadError) as error:
                result = error
            except BaseException as error:  # noqa: BLE001  # it is raised in the parent
                result = BuildError(describe_error(error))
            note_row(_NO_ROW)
            pipe.send(result)


def _prepare() -> None:
    """Make this process fit for code of the user's and for Pillow."""
    reopen_files()
    if "torch" in sys.modules:
        # Its threads were not forked, and an operation that uses them would never end.
        sys.modules["torch"].set_num_threads(1)
    Image.MAX_IMAGE_PIXELS = None  # --max-pixels is the limit
    warnings.filterwarnings("ignore", module=r"PIL\.")
    # glibc maps large blocks anew each time, with page faults, until it has seen one as large
    # freed: 2 % of the time for a picture with Pillow, 10 % with pillow-simd.
    bytes(_LARGE_BLOCK)
