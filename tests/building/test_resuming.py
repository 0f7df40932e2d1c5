"""Builds that are killed, interrupted or refused, and what the same command makes of them afterwards."""

import contextlib
import csv
import errno
import fcntl
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import memload
from memload.building.sources import Column, Record

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="it forks")
ROW = 4 * 4 * 3


class Stop(BaseException):
    """Ends a build as Ctrl-C does."""


class Numbered:
    """A data set of 20 small pictures with labels; ``act`` is called with the number of each first."""

    def __init__(
        self, act: Callable[[int], object] = lambda number: None, add: int = 0, count: int = 20
    ) -> None:
        self.act, self.add, self.count = act, add, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[np.ndarray, int]:
        self.act(number)
        return np.full((4, 4, 3), number + self.add, np.uint8), number % 3


def raise_at(row: int, error: BaseException) -> Callable[[int], None]:
    def act(number: int) -> None:
        if number == row:
            raise error

    return act


def build(source: Any, output: Path, **options: Any) -> memload.BuildReport:
    return memload.build(source, output, **{"size": 4, "num_workers": 0} | options)


def interrupted(output: Path, **options: Any) -> None:
    """Leave an unfinished build of `Numbered` with its first ten rows done."""
    with pytest.raises(Stop):
        build(Numbered(raise_at(10, Stop())), output, **options)
    assert output.with_suffix(".building").exists()


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("out*") if path.is_file()}


def undisturbed(source: Any, folder: Path, **options: Any) -> dict[str, bytes]:
    """The files of the same build where nothing came between."""
    folder.mkdir()
    build(source, folder / "out.bin", **options)
    return files(folder)


def rejected(folder: Path) -> dict[str, str]:
    with (folder / "out.rejects.csv").open(newline="") as file:
        return dict(list(csv.reader(file))[1:])


# Killed at any moment


