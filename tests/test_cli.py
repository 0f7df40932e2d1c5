"""The memload command: what it accepts, what it prints, and its exit statuses."""

import csv
import inspect
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import click
import numpy as np
import pytest
from PIL import Image

import memload
from memload.building.build import build as build_function
from memload.cli import main
from tests.damage import flip

COMMAND = [sys.executable, "-m", "memload"]


class Done(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture
def run(capsys):
    """A function that runs the command in this process."""

    def call(*arguments):
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments], prog_name="memload")
        return Done(int(ended.value.code or 0), *capsys.readouterr())

    return call


@pytest.fixture
def call(monkeypatch):
    """The arguments that `memload.build` is called with. Nothing is built."""
    arguments = {}

    def build(source, output, **options):
        arguments.update(options, source=source, output=output)
        return SimpleNamespace(notes=())

    monkeypatch.setattr(memload, "build", build)
    return arguments


def command(*arguments, encoding="utf-8", **options):
    """Run the command in a process of its own, on a console with this encoding."""
    environment = os.environ | {"PYTHONIOENCODING": encoding, "PYTHONUNBUFFERED": ""}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "timeout": 60} | options
    arguments = (*COMMAND, *map(str, arguments))
    return subprocess.run(arguments, check=False, encoding=encoding, env=environment, **options)


def build(run, folder, output, *options):
    return run("build", folder, output, "--num-workers", "0", *options)


def assert_one_line(done, *parts):
    """Assert that a command failed with exit status 1 and one line that has these parts."""
    assert (done.status, done.out) == (1, "")
    assert re.fullmatch(r"memload: [^\n]+\n", done.err)
    for part in parts:
        assert str(part) in done.err


def assert_usage(done, *parts):
    """Assert that a command was used wrongly: exit status 2, and a message that has these parts."""
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith("Usage: memload ")
    for part in parts:
        assert part in done.err


# ------------------------------------------------------------------------------------------ build


def test_a_build_ends_with_a_line_about_the_result(run, folder, tmp_path):
    (folder / "bee" / "broken.jpg").write_bytes(b"not an image")
    output = tmp_path / "out.bin"
    done = build(run, folder, output, "--size", "16")
    assert done.status == 0
    assert done.out.startswith(f"{output}: 12 samples of 16×16×3 uint8, 3 classes (ant, bee, cat)")
    assert f"1 rejected (see {tmp_path}/out.rejects.csv)" in done.out
    assert done.out.count("\n") == 1
    assert output.exists()
    assert output.with_suffix(".idx").exists()


@pytest.mark.parametrize(
    ("text", "size"), [("24", (24, 24)), ("16x24", (16, 24)), ("24×16", (24, 16))]
)
def test_a_size_is_a_side_or_height_by_width(run, call, text, size):
    assert run("build", "images", "out.bin", "--size", text).status == 0
    assert call["size"] == size


@pytest.mark.parametrize("text", ["-1", "12.5", "x16", "16x16x3", "", "9" * 5000])
def test_a_wrong_size_is_wrong_usage(run, call, text):
    done = run("build", "images", "out.bin", "--size", text)
    assert_usage(done, "'--size'", f"{text!r} is not a size", "such as 256")
    assert not call


@pytest.mark.parametrize("text", ["0", "65536", "0x5"])
def test_a_size_has_no_side_of_0_or_more_than_65535(run, folder, tmp_path, text):
    done = build(run, folder, tmp_path / "out.bin", "--size", text)
    assert_usage(done, "size must be a height and a width from 1 to 65535")


def test_the_defaults_of_the_command_are_those_of_the_function(run, call):
    assert run("build", "images", "out.bin").status == 0
    assert (call.pop("source"), call.pop("output")) == ("images", "out.bin")
    parameters = inspect.signature(build_function).parameters
    assert {name: parameters[name].default for name in call} == call
    assert parameters.keys() - call.keys() == {"source", "output", "executor"}


