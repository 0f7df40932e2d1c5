"""What the checks find on staged machines and file systems."""

import importlib
import mmap
import os
import resource
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from memload import MemmapDataset
from memload.cli import main
from memload.doctor import data_checks, disk, file_systems, machine_checks
from memload.doctor.checks import Check
from memload.doctor.data_checks import share_in_ram
from memload.errors import FeedError
from memload.machine import core_limit
from memload.storage.index import Index

Make = Callable[..., Index]


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def found_by(checks: list[Check], subject: str) -> Check:
    (check,) = (check for check in checks if check.subject == subject)
    return check


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A folder with the files of a machine without limits."""
    write(tmp_path / "proc", meminfo="MemTotal: 4000 kB\nMemAvailable: 3000 kB\n")
    write(tmp_path / "proc/self", cgroup="3:cpu,cpuacct:/outer/a:b\n0::/outer/inner\n")
    return tmp_path


def test_the_limit_of_cores_is_the_smallest_of_the_groups_of_version_2(machine: Path) -> None:
    assert core_limit(machine) is None
    group = machine / "sys/fs/cgroup/outer"
    write(group / "inner", cpu__max="max 100000\n")
    assert core_limit(machine) is None
    write(group, cpu__max="250000 100000\n")
    assert core_limit(machine) == 2.5
    write(group / "inner", cpu__max="50000 100000\n")
    assert core_limit(machine) == 0.5


def test_the_limit_of_cores_is_the_smallest_of_the_groups_of_version_1(machine: Path) -> None:
    group = machine / "sys/fs/cgroup/cpu"
    write(group, cpu__cfs_quota_us="-1\n", cpu__cfs_period_us="100000\n")
    assert core_limit(machine) is None
    write(group / "outer/a:b", cpu__cfs_quota_us="300000\n", cpu__cfs_period_us="100000\n")
    assert core_limit(machine) == 3


def test_a_container_with_few_cores_and_little_memory_is_told(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_checks, "available_cores", lambda: 16)
    checks = machine_checks.machine_checks(machine)
    assert found_by(checks, "cores").mark == "ok"
    assert found_by(checks, "RAM").finding == "3.07 MB available of 4.1 MB"
    group = machine / "sys/fs/cgroup/outer/inner"
    write(group, cpu__max="250000 100000\n")
    write(group, memory__max="500000", memory__current="100000", memory__stat="anon 1\n")
    checks = machine_checks.machine_checks(machine)
    cores, memory = found_by(checks, "cores"), found_by(checks, "RAM")
    assert (cores.mark, cores.remedy[:17]) == ("note", "Set num_threads=2")
    assert memory.finding.startswith("400 kB available of 4.1 MB: the container has a limit")


def test_torch_that_cannot_be_imported_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def import_module(name: str) -> Any:
        if name == "torch":
            raise OSError("libcudart.so.13: cannot open shared object file\nmore")
        return importlib.import_module(name)

    monkeypatch.setattr(machine_checks, "importlib", SimpleNamespace(import_module=import_module))
    done = CliRunner().invoke(main, ["doctor", "out.bin"])
    assert done.exit_code == 1
    assert "bad   torch              cannot be imported: libcudart.so.13: cannot" in done.stdout


def test_a_driver_without_a_gpu_in_torch_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine_checks, "_NVIDIA_DRIVER", tmp_path / "version")
    assert found_by(machine_checks.machine_checks(), "GPU").mark == "ok"
    (tmp_path / "version").touch()
    for version, remedy in (
        ("13.0", "Is CUDA_VISIBLE_DEVICES empty"),
        (None, "Install torch with"),
    ):
        monkeypatch.setattr(torch.version, "cuda", version)
        gpu = found_by(machine_checks.machine_checks(), "GPU")
        assert gpu.finding == "NVIDIA's driver is loaded, but torch finds no GPU"
        assert (gpu.mark, gpu.remedy[: len(remedy)]) == ("bad", remedy)


def test_a_load_is_compared_with_the_cores_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    for load, mark in ((4.5, "ok"), (5.0, "note")):
        monkeypatch.setattr("os.getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert found_by(machine_checks.machine_checks(), "load").mark == mark


def test_a_limit_of_locked_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, finding in ((resource.RLIM_INFINITY, "no limit"), (8_000_000, "at most 8 MB")):
        monkeypatch.setattr("resource.getrlimit", lambda which, limit=limit: (limit, limit))
        assert machine_checks._locked_memory().finding.startswith(finding)


def test_a_gpu_that_is_full_or_lent_to_another_process_is_broken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable\nmore")

    cuda = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 2,
        get_device_name=lambda: "H100",
        mem_get_info=fail,
    )
    gpu = machine_checks._cuda(SimpleNamespace(cuda=cuda))
    assert (gpu.mark, gpu.remedy) == ("bad", "Look for other processes on it with nvidia-smi")
    assert gpu.finding.startswith("H100, one of 2: cannot be used: CUDA error: ")
    assert gpu.finding.endswith("is/are busy or unavailable")


def test_a_missing_compiler_matters_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_checks.shutil, "which", lambda name: None)
    assert machine_checks._compiler(False).mark == "ok"
    check = machine_checks._compiler(True)
    assert (check.mark, check.remedy) == ("note", "Run 'apt install gcc python3-dev', or set CC")


def test_a_python_whose_header_may_not_be_read_cannot_compile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine_checks.shutil, "which", lambda name: "/usr/bin/gcc")
    monkeypatch.setattr(machine_checks.os, "access", lambda path, mode: False)
    check = machine_checks._compiler(True)
    assert (check.mark, "Python.h cannot be read" in check.finding) == ("note", True)
    assert check.remedy == "Run 'apt install python3-dev'"


def test_a_libjpeg_without_turbo_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = {"pillow": "12.0", "libjpeg": "9.5"}
    monkeypatch.setattr(machine_checks, "loaded_libraries", lambda: loaded)
    check = found_by(machine_checks.machine_checks(), "libjpeg")
    assert (check.mark, check.finding) == ("note", "pillow 12.0, libjpeg 9.5")


@pytest.mark.parametrize(
    ("kind", "source", "mark", "finding"),
    [
        ("ext4", "/dev/sda1", "ok", "ext4, mounted at /"),
        ("nfs4", "server:/data", "note", "nfs4, mounted at /: not a disk of this machine"),
        ("fuse.s3fs", "s3fs", "note", "fuse.s3fs, mounted at /: object storage (s3fs)"),
    ],
)
def test_the_file_system_is_told(
    make_dataset: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    source: str,
    mark: str,
    finding: str,
) -> None:
    (tmp_path / "mounts").write_text(f"1 0 8:1 / / rw - {kind} {source} rw\n")
    monkeypatch.setattr(file_systems, "MOUNTS", tmp_path / "mounts")
    check = found_by(data_checks.data_checks(MemmapDataset(make_dataset().path)), "file system")
    assert (check.mark, check.finding) == (mark, finding)
    assert bool(check.remedy) == (mark == "note")


@pytest.mark.parametrize(("fits", "mark"), [(True, "ok"), (False, "note")])
def test_files_that_are_cold_or_cannot_be_read_past_the_page_cache_matter_if_they_do_not_fit(
    make_dataset: Make, monkeypatch: pytest.MonkeyPatch, fits: bool, mark: str
) -> None:
    monkeypatch.setattr(data_checks, "open_direct", lambda descriptor: None)
    monkeypatch.setattr(data_checks, "mount_of", lambda folder: None)
    monkeypatch.setattr(data_checks, "share_held", lambda *arguments: 1.0 if fits else 0.9)
    monkeypatch.setattr(data_checks, "share_in_ram", lambda address, size: 0.25)
    checks = data_checks.data_checks(MemmapDataset(make_dataset().path))
    direct, in_ram = found_by(checks, "O_DIRECT"), found_by(checks, "in RAM")
    assert (direct.mark, in_ram.mark) == (mark, mark)
    assert direct.finding.startswith("made.bin cannot be read past the page cache")
    assert in_ram.finding.startswith("25% of the rows; ")


def test_masks_count_for_the_size_of_a_data_set(
    make_dataset: Make, add_array: Callable[..., Index]
) -> None:
    index = make_dataset(rows=(20,), shape=(16, 16, 3))
    add_array(index, "mask", np.zeros((20, 16, 16), np.uint8), "mask")
    found = found_by(data_checks.data_checks(MemmapDataset(index.path)), "data set").finding
    assert found == "20 samples of 16×16×3 uint8 and mask, 20.5 kB in 1 file each"


def test_rows_that_are_held_are_told_as_a_loader_holds_them(
    make_dataset: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, page = 600, mmap.PAGESIZE  # of three pages: 7 MB
    dataset = MemmapDataset(make_dataset(rows=(rows,), shape=(64, 64, 3)).path)
    share, half = data_checks.share_held, rows * 3 * page // 2
    assert share(dataset, "cpu", half) == 1
    assert share(dataset, "resident", half) == 1
    assert share(dataset, "dma", half) == pytest.approx(0.5, abs=0.01)
    monkeypatch.setattr(data_checks, "share_in_ram", lambda address, size: 0.0)
    in_ram = found_by(data_checks.data_checks(dataset, "dma", half), "in RAM")
    assert in_ram.mark == "note"
    assert disk.disk_times(dataset, "disk", 80, half) == pytest.approx((80, 40), abs=1)
    assert disk.disk_times(dataset, "resident", 80, half) == (0, 0)
    monkeypatch.setattr(data_checks, "share_in_ram", lambda address, size: 1.0)
    assert disk.disk_times(dataset, "disk", 80, half) == pytest.approx((40, 40), abs=1)
    monkeypatch.setattr(data_checks, "available_memory", lambda: rows * 3 * page // 2)
    assert share(dataset, "cpu") == pytest.approx(0.4, abs=0.01)
    assert share(dataset.subset(range(0, rows, 60)), "cpu") == 1


def test_a_few_rows_on_the_disk_are_told(
    make_dataset: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_checks, "share_in_ram", lambda address, size: 0.95)
    check = found_by(data_checks.data_checks(MemmapDataset(make_dataset().path)), "in RAM")
    assert check.finding == "95% of the rows; the first epoch reads the others from the disk"


def test_each_file_is_opened_past_the_page_cache(
    make_dataset: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = MemmapDataset(make_dataset(rows=(3, 3)).path)
    first, _ = dataset.shards.descriptors

    def open_direct(file: int) -> int | None:
        return os.dup(file) if file == first else None

    monkeypatch.setattr(data_checks, "open_direct", open_direct)
    monkeypatch.setattr(data_checks, "mount_of", lambda folder: None)
    finding = found_by(data_checks.data_checks(dataset), "O_DIRECT").finding
    assert finding.startswith(f"{dataset.shards.paths[1].name} cannot be read past the page cache")
    in_ram = file_systems.Mount("/", "tmpfs", "tmpfs", frozenset())
    monkeypatch.setattr(data_checks, "mount_of", lambda folder: in_ram)
    check = found_by(data_checks.data_checks(dataset), "O_DIRECT")
    assert check.finding == "not needed: the files are in RAM"


def test_the_share_in_ram_is_not_known_of_files_of_others(
    make_dataset: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = MemmapDataset(make_dataset().path)
    assert data_checks.rows_in_ram(dataset) is not None
    monkeypatch.setattr(data_checks, "_may_be_asked", lambda path: False)
    assert data_checks.rows_in_ram(dataset) is None
    assert found_by(data_checks.data_checks(dataset), "in RAM").finding.startswith("not known")


def test_the_pages_of_a_file_that_was_just_written_are_in_ram(tmp_path: Path) -> None:
    size = 3 * mmap.PAGESIZE
    with (tmp_path / "file").open("wb+") as file:
        file.write(np.ones(size, np.uint8).tobytes())
        file.flush()
        mapped = mmap.mmap(file.fileno(), size, mmap.MAP_SHARED, mmap.PROT_READ)
    assert share_in_ram(np.frombuffer(mapped, np.uint8).ctypes.data + 5, size - 5) == 1
    with pytest.raises(OSError, match="memory"):
        share_in_ram(mmap.PAGESIZE, 1)  # where nothing is mapped


def test_feeds_are_usable_or_there_is_a_reason(make_dataset: Make) -> None:
    dataset = MemmapDataset(make_dataset().path)
    for one in (None, dataset):
        check = data_checks.feed_check(torch.device("cpu"), one)
        assert check.finding == "usable: cpu; resident, dma, pinned need a GPU"


def test_a_feed_that_cannot_be_created_is_not_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(feed: str, *arguments: object) -> None:
        if feed != "pinned":
            raise FeedError(f"feed={feed!r}: it needs a driver. Install one.")

    monkeypatch.setattr(data_checks, "_try_feed", fail)
    on_gpu = data_checks.feed_check(torch.device("cuda", 0))
    assert on_gpu.mark == "note"
    assert on_gpu.finding.startswith("usable: pinned; resident: it needs a driver. Install one; ")
    on_cpu = data_checks.feed_check(torch.device("cpu"))
    assert on_cpu.mark == "bad"
    assert on_cpu.finding.startswith("usable: none; cpu: it needs a driver. Install one; resident,")


def test_a_feed_that_has_no_memory_for_all_samples_is_not_usable(
    make_dataset: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = MemmapDataset(make_dataset(rows=(40,), shape=(16, 16, 3)).path)  # 30.7 kB
    monkeypatch.setattr(data_checks, "_try_feed", lambda *arguments: None)
    monkeypatch.setattr(data_checks, "free_memory", lambda device: 20_000)
    gpu = torch.device("cuda", 0)
    check = data_checks.feed_check(gpu, dataset)
    assert (check.mark, check.finding) == (
        "note",
        "usable: dma, pinned; resident: 30.7 kB does not fit in the 20 kB free on cuda:0",
    )
    for fitting in (dataset.subset(range(20)), None):
        assert data_checks.feed_check(gpu, fitting).finding == "usable: resident, dma, pinned"
