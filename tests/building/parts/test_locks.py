"""Locks: honoured as long as they are held, by whichever machine, and taken over afterwards."""

import contextlib
import fcntl
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import memload
from memload.building.lock import FolderRemovedError, Holder, Lock, is_locked, locked

Digests = Callable[[Path], dict[str, str]]

OPTIONS: dict[str, Any] = {
    "size": 8,
    "num_workers": 0,
    "progress": False,
    "shard_size": 4096 + 5 * 192,  # 8 shards of the forty pictures
}

#: Holds the lock of a folder as a process of another machine, which exists nowhere here.
ELSEWHERE = """
import sys
from pathlib import Path
from memload.building.lock import Lock

lock = Lock(Path(sys.argv[1]))
assert lock.acquire(work=sys.argv[3])
lock.path.write_text('{"machine": "machine-b", "process": %s, "work": "%s"}' % tuple(sys.argv[2:]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _lines_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Say what is waited for from the beginning, and not after some seconds."""
    monkeypatch.setattr("memload.building.lock._FIRST_LINE_SECONDS", 0)


@contextlib.contextmanager
def held_elsewhere(folder: Path, work: str = "part 1 of 2") -> Iterator["subprocess.Popen[str]"]:
    """Hold the lock of a folder as machine-b does. Its process is killed at the end."""
    command = [sys.executable, "-c", ELSEWHERE, str(folder), "4000000000", work]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def killed_once_waited_for(process: "subprocess.Popen[str]") -> Iterator[None]:
    """Kill a process as soon as the log says that its lock is waited for."""

    def kill(record: logging.LogRecord) -> bool:
        if "waiting for its lock" in record.getMessage():
            process.kill()
        return True

    logger = logging.getLogger("memload")
    logger.addFilter(kill)
    try:
        yield
    finally:
        logger.removeFilter(kill)


# ------------------------------------------------------------------------------------- the lock


def test_a_lock_is_held_by_one_alone_or_shared_by_many(tmp_path: Path) -> None:
    one, two, three = (Lock(tmp_path / "out") for _ in range(3))
    try:
        assert one.acquire(shared=True)
        assert two.acquire(shared=True)
        assert not three.acquire()
        one.release()
        two.release()
        assert three.acquire(work="publishes")
        assert Holder.of(three.path) == Holder.here("publishes")
        assert not one.acquire()
        assert not one.acquire(shared=True)
        three.release()
        assert Holder.of(three.path) == Holder()
        assert one.acquire()
    finally:
        for lock in (one, two, three):
            lock.release()


def test_a_shared_lock_is_given_back_before_it_is_wanted_alone(tmp_path: Path) -> None:
    one, two = Lock(tmp_path / "out"), Lock(tmp_path / "out")
    assert one.acquire(shared=True)
    assert two.acquire(shared=True)
    assert not one.acquire()  # two has it
    assert two.acquire()  # one does not have it any more
    two.release()
    assert one.acquire()
    one.release()


def test_whether_a_lock_is_held_is_asked_without_taking_it(tmp_path: Path) -> None:
    lock, folder = Lock(tmp_path / "out"), tmp_path / "out"
    assert not is_locked(folder)
    assert lock.acquire(shared=True)
    assert not is_locked(folder)
    assert lock.acquire()
    assert is_locked(folder)
    lock.release()
    assert not is_locked(folder)


