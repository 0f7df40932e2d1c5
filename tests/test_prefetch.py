import gc
import multiprocessing
import subprocess
import sys
import textwrap
import threading
import traceback
from collections.abc import Iterator
from typing import Any

import pytest

from memload import ThreadPrefetcher, background

forks = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


class Sized:
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size))


def failing(after: int) -> Iterator[int]:
    yield from range(after)
    raise KeyError("the cause")


def of_ours() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "memload-prefetch"]


@pytest.mark.parametrize("prefetch_factor", [1, 2, 7, 1000])
@pytest.mark.parametrize("size", [0, 1, 2, 100])
def test_items_come_in_order(size: int, prefetch_factor: int) -> None:
    prefetcher = ThreadPrefetcher(Sized(size), prefetch_factor)
    assert len(prefetcher) == size
    assert list(prefetcher) == list(range(size))
    assert list(prefetcher) == list(range(size))


def test_none_and_exceptions_are_items_like_others() -> None:
    items = [None, ValueError("an item"), StopIteration(), ()]
    assert list(ThreadPrefetcher(items)) == items


def test_items_are_made_on_another_thread() -> None:
    names = {threading.current_thread().name}
    made = set(ThreadPrefetcher(threading.current_thread().name for _ in range(3)))
    assert made == {"memload-prefetch"}
    assert not made & names


def test_an_iterable_without_a_length_has_none() -> None:
    with pytest.raises(TypeError):
        len(ThreadPrefetcher(failing(1)))


@pytest.mark.parametrize("prefetch_factor", [1, 3])
def test_no_more_than_prefetch_factor_items_are_made_ahead(prefetch_factor: int) -> None:
    made: list[int] = []
    full, over = threading.Event(), threading.Event()

    def items() -> Iterator[int]:
        for number in range(100):
            made.append(number)
            if len(made) == prefetch_factor + 1:
                full.set()
            if len(made) > prefetch_factor + 1:
                over.set()
            yield number

    iterator = iter(ThreadPrefetcher(items(), prefetch_factor))
    assert made == []
    assert next(iterator) == 0
    assert full.wait(10)
    assert not over.wait(0.05)
    next(iterator)
    assert over.wait(10)
    iterator.close()  # type: ignore[attr-defined]


def test_an_exception_arrives_after_the_items_before_it_with_its_traceback() -> None:
    seen = []
    with pytest.raises(KeyError, match="the cause") as caught:
        seen.extend(ThreadPrefetcher(failing(3)))
    assert seen == [0, 1, 2]
    assert "failing" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]


def test_an_iterable_that_cannot_be_iterated_says_so() -> None:
    with pytest.raises(TypeError, match="not iterable"):
        list(ThreadPrefetcher(3))  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_exceptions_that_are_no_errors_arrive_too(error: type[BaseException]) -> None:
    def items() -> Iterator[int]:
        yield 1
        raise error

    with pytest.raises(error):
        list(ThreadPrefetcher(items()))


def test_leaving_early_ends_the_thread_and_closes_the_generator() -> None:
    closed = []

    def items() -> Iterator[int]:
        try:
            yield from range(1000)
        finally:
            closed.append(threading.current_thread().name)

    for _ in ThreadPrefetcher(items()):
        break
    assert not of_ours()
    assert closed == ["memload-prefetch"]


def test_an_iterator_that_is_dropped_ends_its_thread() -> None:
    iterator = iter(ThreadPrefetcher(range(1000)))
    next(iterator)
    del iterator
    assert not of_ours()


def test_an_iterator_in_a_cycle_ends_its_thread_when_collected() -> None:
    cycle: list[Any] = [iter(ThreadPrefetcher(range(1000)))]
    next(cycle[0])
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert not of_ours()


def test_no_thread_starts_before_an_item_is_asked_for() -> None:
    iterator = iter(ThreadPrefetcher(range(3)))
    assert not of_ours()
    del iterator


def test_two_iterators_do_not_disturb_each_other() -> None:
    prefetcher = ThreadPrefetcher(Sized(50))
    assert list(zip(prefetcher, prefetcher, strict=True)) == [(number, number) for number in range(50)]


def test_prefetchers_may_be_nested() -> None:
    assert list(ThreadPrefetcher(ThreadPrefetcher(Sized(20)))) == list(range(20))
    for _ in ThreadPrefetcher(ThreadPrefetcher(Sized(1000))):
        break
    assert not of_ours()


def test_a_thousand_early_exits_leave_no_threads() -> None:
    before = threading.active_count()
    for _ in range(1000):
        for _ in ThreadPrefetcher(range(10)):
            break
    assert threading.active_count() == before


@pytest.mark.parametrize("prefetch_factor", [0, -1])
def test_a_prefetch_factor_below_one_is_refused(prefetch_factor: int) -> None:
    with pytest.raises(ValueError, match=f"^prefetch_factor: expected 1 or more, found {prefetch_factor}"):
        ThreadPrefetcher([], prefetch_factor)
    with pytest.raises(ValueError, match=f"^prefetch_factor: expected 1 or more, found {prefetch_factor}"):
        background(prefetch_factor=prefetch_factor)(failing)


def test_a_decorated_generator_runs_ahead_and_keeps_its_name() -> None:
    @background(prefetch_factor=3)
    def numbers(size: int, *, step: int = 1) -> Iterator[tuple[int, str]]:
        """Count."""
        for number in range(0, size, step):
            yield number, threading.current_thread().name

    assert (numbers.__name__, numbers.__doc__) == ("numbers", "Count.")
    assert list(numbers(6, step=2)) == [(number, "memload-prefetch") for number in (0, 2, 4)]


def test_the_decorator_needs_no_parentheses_and_serves_methods() -> None:
    class Source:
        def __init__(self, size: int) -> None:
            self.size = size

        @background
        def items(self) -> Iterator[int]:
            yield from range(self.size)

    assert list(Source(4).items()) == [0, 1, 2, 3]


@forks
def test_an_iterator_says_in_a_forked_child_that_it_has_no_thread() -> None:
    prefetcher = ThreadPrefetcher(Sized(100))
    iterator = iter(prefetcher)
    next(iterator)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def child() -> None:
        try:
            next(iterator)
        except RuntimeError as error:
            theirs.send((str(error), list(prefetcher)))

    process = context.Process(target=child)
    process.start()
    assert ours.poll(30)
    message, anew = ours.recv()
    process.join(30)
    assert process.exitcode == 0
    assert "forked child" in message
    assert anew == list(range(100))
    assert next(iterator) == 1
    iterator.close()  # type: ignore[attr-defined]
    ours.close()
    theirs.close()


def test_the_interpreter_exits_with_a_live_iterator() -> None:
    code = """
        import itertools, memload
        iterator = iter(memload.ThreadPrefetcher(itertools.count()))
        assert next(iterator) == 0
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, timeout=20, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
