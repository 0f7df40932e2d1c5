"""Builds that are killed, interrupted or refused, and what the same command makes of them afterwards."""

import errno
import fcntl
import functools
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import memload
from memload.building import destination

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="it forks")
ROW = 4 * 4 * 3
SHARDS = {"shard_size": 4096 + 5 * ROW}


class Stop(BaseException):
    """Ends a build as Ctrl-C does."""


class Numbered:
    """A data set of 20 small pictures with labels; ``act`` is called with the number of each first."""

    def __init__(self, act: Callable[[int], object] = lambda number: None, count: int = 20) -> None:
        self.act, self.count = act, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[np.ndarray, int]:
        self.act(number)
        return np.full((4, 4, 3), number, np.uint8), number % 3


class Entries(Numbered):
    """The pictures as entries of dicts, and what is left of white."""

    def __getitem__(self, number: int) -> Any:
        picture, _ = super().__getitem__(number)
        return {"left": picture, "right": 255 - picture}


class Interrupted(memload.ImageFolder):
    """A folder that interrupts the build at one of its pictures, by default at the last."""

    stop_at = -1

    def __getitem__(self, index: int) -> memload.Record:
        if index == range(len(self))[self.stop_at]:
            raise Stop
        return super().__getitem__(index)


class InterruptedAtNine(Interrupted):
    stop_at = 9


def raise_at(row: int, error: type[BaseException]) -> Callable[[int], None]:
    def act(number: int) -> None:
        if number == row:
            raise error

    return act


def build(source: Any, folder: Path, **options: Any) -> memload.BuildReport:
    defaults = {"size": 4, "num_workers": 0, "max_rejects": "100%"}
    return memload.build(source, folder / "out.bin", **defaults | options)


def interrupt(source: Any, folder: Path, **options: Any) -> None:
    """Leave an unfinished build; of `STOPPED`, its first ten rows are done."""
    with pytest.raises(Stop):
        build(source, folder, **options)
    assert (folder / "out.building").exists()
    with pytest.raises(memload.MissingError):
        memload.MemmapDataset(folder / "out.bin")


STOPPED = Numbered(raise_at(10, Stop))


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("out*") if path.is_file()}


def undisturbed(source: Any, folder: Path, **options: Any) -> dict[str, bytes]:
    """The files of the same build where nothing came between."""
    folder.mkdir()
    build(source, folder, **options)
    return files(folder)


def finish(source: Any, folder: Path, **options: Any) -> memload.BuildReport:
    """Go on with a build, and assert that its files are those of an undisturbed one."""
    expected = undisturbed(source, folder / "expected", **options)
    report = build(source, folder, **options)
    assert files(folder) == expected
    assert not (folder / "out.building").exists()
    return report


@pytest.fixture
def spoiled(folder: Path) -> Path:
    """The folder of pictures, two of which cannot be used: one of the first, and the last."""
    (folder / "ant" / "02.jpg").write_bytes(b"no image")
    (folder / "cat" / "last.jpg").write_bytes(b"")
    return folder


# Killed at any moment


def killed_at(step: int, function: Callable[[], object], also: Sequence[str] = ()) -> bool:
    """Call a function in a child that kills itself before its step-th change to the disk; say if it came to its end."""
    return os.waitpid(start_child(step, function, also), 0)[1] == 0


def start_child(step: int, function: Callable[[], object], also: Sequence[str] = ()) -> int:
    """Start the child of `killed_at`, and return its number. Its status is 1 after an error.

    ``also`` names further functions of ``os`` that count as a step. Those of its workers do not.
    """
    child = os.fork()
    if child:
        return child
    calls, this_process = iter(range(1, step)), os.getpid()

    def wrap(name: str) -> None:
        usual = getattr(os, name)

        def maybe(*arguments: Any, **options: Any) -> Any:
            if os.getpid() == this_process and next(calls, None) is None:
                os.kill(this_process, signal.SIGKILL)
            return usual(*arguments, **options)

        setattr(os, name, maybe)

    changes = ("replace", "rename", "fsync", "unlink", "ftruncate", "rmdir", "mkdir", "pwrite")
    for name in (*changes, *also):
        wrap(name)
    try:
        function()
    except BaseException:  # noqa: BLE001  # it must not go on as a test
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def assert_nothing_half_done(
    place: Path, before: dict[str, bytes], expected: dict[str, bytes]
) -> None:
    """The old data set is whole, or the new one is, or there is none."""
    if (place / "out.idx").exists():
        assert files(place) == expected or before.items() <= files(place).items()
        assert memload.verify(place / "out.bin").ok
    else:
        with pytest.raises(memload.MissingError):
            memload.MemmapDataset(place / "out.bin")


