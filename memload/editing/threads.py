"""Work in threads, whose results come in order."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from memload.machine import available_cores, starting_threads

Item = TypeVar("Item")
Result = TypeVar("Result")

#: How many results for each thread are computed ahead.
_AHEAD = 4


def in_order(
    function: Callable[[Item], Result], items: Iterable[Item], num_threads: int | None = None
) -> Iterator[Result]:
    """Yield the results of a function in the order of the items. Threads compute a few ahead.

    By default there is a thread for each core. Raises what the function raises, when its turn
    comes; threads have ended then.
    """
    threads = num_threads or available_cores()
    waiting = deque[Future[Result]]()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for item in items:
                with starting_threads("use fewer with --num-threads"):
                    waiting.append(pool.submit(function, item))
                if len(waiting) > _AHEAD * threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)