@pytest.mark.parametrize(
    ("arguments", "option", "value"),
    [
        (["--new-to", "more.bin"], "new_to", "more.bin"),
        (["--missing-masks", "9"], "missing_masks", 9),
        (["--fit", "pad"], "fit", "pad"),
        (["--interpolation", "lanczos"], "interpolation", "lanczos"),
        (["--mode", "L"], "mode", "L"),
        (["--fast"], "fast", True),
        (["--decoder", "jpeg4py"], "decoder", "jpeg4py"),
        (["--no-exif"], "exif", False),
        (["--background", "red"], "background", "red"),
        (["--fill", "blue"], "fill", "blue"),
        (["--max-pixels", "99"], "max_pixels", 99),
        (["--classes", "a, b"], "classes", ["a", "b"]),
        (["--classes", "a.bin"], "classes", "a.bin"),
        (["-s", "32"], "size", (32, 32)),
        (["-j", "3"], "num_workers", 3),
        (["--num-workers", "3"], "num_workers", 3),
        (["--max-rejects", "50%"], "max_rejects", "50%"),
        (["--shard-size", "4 GiB"], "shard_size", "4 GiB"),
        (["--extensions", "gif, .JPG"], "extensions", [".gif", ".JPG"]),
        (["--array", "a=x", "--array", "b=y"], "arrays", {"a": "x", "b": "y"}),
        (["--mask", "x"], "masks", {"mask": "x"}),
        (["--boxes", "a"], "boxes", {"a": ""}),
        (["--where", "split="], "where", {"split": ""}),
        (["--timeout", "2.5"], "timeout", 2.5),
        (["--part", "3/8"], "part", (3, 8)),
        (["--part", "03/08"], "part", (3, 8)),
        (["--overwrite"], "overwrite", True),
        (["--quiet"], "progress", False),
    ],
)
def test_options_reach_the_build(run, call, arguments, option, value):
    assert run("build", "images", "out.bin", *arguments).status == 0
    assert call[option] == value


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ("build a b out.bin", "2 sources are given: a, b."),
        ("build a.tar b.zip out.bin", "2 sources are given: a.tar, b.zip."),
        (
            "build . out.bin --root there",
            "--root: . is a folder of images, to which this does not apply. Leave it out.",
        ),
        ("build a.zip out.bin --where split=train", "--where: a.zip is a zip"),
        (
            "build a.bin out.bin --label x --extensions .jpg",
            "--label, --extensions: a.bin is a memload data set",
        ),
        ("build m.csv out.bin --extensions .gif", "--extensions: m.csv is a table"),
        ("build . out.npy", "output is 'out.npy', but its name must end in '.bin'"),
        ("build a.tar b.tar c.tar", "output is 'c.tar', but its name must end in '.bin'"),
        ("build . out.bin --background none", "--background: 'none' is not a color"),
        ("build . out.bin --max-rejects half", "--max-rejects: 'half' is neither a share"),
        ("build . out.bin --max-rejects 101%", "--max-rejects: '101%' is neither a share"),
        ("build . out.bin --shard-size 4X", "--shard-size: '4X' is not a size."),
        ("build . out.bin --part 8/8 --shard-size 4GB", "--part: (8, 8) is not (i, n)"),
        ("build . out.bin --part 0/8", "--part: what is shared are shards."),
        ("build . out.bin --mode array --fit pad", "--fit: 'pad' has no effect"),
    ],
)
def test_what_the_build_does_not_accept_is_wrong_usage(run, tmp_path, monkeypatch, arguments, part):
    monkeypatch.chdir(tmp_path)
    assert_usage(run(*arguments.split()), part)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ("convert", "No such command 'convert'"),
        ("build", "Give SOURCE and OUT.BIN."),
        ("build out.bin", "Give SOURCE and OUT.BIN. Given: out.bin"),
        ("build m.csv out.bin --points a=z* --points a=x*,y*", "'--points': 'a' is given twice"),
        ("build m.csv out.bin --mask a --mask mask=b", "'--mask': 'mask' is given twice"),
        ("build m.csv out.bin --where a=1 --where a=2", "'--where': 'a' is given twice"),
        ("build m.csv out.bin --where split", "'split' is not NAME=VALUE"),
        ("build a out.bin --array =x*", "'=x*' is not NAME=VALUE"),
        ("build a out.bin --fit stretch", "'--fit'"),
        ("build a out.bin --max-pixels 0", "'--max-pixels'"),
        ("build a out.bin --num-workers -1", "'--num-workers'"),
        ("build a out.bin --timeout 0", "'--timeout'"),
        ("build a out.bin --part x", "'x' is no part. Give I/N, such as 0/8"),
        ("build a out.bin --part 3", "'3' is no part."),
        ("build a out.bin --part -1/3", "'-1/3' is no part."),
        ("build a out.bin --part 1/3/5", "'1/3/5' is no part."),
        ("build a out.bin --part 0/1234567890", "'0/1234567890' is no part."),
        ("build a out.bin --part ٠/٢", "'٠/٢' is no part."),
        ("build a out.bin --part auto", "'auto' is no part."),
        ("info", "Missing argument 'OUT.BIN'"),
        ("build a out.bin --mask =m", "'=m' is not NAME=VALUE"),
        ("preview out.bin", "GRID.PNG"),
        ("preview out.bin s.png --indices 1,x", "'1,x' is not a list of numbers"),
        ("preview out.bin s.png --count 0", "'--count'"),
        ("preview out.bin s.png --seed -1", "'--seed'"),
    ],
)  # fmt: skip
def test_arguments_that_make_no_sense_are_wrong_usage(run, call, arguments, part):
    assert_usage(run(*arguments.split()), part)
    assert not call


