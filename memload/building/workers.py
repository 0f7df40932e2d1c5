"""Processes that work through ranges of rows, and outlive what kills one of them."""

import contextlib
import functools
import multiprocessing
import multiprocessing.connection
import os
import pickle
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple, Protocol

from memload.errors import BuildError

#: Fork where it is the custom: it starts at once, and takes a user's data set along as DataLoader does.
_CONTEXT: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")

#: What a worker is at besides rows: nothing, or its start; and sending a result.
IDLE, SENDING = -1, -2

#: Seconds that a worker may take to start, however short the timeout for a row: libraries may come over a network.
_START = 60.0

#: Seconds that it may take to send a result and take up the next task, likewise.
_PAUSE = 10.0


#: So much of a result is sent at a time. POSIX promises that a pipe takes it whole or not at all, with the few bytes
#: that `Connection` puts before it: what has begun to arrive is all there, and reading it never waits for the sender.
_PIECE = getattr(select, "PIPE_BUF", 512) - 16

#: Seconds between two looks at the workers. Where far more have passed, this process was not running, and, suspended
#: with the whole group as by Ctrl-Z or with its container, they were not either: of such a gap a worker is charged
#: little. It is charged something, so that a machine too busy to look in time gives up a worker that hangs after all.
_LOOK, _GAP = 0.5, 0.05


class Task(NamedTuple):
    """Rows ``start`` to ``stop``, exclusively."""

    start: int
    stop: int


class Lost(NamedTuple):
    """A row that killed its worker twice, or took too long twice."""

    row: int
    reason: str


class Work(Protocol):
    """What a worker does. Made in its process."""

    def __call__(self, task: Task, begin: Callable[[int], None]) -> Any:
        """Do a task, calling ``begin`` with each row before it is begun, and return the result."""

    def close(self) -> None:
        """Let go of files."""


class _Worker:
    def __init__(
        self, number: int, make: Callable[[], Work], rows: Any, others: list["_Worker"]
    ) -> None:
        self.number = number
        their_tasks, self.orders = _CONTEXT.Pipe(duplex=False)
        self.results, their_results = _CONTEXT.Pipe(duplex=False)
        self.ours, self.theirs = (self.orders, self.results), (their_tasks, their_results)
        rows[number] = IDLE
        # A forked child holds what its parent held. Were these left open in it, no worker would see that the
        # parent is gone, and each would wait for the others.
        close = [end for worker in (self, *others) for end in worker.ours] if _forks() else []
        arguments = (*self.theirs, number, make, rows, close, os.getpid())
        self.process = _CONTEXT.Process(target=_serve, args=arguments, daemon=True)
        self.tasks: deque[Task] = deque()
        #: where it was when it was last looked at, and how many seconds it has been there
        self.row, self.spent, self.started = IDLE, 0.0, False
        self._pieces: list[bytes] = []

    def start(self) -> None:
        try:
            with _interrupt_later():
                self.process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            if _forks():  # which pickles nothing: the fault is another's
                raise
            raise BuildError(
                "workers: expected a source that can be pickled, as this system starts processes anew, found: "
                f"{error!s:.300}. Define it at the top of a module, without lambdas and open files, or say "
                "num_workers=0"
            ) from error
        for end in self.theirs:
            end.close()

    def give(self, task: Task) -> None:
        self.tasks.append(task)
        with contextlib.suppress(OSError):  # it has died: told by its sentinel
            self.orders.send(task)

    def receive(self) -> tuple[Any] | None:
        """Return the next result if it is there, and else None, without waiting. Raises EOFError and OSError."""
        while self.results.poll():
            piece = self.results.recv_bytes()
            self.started, self.spent = (
                True,
                0.0,
            )  # a large one may take long; one that has stopped sends none
            self._pieces.append(piece[1:])
            if piece[:1] == _LAST:
                data = b"".join(self._pieces)
                self._pieces.clear()
                return (pickle.loads(data),)  # of this program's own process
        return None

    def stop(self) -> None:
        if self.process.pid is not None:
            self.process.kill()
            self.process.join(10)
        for end in (*self.ours, *self.theirs):
            end.close()
        with contextlib.suppress(
            ValueError
        ):  # where SIGCHLD is ignored, nobody can tell that it has ended
            self.process.close()


