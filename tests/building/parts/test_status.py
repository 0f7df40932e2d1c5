"""`memload.build_status` and `memload info`: how far a build is that has not ended."""

import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import memload
from memload.building.lock import Holder, Lock
from memload.building.parts.workspace import shard_folder
from memload.cli import main

#: A shard has room for two rows of 8×8×3, so that the twelve pictures are in six shards.
OPTIONS: dict[str, Any] = {"size": 8, "num_workers": 0, "shard_size": 4096 + 2 * 8 * 8 * 3}


@pytest.fixture
def output(folder: Path, tmp_path: Path) -> Path:
    """A build of which part 0 of 3 is done: shards 0 and 3 of six."""
    output = tmp_path / "out.bin"
    memload.build(folder, output, part=(0, 3), **OPTIONS)
    return output


@pytest.fixture
def locks() -> Iterator[list[Lock]]:
    """Locks that are released in the end."""
    held: list[Lock] = []
    yield held
    for lock in held:
        lock.release()


def status_of(output: Path) -> memload.BuildStatus:
    status = memload.build_status(output)
    assert status is not None
    return status


def begin(output: Path, shard: int, work: str, *, rows: int = 0, machine: str = "") -> Lock:
    """Do what a part does to a shard: lock it, and write records, of which ``rows`` are done."""
    path = shard_folder(output.with_suffix(".building"), shard)
    lock = Lock(path)
    assert lock.acquire(work=work)
    if machine:
        (path / "lock").write_text(json.dumps(Holder(machine, 77, work)._asdict()))
    (path / "begun").write_text("0")
    finished = output.with_suffix(".building") / "shards" / "00000" / "rows"
    size = finished.stat().st_size // 2
    (path / "rows").write_bytes(finished.read_bytes()[: rows * size] + bytes((2 - rows) * size))
    return lock


def age(output: Path, shard: int, *, begun: float, written: float) -> None:
    """Let a shard have begun, and let its records be written, so many seconds ago."""
    path, now = shard_folder(output.with_suffix(".building"), shard), time.time()
    for name, seconds in (("lock", begun), ("begun", begun), ("rows", written)):
        os.utime(path / name, (now - seconds, now - seconds))


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["info", *map(str, arguments)])
    assert not ended.value.code
    return capsys.readouterr().out


def test_parts_shards_and_samples_are_counted(output: Path) -> None:
    status = status_of(output)
    parts = status.parts
    assert parts is not None
    assert (status.state, status.samples, status.samples_done) == ("interrupted", 12, 4)
    assert (parts.shards, parts.shards_done, parts.shards_left) == (6, 2, 4)
    assert (parts.parts, parts.parts_done, parts.parts_left) == (3, [0], [1, 2])
    assert list(parts.begun) == []
    assert status.images_per_second is None
    assert status.seconds_left is None


def test_who_is_at_which_shard_is_shown(
    output: Path, locks: list[Lock], capsys: pytest.CaptureFixture[str]
) -> None:
    locks += [
        begin(output, 1, "part 1 of 3", rows=1, machine="node1"),
        begin(output, 2, "part 2 of 3", machine="node2"),
    ]
    status = status_of(output)
    assert status.parts is not None
    assert (status.state, status.samples_done) == ("building", 5)
    first, second = status.parts.begun
    assert (first.shard, first.samples, first.samples_done) == (1, 2, 1)
    assert first.holder == Holder("node1", 77, "part 1 of 3")
    assert (second.shard, second.samples_done) == (2, 0)
    assert first.is_at_work
    assert not first.is_stuck
    assert (status.parts.parts_done, status.parts.parts_left) == ([0], [])
    head, *lines = run(capsys, output).splitlines()
    assert head.startswith(
        "out.bin is being built in parts: 2 of 6 shards are done, 5 of 12 samples (42%)"
    )
    assert re.fullmatch(
        r"  node1 \(process 77\), part 1 of 3  shard 1: 1 of 2 samples(, \S+ images/s)?", lines[0]
    )
    assert lines[1].startswith("  node2 (process 77), part 2 of 3  shard 2: 0 of 2 samples")
    assert lines[2:] == ["part 0 of 3 is done"]


