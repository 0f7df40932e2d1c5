"""Parts that are killed at any step, begin at once and publish at once: nothing is lost."""

import functools
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import memload
from memload.building.lock import Lock
from memload.building.parts import build as parts_build
from memload.building.parts import workspace as parts_workspace
from memload.building.parts.workspace import is_in_parts
from memload.building.preparation import Preparation
from tests.building.test_resuming import files, killed_at, start_child

Make = Callable[..., Path]

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="it forks")
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
    "steps", [range(1, 300, 47), pytest.param(range(1, 400), marks=pytest.mark.slow)]
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
        if (place / "out.idx").exists():  # the old one is whole, or the new one is
            assert files(place) == files(expected) or files(before).items() <= files(place).items()
            assert memload.verify(place / "out.bin").ok, step
        else:
            with pytest.raises(memload.MissingError):
                memload.MemmapDataset(place / "out.bin")
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
        if left == "half a plan":
            (folder / ".0123456789abcdef.tmp").write_text(text[: len(text) // 2])
    assert build(spoiled, place, part=part).is_published
    assert files(place) == expected
    assert not folder.exists()
