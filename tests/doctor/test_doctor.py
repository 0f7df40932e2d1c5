"""What `memload doctor` finds on staged machines, data sets and loaders."""

import errno
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

import memload
from memload.bench import direct, stages
from memload.cli import main
from memload.doctor import data_checks, diagnosis, disk, loader_measurer
from memload.doctor.checks import Check
from memload.doctor.report import Diagnosis
from memload.errors import MemloadError
from memload.reading.samplers import ShuffledSampler
from memload.storage.index import Index

MARKS = ("ok    ", "note  ", "bad   ")
Make = Callable[..., Index]


@pytest.fixture(autouse=True)
def in_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure as little as possible, on the CPU, as if there were four cores."""
    monkeypatch.setattr(stages, "SECONDS", 0)
    monkeypatch.setattr(disk, "_SECONDS", 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(loader_measurer, "available_cores", lambda: 4)


def run_doctor(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["doctor", *map(str, arguments)])


def slowly(images: torch.Tensor) -> torch.Tensor:
    time.sleep(0.05)
    return images


MACHINE = [
    "cores",
    "load",
    "RAM",
    "torch",
    "GPU",
    "C compiler",
    "locked memory",
    "libjpeg",
]
DATA = ["data set", "file system", "O_DIRECT", "in RAM", "feeds"]


def subjects_of(text: str) -> list[str]:
    """Return what the lines of checks are about."""
    return [line[6:25].strip() for line in text.splitlines() if line[:6] in MARKS]


def test_without_a_data_set_the_machine_is_checked() -> None:
    done = run_doctor()
    assert done.exit_code == 0, done.output
    assert subjects_of(done.stdout) == [*MACHINE, "feeds"]
    assert f"{torch.__version__}, built" in done.stdout
    assert "usable: cpu; resident, dma, pinned need a GPU" in done.stdout
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
    for subject in ("reading the disk", "Loader, feed cpu, 4 threads", "no transform"):
        assert subject in measured
    assert "gathering rows, 1 thread" in measured
    *_, best, sentence = done.stdout.splitlines()
    assert best.startswith("Enough for this model: num_threads=")
    assert sentence.startswith("The model: it takes 5,000,000 ms a batch, and data is there after ")
    assert done.stderr == "Measuring for at most 30 s …\n"
    assert sorted(output.parent.iterdir()) == before


def test_json_has_checks_measurements_and_the_verdict(output: Path) -> None:
    found = json.loads(run_doctor(output, "--json").stdout)
    assert found.keys() >= {"ok", "checks", "measured", "times", "verdict", "num_threads"}
    assert found["checks"][0].keys() == {"subject", "mark", "finding", "remedy"}
    assert found["verdict"]["sentence"].startswith("Data is there after ")
    assert found["verdict"]["wait_ms"] is None
    assert found["batch_size"] == 12  # of 256 asked for
    (small,) = (check for check in found["checks"] if check["subject"] == "batch size")
    assert (small["mark"], small["remedy"]) == (
        "note",
        "Say --batch-size 12, and --step-ms for that",
    )
    for line in found["measured"]:
        assert line["ms"] or line["reason"]


def test_the_command_measures_a_loader_that_shuffles_and_transforms_256_samples(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaders: list[memload.Loader] = []

    def diagnose_loader(loader: memload.Loader, *arguments: object) -> Diagnosis:
        loaders.append(loader)
        return Diagnosis([])

    monkeypatch.setattr(diagnosis, "diagnose_loader", diagnose_loader)
    assert run_doctor(output).exit_code == 0
    (loader,) = loaders
    assert loader.batch_size == 256
    assert loader.transform is not None
    assert isinstance(loader.sampler, ShuffledSampler)


def test_batches_that_are_measured_have_the_columns_of_the_loader(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[tuple[str, ...]] = []
    make_loader = loader_measurer.make_loader

    def recorded(*arguments: Any, columns: Any, **options: Any) -> memload.Loader:
        names.append(tuple(columns))
        return make_loader(*arguments, columns=columns, **options)

    def feed_check(device: Any, dataset: Any, columns: Any) -> Check:
        names.append(tuple(columns))
        return Check("feeds", "ok", "")

    monkeypatch.setattr(loader_measurer, "make_loader", recorded)
    monkeypatch.setattr(diagnosis, "feed_check", feed_check)
    memload.diagnose(memload.Loader(output, 4, columns=["index"]))
    assert len(names) > 2
    assert set(names) == {("index",)}


# ------------------------------------------------------------------------- five staged bottlenecks


def test_a_cold_slow_disk_is_found(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def preadv(*arguments: Any) -> int:
        time.sleep(0.05)
        return len(arguments[1][0])

    monkeypatch.setattr(direct, "open_direct", os.dup)
    monkeypatch.setattr(direct.os, "preadv", preadv)
    monkeypatch.setattr(disk, "_THREADS", 1)
    monkeypatch.setattr(data_checks, "share_in_ram", lambda address, size: 0.0)
    found = memload.diagnose(memload.Loader(output, 4), step_ms=54)
    assert found.verdict.bound == "disk"
    assert found.verdict.sentence.startswith("Reading the disk: ")
    assert "in the first epoch only" in found.verdict.remedy  # it fits in RAM
    with monkeypatch.context() as patched:
        patched.setattr(data_checks, "available_memory", lambda: 1000)
        limited = memload.diagnose(memload.Loader(output, 4), step_ms=54)
    assert "later epochs take" in limited.verdict.remedy
    monkeypatch.setattr(data_checks, "share_in_ram", lambda address, size: 1.0)
    assert memload.diagnose(memload.Loader(output, 4), step_ms=54).verdict.bound == "model"


def test_too_few_threads_are_found(output: Path) -> None:
    loader = memload.Loader(output, 4, transform=slowly, num_threads=1)
    found = memload.diagnose(loader, step_ms=30)
    assert found.verdict.bound == "threads"
    assert found.verdict.data_ms > 30
    assert found.num_threads in (2, 4)
    assert f"num_threads={found.num_threads}" in found.verdict.remedy


def test_threads_are_compared_also_if_batches_take_long(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def very_slowly(images: torch.Tensor) -> torch.Tensor:
        time.sleep(0.1)
        return images

    monkeypatch.setattr(loader_measurer, "_MAX_SECONDS", 0)
    loader = memload.Loader(output, 4, transform=very_slowly, num_threads=1)
    found = memload.diagnose(loader, step_ms=80)
    assert found.verdict.bound == "threads"
    assert found.verdict.data_ms >= 100


def test_a_loader_without_threads_lets_the_model_wait_for_all(output: Path) -> None:
    loader = memload.Loader(output, 4, transform=slowly, num_threads=0)
    found = memload.diagnose(loader, step_ms=50)
    assert found.verdict.bound == "threads"
    assert found.verdict.wait_ms >= 50
    assert "while the model is at work, with num_threads=" in found.verdict.remedy


def test_a_transform_that_is_slow_on_the_cpu_is_found(output: Path) -> None:
    loader = memload.Loader(output, 4, transform=slowly, num_threads=4)
    found = memload.diagnose(loader, step_ms=0.01)
    assert found.verdict.bound == "transform"
    assert found.verdict.wait_ms > 1


def test_workers_where_none_is_needed_are_found(output: Path) -> None:
    def start(number: int) -> None:
        time.sleep(0.3)

    dataset = memload.MemmapDataset(output)
    loader = DataLoader(dataset, 4, shuffle=True, num_workers=2, worker_init_fn=start)
    state = torch.get_rng_state().tolist()
    found = memload.diagnose(loader, step_ms=50)
    assert found.verdict.bound == "workers"
    assert found.verdict.data_ms >= 100  # three batches
    assert "num_workers=0" in found.verdict.remedy
    relaxed = memload.diagnose(loader, step_ms=1e5)
    assert relaxed.verdict.bound == "model"
    assert "2 workers are not needed" in relaxed.verdict.remedy
    assert torch.get_rng_state().tolist() == state


def test_a_slow_transform_of_single_samples_is_found(output: Path) -> None:
    dataset = memload.MemmapDataset(output, transform=slowly)
    found = memload.diagnose(DataLoader(Subset(dataset, range(8)), 4), step_ms=10)
    assert found.verdict.bound == "transform"
    assert found.verdict.wait_ms >= 200  # without workers, the model waits for all of it
    assert "memload.Loader" in found.verdict.remedy


def test_a_data_set_of_another_kind_is_measured_as_a_whole() -> None:
    found = memload.diagnose(DataLoader([(i, slowly(i)) for i in range(2)]), step_ms=1e4)
    assert found.verdict.bound == "model"
    assert [line.subject for line in found.measured] == [
        "DataLoader, num_workers=0",
        "reading and collating samples",
    ]


def test_a_model_slower_than_everything_is_found(output: Path) -> None:
    found = memload.diagnose(memload.Loader(output, 4, transform=slowly), step_ms=1e5)
    assert (found.verdict.bound, found.verdict.wait_ms) == ("model", 0)


# -------------------------------------------------------------------------------------- bad input


def test_what_is_no_data_set_is_a_line_and_status_1(
    tmp_path: Path, folder: Path, output: Path
) -> None:
    missing = run_doctor(tmp_path / "none.bin", "--step-ms", 54)
    assert (missing.exit_code, missing.stdout.count("\nbad ")) == (1, 1)
    assert missing.stderr == ""  # nothing is measured
    assert "none.idx does not exist" in missing.stdout.splitlines()[-1]
    (tmp_path / "text.idx").write_text("no index")
    damaged = run_doctor(tmp_path / "text.bin", "--json")
    assert damaged.exit_code == 1
    *_, check = json.loads(damaged.stdout)["checks"]
    assert (check["subject"], check["mark"]) == ("data set", "bad")


def test_a_data_set_that_is_being_built_is_said_to_be(folder: Path, tmp_path: Path) -> None:
    memload.build(folder, tmp_path / "new.bin", size=16, shard_size=8192, part=(0, 2))
    before = sorted(tmp_path.rglob("*"))
    done = run_doctor(tmp_path / "new.bin", "--step-ms", 54)
    assert done.exit_code == 1
    assert "new.building: 7 of 12 rows are done" in done.stdout.splitlines()[-1]
    assert sorted(tmp_path.rglob("*")) == before


def test_an_empty_data_set_is_a_line_and_status_1(make_dataset: Make) -> None:
    path = make_dataset().path
    memload.MemmapDataset(path).subset([]).save(path.with_name("empty.idx"))
    done = run_doctor(path.with_name("empty.idx"))
    assert done.exit_code == 1
    assert "empty.idx has no samples. Build it from images" in done.stdout.splitlines()[-1]
    with pytest.raises(ValueError, match="The Loader has no samples"):
        memload.diagnose(memload.Loader(path.with_name("empty.idx")))


def test_a_data_set_that_may_not_be_read_is_a_line_and_status_1(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = output.with_suffix(".idx")

    def refuse(*arguments: Any) -> Any:  # root may read everything
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "pread", refuse)
    done = run_doctor(output, "--step-ms", 54)
    assert done.exit_code == 1
    assert done.stdout.splitlines()[-1].endswith(f"{index} cannot be read: Permission denied.")


@pytest.mark.parametrize(
    ("error", "arguments", "finding"),
    [
        (torch.OutOfMemoryError, ["CUDA out of memory.\nTried to allocate 3 GiB."], "CUDA out of"),
        (OSError, [errno.EIO, "Input/output error"], "be read: Input/output error. Look for"),
        (MemloadError, ["No thread can be started."], "No thread can be started."),
    ],
)
def test_measuring_that_fails_is_a_line_after_all_checks(
    output: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: type[Exception],
    arguments: list[Any],
    finding: str,
) -> None:
    def fail(*ignored: object) -> None:
        raise error(*arguments)

    monkeypatch.setattr(loader_measurer, "disk_stage", fail)
    done = run_doctor(output, "--step-ms", 54)
    assert done.exit_code == 1
    assert subjects_of(done.stdout) == [*MACHINE, "batch size", *DATA, "measuring"]
    assert finding in done.stdout.splitlines()[-1]


class Counting(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


@pytest.mark.parametrize("step_ms", [0, -1, float("nan"), float("inf")])
def test_a_step_that_is_no_time_is_refused(output: Path, step_ms: float) -> None:
    with pytest.raises(ValueError, match="step_ms must be a positive number"):
        memload.diagnose(memload.Loader(output, 4), step_ms=step_ms)


@pytest.mark.parametrize("step_ms", ["54", True, [54]])
def test_a_step_that_is_no_number_is_refused(output: Path, step_ms: Any) -> None:
    with pytest.raises(TypeError, match="step_ms must be a positive number of milliseconds"):
        memload.diagnose(memload.Loader(output, 4), step_ms=step_ms)


def test_loaders_that_cannot_be_diagnosed_are_refused(output: Path) -> None:
    dataset = memload.MemmapDataset(output)
    with pytest.raises(TypeError, match="not a list"):
        memload.diagnose([], step_ms=54)
    with pytest.raises(ValueError, match="not one with batch_sampler"):
        memload.diagnose(memload.Loader(dataset, batch_sampler=[[0, 1]]))
    with pytest.raises(ValueError, match=r"not over an IterableDataset \(Counting\)"):
        memload.diagnose(DataLoader(Counting(), 4))
    with pytest.raises(ValueError, match="Give it a batch_size"):
        memload.diagnose(DataLoader(dataset, batch_size=None))
    with pytest.raises(ValueError, match="no batches"):
        memload.diagnose(DataLoader(dataset, 100, drop_last=True))


def test_a_loader_without_batches_is_refused(output: Path) -> None:
    loader = memload.Loader(output, 10_000, drop_last=True)
    with pytest.raises(ValueError, match="no batches"):
        memload.diagnose(loader, 20)


def test_integers_that_are_no_images_are_measured_as_they_are(tmp_path: Path) -> None:
    np.save(tmp_path / "scans.npy", np.zeros((20, 16, 16, 1), np.uint16))
    memload.build(tmp_path / "scans.npy", tmp_path / "scans.bin", num_workers=0)
    done = run_doctor(tmp_path / "scans.bin", "--step-ms", 1000)
    assert done.exit_code == 0, done.output
    assert "20 samples of 16×16×1 uint16" in done.output
    assert "The model: it takes 1,000 ms a batch" in done.output


def test_random_numbers_of_the_training_are_as_before() -> None:
    class Drawing(Dataset[float]):
        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> float:
            return random.random() + np.random.rand() + float(torch.rand(()))

    generator = torch.Generator().manual_seed(7)
    loader = DataLoader(Drawing(), 8, shuffle=True, generator=generator)

    def drawn() -> list[float]:
        return [random.random(), np.random.rand(), float(torch.rand(())), *loader.sampler]

    found = []
    for diagnosed in (False, True):
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        generator.manual_seed(7)
        if diagnosed:
            memload.diagnose(loader, 20)
        found.append(drawn())
    assert found[0] == found[1]


def test_errors_of_a_transform_are_raised(output: Path) -> None:
    def broken(images: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such filter")

    with pytest.raises(RuntimeError, match="no such filter"):
        memload.diagnose(memload.Loader(output, 4, transform=broken))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--step-ms", "54"],
        [""],
        ["out.bin", "--step-ms", "0"],
        ["out.bin", "--step-ms", "nan"],
        ["out.bin", "--step-ms", "inf"],
        ["out.bin", "--batch-size", "0"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_status_2(arguments: list[str]) -> None:
    assert run_doctor(*arguments).exit_code == 2
