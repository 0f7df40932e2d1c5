"""How far ahead rows are read and batches are made, by jobs that note what becomes of them."""

import threading
import weakref
from itertools import product
from types import SimpleNamespace

import pytest

from memload.reading.loop import run_ahead


class Reads:
    """Jobs with the numbers 0, 1, …, which are begun as they are taken; `closed` at the end."""

    def __init__(self, size):
        self.size, self.begun, self.made, self.unread = size, [], [], set()
        self.closed = self.may_wait = False

    def __iter__(self):
        try:
            for number in range(self.size):
                self.begun.append(number)
                yield Read(self, number)
        finally:
            self.closed = True


class Read:
    def __init__(self, reads, number):
        self.reads, self.number = reads, number

    def is_ready(self):
        return self.number not in self.reads.unread

    def make(self):
        assert self.is_ready() or not self.reads.may_wait or self.reads.may_wait.wait(10)
        self.reads.unread.discard(self.number)  # now it was waited for
        self.reads.made.append(self.number)
        return Batch(number=self.number)


class Batch(SimpleNamespace):
    """Something to refer to weakly."""


def numbers(batches):
    """Return the numbers of the batches that are left, each of which comes with its job."""
    return [batch.number for job, batch in batches if job.number == batch.number]


on_threads = pytest.mark.parametrize("num_threads", [0, 1, 3])


@on_threads
def test_batches_come_in_order_and_no_more_is_begun_than_allowed(num_threads, own_threads):
    for in_flight, reads_ahead, size in product((1, 2, 6), (0, 1, 7), (0, 1, 12)):
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
    reads = Reads(6)
    reads.unread, reads.may_wait = set(range(1, 6)), threading.Event()
    batches = run_ahead(reads, num_threads=2, in_flight=4)
    assert next(batches)[1].number == 0  # 1 is being waited for on a thread
    reads.may_wait.set()
    assert numbers(batches) == [1, 2, 3, 4, 5]


@on_threads
def test_an_early_exit_makes_no_more(num_threads, own_threads):
    reads = Reads(100)
    batches = run_ahead(reads, num_threads=num_threads, in_flight=3, reads_ahead=2)
    of_job, of_batch = map(weakref.ref, next(batches))
    assert num_threads or of_job() is of_batch() is None  # it keeps nothing that it handed over
    del batches
    assert not own_threads()
    assert reads.closed
    assert len(reads.made) <= 3
    assert len(reads.begun) == 5
