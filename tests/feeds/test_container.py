"""Rows are held and read within the limit of a container, and nothing is killed.

Run as a program, this file holds and reads rows in a control group: GROUP DATASET.
"""

import contextlib
import ctypes
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from memload import FeedError, Loader
from memload.feeds import gathered, registered, windows
from memload.feeds.budget import claim_all
from memload.feeds.held import HeldRows
from memload.feeds.limits import MemoryLimits
from memload.feeds.windows import plan_for_rows
from memload.machine import available_memory
from memload.reading.dataset import MemmapDataset
from memload.storage.file_reads import _is_in_ram
from memload.storage.index import Index
from memload.wording import size_text
from tests.feeds.page_cache import drop_pages

MOUNT = Path("/sys/fs/cgroup/memory")
LIMIT_BYTES = 256 << 20
SHAPE = (256, 256, 1)
ROW_BYTES = math.prod(SHAPE)
ROWS = 2 * LIMIT_BYTES // ROW_BYTES


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of version 1 with a limit of memory. It is removed after the test."""
    groups = Path("/proc/self/cgroup")
    lines = groups.read_text().splitlines() if groups.exists() else []
    paths = [path for _, name, path in (line.split(":", 2) for line in lines) if name == "memory"]
    if not any((MOUNT / path.lstrip("/")).is_dir() for path in paths):
        pytest.skip("needs control groups of version 1, and to see its own one")
    try:
        folder = Path(tempfile.mkdtemp(prefix="memload-test-", dir=MOUNT))
    except OSError as error:
        pytest.skip(f"needs the right to make control groups: {error}")
    try:
        (folder / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
        yield folder
    finally:
        folder.rmdir()  # the test has waited for the only process in it


@pytest.fixture
def sparse_dataset(tmp_path: Path, write_sparse: Callable[..., Index]) -> Path:
    """Rows that begin with their number, twice as many as fit. They take little room on the disk."""
    path = tmp_path / "out.bin"
    write_sparse(path, ROWS, SHAPE, {row: np.int64(row).tobytes() for row in range(ROWS)})
    with path.open("rb") as file:
        if _is_in_ram(file.fileno()):
            pytest.skip("needs a temporary folder on a disk")
    drop_pages(path)  # those that are in RAM already would not count for the group
    return path


@pytest.mark.slow
def test_held_rows_leave_room_in_a_container(group: Path, sparse_dataset: Path) -> None:
    command = [sys.executable, __file__, str(group), str(sparse_dataset)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["available"] <= LIMIT_BYTES
    assert found["budget"] <= LIMIT_BYTES / 2
    for size, problem in zip(found["held"], found["problems"], strict=True):
        assert LIMIT_BYTES / 8 < size <= LIMIT_BYTES * 3 / 4  # a quarter is left
        assert problem.startswith(f"No more rows are held in RAM than {size_text(size)}: ")
    assert found["rows_that_stay"] < ROWS


def main(group: Path, path: Path) -> None:
    """Hold rows, then read all of them while they are held, and print what was found."""
    (group / "cgroup.procs").write_text(str(os.getpid()))
    _lock_instead_of_registering()
    found: dict[str, Any] = {"available": available_memory(), "held": [], "problems": []}
    found["budget"] = MemoryLimits(cache=10**15).in_ram("disk").size
    dataset, kept = MemmapDataset(path), []
    shards, plan = dataset.shards, plan_for_rows(dataset.shards, np.arange(ROWS))
    for _ in range(3):  # several Loaders that would hold all rows, as those of "dma" do
        (claim,) = claim_all([(shards, plan)], math.inf)
        rows = HeldRows(shards, claim, torch.device("cpu"), Mock())  # nobody waits for rows
        rows._thread.join(30)
        kept.append((claim, rows))
        found["held"].append(registered.registered_bytes())
        found["problems"].append(rows.problem)
    loader = Loader(dataset, 64, shuffle=True, device="cpu", num_threads=2)
    for _ in range(2):
        for images, labels in loader:
            first = images.flatten(1)[:, :8].contiguous().view(torch.int64)[:, 0]
            assert torch.equal(first, labels)
    found["rows_that_stay"] = loader.feed.counts.rows_held
    print(json.dumps(found))


def _lock_instead_of_registering() -> None:
    """Lock pages as CUDA does, in small windows."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mlock.argtypes = libc.munlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)

    def lock(address: int, size: int, flags: int) -> None:
        if libc.mlock(address, size):
            raise FeedError(os.strerror(ctypes.get_errno()))

    changes: dict[Any, dict[str, Any]] = {
        registered: {"register": lock, "unregister": lambda address: None},
        torch.cuda: {"device": lambda device: contextlib.nullcontext()},
        windows: {"WINDOW_BYTES": 8 << 20},
        gathered: {"WINDOW_BYTES": 8 << 20},
    }
    for module, values in changes.items():
        for name, value in values.items():
            setattr(module, name, value)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
