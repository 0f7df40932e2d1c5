"""Small data sets to test on, and a check on every test that it leaves nothing behind."""

import gc
import multiprocessing
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import memload

CLASSES = ("ant", "bee", "cat")


def picture(seed: int, width: int = 40, height: int = 30) -> Image.Image:
    """A smooth random RGB picture: what JPEG keeps well, and each seed another."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (4, 5, 3), np.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twelve JPEGs of different sizes in three class folders."""
    root = tmp_path / "images"
    for number in range(12):
        path = root / CLASSES[number % 3] / f"{number:02d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(number, 40 + 3 * number, 30 + 5 * (number % 4)).save(path, quality=90)
    return root


@pytest.fixture
def output(folder: Path, tmp_path: Path) -> Path:
    """The folder's pictures, built at 16×16."""
    path = tmp_path / "out.bin"
    memload.build(folder, path, size=16, num_workers=0)
    return path


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves a thread, a child process or an open file."""
    descriptors, threads = _descriptors(), set(threading.enumerate())
    yield
    left = {thread for thread in threading.enumerate() if thread not in threads and thread.is_alive()}
    assert not left, f"threads left behind: {left}"
    assert not multiprocessing.active_children()
    grown = _descriptors() - descriptors
    # a map that a failed assertion's traceback holds is no leak; those of a passing test are gone by now
    assert not grown, f"files left open: {[_target(d) for d in grown]}"


def _descriptors() -> set[Path]:
    """Return the entries of /proc/self/fd that are files on a disk."""
    gc.collect()
    listing = Path("/proc/self/fd")
    if not listing.exists():
        return set()
    return {entry for entry in listing.iterdir() if _target(entry).startswith("/") and Path(_target(entry)).is_file()}


def _target(descriptor: Path) -> str:
    try:
        return str(descriptor.readlink())
    except OSError:  # closed meanwhile
        return ""
