import csv
import inspect
import io
import json
import logging
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

import memload
from memload.cli import main

COMMAND = [sys.executable, "-m", "memload"]


class Done(NamedTuple):
    status: int
    out: str
    err: str


Run = Callable[..., Done]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """A function that runs the command in this process."""
    logger = logging.getLogger("memload")
    before = logger.handlers[:], logger.level

    def call(*arguments: str | Path) -> Done:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments], prog_name="memload")
        return Done(int(ended.value.code or 0), *capsys.readouterr())

    yield call
    logger.handlers[:], logger.level = before


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `memload.build` is called with, in place of a build."""
    calls: dict[str, Any] = {}

    class Report(SimpleNamespace):
        notes: tuple[str, ...] = ()

    def build(source: Any, output: Any, **options: Any) -> Report:
        calls.update(options, source=source, output=output)
        return Report()

    monkeypatch.setattr(memload, "build", build)
    return calls


def assert_one_line(done: Done, *told: str) -> None:
    """Assert that a command ended with exit status 1 and one line that says what is wrong."""
    assert done.status == 1
    assert done.out == ""
    assert done.err.startswith("memload: ")
    assert done.err.endswith("\n")
    assert done.err.count("\n") == 1, done.err
    for part in told:
        assert part in done.err


def assert_usage(done: Done, *told: str) -> None:
    """Assert that a command ended with exit status 2, and said how it is used."""
    assert done.status == 2
    assert done.out == ""
    assert done.err.startswith("Usage: memload ")
    for part in told:
        assert part in done.err


def build(run: Run, folder: Path, output: Path, *options: str) -> Done:
    return run("build", folder, output, "--num-workers", "0", *options)


def test_a_build_ends_with_a_line_that_says_what_it_did(
    run: Run, folder: Path, tmp_path: Path
) -> None:
    (folder / "bee" / "broken.jpg").write_bytes(b"no picture")
    output = tmp_path / "out.bin"
    done = build(run, folder, output, "--size", "16")
    assert done.status == 0
    line = (
        rf"{re.escape(str(output))}: 12 samples of 16×16×3 uint8, 3 classes \(ant, bee, cat\), 14.1 kB, 1 rejected "
        rf"\(see {re.escape(str(tmp_path))}/out.rejects.csv\); [\d,]+ images/s in \d+\.\d s by 0 workers; "
        r"pillow \S+ \(libjpeg\S* \S+\)\n"
    )
    assert re.fullmatch(line, done.out)
    assert output.exists()
    assert output.with_suffix(".idx").exists()


@pytest.mark.parametrize(
    ("size", "shape"),
    [("24", (24, 24)), ("16x24", (16, 24)), ("24×16", (24, 16)), ("1", (1, 1))],
)
def test_a_size_is_a_side_or_height_by_width(
    run: Run, folder: Path, tmp_path: Path, size: str, shape: tuple[int, int]
) -> None:
    output = tmp_path / "out.bin"
    assert build(run, folder, output, "--size", size).status == 0
    assert np.load(output, mmap_mode="r").shape == (12, *shape, 3)


@pytest.mark.parametrize(
    "size", ["0", "16x0", "-1", "12.5", "x", "16x", "x16", "16x16x3", "65536", "", "big", "16 16"]
)
def test_a_size_that_is_none_is_wrong_usage(run: Run, asked: dict[str, Any], size: str) -> None:
    done = run("build", "images", "out.bin", "--size", size)
    assert_usage(
        done,
        "'--size'",
        "expected a side such as 256 or height×width such as 224x160",
        f"found {size!r}",
    )
    assert not asked


@pytest.mark.parametrize(
    ("size", "number"),
    [
        ("5000", 5000), ("5000B", 5000), ("4K", 4000), ("4kB", 4000), ("4KiB", 4096), ("1.5MB", 1_500_000),
        ("512MiB", 512 << 20), ("4GB", 4_000_000_000), ("4 gib", 4 << 30), ("2T", 2_000_000_000_000),
    ],
)  # fmt: skip
def test_a_shard_size_has_a_unit(run: Run, asked: dict[str, Any], size: str, number: int) -> None:
    assert run("build", "images", "out.bin", "--shard-size", size).status == 0
    assert asked["shard_size"] == number


@pytest.mark.parametrize("size", ["", "big", "4X", "-4GB", "4iB", "4GBs", "KB"])
def test_a_shard_size_that_is_none_is_wrong_usage(
    run: Run, asked: dict[str, Any], size: str
) -> None:
    assert_usage(
        run("build", "images", "out.bin", "--shard-size", size),
        "'--shard-size'",
        "such as 4GB",
        repr(size),
    )
    assert not asked


def test_the_commands_defaults_are_the_functions(run: Run, asked: dict[str, Any]) -> None:
    assert run("build", "images", "out.bin").status == 0
    assert (asked.pop("source"), asked.pop("output")) == ("images", "out.bin")
    assert asked.pop("size") == (256, 256)
    parameters = inspect.signature(memload.building.builder.build).parameters  # type: ignore[attr-defined]
    assert parameters["size"].default is None  # which is 256 for pictures
    for name, value in asked.items():
        assert value == parameters[name].default, name
    assert asked.keys() | {"source", "output", "size"} == parameters.keys()


@pytest.mark.parametrize(
    ("arguments", "option", "value"),
    [
        (["--fit", "pad"], "fit", "pad"),
        (["--interpolation", "lanczos"], "interpolation", "lanczos"),
        (["--mode", "L"], "mode", "L"),
        (["--fast"], "fast", True),
        (["--decoder", "jpeg4py"], "decoder", "jpeg4py"),
        (["--resizer", "torch"], "resizer", "torch"),
        (["--strict"], "strict", True),
        (["--no-exif"], "exif", False),
        (["--background", "red"], "background", "red"),
        (["--fill", "blue"], "fill", "blue"),
        (["--max-pixels", "99"], "max_pixels", 99),
        (["--on-error", "raise"], "on_error", "raise"),
        (["--num-workers", "3"], "num_workers", 3),
        (["--timeout", "2.5"], "timeout", 2.5),
        (["--overwrite"], "overwrite", True),
        (["--quiet"], "progress", False),
    ],
)
def test_options_reach_the_build(
    run: Run, asked: dict[str, Any], arguments: list[str], option: str, value: object
) -> None:
    assert run("build", "images", "out.bin", *arguments).status == 0
    assert asked[option] == value


@pytest.mark.parametrize(
    "arguments",
    [
        ["--fit", "stretch"], ["--mode", "CMYK"], ["--max-pixels", "0"], ["--num-workers", "-1"], ["--timeout", "0"],
        ["--points", "landmarks"], ["--array", "=x*"], ["--nonsense"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_options_that_make_no_sense_are_wrong_usage(
    run: Run, asked: dict[str, Any], arguments: list[str]
) -> None:
    assert_usage(run("build", "images", "out.bin", *arguments))
    assert not asked


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["out.bin"], "expected IMAGES and OUT.BIN, found 1: out.bin"),
        (["a", "b", "out.bin"], "expected IMAGES and OUT.BIN, found 3: a b out.bin"),
        (
            ["images", "out.bin", "--manifest", "m.csv"],
            "expected OUT.BIN alone beside --manifest, found 2",
        ),
        (["images", "out.bin", "--root", "there"], "give --manifest FILE"),
        (["images", "out.bin", "--points", "p=x*,y*"], "give --manifest FILE"),
        (["images", "out.bin", "--array", "p=x*"], "give --manifest FILE"),
        (
            ["out.bin", "--manifest", "m.csv", "--extensions", ".gif"],
            "--extensions is for a folder of IMAGES",
        ),
        (
            ["images", "out.bin", "--fast", "--resizer", "torch"],
            "--fast and --resizer torch: expected one of them",
        ),
        ([], "Missing argument"),
    ],
)
def test_arguments_that_do_not_go_together_are_wrong_usage(
    run: Run, asked: dict[str, Any], arguments: list[str], told: str
) -> None:
    assert_usage(run("build", *arguments), told)
    assert not asked


def test_extensions_choose_the_images(run: Run, folder: Path, tmp_path: Path) -> None:
    for number, path in enumerate(sorted(folder.rglob("*.jpg"))[:4]):
        path.rename(path.with_suffix(".JPG" if number % 2 else ".image"))
    output = tmp_path / "out.bin"
    assert build(run, folder, output, "--size", "8", "--extensions", "image, .jpg").status == 0
    assert memload.info(output)["samples"] == 12
    assert (
        build(run, folder, output, "--size", "8", "--extensions", ".image", "--overwrite").status
        == 0
    )
    assert memload.info(output)["samples"] == 2


def test_a_manifest_names_images_points_and_arrays(run: Run, folder: Path, tmp_path: Path) -> None:
    manifest, output = tmp_path / "lists" / "train.csv", tmp_path / "out.bin"
    manifest.parent.mkdir()
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.jpg"))[:5]
    with manifest.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "label", "x0", "x1", "y0", "y1", "r0", "r1", "r2", "r3", "age"])
        for number, name in enumerate(names):
            writer.writerow(
                [name, "even" if number % 2 == 0 else "odd", 1, 2, 3, 4, *range(4), number]
            )
    done = run(
        "build", output, "--manifest", manifest, "--root", folder,
        "--points", "landmarks=x*,y*", "--array", "pose=r*:2x2", "--size", "16", "--num-workers", "0",
    )  # fmt: skip
    assert done.status == 0, done.err
    facts = memload.info(output)
    assert facts["samples"] == 5
    assert facts["classes"] == ["even", "odd"]
    found = {name: (column["shape"], column["points"]) for name, column in facts["columns"].items()}
    assert found["landmarks"] == ([5, 2, 2], True)
    assert found["pose"] == ([5, 2, 2], False)
    assert found["age"] == ([5], False)


def test_a_build_says_what_it_left_out(run: Run, folder: Path, tmp_path: Path) -> None:
    (folder / "ant" / "notes.txt").write_text("no picture")
    done = build(run, folder, tmp_path / "out.bin", "--size", "8")
    assert re.search(
        r"^note: files that are no images by their names \(1\): ant/notes.txt$",
        done.err,
        re.MULTILINE,
    )


def test_a_build_says_that_there_are_no_labels(run: Run, folder: Path, tmp_path: Path) -> None:
    done = build(run, folder / "ant", tmp_path / "out.bin", "--size", "8")
    assert f"note: no labels: no class folders with images in {folder / 'ant'}\n" in done.err
    assert ": 4 samples of 8×8×3 uint8, no labels, " in done.out


@pytest.mark.parametrize("quiet", [False, True])
def test_a_build_of_train_and_val_as_classes_is_warned_of(
    run: Run, folder: Path, tmp_path: Path, quiet: bool
) -> None:
    for part in ("train", "val"):
        shutil.copytree(folder, tmp_path / "data" / part)
    done = build(run, tmp_path / "data", tmp_path / "out.bin", "--size", "8", *["--quiet"] * quiet)
    told = f"{tmp_path}/data: expected images in the class folders (train, val), found them only in folders within these"
    assert (told in done.err) != quiet
    assert (", 2 classes (train, val), " in done.out) != quiet


@pytest.mark.parametrize("quiet", [False, True])
def test_where_most_pictures_are_rejected_a_line_says_why(
    run: Run, folder: Path, tmp_path: Path, quiet: bool
) -> None:
    (folder / "ant" / "empty.jpg").touch()
    for number in range(12):
        (folder / "bee" / f"broken{number}.jpg").write_bytes(b"no picture")
    done = build(run, folder, tmp_path / "out.bin", "--size", "8", *(["--quiet"] if quiet else []))
    assert done.status == 0
    warning = (
        rf"out\.bin: expected most pictures in {folder} to be usable, found 13 of 25 that are not, 12 of them because: "
        rf"'not a picture .*'\. See {tmp_path}/out\.rejects\.csv\n"
    )
    assert bool(re.search(warning, done.err)) is not quiet
    assert not quiet or done == Done(0, "", "")


def test_where_half_of_the_pictures_are_usable_there_is_no_warning(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for number in range(12):
        (folder / "bee" / f"broken{number}.jpg").write_bytes(b"no picture")
    memload.build(folder, tmp_path / "out.bin", size=8)
    assert capfd.readouterr() == ("", "")


def test_quiet_says_nothing(run: Run, folder: Path, tmp_path: Path) -> None:
    (folder / "ant" / "notes.txt").write_text("no picture")
    assert build(run, folder, tmp_path / "out.bin", "--size", "8", "--quiet") == Done(0, "", "")


def test_quiet_still_tells_errors(run: Run, tmp_path: Path) -> None:
    assert_one_line(
        build(run, tmp_path / "nothing", tmp_path / "out.bin", "--quiet"),
        "expected a folder of images",
    )


def test_there_is_no_bar_where_no_terminal_is(run: Run, folder: Path, tmp_path: Path) -> None:
    done = build(run, folder, tmp_path / "out.bin", "--size", "8")
    assert "\r" not in done.err
    assert "it/s" not in done.err
    assert "%|" not in done.err


@pytest.mark.parametrize(
    ("options", "bar"), [((), True), (("--quiet",), False)], ids=["loud", "quiet"]
)
def test_a_terminal_gets_a_bar_unless_quiet(
    folder: Path, tmp_path: Path, options: tuple[str, ...], bar: bool
) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    arguments = [
        "build",
        str(folder),
        str(tmp_path / "out.bin"),
        "--size",
        "8",
        "--num-workers",
        "0",
        *options,
    ]
    with subprocess.Popen(
        [*COMMAND, *arguments], stderr=theirs, stdout=subprocess.DEVNULL
    ) as process:
        os.close(theirs)
        shown = b""
        try:
            while data := os.read(ours, 4096):
                shown += data
        except OSError:  # how Linux tells the end
            pass
        finally:
            os.close(ours)
    assert process.returncode == 0
    assert (b"12/12" in shown) == bar
    assert bar or not shown


def test_wrong_sources_are_told_in_one_line(run: Run, folder: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    output, picture = tmp_path / "out.bin", next(folder.rglob("*.jpg"))
    missing = tmp_path / "missing"
    assert_one_line(
        build(run, missing, output),
        str(missing),
        "expected a folder",
        "found no such folder",
        "Check",
    )
    assert_one_line(build(run, picture, output), str(picture), "expected a folder", "found a file")
    assert_one_line(
        build(run, empty, output), str(empty), "expected image files", "found an empty folder"
    )
    manifest = tmp_path / "faces.csv"
    manifest.write_text("path,label\n")
    assert_one_line(
        build(run, manifest, output), str(manifest), "found a file", f"say --manifest {manifest}"
    )
    assert_one_line(
        build(run, output, folder), f"found '{output}' and '{folder}'. Are they swapped?"
    )
    done = run("build", output, "--manifest", missing)
    assert_one_line(done, str(missing), "expected a CSV file", "No such file")
    assert not output.exists()


def test_wrong_outputs_are_told_in_one_line(run: Run, folder: Path, tmp_path: Path) -> None:
    there = tmp_path / "there.bin"
    there.write_bytes(b"of value")
    assert_one_line(
        build(run, folder, there), str(there), "expected no such file yet, found one", "--overwrite"
    )
    assert there.read_bytes() == b"of value"
    assert_one_line(
        build(run, folder, tmp_path / "out.npy"),
        "expected a file name that ends in '.bin'",
        "out.bin",
    )
    nowhere = tmp_path / "nowhere" / "out.bin"
    assert_one_line(
        build(run, folder, nowhere),
        str(nowhere.parent),
        "expected a folder for the output, found none",
    )
    done = build(run, folder, tmp_path / "out.bin", "--shard-size", "100")
    assert_one_line(done, "shard_size: expected at least 200,704 bytes", "found 100")
    done = build(run, folder, tmp_path / "out.bin", "--background", "no colour")
    assert_one_line(done, "background: expected a colour", "found 'no colour'")


@pytest.mark.parametrize(
    "command", [["info"], ["verify"], ["preview", "-o", "sheet.png"]], ids=lambda c: c[0]
)
def test_wrong_data_sets_are_told_in_one_line(run: Run, output: Path, command: list[str]) -> None:
    missing = output.with_name("missing.bin")
    told = "expected a data set, found no such file. Check the path"
    assert_one_line(run(*command, missing), str(missing.with_suffix(".idx")), told)
    index = output.with_suffix(".idx")
    content = index.read_bytes()
    index.write_bytes(b"x" * 100)
    assert_one_line(
        run(*command, output), str(index), "expected an index written by memload", "Build it again"
    )
    index.unlink()
    assert_one_line(
        run(*command, output), str(index), "expected an index beside out.bin, found none"
    )
    index.write_bytes(content)
    os.truncate(output, 5000)
    done = run(*command, output)
    assert_one_line(
        done,
        str(output),
        "expected 13,312 bytes",
        "found 5,000: the shard is truncated",
        "build again",
    )


def test_an_output_that_stands_is_replaced_when_told_to(
    run: Run, folder: Path, output: Path
) -> None:
    assert memload.info(output)["shape"] == [16, 16, 3]
    assert build(run, folder, output, "--size", "8").status == 1
    assert memload.info(output)["shape"] == [16, 16, 3]
    assert build(run, folder, output, "--size", "8", "--overwrite").status == 0
    assert memload.info(output)["shape"] == [8, 8, 3]


def test_on_error_raise_stops_at_a_bad_picture(run: Run, folder: Path, tmp_path: Path) -> None:
    (folder / "bee" / "broken.jpg").write_bytes(b"no picture")
    output = tmp_path / "out.bin"
    done = build(run, folder, output, "--size", "8", "--on-error", "raise")
    assert (done.status, done.out) == (1, "")
    place = rf"{folder}/bee/broken\.jpg"
    told = rf"memload: bee/broken\.jpg: .+\. Say --on-error skip .+ or mend or remove {place} and say --overwrite"
    assert re.fullmatch(told, done.err.splitlines()[-1])
    assert not output.exists()


def test_info_describes_a_data_set(run: Run, output: Path) -> None:
    done = run("info", output)
    assert (done.status, done.err) == (0, "")
    lines = done.out.splitlines()
    for line in (
        "samples: 12",
        "shape: 16, 16, 3",
        "dtype: uint8",
        "classes: ant, bee, cat",
        "rejected: 0",
    ):
        assert line in lines
    assert "  class_counts: ant 4, bee 4, cat 4" in lines
    assert "  source_width: 40 to 73 pixels" in lines
    assert lines[lines.index("  source_shorter_side:") :][:3] == [
        "  source_shorter_side:", "    from 0 pixels: 3 images", "    from 32 pixels: 9 images"
    ]  # fmt: skip
    assert run("info", output.with_suffix(".idx")).out == done.out


def test_info_shortens_long_lists(run: Run, folder: Path, tmp_path: Path) -> None:
    for number in range(20):
        (folder / f"empty{number:02d}").mkdir()
    output = tmp_path / "out.bin"
    build(run, folder, output, "--size", "8")
    line = next(line for line in run("info", output).out.splitlines() if line.startswith("classes"))
    assert line == "classes: ant, bee, cat, empty00, empty01, empty02, empty03, empty04, … (23)"


def test_info_orders_sizes_by_number_and_sums_up_many_classes(
    run: Run, make_dataset: Callable[..., memload.Index]
) -> None:
    sides = {"1024": 1, "128": 2, "96": 1_003}
    counts = [3, *range(40, 55)]
    index = make_dataset(
        classes=tuple(map(str, range(16))),
        statistics={"source_shorter_side": sides, "class_counts": counts},
    )
    lines = run("info", index.path).out.splitlines()
    assert "  class_counts: 3 to 54 samples a class" in lines
    shown = [line.strip() for line in lines if "from" in line]
    assert shown == [
        "from 96 pixels: 1,003 images",
        "from 128 pixels: 2 images",
        "from 1,024 pixels: 1 images",
    ]


@pytest.mark.parametrize(
    "statistics",
    [{"class_counts": 3}, {"source_width": [4]}, {"source_shorter_side": {"small": 1}}],
    ids=str,
)
def test_info_shows_statistics_of_any_content(
    run: Run, make_dataset: Callable[..., memload.Index], statistics: dict[str, Any]
) -> None:
    done = run("info", make_dataset(statistics=statistics).path)
    assert (done.status, done.err) == (0, "")
    assert f"  {next(iter(statistics))}:" in done.out


def test_info_prints_json(run: Run, output: Path) -> None:
    done = run("info", output, "--json")
    assert (done.status, done.err) == (0, "")
    assert json.loads(done.out) == memload.info(output)


def test_info_tells_the_environment(run: Run) -> None:
    done = run("info", "--environment")
    assert (done.status, done.err) == (0, "")
    facts = dict(line.split(": ", 1) for line in done.out.splitlines())
    assert facts["python"].startswith(f"{sys.version_info[0]}.{sys.version_info[1]}.")
    assert facts["numpy"] == np.__version__
    assert {"memload", "torch", "pillow (loaded)", "pillow (installed)"} <= facts.keys()
    assert json.loads(run("info", "--environment", "--json").out) == facts


def test_info_wants_a_data_set_or_the_environment(run: Run, output: Path) -> None:
    assert_usage(run("info"), "expected OUT.BIN or --environment", "found neither")
    assert_usage(
        run("info", output, "--environment"),
        "expected OUT.BIN or --environment, not both, found both",
    )


@pytest.mark.parametrize("options", [[], ["--num-threads", "3"]], ids=["default", "threads"])
def test_verify_passes_what_is_as_it_was_written(
    run: Run, output: Path, options: list[str]
) -> None:
    line = f"{output}: 12 rows, 9,216 bytes, all as they were written\n"
    assert run("verify", output, *options) == Done(0, line, "")


def test_verify_names_rows_and_pictures_that_have_changed(run: Run, output: Path) -> None:
    with output.open("r+b") as file:
        for row in (2, 7):
            file.seek(4096 + row * 768 + 100)
            value = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([value ^ 1]))
    keys = memload.Index.read(output.with_suffix(".idx")).keys
    told = [
        "expected 12 rows as they were written, found 2 altered: rows 2, 7",
        keys[2],
        keys[7],
        "build again",
    ]
    assert_one_line(run("verify", output), str(output), *told)


def test_preview_writes_a_contact_sheet(run: Run, output: Path) -> None:
    sheet = output.with_name("sheet.png")
    assert run("preview", output, "-o", sheet) == Done(0, f"{sheet}: 12 samples of {output}\n", "")
    with Image.open(sheet) as image:
        assert image.format == "PNG"
        assert len(set(image.convert("RGB").resize((20, 20)).tobytes())) > 20


@pytest.mark.parametrize(
    ("options", "samples"),
    [
        (["--count", "5"], 5),
        (["--count", "500"], 12),
        (["--indices", "0,-1,3"], 3),
        (["--class", "bee"], 4),
        (["--class", "bee", "--count", "2", "--seed", "3", "--tile", "32"], 2),
    ],
)
def test_preview_shows_what_is_asked_for(
    run: Run, output: Path, options: list[str], samples: int
) -> None:
    sheet = output.with_name("sheet.png")
    assert (
        run("preview", output, "--output", sheet, *options).out
        == f"{sheet}: {samples} samples of {output}\n"
    )


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--indices", "0,12"], "indices: expected -12 <= index < 12, found 12"),
        (["--class", "dog"], "class: expected one of ant, bee, cat, found 'dog'"),
    ],
)
def test_preview_tells_what_is_not_there(
    run: Run, output: Path, options: list[str], told: str
) -> None:
    sheet = output.with_name("sheet.png")
    assert_one_line(run("preview", output, "-o", sheet, *options), told)
    assert not sheet.exists()


@pytest.mark.parametrize(
    "options", [[], ["-o", "s.png", "--indices", "1,x"], ["-o", "s.png", "--count", "0"]]
)
def test_preview_options_that_make_no_sense_are_wrong_usage(
    run: Run, output: Path, options: list[str]
) -> None:
    assert_usage(run("preview", output, *options))


@pytest.mark.parametrize("command", [[], ["build"], ["info"], ["verify"], ["preview"]], ids=str)
def test_help_is_there_under_both_names(run: Run, command: list[str]) -> None:
    done = run(*command, "--help")
    assert (done.status, done.err) == (0, "")
    assert done.out.startswith("Usage: memload ")
    assert run(*command, "-h") == done


def test_an_unknown_command_is_wrong_usage(run: Run) -> None:
    assert_usage(run("convert"), "No such command 'convert'")


def test_the_version_is_the_packages(run: Run) -> None:
    assert run("--version") == Done(0, f"memload, version {memload.__version__}\n", "")


def test_an_interrupted_build_says_how_it_goes_on(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(memload, "build", interrupted)
    done = build(run, folder, tmp_path / "out.bin")
    line = "memload: interrupted. Run the same command again: it goes on where it stopped\n"
    assert done == Done(130, "", line)


def test_other_commands_do_not_promise_to_go_on(
    run: Run, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("memload.inspection.verify", interrupted)
    assert run("verify", output) == Done(130, "", "memload: interrupted\n")


def test_ctrl_c_ends_it_with_130(tmp_path: Path) -> None:
    manifest = tmp_path / "manifest.csv"
    os.mkfifo(manifest)
    arguments = ["build", str(tmp_path / "out.bin"), "--manifest", str(manifest)]
    with subprocess.Popen([*COMMAND, *arguments], stderr=subprocess.PIPE, text=True) as process:
        writer = -1
        while writer < 0:
            assert process.poll() is None
            try:  # succeeds once the other side is reading, and leaves it waiting
                writer = os.open(manifest, os.O_WRONLY | os.O_NONBLOCK)
            except OSError:
                time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        try:
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
            os.close(writer)
    assert process.returncode == 130
    assert err == "memload: interrupted. Run the same command again: it goes on where it stopped\n"


def test_a_reader_that_has_enough_is_no_error(output: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*COMMAND, "info", str(output)], stdout=writer, stderr=subprocess.PIPE, check=False
    )
    os.close(writer)
    assert done.stderr == b""


def test_it_runs_as_a_module_under_its_own_name(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.bin"
    done = subprocess.run(
        [*COMMAND, "build", str(folder), str(output), "--size", "8", "--num-workers", "2"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    assert done.stdout.startswith(f"{output}: 12 samples of 8×8×3 uint8")
    assert done.stdout.count("\n") == 1
    assert "\r" not in done.stderr
    done = subprocess.run(
        [*COMMAND, "build", "--nonsense"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("Usage: memload build ")


@pytest.mark.parametrize("option", [["--size", "9" * 5000], ["--shard-size", "9" * 400 + "GB"]])
def test_numbers_without_end_are_wrong_usage(
    option: list[str], folder: Path, tmp_path: Path
) -> None:
    done = CliRunner().invoke(main, ["build", str(folder), str(tmp_path / "out.bin"), *option])
    assert done.exit_code == 2


def test_a_name_given_twice_is_wrong_usage(tmp_path: Path) -> None:
    (tmp_path / "m.csv").write_text("path,x0,y0\na.jpg,1,2\n")
    arguments = [
        "build",
        "--manifest",
        str(tmp_path / "m.csv"),
        str(tmp_path / "out.bin"),
        "--points",
        "a=2",
    ]
    done = CliRunner().invoke(main, [*arguments, "--points", "a=x*,y*"])
    assert done.exit_code == 2
    assert "found one twice" in done.output


def test_a_message_is_one_line_whatever_a_name_holds(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        main, ["build", str(tmp_path / "no\nsuch\udc80"), str(tmp_path / "out.bin")]
    )
    assert done.exit_code == 1
    assert done.output.count("\n") == 1
    assert r"no\nsuch\udc80: expected a folder of images" in done.output


def test_what_libraries_print_reaches_no_file_where_stderr_is_closed(
    folder: Path, tmp_path: Path
) -> None:
    buffer = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3), np.uint8)
    Image.fromarray(noise).save(buffer, "TIFF", compression="tiff_lzw")
    damaged = bytearray(buffer.getvalue())
    damaged[1000:1008] = b"\xff" * 8  # libtiff tells of it on C's standard error
    (folder / "ant" / "bad.tif").write_bytes(damaged)
    out = tmp_path / "out.bin"
    command = f'exec "{sys.executable}" -m memload build "{folder}" "{out}" --size 8 --num-workers 0 0<&- 1>&- 2>&-'
    done = subprocess.run(["sh", "-c", command], check=False, timeout=60)
    assert done.returncode == 0
    assert memload.verify(out).ok
    assert memload.info(out)["rejected"] == 1


def test_what_libtiff_says_of_a_file_stays_in_the_ledger(folder: Path, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3), np.uint8)
    Image.fromarray(noise).save(buffer, "TIFF", compression="tiff_lzw")
    damaged = bytearray(buffer.getvalue())
    damaged[1000:1008] = b"\xff" * 8
    (folder / "ant" / "bad.tif").write_bytes(damaged)
    command = [
        sys.executable,
        "-m",
        "memload",
        "build",
        str(folder),
        str(tmp_path / "out.bin"),
        "--quiet",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# Any console, and any end of the output


def command(
    *arguments: str | Path, encoding: str = "utf-8", **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, on a console of that encoding."""
    environment = os.environ | {"PYTHONIOENCODING": encoding, "PYTHONUNBUFFERED": ""}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        check=False,
        text=True,
        encoding=encoding,
        env=environment,
        **options,
    )


