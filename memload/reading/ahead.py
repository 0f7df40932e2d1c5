"""Keep the next items in flight: `ahead` begins them early, `on_thread` iterates on a thread.

Both are generators. When their loop ends, in whatever way, they stop the threads and close the
iterators that they started. An exception is raised after the items before it. What is in flight
does not survive a fork: in the child, the next item raises RuntimeError.

A script may end while an iterator is alive. Threads are ended at exit, before the interpreter ends.
When a generator is closed after that, module globals may be None. So it copies what it needs to
local names first.
"""

import atexit
import contextlib
import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from memload.jobs import Job
from memload.machine import starting_threads

T = TypeVar("T")

#: Begins the name of each thread of a pool.
_POOL_NAME = "memload-ahead"
#: Seconds that an early exit waits for the thread of an iterable, which may wait for anything.
_MAX_WAIT = 10.0
_FORKED = (
    "This iterator is used in a forked child, but what it has in flight stayed in the parent "
    "process. Iterate anew in the child."
)


def ahead(
    jobs: Generator[Job[T], None, None], in_flight: int, num_threads: int = 0
) -> Generator[T, None, None]:
    """Yield the result of every job, in order, with ``in_flight`` of them begun at a time.

    ``in_flight``, at least 1, counts the item that is yielded next. Jobs are taken on the caller's
    thread, and closed in the end. ``num_threads`` threads call them. With 0 the caller's thread
    does, which is ahead of the consumer if a job only starts something, as on a CUDA stream. It
    calls a job that is not ready (`Job.is_ready`) only when no other item is left to yield. So no
    item waits for the disk on account of a later one. An early exit waits for the jobs that threads
    have begun.

    >>> from functools import partial
    >>> squares = (Job(partial(pow, number, 2)) for number in range(4))
    >>> list(ahead(squares, in_flight=2))
    [0, 1, 4, 9]
    """
    is_finalizing, getpid, this_process = sys.is_finalizing, os.getpid, os.getpid()
    pool = ThreadPoolExecutor(num_threads, _POOL_NAME) if num_threads else None
    begun: deque[Any] = deque()
    job, more_jobs = None, True
    failure: Exception | None = None
    try:
        while True:
            while more_jobs and len(begun) < in_flight:
                try:
                    job = job or next(jobs, None)
                    if job is None:
                        more_jobs = False
                        break
                    if begun and pool is None and not job.is_ready():
                        break
                    begun.append(job() if pool is None else _submit(pool, job))
                    job = None  # its memory may be what the next item takes
                except Exception as error:  # noqa: BLE001  # raised below, when its turn comes
                    failure, more_jobs = error, False
            if not begun:
                break
            yield begun.popleft() if pool is None else begun.popleft().result()
            if getpid() != this_process and (num_threads or in_flight > 1):
                raise RuntimeError(_FORKED)
        if failure is not None:
            raise failure
    finally:
        failure = job = None  # a traceback may hold this frame
        jobs.close()
        if pool is not None and not is_finalizing() and getpid() == this_process:
            # A thread of a pool may happen to collect a dropped generator. It must not wait.
            is_consumer = not threading.current_thread().name.startswith(_POOL_NAME)
            pool.shutdown(wait=is_consumer, cancel_futures=True)


def on_thread(iterable: Iterable[T], prefetch_factor: int) -> Generator[T, None, None]:
    """Yield the items of an iterable, which a thread takes, at most ``prefetch_factor`` ahead.

    >>> list(on_thread(range(3), prefetch_factor=2))
    [0, 1, 2]
    """
    is_finalizing, getpid, this_process = sys.is_finalizing, os.getpid, os.getpid()
    producer = _Producer(iterable, prefetch_factor)
    del iterable  # the thread alone holds it
    try:
        with starting_threads("iterate without a prefetcher"):
            producer.start()
        while True:
            is_item, value = producer.items.get()
            if not is_item:
                break
            producer.room.put(None)
            yield value
            del value  # its memory may be what the next item takes
            if getpid() != this_process:
                raise RuntimeError(_FORKED)
        if value is not None:
            raise value
    finally:
        value = None  # the traceback of an exception holds this frame
        if not is_finalizing():
            producer.end()


def _submit(pool: ThreadPoolExecutor, job: Job[T]) -> Future[T]:
    with starting_threads("use num_threads=0, which makes batches on your own thread"):
        return pool.submit(job)


class _Producer(threading.Thread):
    """Puts (True, item) into ``items`` whenever there is room.

    In the end it puts (False, None), or (False, exception).
    """

    def __init__(self, iterable: Iterable[Any], prefetch_factor: int) -> None:
        super().__init__(name="memload-prefetch", daemon=True)
        self._iterable, self._is_ended = iterable, False
        # SimpleQueue is written in C. An interrupt inside of queue.Queue could leave its lock held.
        self.items: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()
        self.room: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(prefetch_factor):
            self.room.put(None)

    def run(self) -> None:
        error, iterator = None, None
        try:
            iterator = iter(self._iterable)
            while True:
                self.room.get()
                if self._is_ended:
                    break
                self.items.put((True, next(iterator)))
        except StopIteration:
            pass
        except BaseException as caught:  # noqa: BLE001  # whatever it is, the loop raises it
            error = caught
        if self._is_ended and isinstance(iterator, Generator):
            with contextlib.suppress(Exception):  # the loop has ended: nobody is there to catch it
                iterator.close()
        del self._iterable
        self.items.put((False, error))

    def end(self) -> None:
        """Let the thread end, and wait for it, but not without end."""
        self._is_ended = True
        self.room.put(None)
        if self.is_alive() and self is not threading.current_thread():
            self.join(_MAX_WAIT)


@atexit.register
def _end_producers() -> None:
    """End the threads before the interpreter ends.

    A thread still inside torch would then abort the process.
    """
    for thread in threading.enumerate():
        if isinstance(thread, _Producer):
            thread.end()
