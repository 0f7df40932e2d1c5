"""Worker processes for chunks of rows. A row that kills or blocks its worker costs only itself.

::

    this process                                      each worker
    hands out one chunk per worker ── pipe ────────▶  work(chunk, note_row)
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
from typing import Any, NamedTuple

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


class Chunk(NamedTuple):
    """Rows ``start`` to ``stop``, exclusively.

    ``lost`` has the rows that killed their worker twice, or took too long twice, and the reasons.
    ``is_retried`` says that a worker has been at it and was replaced.
    """

    start: int
    stop: int
    lost: Mapping[int, str] = {}
    is_retried: bool = False


#: A function that is told each row before work on it begins.
NoteRow = Callable[[int], None]
#: Does a chunk except its lost rows, and returns a small result.
Work = Callable[[Chunk, NoteRow], Any]


def run(
    work: Work, chunks: Iterator[Chunk], *, num_workers: int, timeout: float
) -> Generator[tuple[Chunk, Any], None, None]:
    """Yield each chunk and its result, in any order. Closing the generator kills the workers.

    Args:
        work: What each worker does.
        chunks: The rows to be done.
        num_workers: With 0, all is done in this process: a row that crashes or hangs is not caught.
        timeout: Seconds for one row.

    An exception in a worker is raised here, as BuildError unless it is an OSError or a
    MemloadError.
    """
    if num_workers == 0:
        yield from ((chunk, work(chunk, lambda row: None)) for chunk in chunks)
        return
    current_rows = _CONTEXT.RawArray("q", num_workers)
    again, suspects, failed_starts = deque[Chunk](), set[int](), 0

    def next_chunk() -> Chunk | None:
        return again.popleft() if again else next(chunks, None)

    workers = [_Worker(work, current_rows, number) for number in range(num_workers)]
    try:
        for worker in workers:
            worker.take(next_chunk())
        while busy := [worker for worker in workers if worker.chunk is not None]:
            wait([worker.pipe for worker in busy], _LOOK_SECONDS)
            for worker in busy:
                chunk: Any = worker.chunk
                result, failure = worker.look(timeout)
                if isinstance(result, BaseException):
                    raise result
                if result is not None:
                    failed_starts = 0
                    worker.take(next_chunk())
                    yield chunk, result
                if not failure:
                    continue
                row, chunk = worker.row, chunk._replace(is_retried=True)
                if row == _NO_ROW or row in chunk.lost:  # it was not the row
                    failed_starts += 1
                    _check_starts(failed_starts, num_workers, failure)
                elif row in suspects:
                    chunk = chunk._replace(lost={**chunk.lost, row: failure})
                else:
                    suspects.add(row)
                again.append(chunk)
                worker.end()
                worker.take(next_chunk())
    finally:
        for worker in workers:
            worker.kill()  # all at once: the end of a process takes milliseconds
        for worker in workers:
            worker.end()


def _check_starts(failed: int, num_workers: int, failure: str) -> None:
    if failed > 3 * num_workers:
        raise BuildError(
            f"Workers die, whatever row they are at: {failure}. Use num_workers=0 to see why. In a "
            "script, put the call under 'if __name__ == \"__main__\":', since workers import the "
            "script on some systems."
        )


def look_at(
    look: Callable[[int], Any], rows: Iterable[int], *, num_workers: int, timeout: float
) -> Generator[tuple[Chunk, Any], None, None]:
    """Yield for each row what ``look`` returns, and why it fails. One worker does all.

    An exception is a reason like a crash, but for SourceError and BuildError, which are raised.
    """
    chunks = (Chunk(row, row + 1) for row in rows)
    work = functools.partial(_look_at_one, look, BaseException if num_workers else Exception)
    return run(work, chunks, num_workers=min(num_workers, 1), timeout=timeout)


def _look_at_one(
    look: Callable[[int], Any], failures: type[BaseException], chunk: Chunk, note_row: NoteRow
) -> tuple[Any, str]:
    note_row(chunk.start)
    if chunk.lost:
        return None, chunk.lost[chunk.start]
    try:
        return look(chunk.start), ""
    except (SourceError, BuildError):
        raise
    except failures as error:  # a data set's own code may raise anything
        return None, describe_error(error)


class _Worker:
    """A process that does one chunk at a time. It is started with its first chunk."""

    def __init__(self, work: Work, current_rows: Any, number: int) -> None:
        self._work, self._current_rows, self._number = work, current_rows, number
        self._process: Any = None
        self.pipe: Any = None
        self.chunk: Chunk | None = None
        #: the row that it was at when it was last looked at, and since when
        self.row, self._since = _NO_ROW, 0.0

    def take(self, chunk: Chunk | None) -> None:
        """Give it a chunk, or nothing."""
        self.chunk = chunk
        if chunk is None:
            return
        if self._process is None:
            # Python's fork hooks and __del__ drop a KeyboardInterrupt, so a Ctrl-C has to wait.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                self._start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.row, self._since = _NO_ROW, time.monotonic()
        with contextlib.suppress(OSError):  # it has died, which is noticed at the next look
            self.pipe.send(chunk)

    def _start(self) -> None:
        self._current_rows[self._number] = _NO_ROW
        self.pipe, its_end = _CONTEXT.Pipe()
        note_row = functools.partial(operator.setitem, self._current_rows, self._number)
        arguments = (its_end, self._work, note_row, os.getpid())
        process = _CONTEXT.Process(target=_serve, args=arguments, daemon=True)
        process.start()
        self._process = process
        its_end.close()  # so that the end of the process is that of the pipe

    def look(self, timeout: float) -> tuple[Any, str]:
        """Return its result if it is done, and what is wrong with it if anything is."""
        row = self._current_rows[self._number]
        if row != self.row:
            self.row, self._since = row, time.monotonic()
        try:
            if self.pipe.poll():
                return self.pipe.recv(), ""
        except (EOFError, OSError):
            self._process.join()
            code = self._process.exitcode
            if code < 0:
                return None, f"decoding it killed the process ({signal.Signals(-code).name})"
            return None, f"decoding it ended the process (exit status {code})"
        limit = timeout if row != _NO_ROW else max(timeout, _START_SECONDS)
        is_late = time.monotonic() - self._since > limit
        return None, f"it took longer than {limit:g} s" if is_late else ""

    def kill(self) -> None:
        """Kill it. Do not wait until it has ended."""
        if self._process is not None:
            self._process.kill()

    def end(self) -> None:
        """Kill it, and wait. The next chunk starts another process."""
        self.kill()
        if self._process is not None:
            self._process.join(10)
            self.pipe.close()
        self._process = None


def _serve(pipe: Any, work: Work, note_row: NoteRow, parent: int) -> None:
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
    is_prepared = False
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone
        while True:
            chunk = pipe.recv()
            try:
                if not is_prepared:
                    _prepare()
                    is_prepared = True
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
