"""Every benchmark runs on a few small pictures, and compares checkouts. What is measured is not tested."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"

#: Options with which a benchmark takes seconds, and some of the figures that it brings.
TINY = {
    "build build --count 12 --side 32": ["memload", "bare", "ratio"],
    "cold --images 64 --side 16 --batch 8 --rows 32": ["a file larger than RAM"],
    "loading feeds --quick --images 512 --small 4096": ["224×224×3, batch 256"],
    "training train_step --images 64 --workers 1": ["synthetic", "the same in CudaPrefetcher"],
    "transforms --batch 2 --only normalise": ["resized crop, flip, normalise, 256, images/s"],
}


def run(command, folder):
    """Run a benchmark; return what it printed. It records nothing and leaves nothing behind."""
    module, *options = command.split()
    before = {path: path.read_bytes() for path in RESULTS.iterdir()}
    # one thread, as several wait for each other where other tests run
    environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
    done = subprocess.run(
        [sys.executable, "-P", "-m", f"benchmarks.{module}", *options],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert {path: path.read_bytes() for path in RESULTS.iterdir()} == before
    assert [path.name for path in folder.glob("memload-*")] == []
    return done.stdout


@pytest.mark.parametrize("command", TINY, ids=lambda command: "-".join(command.split()[:2]))
def test_benchmarks_measure_everything_once(command, tmp_path):
    found = json.loads(run(f"{command} --dry-run --rounds 1", tmp_path))
    assert set(TINY[command]) <= found["results"].keys()


def test_a_contender_that_fails_is_a_row_beside_the_others(tmp_path):
    command = "compare --only fast_collate FFCV --count 24 --batch 2 --rounds 1 --seconds 0.01"
    options = f"--python FFCV=/nowhere/python --data {tmp_path} --dry-run"
    results = json.loads(run(f"{command} {options}", tmp_path))["results"]
    assert results["memload, DataLoader + fast_collate, no workers"]["pixels"] == "equal"
    assert results["FFCV, raw"]["error"].startswith("[Errno 2] No such file")
    assert "/nowhere" not in results["FFCV, raw"]["error"]


def test_two_checkouts_are_compared_figure_by_figure(tmp_path):
    command = f"ab {ROOT} transforms --batch 2 --rounds 1 --only padded"
    heading, _, row = run(command, tmp_path).splitlines()
    assert heading == "|  | before | after | after / before |"
    assert row.startswith("| padded crop, flip, normalise, 32, images/s | ")
