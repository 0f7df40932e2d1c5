"""What is held in RAM: how much, by whom, until when, and what happens if it cannot be."""

import errno
import gc
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from memload import Loader, MemloadError
from memload.feeds import held
from memload.feeds.reader import RowReader
from tests.feeds.fake_cuda import fetch, open_array

PAGE = 4096
#: Shards of 20 and 10 rows of 3,000 bytes, and the size of their files.
ROWS, SHAPE = (20, 10), (10, 100, 3)
SIZE = 2 * 4096 + 30 * 3000


@pytest.fixture
def reading(monkeypatch):
    """What the thread that fills reads: it waits until ``may_read`` is set."""
    state = SimpleNamespace(may_read=threading.Event(), sizes=[])
    fault_in = held.fault_in

    def read(address, size):
        assert state.may_read.wait(30)
        state.sizes.append(size)
        fault_in(address, size)

    monkeypatch.setattr(held, "fault_in", read)
    yield state
    state.may_read.set()


# The budget of a process.


def test_feeds_of_one_file_hold_it_once_until_the_last_is_closed(index, pixels, cuda):
    one = cuda.feed(open_array(index))
    cuda.wait()
    pages = dict(cuda.pages)
    assert cuda.registered_bytes == SIZE
    other = cuda.feed(open_array(index), SIZE)  # none of which is free, or needed
    cuda.wait()
    assert cuda.pages == pages
    one.close()
    del one
    assert cuda.pages == pages
    np.testing.assert_array_equal(fetch(other, range(30))[0].numpy(), pixels)
    assert (other.name, other.counts().hits) == ("dma", 30)
    other.close()
    assert not cuda.pages


def test_feeds_of_other_files_share_the_budget_which_is_free_again_after_closing(
    make_dataset, cuda
):
    paths = [make_dataset(f"{name}.bin", rows=ROWS, shape=SHAPE) for name in "abc"]
    budget = SIZE * 3 // 2
    first, second, third = (cuda.feed(open_array(path), budget) for path in paths)
    cuda.wait()
    assert [feed.name for feed in (first, second, third)] == ["dma", "disk", "disk"]
    assert [feed.counts().rows_held for feed in (first, third)] == [30, 0]
    assert 10 < second.counts().rows_held <= 15
    assert budget - 3 * PAGE < cuda.registered_bytes <= budget
    first.close()
    del first
    assert cuda.registered_bytes <= budget - SIZE
    again = cuda.feed(open_array(paths[2]), budget)  # which the third feed holds nothing of
    cuda.wait()
    assert again.counts().rows_held == third.counts().rows_held > 20
    assert budget - 4 * PAGE < cuda.registered_bytes <= budget
    for feed in (second, third, again):
        feed.close()


def test_a_file_of_which_nothing_was_held_is_held_for_a_later_feed_with_more(index, pixels, cuda):
    poor = cuda.feed(open_array(index), 0)
    assert fetch(poor, [4])[0].numpy().tolist() == pixels[[4]].tolist()
    assert (poor.name, poor.counts().hits) == ("disk", 0)
    rich = cuda.feed(open_array(index), SIZE)
    cuda.wait()
    np.testing.assert_array_equal(fetch(poor, range(30))[0].numpy(), pixels)
    assert (poor.name, poor.counts().hits) == ("dma", 30)
    rich.close()
    poor.close()


@pytest.mark.parametrize("is_iterated", [False, True])
def test_a_loader_that_is_dropped_lets_its_pages_go(index, cuda, is_iterated):
    loader = Loader(index.path, 4, feed="dma")
    batches = iter(loader)
    if is_iterated:
        next(batches)
    cuda.wait()
    assert cuda.pages
    del loader
    if is_iterated:
        assert cuda.pages
        assert len(next(batches).images) == 4
    del batches
    gc.collect()
    assert not cuda.pages