def test_a_locked_shard_without_changes_is_stuck(
    output: Path, locks: list[Lock], capsys: pytest.CaptureFixture[str]
) -> None:
    for shard in (1, 2):
        locks.append(begin(output, shard, f"part {shard} of 3", rows=1, machine=f"node{shard}"))
    age(output, 1, begun=800, written=720)
    age(output, 2, begun=800, written=60)
    status = status_of(output)
    assert status.parts is not None
    assert [shard.is_stuck for shard in status.parts.begun] == [True, False]
    assert status.parts.begun[0].quiet_seconds == pytest.approx(720, abs=30)
    lines = run(capsys, output).splitlines()
    assert lines[1].startswith("  node2 (process 77), part 2 of 3  shard 2: 1 of 2 samples")
    assert lines[2] == (
        "  node1 (process 77), part 1 of 3  shard 1: 1 of 2 samples, nothing new for 12 min: "
        "is it stuck?"
    )
    assert lines[3].startswith("Stop a process that hangs, and run its part again.")


def test_the_speed_is_that_of_the_last_minute(output: Path, locks: list[Lock]) -> None:
    locks.append(begin(output, 1, "part 1 of 3", rows=1))
    age(output, 1, begun=600, written=0)
    for done in (output.with_suffix(".building") / "done").iterdir():
        os.utime(done, (0, 0))
    status = status_of(output)
    assert status.parts is not None
    assert status.parts.begun[0].images_per_second == pytest.approx(1 / 600, rel=0.1)
    assert status.images_per_second == pytest.approx(1 / 600, rel=0.1)
    assert status.seconds_left == pytest.approx(7 * 600, rel=0.1)


def test_samples_that_were_done_before_do_not_count_for_the_speed(
    output: Path, locks: list[Lock]
) -> None:
    locks.append(begin(output, 1, "part 1 of 3", rows=1))
    (shard_folder(output.with_suffix(".building"), 1) / "begun").write_text("1")
    age(output, 1, begun=600, written=0)
    status = status_of(output)
    assert status.parts is not None
    assert status.samples_done == 5
    assert status.parts.begun[0].images_per_second == 0