def test_extensions_choose_the_images(run, folder, tmp_path):
    for number, path in enumerate(sorted(folder.rglob("*.jpg"))[:4]):
        path.rename(path.with_suffix(".JPG" if number % 2 else ".image"))
    all_of_them, some = tmp_path / "all.bin", tmp_path / "some.bin"
    build(run, folder, all_of_them, "--size", "8", "--extensions", "image, .jpg")
    build(run, folder, some, "--size", "8", "--extensions", ".image")
    assert [memload.info(path)["samples"] for path in (all_of_them, some)] == [12, 2]


def test_a_manifest_names_images_points_and_arrays(run, folder, tmp_path):
    manifest, output = tmp_path / "lists" / "train.csv", tmp_path / "out.bin"
    manifest.parent.mkdir()
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.jpg"))[:5]
    with manifest.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "label", "x0", "x1", "y0", "y1", "age"])
        for number, name in enumerate(names):
            writer.writerow([name, ["even", "odd"][number % 2], 1, 2, 3, 4, number])
    done = run(
        "build", manifest, output, "--root", folder,
        "--points", "landmarks=x*,y*", "--size", "16", "--num-workers", "0",
    )  # fmt: skip
    assert done.status == 0, done.err
    facts = memload.info(output)
    assert facts["samples"] == 5
    assert facts["classes"] == ["even", "odd"]
    columns = facts["columns"]
    landmarks = {"dtype": "float32", "shape": [5, 2, 2], "points": True, "boxes": False}
    assert columns["landmarks"] == landmarks
    assert columns["age"]["shape"] == [5]


@pytest.mark.parametrize("quiet", [False, True])
def test_notes_and_warnings_are_printed_unless_quiet(run, folder, tmp_path, quiet):
    (folder / "ant" / "notes.txt").write_text("not an image")
    for number in range(13):
        (folder / "bee" / f"broken{number}.jpg").write_bytes(b"not an image")
    options = ["--size", "8", "--max-rejects", "13", *["--quiet"] * quiet]
    done = build(run, folder, tmp_path / "out.bin", *options)
    assert done.status == 0
    assert ("ant/notes.txt" in done.err) != quiet
    assert ("13 rejected" in done.out) != quiet
    assert not quiet or done == Done(0, "", "")


@pytest.mark.parametrize(
    ("terminal", "options", "bar"),
    [(True, (), True), (True, ("--quiet",), False), (False, (), False)],
    ids=["terminal", "quiet", "file"],
)
def test_only_a_terminal_gets_a_progress_bar(folder, tmp_path, terminal, options, bar):
    reader, writer = pty.openpty() if terminal else os.pipe()
    if terminal:
        termios.tcsetwinsize(writer, (24, 80))
    arguments = [folder, tmp_path / "out.bin", "--size", "8", "--num-workers", "0", *options]
    build = [*COMMAND, "build", *map(str, arguments)]
    with subprocess.Popen(build, stderr=writer, stdout=subprocess.DEVNULL) as process:
        os.close(writer)
        printed = b""
        try:
            while data := os.read(reader, 4096):
                printed += data
        except OSError:  # the way a terminal reports its end on Linux
            pass
        finally:
            os.close(reader)
    assert process.returncode == 0
    assert (b"12/12" in printed) == bar
    assert "--quiet" not in options or not printed


def test_wrong_sources_and_outputs_are_reported_in_one_line(run, folder, tmp_path):
    empty, existing = tmp_path / "empty", tmp_path / "existing.bin"
    empty.mkdir()
    existing.write_bytes(b"of value")
    output, manifest, image = tmp_path / "out.bin", tmp_path / "m.csv", next(folder.rglob("*.jpg"))
    manifest.write_text("path,label\n")
    for source in (tmp_path / "missing", empty, image):
        assert_one_line(build(run, source, output), source)
    assert_one_line(build(run, manifest, output), manifest, "lists no images")
    assert_one_line(build(run, tmp_path / "none.csv", output), "none.csv")
    assert_one_line(build(run, folder, existing), existing, "--overwrite")
    assert existing.read_bytes() == b"of value"
    assert_one_line(build(run, folder, tmp_path / "nowhere" / "out.bin"), tmp_path / "nowhere")
    assert_one_line(build(run, tmp_path / "no\nsuch\udc80", output), r"no\nsuch\udc80")
    assert not output.exists()


