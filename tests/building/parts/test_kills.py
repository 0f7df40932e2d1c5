"""Parts that are killed at random moments and started again lose nothing and do nothing twice."""

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import memload
from memload.building import rows as rows_module
from memload.building.journal import is_intact, record_type
from memload.building.lock import Lock
from memload.building.parts.workspace import read_done, shard_folder
from memload.building.sources.record import Column
from tests.building.test_resuming import Numbered, files, start_child
from tests.test_drills import processes_of_group

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it forks")

IMAGES, ROWS, SIDE = 120, 4, 8


def build(source: Any, place: Path, **options: Any) -> memload.BuildReport:
    """Build in shards of four rows of 8×8 pixels."""
    size = 4096 + ROWS * SIDE * SIDE * 3
    defaults = {"size": SIDE, "shard_size": size, "num_workers": 0, "max_rejects": "100%"}
    return memload.build(source, place / "out.bin", **defaults | options)


@pytest.fixture(scope="module")
def images(make_pictures: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pictures(tmp_path_factory.mktemp("kills") / "pics", IMAGES)


@pytest.fixture(scope="module")
def expected(images: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of the same build on one machine."""
    place = tmp_path_factory.mktemp("alone")
    build(images, place)
    return files(place)


def start_part(step: int, source: Any, place: Path, **options: Any) -> int:
    """Start a part in a child that kills itself before its step-th change to the disk, or chunk."""

    def part() -> None:
        os.setsid()
        run = rows_module.run

        def counted(*arguments: Any, **options: Any) -> Any:
            for result in run(*arguments, **options):
                os.sched_yield()  # counts as a step
                yield result

        rows_module.run = counted  # type: ignore[attr-defined]  # in the child
        build(source, place, **options)

    return start_child(step, part, also=["open", "sched_yield"])


def status_of(child: int) -> int:
    """Wait for a child and its workers. Return 0, or the signal that killed it."""
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL)
    deadline = time.monotonic() + 60
    while processes_of_group(child):
        assert time.monotonic() < deadline, "a worker outlived its part"
        time.sleep(0.001)
    return -code


def first_to_end(children: Iterable[int]) -> int:
    """Wait until one of these children has ended; return it."""
    while True:
        for child in children:
            if os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT | os.WNOHANG):
                return child
        time.sleep(0.001)


def done_in(place: Path) -> dict[str, bytes]:
    """Return the files that say which shards are done."""
    return {path.name: path.read_bytes() for path in (place / "out.building").glob("done/*")}


def intact_rows(place: Path) -> dict[str, int]:
    """Return how many rows each journal has."""
    dtype = record_type(3, {"label": Column("<i8")})
    counts = {}
    for path in (place / "out.building").glob("shards/*/rows"):
        assert path.stat().st_size in (0, ROWS * dtype.itemsize)
        counts[path.parent.name] = sum(map(is_intact, np.fromfile(path, dtype)))
    return counts


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kills", [4, pytest.param(30, marks=pytest.mark.slow)])
def test_a_part_killed_at_random_moments_does_nothing_twice_and_ends_with_the_same_bytes(
    images: Path,
    expected: dict[str, bytes],
    tmp_path_factory: pytest.TempPathFactory,
    num_workers: int,
    kills: int,
) -> None:
    seed = f"{kills} kills of {num_workers} workers"
    print(f"seed: {seed!r}")
    dice, place, killed, kept = random.Random(seed), tmp_path_factory.mktemp("place"), 0, 0
    options: dict[str, Any] = {"part": (0, 1), "num_workers": num_workers}
    while killed < kills:
        done, intact = done_in(place), intact_rows(place)
        status = status_of(start_part(dice.randrange(1, 150), images, place, **options))
        if status == 0:  # this one was killed from its beginning to its publishing; another one
            assert files(place) == expected
            place = tmp_path_factory.mktemp("place")
            continue
        killed += 1
        if not (place / "out.building" / "plan.json").exists():
            continue  # it is being removed
        now = done_in(place)
        assert done.items() <= now.items()  # none was built again
        for name in now.keys() - done.keys():
            shard = read_done(place / "out.building", int(name))
            assert shard is not None
            kept += intact.get(name, 0)
            assert shard.converted == ROWS - intact.get(name, 0)
        assert all(count >= intact.get(name, 0) for name, count in intact_rows(place).items())
    left = IMAGES - sum(intact_rows(place).values())
    is_published = (place / "out.idx").exists()
    report = build(images, place, **options)
    assert report.converted == (0 if is_published else left)
    if kills == 30:
        assert kept  # rows of shards that were not done
    assert files(place) == expected
    assert not (place / "out.building").exists()


@pytest.mark.parametrize("most", [3, pytest.param(30, marks=pytest.mark.slow)])
def test_three_parts_at_once_that_are_killed_again_and_again_end_with_the_same_bytes(
    images: Path, expected: dict[str, bytes], tmp_path: Path, most: int
) -> None:
    print(f"seed: {most}")
    dice, killed = random.Random(most), 0

    def start(part: int) -> int:
        step = dice.randrange(1, 50) if killed < most else 10**6
        return start_part(step, images, tmp_path, part=(part, 3), num_workers=part)

    children = {start(part): part for part in range(3)}
    while children:
        child = first_to_end(children)
        part = children.pop(child)
        if status_of(child):
            killed += 1
            children[start(part)] = part
    assert killed >= 3
    assert files(tmp_path) == expected
    assert not (tmp_path / "out.building").exists()


def kill_worker_at(row: int) -> Callable[[int], None]:
    builder = os.getpid()

    def act(number: int) -> None:
        if number == row and os.getpid() != builder:
            os.kill(os.getpid(), signal.SIGKILL)

    return act


def test_a_row_that_kills_workers_costs_a_part_only_itself(tmp_path: Path) -> None:
    source = Numbered(kill_worker_at(5))
    reports = [build(source, tmp_path, part=(part, 2), num_workers=2) for part in (1, 0)]
    assert reports[-1].samples == 19
    assert reports[-1].rejected == 1
    assert memload.verify(tmp_path / "out.bin").ok


def test_a_killed_part_leaves_no_worker_and_no_lock(tmp_path: Path) -> None:
    at_six, tell = os.pipe()

    def hang_at_six(number: int) -> None:
        if number == 6:
            os.write(tell, b".")
            time.sleep(600)

    child = start_part(10**6, Numbered(hang_at_six), tmp_path, part=(0, 1), num_workers=1)
    os.read(at_six, 1)
    workers = set(processes_of_group(child)) - {child}
    os.kill(child, signal.SIGKILL)
    assert status_of(child) == signal.SIGKILL
    assert workers
    folder = tmp_path / "out.building"
    for locked in (folder, shard_folder(folder, 1)):
        lock = Lock(locked)
        assert lock.acquire(work="a test")
        lock.release()
    report = build(Numbered(), tmp_path, part=(0, 1))
    assert report.is_published
    assert report.converted <= 20 - ROWS  # the first shard was done
    for end in (at_six, tell):
        os.close(end)
