"""Small data sets to test on, and a check on every test that it leaves nothing behind."""

import gc
import hashlib
import json
import multiprocessing
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from PIL import Image

import memload
from memload.format import npy_header, shard_names
from memload.index import Array, Index, Shard
from memload.keys import Keys

CLASSES = ("ant", "bee", "cat")
#: Threads that torch.compile starts and keeps; none of memload's is named so.
TORCHS_OWN = ("InductorSubproc", "subproc_worker_timer", "ThreadPoolExecutor-")


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


@pytest.fixture
def make_dataset(tmp_path: Path) -> Callable[..., Index]:
    """A function that writes a data set without a build: random pixels by NumPy alone, and their index.

    ``facts`` replace what the index says; keys, labels and rows are those of one sample a row.
    """

    def make(
        name: str = "made.bin",
        *,
        rows: Sequence[int] = (5,),
        shape: tuple[int, int, int] = (4, 6, 3),
        descr: str = "|u1",
        seed: int = 0,
        **facts: Any,
    ) -> Index:
        total = sum(rows)
        values = np.random.default_rng(seed).integers(0, 256, (total, *shape))
        pixels = values.astype(np.uint8 if descr == "|u1" else descr)
        shards = []
        for file, part in zip(shard_names(name, len(rows)), np.split(pixels, np.cumsum(rows)[:-1]), strict=True):
            with (tmp_path / file).open("wb") as shard:
                shard.write(npy_header(descr, part.shape) + part.tobytes())
            shards.append(Shard(file, len(part), 4096 + part.nbytes))
        index = Index(
            path=tmp_path / name,
            arrays=(Array("image", descr, shape, tuple(shards)),),
            row=np.arange(total),
            flags=np.zeros(total, np.uint8),
            keys=Keys.of([f"{CLASSES[row % 3]}/{row}.jpg" for row in range(total)]),
            columns={"label": np.arange(total) % 3},
            crc32={"image": np.array([zlib.crc32(row.tobytes()) for row in pixels], np.uint32)},
            classes=CLASSES,
        )
        return replace(index, **facts).write((tmp_path / name).with_suffix(".idx"))

    return make


@pytest.fixture
def tamper() -> Callable[..., Path]:
    """A function that rewrites an index with other metadata and tensors, whose fingerprint is right again.

    ``change(metadata, tensors)`` works on both in place; ``relist`` says whether the metadata's lists of columns,
    tensors and checksums follow.
    """

    def rewrite(path: Path, change: Callable[[Any, dict[str, np.ndarray]], object], relist: bool = True) -> Path:
        with safetensors.safe_open(path, framework="np") as file:
            metadata = json.loads(file.metadata()["memload"])
        tensors = safetensors.numpy.load_file(path)
        order = list(metadata["columns"])
        change(metadata, tensors)
        if relist and metadata.get("columns") == order:
            ours = {"row", "flags", "key/offsets", "key/bytes", "crc32/image"}
            kept = [name for name in order if name in tensors]
            metadata["columns"] = kept + sorted(tensors.keys() - ours - set(order))
        if relist:
            metadata["tensors"] = {
                name: {
                    "dtype": tensor.dtype.str,
                    "shape": list(tensor.shape),
                    "crc32": zlib.crc32(tensor.tobytes()),
                }
                for name, tensor in tensors.items()
            }
        metadata.pop("fingerprint", None)
        text = json.dumps(metadata, sort_keys=True, separators=(",", ":"))
        metadata["fingerprint"] = hashlib.sha256(text.encode()).hexdigest()
        path.write_bytes(safetensors.numpy.save(tensors, {"memload": json.dumps(metadata)}))
        return path

    return rewrite


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves a thread, a child process or an open file."""
    descriptors, threads = _descriptors(), set(threading.enumerate())
    yield
    left = {
        thread
        for thread in threading.enumerate()
        if thread not in threads and thread.is_alive() and not thread.name.startswith(TORCHS_OWN)
    }
    assert not left, f"threads left behind: {left}"
    assert not multiprocessing.active_children()
    grown = _descriptors() - descriptors
    if grown:  # only then, since a collection with torch loaded takes longer than most tests
        gc.collect()
        grown = _descriptors() - descriptors
    # a map that a failed assertion's traceback holds is no leak; those of a passing test are gone by now
    assert not grown, f"files left open: {[_target(d) for d in grown]}"


def _descriptors() -> set[Path]:
    """Return the entries of /proc/self/fd that are files on a disk."""
    listing = Path("/proc/self/fd")
    if not listing.exists():
        return set()
    return {entry for entry in listing.iterdir() if _target(entry).startswith("/") and Path(_target(entry)).is_file()}


def _target(descriptor: Path) -> str:
    try:
        return str(descriptor.readlink())
    except OSError:  # closed meanwhile
        return ""