def kill_and_go_on(
    place: Path,
    expected: dict[str, bytes],
    steps: Iterable[int],
    run: Callable[[], object],
    build_old: Callable[[], object] | None,
) -> int:
    """Kill a build into ``place`` at each step, and run it again. Return the first it does not reach.

    ``build_old`` builds what it replaces, if it replaces anything.
    """
    for step in steps:
        place.mkdir()
        if build_old is not None:
            build_old()
        before = files(place)
        finished = killed_at(step, run)
        assert_nothing_half_done(place, before, expected)
        if build_old is not None or files(place) != expected:
            run()
            assert not (place / "out.building").exists(), step
        assert files(place) == expected, step
        shutil.rmtree(place)
        if finished:
            return step
    raise AssertionError("the build has more steps")


@LINUX
@pytest.mark.parametrize("old", [False, True], ids=["fresh", "over an old one"])
@pytest.mark.parametrize(
    "steps", [range(1, 100, 13), pytest.param(range(1, 200), marks=pytest.mark.slow)]
)
def test_killed_at_any_step_it_goes_on_and_ends_with_the_same_bytes(
    spoiled: Path, tmp_path: Path, old: bool, steps: range
) -> None:
    place, options = tmp_path / "place", {**SHARDS, "overwrite": old}
    expected = undisturbed(spoiled, tmp_path / "expected", **options)
    # with other shards, which are to go
    build_old = functools.partial(build, spoiled, place, shard_size=4096 + 2 * ROW)
    run = functools.partial(build, spoiled, place, **options)
    assert kill_and_go_on(place, expected, steps, run, build_old if old else None) > 40


def test_an_error_while_converting_leaves_the_old_data_set_as_it_is(tmp_path: Path) -> None:
    build(Numbered(), tmp_path)
    before, dataset = files(tmp_path), memload.MemmapDataset(tmp_path / "out.bin")
    pixels = dataset.gather(range(20)).numpy()
    with pytest.raises(Stop):
        build(STOPPED, tmp_path, size=6, overwrite=True)
    assert files(tmp_path) == before
    finish(Numbered(), tmp_path, size=6, overwrite=True)
    assert np.array_equal(dataset.gather(range(20)).numpy(), pixels)  # an open one is still read


# Rejected rows are tried again


@pytest.mark.parametrize(("num_workers", "overwrite"), [(0, False), (0, True), (2, False)])
def test_a_sample_that_was_mended_is_converted_by_the_same_command(
    tmp_path: Path, num_workers: int, overwrite: bool
) -> None:
    options: dict[str, Any] = {"num_workers": num_workers, "on_error": "raise"}
    with pytest.raises(memload.DecodeError, match=r"KeyError.*build again"):
        build(Numbered(raise_at(12, KeyError)), tmp_path, **options)
    assert finish(Numbered(), tmp_path, overwrite=overwrite, **options).rejected == 0


def test_pictures_that_were_away_for_a_while_are_not_lost(folder: Path, tmp_path: Path) -> None:
    class Fleeting(Interrupted):
        def __getitem__(self, index: int) -> memload.Record:
            record = super().__getitem__(index)
            return record._replace(image=Path("/away")) if 2 <= index < 7 else record

    interrupt(Fleeting(folder), tmp_path)
    assert finish(folder, tmp_path).rejected == 0


