"""Rows come from files into page-locked memory. CUDA is replaced by functions that record."""

import ctypes
import errno
import gc
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from memload import FeedError, FormatError, Index, MemloadError
from memload.feeds import page_locked, row_reader
from memload.feeds.row_reader import MAX_THREADS, Reading, RowReader
from memload.storage import file_reads
from memload.storage.file_reads import DirectFile
from memload.storage.read_queue import ReadQueue, has_queues
from memload.storage.shards import Shards
from tests.feeds.page_cache import PAGE, drop_pages

CUDA = torch.device("cuda", 0)
HEADER = 4096

Make = Callable[..., Index]
Preadv = Callable[..., int]

pytestmark = pytest.mark.usefixtures("locked")


@pytest.fixture(autouse=True)
def at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a `ReadQueue` reads past the page cache, which it does if the system has any.

    If a test asks for False, many threads read by `os.preadv`, which it may replace.
    """
    asked_for: bool | None = getattr(request, "param", None)
    if asked_for and not has_queues():
        pytest.skip("this system has no asynchronous reads")
    if asked_for is False:
        monkeypatch.setattr(row_reader, "has_queues", lambda: False)
    return row_reader.has_queues()


both_ways = pytest.mark.parametrize("at_once", [True, False], indirect=True)
by_threads = pytest.mark.parametrize("at_once", [False], indirect=True)
by_queue = pytest.mark.parametrize("at_once", [True], indirect=True)


@pytest.fixture
def align(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A function that has files read past the page cache with an alignment, which is enforced."""
    direct: set[int] = set()
    preadv, read = os.preadv, ReadQueue.read

    def align(alignment: int) -> None:
        def open_aligned(descriptor: int) -> DirectFile:
            file = DirectFile(os.dup(descriptor), alignment)
            direct.add(file.descriptor)
            return file

        def checked(descriptor: int, memory: Any, offset: int) -> int:
            if descriptor in direct:
                (part,) = memory
                address = np.frombuffer(part, np.uint8).ctypes.data
                assert not any(number % alignment for number in (address, len(part), offset))
            return preadv(descriptor, memory, offset)

        def read_checked(queue: ReadQueue, descriptors: Any, *parts: np.ndarray) -> np.ndarray:
            assert not any((numbers % alignment).any() for numbers in parts)
            return read(queue, descriptors, *parts)

        monkeypatch.setattr(row_reader, "open_direct", open_aligned)
        monkeypatch.setattr(os, "preadv", checked)
        monkeypatch.setattr(ReadQueue, "read", read_checked)

    return align


def open_reader(shards: Shards, buffers: int = 3) -> RowReader:
    reader = RowReader(shards, CUDA, buffers=buffers)
    assert reader.alignment  # opens the files; a test may replace `os.preadv` afterwards
    return reader


def begin(reader: RowReader, rows: Any, kept: Any = False) -> Reading:
    rows = np.array(rows, np.int64)
    return reader.begin(rows, np.broadcast_to(kept, rows.shape))


def finish(reading: Reading, row_bytes: int) -> np.ndarray:
    """Return the rows of a reading as bytes, ``(n, row_bytes)``."""
    reading.wait()
    rows = b"".join(ctypes.string_at(address, row_bytes) for address in reading.addresses.tolist())
    reading.give_back()
    return np.frombuffer(rows, np.uint8).reshape(-1, row_bytes)


def stored(shards: Shards) -> np.ndarray:
    """Return all rows as bytes ``(rows, row_bytes)``, as NumPy maps them."""
    array = shards.array
    return np.concatenate(
        [
            np.memmap(path, np.uint8, "r", array.header_bytes).reshape(-1, array.row_bytes)
            for path in shards.paths
        ]
    )


