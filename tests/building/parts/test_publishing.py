"""Parts that are killed at any step, begin at once and publish at once: nothing is lost."""

import functools
import multiprocessing
import os
import shutil
import signal
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import memload
from memload.building import lock as lock_module
from memload.building.lock import Lock
from memload.building.parts import build as parts_build
from memload.building.parts import workspace as parts_workspace
from memload.building.parts.workspace import PartsWorkspace, is_in_parts, names_in
from memload.building.preparation import Preparation
from tests.building.test_resuming import (
    assert_nothing_half_done,
    files,
    killed_at,
    start_child,
)

Make = Callable[..., Path]

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="it forks")
FORK: Any = multiprocessing.get_context("fork")
ROW = 4 * 4 * 3


@pytest.fixture
def spoiled(make_pictures: Make, tmp_path: Path) -> Path:
    """Seven pictures in ``pics``, one of them broken, and their masks in ``masks``, without one."""
    pictures, masks = make_pictures(tmp_path / "pics", 7), tmp_path / "masks"
    for number, path in enumerate(sorted(pictures.glob("*/*.jpg"))):
        mask = masks / path.relative_to(pictures).with_suffix(".png")
        mask.parent.mkdir(parents=True, exist_ok=True)
        with Image.open(path) as picture:
            ids = np.random.default_rng(number).integers(0, 9, picture.size[::-1], np.uint8)
        Image.fromarray(ids).save(mask)
    (pictures / "class0" / "00003.jpg").write_bytes(b"no image")
    (masks / "class1" / "00001.png").unlink()
    return tmp_path


def build(folder: Path, place: Path, rows: int = 4, **options: Any) -> memload.BuildReport:
    """Build the pictures and masks of ``folder`` in ``place``, in shards of so many rows."""
    masks = {"masks": folder / "masks", "max_rejects": "100%"}
    given: dict[str, Any] = {"size": 4, "num_workers": 0, **masks, **options}
    return memload.build(folder / "pics", place / "out.bin", shard_size=4096 + rows * ROW, **given)


def end(folder: Path, place: Path, finisher: str, **options: Any) -> None:
    """Run the parts, or the plain command, until the data set is published."""
    is_begun = is_in_parts(place / "out.building") or not (place / "out.idx").exists()
    if finisher == "plain" and is_begun:
        assert build(folder, place, **options).is_published
    else:
        parts = [(0, 2), (1, 2)] if finisher == "ascending" else [(2, 3), (0, 3), (1, 3)]
        reports = [build(folder, place, part=part, **options) for part in parts]
        assert reports[-1].is_published


@LINUX
@pytest.mark.parametrize("old", [False, True], ids=["fresh", "over an old one"])
@pytest.mark.parametrize(
    "steps", [range(1, 300, 67), pytest.param(range(1, 400), marks=pytest.mark.slow)]
)
def test_killed_at_any_step_parts_go_on_and_end_with_the_same_bytes(
    spoiled: Path, tmp_path: Path, old: bool, steps: range
) -> None:
    expected, before, place = (tmp_path / name for name in ("expected", "before", "place"))
    for made in (expected, before):
        made.mkdir()
    build(spoiled, expected)
    if old:  # with other shards and without masks
        build(spoiled, before, rows=2, masks=None)
    finishers, finished = ("ascending", "plain", "mixed"), False

    def both_parts() -> None:
        for part in (0, 1):
            build(spoiled, place, part=(part, 2), overwrite=old)

    for step in steps:
        shutil.copytree(before, place)
        finished = killed_at(step, both_parts, also=["open"])
        assert_nothing_half_done(place, files(before), files(expected))
        end(spoiled, place, finishers[step % 3], overwrite=old)
        assert not (place / "out.building").exists(), step
        assert files(place) == files(expected), step
        shutil.rmtree(place)
        if finished:
            break
    assert finished
    assert step > 100


# Two at once: what one does between two steps of the other


@pytest.fixture
def expected(spoiled: Path, tmp_path: Path) -> dict[str, bytes]:
    """The files of the same build on one machine."""
    place = tmp_path / "expected"
    place.mkdir()
    build(spoiled, place)
    return files(place)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    path = tmp_path / "place"
    path.mkdir()
    return path