def test_a_finished_build_that_waited_to_be_published_tries_rejected_rows_again(
    folder: Path, tmp_path: Path
) -> None:
    picture, in_the_way = folder / "ant" / "00.jpg", tmp_path / "out.bin"
    data = picture.read_bytes()
    picture.write_bytes(b"damaged")

    class Disturbed(memload.ImageFolder):
        def __getitem__(self, index: int) -> memload.Record:
            in_the_way.write_text("somebody else's")
            return super().__getitem__(index)

    with pytest.raises(memload.BuildError, match="made by somebody else while the build ran"):
        build(Disturbed(folder), tmp_path)
    picture.write_bytes(data)
    assert finish(folder, tmp_path, overwrite=True).rejected == 0


@pytest.mark.parametrize("renamings", range(4))
def test_a_build_that_was_stopped_while_it_was_published_is_there_until_another_one_is(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renamings: int
) -> None:
    build(folder, tmp_path, size=10)
    left, move = iter(range(renamings)), destination.move

    def stopped(*paths: Path) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        move(*paths)

    with monkeypatch.context() as patch:
        patch.setattr(destination, "move", stopped)
        with pytest.raises(KeyboardInterrupt):
            build(folder, tmp_path, overwrite=True, **SHARDS)
    with pytest.raises(memload.MissingError):
        memload.MemmapDataset(tmp_path / "out.bin")
    with pytest.raises(Stop):
        build(Interrupted(folder), tmp_path, overwrite=True, size=12)
    assert memload.MemmapDataset(tmp_path / "out.bin").index.image.shape == (4, 4, 3)
    assert memload.verify(tmp_path / "out.bin").ok
    build(folder, tmp_path, overwrite=True, size=12)
    assert memload.verify(tmp_path / "out.bin").ok
    assert not list(tmp_path.glob("out-*"))


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_only_what_is_not_done_is_done_with_any_number_of_workers(
    spoiled: Path, tmp_path: Path, num_workers: int
) -> None:
    interrupt(InterruptedAtNine(spoiled), tmp_path, **SHARDS)
    report = finish(spoiled, tmp_path, num_workers=num_workers, **SHARDS)
    assert report.converted == 6  # the rejected one of the nine is tried again
    assert "8 done before" in str(report)


# The source changes


def add(folder: Path) -> None:
    shutil.copy(folder / "ant" / "00.jpg", folder / "bee" / "more.jpg")
    shutil.copy(folder / "ant" / "00.jpg", folder / "ant" / "000.jpg")


def add_class(folder: Path) -> None:
    (folder / "aardvark").mkdir()
    shutil.copy(folder / "ant" / "00.jpg", folder / "aardvark" / "a.jpg")


def change(folder: Path) -> None:
    shutil.copy(folder / "cat" / "05.jpg", folder / "ant" / "00.jpg")


def replace_by_dangling_link(folder: Path) -> None:
    (folder / "ant" / "00.jpg").unlink()
    (folder / "ant" / "00.jpg").symlink_to("nowhere.jpg")


def change_all(folder: Path) -> None:
    change(folder)
    add(folder)
    (folder / "cat" / "08.jpg").unlink()


@pytest.mark.parametrize("options", [{}, {"num_workers": 2, **SHARDS}], ids=["", "shards"])
@pytest.mark.parametrize(
    ("change", "converted", "counts"),
    [
        (change, 2, None),
        (lambda folder: os.utime(folder / "ant" / "03.jpg", (1, 1)), 2, None),
        (replace_by_dangling_link, 2, None),
        (add, 3, "added: 2, removed: 0, kept: 12"),
        (add_class, 2, "added: 1, removed: 0, kept: 12"),
        (lambda folder: (folder / "ant" / "00.jpg").unlink(), 1, "removed: 1, kept: 11"),
        (change_all, 4, "added: 2, removed: 1, kept: 11"),
    ],
    ids=["changed", "touched", "gone", "added", "class added", "removed", "all"],
)
def test_a_folder_that_changed_is_taken_as_it_is_and_only_what_is_new_is_converted(
    folder: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    change: Callable[[Path], Any],
    converted: int,
    counts: str | None,
    options: dict[str, Any],
) -> None:
    interrupt(Interrupted(folder), tmp_path, **options | {"num_workers": 0})
    change(folder)
    report = finish(folder, tmp_path, **options)
    assert (counts or "") in caplog.text
    assert ("Samples added" in caplog.text) == (counts is not None)
    if not options:  # rows of an unfinished chunk count too
        assert converted <= report.converted <= converted + 2


