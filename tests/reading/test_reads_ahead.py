"""How far ahead rows are read and batches are made, by jobs that note what becomes of them."""

import threading
import weakref

import pytest

from memload.reading.loop import run_ahead

on_threads = pytest.mark.parametrize("num_threads", [0, 1, 3])


class Reads:
    """Jobs with the numbers 0, 1, …, which are begun as they are taken."""

    def __init__(self, size, *, fails=None):
        self.size, self.fails = size, fails
        self.begun, self.made, self.unread = [], [], set()

    def __iter__(self):
        for number in range(self.size):
            self.begun.append(number)
            yield Read(self, number)
        if self.fails == "begin":
            raise OSError("the cause")


class Read:
    def __init__(self, reads, number):
        self.reads, self.number = reads, number

    def is_ready(self):
        return self.number not in self.reads.unread

    def make(self):
        if self.reads.fails == self.number:
            raise OSError("the cause")
        self.reads.unread.discard(self.number)  # now it was waited for
        self.reads.made.append(self.number)
        return Batch(self.number)


class Batch:
    def __init__(self, number):
        self.number = number


def numbers(batches):
    """Return the numbers of the batches that are left, each of which comes with its job."""
    result = []
    for job, batch in batches:
        assert job.number == batch.number
        result.append(batch.number)
    return result


@on_threads
@pytest.mark.parametrize("in_flight", [1, 2, 6])
@pytest.mark.parametrize("reads_ahead", [0, 1, 7])
@pytest.mark.parametrize("size", [0, 1, 12])
def test_batches_come_in_order_and_no_more_is_begun_than_allowed(
    size, reads_ahead, in_flight, num_threads, own_threads
):
    reads = Reads(size)
    options = {"in_flight": in_flight, "reads_ahead": reads_ahead, "num_threads": num_threads}
    batches = run_ahead(reads, **options)
    assert reads.begun == []
    for count in range(size):
        assert next(batches)[1].number == count
        assert len(reads.begun) == min(size, count + in_flight + reads_ahead)
        assert len(reads.made) <= count + in_flight
        if not num_threads:
            assert reads.made == list(range(min(size, count + in_flight)))
    assert numbers(batches) == []
    assert not own_threads()


def test_no_batch_waits_for_the_disk_while_another_can_be_handed_over():
    reads = Reads(20)
    batches = run_ahead(reads, in_flight=3, reads_ahead=4)
    reads.unread = {2, 3, 9}
    assert next(batches)[1].number == 0
    assert reads.made == [0, 1]  # 2 has not been read
    assert next(batches)[1].number == 1
    assert reads.made == [0, 1]
    assert next(batches)[1].number == 2  # nothing else is left: this waits
    assert reads.made == [0, 1, 2]
    reads.unread.discard(3)
    assert next(batches)[1].number == 3
    assert reads.made == [0, 1, 2, 3, 4, 5]
    assert reads.begun == list(range(10))
    assert numbers(batches) == list(range(4, 20))


def test_threads_wait_for_the_disk_themselves():
    reads, may_end = Reads(6), threading.Event()

    class Slow(Read):
        def make(self):
            assert self.number == 0 or may_end.wait(10)
            return super().make()

    reads.unread = set(range(1, 6))
    batches = run_ahead([Slow(reads, number) for number in range(6)], num_threads=2, in_flight=4)
    assert next(batches)[1].number == 0  # 1 is being waited for on a thread
    may_end.set()
    assert numbers(batches) == [1, 2, 3, 4, 5]


@on_threads
@pytest.mark.parametrize("fails", ["begin", 5])
def test_an_error_comes_after_the_batches_before_it(fails, num_threads, own_threads):
    size = 5 if fails == "begin" else 9
    reads = Reads(size, fails=fails)
    batches = run_ahead(reads, num_threads=num_threads, in_flight=3, reads_ahead=7)
    assert [next(batches)[1].number for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(OSError, match="the cause"):
        next(batches)
    assert list(batches) == []
    assert not own_threads()


@on_threads
def test_leaving_early_closes_what_gives_the_jobs_and_makes_no_more(num_threads, own_threads):
    closed, reads = [], Reads(100)

    def jobs():
        try:
            yield from reads
        finally:
            closed.append(threading.current_thread())

    batches = run_ahead(jobs(), num_threads=num_threads, in_flight=3, reads_ahead=2)
    next(batches)
    del batches
    assert not own_threads()
    assert closed == [threading.current_thread()]
    assert len(reads.made) <= 3
    assert len(reads.begun) == 5


def test_the_loop_does_not_keep_a_batch_that_it_has_handed_over():
    batches = run_ahead(Reads(4), in_flight=1)
    job, batch = next(batches)
    of_job, of_batch = weakref.ref(job), weakref.ref(batch)
    del job, batch
    assert of_job() is of_batch() is None
