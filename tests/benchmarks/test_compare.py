import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(HERE))
import compare  # noqa: E402
from contenders import Job  # noqa: E402


@pytest.fixture
def job(tmp_path):
    (tmp_path / "images").mkdir()
    for number in range(4):
        (tmp_path / "images" / f"{number}.jpg").touch()
    return Job(tmp_path, tmp_path / "built", side=2, batch=2, workers=0, cores=1, device="cpu")


def batch(*labels, dtype=torch.uint8, side=2):
    return torch.zeros(len(labels), 3, side, side, dtype=dtype), torch.tensor(labels)


def test_ways_are_measured_and_one_that_fails_is_a_line(tmp_path):
    shutil.copytree(
        HERE, tmp_path / "benchmarks", ignore=shutil.ignore_patterns("results", "plots")
    )
    shutil.copytree(HERE.parent / "scripts", tmp_path / "scripts")
    (tmp_path / "work").mkdir()
    (tmp_path / "tmp").mkdir()
    command = [
        sys.executable, tmp_path / "benchmarks" / "compare.py", "--device", "cpu", "--only", "memload, Loader", "FFCV",
        "default collate", "--count", "24", "--batch", "8", "--workers", "1", "--rounds", "2", "--seconds", "0.01",
        "--python", "ffcv=/nowhere/python", "--python", "numpy=/bin/false", "--folder", tmp_path / "work",
    ]  # fmt: skip
    environment = os.environ | {"TMPDIR": str(tmp_path / "tmp")}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    line = json.loads((tmp_path / "benchmarks" / "results" / "compare.jsonl").read_text())
    assert {"--only 'memload, Loader' FFCV 'default collate'", "--count 24", "--rounds 2"} <= set(
        line["partial"]
    )
    ours = line["results"]["memload, Loader, 1 thread"]
    assert ours["images/s"]["repeats"] == 2
    assert ours["images/s"]["median"] > 0
    assert ours["pixels"] == "equal"
    assert ours["disk, kB/image"] > 224 * 224 * 3 / 1000
    assert "no interpreter" in line["results"]["FFCV, raw, 1 worker"]["error"]
    assert line["results"]["NumPy memmap, default collate, 1 worker"]["error"] == "ended, status 1"
    shown = next(
        line
        for line in done.stdout.splitlines()
        if line.startswith("NumPy memmap, default collate, 1 worker")
    )
    assert shown.endswith("  none: ended, status 1")
    assert [*(tmp_path / "work").iterdir(), *(tmp_path / "tmp").iterdir()] == []


def test_where_every_way_fails_the_reasons_are_shown_and_nothing_is_recorded(tmp_path):
    shutil.copytree(
        HERE, tmp_path / "benchmarks", ignore=shutil.ignore_patterns("results", "plots")
    )
    shutil.copytree(HERE.parent / "scripts", tmp_path / "scripts")
    (tmp_path / "work").mkdir()
    command = [
        sys.executable, tmp_path / "benchmarks" / "compare.py", "--device", "cpu", "--only", "FFCV", "--count", "24",
        "--batch", "8", "--workers", "1", "--python", "ffcv=/bin/false", "--folder", tmp_path / "work",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert "FFCV, raw, 1 worker  none: ended, status 1" in done.stdout
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1] == "Nothing is recorded, as no way could be measured."
    assert not (tmp_path / "benchmarks" / "results").exists()


def test_a_run_that_is_stopped_keeps_its_whole_rounds(tmp_path):
    shutil.copytree(
        HERE, tmp_path / "benchmarks", ignore=shutil.ignore_patterns("results", "plots")
    )
    shutil.copytree(HERE.parent / "scripts", tmp_path / "scripts")
    (tmp_path / "work").mkdir()
    command = [
        sys.executable, tmp_path / "benchmarks" / "compare.py", "--device", "cpu", "--only", "memload, Loader",
        "--count", "24", "--batch", "8", "--workers", "1", "--rounds", "100000", "--seconds", "0.01",
        "--folder", tmp_path / "work",
    ]  # fmt: skip
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        while "round 3 of" not in running.stderr.readline():
            assert running.poll() is None
        running.send_signal(signal.SIGINT)
        shown, said = running.communicate(timeout=60)
    finally:
        running.kill()
    assert running.returncode == 128 + signal.SIGINT, said
    assert "memload, Loader, 1 thread" in shown
    line = json.loads((tmp_path / "benchmarks" / "results" / "compare.jsonl").read_text())
    kept = line["results"]["memload, Loader, 1 thread"]["images/s"]["repeats"]
    assert f"stopped: {kept} of 100000 rounds are kept" in said
    assert line["parameters"]["rounds"] == kept >= 3
    assert [*(tmp_path / "work").iterdir()] == []


def test_the_reason_is_the_first_line_of_an_error_but_of_a_workers_the_cause():
    assert compare.reason(ValueError("no room\nfor details")) == "ValueError: no room"
    assert compare.reason(ValueError()) == "ValueError: "

    class Bad(torch.utils.data.Dataset):
        def __len__(self):
            return 1

        def __getitem__(self, number):
            raise OSError("no such picture\nfor details")

    with pytest.raises(OSError, match="Caught OSError") as caught:
        next(iter(torch.utils.data.DataLoader(Bad(), num_workers=1)))
    assert compare.reason(caught.value) == "in a worker: OSError: no such picture"


def test_an_epoch_tells_its_first_batch_and_what_comes_behind_it(job):
    taken = compare.whole_epoch([batch(3, 0), batch(1, 2)], job, 0.0)
    assert (taken["count"], taken["late"]) == (4, 2)
    assert 0 < taken["steady"] < taken["all"]


def test_an_epoch_in_which_a_picture_comes_twice_is_an_error(job):
    with pytest.raises(ValueError, match="an epoch of 4 pictures, 3 of them different, not 4"):
        compare.whole_epoch([batch(3, 0), batch(1, 0)], job, 0.0)


def test_an_epoch_without_batches_behind_the_first_of_each_worker_is_an_error(job):
    with pytest.raises(ValueError, match="too short"):
        compare.epoch([batch(0, 1)], job, 0.0)


@pytest.mark.parametrize("wrong", [{"dtype": torch.float32}, {"side": 3}])
def test_a_batch_of_another_kind_is_an_error(job, wrong):
    with pytest.raises(ValueError, match="batch of"):
        compare.epoch([batch(0, 1, **wrong)], job, 0.0)
