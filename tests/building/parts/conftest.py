"""Generated pictures, and what the tests of builds in parts compare."""

import hashlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

#: The bytes of a stored row of 8×8 pixels.
ROW = 8 * 8 * 3


def write_pictures(folder: Path, count: int, classes: int = 3) -> Path:
    """Write small JPEGs of different sizes into folders of classes, and return the folder."""
    for number in range(count):
        rng = np.random.default_rng(number)
        small = Image.fromarray(rng.integers(0, 256, (4, 5, 3), np.uint8))
        picture = small.resize((16 + number % 9, 12 + number % 7), Image.Resampling.BICUBIC)
        path = folder / f"class{number % classes}" / f"{number:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.save(path, quality=90)
    return folder


@pytest.fixture(scope="session")
def thousand_pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1,000 JPEGs in three classes. Do not change them."""
    return write_pictures(tmp_path_factory.mktemp("thousand") / "pics", 1_000)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Forty JPEGs in three classes, which a test may change."""
    return write_pictures(tmp_path / "pics", 40)


@pytest.fixture(scope="session")
def make_pictures() -> Callable[..., Path]:
    """The function ``write_pictures(folder, count, classes=3)``."""
    return write_pictures


@pytest.fixture(scope="session")
def shard_bytes() -> Callable[[int], int]:
    """A function that returns the ``shard_size`` of so many rows of 8×8 pixels (``size=8``)."""
    return lambda rows: 4096 + rows * ROW


@pytest.fixture(scope="session")
def digests() -> Callable[[Path], dict[str, str]]:
    """A function that returns the SHA-256 of each file of a data set: shards, index, ledger."""

    def read(output: Path) -> dict[str, str]:
        # The temporary folder, which is gone if the build is complete, has the same beginning.
        paths = sorted(output.parent.glob(f"{output.stem}*"))
        assert all(path.is_file() for path in paths), f"{output} is not complete: {paths}"
        assert output.with_suffix(".idx") in paths
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}

    return read


@pytest.fixture
def start() -> Callable[..., "subprocess.Popen[str]"]:
    """A function that starts ``memload`` with arguments, as on another machine. Its output is piped.

    Use it as a context manager, or call ``communicate()``.
    """

    def run(*arguments: object, **options: Any) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "memload", *map(str, arguments)]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
        )

    return run
