"""What the tests of building share."""

import csv
import hashlib
import os
import traceback

import numpy as np
import pytest
from PIL import Image

import memload


@pytest.fixture
def jpeg4py():
    """The module jpeg4py. Skips the test where it or its library is not installed."""
    module = pytest.importorskip("jpeg4py", reason="jpeg4py is not installed")
    try:
        module.initialize()
    except OSError as error:
        pytest.skip(f"jpeg4py finds no libturbojpeg: {error}")
    return module


@pytest.fixture
def ledger(tmp_path):
    """A function that returns path and reason of the samples that a build has rejected."""

    def read(output=tmp_path / "out.bin"):
        path = output.with_suffix(".rejects.csv")
        if not path.exists():
            return {}
        with path.open(newline="", encoding="utf-8", errors="surrogateescape") as file:
            header, *lines = csv.reader(file)
        assert header == ["path", "reason"]
        return dict(lines)

    return read


class Drill:
    """A folder of pictures, three of which are damaged, and what is done to builds of it."""

    def __init__(self, root, count=20):
        self.root, self.source = root, root / "images"
        rng = np.random.default_rng(0)
        for name in ("ant", "bee", "cat"):
            (self.source / name).mkdir(parents=True)
            for number in range(count):
                picture = Image.fromarray(rng.integers(0, 255, (20, 30, 3), np.uint8))
                picture.save(self.source / name / f"{number:03}.jpg")
        for name in ("ant/007.jpg", "bee/013.jpg", "cat/019.jpg"):
            (self.source / name).write_bytes(b"no image")

    def build(self, place, **options):
        """Build at 8×8, in five shards of twelve rows."""
        options = {"size": 8, "num_workers": 0, "progress": False} | options
        options = {"shard_size": 4096 + 12 * 8 * 8 * 3} | options
        return memload.build(self.source, place / "out.bin", **options)

    @staticmethod
    def files(folder):
        """Return the checksum of each file of a data set."""
        return {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(folder.glob("out*"))
            if path.is_file()
        }

    @staticmethod
    def fork(function):
        """Call a function in a process of its own, with a group of its own, and return its number."""
        pid = os.fork()
        if pid:
            return pid
        status = 1
        try:
            os.setpgid(0, 0)
            function()
            status = 0
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
        finally:
            os._exit(status)


@pytest.fixture
def drill(tmp_path):
    return Drill(tmp_path)


@pytest.fixture
def expected(drill, tmp_path):
    """The files of an undisturbed build."""
    (tmp_path / "expected").mkdir()
    drill.build(tmp_path / "expected")
    return drill.files(tmp_path / "expected")


@pytest.fixture
def place(tmp_path):
    """A folder for an output."""
    path = tmp_path / "place"
    path.mkdir()
    return path


@pytest.fixture
def nothing_is_flushed(monkeypatch):
    """For tests that kill processes, but not the machine. To flush takes as long as to build."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