def do_before_lock(monkeypatch: pytest.MonkeyPatch, work: str, act: Callable[[], object]) -> None:
    """Have something done once, before a lock is asked for that is for this work."""
    acquire, acts = Lock.acquire, iter([act])

    def first_act(self: Lock, *, shared: bool = False, work: str = "") -> bool:
        if work == wanted:
            self._unlock()
            next(acts, lambda: None)()
        return acquire(self, shared=shared, work=work)

    wanted = work
    monkeypatch.setattr(Lock, "acquire", first_act)


def test_of_two_publishers_the_second_finds_the_data_set_published(
    spoiled: Path, place: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    build(spoiled, place, part=(0, 2))
    published = functools.partial(build, spoiled, place, part=(1, 2))
    do_before_lock(monkeypatch, "publishes", published)
    report = build(spoiled, place, part=(1, 2))
    assert report.is_published
    assert report.part is not None
    assert report.part.was_published
    assert files(place) == expected
    assert not (place / "out.building").exists()


@pytest.mark.parametrize("rejected", ["too many", "all"])
def test_of_two_publishers_with_too_many_rejects_both_say_so(
    spoiled: Path, place: Path, monkeypatch: pytest.MonkeyPatch, rejected: str
) -> None:
    messages = ["1 of 7 pictures .* cannot be used, and at most 0 may be rejected"] * 2
    if rejected == "all":
        for path in (spoiled / "pics").glob("*/*.jpg"):
            path.write_bytes(b"no image")
        messages = ["none of 7 pictures .* can be used", "was removed .* no sample can be used"]
    options = {"max_rejects": 0, "missing_masks": "fill"}
    build(spoiled, place, part=(0, 2), **options)

    def fail() -> None:
        with pytest.raises(memload.BuildError, match=messages.pop(0)):
            build(spoiled, place, part=(1, 2), **options)

    do_before_lock(monkeypatch, "publishes", fail)
    with pytest.raises(memload.BuildError, match=messages[-1]):
        build(spoiled, place, part=(1, 2), **options)
    assert (place / "out.building").is_dir() == (rejected == "too many")


@LINUX
@pytest.mark.parametrize(
    "steps", [range(25, 80, 13), pytest.param(range(1, 150), marks=pytest.mark.slow)]
)
def test_a_publisher_goes_on_where_another_one_was_killed(
    spoiled: Path, place: Path, expected: dict[str, bytes], steps: range
) -> None:
    for step in steps:
        build(spoiled, place, part=(0, 2))
        with pytest.MonkeyPatch.context() as patch:
            ended: list[bool] = []

            def publish_and_die(step: int = step, ended: list[bool] = ended) -> None:
                other = functools.partial(build, spoiled, place, part=(1, 2))
                ended.append(killed_at(step, other))

            do_before_lock(patch, "publishes", publish_and_die)
            assert build(spoiled, place, part=(1, 2)).is_published
        assert files(place) == expected, step
        assert not (place / "out.building").exists(), step
        for path in place.iterdir():
            path.unlink()
        if ended[0]:
            break
    assert ended[0] or steps.step > 1


def test_a_part_that_begins_when_the_data_set_has_just_been_published_finds_it(
    spoiled: Path, place: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    look, looks = parts_build.published, iter([True])

    def look_then_publish(request: Any) -> Any:
        found = look(request)
        if next(looks, False):
            build(spoiled, place, part=(0, 1))
        return found

    monkeypatch.setattr(parts_build, "published", look_then_publish)
    report = build(spoiled, place, part=(1, 2))
    assert report.converted == 0
    assert report.part is not None
    assert report.part.was_published
    assert files(place) == expected
    assert not (place / "out.building").exists()


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_build_in_parts_that_begins_while_the_plain_command_opens_the_source_is_kept(
    spoiled: Path,
    place: Path,
    expected: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    overwrite: bool,
) -> None:
    open_source = Preparation.open

    def begin_then_open(self: Preparation) -> Any:
        monkeypatch.setattr(Preparation, "open", open_source)
        build(spoiled, place, part=(0, 2))
        return open_source(self)

    monkeypatch.setattr(Preparation, "open", begin_then_open)
    with pytest.raises(memload.BuildError, match=r"parts has just begun there\. Run the same"):
        build(spoiled, place, overwrite=overwrite)
    assert build(spoiled, place).converted == 3  # of the second of two shards
    assert files(place) == expected


@LINUX
def test_of_two_parts_that_begin_at_once_none_waits_for_the_work_of_the_other(
    spoiled: Path, place: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    (has_begun, tell_begun), (may_go_on, let_go_on) = os.pipe(), os.pipe()
    children = []

    def convert_later(*arguments: Any, **options: Any) -> int:
        os.write(tell_begun, b".")
        os.read(may_go_on, 1)
        return convert(*arguments, **options)

    convert = parts_workspace.convert_rows

    def other() -> None:
        parts_workspace.convert_rows = convert_later  # type: ignore[attr-defined]  # in the child
        assert build(spoiled, place, part=(0, 2)).is_published

    def let_other_begin() -> None:
        children.append(start_child(10**6, other))
        os.read(has_begun, 1)

    do_before_lock(monkeypatch, "begins the build", let_other_begin)
    try:
        report = build(spoiled, place, part=(1, 2), lock_timeout=1)
        assert report.part is not None
        assert report.part.unfinished == (0,)
    finally:
        os.write(let_go_on, b".")
        status = os.waitpid(children[0], 0)[1]
        for end in (has_begun, tell_begun, may_go_on, let_go_on):
            os.close(end)
    assert status == 0
    assert files(place) == expected


@LINUX
def test_a_part_begins_anew_if_the_first_one_is_killed_while_it_lists_the_source(
    spoiled: Path, place: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, tell_begun = os.pipe()

    def list_for_ever(self: Preparation) -> Any:
        os.write(tell_begun, b".")
        signal.pause()

    def first() -> None:
        Preparation.open = list_for_ever  # type: ignore[method-assign]  # in the child
        build(spoiled, place, part=(0, 2))

    child = start_child(10**6, first)
    os.read(has_begun, 1)
    sleep, kills = time.sleep, []

    def kill_then_sleep(seconds: float) -> None:
        if not kills:
            os.kill(child, signal.SIGKILL)
            kills.append(os.waitpid(child, 0)[1])
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", kill_then_sleep)  # the lock is waited for
    for part in (1, 0):
        report = build(spoiled, place, part=(part, 2))
    assert kills == [signal.SIGKILL]
    assert report.is_published
    assert files(place) == expected
    for end in (has_begun, tell_begun):
        os.close(end)


@pytest.mark.parametrize("part", [None, (0, 1)], ids=["plain", "part"])
@pytest.mark.parametrize("left", ["nothing", "lock", "half a plan", "all but the plan"])
def test_what_a_killed_first_part_left_is_no_obstacle(
    spoiled: Path, place: Path, expected: dict[str, bytes], left: str, part: Any
) -> None:
    folder = place / "out.building"
    folder.mkdir()
    if left == "lock":
        (folder / "lock").touch()
    elif left != "nothing":
        build(spoiled, place, part=(0, 2))
        text = (folder / "plan.json").read_text()
        (folder / "plan.json").unlink()
        for path in (*(folder / "done").iterdir(), *folder.glob("out-*")):
            path.unlink()
        if left == "half a plan":
            (folder / ".0123456789abcdef.tmp").write_text(text[: len(text) // 2])
    assert build(spoiled, place, part=part).is_published
    assert files(place) == expected
    assert not folder.exists()


@LINUX
def test_parts_that_begin_while_another_one_publishes_find_the_data_set(
    spoiled: Path,
    place: Path,
    expected: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    children, publisher = [], os.getpid()

    def late() -> None:
        monkeypatch.setattr(lock_module, "_POLL_SECONDS", 0.01)
        assert build(spoiled, place, part=(0, 2)).is_published

    def let_another_begin() -> None:
        waits, tell = os.pipe()

        def tell_then_sleep(seconds: float, sleep: Callable[[float], None] = time.sleep) -> None:
            os.write(tell, b".")
            sleep(seconds)

        def late_that_tells() -> None:
            monkeypatch.setattr(time, "sleep", tell_then_sleep)  # it waits for the lock
            late()

        children.append(start_child(10**6, late_that_tells))
        os.close(tell)
        os.read(waits, 1)  # until it waits, or ends
        os.close(waits)

    def let_others_begin() -> None:
        for name in ("replace", "unlink", "rmdir"):
            monkeypatch.setattr(os, name, with_another(getattr(os, name)))

    def with_another(change: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if os.getpid() == publisher:
                let_another_begin()
            return change(*arguments, **options)

        return call

    build(spoiled, place, part=(0, 2))
    do_before_lock(monkeypatch, "publishes", let_others_begin)
    assert build(spoiled, place, part=(1, 2)).is_published
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * len(children)
    assert len(children) > 20
    assert files(place) == expected
    assert not (place / "out.building").exists()


@LINUX
@pytest.mark.parametrize("times", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_eight_parts_that_begin_and_end_at_once_publish_once(
    spoiled: Path, tmp_path: Path, times: int
) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    build(spoiled, alone, rows=1)
    for number in range(times):
        place, barrier = tmp_path / str(number), FORK.Barrier(7)
        place.mkdir()

        def build_part(part: int, place: Path = place, barrier: Any = barrier) -> None:
            write_done = PartsWorkspace._write_done

            def write_together(*arguments: Any) -> None:
                barrier.wait(60)
                write_done(*arguments)

            PartsWorkspace._write_done = write_together  # type: ignore[method-assign]  # in the child
            build(spoiled, place, rows=1, part=(part, 8))  # there are seven shards

        children = [
            start_child(10**6, functools.partial(build_part, part)) for part in reversed(range(8))
        ]
        assert [os.waitpid(child, 0)[1] for child in children] == [0] * 8
        assert files(place) == files(alone)
        assert not (place / "out.building").exists()


# A power cut: what was not flushed to the disk is gone


def record_flushes(copies: Path) -> None:
    """Keep a copy of each file as it was when it was flushed last, under its number in ``copies``."""
    flush, kept = os.fsync, []

    def flush_and_copy(descriptor: int) -> None:
        flush(descriptor)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            kept.append(os.dup(descriptor))  # no other file gets its number
            content = Path(f"/proc/self/fd/{descriptor}").read_bytes()
            (copies / str(os.fstat(descriptor).st_ino)).write_bytes(content)

    os.fsync = flush_and_copy


def cut_power(place: Path, copies: Path) -> None:
    """Give each file the content that was flushed, or none."""
    for path in place.rglob("*"):
        if path.is_file():
            flushed = copies / str(path.stat().st_ino)
            path.write_bytes(flushed.read_bytes() if flushed.exists() else b"")


@LINUX
@pytest.mark.parametrize(
    "steps", [range(1, 300, 53), pytest.param(range(1, 400, 2), marks=pytest.mark.slow)]
)
def test_after_a_power_cut_parts_go_on_and_end_with_the_same_bytes(
    spoiled: Path, place: Path, tmp_path: Path, expected: dict[str, bytes], steps: range
) -> None:
    for step in steps:
        copies = tmp_path / "copies"
        copies.mkdir()

        def both_parts(copies: Path = copies) -> None:
            record_flushes(copies)
            for part in (0, 1):
                build(spoiled, place, part=(part, 2))

        finished = killed_at(step, both_parts)
        cut_power(place, copies)
        if (place / "out.idx").exists():
            assert files(place) == expected
        end(spoiled, place, ("ascending", "plain", "mixed")[step % 3])
        assert files(place) == expected, step
        assert not (place / "out.building").exists(), step
        for path in (*place.iterdir(), *copies.iterdir()):
            path.unlink()
        copies.rmdir()
        if finished:
            break
    assert finished
    assert step > 100


def test_a_shard_is_done_and_a_data_set_published_after_all_files_and_their_names_are_flushed(
    spoiled: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flush, replace, flushed, committed = os.fsync, os.replace, dict[int, object](), []

    def content(path: Path) -> object:
        return names_in(path) if path.is_dir() else path.read_bytes()

    def note_flush(descriptor: int) -> None:
        flush(descriptor)
        path = Path(f"/proc/self/fd/{descriptor}").resolve()
        flushed[path.stat().st_ino] = content(path)  # it may be renamed afterwards

    def check_names(folder: Path, names: set[str]) -> None:
        assert names <= flushed[folder.stat().st_ino], folder  # type: ignore[operator]

    def look_then_replace(source: Any, target: Any) -> None:
        source, target = Path(source), Path(target)
        folder = place / "out.building"
        if target.parent.name == "done":
            number = target.name
            journal = folder / "shards" / number
            shards = set(folder.glob(f"out*{number}-of*"))
            assert len(shards) == 2
            for path in (*shards, journal / "rows", source):
                assert flushed[path.stat().st_ino] == content(path), path
            check_names(folder, {path.name for path in shards} | {"shards", "done"})
            check_names(folder / "shards", {number})
            check_names(journal, {"rows"})
            committed.append(target.name)
        if target == place / "out.idx":
            assert flushed[source.stat().st_ino] == content(source)
            check_names(place, {path.name for path in place.glob("out*.bin")})
            committed.append(target.name)
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_flush)
    monkeypatch.setattr(os, "replace", look_then_replace)
    build(spoiled, place, part=(0, 1))
    assert committed == ["00000", "00001", "out.idx"]
