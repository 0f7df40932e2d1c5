"""record.py of benchmarks/: what stands in a line beside its figures."""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import memload

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import record


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A git repository with a file of each kind, committed."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    folder = tmp_path / "repository"
    for name in (
        "memload/reading/loader.py",
        "benchmarks/feeds.py",
        "benchmarks/results/feeds.jsonl",
        "docs/bench.md",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("before")
    own = ["-c", "user.name=A", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    for arguments in (
        ["init", "--quiet"],
        ["add", "."],
        [*own, "commit", "--quiet", "--message", "first"],
    ):
        subprocess.run(["git", "-C", folder, *arguments], check=True)
    return folder


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("memload/reading/loader.py", True),
        ("memload/new.py", True),
        ("benchmarks/feeds.py", True),
        ("benchmarks/results/feeds.jsonl", False),
        ("docs/bench.md", False),
    ],
)
def test_changes_of_what_is_measured_or_measures_are_told(
    repository: Path, name: str, told: bool
) -> None:
    before = record.commit(repository / "benchmarks")
    assert len(before) >= 7
    assert "+" not in before
    (repository / name).write_text("after")
    assert record.commit(repository / "benchmarks") == before + "+changes" * told


def test_a_folder_without_a_history_has_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert record.commit(tmp_path) == "unknown"


def parsed(*arguments: str) -> tuple[argparse.Namespace, dict[str, Any]]:
    parser = record.arguments("About.")
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--rounds", type=record.at_least_one, default=5)
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--folder", default="here")
    parser.add_argument("--fast", action="store_true")
    parser.add_argument("--only", nargs="+", default=[])
    return parser.parse_args(arguments), record.numbers_of(parser, "timeout") | {"only": []}


@pytest.mark.parametrize(
    ("arguments", "less"),
    [
        ((), []),
        (
            (
                "--images",
                "101",
                "--rounds",
                "3",
                "--timeout",
                "1",
                "--fast",
                "--folder",
                "a",
                "--dry-run",
            ),
            [],
        ),
        (("--images", "99", "--rounds", "2"), ["--images 99", "--rounds 2"]),
        (("--only", "a b", "c"), ["--only 'a b' c"]),
    ],
)
def test_a_run_is_partial_by_what_is_less_than_usual(
    arguments: tuple[str, ...], less: list[str]
) -> None:
    assert record.partial(*parsed(*arguments)) == less


def test_a_line_has_command_commit_versions_and_what_makes_it_partial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(record, "HERE", tmp_path)
    monkeypatch.setenv("BENCHMARK_COMMIT", "1234567")
    monkeypatch.setattr(sys, "argv", ["/some/where/made.py", "--images", "/a/b"])
    for arguments in ((), ("--images", "9"), ("--dry-run",)):
        options, usual = parsed(*arguments)
        record.record(
            "made",
            options,
            usual,
            vars(options) | {"pages": "warm"},
            {"rate": record.spread([1.0, 2.0])},
        )
        assert json.loads(capsys.readouterr().out)["results"]["rate"]["median"] == 1.5
    lines = [
        json.loads(line) for line in (tmp_path / "results" / "made.jsonl").read_text().splitlines()
    ]
    assert [line.get("partial") for line in lines] == [None, ["--images 9"]]
    assert lines[0]["command"] == "python benchmarks/made.py --images b"
    assert lines[0]["commit"] == "1234567"
    assert lines[0]["versions"]["memload"] == memload.__version__
    assert lines[0]["parameters"] == {
        "images": 100, "rounds": 5, "timeout": 60.0, "folder": "here", "fast": False, "only": [], "pages": "warm",
    }  # fmt: skip


def test_the_command_of_several_processes_is_that_which_started_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["several_gpus.py"])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert record._command() == "torchrun --nproc-per-node 4 benchmarks/several_gpus.py"


def test_every_benchmark_has_a_dry_run_and_says_so() -> None:
    texts = {
        path.name: path.read_text() for path in record.HERE.glob("*.py") if path.name != "record.py"
    }
    recording = {name: text for name, text in texts.items() if " record(" in text}
    assert len(recording) == len(list((record.HERE / "results").glob("*.jsonl")))
    assert [name for name, text in recording.items() if "arguments(__doc__)" not in text] == []
    assert [
        name
        for name, text in recording.items()
        if "[--dry-run]" not in text.partition('"""\n\n')[0]
    ] == []
