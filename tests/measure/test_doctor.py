"""What `memload doctor` and `memload.diagnose` find on staged machines, data sets and loaders."""

import json
import os
import re
import sys
import time

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import memload
from memload.cli import main
from memload.measure import checks, stages
from memload.reading.pipeline import samples_of


def run_doctor(*arguments):
    return CliRunner().invoke(main, ["doctor", *map(str, arguments)])


def check_of(text, subject):
    """Return the line of a check."""
    (line,) = (line for line in text.splitlines() if line[6:].startswith(f"{subject} "))
    return line


def slowly(images):
    time.sleep(0.05)
    return images


# ------------------------------------------------------------------------------------ the report


def test_without_a_data_set_the_machine_is_checked():
    done = run_doctor()
    assert done.exit_code == 0, done.output
    for subject in ("cores", "load", "RAM", "GPU"):
        assert check_of(done.stdout, subject).startswith("ok")
    versions = check_of(done.stdout, "versions")
    for name in (f"torch {torch.__version__}", f"memload {memload.__version__}", "libjpeg"):
        assert name in versions
    found = json.loads(run_doctor("--json").stdout)
    assert (found["ok"], found["stages"], found["verdict"]) == (True, [], None)


def test_with_a_data_set_the_verdict_comes_first_and_all_stages_follow(output):
    before = sorted(output.parent.iterdir())
    done = run_doctor(output, "--step-ms", "5e6", "--batch-size", 8)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("The model bounds training: it takes 5,000,000 ms per batch")
    found = "12 samples of 16×16×3 uint8, 13.3 kB in 1 file, 100% of the images in RAM"
    assert found in check_of(done.stdout, "data set")
    table = done.stdout.partition("batches of 8 samples")[2]
    for name in ("disk, random rows", "your Loader, cpu, ", "gathering, 1 thread", "without its"):
        assert name in table
    assert done.stderr == "Measuring for at most 30 s …\n"
    assert sorted(output.parent.iterdir()) == before


def test_json_has_checks_stages_and_the_verdict(output):
    found = json.loads(run_doctor(output, "--json").stdout)
    assert found["checks"][0].keys() == {"subject", "finding", "remedy", "mark"}
    assert found["verdict"]["sentence"].startswith("A batch is there after ")
    assert found["batch_size"] == 256  # of 12 samples, again and again
    assert all(stage["ms"] or stage["reason"] for stage in found["stages"])
    (own,) = (stage for stage in found["stages"] if stage["name"].startswith("your Loader"))
    assert own["ms"] == found["verdict"]["data_ms"]
    assert found["speedup"] is None


def test_decoding_the_images_is_compared_with_the_loader(output, folder, monkeypatch):
    monkeypatch.setattr(stages, "available_cores", lambda: 1)
    done = run_doctor(output, "--images", folder)
    assert "The Loader is " in done.stdout
    assert " times as fast as decoding the images." in done.stdout
    assert "decoding, 1 process " in done.stdout
    assert json.loads(run_doctor(output, "--images", folder, "--json").stdout)["speedup"] > 0


def test_a_folder_without_the_images_is_told(output, tmp_path):
    done = run_doctor(output, "--images", tmp_path)
    assert "it has none of the files, such as " in done.stdout
    assert "times as fast" not in done.stdout


def test_what_is_not_measured_in_time_is_said(output, monkeypatch):
    monkeypatch.setattr("memload.measure.diagnosis._SECONDS", -1.0)
    found = memload.diagnose(memload.Loader(output, 4, transform=slowly), step_ms=1)
    assert found.verdict.bound == "transform"  # what the verdict needs is always measured
    reasons = {stage.reason for stage in found.stages}
    assert reasons == {"", "not measured: there was no time left"}


# ------------------------------------------------------------------------------ staged bottlenecks