#: What a piece of a result begins with.
_MORE, _LAST = b"+", b"."


def _send(connection: Any, data: bytes) -> None:
    size = _PIECE - 1
    for start in range(0, len(data), size):
        last = start + size >= len(data)
        connection.send_bytes((_LAST if last else _MORE) + data[start : start + size])


def _forks() -> bool:
    return bool(_CONTEXT.get_start_method() == "fork")


@contextlib.contextmanager
def _interrupt_later() -> Iterator[None]:
    """Have a Ctrl-C come after a fork: one that comes within it, Python raises in its own hooks, and forgets."""
    if not hasattr(signal, "pthread_sigmask"):  # nor does Windows fork
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(
    tasks: Any,
    results: Any,
    number: int,
    make: Callable[[], Work],
    rows: Any,
    close: list[Any],
    parent: int,
) -> None:
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the whole group; the parent decides
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(
            signal.SIG_UNBLOCK, {signal.SIGINT}
        )  # as it was, for programs that a data set may start
    _die_with(parent)
    for other in close:
        other.close()

    def begin(row: int) -> None:
        rows[number] = row

    work = None
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone
        while True:
            task = tasks.recv()
            try:
                work = make() if work is None else work
                result = work(task, begin)
            except Exception as error:  # noqa: BLE001  # it is raised where the results are awaited
                result = error
            data = pickle.dumps(result)
            rows[number] = SENDING
            _send(results, data)
            rows[number] = IDLE


def _die_with(parent: int) -> None:
    """End this process when the parent is killed, at once: one that hangs in a record would never see it."""
    if sys.platform == "linux":
        import ctypes  # NumPy has loaded it

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it was killed before that line
            os._exit(1)


def run(
    make: Callable[[], Work], tasks: Iterator[Task], *, num_workers: int, timeout: float
) -> Generator[tuple[Task, Any] | Lost, None, None]:
    """Yield the result of every task, in any order, and `Lost` rows.

    ``make`` is called once in each worker. A row that kills its worker, or takes longer than ``timeout`` seconds,
    is tried once more alone, and then given up as `Lost`; all other rows of its task are done again. An
    exception in a worker is raised here. Time in which this process was suspended does not count. With
    ``num_workers=0`` all is done in this process, where neither protection is to be had. Closing the generator ends
    the workers. Raises BuildError where workers do not start.
    """
    if num_workers == 0:
        with contextlib.closing(make()) as work:
            for task in tasks:
                yield task, work(task, lambda row: None)
        return
    check_start(num_workers)
    rows = _CONTEXT.RawArray("q", num_workers)
    again: deque[Task] = deque()
    blamed: set[int] = set()
    failed_starts = 0
    workers: list[_Worker] = []

    def give_more(worker: _Worker) -> None:
        while (
            len(worker.tasks) < 2
        ):  # one in hand and one waiting, so that no worker waits for this process
            task = again.popleft() if again else next(tasks, None)
            if task is None:
                return
            worker.give(task)

    try:
        for number in range(num_workers):
            # Known before it starts: one that an interrupt leaves unknown is never killed, only asked to end at exit.
            workers.append(_Worker(number, make, rows, workers.copy()))
            workers[-1].start()
        for worker in workers:
            give_more(worker)
        looked = time.monotonic()
        while any(worker.tasks for worker in workers):
            _wait(workers)
            now = time.monotonic()
            passed, looked = now - looked, now
            for number, worker in enumerate(workers):
                reason = ""
                while worker.tasks:
                    try:
                        found = worker.receive()
                    except (EOFError, OSError):  # OSError: it was killed while it sent
                        reason = _cause(worker)
                        break
                    if found is None:
                        break
                    result = found[0]
                    if isinstance(result, BaseException):
                        raise result
                    yield worker.tasks.popleft(), result
                    give_more(worker)
                if (
                    not reason
                    and worker.tasks
                    and not worker.process.is_alive()
                    and not worker.results.poll()
                ):
                    reason = _cause(worker)
                if not reason and _overdue(worker, rows[number], passed, timeout):
                    reason = f"it took longer than {timeout:g} s"
                if not reason:
                    continue
                row, lost = rows[number], list(worker.tasks)
                worker.stop()
                first = lost[0] if lost else Task(0, 0)
                if first.start <= row < first.stop:
                    whole = [Task(first.start, row), Task(row, row + 1), Task(row + 1, first.stop)]
                    if row in blamed:
                        del whole[1]
                        yield Lost(row, reason)
                    blamed.add(row)
                    lost[:1] = [task for task in whole if task.start < task.stop]
                else:
                    failed_starts += 1
                    if failed_starts > 3 * num_workers:
                        raise BuildError(_no_start(reason))
                again.extend(lost)
                workers[number] = _Worker(
                    number, make, rows, [w for w in workers if w is not worker]
                )
                workers[number].start()
                for other in workers:
                    give_more(other)
    finally:
        for worker in workers:
            with contextlib.suppress(ValueError):  # stopped and closed already
                worker.stop()


