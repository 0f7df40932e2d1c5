"""The loop that makes batches ahead of their consumer, in two queues.

    jobs ─▶ reading ───────────▶ made ────────────────────▶ consumer
            rows asked for       on threads, or by the      in order
            of the disk          consumer's own thread

`run_ahead` knows nothing of data sets. A script may end while its generator is alive. Threads are
ended at exit, before the interpreter ends. When the generator is closed after that, names of
modules may be gone.
"""

import itertools
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

from memload.feeds.feed import current_stream
from memload.machine import starting_threads
from memload.reading.streams import SideStream

_POOL_NAME = "memload-batch"
FORKED = (
    "This iterator is used in a forked child, but what it has in flight stayed in the parent "
    "process. Iterate anew in the child."
)


class Job(NamedTuple):
    """Makes one batch: ``make()`` blocks until what it needs is there, and returns the batch.

    ``is_ready()`` returns whether it would not wait for the disk, and never blocks. ``note`` is
    anything that the consumer wants to know of the batch.
    """

    make: Callable[[], Any]
    is_ready: Callable[[], bool] = lambda: True
    note: Any = None


def run_ahead(
    jobs: Iterable[Job],
    *,
    side: SideStream | None = None,
    num_threads: int = 0,
    in_flight: int = 1,
    reads_ahead: int = 0,
) -> Generator[tuple[Any, Any], None, None]:
    """Yield every job and the batch that it has made, in order. An error comes in its turn.

    Args:
        jobs: taken on the caller's thread. To take one is to begin reading its rows.
        side: makes batches on a CUDA stream of its own, and hands them over to the caller's.
        num_threads: how many threads make batches. With 0, the caller's thread makes them. With
            ``side`` it only asks the GPU to, so these come ahead, too. It does not wait for the
            disk while it has a batch to yield.
        in_flight: how many batches are made at a time, counting the one that is yielded next.
        reads_ahead: how many more jobs are taken before that.
    """
    process, getpid, is_finalizing = os.getpid(), os.getpid, sys.is_finalizing
    pool = ThreadPoolExecutor(num_threads, _POOL_NAME) if num_threads else None
    jobs = _with_errors(jobs)
    reading: deque[Any] = deque()
    made: deque[tuple[Any, Any]] = deque()
    job = None
    try:
        while True:
            taken = len(reading) + len(made)
            reading.extend(itertools.islice(jobs, reads_ahead + in_flight - taken))
            while reading and len(made) < in_flight:
                if made and pool is None and not reading[0].is_ready():
                    break
                job = reading.popleft()
                made.append((job, _begin(job, side, pool)))
            if not made:
                return
            job = None  # its memory may be what the next one takes
            yield _hand_over(*made.popleft(), side)
            if getpid() != process and (reading or made or pool is not None):
                raise RuntimeError(FORKED)
    finally:
        job = None  # a traceback may hold this frame, and with it page-locked memory
        reading.clear()
        made.clear()
        if pool is not None and not is_finalizing() and getpid() == process:
            # A thread of the pool may happen to collect a dropped generator. It must not wait.
            is_consumer = not threading.current_thread().name.startswith(_POOL_NAME)
            pool.shutdown(wait=is_consumer, cancel_futures=True)


def _begin(job: Any, side: SideStream | None, pool: Executor | None) -> Callable[[], Any]:
    """Make the batch of a job, or let a thread do so. Returns what returns it, or raises."""
    make = job.make
    if side is not None:
        # A thread of the pool could not ask for the caller's current stream.
        make = partial(side.begin, make, current_stream(side.device))
    if pool is None:
        try:
            batch = make()
        except Exception as error:  # noqa: BLE001  # raised when its turn comes
            return partial(_raise, [error])
        return lambda: batch
    with starting_threads("use num_threads=0, which makes batches on your own thread"):
        return pool.submit(make).result


def _hand_over(job: Any, result: Callable[[], Any], side: SideStream | None) -> tuple[Any, Any]:
    batch = result()
    return job, batch if side is None else side.hand_over(batch)


def _with_errors(jobs: Iterable[Any]) -> Iterator[Any]:
    """Yield jobs. If one cannot be had, the last job raises the error, after those before it."""
    try:
        yield from jobs
    except Exception as error:  # noqa: BLE001  # raised when its turn comes
        yield Job(partial(_raise, [error]))


def _raise(errors: list[Exception]) -> None:
    raise errors.pop()  # the traceback has this frame, which must not hold the error