def test_the_report_of_a_build_is_json_if_asked_for(run, folder, tmp_path):
    (folder / "ant" / "notes.txt").write_text("not an image")
    (folder / "bee" / "broken.jpg").write_bytes(b"not an image")
    output = tmp_path / "out.bin"
    done = build(run, folder, output, "--size", "8", "--json")
    assert done.status == 0
    facts = json.loads(done.out)
    assert facts.keys() == {
        "path", "samples", "classes", "columns", "rejected", "bytes", "shape", "dtype", "converted", "seconds",
        "images_per_second", "num_workers", "libraries", "notes", "ledger", "arrays", "part",
        "is_published", "unfinished_shards",
    }  # fmt: skip
    assert (facts["path"], facts["samples"], facts["shape"]) == (str(output), 12, [8, 8, 3])
    assert (facts["classes"], facts["columns"]) == (["ant", "bee", "cat"], ["label"])
    assert (facts["rejected"], facts["ledger"]) == (1, str(tmp_path / "out.rejects.csv"))
    assert "notes.txt" in str(facts["notes"])
    assert build(run, folder, output, "--json").out == ""  # it exists: an error, on stderr


def test_an_option_without_effect_is_named_as_it_was_typed(run, tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((3, 4, 4, 3), np.uint8))
    done = build(run, tmp_path / "x.npy", tmp_path / "out.bin", "--max-pixels", "99")
    assert_usage(done, "--max-pixels: 99 has no effect", "arrays")


# --------------------------------------------------------------------------- info, verify, preview


@pytest.mark.parametrize("name", ["info", "verify", "preview"])
def test_wrong_data_sets_are_reported_in_one_line(run, output, name):
    def inspect_it(path):
        return run(name, path, *([output.with_name("grid.png")] if name == "preview" else []))

    index, missing = output.with_suffix(".idx"), output.with_name("missing.bin")
    assert_one_line(inspect_it(missing), f"{missing.with_suffix('.idx')} does not exist")
    content = index.read_bytes()
    index.write_bytes(b"x" * 100)
    assert_one_line(inspect_it(output), index)
    index.unlink()
    assert_one_line(inspect_it(output), index)
    index.write_bytes(content)
    os.truncate(output, 5000)
    assert_one_line(inspect_it(output), output, "instead of 13,312", "truncated")


def test_info_describes_a_data_set(run, output):
    done = run("info", output)
    assert (done.status, done.err) == (0, "")
    lines = done.out.splitlines()
    assert {"samples: 12", "shape: 16, 16, 3", "dtype: uint8", "classes: ant, bee, cat"} <= {*lines}
    assert "  class_counts: ant 4, bee 4, cat 4" in lines
    assert "  source_width: 40 to 73 pixels" in lines
    index = output.with_suffix(".idx")
    assert lines[:2] == [f"path: {output}", f"index: {index}"]
    assert run("info", index).out.splitlines() == [f"path: {index}", *lines[1:]]
    assert json.loads(run("info", output, "--json").out) == memload.info(output)


def test_info_counts_categories(run, make_dataset):
    columns = {"label": np.zeros(5, np.int64), "split": np.array([1, 0, 1, 1, 0])}
    index = make_dataset(columns=columns, categories={"split": ("train", "val", "test")})
    assert "  split: train 2, val 3, test 0\n" in run("info", index.path).out


def test_info_sums_up_what_is_long(run, make_dataset):
    index = make_dataset(
        classes=tuple(f"c{number}" for number in range(16)),
        statistics={
            "class_counts": [3, *range(40, 55)],
        },
    )
    lines = [line.strip() for line in run("info", index.path).out.splitlines()]
    assert "classes: c0, c1, c2, c3, c4, c5, c6, c7, c8, c9, c10, c11, … (16)" in lines
    assert "class_counts: 3 to 54 samples in each class" in lines