def test_a_source_may_change_again_while_its_changes_are_taken_in(
    folder: Path, tmp_path: Path
) -> None:
    for step in range(3):
        interrupt(Interrupted(folder), tmp_path)
        shutil.copy(folder / "ant" / "00.jpg", folder / "bee" / f"more{step}.jpg")
    finish(folder, tmp_path)


@pytest.mark.parametrize("points", [None, {"eye": "x,y"}])
def test_labels_and_points_are_those_of_the_manifest_of_now(
    folder: Path, tmp_path: Path, points: Any
) -> None:
    class Listed(memload.Manifest):
        def __init__(self, first: int, stop_at: int = -1) -> None:
            paths = sorted(path.relative_to(folder) for path in folder.rglob("*.jpg"))
            lines = [f"{path},{(n + first) % 3},{n + first},5" for n, path in enumerate(paths)]
            (tmp_path / "m.csv").write_text("\n".join(["path,label,x,y", *lines]))
            super().__init__(tmp_path / "m.csv", root=folder, points=points)
            self.stop_at = stop_at

        def __getitem__(self, index: int) -> memload.Record:
            if index == self.stop_at:
                raise Stop
            return super().__getitem__(index)

    interrupt(Listed(0, stop_at=11), tmp_path)
    finish(Listed(1), tmp_path)


def test_no_file_is_looked_at_before_the_first_is_decoded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, looked_at = os.stat, []

    def look(path: Any, **options: Any) -> os.stat_result:
        looked_at.append(str(path))
        return usual(path, **options)

    class InterruptedAtOnce(Interrupted):
        stop_at = 0

    monkeypatch.setattr(os, "stat", look)
    interrupt(InterruptedAtOnce(folder), tmp_path)
    assert not [path for path in looked_at if path.endswith(".jpg")]


# Data sets


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("changed", "pixels", "label", "difference"),
    [
        ((0,), 100, 0, r"sample 0 has other pixels"),
        ((9,), 100, 0, r"sample 9 has other pixels"),
        (range(1, 9), 100, 0, r"sample \d has other pixels"),
        (range(20), 0, 1, "sample 0 has another 'label'"),
    ],
)
def test_another_data_set_is_not_gone_on_with(
    tmp_path: Path, changed: Any, pixels: int, label: int, difference: str, num_workers: int
) -> None:
    class Other(Numbered):
        def __getitem__(self, number: int) -> tuple[np.ndarray, int]:
            image, target = super().__getitem__(number)
            return (image + pixels, target + label) if number in changed else (image, target)

    interrupt(STOPPED, tmp_path)
    with pytest.raises(memload.BuildError, match=f"another data set: {difference}"):
        build(Other(), tmp_path, num_workers=num_workers)
    finish(Other(), tmp_path, num_workers=num_workers, overwrite=True)


def test_a_data_set_of_another_length_is_not_gone_on_with(tmp_path: Path) -> None:
    interrupt(STOPPED, tmp_path)
    with pytest.raises(memload.BuildError, match="it had 20 samples and has 30"):
        build(Numbered(count=30), tmp_path)
    finish(Numbered(count=30), tmp_path, overwrite=True)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_data_set_that_fails_where_it_did_not_is_not_gone_on_with(
    tmp_path: Path, num_workers: int
) -> None:
    interrupt(STOPPED, tmp_path)
    with pytest.raises(memload.BuildError, match="sample 4 could be used, and now cannot"):
        build(Numbered(raise_at(4, ValueError)), tmp_path, num_workers=num_workers)