def test_a_cold_slow_disk_is_found(output, monkeypatch):
    def preadv(file, buffers, offset):
        time.sleep(0.2)
        return len(buffers[0])

    monkeypatch.setattr("memload.feeds.reader.open_direct", os.dup)
    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(checks, "_pages_in_ram", lambda pixels: 0.0)
    loader = memload.Loader(output, 12)
    found = memload.diagnose(loader, step_ms=20)
    assert found.verdict.bound == "disk"
    assert "in the first epoch only" in found.verdict.remedy  # it fits in RAM
    with monkeypatch.context() as patched:
        patched.setattr(stages, "available_memory", lambda: 1000)
        limited = memload.diagnose(loader, step_ms=20)
    assert "so later epochs take" in limited.verdict.remedy
    monkeypatch.setattr(checks, "_pages_in_ram", lambda pixels: 1.0)
    assert memload.diagnose(loader, step_ms=1000).verdict.bound == "model"


def test_too_few_threads_are_found(output):
    loader = memload.Loader(output, 4, transform=slowly, num_threads=1)
    found = memload.diagnose(loader, step_ms=20)
    assert found.verdict.bound == "threads"
    assert re.search(r"num_threads=[24]: ", found.verdict.remedy)


def test_a_loader_without_threads_lets_the_model_wait_for_all(output):
    loader = memload.Loader(output, 4, transform=slowly, num_threads=0)
    found = memload.diagnose(loader, step_ms=50)
    assert found.verdict.bound == "threads"
    assert found.verdict.wait_ms >= 50


def test_a_slow_transform_is_found(output):
    loader = memload.Loader(output, 4, transform=slowly, num_threads=4)
    found = memload.diagnose(loader, step_ms=0.01)
    assert found.verdict.bound == "transform"
    assert found.verdict.wait_ms > 1


def test_a_model_slower_than_everything_is_found(output):
    found = memload.diagnose(memload.Loader(output, 4, transform=slowly), step_ms=1e5)
    assert (found.verdict.bound, found.verdict.wait_ms) == ("model", 0)


def test_integers_that_are_no_images_are_measured_as_they_are(tmp_path):
    np.save(tmp_path / "scans.npy", np.zeros((20, 16, 16, 1), np.uint16))
    memload.build(tmp_path / "scans.npy", tmp_path / "scans.bin", num_workers=0)
    done = run_doctor(tmp_path / "scans.bin", "--step-ms", 1000)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("The model bounds training: it takes 1,000 ms per batch")


def test_the_loader_itself_is_as_before(output):
    loader = memload.Loader(output, 4, shuffle=True)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    memload.diagnose(loader)
    assert loader.state_dict() == state
    assert len(list(batches)) == 2


# ------------------------------------------------------------------------------- staged machines


def test_a_container_with_few_cores_and_little_memory_is_told(tmp_path, monkeypatch):
    group = tmp_path / "sys/fs/cgroup/inner"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 4000 kB\nMemAvailable: 3000 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/inner\n")
    (group / "cpu.max").write_text("250000 100000\n")
    (group / "memory.max").write_text("500000")
    (group / "memory.current").write_text("100000")
    (group / "memory.stat").write_text("anon 1\n")
    monkeypatch.setattr(checks, "available_cores", lambda: 16)
    found = {check.subject: check for check in checks.machine_checks(tmp_path)}
    assert (found["cores"].mark, found["cores"].remedy[:17]) == ("note", "Set num_threads=2")
    assert found["RAM"].finding == "400 kB available"


