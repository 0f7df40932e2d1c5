"""Rows that are not held: how they are read, and the memory that they are read into."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from memload import FeedError, FormatError, Loader
from memload.feeds import held

PAGE, SHAPE = 4096, (10, 100, 3)


@pytest.fixture
def index(make_dataset):
    return make_dataset(rows=(20, 10), shape=SHAPE)


@pytest.fixture
def pixels(index):
    return np.concatenate([np.load(index.path.parent / s.file) for s in index.image.shards])


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
    index, pixels, samples_of, fetch, cuda, reads, monkeypatch
):
    may_fill = threading.Event()
    monkeypatch.setattr(held, "fault_in", lambda *_: may_fill.wait(30))
    feed = cuda.feed(samples_of(index), 11 * PAGE)
    planned = [
        int(11 * PAGE * s.bytes / index.image.data_bytes) // PAGE * PAGE for s in index.image.shards
    ]
    shard, offset = index.image.locate(np.arange(30))
    stays = offset + 3000 <= np.array(planned)[shard]
    assert 0 < stays.sum() < 30
    with reads() as read:
        np.testing.assert_array_equal(fetch(feed, range(30))[0].numpy(), pixels)
    assert sorted(read.through_cache) == sorted((begin, 3000) for begin in offset[stays].tolist())
    past_it = [
        (begin // PAGE * PAGE, -(-(begin + 3000) // PAGE) * PAGE) for begin in offset[~stays]
    ]
    assert sorted(read.direct) == sorted((begin, end - begin) for begin, end in past_it)
    assert feed.counts().hits == 0
    may_fill.set()
    feed.close()


def test_where_files_cannot_be_read_past_the_page_cache_a_warning_says_so_once(
    index, pixels, samples_of, fetch, cuda, reads, caplog
):
    with reads("refused") as read:
        feed = cuda.feed(samples_of(index), 0)
        for _ in range(3):
            np.testing.assert_array_equal(fetch(feed, range(30))[0].numpy(), pixels)
    assert len(read.through_cache) == 90
    (warning,) = caplog.messages
    assert "made-00000-of-00002.bin cannot be read past the page cache (O_DIRECT)" in warning
    feed.close()


def test_nothing_is_read_while_all_rows_are_held(index, samples_of, fetch, cuda, reads):
    feed = cuda.feed(samples_of(index))
    cuda.wait()
    with reads() as read:
        fetch(feed, range(30))
    assert not read.direct
    assert not read.through_cache
    feed.close()


def test_memory_is_used_again_batch_after_batch(index, samples_of, fetch, cuda):
    feed = cuda.feed(samples_of(index), 0)
    fetch(feed, range(30))
    memory = dict(cuda.locked)
    assert len(memory) == 1
    for size in (30, 1, 29, 30):
        fetch(feed, range(size))
        assert cuda.locked == memory
    feed.close()
    assert not cuda.locked


def test_memory_is_not_written_to_before_the_copies_out_of_it_are_over(
    index, pixels, samples_of, fetch, cuda
):
    feed = cuda.feed(samples_of(index), 0)
    cuda.is_slow = True
    batches = [fetch(feed, range(start, start + 5))[0] for start in range(0, 30, 5)]
    assert len(cuda.locked) == 6
    cuda.finish()
    np.testing.assert_array_equal(np.concatenate(batches), pixels)
    cuda.is_slow = False
    for start in range(25):
        fetch(feed, range(start, start + 5))
        assert len(cuda.locked) == 6
    feed.close()


@pytest.mark.parametrize("cache_bytes", [None, 0], ids=["held", "read"])
def test_a_feed_is_closed_after_the_copies_that_are_under_way(
    cache_bytes, index, pixels, samples_of, fetch, cuda
):
    feed = cuda.feed(samples_of(index), cache_bytes)
    cuda.wait()
    cuda.is_slow = True
    (found,) = fetch(feed, range(30))
    feed.close()
    del feed
    assert not cuda.pages
    assert not cuda.locked
    np.testing.assert_array_equal(found.numpy(), pixels)


def test_threads_that_take_memory_at_the_same_time_get_different_memory(
    index, pixels, samples_of, fetch, cuda, monkeypatch
):
    """While one looks whether the copy out of the oldest buffer is over, another takes a buffer."""
    feed = cuda.feed(samples_of(index), 0)
    prepared = feed.prepare(np.arange(30))
    for pending in [prepared.begin(0, 5), prepared.begin(5, 10)]:
        pending.fetch()
    assert len(cuda.locked) == 2
    begun, event = [], torch.cuda.Event().__class__
    query = event.query

    def let_another_one_in(event):
        monkeypatch.setattr(type(event), "query", query)
        with ThreadPoolExecutor(1) as thread:
            begun.append(thread.submit(prepared.begin, 10, 15).result(30))
        cuda.is_slow = True  # from now on no copy is over
        (kept,) = prepared.begin(15, 20).fetch()
        begun.append(kept)
        return query(event)

    monkeypatch.setattr(event, "query", let_another_one_in)
    begun.append(prepared.begin(20, 25))
    assert len(begun) == 3
    cuda.finish()
    cuda.is_slow = False
    assert begun[0].reading.addresses.tolist() != begun[2].reading.addresses.tolist()
    np.testing.assert_array_equal(begun[0].fetch()[0].numpy(), pixels[10:15])
    np.testing.assert_array_equal(begun[1].numpy(), pixels[15:20])
    np.testing.assert_array_equal(begun[2].fetch()[0].numpy(), pixels[20:25])
    feed.close()


@pytest.mark.parametrize("cache_bytes", [0, 50_000])
def test_several_threads_fetch_at_once(cache_bytes, index, pixels, samples_of, fetch, cuda):
    feed = cuda.feed(samples_of(index), cache_bytes)

    def work(seed):
        rng = np.random.default_rng(seed)
        for _ in range(30):
            rows = rng.integers(0, 30, rng.integers(1, 20))
            np.testing.assert_array_equal(fetch(feed, rows)[0].numpy(), pixels[rows])
        return True

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(4)))
    feed.close()


def test_batches_that_nobody_fetches_do_no_harm(index, pixels, samples_of, fetch, cuda):
    feed = cuda.feed(samples_of(index), 0)
    prepared = feed.prepare(np.arange(30))
    for start in range(20):
        prepared.begin(start, start + 10)
    np.testing.assert_array_equal(fetch(feed, range(30))[0].numpy(), pixels)
    for start in range(20):
        prepared.begin(start, start + 10)
    feed.close()


def test_a_batch_is_ready_once_its_rows_of_all_arrays_are_read(
    index, add_array, samples_of, cuda, monkeypatch
):
    index = add_array(index, "mask", np.ones((30, 10, 100), np.uint8), "mask")
    arrays = [samples_of(index), samples_of(index, "mask")]
    masks, preadv, may_read = arrays[1].shards.identities[0][1], os.preadv, threading.Event()

    def read(descriptor, *arguments):
        if os.fstat(descriptor).st_ino == masks:
            assert may_read.wait(30)
        return preadv(descriptor, *arguments)

    feed = cuda.feed(arrays, 0)
    prepared = feed.prepare(np.arange(30))
    prepared.begin(0, 30).fetch()  # the files are open now
    monkeypatch.setattr(os, "preadv", read)
    pending = prepared.begin(0, 30)
    assert not pending.is_ready()
    may_read.set()
    pending.fetch()
    assert pending.is_ready()
    feed.close()


@pytest.mark.parametrize("driver", ["batch v2", "batch", "one by one"])
@pytest.mark.parametrize("direct", ["allowed", "refused", "failing", "short"])
def test_rows_that_lie_in_two_registrations_and_rows_that_are_read(
    driver, direct, index, pixels, samples_of, fetch, new_cuda, reads
):
    with new_cuda(driver) as cuda, reads(direct):
        feed = cuda.feed(samples_of(index), 60_000)
        cuda.wait()
        np.testing.assert_array_equal(fetch(feed, range(30))[0].numpy(), pixels)
        assert cuda.from_pages > 30_000 < cuda.from_locked
        feed.close()
        del feed


def test_one_copy_of_many_that_fails_is_an_error(index, samples_of, fetch, new_cuda):
    with new_cuda("one by one") as cuda:
        feed, statuses = cuda.feed(samples_of(index), 0), iter([0, 700, 0])
        cuda._copy = lambda *_: next(statuses, 0)
        with pytest.raises(FeedError, match="status 700 of the driver"):
            fetch(feed, range(10))
        feed.close()
        del feed


def test_a_copy_that_the_driver_refuses_is_an_error(index, samples_of, fetch, cuda):
    for cache_bytes, number in ((0, "30"), (None, r"4\d")):  # of two parts, across registrations
        feed = cuda.feed(samples_of(index), cache_bytes)
        cuda.wait()
        cuda.status = 1
        with pytest.raises(FeedError, match=f"CUDA cannot start {number} copies: status 1 of"):
            fetch(feed, range(30))
        cuda.status = 0
        fetch(feed, range(30))
        feed.close()
        del feed


def test_page_locked_memory_that_cannot_be_had_is_an_error(index, samples_of, fetch, cuda):
    feed = cuda.feed(samples_of(index), 0)
    locked, cuda.locked = cuda.locked, None
    with pytest.raises(
        FeedError, match=r"CUDA cannot page-lock memory for .* out of memory\. Use a"
    ):
        fetch(feed, range(30))
    cuda.locked = locked
    feed.close()


@pytest.mark.parametrize("feed", ["resident", "dma", "disk", "pinned"])
def test_a_loader_gives_what_it_gives_on_the_cpu(index, add_array, feed, cuda):
    masks = np.random.default_rng(0).integers(0, 99, (30, 10, 100), np.uint8)
    path = add_array(index, "mask", masks, "mask").path
    options = {"cache_bytes": 60_000} if feed == "disk" else {}
    on_cuda = Loader(path, 7, shuffle=True, feed=feed, device="cuda", **options)
    on_cpu = Loader(path, 7, shuffle=True, device="cpu")
    assert on_cuda.feed.name == feed
    for _ in range(2):
        for found, expected in zip(on_cuda, on_cpu, strict=True):
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_array_equal(one.numpy(), other.numpy())
        cuda.wait()
    del on_cuda


def test_a_row_that_cannot_be_read_is_an_error_after_the_batches_before_it(
    index, pixels, cuda, failing_reads
):
    loader = Loader(index.path, 1, feed="dma", cache_bytes=0)
    inode = index.path.with_name("made-00001-of-00002.bin").stat().st_ino
    bad_byte = PAGE + 4 * 3000 + 5

    def fails(descriptor, offset, size):
        return os.fstat(descriptor).st_ino == inode and offset <= bad_byte < offset + size

    def read():
        for images, _ in loader:
            seen.append(images.permute(0, 2, 3, 1).numpy())

    seen = []
    with (
        failing_reads(fails),
        pytest.raises(FormatError, match="cannot be read: Input/output error"),
    ):
        read()
    # Rows 22 and 23 lie on the page of row 24, and are read once more without it.
    np.testing.assert_array_equal(np.concatenate(seen), pixels[:24])
    seen = []
    read()
    np.testing.assert_array_equal(np.concatenate(seen), pixels)
