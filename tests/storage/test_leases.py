"""Leases: whoever wants to write to a file that is being read waits, and no longer than it takes."""

import os
import signal
from pathlib import Path

import pytest

from memload.storage.leases import LEASES, end_lease, lease

pytestmark = pytest.mark.skipif(not LEASES, reason="leases are of Linux alone")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(b"pixels")
    return path


@pytest.fixture
def descriptor(path: Path) -> int:
    """A descriptor with a lease, which the test ends."""
    descriptor = os.open(path, os.O_RDONLY)
    if lease(descriptor) is None:
        os.close(descriptor)
        pytest.skip("no leases on this filesystem")
    return descriptor


def can_be_written_to(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))  # which would else wait
    except BlockingIOError:
        return False
    return True


def test_a_file_cannot_be_written_to_until_its_lease_ends(path: Path, descriptor: int) -> None:
    assert not can_be_written_to(path)
    end_lease(descriptor)
    assert can_be_written_to(path)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_child_that_was_forked_meanwhile_does_not_keep_a_lease(
    path: Path, descriptor: int
) -> None:
    wait, tell = os.pipe()
    child = os.fork()
    if not child:
        os.close(tell)
        os.read(wait, 1)  # until the parent is done
        os._exit(0)
    os.close(wait)
    end_lease(descriptor)
    fine = can_be_written_to(path)
    os.close(tell)
    os.waitpid(child, 0)
    assert fine


def test_many_may_have_a_lease_at_once(path: Path, descriptor: int) -> None:
    other = os.open(path, os.O_RDONLY)
    assert lease(other)
    end_lease(descriptor)
    assert not can_be_written_to(path)
    end_lease(other)
    assert can_be_written_to(path)


def test_a_file_that_is_open_for_writing_has_none(path: Path, descriptor: int) -> None:
    end_lease(descriptor)
    with path.open("r+b"):
        other = os.open(path, os.O_RDONLY)
        assert lease(other) is False
        end_lease(other)


def test_what_is_no_file_has_none() -> None:
    descriptor = os.open(os.devnull, os.O_RDONLY)
    assert lease(descriptor) is None
    end_lease(descriptor)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_does_not_keep_a_lease(path: Path, descriptor: int) -> None:
    child = os.fork()
    if not child:  # tells whether its copy is closed
        try:
            os.fstat(descriptor)
            os._exit(1)
        except OSError:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert not can_be_written_to(path)
    end_lease(descriptor)


def test_a_program_hears_of_no_lease_that_somebody_waits_for(path: Path, descriptor: int) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGURG, lambda number, frame: heard.append(number))
    try:
        assert not can_be_written_to(path)
        end_lease(descriptor)
    finally:
        signal.signal(signal.SIGURG, before)
    assert heard == []