def test_arrays_are_the_same_for_any_number_of_workers_and_after_an_interruption(
    tmp_path: Path,
) -> None:
    class Depths(Numbered):
        def __getitem__(self, number: int) -> tuple[np.ndarray, int]:
            self.act(number)
            shape = (7, 9, 2) if number not in (4, 15) else (9, 7, 2)  # these two are rejected
            return np.random.default_rng(number).normal(3, 1e3, shape).astype("f4"), number

    options = {"mode": "array", "size": None, "shard_size": 4096 + 8 * 7 * 9 * 2 * 4}
    interrupt(Depths(STOPPED.act), tmp_path, **options)
    report = finish(Depths(), tmp_path, **options)
    assert (report.samples, report.rejected, report.converted < 20) == (18, 2, True)
    assert undisturbed(Depths(), tmp_path / "3", num_workers=3, **options) == files(tmp_path)


@LINUX
def test_a_data_set_is_not_indexed_in_the_process_that_workers_are_forked_from(
    tmp_path: Path,
) -> None:
    """If it opened a file there, all workers would move one another's position in it."""

    def note(number: int) -> None:
        with (tmp_path / "processes").open("a") as file:
            file.write(f"{os.getpid()}\n")

    interrupt(STOPPED, tmp_path)
    build(Numbered(note), tmp_path, num_workers=2)  # compares finished samples
    memload.build(Numbered(note), tmp_path / "arrays.bin", mode="array", num_workers=1)
    processes = (tmp_path / "processes").read_text().split()
    assert len(processes) > 20
    assert str(os.getpid()) not in processes


# What else is in the folder of the output


@pytest.mark.parametrize("name", ["out.bin", "out.idx", "out.rejects.csv"])
def test_a_file_that_appears_while_a_build_runs_is_not_replaced(tmp_path: Path, name: str) -> None:
    precious = tmp_path / name

    def act(number: int) -> None:
        if number == 5:
            precious.write_text("precious")
            raise ValueError("rejected, so that there is a ledger")

    with pytest.raises(memload.BuildError, match=rf"{name} was made by somebody else while"):
        build(Numbered(act), tmp_path)
    assert files(tmp_path) == {name: b"precious"}
    precious.unlink()
    assert finish(Numbered(), tmp_path).converted == 1


def test_a_ledger_that_is_somebody_elses_stays_where_nothing_was_rejected(tmp_path: Path) -> None:
    mine = tmp_path / "out.rejects.csv"
    build(Numbered(lambda number: number == 5 and mine.write_text("mine")), tmp_path)
    assert mine.read_text() == "mine"


@pytest.mark.parametrize("overwrite", [False, True])
def test_files_of_others_in_the_folder_of_the_build_are_left(
    tmp_path: Path, overwrite: bool
) -> None:
    place = tmp_path / "out.building"
    (place / "@eaDir" / "inner").mkdir(parents=True)
    (place / "thesis.txt").write_text("precious")
    build(Numbered(), tmp_path, overwrite=overwrite)
    assert memload.verify(tmp_path / "out.bin").ok
    assert sorted(path.name for path in place.iterdir()) == ["@eaDir", "thesis.txt"]


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        ({"fit": "pad"}, "fit was 'crop' and is 'pad'"),
        (SHARDS, "rows per shard was None and is 5"),
        ({"size": 8}, r"size was \[4, 4\] and is \[8, 8\]"),
    ],
)
def test_other_settings_are_refused_with_what_differs_and_begin_anew_with_overwrite(
    tmp_path: Path, options: dict[str, Any], difference: str
) -> None:
    interrupt(STOPPED, tmp_path)
    with pytest.raises(memload.BuildError, match=rf"{difference}\. .*--overwrite"):
        build(Numbered(), tmp_path, **options)
    interrupt(Numbered(raise_at(15, Stop)), tmp_path)  # refusing harms nothing
    assert finish(Numbered(), tmp_path, overwrite=True, **options).converted == 20