def here(function: Callable[[], Any]) -> Any:
    """Return what a function returns."""
    return function()


#: Seconds that what is done aside may take: a data set's first samples, perhaps over a network.
_ASIDE = 600.0


def aside(function: Callable[[], Any]) -> Any:
    """Return what a function returns, called in a forked process of its own.

    What it opens there is not shared with workers that are forked later, which would move one another's places in
    the files. Where the system does not fork, it is called in this process: workers there get a copy by pickling.
    """
    if not _forks() or multiprocessing.current_process().daemon:
        return function()
    work = functools.partial(_Aside, function)
    with contextlib.closing(
        run(work, iter([Task(0, 1)]), num_workers=1, timeout=_ASIDE)
    ) as results:
        found = next(results)
    if isinstance(found, Lost):
        raise BuildError(
            f"source: expected to be read, found that the process that did so failed: {found.reason}"
        )
    return found[1]


class _Aside:
    """A function as work."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        if (
            "torch" in sys.modules
        ):  # whose threads did not come along: what used them would never end
            sys.modules["torch"].set_num_threads(1)

    def __call__(self, task: Task, begin: Callable[[int], None]) -> Any:
        begin(0)
        return self.function()

    def close(self) -> None:
        """Nothing is held."""


def _wait(workers: list[_Worker]) -> None:
    busy = [worker for worker in workers if worker.tasks]
    handles = [worker.results for worker in busy] + [worker.process.sentinel for worker in busy]
    multiprocessing.connection.wait(handles, timeout=_LOOK)


def _overdue(worker: _Worker, row: int, passed: float, timeout: float) -> bool:
    """Say whether a worker has been at one row, or at its start, for too long, ``passed`` seconds after the last look.

    At its start it may take `_START` seconds at least, and between two tasks `_PAUSE`.
    """
    worker.started = worker.started or row != IDLE
    if row != worker.row or not worker.tasks:
        worker.row, worker.spent = row, 0.0
    else:
        worker.spent += passed if passed <= 2 * _LOOK else _GAP
    if row < 0:
        timeout = max(timeout, _PAUSE if worker.started else _START)
    return worker.spent > timeout


def _cause(worker: _Worker) -> str:
    worker.process.join(10)
    code = worker.process.exitcode
    if code is not None and code < 0:
        return f"decoding it killed the process ({_signal_name(-code)})"
    return f"decoding it ended the process (exit status {code})"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # one of the real-time signals, most of which have none
        return f"signal {number}"


def _no_start(reason: str) -> str:
    main = (
        ""
        if _forks()
        else ", and put the call under 'if __name__ == \"__main__\":', as a process starts with it anew"
    )
    return f"workers: expected them to start, found that they die: {reason}. Say num_workers=0 to see what it is{main}"


def check_start(num_workers: int) -> None:
    """Raise BuildError where this process may not start so many."""
    if num_workers and multiprocessing.current_process().daemon:
        raise BuildError(
            "workers: expected a process that may start others, found a daemonic one, such as a worker of a DataLoader "
            "or of a Pool. Say num_workers=0, or build in the main process"
        )


def limit_memory(more: int) -> None:
    """Let this process have so many more bytes than it has; what asks for more gets a MemoryError. Linux alone."""
    if sys.platform == "linux":
        import resource

        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123  # in each worker, at its start
            pages = int(file.read().split()[5])
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = pages * resource.getpagesize() + more
        if limit > sys.maxsize:  # beyond what a process can address, and than the call takes
            return
        resource.setrlimit(
            resource.RLIMIT_DATA,
            (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard),
        )
