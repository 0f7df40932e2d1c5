"""Rows that are not held: how they are read, and the memory that they are read into."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from memload import FeedError, FormatError, Loader
from memload.feeds import held
from memload.feeds.reader import RowReader
from tests.feeds.fake_cuda import FakeCuda, Reads, fetch, open_array

PAGE = 4096


@pytest.fixture
def direct(tmp_path):
    """Skip where files cannot be read past the page cache."""
    path = tmp_path / "probe"
    path.write_bytes(bytes(PAGE))
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except (OSError, AttributeError):
        pytest.skip("needs O_DIRECT")


@pytest.mark.usefixtures("direct")
def test_rows_that_will_be_held_are_read_through_the_page_cache_and_others_past_it(
    index, pixels, cuda, monkeypatch
):
    may_fill = threading.Event()
    monkeypatch.setattr(held, "fault_in", lambda *_: may_fill.wait(30))
    feed = cuda.feed(open_array(index), 11 * PAGE)
    planned = [
        int(11 * PAGE * s.bytes / index.image.data_bytes) // PAGE * PAGE for s in index.image.shards
    ]
    shard, offset = index.image.locate(np.arange(30))
    stays = offset + 3000 <= np.array(planned)[shard]
    assert 0 < stays.sum() < 30
    with Reads() as read:
        np.testing.assert_array_equal(fetch(feed, range(30))[0].numpy(), pixels)
    assert sorted(read.through_cache) == sorted((begin, 3000) for begin in offset[stays].tolist())
    past_it = [
        (begin // PAGE * PAGE, -(-(begin + 3000) // PAGE) * PAGE) for begin in offset[~stays]
    ]
    assert sorted(read.direct) == sorted((begin, end - begin) for begin, end in past_it)
    assert feed.counts().hits == 0
    may_fill.set()
    feed.close()


def test_where_files_cannot_be_read_past_the_page_cache_a_warning_says_so_once(index, cuda, caplog):
    with Reads("refused") as read:
        feed = cuda.feed(open_array(index), 0)
        for _ in range(3):
            fetch(feed, range(30))
    assert len(read.through_cache) == 90
    (warning,) = caplog.messages
    assert "made-00000-of-00002.bin cannot be read past the page cache (O_DIRECT)" in warning
    feed.close()


def test_memory_is_used_again_once_the_copies_out_of_it_are_over_and_not_before(
    index, pixels, cuda
):
    feed = cuda.feed(open_array(index), 0)
    cuda.is_slow = True
    batches = [fetch(feed, range(start, start + 5))[0] for start in range(0, 30, 5)]
    memory = dict(cuda.locked)
    assert len(memory) == 6
    cuda.finish()
    np.testing.assert_array_equal(np.concatenate(batches), pixels)
    cuda.is_slow = False
    for start in range(25):
        fetch(feed, range(start, start + 5 - start % 2))
        assert cuda.locked == memory
    feed.close()


@pytest.mark.parametrize("cache_bytes", [None, 0], ids=["held", "read"])
def test_a_feed_is_closed_after_the_copies_that_are_under_way(cache_bytes, index, pixels, cuda):
    feed = cuda.feed(open_array(index), cache_bytes)
    cuda.wait()
    cuda.is_slow = True
    (found,) = fetch(feed, range(30))
    feed.close()
    del feed
    assert not cuda.pages
    assert not cuda.locked
    np.testing.assert_array_equal(found.numpy(), pixels)


def test_threads_that_take_memory_at_the_same_time_get_different_memory(
    index, pixels, cuda, monkeypatch
):
    """While one looks whether the copy out of the oldest buffer is over, another takes a buffer."""
    feed = cuda.feed(open_array(index), 0)
    begin = feed.prepare(np.arange(30))
    for pending in [begin(0, 5), begin(5, 10)]:
        pending.fetch()
    assert len(cuda.locked) == 2
    begun, event = [], torch.cuda.Event().__class__
    query = event.query

    def let_another_one_in(event):
        monkeypatch.setattr(type(event), "query", query)
        with ThreadPoolExecutor(1) as thread:
            begun.append(thread.submit(begin, 10, 15).result(30))
        cuda.is_slow = True  # from now on no copy is over
        begun.append(begin(15, 20))
        return query(event)

    monkeypatch.setattr(event, "query", let_another_one_in)
    begun.append(begin(20, 25))
    cuda.finish()
    cuda.is_slow = False
    found = [pending.fetch()[0].numpy() for pending in begun]
    np.testing.assert_array_equal(np.concatenate(found), pixels[10:25])
    feed.close()


def test_batches_that_nobody_fetches_do_no_harm(index, pixels, cuda):
    feed = cuda.feed(open_array(index), 0)
    begin = feed.prepare(np.arange(30))
    for start in range(20):
        begin(start, start + 10)
    np.testing.assert_array_equal(fetch(feed, range(30))[0].numpy(), pixels)
    for start in range(20):
        begin(start, start + 10)
    feed.close()


def test_a_batch_is_ready_once_its_rows_of_all_arrays_are_read(index, add_array, cuda, monkeypatch):
    index = add_array(index, "mask", np.ones((30, 10, 100), np.uint8), "mask")
    arrays = [open_array(index), open_array(index, "mask")]
    masks, preadv = os.fstat(arrays[1].shards.descriptors[0]).st_ino, os.preadv
    may_read = threading.Event()

    def read(descriptor, *arguments):
        if os.fstat(descriptor).st_ino == masks:
            assert may_read.wait(30)
        return preadv(descriptor, *arguments)

    feed = cuda.feed(arrays, 0)
    begin = feed.prepare(np.arange(30))
    begin(0, 30).fetch()  # the files are open now
    monkeypatch.setattr(os, "preadv", read)
    pending = begin(0, 30)
    assert not pending.is_ready()
    may_read.set()
    pending.fetch()
    assert pending.is_ready()
    feed.close()


def test_a_reader_is_busy_while_rows_are_waited_for(index, monkeypatch):
    reader, preadv, may_read = RowReader(open_array(index).shards), os.preadv, threading.Event()
    monkeypatch.setattr(os, "preadv", lambda *arguments: may_read.wait(30) and preadv(*arguments))
    assert not reader.is_busy()
    reading = reader.begin(np.array([0]), np.array([PAGE]), np.array([True]))
    assert reader.is_busy()
    may_read.set()
    reading.wait()
    assert not reader.is_busy()
    reader.close()


@pytest.mark.parametrize(
    ("driver", "cache_bytes", "statuses", "message"),
    [
        ("batch v2", 0, [1], "CUDA cannot start 30 copies: status 1 of the driver"),
        ("batch v2", None, [1], r"CUDA cannot start 4\d copies"),  # of two parts, across windows
        ("one by one", 0, [0, 700, 0], "status 700 of the driver"),
    ],
)
def test_copies_that_the_driver_refuses_are_an_error(driver, cache_bytes, statuses, message, index):
    with FakeCuda(driver) as cuda:
        feed = cuda.feed(open_array(index), cache_bytes)
        cuda.wait()
        copy, statuses = cuda._copy, iter(statuses)
        cuda._copy = lambda *lists: next(statuses, 0)
        with pytest.raises(FeedError, match=message):
            fetch(feed, range(30))
        cuda._copy = copy
        fetch(feed, range(30))
        feed.close()
        del feed


def test_a_row_that_cannot_be_read_is_an_error_after_the_batches_before_it(
    index, pixels, cuda, failing_reads
):
    loader = Loader(index.path, 1, feed="dma", cache_bytes=0)
    damaged = index.path.with_name("made-00001-of-00002.bin")
    inode, bad_byte = damaged.stat().st_ino, PAGE + 4 * 3000 + 5

    def fails(descriptor, offset, size):
        return os.fstat(descriptor).st_ino == inode and offset <= bad_byte < offset + size

    def read():
        for images, _ in loader:
            seen.append(images.permute(0, 2, 3, 1).numpy())

    seen = []
    with (
        failing_reads(fails),
        pytest.raises(FormatError, match="cannot be read: Input/output error") as caught,
    ):
        read()
    assert caught.value.path == str(damaged)
    del caught
    # Rows 22 and 23 lie on the page of row 24, and are read once more without it.
    np.testing.assert_array_equal(np.concatenate(seen), pixels[:24])
    seen = []
    read()  # it works again
    np.testing.assert_array_equal(np.concatenate(seen), pixels)
