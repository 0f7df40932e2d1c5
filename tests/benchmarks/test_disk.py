"""What the benchmark of cold files builds on: files out of RAM, and RAM that is taken away."""

import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from memload.machine import available_memory

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import disk
import memory

ROW_BYTES = 5000
ROWS = 400


@pytest.fixture
def cold_file(tmp_path: Path) -> Path:
    path = tmp_path / "rows.bin"
    path.write_bytes(bytes(disk.HEADER_BYTES + ROWS * ROW_BYTES))
    try:
        disk.drop_from_page_cache(path)
    except RuntimeError as error:
        pytest.skip(str(error))  # such as on tmpfs
    return path


def test_a_file_is_not_in_ram_once_it_was_dropped_and_is_once_it_was_read(cold_file: Path) -> None:
    assert disk.share_in_ram(cold_file) == 0
    disk.read_from_start_to_end(cold_file)
    assert disk.share_in_ram(cold_file) == 1


def test_direct_reads_leave_nothing_in_ram(cold_file: Path) -> None:
    assert disk.read_directly(cold_file, np.arange(ROWS), ROW_BYTES, threads=3) == ROWS
    assert disk.share_in_ram(cold_file) == 0


def test_a_file_that_is_mapped_cannot_be_dropped(cold_file: Path) -> None:
    mapped = np.memmap(cold_file, mode="r")
    assert not mapped.any()
    with pytest.raises(RuntimeError, match=r"% of rows.bin stays in RAM"):
        disk.drop_from_page_cache(cold_file)


def children() -> list[int]:
    tasks = Path("/proc/self/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def test_ram_is_taken_away_until_the_block_ends() -> None:
    before, size = children(), 512 << 20
    with memory.limited_ram(available_memory() - size) as check:
        (child,) = set(children()) - set(before)
        status = Path(f"/proc/{child}/status").read_text().splitlines()
        (held,) = [int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon")]
        assert held > size // 2
        check()
        os.kill(child, signal.SIGKILL)  # as the kernel would, if RAM ran short
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        with pytest.raises(RuntimeError, match="RAM ran short"):
            check()
    assert children() == before