def killed_at(step: int, function: Callable[[], object]) -> bool:
    """Call a function in a child that kills itself before its step-th change to the disk; say if it came to its end."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == 0
    calls = iter(range(1, step))

    def wrap(name: str) -> None:
        usual = getattr(os, name)

        def maybe(*arguments: Any, **options: Any) -> Any:
            if next(calls, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return usual(*arguments, **options)

        setattr(os, name, maybe)

    for name in ("replace", "rename", "fsync", "unlink", "ftruncate", "rmdir", "mkdir", "pwrite"):
        wrap(name)
    try:
        function()
    except BaseException:  # noqa: BLE001  # it must not go on as a test
        os._exit(1)
    os._exit(0)


@LINUX
@pytest.mark.parametrize("old", [False, True], ids=["fresh", "over an old one"])
@pytest.mark.parametrize(
    "steps", [range(1, 100, 13), pytest.param(range(1, 200), marks=pytest.mark.slow)]
)
def test_killed_at_any_step_it_goes_on_and_ends_with_the_same_bytes(
    folder: Path, tmp_path: Path, old: bool, steps: range
) -> None:
    (folder / "ant" / "bad.jpg").write_bytes(b"no image")
    options = {"size": 4, "num_workers": 0, "shard_size": 4096 + 5 * ROW, "overwrite": old}
    expected = undisturbed(folder, tmp_path / "expected", **options)
    place = tmp_path / "place"
    finished = False
    for step in steps:
        place.mkdir()
        output = place / "out.bin"
        if old:  # with other shards, which are to go
            build(folder, output, shard_size=4096 + 2 * ROW)
        before = files(place)
        finished = killed_at(step, lambda output=output: memload.build(folder, output, **options))
        if (place / "out.idx").exists():  # the old one is whole, or the new one is
            assert files(place) == expected or before.items() <= files(place).items(), step
            assert memload.verify(output).ok, step
        else:
            with pytest.raises(memload.MissingError):
                memload.MemmapDataset(output)
        if old or files(place) != expected:
            memload.build(folder, output, **options)
            assert not (place / "out.building").exists(), step
        assert files(place) == expected, step
        shutil.rmtree(place)
        if finished:
            break
    assert finished
    assert step > 40


def test_an_error_while_converting_leaves_the_old_data_set_as_it_is(tmp_path: Path) -> None:
    output = tmp_path / "out.bin"
    build(Numbered(), output)
    before, dataset = files(tmp_path), memload.MemmapDataset(output)
    pixels = dataset.gather(range(20)).numpy()
    with pytest.raises(Stop):
        build(Numbered(raise_at(10, Stop())), output, size=6, overwrite=True)
    assert files(tmp_path) == before
    build(Numbered(), output, size=6, overwrite=True)
    assert memload.MemmapDataset(output).shape == (3, 6, 6)
    assert np.array_equal(dataset.gather(range(20)).numpy(), pixels)  # an open one is still read


# Rejected rows are tried again


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_sample_that_was_mended_is_converted_by_the_same_command(
    tmp_path: Path, num_workers: int, overwrite: bool
) -> None:
    expected = undisturbed(Numbered(), tmp_path / "expected")
    with pytest.raises(memload.DecodeError, match=r"KeyError: 'bug'.*build again"):
        build(
            Numbered(raise_at(12, KeyError("bug"))),
            tmp_path / "out.bin",
            num_workers=num_workers,
            on_error="raise",
        )
    report = build(
        Numbered(),
        tmp_path / "out.bin",
        num_workers=num_workers,
        on_error="raise",
        overwrite=overwrite,
    )
    assert (report.samples, report.rejected) == (20, 0)
    assert files(tmp_path) == expected


class Fleeting(memload.ImageFolder):
    """A folder that is away for a while, as a network drive may be, and then interrupted."""

    def __getitem__(self, index: int) -> Record:
        if index == 11:
            raise Stop
        record = super().__getitem__(index)
        return record._replace(image=Path("/away")) if 2 <= index < 7 else record


def test_pictures_that_were_away_for_a_while_are_not_lost(folder: Path, tmp_path: Path) -> None:
    expected = undisturbed(folder, tmp_path / "expected")
    with pytest.raises(Stop):
        build(Fleeting(folder), tmp_path / "out.bin")
    build(folder, tmp_path / "out.bin")
    assert files(tmp_path) == expected


def test_a_finished_build_that_waited_to_be_published_tries_rejected_rows_again(
    folder: Path, tmp_path: Path
) -> None:
    expected = undisturbed(folder, tmp_path / "expected")
    picture, in_the_way = folder / "ant" / "00.jpg", tmp_path / "out.bin"
    data = picture.read_bytes()
    picture.write_bytes(b"damaged")

    class Disturbed(memload.ImageFolder):
        def __getitem__(self, index: int) -> Record:
            in_the_way.write_text("somebody else's")
            return super().__getitem__(index)

    with pytest.raises(memload.BuildError, match="made by somebody else while the build ran"):
        build(Disturbed(folder), tmp_path / "out.bin")
    picture.write_bytes(data)
    assert build(folder, tmp_path / "out.bin", overwrite=True).rejected == 0
    assert files(tmp_path) == expected


# The source changes


class Interrupted(memload.ImageFolder):
    """A folder whose last picture interrupts the build."""

    def __getitem__(self, index: int) -> Record:
        if index == len(self) - 1:
            raise Stop
        return super().__getitem__(index)


def add(folder: Path) -> None:
    shutil.copy(folder / "ant" / "00.jpg", folder / "bee" / "more.jpg")
    shutil.copy(folder / "ant" / "00.jpg", folder / "ant" / "000.jpg")


def add_class(folder: Path) -> None:
    (folder / "aardvark").mkdir()
    shutil.copy(folder / "ant" / "00.jpg", folder / "aardvark" / "a.jpg")


def change(folder: Path) -> None:
    shutil.copy(folder / "cat" / "05.jpg", folder / "ant" / "00.jpg")


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("shard_size", [None, 4096 + 5 * ROW])
@pytest.mark.parametrize(
    ("change", "converted"),
    [
        (change, 2),
        (lambda folder: os.utime(folder / "ant" / "03.jpg", (1, 1)), 2),
        (add, 3),
        (add_class, 2),
        (lambda folder: (folder / "ant" / "00.jpg").unlink(), 1),
        (lambda folder: (change(folder), add(folder), (folder / "cat" / "08.jpg").unlink()), 4),
    ],
    ids=["changed", "touched", "added", "class added", "removed", "all"],
)
def test_a_folder_that_changed_is_taken_as_it_is_and_only_what_is_new_is_converted(
    folder: Path,
    tmp_path: Path,
    change: Callable[[Path], Any],
    converted: int,
    shard_size: int | None,
    num_workers: int,
) -> None:
    options: dict[str, Any] = {"shard_size": shard_size}
    with pytest.raises(Stop):
        build(Interrupted(folder), tmp_path / "out.bin", **options)
    change(folder)
    expected = undisturbed(folder, tmp_path / "expected", **options)
    report = build(folder, tmp_path / "out.bin", num_workers=num_workers, **options)
    assert files(tmp_path) == expected
    if num_workers == 0 and shard_size is None:  # rows of an unfinished chunk count too
        assert converted <= report.converted <= converted + 2
    assert not (tmp_path / "out.building").exists()


def test_added_and_removed_samples_are_counted_in_the_log(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(Stop):
        build(Interrupted(folder), tmp_path / "out.bin")
    add(folder)
    (folder / "cat" / "08.jpg").unlink()
    build(folder, tmp_path / "out.bin")
    assert "Samples added: 2, removed: 1, kept: " in caplog.text


def test_a_source_may_change_again_while_its_changes_are_taken_in(
    folder: Path, tmp_path: Path
) -> None:
    for step in range(3):
        with pytest.raises(Stop):
            build(Interrupted(folder), tmp_path / "out.bin")
        shutil.copy(folder / "ant" / "00.jpg", folder / "bee" / f"more{step}.jpg")
    expected = undisturbed(folder, tmp_path / "expected")
    build(folder, tmp_path / "out.bin")
    assert files(tmp_path) == expected


@pytest.mark.parametrize("points", [None, {"eye": "x,y"}])
def test_labels_and_points_are_those_of_the_manifest_of_now(
    folder: Path, tmp_path: Path, points: Any
) -> None:
    paths = sorted(path.relative_to(folder) for path in folder.rglob("*.jpg"))

    def manifest(first: int) -> memload.Manifest:
        lines = [f"{path},{(n + first) % 3},{n + first},5" for n, path in enumerate(paths)]
        (tmp_path / "m.csv").write_text("\n".join(["path,label,x,y", *lines]))
        return memload.Manifest(tmp_path / "m.csv", root=folder, points=points)

    source = manifest(0)
    take = source.__class__.__getitem__

    class Ended(memload.Manifest):
        def __getitem__(self, index: int) -> Record:
            if index == 11:
                raise Stop
            return take(self, index)

    with pytest.raises(Stop):
        build(Ended(tmp_path / "m.csv", root=folder, points=points), tmp_path / "out.bin")
    source = manifest(1)
    expected = undisturbed(source, tmp_path / "expected")
    build(source, tmp_path / "out.bin")
    assert files(tmp_path) == expected


def test_no_file_is_looked_at_before_the_first_is_decoded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, looked_at = os.stat, []

    def look(path: Any, **options: Any) -> os.stat_result:
        looked_at.append(os.fspath(path) if isinstance(path, os.PathLike) else path)
        return usual(path, **options)

    class Watched(memload.ImageFolder):
        def __getitem__(self, index: int) -> Record:
            raise Stop

    monkeypatch.setattr(os, "stat", look)
    with pytest.raises(Stop):
        build(Watched(folder), tmp_path / "out.bin")
    assert not [path for path in looked_at if str(path).endswith(".jpg")]


# Data sets


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("changed", [(0,), (9,), (1, 2, 3, 4, 5, 6, 7, 8)])
def test_another_data_set_is_not_gone_on_with(
    tmp_path: Path, changed: tuple[int, ...], num_workers: int
) -> None:
    class Other(Numbered):
        def __getitem__(self, number: int) -> tuple[np.ndarray, int]:
            pixels, label = super().__getitem__(number)
            return pixels + 100 * (number in changed), label

    output = tmp_path / "out.bin"
    interrupted(output)
    with pytest.raises(memload.BuildError, match=r"another data set: sample \d has other pixels"):
        build(Other(), output, num_workers=num_workers)
    assert build(Other(), output, num_workers=num_workers, overwrite=True).rejected == 0


def test_a_data_set_of_another_length_is_not_gone_on_with(tmp_path: Path) -> None:
    interrupted(tmp_path / "out.bin")
    with pytest.raises(memload.BuildError, match="it had 20 samples and has 30"):
        build(Numbered(count=30), tmp_path / "out.bin")
    assert build(Numbered(count=30), tmp_path / "out.bin", overwrite=True).samples == 30


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_data_set_that_fails_where_it_did_not_is_not_gone_on_with(
    tmp_path: Path, num_workers: int
) -> None:
    interrupted(tmp_path / "out.bin")
    with pytest.raises(memload.BuildError, match="sample 4 could be used, and now cannot"):
        build(Numbered(raise_at(4, ValueError())), tmp_path / "out.bin", num_workers=num_workers)


class Labelled:
    """A source of arrays with labels of its own."""

    classes, notes = None, ()
    schema = {"label": Column("<i8")}  # noqa: RUF012  # a property for all that is asked of it

    def __init__(self, label: int, stop: int = 20) -> None:
        self.label, self.stop, self.keys = label, stop, [str(number) for number in range(20)]

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Record:
        if index == self.stop:
            raise Stop
        return Record(str(index), np.zeros((4, 4, 3), np.uint8), {"label": self.label})

    def listing(self) -> dict[str, np.ndarray]:
        return {}


def test_other_labels_of_the_same_arrays_are_not_gone_on_with(tmp_path: Path) -> None:
    with pytest.raises(Stop):
        build(Labelled(0, stop=10), tmp_path / "out.bin")
    with pytest.raises(memload.BuildError, match="sample 0 has another 'label'"):
        build(Labelled(1), tmp_path / "out.bin")


@LINUX
def test_a_data_set_is_not_indexed_in_the_process_that_workers_are_forked_from(
    tmp_path: Path,
) -> None:
    """If it opened a file there, all workers would move one another's position in it."""

    def note(number: int) -> None:
        with (tmp_path / "processes").open("a") as file:
            file.write(f"{os.getpid()}\n")

    interrupted(tmp_path / "out.bin")
    build(Numbered(note), tmp_path / "out.bin", num_workers=2)  # compares finished samples
    memload.build(Numbered(note), tmp_path / "arrays.bin", mode="array", num_workers=1)
    processes = (tmp_path / "processes").read_text().split()
    assert len(processes) > 20
    assert str(os.getpid()) not in processes


