"""memload plan: what it predicts is what a build then does, and it leaves nothing behind."""

import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image

import memload
from memload.building import file_systems
from memload.cli import main
from memload.commands.plan import _ended_by_signals
from memload.planning import disk, gathering, measuring, prediction
from memload.planning.disk import DiskRates
from memload.planning.measuring import Conversion


class Done(NamedTuple):
    status: int
    out: str
    err: str


Run = Callable[..., Done]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A function that runs the command in this process, in a folder of its own, and measures little."""
    monkeypatch.setattr(measuring, "_LEAST_SECONDS", 0.05)
    monkeypatch.setattr(disk, "_FILE_BYTES", 1 << 20)
    monkeypatch.setattr(gathering, "_BYTES", 1 << 20)
    monkeypatch.setattr(gathering, "_SECONDS", 0.01)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(time, "process_time", lambda: 1.0)  # that of other tests does not count
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def call(*arguments: str | Path) -> Done:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments], prog_name="memload")
        return Done(int(ended.value.code or 0), *capsys.readouterr())

    return call


def facts_of(run: Run, *arguments: str | Path) -> dict[str, Any]:
    """Return what ``memload plan`` tells as JSON, with one process."""
    done = run("plan", *arguments, "--num-workers", "0", "--json")
    assert done.status == 0, done.err
    found: dict[str, Any] = json.loads(done.out)
    return found


def assert_one_line(done: Done, *parts: str | Path) -> None:
    """Assert that a command failed with exit status 1 and one line that has these parts."""
    assert (done.status, done.out) == (1, "")
    assert re.fullmatch(r"(Converting [^\n]+\n)?memload: [^\n]+\n", done.err)
    for part in parts:
        assert str(part) in done.err


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_plan_is_a_few_lines_that_end_with_the_command(
    run: Run, folder: Path, tmp_path: Path, workers: str
) -> None:
    before = sorted(tmp_path.rglob("*"))
    done = run("plan", folder, "--size", "16", "-j", workers)
    assert (done.status, done.err) == (0, "Converting 12 of 12 records …\n")
    lines = done.out.splitlines()
    assert len(lines) <= 10
    assert lines[0].startswith(f"{folder}: 12 records; a random sample of 12 (seed 0) was")
    assert "12 of 16×16×3 uint8" in done.out
    assert " seconds (" in done.out
    assert lines[-1] == f"memload build {folder} out.bin --size 16 --num-workers {workers}"
    assert sorted(tmp_path.rglob("*")) == before


def test_the_command_that_a_plan_ends_with_builds_what_it_says(run: Run, folder: Path) -> None:
    renamed = folder.rename(folder.with_name("my images"))
    options = [
        "-s",
        "20x16",
        "--fit=pad",
        "--fill",
        "dark red"[-3:],
        "--fast",
        "--classes",
        "ant,bee,cat",
    ]
    facts = facts_of(run, renamed, *options, "--cores", "3", "--ram=1GB")
    words = shlex.split(facts["command"])
    assert words[:4] == ["memload", "build", str(renamed), "out.bin"]
    assert not {"--cores", "--ram", "--json"} & set(words)
    assert run(*words[1:], "--quiet").status == 0
    built = memload.info("out.bin")
    assert built["build"]["settings"]["fit"] == "pad"
    assert built["build"]["settings"]["fast"]
    assert (built["samples"], built["bytes"]) == (facts["records"], facts["bytes"])
    assert built["shape"] == facts["shape"] == [20, 16, 3]


@pytest.mark.parametrize(
    "kind",
    ["folder", "table", "tar", "zip", "parquet", "array", "data set", "masks", "shards", "new"],
)
def test_every_source_is_planned_as_it_is_built(
    run: Run, containers: Any, kind: str, tmp_path: Path
) -> None:
    folder, output, options = containers.directory(), tmp_path / "built.bin", ["--size", "16"]
    source: str | Path = folder
    if kind in ("table", "tar", "zip", "parquet"):
        source = getattr(containers, kind)()
    elif kind == "array":
        source, options = tmp_path / "array.npy", []
        np.save(source, np.zeros((30, 8, 10, 3), np.uint8))
    elif kind in ("data set", "new"):
        memload.build(folder, tmp_path / "before.bin", size=12, num_workers=0)
        source, options = tmp_path / "before.bin", []
    if kind == "new":
        Image.new("RGB", (20, 20)).save(folder / "ant" / "new.png")
        source, options = folder, ["--new-to", str(tmp_path / "before.bin")]
    elif kind == "masks":
        for path in folder.rglob("*.jpg"):
            mask = tmp_path / "masks" / path.relative_to(folder).with_suffix(".png")
            mask.parent.mkdir(parents=True, exist_ok=True)
            with Image.open(path) as image:
                Image.new("L", image.size).save(mask)
        options += ["--masks", str(tmp_path / "masks")]
    elif kind == "shards":
        options += ["--shard-size", "12kB"]
    facts = facts_of(run, source, output, *options)
    assert not output.exists()
    assert run("build", source, output, *options, "-j", "0", "--quiet").status == 0
    built = memload.info(output)
    assert (facts["samples"], facts["bytes"]) == (built["samples"], built["bytes"])
    assert facts["shape"] == built["shape"]
    assert facts["arrays"] == (["mask"] if kind == "masks" else [])


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["images", "out.bin"], "images out.bin --size 16 --overwrite"),
        (["images", "out.bin", "--overwrite"], "images out.bin --size 16 --overwrite"),
        (["images"], "images out3.bin --size 16"),
        (["--", "-x"], "--size 16 -- -x out3.bin"),
    ],
    ids=str,
)
def test_the_command_runs_although_a_data_set_exists(
    run: Run, folder: Path, arguments: list[str], command: str
) -> None:
    os.chdir(folder.parent)
    Path("-x").symlink_to("images")
    memload.build(folder, "out.bin", size=8, num_workers=0)
    Path("out2.building").mkdir()
    names = {path.name for path in Path().iterdir()}
    done = run("plan", "--size", "16", *arguments)
    assert done.status == 0
    assert ("out.idx exists already" in done.err) == ("out.bin" in arguments)
    assert {path.name for path in Path().iterdir()} == names
    *_, last = done.out.splitlines()
    assert last == f"memload build {command}"
    assert run("build", "-j", "0", *shlex.split(last)[2:]).status == 0


def test_a_full_disk_is_planned_for_all_the_same(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    free = {tmp_path: 9000}
    usage = SimpleNamespace
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(free=free.get(path, 10**9)))
    monkeypatch.setattr(os, "fstatvfs", lambda file: usage(f_bavail=2, f_frsize=4096))
    facts = facts_of(run, folder, tmp_path / "out.bin", "--size", "16")
    assert facts["warnings"] == [
        "the build will not begin, since it needs 13.3 kB, and only 9 kB are free. Make room, or "
        "name another disk"
    ]
    assert "the disk is nearly full" in facts["notes"][0]
    assert facts["seconds"] > 0
    free[tmp_path / "temporary"] = 9000
    done = run("plan", folder, tmp_path / "out.bin", "--size", "16", "-j", "0")
    assert_one_line(done, "There is no room for the 4.2 MB of a sample", tmp_path / "temporary")


def test_rates_and_load_are_measured(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(folder: Path, row_bytes: int) -> DiskRates:
        return DiskRates(1e9, 5 * row_bytes, True)

    load = 3 * (os.cpu_count() or 1)
    monkeypatch.setattr(prediction, "measure_disk", measure)
    monkeypatch.setattr(prediction, "gathering_rate", lambda sample_bytes: 7 * sample_bytes)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0, 0))
    facts = facts_of(run, folder, "--size", "16", "--gpu-memory", "0")
    assert (facts["first_epoch_bound"], facts["first_epoch_images_per_second"]) == ("disk", 5)
    assert (facts["later_epochs_bound"], facts["later_epochs_images_per_second"]) == (
        "gathering",
        7,
    )
    assert "3.0 for each core in the last minute" in facts["notes"][0]


def test_imports_count(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "process_time", lambda: 5000)
    assert facts_of(run, folder, "--size", "16")["seconds"] > 5000


@pytest.mark.parametrize(
    ("group_rows", "piece_rows"),
    [(7, 2), (30, 4)],  # all 30 records are one group, which a build divides
)
def test_a_sample_is_timed_with_what_comes_from_the_disk(
    run: Run, containers: Any, monkeypatch: pytest.MonkeyPatch, group_rows: int, piece_rows: int
) -> None:
    clock, blocks, given = itertools.count(), itertools.count(step=5), []

    def summary(*arguments: Any) -> Conversion:
        given.append(arguments)
        return Conversion(1, 1, 0, 0, 0, records=12, rejected=0, reasons="")

    usage = SimpleNamespace(
        RUSAGE_SELF=0, getrusage=lambda _: SimpleNamespace(ru_inblock=next(blocks))
    )
    monkeypatch.setattr(measuring, "resource", usage)
    monkeypatch.setattr(measuring, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(measuring, "_LEAST_SECONDS", 100)
    monkeypatch.setattr(measuring, "_PIECE_ROWS", 2)
    monkeypatch.setattr(measuring, "summary", summary)
    facts_of(run, containers.parquet(row_group_size=group_rows), "--size", "16")
    ((_, first, again, _, started, finish_seconds),) = given
    found = [piece for chunk in first for piece in chunk]
    assert sum(piece.rows for piece in found) == 30
    assert max(piece.rows for piece in found) == piece_rows
    assert {piece.blocks for piece in found} == {5}
    assert 90 < again[-1][-1].end - started < 110  # with the first time
    assert finish_seconds == 1


def test_another_machine_is_asked_about(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where temporary files are in RAM, no file can be read past the page cache.
    monkeypatch.setattr(prediction, "measure_disk", lambda *_: DiskRates(1e9, 1e9, True))
    options = ["--cores", "64", "--ram", "200kB", "--gpu-memory", "20kB"]
    facts = facts_of(run, folder, "--size", "64", *options)
    assert (facts["feed"], facts["later_epochs_bound"]) == ("disk", "disk")
    assert facts_of(run, folder, "--size", "16", "--gpu-memory", "0")["feed"] == "cpu"
    done = run("plan", folder, "--size", "16", *options)
    assert "by 12 workers" in done.out  # one for each record
    assert re.search(r"measured with [\d.]+ cores? of this machine", done.out)


def test_records_that_cannot_be_used_are_told(run: Run, folder: Path) -> None:
    for number in range(7):
        (folder / "bee" / f"broken{number}.jpg").write_bytes(b"not an image")
    facts = facts_of(run, folder, "--size", "16")
    assert (facts["records"], facts["samples"], facts["rejected"]) == (19, 12, 7)
    done = run("plan", folder, "--size", "16", "-j", "0")
    assert done.status == 0
    (warning,) = facts["warnings"]
    assert f"  warning: {warning}\n" in done.out
    assert "7 × " in warning


def test_notes_of_the_source_are_told(run: Run, folder: Path) -> None:
    (folder / "ant" / "thumbs.db").write_bytes(b"")
    done = run("plan", folder, "--size", "16", "-j", "0")
    assert "\nnote: skipped files without an image extension (1)" in done.err


def test_a_data_set_that_has_everything_needs_no_plan(run: Run, folder: Path, output: Path) -> None:
    done = run("plan", folder, "--new-to", output)
    assert (done.status, done.out) == (0, "")
    assert "Nothing is new" in done.err


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["images/missing"], ["missing does not exist"]),
        (["empty"], ["no image files"]),
        (["missing.csv"], ["missing.csv"]),
        (["images", "nowhere/out.bin"], ["there is no such folder"]),
        (["images", "begun.bin"], ["its build is not complete"]),
        (["old.bin", "old.bin", "--overwrite"], ["old.bin belongs to old.idx", "another output"]),
        (["begun.bin"], ["its build is not complete"]),
        (["images", "/proc/out.bin"], ["/proc: a sample cannot be written there", "OUT.BIN"]),
        (["images", "folder.bin"], ["folder.bin is a folder"]),
        (["images", "storage/out.bin"], ["object storage (goofys"]),
        (["broken"], ["none of 3 pictures"]),
    ],
    ids=" ".join,
)
def test_what_cannot_be_built_is_told_in_a_line_and_leaves_nothing(
    run: Run,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    parts: list[str],
) -> None:
    os.chdir(tmp_path)
    for name in ("empty", "folder.bin", "storage"):
        (tmp_path / name).mkdir()
    (tmp_path / "mounts").write_text(f"36 22 0:1 / {tmp_path}/storage rw - fuse.goofys bucket rw\n")
    monkeypatch.setattr(file_systems, "MOUNTS", tmp_path / "mounts")
    for number in range(3):
        path = tmp_path / "broken" / "ant" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"not an image")
    memload.build(folder, "old.bin", size=8, num_workers=0)
    with pytest.raises(memload.DecodeError):
        memload.build("broken", "begun.bin", size=8, num_workers=0, on_error="raise")
    before = sorted(tmp_path.rglob("*"))
    assert_one_line(run("plan", *arguments, "--size", "16", "-j", "0"), *parts)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "arguments",
    [
        [], ["images", "--ram", "much"], ["images", "--ram", "0"], ["images", "--gpu-memory", "8X"],
        ["images", "--cores", "0"], ["images", "--size", "0"], ["images", "--part", "0/2"],
        ["images", "more", "out.bin"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_wrong_usage_has_status_2(run: Run, folder: Path, arguments: list[str]) -> None:
    os.chdir(folder.parent)
    done = run("plan", *arguments)
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith("Usage: memload ")


def test_a_plan_has_the_options_of_a_build(run: Run) -> None:
    ours, those_of_build = (
        set(re.findall(r"--[a-z-]+", run(command, "--help").out)) for command in ("plan", "build")
    )
    assert ours - those_of_build == {"--cores", "--ram", "--gpu-memory"}
    assert those_of_build - ours == {"--part", "--parts", "--lock-timeout", "--quiet"}


@pytest.mark.parametrize(
    ("arguments", "name"),
    [(["images", "out.dat"], "out.dat"), (["--manifest", "table.csv", "out"], "out")],
    ids=" ".join,
)
def test_an_output_that_is_no_bin_is_told(run: Run, arguments: list[str], name: str) -> None:
    done = run("plan", *arguments)
    assert done.status in (1, 2)
    assert re.search(rf"\.bin.*\b{name}\b|\b{name}\b.*\.bin", done.err)


@pytest.mark.parametrize("ignored", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_a_plan_unless_it_is_ignored(ignored: signal.Signals) -> None:
    before = signal.signal(ignored, signal.SIG_IGN)
    try:
        with _ended_by_signals():
            signal.raise_signal(ignored)  # as after nohup, or of a job that a script began with &
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(ignored, before)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


PLAN_FOR_A_MINUTE = """
import signal, sys
from memload.cli import main
from memload.planning import measuring
signal.signal(signal.SIGINT, signal.default_int_handler)  # which tests in the background ignore
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which tests under nohup ignore
measuring._LEAST_SECONDS = 60
main(["plan", *sys.argv[1:]], prog_name="memload")
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_plan_that_is_ended_leaves_nothing_behind(
    folder: Path, tmp_path: Path, number: signal.Signals
) -> None:
    before = sorted(tmp_path.rglob("*"))
    arguments = [sys.executable, "-c", PLAN_FOR_A_MINUTE, folder, tmp_path / "new.bin"]
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        while not list(tmp_path.glob(".memload-plan-*/*")):
            assert process.poll() is None
            time.sleep(0.02)
        time.sleep(1)  # until all is imported: within an import, Python may turn it into an error
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.decode().splitlines()[-1] == "memload: interrupted"
    assert sorted(tmp_path.rglob("*")) == before