def test_torch_that_cannot_be_imported_is_broken(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    done = run_doctor("out.bin")
    assert done.exit_code == 1
    assert "cannot be imported: import of torch halted" in check_of(done.stdout, "torch")


def test_a_driver_without_a_gpu_in_torch_is_broken(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "_NVIDIA_DRIVER", tmp_path)
    done = run_doctor()
    assert done.exit_code == 1
    line = check_of(done.stdout, "GPU")
    assert f"torch {torch.__version__} finds no GPU. Is CUDA_VISIBLE_DEVICES empty" in line


def test_a_busy_machine_is_told(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    for load, mark in ((4.5, "ok"), (5.0, "note")):
        monkeypatch.setattr("os.getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert check_of(run_doctor().stdout, "load").startswith(mark)


def test_a_libjpeg_without_turbo_is_noted(monkeypatch):
    monkeypatch.setattr(checks, "loaded_libraries", lambda: {"pillow": "12.0", "libjpeg": "9.5"})
    line = check_of(run_doctor().stdout, "versions")
    assert line.startswith("note")
    assert "pillow 12.0, libjpeg 9.5" in line


def test_the_share_in_ram_is_not_known_of_files_of_others(make_dataset, monkeypatch):
    dataset = memload.MemmapDataset(make_dataset().path)
    arrays = samples_of(dataset, dataset.sample_names)
    assert checks.share_in_ram(arrays) == 1
    monkeypatch.setattr(checks.os, "geteuid", lambda: 12345)
    monkeypatch.setattr(checks.os, "access", lambda path, mode: False)
    assert checks.share_in_ram(arrays) is None


# -------------------------------------------------------------------------------------- bad input


def test_what_is_no_data_set_is_a_line_and_status_1(tmp_path, output):
    (tmp_path / "text.idx").write_text("no index")
    memload.MemmapDataset(output).subset([]).save(tmp_path / "empty.idx")
    for name, message in (
        ("none.bin", "none.idx does not exist"),
        ("text.bin", "text.idx"),
        ("empty.idx", "has no batches"),
    ):
        done = run_doctor(tmp_path / name, "--step-ms", 54)
        assert (done.exit_code, done.stdout) == (1, "")
        assert message in done.stderr.splitlines()[-1]


def test_measuring_that_fails_is_a_line_after_all_checks(output, monkeypatch):
    def fail(*ignored):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 3 GiB.")

    monkeypatch.setattr(stages.LoaderMeasurer, "_iterate", fail)
    done = run_doctor(output)
    assert done.exit_code == 1
    assert check_of(done.stdout, "measuring").endswith("CUDA out of memory.")


@pytest.mark.parametrize("step_ms", [0, -1, float("nan"), float("inf")])
def test_a_step_that_is_no_time_is_refused(output, step_ms):
    with pytest.raises(ValueError, match="step_ms must be a positive number of milliseconds"):
        memload.diagnose(memload.Loader(output, 4), step_ms=step_ms)


def test_loaders_that_cannot_be_diagnosed_are_refused(output):
    with pytest.raises(TypeError, match="not a list"):
        memload.diagnose([], step_ms=54)
    for loader, message in (
        (memload.Loader(output, batch_sampler=[[0, 1]]), "not with batch_sampler"),
        (
            memload.Loader(output, 10_000, drop_last=True),
            "has no batches. Give it samples, or a smaller batch_size",
        ),
        (memload.Loader(memload.MemmapDataset(output).subset([])), "has no batches"),
    ):
        with pytest.raises(ValueError, match=message):
            memload.diagnose(loader)


def test_errors_of_a_transform_are_raised(output):
    def broken(images):
        raise RuntimeError("no such filter")

    with pytest.raises(RuntimeError, match="no such filter"):
        memload.diagnose(memload.Loader(output, 4, transform=broken))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--step-ms", "54"],
        ["--images", "."],
        ["out.bin", "--step-ms", "0"],
        ["out.bin", "--step-ms", "soon"],
        ["out.bin", "--batch-size", "0"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_status_2(arguments):
    assert run_doctor(*arguments).exit_code == 2


def test_a_batch_is_no_larger_than_the_epoch_of_a_loader(output):
    found = memload.diagnose(memload.Loader(output, 10**6), step_ms=1e5)
    assert found.batch_size == 12
    assert found.verdict.bound == "model"
