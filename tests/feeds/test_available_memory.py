"""How much RAM a process could use, within the limits of its container."""

import errno
import os
from pathlib import Path

import pytest

from memload.machine import available_memory


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".", 1)).write_text(text)


def test_available_memory_is_the_kernels_estimate_within_the_limit_of_a_container(tmp_path):
    assert available_memory(tmp_path) is None
    write(tmp_path / "proc", meminfo="MemTotal: 2000 kB\nMemAvailable:    1000 kB\n")
    assert available_memory(tmp_path) == 1_024_000
    write(tmp_path / "proc/self", cgroup="1:name=systemd:/\n0::/outer/inner\n")
    assert available_memory(tmp_path) == 1_024_000
    stat = "anon 5\ninactive_file 100000\nactive_file 50000\n"  # page cache does not count
    outer = tmp_path / "sys/fs/cgroup/outer"
    write(outer / "inner", memory_max="max\n", memory_current="0\n", memory_stat=stat)
    write(outer, memory_max="500000\n", memory_current="250000\n", memory_stat=stat)
    assert available_memory(tmp_path) == 500_000 - (250_000 - 150_000)
    write(outer, memory_current="900000\n")
    assert available_memory(tmp_path) == 0


def test_available_memory_counts_limits_of_version_1_on_a_system_with_both(tmp_path):
    write(tmp_path / "proc", meminfo="MemAvailable:    1000 kB\n")
    write(tmp_path / "proc/self", cgroup="9:cpu,memory:/outer/a:b\n1:name=systemd:/x\n0::/outer\n")
    mount = tmp_path / "sys/fs/cgroup/memory"
    unlimited = f"{(1 << 63) - 4096}\n"
    stat = "active_file 7\ntotal_inactive_file 100000\ntotal_active_file 50000\n"
    used = {"memory_usage_in_bytes": "250000\n", "memory_stat": stat}
    write(mount, memory_limit_in_bytes=unlimited, **used)
    write(mount / "outer", memory_limit_in_bytes="500000\n", **used)
    write(mount / "outer/a:b", memory_limit_in_bytes=unlimited, **used)
    assert available_memory(tmp_path) == 500_000 - (250_000 - 150_000)
    write(mount / "outer/a:b", memory_limit_in_bytes="300000\n")
    assert available_memory(tmp_path) == 300_000 - (250_000 - 150_000)
    unified = tmp_path / "sys/fs/cgroup/outer"
    write(unified, memory_max="260000\n", memory_current="200000\n", memory_stat="anon 1\n")
    assert available_memory(tmp_path) == 60_000


def test_available_memory_of_a_container_whose_group_is_the_mount(tmp_path):
    write(tmp_path / "proc", meminfo="MemAvailable:    1000 kB\n")
    write(tmp_path / "proc/self", cgroup="4:memory:/docker/0123\n0::/docker/0123\n")
    mount = tmp_path / "sys/fs/cgroup/memory"
    stat = "total_inactive_file 100\n"
    write(mount, memory_limit_in_bytes="5000", memory_usage_in_bytes="300", memory_stat=stat)
    assert available_memory(tmp_path) == 5_000 - (300 - 100)


@pytest.mark.parametrize("name", ["meminfo", "memory.max"])
def test_too_many_open_files_are_not_taken_for_unlimited_memory(name, tmp_path, monkeypatch):
    write(tmp_path / "proc", meminfo="MemAvailable:    1000 kB\n")
    write(tmp_path / "proc/self", cgroup="0::/\n")
    read_text = Path.read_text

    def refuse(path):
        if path.name == name:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return read_text(path)

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        available_memory(tmp_path)
