"""The commands that edit data sets: what they print, and what they load."""

import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from memload.cli import main
from memload.storage.index import Index


@pytest.fixture
def memload(make_dataset, tmp_path, monkeypatch):
    """A function that runs a command in a folder with data sets, an array and a table."""
    index = make_dataset("out.bin")
    make_dataset("more.bin", rows=(2,), seed=1)
    np.save(tmp_path / "f.npy", np.zeros((5, 3)))
    lines = (f"{key},{'bee' if number else 'emu'}" for number, key in enumerate(index.keys))
    (tmp_path / "new.csv").write_text("\n".join(["key,class", *lines, "lost,bee"]))
    monkeypatch.chdir(tmp_path)
    return lambda command: CliRunner().invoke(main, command.split())


@pytest.mark.parametrize(
    ("command", "printed", "notes"),
    [
        (
            "concat out.bin more.bin all.idx",
            "all.idx: 7 samples, 3 classes",
            ["2 names had a sample before: ant/0.jpg, bee/1.jpg"],
        ),
        (
            "join out.bin f=f.npy all.idx",
            "all.idx: 5 samples, 3 classes",
            ["f: arrays, 5 rows of 3 float64, from f.npy"],
        ),
        (
            "relabel out.bin new.csv all.idx",
            "all.idx: 5 samples, 4 classes",
            [
                "the labels are taken from column 'class'",
                "1 line in new.csv without a sample: lost",
                "3 of 5 labels changed",
                "new classes: emu",
            ],
        ),
    ],
)
def test_a_command_prints_one_closing_line_and_its_notes(memload, command, printed, notes):
    result = memload(command)
    assert (result.exit_code, result.stdout) == (0, f"{printed}\n")
    assert result.stderr.splitlines() == notes
    assert len(Index.open("all.idx")) == int(printed.split()[1])
    again = memload(command)
    assert again.exit_code == 1
    assert "all.idx exists already" in again.stderr
    assert memload(f"{command} --overwrite").exit_code == 0


def test_an_output_is_never_one_of_the_inputs_by_mistake(memload):
    pixels = Path("more.bin").read_bytes()
    assert "must end in '.idx'" in memload("concat out.bin more.bin --overwrite").stderr
    assert "more.idx exists already" in memload("concat out.bin more.idx").stderr
    assert Path("more.bin").read_bytes() == pixels


def test_options_are_those_of_the_functions(memload):
    Path("few.csv").write_text("kind,name\nx,ant/0.jpg\n")
    assert "--missing drop" in memload("relabel out.bin few.csv few.idx --key name").stderr
    result = memload("relabel out.bin few.csv few.idx --key name --label kind --missing drop")
    assert result.stdout == "few.idx: 1 sample, 1 class\n"
    assert memload("concat few.idx more.bin all.idx --columns common").exit_code == 0
    result = memload("export out.bin pngs --where label=cat,bee")
    assert result.stdout == "pngs: 3 samples\n"
    assert not memload("export out.bin x.tar --quiet").output


def test_wrong_usage_exits_with_two(memload):
    for command in (
        "concat",
        "concat out.bin",
        "join out.bin f.npy all.idx",
        "join out.bin f=f.npy f=f.npy all.idx",
        "relabel out.bin all.idx",
        "export out.bin",
    ):
        assert memload(command).exit_code == 2, command


def test_no_command_loads_torch(memload):
    script = """
    import sys
    from memload.cli import main

    for command in (
        "concat out.bin more.bin all.idx",
        "join out.bin f=f.npy both.idx",
        "relabel out.bin new.csv new.idx",
        "export out.bin pngs",
    ):
        try:
            main(command.split())
        except SystemExit as ended:
            assert not ended.code, command
        assert "torch" not in sys.modules, command
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert not done.returncode, done.stderr
