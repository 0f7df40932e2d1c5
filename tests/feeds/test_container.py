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
from pathlib import Path

import numpy as np
import pytest
import torch

from memload import FeedError, Loader, MemmapDataset
from memload.feeds import held
from memload.feeds.feed import SampleArray
from memload.feeds.held import Filler, plan_files, ram_budget
from memload.machine import available_memory
from tests.feeds.page_cache import drop_pages, look_for_pages

MOUNT = Path("/sys/fs/cgroup/memory")
LIMIT_BYTES = 256 << 20
SHAPE = (256, 256, 1)
ROW_BYTES = math.prod(SHAPE)
ROWS = 2 * LIMIT_BYTES // ROW_BYTES


@pytest.fixture
def group():
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
def sparse_dataset(tmp_path, write_sparse):
    """Rows that begin with their number, twice as many as fit. They take little room on the disk."""
    path = tmp_path / "out.bin"
    write_sparse(path, ROWS, SHAPE, {row: np.int64(row).tobytes() for row in range(ROWS)})
    drop_pages(path)  # those that are in RAM already would not count for the group
    if any(look_for_pages(path)):
        pytest.skip("needs a temporary folder on a disk")
    return path


@pytest.mark.slow
def test_held_rows_leave_room_in_a_container(group, sparse_dataset):
    command = [sys.executable, __file__, str(group), str(sparse_dataset)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["available"] <= LIMIT_BYTES
    assert found["budget"] <= LIMIT_BYTES / 2
    for size, problem in zip(found["held"], found["problems"], strict=True):
        assert LIMIT_BYTES / 8 < size <= LIMIT_BYTES * 3 / 4  # a quarter is left
        assert problem.startswith("No more rows are held in RAM, ")


def main(group, path):
    """Hold rows, then read all of them while they are held, and print what was found."""
    (group / "cgroup.procs").write_text(str(os.getpid()))
    _lock_instead_of_registering()
    found = {"available": available_memory(), "held": [], "problems": []}
    found["budget"] = ram_budget(10**15)
    dataset, kept = MemmapDataset(path), []
    arrays = [SampleArray(dataset.shards, dataset.index.row)]
    for _ in range(3):  # several Loaders that would hold all rows
        (files,) = plan_files(arrays, math.inf, torch.device("cpu"))
        for file in files:
            file.planned = file.size
        filler = Filler(files, torch.device("cpu"), lambda: False)
        filler._thread.join()
        kept.append((files, filler))
        found["held"].append(files[0].held)
        found["problems"].append(filler.problem)
    for _ in range(2):
        for images, labels in Loader(dataset, 64, shuffle=True, device="cpu", num_threads=2):
            first = images.flatten(1)[:, :8].contiguous().view(torch.int64)[:, 0]
            assert torch.equal(first, labels)
    print(json.dumps(found))


def _lock_instead_of_registering():
    """Lock pages as CUDA does, in small windows."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mlock.argtypes = libc.munlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)

    def lock(address, size):
        if libc.mlock(address, size):
            raise FeedError(os.strerror(ctypes.get_errno()))

    held.register, held.unregister = lock, lambda address: None
    held.WINDOW_BYTES = 8 << 20
    torch.cuda.device = lambda device: contextlib.nullcontext()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