def test_info_of_many_columns_fits_on_a_screen(run, make_dataset):
    columns = {f"c{number}": np.zeros((5, 2), np.float32) for number in range(136)}
    done = run("info", make_dataset(columns=columns, classes=None).path)
    lines = done.out.splitlines()
    assert done.err == ""
    assert "  c0: float32 2" in lines
    assert "  … (136)" in lines
    assert len(lines) < 70


def test_verify_accepts_intact_files_and_names_the_first_changed_rows_and_their_images(
    run, output, make_dataset
):
    line = f"{output}: 12 rows, 9,216 bytes, all as they were written\n"
    assert run("verify", output, "--num-threads", "3") == Done(0, line, "")
    flip(output, *(4096 + row * 768 + 100 for row in (2, 7)))
    keys = memload.Index.read(output.with_suffix(".idx")).keys
    changed = f"2 of 12 rows changed after they were written: rows 2, 7 ({keys[2]}, {keys[7]})."
    assert_one_line(run("verify", output), f"{output} is damaged: {changed} Restore the file")
    done = run("verify", output, "--json")
    assert (done.status, done.err) == (1, "")
    assert json.loads(done.out) == {
        "path": str(output),
        "index": str(output.with_suffix(".idx")),
        "ok": False,
        "rows": 12,
        "bytes": 9216,
        "problems": [],
        "damaged": [
            {
                "array": "image",
                "file": "out.bin",
                "rows": 12,
                "bad_rows": [2, 7],
                "bad_keys": [keys[2], keys[7]],
            }
        ],
    }
    index = make_dataset(rows=(40,))
    data = bytearray(output.with_name("made.bin").read_bytes())
    data[4096 + 72 :] = bytes(39 * 72)
    output.with_name("made.bin").write_bytes(data)
    parts = "39 of 40 rows", "20, … (bee/1.jpg, cat/2.jpg, ", ", cat/5.jpg, …)"
    assert_one_line(run("verify", index.path), *parts)


def test_info_and_verify_name_arrays_and_their_files(run, output, add_array):
    index = memload.Index.read(output.with_suffix(".idx"))
    index = add_array(index, "mask", np.ones((12, 16, 16), np.uint8), "mask")
    add_array(index, "pose", np.ones((12, 3), "<f4"))
    lines = run("info", output).out.splitlines()
    first = lines.index("arrays:")
    assert lines[first + 1 : first + 4] == [
        "  image: image, 16×16×3 uint8, 12 rows, 13,312 bytes in out.bin",
        "  mask: mask, 16×16 uint8, 12 rows, 7,168 bytes in out.mask.bin",
        "  pose: array, 3 float32, 12 rows, 4,240 bytes in out.pose.bin",
    ]
    all_bytes = f"{9216 + 12 * 256 + 12 * 12:,}"
    line = f"{output}: 36 rows, {all_bytes} bytes, all as they were written\n"
    assert run("verify", output).out == line
    mask = flip(output.with_name("out.mask.bin"), -1)
    changed = "1 of 12 rows of array 'mask' changed after they were written: rows 11"
    assert_one_line(run("verify", output), f"{mask} is damaged: {changed} ({index.keys[11]})")


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (["--count", "500"], "12 samples"),
        (["--indices", "0,-1,3"], "3 samples"),
        (["--class", "bee"], "4 samples"),
        (["--class", "bee", "--count", "1", "--seed", "3", "--tile", "32"], "1 sample"),
    ],
)
def test_preview_writes_a_contact_sheet(run, output, options, shown):
    sheet = output.with_name("sheet.png")
    done = run("preview", output, sheet, *options)
    assert done == Done(0, f"{sheet}: {shown} of {output}\n", "")
    with Image.open(sheet) as image:
        assert image.format == "PNG"


def test_preview_reports_a_wrong_choice_in_one_line(run, output):
    sheet = output.with_name("sheet.png")
    assert_one_line(run("preview", output, sheet, "--indices", "0,12"), "12")
    assert_one_line(run("preview", output, sheet, "--class", "dog"), "'dog'", "bee")
    assert not sheet.exists()


# ------------------------------------------------------------------- help, Ctrl-C, odd consoles


@pytest.mark.parametrize(
    "arguments", [[], ["build"], ["info"], ["verify"], ["preview"], ["doctor"]], ids=str
)
def test_help_has_two_names(run, arguments):
    done = run(*arguments, "--help")
    assert (done.status, done.err) == (0, "")
    assert done.out.startswith("Usage: memload ")
    assert run(*arguments, "-h") == done


