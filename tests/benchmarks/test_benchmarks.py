"""Every benchmark runs on a few small pictures, and compares checkouts. What is measured is not tested."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"

#: Options with which a benchmark takes seconds, and some of the figures that it brings.
TINY = {
    "async_prefetch --toy --samples 4 --batches 4": ["made on the device", "DataLoader"],
    "build --images 12 --side 32": ["memload", "bare", "ratio"],
    "cifar10 --quick --pictures 60 --batch 10 --epochs 1": [
        *("from files to accuracy", "ratios of seconds", "seconds after each epoch")
    ],
    "cold --device cpu --images 64 --side 16 --batch 8": [
        *("the first quarter of a cold file", "a file larger than RAM")
    ],
    "collate --images 64 --side 16 --batch 8": ["fast_collate", "ratio"],
    "inference --toy --images 64 --seconds 0.01 --workers 1": [
        *("synthetic, captured", "Loader, compiled", "JPEGs, eager")
    ],
    "loader --images 64 --side 16": ["np.take", "one thread / np.take"],
    "masks --images 64 --side 16 --batch 8": [
        "cpu",
        "cpu / np.take",
        "cpu, images alone / np.take",
    ],
    "opening --samples 2000": ["memload build --help (ms)", "open", "subset of all"],
    "records --records 60": ["tar"],
    "sources --count 12 --side 32 --only tar memload": ["folder", "tar", "tar / folder"],
    "shards --megabytes 20 --rows 16": ["12 KiB", "147 KiB"],
    "starting --samples 2000 --permutation 1000 --epochs 2": ["first batch (s)", "permutation"],
    "train_step --toy --images 64 --seconds 0.01 --workers 1": [
        *("synthetic", "Loader, cpu", "the same in CudaPrefetcher", "synthetic, again")
    ],
    "train_step --mask --toy --images 64 --seconds 0.01": ["synthetic", "Loader, cpu, train(64)"],
    "train_step --recipe imagenet_v2 --toy --images 64 --seconds 0.01": [
        *("synthetic", "Loader, cpu, imagenet_v2(64)", "synthetic, again")
    ],
    "transforms --device cpu --batch 2": [
        *(
            "time: flip, normalise, 32 / flip, normalise, 32, plain",
            "operations, 224×224, one thread",
        )
    ],
}

#: Those that compile a network, for half a minute.
COMPILING = [command for command in TINY if command.startswith("inference")]


def run(script: str, *options: str, folder: Path) -> str:
    """Run a benchmark; return what it printed. It records nothing and leaves nothing behind."""
    before = {path: path.read_bytes() for path in (BENCHMARKS / "results").iterdir()}
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / f"{script}.py"), "--dry-run", *options],
        env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert {path: path.read_bytes() for path in (BENCHMARKS / "results").iterdir()} == before
    assert [path.name for path in folder.glob("memload-*")] == []
    return done.stdout


@pytest.mark.parametrize(
    "command",
    [pytest.param(one, marks=pytest.mark.slow if one in COMPILING else ()) for one in TINY],
    ids=lambda command: command.split()[0],
)
def test_benchmarks_measure_everything_once(command: str, tmp_path: Path) -> None:
    script, *options = command.split()
    found: dict[str, Any] = json.loads(run(script, "--rounds", "1", *options, folder=tmp_path))
    assert set(TINY[command]) <= found["results"].keys()


def test_only_some_transforms_are_measured(tmp_path: Path) -> None:
    options = ["--device", "cpu", "--batch", "2", "--rounds", "1", "--only", "GaussianBlur"]
    found = json.loads(run("transforms", *options, folder=tmp_path))
    assert found["parameters"]["only"] == ["GaussianBlur"]
    (rows,) = found["results"].values()
    assert rows.keys() == {"GaussianBlur(9)", "GaussianBlur(23)"}


def test_fidelity_finds_equal_pixels_and_equal_losses(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "temporary").mkdir()
    options = [str(folder), "--side", "16", "--epochs", "1"]
    printed = run("fidelity", *options, folder=tmp_path / "temporary").splitlines()
    assert "memory map, Loader: largest difference of a loss 0" in printed
    assert any(line.startswith("pillow, crop, default {'equal_images': 12") for line in printed)


def test_a_contender_that_fails_is_a_line_beside_the_others(tmp_path: Path) -> None:
    options = ["--device", "cpu", "--only", "memload, Loader", "FFCV", "--count", "24"]
    options += ["--batch", "8", "--workers", "1", "--rounds", "2", "--seconds", "0.01"]
    options += ["--python", "FFCV=/nowhere/python", "--folder", str(tmp_path)]
    printed = run("compare", *options, folder=tmp_path).splitlines()
    (ours,) = [line for line in printed if line.startswith("| memload, Loader, 1 thread |")]
    assert "| equal |" in ours
    (theirs,) = [line for line in printed if line.startswith("| FFCV, raw, 1 worker |")]
    assert "not measured: [Errno 2] No such file" in theirs
    assert "/nowhere" not in theirs


def test_two_checkouts_are_compared_figure_by_figure(tmp_path: Path) -> None:
    options = ["--images", "64", "--side", "16", "--batch", "8", "--rounds", "3"]
    printed = run("ab", "--before", str(ROOT), "collate", "--", *options, folder=tmp_path)
    heading, _, *rows = printed.splitlines()
    assert heading == "|  | before | after | after / before | verdict |"
    assert [row.split()[1] for row in rows[:3]] == ["default_collate", "fast_collate", "ratio"]


@pytest.mark.slow
def test_a_timeline_shows_both_ways_of_feeding(tmp_path: Path) -> None:
    output = tmp_path / "timeline.svg"
    command = [sys.executable, str(BENCHMARKS / "timeline.py"), "--images", "600"]
    done = subprocess.run(
        [*command, "--output", str(output)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    shown = output.read_text()
    for text in ("without workers<", "Loader<", ">the loop<", ">read<", ">transform<", ">train<"):
        assert text in shown
    assert [path.name for path in tmp_path.glob("memload-*")] == []
