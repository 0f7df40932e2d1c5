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
import itertools
import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

#: Seconds that an early exit waits for each thread of a pool. It may be in the user's transform, or
#: reading from a slow disk.
_MAX_WAIT = 60.0
#: Seconds that it waits for the thread of an iterable, which may itself wait for anything.
_MAX_WAIT_FOR_ITERABLE = 10.0
#: One for each pool, so that its threads can be told from others.
_pool_numbers = itertools.count()


def ahead(
    begin: Callable[..., T],
    jobs: Generator[tuple[Any, ...], None, None],
    in_flight: int,
    num_threads: int = 0,
) -> Generator[T, None, None]:
    """Yield ``begin(*job)`` for every job, in order, with ``in_flight`` of them begun at a time.

    ``in_flight``, at least 1, counts the item that is yielded next. Jobs are taken on the caller's
    thread, and closed in the end. ``num_threads`` threads call ``begin``. With 0 the caller's
    thread calls it, which is ahead of the consumer if ``begin`` only starts something, as on a CUDA
    stream.

    >>> list(ahead(pow, ((number, 2) for number in range(4)), in_flight=2))
    [0, 1, 4, 9]
    """
    is_finalizing, getpid, this_process = sys.is_finalizing, os.getpid, os.getpid()
    name = f"memload-{next(_pool_numbers)}"
    pool = ThreadPoolExecutor(num_threads, name) if num_threads else None
    begun: deque[Any] = deque()
    more_jobs = True
    failure: Exception | None = None
    try:
        while True:
            while more_jobs and len(begun) < in_flight:
                try:
                    job = next(jobs, None)
                    if job is None:
                        more_jobs = False
                    else:
                        begun.append(begin(*job) if pool is None else pool.submit(begin, *job))
                    job = None  # its memory may be what the next item takes
                except Exception as error:  # noqa: BLE001  # raised below, when its turn comes
                    failure, more_jobs = error, False
            if not begun:
                break
            yield begun.popleft() if pool is None else begun.popleft().result()
            if num_threads or in_flight > 1:
                _check_process(this_process)
        if failure is not None:
            raise failure
    finally:
        failure = job = None  # a traceback may hold this frame
        jobs.close()
        if pool is not None and not is_finalizing() and getpid() == this_process:
            _end(pool, name)


def on_thread(iterable: Iterable[T], prefetch_factor: int) -> Generator[T, None, None]:
    """Yield the items of an iterable, which a thread takes, at most ``prefetch_factor`` ahead.

    >>> list(on_thread(range(3), prefetch_factor=2))
    [0, 1, 2]
    """
    is_finalizing, getpid, this_process = sys.is_finalizing, os.getpid, os.getpid()
    # SimpleQueue is written in C. An interrupt inside of queue.Queue could leave its lock held.
    items: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()
    room: queue.SimpleQueue[None] = queue.SimpleQueue()
    for _ in range(prefetch_factor):
        room.put(None)
    stop = threading.Event()
    thread = threading.Thread(
        target=_produce, args=(iterable, items, room, stop), name="memload-prefetch", daemon=True
    )
    del iterable  # the thread alone holds it
    producer = _Producer(thread, stop, room, this_process)
    producers = _producers
    try:
        producers.add(producer)
        thread.start()
        while True:
            is_item, value = items.get()
            if not is_item:
                break
            room.put(None)
            yield value
            del value  # its memory may be what the next item takes
            _check_process(this_process)
        if value is not None:
            raise value
    finally:
        value = None  # the traceback of an exception holds this frame
        producers.discard(producer)
        if not is_finalizing() and getpid() == this_process:
            producer.end()


class _Producer(NamedTuple):
    """The thread of `on_thread`, and what ends it."""

    thread: threading.Thread
    stop: threading.Event
    room: "queue.SimpleQueue[None]"
    process: int

    def end(self) -> None:
        """Let the thread end, and wait for it, but not without end."""
        self.stop.set()
        self.room.put(None)
        if self.thread.ident is not None and self.thread is not threading.current_thread():
            self.thread.join(_MAX_WAIT_FOR_ITERABLE)


#: The producers whose iterators are alive.
_producers: set[_Producer] = set()


@atexit.register
def _end_producers() -> None:
    """End the threads before the interpreter ends.

    A thread still inside torch would then abort the process.
    """
    for producer in list(_producers):
        if producer.process == os.getpid():
            producer.end()


def _produce(
    iterable: Iterable[Any],
    items: "queue.SimpleQueue[tuple[bool, Any]]",
    room: "queue.SimpleQueue[None]",
    stop: threading.Event,
) -> None:
    """Put (True, item) for each item once there is room, then (False, None or an exception)."""
    error, iterator = None, None
    try:
        iterator = iter(iterable)
        while True:
            room.get()
            if stop.is_set():
                break
            items.put((True, next(iterator)))
    except StopIteration:
        pass
    except BaseException as caught:  # noqa: BLE001  # whatever it is, the loop raises it
        error = caught
    if stop.is_set() and isinstance(iterator, Generator):
        with contextlib.suppress(Exception):  # the loop has ended: nobody is there to catch it
            iterator.close()
    items.put((False, error))


def _check_process(process: int) -> None:
    if os.getpid() != process:
        raise RuntimeError(
            "This iterator is used in a forked child, but what it has in flight stayed in the "
            "parent process. Iterate anew in the child."
        )


def _end(pool: ThreadPoolExecutor, name: str) -> None:
    """Drop what a pool has not begun, and wait for its threads, but not without end.

    The current thread may be one of them, if it happens to collect a generator that was dropped.
    """
    pool.shutdown(wait=False, cancel_futures=True)
    for thread in threading.enumerate():
        if thread.name.startswith(f"{name}_") and thread is not threading.current_thread():
            thread.join(_MAX_WAIT)
