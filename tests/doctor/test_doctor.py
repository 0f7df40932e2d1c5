"""What `memload doctor` finds on staged machines, data sets and loaders."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import memload
from memload.bench import direct, stages
from memload.cli import main
from memload.doctor import data_checks, loader_times
from memload.storage.file_reads import DirectFile
from memload.storage.index import Index

MARKS = ("ok    ", "note  ", "bad   ")
Make = Callable[..., Index]


@pytest.fixture(autouse=True)
def in_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure as little as possible, on the CPU, as if there were four cores."""
    monkeypatch.setattr(stages, "SECONDS", 0)
    monkeypatch.setattr(loader_times, "_DISK_SECONDS", 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(loader_times, "available_cores", lambda: 4)


def run_doctor(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["doctor", *map(str, arguments)])


def slowly(images: torch.Tensor) -> torch.Tensor:
    time.sleep(0.02)
    return images


MACHINE = ["cores", "RAM", "torch", "GPU", "cuda-bindings", "locked memory", "libjpeg"]
DATA = ["data set", "file system", "O_DIRECT", "in RAM", "feeds"]


def subjects_of(text: str) -> list[str]:
    """Return what the lines of checks are about."""
    return [line[6:25].strip() for line in text.splitlines() if line[:6] in MARKS]


def test_without_a_data_set_the_machine_is_checked() -> None:
    done = run_doctor()
    assert done.exit_code == 0, done.output
    assert subjects_of(done.stdout) == [*MACHINE, "feeds"]
    assert f"{torch.__version__}, built" in done.stdout
    assert "usable: cpu; resident, dma, uva, disk, pinned need a GPU" in done.stdout
    found = json.loads(run_doctor("--json").stdout)
    assert [check["subject"] for check in found["checks"]] == [*MACHINE, "feeds"]
    assert (found["ok"], found["measured"], found["verdict"]) == (True, [], None)


def test_with_a_data_set_it_measures_and_ends_with_a_sentence(output: Path) -> None:
    before = sorted(output.parent.iterdir())
    done = run_doctor(output, "--step-ms", "5e6", "--batch-size", 8)
    assert done.exit_code == 0, done.output
    assert subjects_of(done.stdout) == [*MACHINE, *DATA]
    assert "12 samples of 16×16×3 uint8, 9.22 kB in 1 file" in done.stdout
    measured = done.stdout.partition("batches of 8 samples")[2]
    for subject in ("reading the disk", "Loader, feed cpu, 4 threads", "transform, one thread"):
        assert subject in measured
    assert "gather, 1 thread" in measured
    *_, best, sentence = done.stdout.splitlines()
    assert best.startswith("Best here: num_threads=")
    assert sentence.startswith("The model: it takes 5000000 ms a batch, and data is there after ")
    assert sorted(output.parent.iterdir()) == before


def test_json_has_checks_measurements_and_the_verdict(output: Path) -> None:
    found = json.loads(run_doctor(output, "--json").stdout)
    assert found.keys() >= {"ok", "checks", "measured", "times", "verdict", "num_threads"}
    assert found["checks"][0].keys() == {"subject", "mark", "finding", "remedy"}
    assert found["verdict"]["sentence"].startswith("Data is there after ")
    assert found["verdict"]["wait_ms"] is None
    assert found["batch_size"] == 12  # of 256 asked for
    for line in found["measured"]:
        assert line["ms"] or line["reason"]


# ------------------------------------------------------------------------- five staged bottlenecks


def test_a_cold_slow_disk_is_found(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def preadv(*arguments: Any) -> int:
        time.sleep(0.05)
        return len(arguments[1][0])

    monkeypatch.setattr(direct, "open_direct", lambda file: DirectFile(os.dup(file), 512))
    monkeypatch.setattr(direct.os, "preadv", preadv)
    monkeypatch.setattr(loader_times, "_DISK_THREADS", 1)
    monkeypatch.setattr(data_checks, "share_in_ram", lambda address, size: 0.0)
    found = memload.diagnose(memload.Loader(output, 4), step_ms=54)
    assert found.verdict.bound == "disk"
    assert found.verdict.sentence.startswith("Reading the disk: ")
    assert "in the first epoch only" in found.verdict.remedy  # it fits in RAM
    monkeypatch.setattr(data_checks, "share_in_ram", lambda address, size: 1.0)
    assert memload.diagnose(memload.Loader(output, 4), step_ms=54).verdict.bound == "model"


def test_too_few_threads_are_found(output: Path) -> None:
    loader = memload.Loader(output, 4, transform=slowly, num_threads=1)
    found = memload.diagnose(loader, step_ms=15)
    assert found.verdict.bound == "threads"
    assert found.verdict.data_ms > 20
    assert found.num_threads in (2, 4)
    assert f"num_threads={found.num_threads}" in found.verdict.remedy


def test_a_transform_that_is_slow_on_the_cpu_is_found(output: Path) -> None:
    loader = memload.Loader(output, 4, transform=slowly, num_threads=4)
    found = memload.diagnose(loader, step_ms=0.01)
    assert found.verdict.bound == "transform"
    assert found.verdict.wait_ms > 1


def test_a_model_slower_than_everything_is_found(output: Path) -> None:
    found = memload.diagnose(memload.Loader(output, 4, transform=slowly), step_ms=1e5)
    assert (found.verdict.bound, found.verdict.wait_ms) == ("model", 0)


# -------------------------------------------------------------------------------------- bad input


def test_what_is_no_data_set_is_a_line_and_status_1(
    tmp_path: Path, folder: Path, output: Path
) -> None:
    missing = run_doctor(tmp_path / "none.bin", "--step-ms", 54)
    assert (missing.exit_code, missing.stdout.count("\nbad ")) == (1, 1)
    assert "none.bin does not exist" in missing.stdout.splitlines()[-1]
    (tmp_path / "text.idx").write_text("no index")
    damaged = run_doctor(tmp_path / "text.bin", "--json")
    assert damaged.exit_code == 1
    *_, check = json.loads(damaged.stdout)["checks"]
    assert (check["subject"], check["mark"]) == ("data set", "bad")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--step-ms", "54"],
        ["out.bin", "--step-ms", "0"],
        ["out.bin", "--step-ms", "nan"],
        ["out.bin", "--step-ms", "inf"],
        ["out.bin", "--batch-size", "0"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_status_2(arguments: list[str]) -> None:
    assert run_doctor(*arguments).exit_code == 2
