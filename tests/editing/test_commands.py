"""The commands that edit data sets: what they print, and what they load."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from memload.cli import main
from memload.storage.index import Index

Make = Callable[..., Index]


@pytest.fixture
def memload(
    make_dataset: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Result]:
    """A function that runs a command in a folder with data sets, an array and a table."""
    index = make_dataset("out.bin")
    make_dataset("more.bin", rows=(2,), seed=1)
    np.save(tmp_path / "f.npy", np.zeros((5, 3)))
    lines = (f"{key},{number}" for number, key in enumerate(index.keys))
    (tmp_path / "ages.csv").write_text("\n".join(["key,age", *lines, "lost,3"]))
    monkeypatch.chdir(tmp_path)
    return lambda command: CliRunner().invoke(main, command.split())


@pytest.mark.parametrize(
    ("command", "printed", "notes"),
    [
        (
            "concat out.bin more.bin -o all.idx",
            "all.idx: 7 samples, 3 classes",
            ["2 samples have the name of one before them: ant/0.jpg, bee/1.jpg"],
        ),
        (
            "join out.bin f=f.npy -o all.idx",
            "all.idx: 5 samples, 3 classes",
            ["f: arrays of 3 float64, 5 rows, from f.npy"],
        ),
        (
            "relabel out.bin ages.csv -o all.idx",
            "all.idx: 5 samples, 3 classes",
            ["1 of 6 lines belongs to no sample: lost"],
        ),
        ("rename out.bin all.bin", "all.idx: 5 samples, 3 classes", []),
    ],
)
def test_a_command_prints_one_closing_line_and_its_notes(
    memload: Callable[[str], Result], command: str, printed: str, notes: list[str]
) -> None:
    result = memload(command)
    assert (result.exit_code, result.stdout) == (0, f"{printed}\n")
    assert result.stderr.splitlines() == [f"note: {note}" for note in notes]
    assert len(Index.open("all.idx")) == int(printed.split()[1])
    again = memload(command.replace("rename out.bin", "rename more.bin"))
    assert again.exit_code == 1
    assert "exists already" in again.stderr
    if "-o" in command:
        assert memload(f"{command} --overwrite").exit_code == 0


def test_options_are_those_of_the_functions(memload: Callable[[str], Result]) -> None:
    assert memload("relabel out.bin ages.csv -o aged.idx").exit_code == 0
    assert memload("concat aged.idx more.bin -o all.idx").exit_code == 1
    result = memload("concat aged.idx more.bin -o all.idx --columns common")
    assert "note: columns that differ are left out: age" in result.stderr
    Path("few.csv").write_text("age,name\n3,ant/0.jpg\n")
    assert (
        "--missing drop" in memload("relabel out.bin few.csv -o few.idx --key-column name").stderr
    )
    result = memload("relabel out.bin few.csv -o few.idx --key-column name --missing drop")
    assert result.stdout == "few.idx: 1 sample, 3 classes\n"


def test_wrong_usage_exits_with_two(memload: Callable[[str], Result]) -> None:
    for command in (
        "concat -o all.idx",
        "concat out.bin more.bin",
        "join out.bin f.npy -o all.idx",
        "join out.bin f=f.npy f=f.npy -o all.idx",
        "relabel out.bin -o all.idx",
        "rename out.bin",
    ):
        assert memload(command).exit_code == 2, command


def test_no_command_loads_torch(memload: Callable[[str], Result]) -> None:
    script = """
    import sys
    from memload.cli import main

    for command in (
        "concat out.bin more.bin -o all.idx",
        "join out.bin f=f.npy -o both.idx",
        "relabel out.bin ages.csv -o aged.idx",
        "rename out.bin new.bin",
    ):
        try:
            main(command.split())
        except SystemExit as ended:
            assert not ended.code, command
        assert "torch" not in sys.modules, command
    """
    lines = [line.removeprefix("    ") for line in script.splitlines()]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert not done.returncode, done.stderr