@pytest.mark.parametrize("encoding", ["cp1251", "cp437"])
def test_a_console_that_lacks_a_letter_is_told_all_the_same(
    folder: Path, tmp_path: Path, encoding: str
) -> None:
    (folder / "\u00d7\u017c").mkdir()
    (folder / "ant" / "00.jpg").rename(folder / "\u00d7\u017c" / "0.jpg")
    output = tmp_path / "out.bin"
    built = command(
        "build", folder, output, "--size", "16", "--num-workers", "0", encoding=encoding
    )
    assert (built.returncode, "12 samples of 16" in built.stdout) == (0, True), built.stderr
    told = command("info", output, encoding=encoding)
    assert (told.returncode, "\\u017c" in told.stdout) == (0, True), told.stderr
    assert command("build", "--help", encoding=encoding).returncode == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
@pytest.mark.parametrize(
    "arguments", [("--version",), ("--help",), ("info", "--environment"), ("bench", "--help")]
)
def test_an_output_that_takes_nothing_is_told_in_one_line(arguments: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        done = command(*arguments, stdout=full)
    assert (done.returncode, done.stderr) == (1, "memload: [Errno 28] No space left on device\n")


def test_streams_of_a_program_that_only_imports_the_command_are_left_as_they_are() -> None:
    code = "import sys; before = sys.stdout.errors; import memload.cli; print(before, sys.stdout.errors)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONIOENCODING": "cp1251"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "strict strict\n"


def test_more_pixels_than_can_be_addressed_may_be_allowed(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.bin"
    done = command(
        "build",
        folder,
        output,
        "--size",
        "16",
        "--max-pixels",
        "999999999999999999",
        "--num-workers",
        "1",
    )
    assert (done.returncode, "12 samples" in done.stdout) == (0, True), done.stderr


def test_an_empty_folder_name_is_not_the_current_folder(run: Run, tmp_path: Path) -> None:
    done = run("build", "", tmp_path / "out.bin")
    assert (done.status, "found an empty path" in done.err) == (1, True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="there is no such device")
def test_a_device_is_no_manifest(run: Run, tmp_path: Path) -> None:
    done = run("build", "--manifest", "/dev/zero", tmp_path / "out.bin")
    assert (done.status, "found a folder or a device" in done.err) == (1, True)


def test_a_pipe_may_be_a_manifest(folder: Path, tmp_path: Path) -> None:
    done = command(
        *(
            "build",
            "--manifest",
            "/dev/stdin",
            "--root",
            folder,
            "--size",
            "8",
            "--num-workers",
            "0",
        ),
        tmp_path / "out.bin",
        input="path,label\nant/00.jpg,ant\n",
    )
    assert (done.returncode, "1 samples" in done.stdout) == (0, True), done.stderr


def test_a_seed_below_zero_is_wrong_usage(run: Run, output: Path, tmp_path: Path) -> None:
    done = run("preview", output, "-o", tmp_path / "grid.png", "--seed", "-1")
    assert (done.status, "--seed" in done.err) == (2, True)
