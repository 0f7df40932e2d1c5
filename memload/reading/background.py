"""Take the items of any iterable on a thread, ahead of the loop."""

import atexit
import contextlib
import functools
import os
import queue
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, Generic, ParamSpec, TypeVar

from memload.machine import starting_threads
from memload.reading.loop import FORKED
from memload.reading.samplers import check_integer

T = TypeVar("T")
P = ParamSpec("P")

#: Seconds that an early exit waits for the thread of an iterable, which may wait for anything.
_MAX_WAIT = 10.0


class ThreadPrefetcher(Generic[T]):
    """Iterate over ``iterable`` on a thread, at most ``prefetch_factor`` items ahead.

    >>> for batch in ThreadPrefetcher(read_batches()):
    ...     ...

    It helps if the iterable releases the GIL: when it reads, decodes or waits. Each `iter` begins
    the iterable anew, on a thread of its own that starts with the first item and ends with the
    iteration. An exception is raised in the loop, after the items before it and with its own
    traceback. Leaving early waits for the item that the thread is working on, for at most 10
    seconds. ``len()`` is that of the iterable.

    Args:
        iterable: What is iterated.
        prefetch_factor: How many items are made ahead, at least 1.

    Raises ValueError for a ``prefetch_factor`` below 1, and RuntimeError if an iterator from before
    a fork is used in the child.
    """

    def __init__(self, iterable: Iterable[T], prefetch_factor: int = 2) -> None:
        check_integer("prefetch_factor", prefetch_factor, 1)
        self.iterable, self.prefetch_factor = iterable, prefetch_factor

    def __len__(self) -> int:
        return len(self.iterable)  # type: ignore[arg-type]  # raises TypeError if it has no length

    def __iter__(self) -> Iterator[T]:
        return _on_thread(self.iterable, self.prefetch_factor)


def background(
    function: Callable[P, Iterable[T]] | None = None, *, prefetch_factor: int = 2
) -> Any:  # no type fits a decorator with or without parentheses
    """Decorate a generator function, so that its items are made ahead on a thread.

    >>> @background(prefetch_factor=4)      # or @background
    ... def read_batches():
    ...     yield ...

    Args:
        function: The generator function.
        prefetch_factor: How many items are made ahead, at least 1.

    The result of a call is the iterator of a `ThreadPrefetcher`.
    """
    if function is None:
        return functools.partial(background, prefetch_factor=prefetch_factor)

    @functools.wraps(function)
    def prefetched(*args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        return iter(ThreadPrefetcher(function(*args, **kwargs), prefetch_factor))

    return prefetched


def _on_thread(iterable: Iterable[T], prefetch_factor: int) -> Generator[T, None, None]:
    """Yield the items of an iterable, which a thread takes, at most ``prefetch_factor`` ahead."""
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
                raise RuntimeError(FORKED)
        if value is not None:
            raise value
    finally:
        value = None  # the traceback of an exception holds this frame
        if not is_finalizing():
            producer.end()


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