# Samples that misbehave


@LINUX
@pytest.mark.parametrize("mode", ["RGB", "array"])
def test_a_first_sample_that_hangs_heeds_the_timeout(tmp_path: Path, mode: Any) -> None:
    options = {} if mode == "array" else {"size": 4}
    options |= {"num_workers": 2, "timeout": 0.5, "mode": mode}
    one = Numbered(lambda number: time.sleep(600) if number == 0 else None)
    assert memload.build(one, tmp_path / "one.bin", **options).rejected == 1
    with pytest.raises(memload.SourceError, match=r"sample 0: it took longer than 0\.5 s"):
        memload.build(Numbered(lambda _: time.sleep(600)), tmp_path / "all.bin", **options)


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise AttributeError("no text")


class UnpicklableError(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("cannot be pickled")


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("row", [0, 7])
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (UnprintableError(), "UnprintableError: (its message cannot be read"),
        (UnpicklableError("why"), "UnpicklableError: why"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (SystemExit(3), "SystemExit: 3"),
        (GeneratorExit(), "GeneratorExit"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_exception_of_any_kind_costs_its_sample_alone(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    error: BaseException,
    reason: str,
    row: int,
    num_workers: int,
) -> None:
    if num_workers == 0 and not isinstance(error, Exception):
        return  # there it is what it says: a request to stop this process
    report = build(Numbered(raise_at(row, error)), tmp_path / "out.bin", num_workers=num_workers)
    assert report.samples == 19
    assert rejected(tmp_path)[str(row)].startswith(reason)
    assert capfd.readouterr().err == ""


# The place of the output


@pytest.mark.parametrize("name", ["out.bin", "out.idx", "out.rejects.csv"])
def test_a_file_that_appears_while_a_build_runs_is_not_replaced(tmp_path: Path, name: str) -> None:
    output, precious = tmp_path / "out.bin", tmp_path / name

    def act(number: int) -> None:
        if number == 5:
            precious.write_text("precious")
            raise ValueError("rejected, so that there is a ledger")

    with pytest.raises(memload.BuildError, match=rf"{name} was made by somebody else while"):
        build(Numbered(act), output)
    assert [path.name for path in tmp_path.glob("out*") if path.is_file()] == [name]
    precious.rename(tmp_path / "mine")
    assert build(Numbered(), output).converted == 1
    assert memload.verify(output).ok
    assert (tmp_path / "mine").read_text() == "precious"


def test_a_ledger_that_is_somebody_elses_stays_where_nothing_was_rejected(tmp_path: Path) -> None:
    mine = tmp_path / "out.rejects.csv"
    build(Numbered(lambda number: number == 5 and mine.write_text("mine")), tmp_path / "out.bin")
    assert mine.read_text() == "mine"


@pytest.mark.parametrize("overwrite", [False, True])
def test_files_of_others_in_the_folder_of_the_build_are_left(
    tmp_path: Path, overwrite: bool
) -> None:
    place = tmp_path / "out.building"
    (place / "@eaDir" / "inner").mkdir(parents=True)
    (place / "thesis.txt").write_text("precious")
    build(Numbered(), tmp_path / "out.bin", overwrite=overwrite)
    assert memload.verify(tmp_path / "out.bin").ok
    assert sorted(path.name for path in place.iterdir()) == ["@eaDir", "thesis.txt"]


def test_other_settings_are_refused_with_what_differs(tmp_path: Path) -> None:
    output = tmp_path / "out.bin"
    interrupted(output)
    with pytest.raises(memload.BuildError, match=r"fit was 'crop' and is 'pad'\. .*--overwrite"):
        build(Numbered(), output, fit="pad")
    with pytest.raises(memload.BuildError, match="rows per shard was None and is 6"):
        build(Numbered(), output, shard_size=4096 + 6 * ROW)
    with pytest.raises(memload.BuildError, match=r"size was \[4, 4\] and is \[8, 8\]"):
        build(Numbered(), output, size=8)
    assert build(Numbered(), output).converted == 10  # refusing harms nothing


def test_overwriting_an_unfinished_build_of_other_settings_begins_anew(tmp_path: Path) -> None:
    expected = undisturbed(Numbered(), tmp_path / "expected", fit="pad")
    interrupted(tmp_path / "out.bin", shard_size=4096 + 3 * ROW)
    assert build(Numbered(), tmp_path / "out.bin", fit="pad", overwrite=True).converted == 20
    assert files(tmp_path) == expected


@pytest.mark.parametrize("name", ["rows", "keys", "plan.json", "out.bin"])
@pytest.mark.parametrize("content", [b"", b"\0" * 50, b"{}", None])
def test_a_file_of_an_unfinished_build_that_is_damaged_costs_work_and_no_sample(
    tmp_path: Path, name: str, content: bytes | None
) -> None:
    expected = undisturbed(Numbered(), tmp_path / "expected")
    interrupted(tmp_path / "out.bin")
    path = tmp_path / "out.building" / name
    path.unlink() if content is None else path.write_bytes(content)
    overwrite = name == "plan.json" and content == b"{}"
    build(Numbered(), tmp_path / "out.bin", overwrite=overwrite)
    assert files(tmp_path) == expected


# The lock, and a build that is running


@contextlib.contextmanager
def running(output: Path) -> Iterator["subprocess.Popen[str]"]:
    """A build in another process that is stopped when seven of its twenty rows are done."""
    script = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
import numpy, memload

class Slow:
    def __len__(self): return 20
    def __getitem__(self, number):
        if number == 10:
            print("at ten", flush=True)
            time.sleep(600)
        return numpy.full((4, 4, 3), number, numpy.uint8), number % 3

memload.build(Slow(), {str(output)!r}, size=4, num_workers=0)
"""
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "at ten\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_second_build_is_refused_while_one_runs_and_goes_on_once_it_was_killed(
    tmp_path: Path,
) -> None:
    output = tmp_path / "out.bin"
    with running(output) as process:
        for overwrite in (False, True):
            with pytest.raises(memload.BuildError, match=rf"running \(process {process.pid}\)"):
                build(Numbered(), output, overwrite=overwrite)
    assert build(Numbered(), output).converted == 10


def test_info_says_how_far_a_running_build_is(tmp_path: Path) -> None:
    output = tmp_path / "out.bin"
    with running(output):
        for name in ("out.bin", "out.idx", "out"):
            told = r"^out\.bin is being built right now: 10 of 20 samples are done"
            with pytest.raises(memload.MissingError, match=told):
                memload.info(tmp_path / name)
    with pytest.raises(
        memload.MissingError, match=r"its build is not complete .*10 of 20 samples are done"
    ):
        memload.info(output)


def test_a_file_system_without_locks_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with caplog.at_level(logging.WARNING, "memload"):
        assert build(Numbered(), tmp_path / "out.bin").samples == 20
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
        print("refused" if "another build of this output" in str(error) else f"failed: {error}")
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


def test_overwrite_begins_an_unfinished_build_anew_and_the_same_command_goes_on(
    tmp_path: Path,
) -> None:
    output = tmp_path / "out.bin"
    with pytest.raises(Stop):
        build(Numbered(raise_at(10, Stop())), output)
    mended = Numbered(raise_at(15, Stop()), add=1)  # nothing tells that its samples have changed
    with pytest.raises(Stop):
        build(mended, output, overwrite=True)
    report = build(Numbered(add=1), output, overwrite=True)
    assert report.converted < 20
    pixels = memload.MemmapDataset(output).gather(range(20))
    assert [int(image.max()) for image in pixels] == list(range(1, 21))