def test_overwrite_begins_an_unfinished_build_anew_and_the_same_command_goes_on(
    tmp_path: Path,
) -> None:
    class Mended(Numbered):  # nothing but the pixels tells that its samples have changed
        def __getitem__(self, number: int) -> tuple[np.ndarray, int]:
            pixels, label = super().__getitem__(number)
            return pixels + 1, label

    interrupt(STOPPED, tmp_path)
    interrupt(Mended(raise_at(15, Stop)), tmp_path, overwrite=True)
    assert finish(Mended(), tmp_path, overwrite=True).converted < 20


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "zeroed": lambda data: data[: len(data) // 3].ljust(len(data), b"\0"),
    "flipped": lambda data: bytes(byte ^ 4 * (at % 97 == 0) for at, byte in enumerate(data)),
    "cut short": lambda data: data[: len(data) // 2],
    "half a line more": lambda data: data + b'\n[3, "cut sh\xff',
    "another": lambda data: b'{"size": 5, "columns": ["/etc/passwd", 3]}',
}


@pytest.mark.filterwarnings("ignore:Exception ignored")  # NumPy does not close damaged keys
@pytest.mark.parametrize("damage", [*DAMAGES, "gone"])
@pytest.mark.parametrize(
    "name", ["rows", "keys", "plan.json", "rejects.jsonl", "out-00000-of-00003.bin"]
)
def test_a_file_of_an_unfinished_build_that_is_damaged_costs_work_and_no_sample(
    spoiled: Path, tmp_path: Path, name: str, damage: str
) -> None:
    interrupt(InterruptedAtNine(spoiled), tmp_path, **SHARDS)
    path = tmp_path / "out.building" / name
    data = path.read_bytes()
    path.unlink()
    if damage != "gone":
        path.write_bytes(DAMAGES[damage](data))
    finish(spoiled, tmp_path, overwrite=name == "plan.json", **SHARDS)


# A disk that is full or fails


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_full_disk_is_reported_and_the_build_goes_on_when_there_is_room(
    spoiled: Path, tmp_path: Path, num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, calls = os.pwrite, iter(range(6))

    def full(descriptor: int, data: bytes, offset: int) -> int:
        if next(calls, None) is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        return usual(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    message = r"cannot be written: .*No space left on device.*goes on where it stopped"
    with pytest.raises(memload.BuildError, match=message):
        build(spoiled, tmp_path, num_workers=num_workers)
    # There is room again, but each write is cut short.
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: usual(file, data[:30], at))
    finish(spoiled, tmp_path, num_workers=num_workers)
    assert memload.verify(tmp_path / "out.bin").ok


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM])
def test_a_process_that_runs_out_of_something_rejects_no_picture(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, num_workers: int
) -> None:
    usual = os.open

    def full(path: Any, *arguments: Any) -> int:
        if str(path).endswith("03.jpg"):
            raise OSError(number, os.strerror(number))
        return usual(path, *arguments)

    monkeypatch.setattr(os, "open", full)
    with pytest.raises(memload.BuildError, match=r"03\.jpg cannot be read: "):
        build(folder, tmp_path, num_workers=num_workers)
    monkeypatch.setattr(os, "open", usual)
    assert build(folder, tmp_path).samples == 12


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="nothing to drop pages with")
def test_what_could_not_be_flushed_is_read_from_the_disk_and_done_again(
    folder: Path, tmp_path: Path
) -> None:
    def fsync(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").resolve().name == "out.bin":
            raise OSError(errno.EIO, "Input/output error")

    def drop(descriptor: int, *arguments: int) -> None:
        assert arguments == (0, 0, os.POSIX_FADV_DONTNEED)
        # As after a disk that did not take them: the row is what it was before.
        with Path(f"/proc/self/fd/{descriptor}").open("r+b") as shard:
            shard.seek(4096)
            shard.write(bytes(ROW))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        patch.setattr(os, "posix_fadvise", drop)
        with pytest.raises(memload.BuildError, match=r"Input/output error.*goes on where it"):
            build(folder, tmp_path)
    assert finish(folder, tmp_path).converted == 1


@LINUX
@pytest.mark.parametrize("limit", [0, 500, 5000])
def test_no_room_for_a_file_of_the_builds_own_is_reported_in_one_line(
    folder: Path, tmp_path: Path, limit: int
) -> None:
    command = [sys.executable, "-m", "memload", "build", folder, tmp_path / "out.bin"]
    done = subprocess.run(
        [*command, "--num-workers", "0"],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"memload: {tmp_path}/out.bin: cannot be written")
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == [folder]


# The lock, and a build that is running


SLOW = """
import sys, time
import numpy as np
import memload

class Slow:
    def __len__(self):
        return 20
    def __getitem__(self, number):
        if number == 10:
            print("at ten", flush=True)
            time.sleep(600)
        return np.full((4, 4, 3), number, np.uint8), number % 3

memload.build(Slow(), sys.argv[1], size=4, num_workers=0)
"""


def test_a_running_build_refuses_others_and_tells_its_progress_and_can_be_killed(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", SLOW, tmp_path / "out.bin"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "at ten\n"
            for overwrite in (False, True):
                with pytest.raises(memload.BuildError, match=rf"now \(process {process.pid}\)"):
                    build(Numbered(), tmp_path, overwrite=overwrite)
            for name in ("out.bin", "out.idx", "out"):
                message = r"^out\.bin is being built right now: 10 of 20 samples are done"
                with pytest.raises(memload.MissingError, match=message):
                    memload.info(tmp_path / name)
        finally:
            process.kill()
    message = r"its build is not complete .*10 of 20 samples are done"
    with pytest.raises(memload.MissingError, match=message):
        memload.info(tmp_path / "out.bin")
    assert finish(Numbered(), tmp_path).converted == 10


def test_a_file_system_without_locks_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    for name in ("fcntl", "flock"):
        monkeypatch.setattr(fcntl, name, refuse)
    with caplog.at_level(logging.WARNING, "memload"):
        assert build(Numbered(), tmp_path).samples == 20
    assert "this file system has no locks (No locks available)" in caplog.text


CROWD = """
import sys, random, time
import memload
images, output, seed = sys.argv[1:]
dice = random.Random(seed)
for _ in range(40):
    time.sleep(dice.uniform(0, 0.02))
    try:
        memload.build(images, output, size=4, num_workers=0, overwrite=True)
        print("built")
    except memload.BuildError as error:
        print("refused" if ": another process " in str(error) else f"failed: {error}")
"""


@pytest.mark.slow
def test_several_processes_that_build_one_output_at_once_do_not_disturb_it(
    folder: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", CROWD, str(folder), str(tmp_path / "out.bin")]
    processes = [
        subprocess.Popen([*command, str(seed)], stdout=subprocess.PIPE, text=True)
        for seed in range(4)
    ]
    said = [line for process in processes for line in process.communicate()[0].splitlines()]
    assert set(said) <= {"built", "refused"}, said
    assert len(said) == 160
    assert memload.verify(tmp_path / "out.bin").ok
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out.bin", "out.idx"]


@pytest.mark.parametrize("pinned", [None, ["y", "cat", "x"]])
def test_an_unfinished_build_with_other_classes_is_refused(tmp_path: Path, pinned: Any) -> None:
    source = memload.DatasetSource(STOPPED, classes=["cat", "x", "y"])
    interrupt(source, tmp_path)
    changed = Numbered() if pinned else memload.DatasetSource(Numbered(), classes=["cat", "y", "x"])
    with pytest.raises(
        memload.BuildError, match=r"other settings: .*classes was \[cat, x, y\] and is"
    ):
        build(changed, tmp_path, classes=pinned)


def test_an_unfinished_build_of_another_image_column_is_refused(tmp_path: Path) -> None:
    source = memload.DatasetSource(Entries(raise_at(10, Stop)), image="left", columns=[])
    interrupt(source, tmp_path)
    with pytest.raises(memload.BuildError, match=r"source was .*'left'.* and is .*'right'"):
        build(memload.DatasetSource(Entries(), image="right", columns=[]), tmp_path)