def test_the_lock_of_a_new_folder_is_not_taken_for_the_one_that_was_held(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    lock, new = Lock(folder), Lock(folder)
    for makes_new in (False, True):
        assert lock.acquire(shared=True)
        shutil.rmtree(folder)
        if makes_new:
            assert new.acquire(shared=True)
        with pytest.raises(FolderRemovedError):
            lock.wait(10)
    new.release()


def test_a_lock_that_gives_signs_of_life_is_waited_for_beyond_the_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memload.building.lock._SIGN_SECONDS", 0.05)
    holder, waiting = Lock(tmp_path / "out"), Lock(tmp_path / "out")
    assert holder.acquire(work="lists")
    thread = threading.Timer(3, holder.release)
    with holder.alive():
        thread.start()
        waiting.wait(1.5)
    thread.join()
    waiting.release()


def test_work_at_a_shard_is_a_sign_of_life_for_the_whole_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memload.building.lock._SIGN_SECONDS", 0.05)
    folder = tmp_path / "out"
    part, waiting = Lock(folder), Lock(folder)
    assert part.acquire(shared=True)
    shard = Lock(folder / "shard", within=folder / "lock")
    assert shard.acquire()
    thread = threading.Timer(3, part.release)
    with shard.alive():
        thread.start()
        waiting.wait(1.5)
    thread.join()
    for lock in (shard, waiting):
        lock.release()


def test_a_lock_without_signs_of_life_is_an_error_after_the_timeout(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    waiting = Lock(tmp_path / "out")
    with (
        held_elsewhere(tmp_path / "out") as process,
        caplog.at_level(logging.INFO, "memload"),
        pytest.raises(memload.BuildError, match=r"nothing has changed there for 0\.5 s") as raised,
    ):
        waiting.wait(0.5)
    process.wait()
    holder = r"(process 4000000000 on machine-b, part 1 of 2)"
    assert f"{tmp_path / 'out'} is locked {holder}" in str(raised.value)
    assert "(--lock-timeout)" in str(raised.value)
    line = f"waiting for its lock {holder}. If nothing changes there for 0.5 s, this is an error"
    assert line in caplog.text


def test_no_time_to_wait_is_an_error_at_once(tmp_path: Path) -> None:
    with held_elsewhere(tmp_path / "out") as process:
        began = time.monotonic()
        with pytest.raises(memload.BuildError, match="is locked"):
            Lock(tmp_path / "out").wait(0)
        with pytest.raises(memload.BuildError, match="another process writes the same output"):
            locked(tmp_path / "out", 0).__enter__()
        assert time.monotonic() - began < 5
    process.wait()


# ------------------------------------------------------------------------------- builds by oneself


def test_a_build_waits_for_that_of_another_machine_and_takes_over_when_it_is_gone(
    pictures: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        held_elsewhere(tmp_path / "out.building", "") as process,
        caplog.at_level(logging.INFO, "memload"),
        killed_once_waited_for(process),
    ):
        report = memload.build(pictures, tmp_path / "out.bin", **OPTIONS)
    assert report.samples == 40
    assert "waiting for its lock (process 4000000000 on machine-b)" in caplog.text


def test_a_build_of_this_machine_is_an_error_at_once(pictures: Path, tmp_path: Path) -> None:
    lock = Lock(tmp_path / "out.building")
    assert lock.acquire()
    with pytest.raises(memload.BuildError, match=rf"writes the same .*\(process {os.getpid()}\)"):
        memload.build(pictures, tmp_path / "out.bin", **OPTIONS)
    lock.release()
    assert memload.build(pictures, tmp_path / "out.bin", **OPTIONS).samples == 40


# ---------------------------------------------------------------------------------- builds in parts


def test_a_shard_that_another_machine_is_at_comes_last(
    pictures: Path, tmp_path: Path, digests: Digests, caplog: pytest.LogCaptureFixture
) -> None:
    alone, output = tmp_path / "alone" / "out.bin", tmp_path / "shared" / "out.bin"
    for path in (alone, output):
        path.parent.mkdir()
    memload.build(pictures, alone, **OPTIONS)
    build = partial(memload.build, pictures, output, **OPTIONS)
    build(part=(1, 8))
    shards, done = output.parent / "out.building" / "shards", output.parent / "out.building/done"
    with held_elsewhere(shards / "00002", "part 2 of 8") as process:
        with pytest.raises(memload.BuildError, match=r"00002 is locked .*machine-b, part 2 of 8"):
            build(lock_timeout=0.5)
        assert sorted(path.name for path in done.iterdir()) == [
            f"{shard:05d}" for shard in range(8) if shard != 2
        ]
        with caplog.at_level(logging.INFO, "memload"), killed_once_waited_for(process):
            report = build()
    assert report.is_published
    assert report.converted == 5
    assert "00002: waiting for its lock (process 4000000000 on machine-b, part 2" in caplog.text
    assert digests(output) == digests(alone)


def test_parts_with_distinct_numbers_need_no_locks(
    pictures: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(38, "Function not implemented")

    for name in ("fcntl", "flock"):
        monkeypatch.setattr(fcntl, name, refuse)
    build = partial(memload.build, pictures, tmp_path / "out.bin", **OPTIONS)
    with caplog.at_level(logging.WARNING, "memload"):
        build(part=(0, 2))
    assert "this file system has no locks (Function not implemented)" in caplog.text
    assert caplog.text.count("has no locks") == 1
    assert build(part=(1, 2)).is_published
    assert memload.verify(tmp_path / "out.bin").ok


def test_no_thread_lives_while_workers_are_forked(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[list[str]] = []
    fork = os.fork

    def note() -> int:
        threads.append([thread.name for thread in threading.enumerate()])
        return fork()

    monkeypatch.setattr(os, "fork", note)
    build = partial(memload.build, pictures, tmp_path / "out.bin", **OPTIONS | {"num_workers": 2})
    build(part=(0, 2))
    build(part=(1, 2))
    assert len(threads) >= 16
    assert all("memload-lock" not in names for names in threads)


#: A part that takes long at row 18. Its workers hold what it holds.
SLOW = """
import sys, time
import memload

images, output = sys.argv[1:]
original = memload.ImageFolder.__getitem__

def slow(self, index):
    if index == 18:
        print("at 18", flush=True)
        time.sleep(100)
    return original(self, index)

memload.ImageFolder.__getitem__ = slow
memload.build(images, output, size=8, shard_size=4096 + 5 * 192, num_workers=2, part=(3, 8),
              progress=False, timeout=200)
"""


def test_flushing_a_shard_gives_signs_of_life(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = partial(memload.build, pictures, tmp_path / "out.bin", **OPTIONS)
    build(part=(0, 8))
    lock = tmp_path / "out.building" / "shards" / "00001" / "lock"
    times: set[int] = set()

    def slow(path: Path) -> None:
        if path.name == "out-00001-of-00008.bin":
            deadline = time.monotonic() + 20
            while len(times) < 3 and time.monotonic() < deadline:
                times.add(lock.stat().st_mtime_ns)
                time.sleep(0.01)

    monkeypatch.setattr("memload.building.lock._SIGN_SECONDS", 0.05)
    monkeypatch.setattr("memload.building.parts.workspace.sync", slow)
    build(part=(1, 8))
    assert len(times) == 3


@pytest.mark.slow
def test_the_lock_of_a_part_that_is_killed_is_free_at_once(pictures: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.bin"
    command = [sys.executable, "-c", SLOW, str(pictures), str(output)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "at 18\n"
        shard = tmp_path / "out.building" / "shards" / "00003"
        assert is_locked(shard)
        assert Holder.of(shard / "lock") == Holder.here("part 3 of 8")._replace(process=process.pid)
        process.kill()
    # Its workers are killed by the system as soon as it is gone.
    assert memload.build(pictures, output, lock_timeout=5, **OPTIONS).is_published


@pytest.mark.slow
def test_a_part_that_is_stopped_is_waited_for_and_goes_on_later(
    pictures: Path, tmp_path: Path, digests: Digests
) -> None:
    alone, output = tmp_path / "alone" / "out.bin", tmp_path / "shared" / "out.bin"
    for path in (alone, output):
        path.parent.mkdir()
    memload.build(pictures, alone, **OPTIONS)
    short = SLOW.replace("sleep(100)", "sleep(2)")
    command = [sys.executable, "-c", short, str(pictures), str(output)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "at 18\n"
        process.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(memload.BuildError, match=r"00003 is locked .*part 3 of 8"):
                memload.build(pictures, output, lock_timeout=4, **OPTIONS)
        finally:
            process.send_signal(signal.SIGCONT)
        assert process.wait(60) == 0
    # Whoever of the two ended last has published it.
    assert digests(output) == digests(alone)


@pytest.mark.slow
def test_a_lock_in_another_name_space_is_honoured_and_taken_over_when_it_is_gone(
    pictures: Path, tmp_path: Path
) -> None:
    """Two machines that share a folder: other host names and other process numbers."""
    unshare = ["unshare", "--uts", "--pid", "--net", "--fork", "--kill-child", "--map-root-user"]
    allowed = shutil.which("unshare") and subprocess.run([*unshare, "true"], check=False)
    if not allowed or allowed.returncode:
        pytest.skip("name spaces are not permitted here")
    output = tmp_path / "out.bin"
    inside = f"import socket; socket.sethostname('machine-b')\n{SLOW}"
    command = [*unshare, sys.executable, "-c", inside, str(pictures), str(output)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "at 18\n"
        lock = tmp_path / "out.building" / "shards" / "00003" / "lock"
        assert json.loads(lock.read_text())["machine"] == "machine-b"
        with pytest.raises(memload.BuildError, match=r"is locked \(process \d+ on machine-b, part"):
            memload.build(pictures, output, lock_timeout=2, **OPTIONS)
        process.kill()
    report = memload.build(pictures, output, lock_timeout=30, **OPTIONS)
    assert report.is_published
    assert report.converted <= 5
    assert memload.verify(output).ok