def test_each_file_is_held_from_its_beginning_by_the_same_share(index, cuda):
    feed = cuda.feed(open_array(index), SIZE // 2)
    cuda.wait()
    for number, shard in enumerate(index.image.shards):
        share = cuda.registered_bytes_of(feed.array.shards.paths[number]) / shard.bytes
        assert share == pytest.approx(0.5, abs=PAGE / shard.bytes)
    feed.close()


# What stops it.


def warnings_in(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_when_ram_runs_short_no_more_is_held_and_a_warning_says_why(index, pixels, cuda, caplog):
    left = iter([10**9, 200_000])  # when the budget is made, and when the feed is: 50,000 must stay
    cuda.available_memory = lambda: next(left, 100_000)
    feed = cuda.feed(open_array(index))
    cuda.wait()
    # Pages that are registered are among those 100,000.
    assert 50_000 <= 100_000 - cuda.registered_bytes < 50_000 + 2 * PAGE
    counts = feed.counts()
    assert 0 < counts.rows_held == counts.rows_to_hold < 30
    assert warnings_in(caplog) == [counts.problem]
    assert "RAM, and the others are read: 50.8 kB of RAM are left beside" in counts.problem
    assert "cache_bytes of at most 49.2 kB" in counts.problem
    assert feed.name == "disk"
    np.testing.assert_array_equal(fetch(feed, range(30))[0].numpy(), pixels)
    assert feed.counts().hits == counts.rows_held
    # The rest of the budget is free for others.
    other = cuda.feed(open_array(index), 10**9)
    cuda.wait()
    assert not other.counts().problem
    other.close()
    feed.close()


def fail_to_read(monkeypatch, cuda, path):
    fault_in = held.fault_in

    def fail(address, size):
        if len(cuda.pages) == 3:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fault_in(address, size)

    monkeypatch.setattr(held, "fault_in", fail)


def truncate(monkeypatch, cuda, path):
    fault_in = held.fault_in

    def read(address, size):
        if len(cuda.pages) == 3:
            os.truncate(path, 3 * 2 * PAGE)
        fault_in(address, size)

    monkeypatch.setattr(held, "fault_in", read)


def refuse_pages(monkeypatch, cuda, path):
    cuda.may_register = lambda size: size == PAGE or len(cuda.pages) < 3  # the first is a trial


def lose_the_device(monkeypatch, cuda, path):
    class Device:
        def __init__(self, device):
            if len(cuda.pages) == 3:
                raise RuntimeError("CUDA error: device-side assert triggered")

        def __enter__(self):
            pass

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(torch.cuda, "device", Device)


@pytest.mark.parametrize(
    ("fail", "reason"),
    [
        (lose_the_device, "CUDA error: device-side assert triggered"),
        (fail_to_read, "Input/output error"),
        (truncate, "Input/output error"),
        (refuse_pages, "8,192 bytes of page cache cannot be registered with CUDA, perhaps because"),
    ],
)
def test_pages_that_cannot_be_held_stop_it_and_a_warning_says_why(
    fail, reason, index, pixels, cuda, caplog, monkeypatch
):
    array = open_array(index)
    path = array.shards.paths[0]
    fail(monkeypatch, cuda, path)
    feed = cuda.feed(array)
    cuda.wait()
    assert len(cuda.pages) == 3
    assert warnings_in(caplog) == [feed.counts().problem]
    assert "No more rows are held in RAM, and the others are read: " in caplog.text
    assert reason in caplog.text
    assert str(path) in caplog.text or fail is lose_the_device
    rows = range(20, 30) if fail is truncate else range(30)
    np.testing.assert_array_equal(fetch(feed, rows)[0].numpy(), pixels[rows.start : rows.stop])
    feed.close()


# The thread that fills.


def test_it_ends_with_the_feed_after_the_step_that_it_is_at(index, cuda, reading, monkeypatch):
    monkeypatch.setattr(held, "_STEP_BYTES", PAGE)
    feed = cuda.feed(open_array(index))
    with ThreadPoolExecutor(1) as thread:
        closing = thread.submit(feed.close)
        assert feed._filler._stop.wait(30)
        reading.may_read.set()
        closing.result(30)
    assert (reading.sizes, cuda.pages) in (([PAGE], {}), ([], {}))


def test_threads_that_bring_in_the_same_file_register_each_page_once(index, cuda, monkeypatch):
    together, fault_in = threading.Barrier(3), held.fault_in

    def read(address, size):
        if not cuda.pages:
            together.wait(30)
        fault_in(address, size)

    monkeypatch.setattr(held, "fault_in", read)
    feeds = [cuda.feed(open_array(index)) for _ in range(3)]
    cuda.wait()
    assert cuda.registered_bytes == SIZE  # a page that is registered twice is a fault
    for feed in feeds:
        assert (feed.counts().rows_held, feed.counts().problem) == (30, "")
        feed.close()


@pytest.mark.parametrize(
    ("is_on_disk", "is_waited_for", "pauses"),
    [(True, True, True), (True, False, False), (False, True, False)],
)
def test_it_leaves_the_disk_to_rows_that_are_waited_for(
    is_on_disk, is_waited_for, pauses, index, cuda, monkeypatch
):
    """It pauses after each step that has read from the disk, for twice as long."""
    found, seconds, disk_reads = [], iter(range(10**6)), iter(range(10**6))

    class Event(threading.Event):
        def wait(self, timeout=None):
            found.append(timeout)
            return False

    monkeypatch.setattr(held, "threading", SimpleNamespace(**{**vars(threading), "Event": Event}))
    monkeypatch.setattr(held, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    monkeypatch.setattr(held, "_STEP_BYTES", PAGE)
    monkeypatch.setattr(held, "disk_reads", lambda: next(disk_reads) if is_on_disk else 0)
    monkeypatch.setattr(RowReader, "is_busy", lambda _: is_waited_for)
    feed = cuda.feed(open_array(index))
    cuda.wait()
    assert cuda.registered_bytes == SIZE
    steps = sum(-(-shard.bytes // PAGE) for shard in index.image.shards)
    assert found == [held._START_SECONDS, *[held._PAUSE] * steps * pauses]
    feed.close()


def test_steps_grow_while_pages_are_in_ram(index, cuda, monkeypatch, reading):
    monkeypatch.setattr(held, "WINDOW_BYTES", 8 * PAGE)
    monkeypatch.setattr(held, "_STEP_BYTES", PAGE)
    monkeypatch.setattr(held, "_THREADS", 1)
    monkeypatch.setattr(held, "disk_reads", lambda: 0)
    feed = cuda.feed(open_array(index), 16 * PAGE)
    reading.may_read.set()
    cuda.wait()
    assert reading.sizes[:4] == [PAGE, 2 * PAGE, 4 * PAGE, PAGE]
    feed.close()


def test_no_thread_can_be_started(index, cuda, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(MemloadError, match=r"No thread can be started: .*, or use feed='pinned'"):
        cuda.feed(open_array(index))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_leaves_the_pages_to_its_parent(index, pixels, cuda):
    feed = cuda.feed(open_array(index))
    cuda.wait()
    before = dict(cuda.pages)
    child = os.fork()
    if not child:
        status = 1
        try:
            torch.cuda.synchronize = None  # torch refuses it after a fork
            feed.close()
            del feed
            status = int(cuda.pages != before or bool(cuda.faults))
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    np.testing.assert_array_equal(fetch(feed, range(30))[0].numpy(), pixels)
    feed.close()
