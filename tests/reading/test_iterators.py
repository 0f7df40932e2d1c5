"""What every iterator promises: errors in their turn, early exits, forks, and the interpreter's end."""

import gc
import subprocess
import sys
import threading
import traceback

import pytest
import torch

from memload import CudaPrefetcher, Loader, MemloadError, ThreadPrefetcher

#: Each makes an iterator over batches of numbers with a transform, or of an iterable of numbers.
KINDS = {
    "Loader": {"num_threads": 0},
    "Loader with a thread": {"num_threads": 1, "prefetch_factor": 1},
    "Loader with threads": {"num_threads": 3},
    "CudaPrefetcher": CudaPrefetcher,
    "ThreadPrefetcher": ThreadPrefetcher,
}
every_kind = pytest.mark.parametrize("kind", KINDS)
pytestmark = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"  # of fork, from Python 3.12 on
)


@pytest.fixture
def make(make_dataset):
    """A function that makes an iterable of a kind, of whose items `number` is the number."""
    path = make_dataset(rows=(9, 8, 6)).path

    def make(kind, numbers=range(23)):
        options = KINDS[kind]
        if isinstance(options, dict):
            return Loader(path, sampler=numbers, columns=["index"], device="cpu", **options)
        return options(numbers, **({"device": "cpu"} if options is CudaPrefetcher else {}))

    return make


def number(item):
    return item if isinstance(item, int) else item.index.item()


class Failing:
    """Numbers, and then an error."""

    def __init__(self, error):
        self.error = error

    def __iter__(self):
        yield from range(4)
        raise self.error("the cause")


@pytest.mark.parametrize(
    ("kind", "error"),
    [*((kind, KeyError) for kind in KINDS), ("ThreadPrefetcher", KeyboardInterrupt)],
)
def test_an_error_comes_after_the_items_before_it_with_its_traceback(
    make, kind, error, own_threads
):
    iterator, seen = iter(make(kind, Failing(error))), []
    with pytest.raises(error, match="the cause") as caught:
        seen.extend(number(item) for item in iterator)
    assert seen == [0, 1, 2, 3]
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert "raise self.error" in frames[-1].line
    assert list(iterator) == []
    assert not own_threads()


@every_kind
def test_threads_and_generators_end_with_the_loop_an_early_exit_or_a_dropped_iterator(
    make, kind, own_threads
):
    closed = []

    class Numbers:
        def __iter__(self):
            try:
                yield from range(23)
            finally:
                closed.append(threading.current_thread())

    threads = KINDS[kind]["num_threads"] if "Loader" in kind else kind == "ThreadPrefetcher"
    iterable = make(kind, Numbers())
    iterator = iter(iterable)
    assert not own_threads()
    next(iterator)
    assert len(own_threads()) == threads
    assert [number(item) for item in iterator] == list(range(1, 23))
    assert not own_threads()
    for _ in iterable:
        break
    assert not own_threads()
    cycle = [iter(iterable)]
    next(cycle[0])
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert not own_threads()
    assert len(closed) == 3
    is_on_thread = kind == "ThreadPrefetcher"
    assert all((thread is not threading.current_thread()) == is_on_thread for thread in closed)


@every_kind
def test_in_a_forked_child_one_iterates_anew(make, kind, in_forked_child, monkeypatch):
    iterable = make(kind)
    iterator = iter(iterable)
    next(iterator)

    def child():
        for name in ("stream", "current_device", "current_stream", "_lazy_init"):
            monkeypatch.delattr(torch.cuda, name)  # they fail if the parent has used CUDA
        torch.set_num_threads(1)
        try:
            result = number(next(iterator))
        except RuntimeError as error:
            result = str(error)
        return result, [number(item) for item in iterable]

    result, anew = in_forked_child(child)
    has_nothing_in_flight = kind == "Loader"
    assert result == 1 if has_nothing_in_flight else "Iterate anew in the child" in result
    assert anew == list(range(23))
    assert number(next(iterator)) == 1
    iterator.close()


@pytest.mark.slow
def test_live_iterators_say_nothing_at_the_end_of_the_interpreter(make_dataset):
    program = """
import os, sys, memload
from torch.utils.data import DataLoader

def cycle(loader):
    while True:
        yield from loader

dataset = memload.MemmapDataset(sys.argv[1])
iterators = [
    iter(memload.Loader(dataset, 3, num_threads=2)),
    cycle(memload.Loader(dataset, 3, num_threads=0)),
    iter(memload.ThreadPrefetcher(memload.Loader(dataset, 3, num_threads=2))),
    memload.background(range)(100),
    iter(memload.CudaPrefetcher(range(100), device="cpu")),
    # whose thread is often inside of torch when the script ends
    iter(memload.ThreadPrefetcher(DataLoader(dataset, 2, shuffle=True))),
]
for iterator in iterators:
    next(iterator)
os.kept = iterators  # which is deleted after the modules of memload were
"""
    command = [sys.executable, "-c", program, str(make_dataset(rows=(23,)).path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_thread_that_cannot_be_started_is_explained(make, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    for kind, advice in (("Loader with threads", "num_threads=0"), ("ThreadPrefetcher", "iterate")):
        with pytest.raises(MemloadError, match=f"limit on processes .*{advice}"):
            list(make(kind))
    assert len(list(make("Loader"))) == 23
