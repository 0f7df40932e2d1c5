"""Reads of many parts of files at once."""

import errno
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from memload.storage import read_queue
from memload.storage.read_queue import DEPTH, ReadQueue, give_back, has_queues, take_queue

SIZE = 1 << 20


@pytest.fixture(autouse=True)
def _needs_queues() -> None:
    if not has_queues():
        pytest.skip("this system has no asynchronous reads")


@pytest.fixture
def content() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, SIZE, np.uint8)


@pytest.fixture
def descriptor(tmp_path: Path, content: np.ndarray) -> Iterator[int]:
    (tmp_path / "file").write_bytes(content.tobytes())
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def read(descriptor: np.ndarray, offset: np.ndarray, size: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return how many bytes were read of each part, and what was read, one part in each row."""
    memory = np.zeros((len(size), max(1, int(size.max(initial=0)))), np.uint8)
    address = memory.ctypes.data + np.arange(len(size)) * memory.shape[1]
    queue = take_queue()
    assert queue is not None
    counts = queue.read(descriptor, offset, size, address)
    give_back(queue)
    return counts, memory


@pytest.mark.parametrize("number", [0, 1, DEPTH - 1, DEPTH, DEPTH + 1, 1000])
def test_every_part_is_read_to_its_address(
    number: int, descriptor: int, content: np.ndarray
) -> None:
    rng = np.random.default_rng(number)
    offset, size = rng.integers(0, SIZE - 5000, number), rng.integers(1, 5000, number)
    counts, memory = read(np.full(number, descriptor), offset, size)
    np.testing.assert_array_equal(counts, size)
    for start, length, part in zip(offset, size, memory, strict=True):
        np.testing.assert_array_equal(part[:length], content[start : start + length])
        assert not part[length:].any()


def test_behind_the_end_of_a_file_nothing_is_read(descriptor: int, content: np.ndarray) -> None:
    offset = np.array([SIZE - 10, SIZE, SIZE + 5000, 0])
    counts, memory = read(np.full(4, descriptor), offset, np.full(4, 4096))
    assert counts.tolist() == [10, 0, 0, 4096]
    np.testing.assert_array_equal(memory[0, :10], content[-10:])


def test_parts_that_cannot_be_read_leave_the_others_alone(
    descriptor: int, content: np.ndarray
) -> None:
    rng = np.random.default_rng(0)
    offset, is_bad = rng.integers(0, SIZE - 100, 300), rng.random(300) < 0.3
    is_bad[[0, -1]] = True
    counts, memory = read(np.where(is_bad, 1_000_000, descriptor), offset, np.full(300, 100))
    assert (counts[is_bad] <= 0).all()
    assert (counts[~is_bad] == 100).all()
    for start, part in zip(offset[~is_bad], memory[~is_bad], strict=True):
        np.testing.assert_array_equal(part, content[start : start + 100])


@pytest.mark.parametrize("failing", [1, 2])
def test_after_an_error_nothing_is_read_any_more(
    failing: int, descriptor: int, content: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, calls = read_queue._call, []
    queue = ReadQueue()

    def fail(number: int, *arguments: int) -> int:
        calls.append(number)
        if number == queue._get_results and calls.count(number) == failing:
            raise OSError(errno.EPERM, "not permitted")
        return call(number, *arguments)

    memory = np.zeros((100, 4096), np.uint8)
    offset, size = np.arange(100) * 4096, np.full(100, 4096)
    arguments = np.full(100, descriptor), offset, size, memory.ctypes.data + offset
    with monkeypatch.context() as patch:
        patch.setattr(read_queue, "_call", fail)
        with pytest.raises(OSError, match="not permitted"):
            queue.read(*arguments)
    # All that were begun have ended: they are there, and the queue begins no others.
    np.testing.assert_array_equal(memory[:DEPTH].ravel(), content[: DEPTH * 4096])
    memory[:] = 0
    assert not queue.read(*arguments).any()
    assert not memory.any()


def test_a_queue_that_is_given_back_is_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_queue, "_free", read_queue.queue.SimpleQueue())
    first, second = take_queue(), take_queue()
    assert first is not None
    assert second not in (None, first)
    give_back(first)
    assert take_queue() is first


def test_a_forked_child_has_queues_of_its_own(descriptor: int, content: np.ndarray) -> None:
    read(np.array([descriptor]), np.array([0]), np.array([100]))  # the parent has a queue
    child = os.fork()
    if not child:
        counts, memory = read(np.array([descriptor]), np.array([7]), np.array([100]))
        os._exit(0 if counts[0] == 100 and (memory[0] == content[7:107]).all() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_systems_without_such_calls_have_no_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_queue, "_free", read_queue.queue.SimpleQueue())
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert take_queue() is None
    with pytest.raises(OSError, match="not implemented") as caught:
        ReadQueue()
    assert caught.value.errno == errno.ENOSYS
