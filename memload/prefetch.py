"""Run any iterable ahead of its consumer, on a thread."""

import contextlib
import functools
import os
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, Generic, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")

#: How long an early exit waits for the thread, which may be inside the iterable's own ``next()``.
_GRACE = 10.0


class _End:
    """The last thing in the queue: the iterable has ended, with an exception or without."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class ThreadPrefetcher(Generic[T]):
    """Iterate over ``iterable`` on a thread, at most ``prefetch_factor`` items ahead of the consumer.

    Every `iter` begins the iterable anew on a thread of its own, which ends with the iteration, however that ends:
    exhausted, left early, or with an exception, which is raised where the loop is, with the traceback of
    where it came from. ``len()`` is that of the iterable. Leaving early waits for the item that the thread is at,
    for 10 seconds at most. Gains something where the iterable releases the GIL: reading, decoding, waiting.

    Raises ValueError for a ``prefetch_factor`` below 1, and RuntimeError where an iterator is used in a forked child.
    """

    def __init__(self, iterable: Iterable[T], prefetch_factor: int = 2) -> None:
        if prefetch_factor < 1:
            raise ValueError(f"prefetch_factor: expected 1 or more, found {prefetch_factor}")
        self.iterable, self.prefetch_factor = iterable, prefetch_factor

    def __len__(self) -> int:
        return len(self.iterable)  # type: ignore[arg-type]  # raises TypeError, as it should, if it has none

    def __iter__(self) -> Iterator[T]:
        return _ahead(self.iterable, self.prefetch_factor)


def background(
    function: Callable[P, Iterable[T]] | None = None, *, prefetch_factor: int = 2
) -> Any:  # with or without parentheses, which no type of a decorator says well
    """Decorate a generator function so that what it yields is made ahead, on a thread: see `ThreadPrefetcher`.

    Used as ``@background`` or ``@background(prefetch_factor=4)``. The thread starts with the first item asked for.
    """
    if function is None:
        return functools.partial(background, prefetch_factor=prefetch_factor)
    if prefetch_factor < 1:
        raise ValueError(f"prefetch_factor: expected 1 or more, found {prefetch_factor}")

    @functools.wraps(function)
    def ahead(*args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        return _ahead(function(*args, **kwargs), prefetch_factor)

    return ahead


def _ahead(iterable: Iterable[T], prefetch_factor: int) -> Generator[T, None, None]:
    items: queue.SimpleQueue[Any] = queue.SimpleQueue()
    room = threading.Semaphore(prefetch_factor)
    stop = threading.Event()

    def produce() -> None:
        error = None
        iterator = None
        try:
            iterator = iter(iterable)
            while True:
                room.acquire()
                if stop.is_set():
                    break
                items.put((next(iterator),))
        except StopIteration:
            pass
        except BaseException as caught:  # noqa: BLE001  # whatever it is, it is raised where the loop is
            error = caught
        if stop.is_set() and isinstance(iterator, Generator):
            with contextlib.suppress(Exception):  # nobody is there to be told
                iterator.close()
        items.put(_End(error))

    thread = threading.Thread(target=produce, name="memload-prefetch", daemon=True)
    process = os.getpid()
    thread.start()
    try:
        while True:
            item = items.get()
            if isinstance(item, _End):
                error, item = item.error, None
                if error is None:
                    return
                try:
                    raise error
                finally:
                    del error  # it holds this frame
            room.release()
            yield item[0]
            if os.getpid() != process:
                raise RuntimeError(
                    "iterator: expected to be used in the process that made it, found a forked child, which has "
                    "none of its threads. Iterate anew there"
                )
    finally:
        if os.getpid() == process:  # in a forked child the thread is gone, and may have held their locks
            stop.set()
            room.release()
            if thread is not threading.current_thread():  # which collects garbage, and cannot wait for itself
                thread.join(_GRACE)