def test_a_shard_whose_process_was_killed_names_it(
    output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = begin(output, 1, "part 1 of 3", rows=1)
    lock.release()
    path = shard_folder(output.with_suffix(".building"), 1) / "lock"
    path.write_text(json.dumps(Holder("node3", 5, "part 1 of 3")._asdict()))
    lines = run(capsys, output).splitlines()
    assert lines[0].startswith(
        f"{output}: its build is not complete ({output.parent}/out.building)"
    )
    assert "nothing is at work: 2 of 6 shards are done, 5 of 12 samples (42%). Unless" in lines[0]
    assert lines[1:] == [
        "begun, but not being built now: shard 1: 1 of 2 samples, last by node3 (process 5), "
        "part 1 of 3",
        "part 0 of 3 is done",
        "parts 1 and 2 of 3 are not at work, with 4 shards to be built. Run them, or the same "
        "command without --part.",
    ]


def test_a_build_of_all_that_is_left_leaves_no_part_out(
    output: Path, locks: list[Lock], capsys: pytest.CaptureFixture[str]
) -> None:
    locks.append(begin(output, 1, ""))
    assert "not at work" not in run(capsys, output)


def test_many_shards_at_work_are_cut_short(
    folder: Path, tmp_path: Path, locks: list[Lock], capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.bin"
    for copy in range(3):
        for path in sorted((folder / "ant").glob("0?.jpg")):
            (folder / "ant" / f"{copy}-{path.name}").write_bytes(path.read_bytes())
    for name in "abcdefghijklmnopqrst":
        (folder / "bee" / f"{name}.jpg").write_bytes((folder / "bee" / "01.jpg").read_bytes())
    memload.build(folder, output, part=(0, 40), **OPTIONS | {"shard_size": 4096 + 8 * 8 * 3})
    for shard in range(1, 31):
        lock = Lock(shard_folder(output.with_suffix(".building"), shard))
        assert lock.acquire(work=f"part {shard} of 40")
        locks.append(lock)
    lines = run(capsys, output).splitlines()
    assert sum(line.startswith("  ") for line in lines) == 25
    assert "  … and 6 more shards at work" in lines


def test_parts_without_shards_are_left_out(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.bin"
    memload.build(folder, output, part=(0, 999_999_999), **OPTIONS)
    parts = status_of(output).parts
    assert parts is not None
    assert (parts.parts, parts.parts_done) == (999_999_999, [0])
    assert parts.parts_left == [1, 2, 3, 4, 5]


def test_json_has_all_numbers(
    output: Path, locks: list[Lock], capsys: pytest.CaptureFixture[str]
) -> None:
    locks.append(begin(output, 1, "part 1 of 3", rows=1, machine="node1"))
    status = json.loads(run(capsys, output, "--json"))["unfinished_build"]
    assert status["state"] == "building"
    assert (status["samples"], status["samples_done"]) == (12, 5)
    assert (status["shards"], status["shards_done"]) == (6, 2)
    assert (status["parts"], status["parts_done"], status["parts_left"]) == (3, [0], [2])
    [begun] = status["begun"]
    assert (begun["shard"], begun["machine"], begun["process"]) == (1, "node1", 77)
    assert (begun["work"], begun["is_at_work"], begun["is_stuck"]) == ("part 1 of 3", True, False)


def test_a_source_that_is_being_listed_is_said(
    tmp_path: Path, locks: list[Lock], capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.bin"
    lock = Lock(output.with_suffix(".building"))
    assert lock.acquire(work="begins the build")
    locks.append(lock)
    here, then = Holder.here(), time.time() - 600
    os.utime(output.with_suffix(".building"), (then, then))
    assert run(capsys, output) == (
        f"out.bin is being begun by {here.machine} (process {here.process}), which has listed its "
        "source for 10 min\n"
    )
    assert status_of(output).samples is None


def test_publishing_is_said(folder: Path, output: Path, locks: list[Lock]) -> None:
    for shard in (1, 2, 4, 5):
        done = output.with_suffix(".building") / "done"
        (done / f"{shard:05d}").write_bytes((done / "00000").read_bytes())
    lock = Lock(output.with_suffix(".building"))
    assert lock.acquire(work="publishes")
    locks.append(lock)
    status = status_of(output)
    assert status.state == "publishing"
    assert str(status).startswith("out.bin is being published by ")
    assert "6 of 6 shards are done, 12 of 12 samples (100%)" in str(status)


def test_parts_at_work_are_not_disturbed(folder: Path, output: Path, locks: list[Lock]) -> None:
    folder_lock = Lock(output.with_suffix(".building"))
    assert folder_lock.acquire(shared=True)
    locks.append(folder_lock)
    before = {path: path.stat().st_mtime_ns for path in output.parent.rglob("*") if path.is_file()}
    status_of(output)
    after = {path: path.stat().st_mtime_ns for path in output.parent.rglob("*") if path.is_file()}
    assert before == after
    another = Lock(shard_folder(output.with_suffix(".building"), 0))
    assert another.acquire()
    locks.append(another)


def test_the_error_for_a_missing_data_set_says_how_far_it_is(output: Path) -> None:
    with pytest.raises(memload.MissingError, match=r"2 of 6 shards are done, 4 of 12 samples"):
        memload.info(output)
    with pytest.raises(memload.MissingError, match="goes on where it stopped"):
        memload.info(output.with_suffix(".idx"))


def test_a_data_set_that_is_being_replaced_is_shown_with_the_build(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.bin"
    memload.build(folder, output, size=16, num_workers=0)
    assert memload.build_status(output) is None
    memload.build(folder, output, part=(0, 3), overwrite=True, **OPTIONS)
    text = run(capsys, output)
    assert "shape: 16, 16, 3" in text
    assert "2 of 6 shards are done" in text
    facts = json.loads(run(capsys, output, "--json"))
    assert facts["samples"] == 12
    assert facts["unfinished_build"]["shards_done"] == 2


def test_after_publishing_there_is_no_unfinished_build(folder: Path, output: Path) -> None:
    memload.build(folder, output, **OPTIONS)
    assert memload.build_status(output) is None
    assert "unfinished_build" not in memload.info(output)


@pytest.mark.parametrize("name", ["out.bin", "out.idx", ".", "", "a/b"])
def test_without_a_build_there_is_no_status(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out.building").write_text("a file")
    assert memload.build_status(name) is None


def test_rejected_samples_are_counted_and_too_many_have_a_remedy(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in sorted(folder.rglob("*.*"))[:7]:
        path.write_bytes(b"no picture")
    output = tmp_path / "out.bin"
    memload.build(folder, output, part=(0, 2), **OPTIONS)
    parts = status_of(output).parts
    assert parts is not None
    assert 0 < parts.rejected < 7
    assert f"{parts.rejected} rejected" in run(capsys, output)
    with pytest.raises(memload.BuildError, match="--max-rejects"):
        memload.build(folder, output, part=(1, 2), **OPTIONS)
    text = run(capsys, output).splitlines()[0]
    assert "12 of 12 samples (100%), 7 rejected. Run the same" in text
    assert "without --part: it publishes" in text
    assert "--max-rejects" in text