def orders(count: int) -> list[list[int]]:
    """Return lists of rows in all sorts of orders."""
    rng = np.random.default_rng(count)
    return [
        rng.permutation(count).tolist(),
        rng.integers(0, count, 2 * count).tolist(),  # some of them several times
        list(range(count)),
        list(range(count))[::-1],
        [count - 1],
        sorted(rng.choice(count, count // 2 + 1, replace=False).tolist()),
        [0, count - 1, 0, 0, count // 2],
    ]


@both_ways
@pytest.mark.parametrize("alignment", [None, 1, 512, 4096, 65536])
@pytest.mark.parametrize(
    ("row_bytes", "rows"),
    [
        (1, (300, 1, 9000)),
        (3, (5000, 17)),
        (4095, (40, 1, 30)),
        (4096, (40, 30)),
        (4097, (40, 1, 30)),
        (150_528, (9, 8)),
        (1_100_003, (2, 1)),
    ],
)
def test_rows_are_those_of_the_file(
    row_bytes: int,
    rows: tuple[int, ...],
    alignment: int | None,
    make_dataset: Make,
    align: Callable[[int], None],
) -> None:
    if alignment is not None:
        align(alignment)
    shards = Shards(make_dataset(rows=rows, shape=(row_bytes, 1, 1)))
    expected, reader = stored(shards), open_reader(shards)
    rng = np.random.default_rng(row_bytes)
    for order in orders(len(shards)):
        for is_kept in (
            np.zeros(sum(rows), bool),
            np.ones(sum(rows), bool),
            rng.random(sum(rows)) < 0.5,
        ):
            reading = begin(reader, order, is_kept[order])
            np.testing.assert_array_equal(finish(reading, row_bytes), expected[order])
    reader.close()


@both_ways
@pytest.mark.parametrize("alignment", [None, 1, 512, 4096])
def test_rows_behind_the_header_of_another_program(
    alignment: int | None, make_dataset: Make, add_array: Make, align: Callable[[int], None]
) -> None:
    if alignment is not None:
        align(alignment)
    values = np.random.default_rng(0).random((50, 375))  # 3,000 bytes; the header has 128
    shards = Shards(add_array(make_dataset(rows=(50,)), "features", values, "npy"), "features")
    reader = open_reader(shards)
    for order in orders(50):
        found = finish(begin(reader, order), 3000)
        np.testing.assert_array_equal(found.view(np.float64), values[order])
    reader.close()


@both_ways
def test_many_readings_at_once_have_buffers_of_their_own(make_dataset: Make) -> None:
    shards = Shards(make_dataset(rows=(50, 50), shape=(71, 71, 3)))
    expected, reader, rng = stored(shards), open_reader(shards, 2), np.random.default_rng(0)
    row_bytes = shards.array.row_bytes
    for _ in range(5):
        orders = [rng.integers(0, 100, rng.integers(1, 60)) for _ in range(8)]
        readings = [begin(reader, order) for order in orders]
        for order, reading in zip(orders, readings, strict=True):
            np.testing.assert_array_equal(finish(reading, row_bytes), expected[order])
    reader.close()


@both_ways
def test_several_threads_use_one_reader(make_dataset: Make) -> None:
    shards = Shards(make_dataset(rows=(50,), shape=(40, 40, 3)))
    expected, reader, row_bytes = stored(shards), open_reader(shards), shards.array.row_bytes
    failures: list[BaseException] = []

    def run(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for number in range(20):
                order = rng.integers(0, 50, 16)
                found = finish(begin(reader, order, order % 2 == 0), row_bytes)
                np.testing.assert_array_equal(found, expected[order])
                if number % 5 == 0:
                    reader.release()  # other threads are in the middle of it
        except BaseException as error:  # noqa: BLE001  # raised below, on the thread of the test
            failures.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reader.close()
    assert not failures


# ------------------------------------------------------------------------------- what is read


@pytest.fixture
def note_reads(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[tuple[int, int]]]:
    """A function that returns a list, to which each later read adds its offset and size."""

    def note_reads() -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        preadv = os.preadv

        def note(descriptor: int, memory: Any, offset: int) -> int:
            found.append((offset, len(memory[0])))
            return preadv(descriptor, memory, offset)

        monkeypatch.setattr(os, "preadv", note)
        return found

    return note_reads


@by_threads
def test_rows_whose_blocks_touch_are_one_read_of_about_a_mebibyte(
    make_dataset: Make, align: Callable[[int], None], note_reads: Callable[[], Any]
) -> None:
    align(512)
    shards = Shards(make_dataset(rows=(400,), shape=(10_000, 1, 1)))
    reader, reads = open_reader(shards), note_reads()
    for order in (range(400), np.random.default_rng(0).permutation(400)):
        reads.clear()
        finish(begin(reader, order), 10_000)
        assert len(reads) == 4
        assert max(size for _, size in reads) < (1 << 20) + 10_000 + 1024
    reads.clear()
    finish(begin(reader, [1, 2, 300, 5, 2]), 10_000)
    assert sorted(reads) == [(13_824, 20_480), (53_760, 10_752), (3_003_904, 10_240)]
    reads.clear()
    finish(begin(reader, [1, 2], [True, False]), 10_000)
    assert len(reads) == 2
    reader.close()


@by_threads
def test_a_block_with_many_small_rows_is_read_once(
    make_dataset: Make, align: Callable[[int], None], note_reads: Callable[[], Any], locked: Any
) -> None:
    align(4096)
    shards = Shards(make_dataset(rows=(100_000,), shape=(4, 1, 1)))
    expected, reader = stored(shards), open_reader(shards)
    order = np.random.default_rng(0).permutation(100_000)[:20_000]
    reads = note_reads()
    np.testing.assert_array_equal(finish(begin(reader, order), 4), expected[order])
    assert sum(size for _, size in reads) == 98 * 4096
    assert list(locked.values()) == [99 * 4096 * 9 // 8]  # one for the alignment
    reader.close()


@both_ways
@pytest.mark.parametrize("has_direct", [True, False])
def test_rows_to_be_kept_stay_in_the_page_cache_and_others_do_not(
    has_direct: bool,
    make_dataset: Make,
    monkeypatch: pytest.MonkeyPatch,
    cached_pages: Callable[[Path], list[bool]],
) -> None:
    if not has_direct:
        monkeypatch.setattr(row_reader, "open_direct", lambda descriptor: None)
    shards = open_shards(make_dataset(rows=(64,), shape=(128, 128, 4)).path)
    reader = open_reader(shards)
    (path,) = shards.paths
    drop_pages(path)
    rows, kept = np.array([40, 3, 41, 50, 4]), np.array([True, False, True, True, False])
    reading = reader.begin(rows, kept)
    reading.wait()
    middles = HEADER + rows * (64 << 10) + (32 << 10)
    assert np.array(cached_pages(path))[middles // PAGE].tolist() == kept.tolist()
    expected = stored(shards)
    np.testing.assert_array_equal(finish(reading, 64 << 10), expected[rows])
    reader.close()


def test_without_direct_reads_a_warning_says_so_once_for_each_file_system(
    make_dataset: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(row_reader, "open_direct", lambda descriptor: None)
    monkeypatch.setattr(row_reader, "_file_systems_warned_of", set())
    caplog.set_level(logging.WARNING, "memload")
    paths = [make_dataset(name, rows=(4, 4)).path for name in ("one.bin", "two.bin")]
    readers = [open_reader(Shards(Index.read(path))) for path in paths]
    for reader in readers:
        finish(begin(reader, [0, 5], True), 72)
    assert not caplog.records
    for _ in range(2):
        for reader in readers:
            assert not reader.is_direct
            finish(begin(reader, [0, 5], [True, False]), 72)
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{paths[0].with_name('one-00000-of-00002.bin')} is on a")
    assert "cannot read past the page cache (O_DIRECT)" in record.getMessage()
    for reader in readers:
        reader.close()


@both_ways
def test_shards_of_several_file_systems_are_read_each_in_its_way(
    make_dataset: Make, align: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    align(4096)
    always = row_reader.open_direct
    answers = iter([None, 512, 4096])

    def some(descriptor: int) -> DirectFile | None:
        alignment = next(answers)
        file = always(descriptor) if alignment else None
        return file and DirectFile(file.descriptor, alignment or 0)

    monkeypatch.setattr(row_reader, "open_direct", some)
    monkeypatch.setattr(row_reader, "_file_systems_warned_of", set())
    shards = Shards(make_dataset(rows=(20, 20, 20), shape=(17, 19, 3)))
    expected, reader = stored(shards), open_reader(shards)
    assert (reader.is_direct, reader.alignment) == (False, 4096)
    for order in orders(60):
        found = finish(begin(reader, order), shards.array.row_bytes)
        np.testing.assert_array_equal(found, expected[order])
    reader.close()


def test_files_are_opened_once_more_for_rows_that_are_not_kept(
    make_dataset: Make, held: Any
) -> None:
    shards = Shards(make_dataset(rows=(4, 4, 4)))
    expected = stored(shards)
    before = held.now()
    reader = RowReader(shards, CUDA, buffers=2)
    np.testing.assert_array_equal(finish(begin(reader, [0, 5, 11], True), 72), expected[[0, 5, 11]])
    assert held.now().descriptors == before.descriptors
    np.testing.assert_array_equal(finish(begin(reader, [7], False), 72), expected[[7]])
    assert len(held.now().descriptors - before.descriptors) == (3 if reader.is_direct else 0)
    reader.close()
    del reader
    gc.collect()
    assert held.now().descriptors == before.descriptors


@both_ways
def test_a_direct_read_that_the_file_system_refuses_goes_through_the_page_cache(
    make_dataset: Make, monkeypatch: pytest.MonkeyPatch, align: Callable[[int], None]
) -> None:
    align(512)
    shards = Shards(make_dataset(rows=(10, 10), shape=(10, 100, 3)))
    expected, reader = stored(shards), open_reader(shards)
    preadv, read = os.preadv, ReadQueue.read

    def refuse(descriptor: int, memory: Any, offset: int) -> int:
        if descriptor not in shards.descriptors and offset > 20_000:
            raise OSError(errno.EINVAL, "Invalid argument")
        return preadv(descriptor, memory, offset)

    def refuse_at_once(queue: ReadQueue, descriptor: Any, offset: Any, *parts: Any) -> np.ndarray:
        is_accepted = offset <= 20_000
        count = np.full(len(offset), -errno.EINVAL)
        accepted = (part[is_accepted] for part in (descriptor, offset, *parts))
        count[is_accepted] = read(queue, *accepted)
        return count

    monkeypatch.setattr(os, "preadv", refuse)
    monkeypatch.setattr(ReadQueue, "read", refuse_at_once)
    for order in orders(20):
        np.testing.assert_array_equal(finish(begin(reader, order), 3000), expected[order])
    reader.close()


@pytest.mark.parametrize("alignment", [1, 512, 4096])
def test_a_range_of_a_file_is_read_on_the_callers_thread(
    alignment: int, make_dataset: Make, align: Callable[[int], None]
) -> None:
    align(alignment)
    shards = Shards(make_dataset(rows=(20, 20), shape=(17, 19, 3)))
    reader, whole = open_reader(shards), shards.paths[1].read_bytes()
    pages = torch.frombuffer(bytearray(3 * len(whole)), dtype=torch.uint8).numpy()
    memory = pages[-pages.ctypes.data % alignment :].data
    for offset, size in (
        (0, len(whole)),
        (1, 1),
        (4096, 969),
        (5000, 4096),
        (511, len(whole) - 511),
    ):
        first = reader.read_range(1, offset, size, memory)
        assert bytes(memory[first : first + size]) == whole[offset : offset + size]
    assert reader.busy_time.so_far() == (0, 0)
    assert reader.idle.is_set()
    reader.close()


# ------------------------------------------------------------------------------------- errors


@pytest.fixture
def fail(failing_reads: Any) -> Iterator[Callable[[Path, int], None]]:
    """A function that lets every read of one byte of a file fail, as a bad sector does."""
    with ExitStack() as failing:

        def fail(path: Path, byte: int) -> None:
            inode = path.stat().st_ino

            def fails(descriptor: int, offset: int, size: int) -> bool:
                return offset <= byte < offset + size and os.fstat(descriptor).st_ino == inode

            failing.enter_context(failing_reads(fails))

        yield fail


@both_ways
@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize("byte_in_row", [0, 1, 2999])
@pytest.mark.parametrize("row", [5, 9, 10, 19])
def test_a_read_error_names_the_row_of_the_failing_byte_and_its_shard(
    row: int, byte_in_row: int, is_kept: bool, make_dataset: Make, fail: Any, locked: Any
) -> None:
    shards = Shards(make_dataset(rows=(10, 10), shape=(10, 100, 3)))
    expected, reader = stored(shards), open_reader(shards)
    path = shards.paths[row // 10]
    fail(path, HEADER + row % 10 * 3000 + byte_in_row)
    message = rf"{path.name} cannot be read at byte [\d,]+, where row {row} is: Input/output error"
    for order in (range(20), [row], [19, row, 5, 0]):
        with pytest.raises(FormatError, match=message) as caught:
            begin(reader, order, is_kept).wait()
        assert caught.value.path == str(path)
        del caught
    far = [other for other in (0, 14) if abs(other - row) > 3]
    np.testing.assert_array_equal(finish(begin(reader, far, is_kept), 3000), expected[far])
    assert reader.idle.is_set()
    reader.close()


@both_ways
@pytest.mark.parametrize("is_kept", [True, False])
def test_if_all_reads_fail_the_first_row_that_was_asked_for_is_named(
    is_kept: bool, make_dataset: Make, failing_reads: Any
) -> None:
    shards = Shards(make_dataset(rows=(20,), shape=(10, 100, 3)))
    reader = open_reader(shards)
    with failing_reads(lambda *_: True):
        for row in range(20):
            with pytest.raises(FormatError, match=f"where row {row} is"):
                begin(reader, [row, row], is_kept).wait()
    reader.close()


@both_ways
def test_a_failed_reading_gives_its_memory_back_without_a_collection_of_garbage(
    make_dataset: Make, fail: Any, locked: dict[int, int]
) -> None:
    shards = Shards(make_dataset(rows=(40,), shape=(10, 100, 3)))
    reader = open_reader(shards)
    fail(shards.paths[0], HEADER + 20 * 3000)
    errors = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            reading = begin(reader, range(40))
            try:
                reading.wait()
            except FormatError as error:
                errors.append(str(error))
            del reading
        reader.close()  # threads let go of what they have read
        assert not locked
    finally:
        gc.enable()
    assert len(errors) == 3


@by_threads
def test_nobody_writes_to_the_buffer_of_a_failed_reading_any_more(
    make_dataset: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = Shards(make_dataset(rows=(40,), shape=(10, 1000, 3)))
    reader, preadv = open_reader(shards), os.preadv
    ended, under_way = threading.Event(), set[int]()

    def slow(descriptor: int, memory: Any, offset: int) -> int:
        if offset // 30_000 == 8:
            raise OSError(5, "Input/output error")
        under_way.add(offset)
        ended.wait(0.2)  # others have failed long since
        count = preadv(descriptor, memory, offset)
        under_way.discard(offset)
        return count

    monkeypatch.setattr(os, "preadv", slow)
    with pytest.raises(FormatError):
        begin(reader, range(0, 40, 2)).wait()
    assert not under_way
    reader.close()


@both_ways
@pytest.mark.parametrize("size", [0, 4096, 4097, 19_095, 30_000])
def test_a_truncated_file_names_the_shard_and_the_first_missing_row(
    size: int, make_dataset: Make
) -> None:
    shards = Shards(make_dataset(rows=(10, 10), shape=(10, 100, 3)))
    reader, path, expected = open_reader(shards), shards.paths[1], stored(shards)
    os.truncate(path, size)
    row = 10 + max(0, size - HEADER) // 3000
    message = rf"{path.name} was truncated .* {size:,} bytes instead of 34,096.* row {row} is the"
    for is_kept in (True, False):
        with pytest.raises(FormatError, match=message):
            begin(reader, [19, 0, 15], is_kept).wait()
        found = finish(begin(reader, range(row), is_kept), 3000)
        np.testing.assert_array_equal(found, expected[:row])
    reader.close()


@both_ways
def test_a_read_that_ends_early_is_continued(
    make_dataset: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = Shards(make_dataset(rows=(10, 10), shape=(10, 100, 3)))
    expected, reader = stored(shards), open_reader(shards)
    rng, preadv, read = np.random.default_rng(0), os.preadv, ReadQueue.read

    def short(descriptor: int, memory: Any, offset: int) -> int:
        found = preadv(descriptor, memory, offset)  # a direct read needs the whole, aligned memory
        count = int(rng.integers(1, found + 1)) if found else 0
        memory[0][count:] = bytes(len(memory[0]) - count)
        return count

    def read_short(queue: ReadQueue, *parts: np.ndarray) -> np.ndarray:
        count = read(queue, *parts)
        return np.minimum(count, rng.integers(0, parts[2] + 1))

    monkeypatch.setattr(os, "preadv", short)
    monkeypatch.setattr(ReadQueue, "read", read_short)
    for is_kept in (True, False):
        for order in orders(20):
            found = finish(begin(reader, order, is_kept), 3000)
            np.testing.assert_array_equal(found, expected[order])
    reader.close()


@by_queue
def test_rows_are_read_one_after_another_if_no_more_queues_are_allowed(
    make_dataset: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = Shards(make_dataset(rows=(10, 10), shape=(10, 100, 3)))
    expected, reader = stored(shards), open_reader(shards)
    monkeypatch.setattr(row_reader, "take_queue", lambda: None)
    for order in orders(20):
        np.testing.assert_array_equal(finish(begin(reader, order), 3000), expected[order])
    reader.close()


@both_ways
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs signals")
def test_signals_do_not_disturb_reads(make_dataset: Make) -> None:
    shards = Shards(make_dataset(rows=(50,), shape=(100, 100, 3)))
    expected, reader, rng = stored(shards), open_reader(shards), np.random.default_rng(0)
    handled: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: handled.append(number))
    signal.setitimer(signal.ITIMER_REAL, 1e-3, 1e-3)
    try:
        while len(handled) < 20:
            order = rng.integers(0, 50, 40)
            found = finish(begin(reader, order, order % 2 == 0), 30_000)
            np.testing.assert_array_equal(found, expected[order])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    reader.close()


# --------------------------------------------------------------------------------- life cycle


class Gate:
    """Stands in front of `os.preadv`: reads wait until it is opened."""

    def __init__(self, preadv: Preadv) -> None:
        self._preadv, self._is_open = preadv, threading.Event()
        self.reads: list[int] = []  #: offsets
        self._begun = threading.Semaphore(0)

    def __call__(self, descriptor: int, memory: Any, offset: int) -> int:
        self.reads.append(offset)
        self._begun.release()
        self._is_open.wait()
        return self._preadv(descriptor, memory, offset)

    def open(self) -> None:
        self._is_open.set()

    def wait_for(self, count: int) -> None:
        """Wait until so many reads have begun."""
        for _ in range(count):
            self._begun.acquire()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """A gate that is put in front of all reads with ``monkeypatch.setattr(os, "preadv", gate)``."""
    gate = Gate(os.preadv)
    yield gate
    gate.open()


#: Rows that do not touch: each is a read, and each read is a part of its own.
APART = np.arange(0, 2 * MAX_THREADS, 2)


@pytest.fixture
def wide(make_dataset: Make, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is read as if past the page cache, also where the file system cannot do that."""

    def open_as_direct(descriptor: int) -> DirectFile:
        return file_reads.open_direct(descriptor) or DirectFile(os.dup(descriptor), 4096)

    monkeypatch.setattr(row_reader, "open_direct", open_as_direct)
    return make_dataset(rows=(len(APART) * 2,), shape=(100, 100, 3)).path


def open_shards(path: Path) -> Shards:
    return Shards(Index.read(path))


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("memload-read")}


@both_ways
def test_neither_threads_nor_memory_are_taken_before_the_first_read(
    wide: Path, locked: dict[int, int]
) -> None:
    before = threads()
    reader = open_reader(open_shards(wide))
    assert not locked
    assert threads() == before
    reader.release()
    reader.close()


@by_threads
def test_idle_tells_whether_something_is_being_read(
    wide: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = open_reader(open_shards(wide))
    assert reader.idle.is_set()
    assert reader.busy_time.so_far() == (0, 0)
    monkeypatch.setattr(os, "preadv", gate)
    readings = [begin(reader, APART) for _ in range(3)]
    gate.wait_for(MAX_THREADS)
    assert not reader.idle.is_set()
    assert reader.busy_time.so_far() == (0, 0)  # nothing has arrived
    gate.open()
    for reading in readings:
        reading.wait()
    assert reader.idle.wait(10)
    bytes_read, seconds = reader.busy_time.so_far()
    assert bytes_read >= 3 * len(APART) * 30_000
    assert 0 < seconds == reader.busy_time.so_far()[1]
    reader.close()


def test_memory_that_cannot_be_page_locked_is_an_error(
    wide: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(address: int, size: int, flags: int) -> None:
        raise FeedError("CUDA cannot page-lock memory")

    monkeypatch.setattr(page_locked, "register", refuse)
    reader = open_reader(open_shards(wide))
    for _ in range(2):
        with pytest.raises(FeedError, match="cannot page-lock"):
            begin(reader, APART)
    reader.close()


@by_threads
def test_what_nobody_waits_for_any_more_is_not_read(
    wide: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch, locked: dict[int, int]
) -> None:
    reader, expected = open_reader(open_shards(wide)), stored(open_shards(wide))
    monkeypatch.setattr(os, "preadv", gate)
    readings = [begin(reader, APART) for _ in range(10)]
    gate.wait_for(MAX_THREADS)
    begun = len(gate.reads)
    del readings
    following = begin(reader, APART)
    gate.open()
    np.testing.assert_array_equal(finish(following, 30_000), expected[APART])
    # What a thread had begun, up to eight reads for each, goes on.
    assert len(gate.reads) - len(APART) <= 8 * begun < 10 * len(APART)
    assert reader.idle.wait(10)
    del following
    reader.close()
    assert len(locked) == 1


@by_threads
@pytest.mark.parametrize("can_start", [0, 3])
def test_threads_that_cannot_be_started_leave_the_reader_idle(
    can_start: int, wide: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, expected = open_reader(open_shards(wide)), stored(open_shards(wide))
    start, left = threading.Thread.start, [can_start]

    def refuse(thread: threading.Thread) -> None:
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(MemloadError, match="No thread can be started"):
            begin(reader, APART)
    assert reader.idle.wait(10)
    reading = begin(reader, APART)
    np.testing.assert_array_equal(finish(reading, 30_000), expected[APART])
    assert reader.idle.wait(10)
    monkeypatch.setattr(os, "preadv", gate)
    reading = begin(reader, APART)
    gate.wait_for(1)
    assert not reader.idle.is_set()
    gate.open()
    reading.wait()
    reader.close()


@by_threads
def test_closing_waits_for_reads_under_way_and_drops_the_others(
    wide: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, before = open_reader(open_shards(wide)), threads()
    expected = stored(open_shards(wide))
    monkeypatch.setattr(os, "preadv", gate)
    first = begin(reader, APART[:4])
    gate.wait_for(4)
    readings = [begin(reader, APART) for _ in range(20)]
    gate.wait_for(MAX_THREADS - 4)
    closing = threading.Thread(target=reader.close)
    closing.start()
    while not reader._is_closed:
        time.sleep(0.001)
    gate.open()
    closing.join()
    assert threads() == before
    np.testing.assert_array_equal(finish(first, 30_000), expected[APART[:4]])
    with pytest.raises(RuntimeError, match="closed before these rows were read"):
        readings[-1].wait()
    assert len(gate.reads) <= 8 * MAX_THREADS
    reader.close()
    with pytest.raises(RuntimeError, match="after shutdown"):
        begin(reader, APART)


@by_threads
def test_a_thread_of_the_reader_may_close_it(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, preadv, before = open_reader(open_shards(wide)), os.preadv, threads()

    def closing(descriptor: int, memory: Any, offset: int) -> int:
        reader.close()
        return preadv(descriptor, memory, offset)

    monkeypatch.setattr(os, "preadv", closing)
    begin(reader, [1]).wait()
    for thread in threads() - before:
        thread.join()


@both_ways
def test_releasing_lets_what_was_begun_go_on(
    wide: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch, locked: dict[int, int]
) -> None:
    reader, expected, before = open_reader(open_shards(wide)), stored(open_shards(wide)), threads()
    monkeypatch.setattr(os, "preadv", gate)
    readings = [begin(reader, APART) for _ in range(2)]
    started = threads() - before
    reader.release()
    readings.append(begin(reader, APART))
    following = threads() - before - started
    gate.open()
    for reading in readings:
        np.testing.assert_array_equal(finish(reading, 30_000), expected[APART])
    del reading, readings
    for thread in started:
        thread.join()
    assert len(locked) == 1  # that of the reading after the release
    reader.release()
    for thread in following:
        thread.join()
    assert not locked
    reader.close()


@both_ways
def test_a_reader_that_is_dropped_leaves_nothing(
    wide: Path, held: Any, locked: dict[int, int]
) -> None:
    before = held.now()
    reader = open_reader(open_shards(wide))
    begin(reader, APART)  # nobody waits
    finish(begin(reader, APART), 30_000)
    del reader
    assert before.left(patience=5) == []
    assert not locked


SCRIPT = """
    import logging, os, sys, threading
    from contextlib import nullcontext
    from pathlib import Path
    import numpy as np
    import torch
    from memload.feeds import page_locked
    from memload.feeds.row_reader import RowReader
    from memload.storage.index import Index
    from memload.storage.shards import Shards

    logging.getLogger("memload").setLevel(logging.ERROR)  # some file systems cannot read directly
    page_locked.register = lambda address, size, flags: None
    page_locked.unregister = lambda address: None
    torch.cuda.device = lambda device: nullcontext()
    torch.cuda.synchronize = lambda device: None
    reader = RowReader(Shards(Index.read(Path(sys.argv[1]))), torch.device("cuda", 0), buffers=2)
    rows = np.arange(0, 64, 2)

    def begin():
        return reader.begin(rows, np.zeros(len(rows), bool))
"""


def run_script(script: str, path: Path) -> None:
    script = textwrap.dedent(SCRIPT) + textwrap.dedent(script)
    command = [sys.executable, "-W", "error", "-c", script, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


@pytest.mark.slow
@both_ways
@pytest.mark.parametrize(
    "ending", ["", "reader.close()", "del readings", "del reader, readings", "sys.exit()"]
)
def test_the_interpreter_may_end_while_rows_are_read(
    ending: str, wide: Path, at_once: bool
) -> None:
    run_script(
        f"""
        from memload.feeds import row_reader
        from memload.storage.read_queue import ReadQueue

        begun = threading.Semaphore(0)

        def slowed(read):
            def slow(*arguments):
                begun.release()
                threading.Event().wait(0.05)
                return read(*arguments)

            return slow

        row_reader.has_queues = lambda: {at_once}
        reader.release()  # with threads for that
        assert reader.alignment  # opens the files, which reads as well
        os.preadv, ReadQueue.read = slowed(os.preadv), slowed(ReadQueue.read)
        readings = [begin() for _ in range(3)]
        begun.acquire()
        print("done")
        {ending}
        """,
        wide,
    )


@pytest.mark.slow
def test_a_forked_child_leaves_the_reader_alone_and_may_make_its_own(wide: Path) -> None:
    run_script(
        """
        import ctypes, gc, warnings
        warnings.simplefilter("ignore", DeprecationWarning)  # that this process has threads

        def check(reading):
            reading.wait()
            found = [ctypes.string_at(address, 30_000) for address in reading.addresses.tolist()]
            whole = Path(sys.argv[1]).with_suffix(".bin").read_bytes()
            assert found == [whole[4096 + row * 30_000:][:30_000] for row in rows.tolist()]

        readings = [begin() for _ in range(3)]
        child = os.fork()
        if not child:
            page_locked.unregister = lambda address: os.write(2, b"the parent's memory")
            del readings
            reader = RowReader(Shards(Index.read(Path(sys.argv[1]))), reader._device, buffers=2)
            gc.collect()
            page_locked.unregister = lambda address: None
            check(begin())
            sys.exit()
        assert os.waitpid(child, 0)[1] == 0
        for reading in readings:
            check(reading)
        print("done")
        """,
        wide,
    )


@both_ways
def test_what_its_threads_read_is_in_a_timeline_of_all_threads(make_dataset: Make) -> None:
    shards = Shards(make_dataset(rows=(40,)))
    reader = open_reader(shards)
    everywhere = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=everywhere) as profiled:
        reading = begin(reader, [3, 8])
        finish(reading, shards.array.row_bytes)
        reader.close()  # waits for the threads
    assert "memload: read" in {event.name for event in profiled.events()}