def test_commands_are_in_groups_with_a_line_each(run):
    groups = run("--help").out.partition("\n\nBuild:\n")[2]
    listed = re.findall(r"^  (\w+) +\S.*\.$", groups, re.MULTILINE)
    assert listed == main.list_commands(click.Context(main))
    for name in listed:
        assert run(name, "--help").out.startswith(f"Usage: memload {name} ")


def test_the_options_that_describe_a_source_come_first(run):
    text = run("build", "--help").out
    titles = re.findall(r"^(\w.*):\n  ", text, re.MULTILINE)
    assert titles[0] == "How the source is read"
    assert titles[-2:] == ["Several machines", "Options"]
    first = text.partition("How images are stored:")[0]
    for option in ("--root", "--image", "--where", "--label", "--classes"):
        assert f"\n  {option} " in first


def test_the_version_is_that_of_the_package(run):
    assert run("--version") == Done(0, f"memload, version {memload.__version__}\n", "")


def test_ctrl_c_exits_with_130_and_says_how_to_continue(tmp_path):
    manifest = tmp_path / "manifest.csv"
    os.mkfifo(manifest)
    arguments = ["build", manifest, tmp_path / "out.bin"]
    with subprocess.Popen([*COMMAND, *arguments], stderr=subprocess.PIPE, text=True) as process:
        writer = os.open(manifest, os.O_WRONLY)  # waits until the command has opened the pipe
        process.send_signal(signal.SIGINT)
        try:
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
            os.close(writer)
    assert process.returncode == 130
    assert err == "memload: interrupted. Run the same command again to continue where it stopped\n"


def test_ctrl_c_in_other_commands_promises_nothing(run, output, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("memload.inspection.verify", interrupted)
    assert run("verify", output) == Done(130, "", "memload: interrupted\n")


def test_a_closed_pipe_is_not_an_error(output):
    reader, writer = os.pipe()
    os.close(reader)
    done = command("info", output, stdout=writer)
    os.close(writer)
    assert done.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_reported_in_one_line():
    with Path("/dev/full").open("w") as full:
        done = command("--help", stdout=full)
    assert (done.returncode, done.stderr) == (1, "memload: [Errno 28] No space left on device\n")


def test_a_console_may_lack_letters(folder, tmp_path):
    (folder / "\u00d7\u017c").mkdir()
    (folder / "ant" / "00.jpg").rename(folder / "\u00d7\u017c" / "0.jpg")
    output = tmp_path / "out.bin"
    options = ["--size", "16", "--num-workers", "0"]
    built = command("build", folder, output, *options, encoding="cp1251")
    assert (built.returncode, "12 samples of 16" in built.stdout) == (0, True), built.stderr
    shown = command("info", output, encoding="cp1251")
    assert (shown.returncode, "\\u017c" in shown.stdout) == (0, True), shown.stderr
    assert command("build", "--help", encoding="cp1251").returncode == 0


def test_what_libraries_print_does_not_end_up_in_a_file(folder, tmp_path):
    buffer = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3), np.uint8)
    Image.fromarray(noise).save(buffer, "TIFF", compression="tiff_lzw")
    damaged = bytearray(buffer.getvalue())
    damaged[1000:1008] = b"\xff" * 8  # libtiff prints about this on the standard error of C
    (folder / "ant" / "bad.tif").write_bytes(damaged)
    quiet = command("build", folder, tmp_path / "quiet.bin", "--quiet")
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, "", "")
    out = tmp_path / "out.bin"
    closed = f'exec "{sys.executable}" -m memload build "{folder}" "{out}" --size 8 --num-workers 0'
    done = subprocess.run(["sh", "-c", closed + " 0<&- 1>&- 2>&-"], check=False, timeout=60)
    assert done.returncode == 0
    assert memload.verify(out).ok
    assert memload.info(out)["rejected"] == 1


def test_control_characters_do_not_reach_the_terminal(tmp_path):
    folder = tmp_path / "pics\x1b[31m"
    (folder / "a").mkdir(parents=True)
    Image.new("RGB", (9, 9)).save(folder / "a" / "1.png")
    built = command(
        "build",
        folder,
        folder / "out\x1b]0;evil\x07.bin",
        "-s",
        "8",
        "-j",
        "0",
        "--part",
        "0/1",
        "--shard-size",
        "4GB",
    )
    assert built.returncode == 0, built.stderr
    wrong = command("build", "x\x1b[31m")
    assert wrong.returncode == 2
    for done in (built, wrong):
        assert "\x1b" not in done.stdout + done.stderr
        assert "\\x1b" in done.stdout + done.stderr
